"""Runs in this process, a world of one: what the options of a YAML do, and what they leave as it
is."""

import json
import re
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import meshtrain.run.results
from meshtrain.config import Config
from meshtrain.data import Batch
from meshtrain.evaluate import Evaluation, evaluate
from meshtrain.job.environment import Environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import join
from meshtrain.job.watchdog.watchdog import Watchdog
from meshtrain.metrics.logger import read
from meshtrain.parallel.compile import CACHE
from meshtrain.run.phase_monitor import COLLECT_EVERY, PhaseMonitor
from meshtrain.train import run
from tests.comparing import ALONE, CPU
from tests.launching import forked
from tests.parity.experiments import QUICKSTART, SMALL, write_ragged


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshtrain.run.results, "plot_loss", lambda *_: "no picture is drawn")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


def train(shared: Path, folder: Path, *overrides: str) -> list[dict]:
    """Trains and reads the rows; without a GPU, because these are about the CPU's path."""
    keys = [*SMALL, f"data.cache={shared / 'cache'}", *overrides, f"train.output={folder}"]
    loaded = Config.load(QUICKSTART, keys, world_size=1, for_training=True)
    job = join(Environment("none", 0, 1, 0, "here", None))
    job.device = CPU
    with job_exit(job):
        run(loaded, job)
    return read(folder / "metrics.jsonl")


def losses(rows: list[dict]) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in rows]


@pytest.fixture(scope="module")
def reference(shared: Path) -> list[dict]:
    return train(shared, shared / "reference", "train.steps=6")


@pytest.mark.parametrize(
    "keys",
    [
        ("parallel.recompute=full",),
        ("parallel.recompute=selective",),
        ("train.deterministic=true", "data.workers=2"),
    ],
    ids=" ".join,
)
def test_what_changes_no_bit(
    keys: tuple[str, ...], shared: Path, tmp_path: Path, reference: list[dict]
) -> None:
    rows = train(shared, tmp_path, "train.steps=6", *keys)
    torch.use_deterministic_algorithms(False)
    assert losses(rows) == losses(reference)
    assert [row["samples_digest"] for row in rows] == [row["samples_digest"] for row in reference]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_sixteen_bits_stay_near(
    precision: str, recompute: str, shared: Path, tmp_path: Path, reference: list[dict]
) -> None:
    keys = (f"train.precision={precision}", f"parallel.recompute={recompute}")
    rows = train(shared, tmp_path, "train.steps=6", *keys)
    for row, expected in zip(rows, reference, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=2e-2)
    assert losses(rows) != losses(reference), "they do compute in 16 bits"


@pytest.mark.slow
def test_compiling_stays_within_rounding(
    shared: Path,
    tmp_path: Path,
    reference: list[dict],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # where code of an earlier run of the tests may be
    monkeypatch.setenv(CACHE, default_cache_dir())
    rows = train(
        shared, tmp_path, "train.steps=6", "parallel.compile=true", "parallel.recompute=selective"
    )
    for values, expected in zip(losses(rows), losses(reference), strict=True):
        assert values == pytest.approx(expected, rel=1e-5)
    assert rows[0]["wall_compile_s"] > 0
    assert "step 1: compiled 2 graphs in " in capsys.readouterr().out, (
        "that of the layers, and that of the loss"
    )


def test_another_seed_is_another_run(shared: Path, tmp_path: Path, reference: list[dict]) -> None:
    (row,) = train(shared, tmp_path, "train.steps=1", "train.seed=1")
    assert row["loss"] != reference[0]["loss"]
    assert row["samples_digest"] != reference[0]["samples_digest"]


def test_epochs(
    shared: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two epochs of a small text: a line at the end of each, an evaluation each, a new order in the
    second. Until the first evaluation is done, and not only its batches are read, it may
    compile."""
    watchdogs: list[Watchdog] = []
    warm: list[bool] = []

    def read_ahead(model: nn.Module, batches: Iterable[Batch], *more: Any) -> Evaluation:
        evaluation = evaluate(model, list(batches), *more)
        warm.append("evaluation" in watchdogs[0].deadlines.warm_phases)
        return evaluation

    monkeypatch.setattr("meshtrain.train.evaluate", read_ahead)
    monkeypatch.setattr(
        "meshtrain.train.Watchdog", lambda job: watchdogs.append(Watchdog(job)) or watchdogs[-1]
    )
    ragged = write_ragged(shared / "ragged.jsonl")
    data = ("data.source=jsonl", f"data.path={ragged}", "data.validation=0.2")
    rows = train(
        shared, tmp_path, *data, "train.steps=null", "train.epochs=2", "train.eval_every=epoch"
    )
    printed = capsys.readouterr().out
    assert re.search(r"^epoch 1  loss \d\.\d{4}$", printed, re.MULTILINE), printed
    assert re.search(r"^epoch 2  loss \d\.\d{4}$", printed, re.MULTILINE)
    ends = [row["step"] for row in rows if "eval_loss" in row]
    assert len(ends) == 2
    assert rows[-1]["step"] == ends[-1]
    assert [row["epoch"] for row in rows] == sorted(row["epoch"] for row in rows)
    assert {row["epoch"] for row in rows} == {1, 2}, (
        "also in the last step, which is filled from a third"
    )
    assert warm == [False, True]
    assert rows[0]["samples_digest"] != rows[ends[0]]["samples_digest"]


def test_a_run_in_the_home_folder(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    literal = Path("~").exists()
    with pytest.raises(FileNotFoundError, match="~/run"):  # which this test opens as it is written
        train(shared, Path("~/run"), "train.steps=1", "checkpoint.every=0")
    assert len(read(tmp_path / "run" / "metrics.jsonl")) == 1
    assert Path("~").exists() == literal


@pytest.mark.slow
def test_digits_are_learned_and_four_processes_agree(tmp_path: Path) -> None:
    """The acceptance of the image path: above 95 % on held-out digits, and within a point of it on
    4 processes."""
    command = ("-m", "meshtrain.train", "configs/digits.yaml")
    alone = forked(1, *command, f"train.output={tmp_path}/one").check()
    forked(4, *command, f"train.output={tmp_path}/four", "data.workers=0").check()
    of_one, of_four = (
        read(tmp_path / name / "metrics.jsonl")[-1]["accuracy"] for name in ("one", "four")
    )
    assert of_one > 0.95
    assert abs(of_one - of_four) <= 0.01
    assert re.search(r"^epoch 1  loss \d\.\d{4}  accuracy \d\d\.\d\d %$", alone.out, re.MULTILINE)
    assert json.loads((tmp_path / "one/exit.json").read_text())["status"] == "done"


def test_cycles_that_outlive_a_collection_are_collected_later() -> None:
    class Node:
        itself: "Node"

    def nothing(*_: object) -> None: ...

    def step(number: int) -> None:
        with monitor.step(number):
            pass

    names = (
        "step",
        "close",
        "enter_phase",
        "at_step",
        "restart",
        "begin",
        "adapt_deadline",
        "begin_step",
    )
    deadlines = SimpleNamespace(compiles=False)
    silent = SimpleNamespace(**dict.fromkeys(names, nothing), finished_step=0, deadlines=deadlines)
    silent.probe = silent
    with PhaseMonitor(*[silent] * 8) as monitor:  # type: ignore[arg-type]
        node = Node()
        node.itself, reference = node, weakref.ref(node)
        step(COLLECT_EVERY)
        del node
        step(COLLECT_EVERY + 1)
        assert reference() is not None, "in between nothing is collected"
        step(2 * COLLECT_EVERY)
        assert reference() is None


def test_an_evaluation_reads_a_batch_when_the_one_before_is_done() -> None:
    """Each has a deadline of its own, and memory of its own."""
    order, model = [], nn.Linear(3, 2)
    batches = (
        order.append("read") or Batch.of((torch.randn(4, 3),), torch.tensor([0, 1, 0, 1]))
        for _ in range(3)
    )
    model.register_forward_hook(lambda *_: order.append("computed"))
    evaluate(model, batches, ALONE, CPU, torch.float32)
    assert order == ["read", "computed"] * 3


@pytest.mark.parametrize("coefficient", [0.01, 1e300])
def test_a_skipped_step_leaves_what_routers_count(
    coefficient: float, shared: Path, tmp_path: Path
) -> None:
    """A term as large as that makes a gradient whose norm is no number."""
    router = (
        "model.name=tests/models/moe.py",
        "model.score=sigmoid",
        f"model.router_z_loss_coef={coefficient}",
    )
    rows = train(
        shared,
        tmp_path,
        *router,
        "train.steps=1",
        "train.precision=float64",
        "train.on_nonfinite=skip",
    )
    tensors = load_file(tmp_path / "checkpoints/step_0000001/rank_00000.safetensors")
    gate = "model.model.layers.1.mlp.gate"
    happened = coefficient < 1
    assert (rows[0]["grad_norm"] is not None) == happened
    assert tensors[f"{gate}.balance.loads"].sum() == (14 * 48 * 2 if happened else 0)
    assert tensors[f"{gate}.e_score_correction_bias"].any() == happened
