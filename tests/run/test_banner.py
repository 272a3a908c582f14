"""What rank 0 says before the first step, of choices that the device makes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from meshtrain.checkpoint.run_spec import RunSpec
from meshtrain.config import Config
from meshtrain.layout import Layout
from meshtrain.run import setup
from tests.parity.experiments import MODELS, QUICKSTART


def banner(tmp_path: Path, device: str, *keys: str) -> list[str]:
    keys = ("parallel.compile=false", *keys)
    spec = RunSpec(Config.load(QUICKSTART, keys, world_size=1), tmp_path, tmp_path, {}, {}, 3)
    data: Any = SimpleNamespace(about=[], validation=None, train=SimpleNamespace(loss_targets=dict))
    job: Any = SimpleNamespace(
        layout=Layout.resolve({}, 1).on_hosts([1]),
        device=torch.device(device),
        device_name=lambda: "a GPU",
        meeting_point=lambda: "alone",
    )
    return list(setup.banner_lines(spec, job, data, None, nn.Identity()))


def test_a_torch_that_was_not_tested_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [line for line in banner(tmp_path, "cpu") if "was not tested" in line]
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    (line,) = [line for line in banner(tmp_path, "cpu") if "was not tested" in line]
    assert line.startswith("warning: torch 9.9.0 ")


def test_how_documents_are_kept_apart_is_said_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "has_varlen", lambda device, dtype: dtype == torch.bfloat16)
    prefix = "attention within documents "
    table = Path(__file__).with_name("banners.yaml").read_text().replace("MODELS", str(MODELS))
    for case in yaml.safe_load(table):
        lines = banner(tmp_path, case["device"], "data.mask_documents=true", *case["keys"])
        assert [line.removeprefix(prefix) for line in lines if line.startswith(prefix)] == case[
            "lines"
        ], case
