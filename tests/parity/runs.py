"""Runs of whole configs inside of a test of ranks, and of the same config in one process.

    torchrun ... -m tests.parity.runs CELLS.json        [[config, [override, ...], unit size], ...]

trains one run after another in one job.
"""

import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshtrain.modeling.build
import meshtrain.run.results
import meshtrain.run.step_logger
import meshtrain.train
from meshtrain.config import Config
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import Job, join
from meshtrain.metrics.logger import read
from meshtrain.modeling.flops import block_flops
from meshtrain.optim import host_states
from meshtrain.parallel import activation_offload, fsdp, linear_cross_entropy
from tests.parity.cells import assert_same, small
from tests.parity.experiments import Experiment
from tests.ranks import made_once

_counted: dict[tuple, tuple[list[float], str]] = {}


def _counted_once(
    model: nn.Module, blocks: Sequence[nn.Module], inputs: tuple[Tensor | None, ...]
) -> tuple:
    """`block_flops`, cached by the model's text, which has the sizes of all its weights."""
    key = (str(model), *(None if value is None else value.shape for value in inputs))
    if key not in _counted:
        _counted[key] = block_flops(model, blocks, inputs)
    return _counted[key]


@contextmanager
def shortened(unit_size: int, device: str = "cpu") -> Iterator[None]:
    """FSDP merges blocks below `unit_size`; with 0 it gathers each block separately, also of models
    as small as these. What they save is offloaded however small, and their states in several
    buckets.

    What a run does only once because it takes long costs more than all steps of a test's model.
    Nothing that is compared depends on it, and other tests cover it: the picture and the FLOP count
    are left out, the costs of a model's blocks are counted once, compiled blocks are graphs without
    generated code (on GPUs with it), and the loss is computed in chunks although it is small."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(meshtrain.modeling.build, "block_flops", _counted_once)
        monkeypatch.setattr(
            meshtrain.run.step_logger, "sample_flops", lambda *_: (None, "FLOPs are not counted")
        )
        monkeypatch.setattr(
            meshtrain.run.step_logger, "peak_flops", lambda *_: (1.0, "a peak of 1 FLOP/s")
        )
        monkeypatch.setattr(meshtrain.run.results, "plot_loss", lambda *_: "no picture is drawn")
        monkeypatch.setattr(linear_cross_entropy, "CHUNK_TOKENS", 50)
        monkeypatch.setattr(linear_cross_entropy, "CHUNK_LOGITS", 0)
        monkeypatch.setattr(fsdp, "MIN_UNIT_SIZE", unit_size)
        monkeypatch.setattr(activation_offload, "LEAST", 0)
        monkeypatch.setattr(host_states, "BUCKET", 2**15)
        if device == "cpu":
            monkeypatch.setattr(
                torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition")
            )
        yield


def assert_parity(
    job: Job, experiment: Experiment, overrides: Sequence[str], folder: Path, session_path: Path
) -> None:
    """Asserts that the experiment with `overrides`, in this job, is what it is in one process: the
    curve, what learns, the number of parameters; and that what is sent has its name."""
    expected = train_alone(job, experiment, session_path)
    run = train_here(job, experiment, overrides, folder)
    assert_same(run.rows, expected.rows, experiment.tolerance)
    assert run.rows[-1]["loss"] < experiment.falls_to * run.rows[0]["loss"], (
        "the parity of runs that learn nothing"
    )
    if job.rank == 0:
        assert run.parameters == expected.parameters, "weights that stages share are counted once"
    sent = {
        name for name, value in run.rows[-1].items() if name.startswith("sent_bytes_") and value > 0
    }
    layout = next(key for key in overrides if key.startswith("layout="))
    if "cp:" in layout and "pp:" not in layout:  # of a pipeline, a rank may have no attention
        assert {"sent_bytes_cp", "sent_bytes_fsdp"} <= sent
        assert "sent_bytes_dp_shard" not in sent, (
            "parameters are sent over fsdp, all ranks that shard them"
        )


@dataclass(frozen=True)
class Run:
    """A run: the rows of its metrics, and the line about its model's parameters, which rank 0
    prints."""

    rows: list[dict]
    parameters: str


def train_here(job: Job, experiment: Experiment, overrides: Sequence[str], folder: Path) -> Run:
    """Trains in this job."""
    keys = (*experiment.overrides, *overrides, f"train.output={folder}")
    printed = io.StringIO()
    with shortened(small(experiment)), redirect_stdout(printed):
        config = Config.load(experiment.config, keys, world_size=job.world_size, for_training=True)
        meshtrain.train.run(config, job)
    if job.store is not None:
        dist.barrier()
    line = re.search(r"^model \S+: [\d,]+ parameters.*$", printed.getvalue(), re.MULTILINE)
    return Run(read(folder / "metrics.jsonl"), line[0] if line else "")


def train_alone(job: Job, experiment: Experiment, session_path: Path) -> Run:
    """The experiment in one process: once per session, by the first rank 0 that needs it, while the
    others wait."""
    name = hashlib.sha256(repr(experiment).encode()).hexdigest()[:16]
    folder = session_path / "alone" / name

    def train(folder: Path) -> None:
        with patch.object(dist, "is_initialized", lambda: False):
            run = train_here(
                join(read_environment({})), experiment, ["layout={dp_shard: 1}"], folder
            )
        (folder / "run.json").write_text(json.dumps(asdict(run)))

    if job.rank == 0:
        made_once(folder, train)
    if job.store is not None:
        dist.barrier()
    return Run(**json.loads((folder / "run.json").read_text()))


def main(cells: str) -> None:
    job = join(read_environment(os.environ))
    with job_exit(job):
        for file, overrides, unit_size in json.loads(Path(cells).read_text()):
            with shortened(unit_size, job.device.type):
                meshtrain.train.run(
                    Config.load(file, overrides, world_size=job.world_size, for_training=True), job
                )


if __name__ == "__main__":
    main(sys.argv[1])
