"""torch.compile in a run: its time is no training, what is compiled anew is said, and a restart
finds all of it."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshtrain.metrics.goodput import GoodputTracker
from meshtrain.run.phase_monitor import CompileTimer
from tests.checkpoint.going_on import small_run
from tests.launching import environment, torchrun

# Its one block is compiled. It writes down what the compiler has found in its cache, and what not,
# until this step.
MODEL = """
import json, os
from dataclasses import dataclass
from pathlib import Path
from torch import nn
from torch._dynamo.utils import counters


@dataclass(frozen=True)
class Config:
    vocab_size: int = 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed, self.block = nn.Embedding(config.vocab_size, 8), Block()
        self.head = nn.Linear(8, config.vocab_size)

    def blocks(self):
        return [self.block]

    def forward(self, tokens, positions, documents):
        start = os.environ["TORCHELASTIC_RESTART_COUNT"]
        Path(__file__).with_name(f"start{start}.json").write_text(json.dumps(counters["inductor"]))
        return self.head(self.block(self.embed(tokens)))
"""


def test_the_time_of_the_compiler_is_no_training() -> None:
    torch.compiler.reset()
    printed = []
    goodput = GoodputTracker(None, 0, 0.0)
    goodput.begin()
    timer = CompileTimer(goodput, printed.append)

    def double(x: Tensor) -> Tensor:
        return (2 * x).sum()

    run = torch.compile(double, backend="aot_eager", dynamic=False)
    for step, length in enumerate((3, 3, 4), start=1):
        before = goodput.summary().seconds
        with timer.phase("step", step):
            run(torch.ones(length, requires_grad=True)).backward()
        after = goodput.summary().seconds
        assert (after["compile"] > before["compile"]) == (step != 2)
        assert after["training"] > before["training"]
    with timer.phase("evaluation"), torch.no_grad():
        run(torch.ones(3))
    run(torch.ones(5))  # outside of any phase nobody is told
    first, second, third = printed
    assert first.startswith("step 1: compiled 1 graph in ")
    assert second.startswith("step 3: compiled 1 graph again in ")
    assert "TORCH_LOGS=recompiles" in second
    assert third.startswith("evaluation: compiled 1 graph in ")


@pytest.mark.cluster
def test_a_restart_within_a_job_compiles_nothing_anew(tmp_path: Path) -> None:
    config = small_run(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    env = environment()
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    chaos = "train.chaos=[{fault: kill, rank: 0, step: 4}]"
    command = (
        "-m",
        "meshtrain.train",
        str(config),
        "parallel.compile=true",
        "checkpoint.every=2",
        chaos,
    )
    torchrun(1, "--max-restarts=1", *command, env=env, timeout=600).check()
    first, second = (
        json.loads((tmp_path / f"start{number}.json").read_text()) for number in range(2)
    )
    assert first["fxgraph_cache_miss"] > 0
    assert "fxgraph_cache_hit" not in first
    assert second["fxgraph_cache_hit"] == first["fxgraph_cache_miss"]
    assert "fxgraph_cache_miss" not in second
