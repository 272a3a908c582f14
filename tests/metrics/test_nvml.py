"""What is made of the driver's answers, and of its silence."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import yaml

from meshtrain.metrics import nvml
from meshtrain.metrics.nvml import UNKNOWN, Gpu, GpuCondition, gpu_condition, host_gpus

# What a question of the library means in the tables.
QUESTIONS = {
    "nvmlDeviceGetIndex": "index",
    "nvmlDeviceGetClockInfo": "clock",
    "nvmlDeviceGetMaxClockInfo": "highest",
    "nvmlDeviceGetTemperature": "heat",
    "nvmlDeviceGetPowerUsage": "milliwatts",
    "nvmlDeviceGetEnforcedPowerLimit": "limit",
    "nvmlDeviceGetCurrentClocksEventReasons": "reasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "old_reasons",
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetMemoryInfo": "memory",
}
UUID = "GPU-77aa"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver that works; its `gpus` are what each of them answers."""
    driver = SimpleNamespace(gpus=[], open=0)

    def enter() -> None:
        driver.open += 1

    def leave() -> None:
        driver.open -= 1

    def handle_of(index: int) -> dict[str, Any]:
        if driver.gpus[index] is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return driver.gpus[index]

    def handle_of_uuid(uuid: str) -> dict[str, Any]:
        for gpu in driver.gpus:
            if gpu["uuid"] == uuid:
                return gpu
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def answers(name: str) -> Any:
        def question(handle: dict[str, Any], *_: int) -> Any:
            if name not in handle:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return handle[name]

        return question

    monkeypatch.setattr(pynvml, "nvmlInit", enter)
    monkeypatch.setattr(pynvml, "nvmlShutdown", leave)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.1")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(driver.gpus))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle_of)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle_of_uuid)
    for question, name in QUESTIONS.items():
        monkeypatch.setattr(pynvml, question, answers(name))
    return driver


def test_the_condition_of_a_gpu(driver: Any) -> None:
    for case in yaml.safe_load(Path(__file__).with_name("gpu_conditions.yaml").read_text()):
        driver.gpus = [case["answers"] | {"uuid": UUID}]
        expected = GpuCondition(case["text"], "held down" in case["text"])
        assert gpu_condition(UUID) == expected
    assert gpu_condition("GPU-of-another-host") == UNKNOWN
    assert driver.open == 0, "the library is left each time"


def test_all_gpus_of_a_host_that_answer_are_listed(driver: Any) -> None:
    memory = SimpleNamespace(total=80 * 2**30, used=2**30)
    whole = {"name": "H100", "uuid": "GPU-1", "memory": memory, "reasons": 0x40}
    reticent = {"name": "GB10", "uuid": "GPU-3"}
    driver.gpus = [whole, None, reticent]
    assert host_gpus() == (
        Gpu(0, "H100", "GPU-1", 80.0, 1.0, "580.1", "heat (hardware)"),
        Gpu(2, "GB10", "GPU-3", 0.0, 0.0, "580.1", ""),
    )


def test_without_a_driver_or_with_one_that_hangs_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert gpu_condition(UUID) == UNKNOWN
    assert host_gpus() == ()

    def slow(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(nvml, "call_with_timeout", slow)
    assert host_gpus() == ()
