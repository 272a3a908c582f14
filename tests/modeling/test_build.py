"""What is looked at before a run begins."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain.config import Config
from meshtrain.data.custom import CustomSamples
from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.modeling import build
from meshtrain.modeling.build import check_start
from meshtrain.pipeline import probe

HOOKED_MODEL = """
from dataclasses import dataclass
from torch import nn

@dataclass(frozen=True)
class Config:
    vocab_size: int = 256

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, 8)
        self.head = nn.Linear(8, config.vocab_size)
        self.head.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))

    def forward(self, tokens, positions, documents):
        return self.head(self.words(tokens))
"""


def test_a_hook_on_a_gradient_wants_the_microbatches_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(HOOKED_MODEL)
    run = tmp_path / "run.yaml"
    run.write_text(
        f"model: {{name: {tmp_path}/model.py}}\n"
        "data: {source: python-stdlib, seq_len: 8}\n"
        "batch: {global_size: 12, micro_size: 2}\n"
        "train: {steps: 1}\n"
    )
    config = Config.load(str(run), [], world_size=1, device="cpu")
    for ranks in (1, 2, 3):
        check_start(config, Layout({"dp_replicate": ranks}))
    told = (
        r"head\.weight has a hook .* 12 is no multiple of batch\.micro_size times the 4 data "
        r"ranks, 8: "
    )
    with pytest.raises(InputError, match=told):
        check_start(config, Layout({"dp_replicate": 4}))
    grows = Config.load(
        str(run), ["batch.global_size=[[0, 6], [1, 12]]"], world_size=1, device="cpu"
    )
    check_start(grows, Layout({"dp_replicate": 3}))
    with pytest.raises(InputError, match="times the 2 data ranks, 4: "):
        check_start(grows, Layout({"dp_replicate": 2}))


def test_a_start_of_a_pipeline_runs_the_whole_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `check_start` has seen of a forward, the stages are cut by."""
    overrides = ("layout={pp: 2}", "batch.micro_size=2", "data.seq_len=8")
    config = Config.load("configs/quickstart.yaml", overrides, world_size=2, device="cpu")
    whole_forwards = 0
    recorded = probe._recorded

    def counted(*arguments: Any) -> Any:
        nonlocal whole_forwards
        whole_forwards += 1
        return recorded(*arguments)

    monkeypatch.setattr(probe, "_recorded", counted)
    tokens = torch.zeros(8, dtype=torch.int64)
    check_start(config, config.resolved, CustomSamples("zeros", [(tokens, tokens)], None))
    build.outline_of_model(config)
    assert whole_forwards == 1
