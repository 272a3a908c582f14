"""What rank 0 says before the first step, of choices that the device makes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshtrain.checkpoint.resume import RunSpec
from meshtrain.config import Config
from meshtrain.layout import Layout
from meshtrain.run import setup
from tests.parity.experiments import MODELS, QUICKSTART


@pytest.mark.parametrize(
    ("device", "overrides", "said"),
    [
        ("cuda", ("train.precision=bfloat16",), ["by their lengths"]),
        ("cuda", (), ["by a mask of all pairs of tokens"]),  # float32
        ("cuda", ("train.precision=bfloat16", f"model.name={MODELS}/mixing.py"), ["by a mask of all pairs of tokens"]),
        ("cuda", ("train.precision=bfloat16", "data.mask_documents=false"), []),
        ("cpu", ("train.precision=bfloat16",), []),
    ],
)
def test_how_documents_are_kept_apart_is_said_on_gpus(
    device: str, overrides: tuple[str, ...], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "has_varlen", lambda device, dtype: dtype == torch.bfloat16)
    config = Config.load(QUICKSTART, ["data.mask_documents=true", "parallel.compile=false", *overrides], world_size=1)
    job: Any = SimpleNamespace(
        layout=Layout.resolve({}, 1).on_hosts([1]),
        device=torch.device(device),
        device_name=lambda: "a GPU",
        meeting_point=lambda: "alone",
    )
    data: Any = SimpleNamespace(about=[], validation=None)
    lines = setup.banner_lines(RunSpec(config, tmp_path, tmp_path, {}, {}, 3), job, data, None, nn.Identity())
    prefix = "attention within documents "
    assert [line.removeprefix(prefix) for line in lines if line.startswith(prefix)] == said
