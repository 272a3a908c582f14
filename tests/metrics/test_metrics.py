"""metrics.jsonl holds each step once, whatever happens to its writer."""

import json
import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshtrain.errors import InputError
from meshtrain.metrics import logger as metrics
from meshtrain.metrics.logger import Metrics, MetricsFile, read
from meshtrain.metrics.sink_threads import SinkThreads
from meshtrain.metrics.sinks import SinkRun, TensorBoard
from tests.properties import given, st


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1 / 3 + step, "samples_digest": "00ff"} | more


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def written(path: Path, steps: int) -> MetricsFile:
    file = MetricsFile(path)
    for step in range(1, steps + 1):
        file.row(row(step))
        if step % 2 == 0:
            file.amend(step, {"eval_loss": step / 7, "perplexity": math.exp(step / 7)})
    return file


def expected(steps: int) -> list[dict[str, Any]]:
    return [
        row(step) | ({} if step % 2 else {"eval_loss": step / 7, "perplexity": math.exp(step / 7)})
        for step in range(1, steps + 1)
    ]


def test_every_row_is_on_disk_at_once_and_exact(path: Path) -> None:
    file = MetricsFile(path)
    for step in range(1, 5):
        file.row(row(step))
        assert read(path)[-1] == row(step)
        for loss in (0.1 + 0.2, 1.0):  # done again, and shorter than what stood there
            file.amend(step, {"eval_loss": loss})
            assert read(str(path))[-1] == row(step, eval_loss=loss)
    assert [each["step"] for each in read(path)] == [1, 2, 3, 4]


@given(st.floats())
def test_floats_keep_their_bits_and_what_is_not_finite_is_null(
    tmp_path_factory: pytest.TempPathFactory, x: float
) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    file = MetricsFile(path)
    file.row({"step": 1, "loss": x})
    file.amend(1, {"eval_loss": x})
    (line,) = path.read_text().splitlines()
    strict = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    wanted = x if math.isfinite(x) else None
    assert strict == {"step": 1, "loss": wanted, "eval_loss": wanted}


def test_a_writer_killed_at_any_byte(path: Path) -> None:
    written(path, 4).close()
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        lines = whole[:length].count(b"\n")
        assert read(path) == expected(4)[:lines]
        file = MetricsFile(path)
        for each in expected(4)[lines:]:
            file.row(each)
        file.close()
        assert read(path) == expected(4)


@pytest.mark.parametrize("step", range(7))
def test_a_resume_drops_the_rows_after_its_step(path: Path, step: int) -> None:
    written(path, 5).close()
    file = MetricsFile(path)
    file.drop_after(step)
    rows = expected(5)[:step]
    assert read(path) == rows
    if rows:  # an evaluation finds its row
        file.amend(min(step, 5), {"eval_loss": 9.0})
        rows[-1] |= {"eval_loss": 9.0}
    for each in expected(6)[len(rows) :]:
        file.row(each)
    assert read(path) == rows + expected(6)[len(rows) :]


def test_each_step_stands_there_once(path: Path) -> None:
    file = written(path, 3)
    with pytest.raises(ValueError, match="step 3 already; step 3"):
        file.row(row(3))
    with pytest.raises(ValueError, match="step 3"):
        file.amend(2, {"eval_loss": 1.0})
    file.drop_after(0)
    with pytest.raises(ValueError, match="nothing can be added"):
        file.amend(0, {"eval_loss": 1.0})
    assert read(path) == []


@pytest.mark.parametrize(
    ("line", "number", "rest"),
    [
        (b"nonsense\n", 3, [4]),
        (b"[1, 2]\n", 3, [4]),
        (b'{"loss": 1}\n', 3, [4]),
        (b'{"step": "3"}\n', 3, [4]),
        (b"\n", 3, [4]),
        (b"\0" * 4096, 3, []),  # what a power failure leaves
        (b'\0\0{"step": 3}\n', 3, [4]),
        (b'{"step": 1}\n[1]\n', 4, [4]),
        (b"\xff\n", 3, [4]),
    ],
)
def test_a_broken_line_is_named_and_the_file_moved_away_but_for_what_is_whole_of_it(
    path: Path, line: bytes, number: int, rest: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    written(path, 2).close()
    damaged = path.read_bytes() + line + json.dumps(row(4)).encode() + b"\n"
    path.write_bytes(damaged)
    with pytest.raises(InputError, match=rf"metrics\.jsonl:{number}: expected"):
        read(path)
    file = MetricsFile(path)
    rows = [*expected(2), *map(row, rest)]
    assert read(path) == rows
    file.drop_after(4)
    file.row(row(5))
    assert read(path) == [*rows, row(5)]
    assert path.with_name("metrics.jsonl.damaged").read_bytes() == damaged
    assert f"{path} is damaged (" in capsys.readouterr().err


def metrics_in(folder: Path, console: Console, **more: Any) -> Metrics:
    return Metrics(folder, task="language", steps=2, console=console, **more)


def test_metrics_go_to_the_file_and_the_console_and_on_from_a_step(tmp_path: Path) -> None:
    text = StringIO()
    first = metrics_in(tmp_path, Console(file=text, width=200))
    first.say("global batch 512")
    first.row(row(1))
    first.evaluation(1, {"eval_loss": 2.0})
    first.row(row(2))
    first.epoch(1, {"loss": 2.5})
    first.close()
    first.close()
    lines = [line.split("  ")[0] for line in text.getvalue().splitlines()]
    assert lines == [
        "global batch 512",
        "step 1/2",
        "eval at step 1: loss 2.0000",
        "step 2/2",
        "epoch 1",
    ]
    second = metrics_in(tmp_path, Console(file=text), step=1)
    second.row(row(2, loss=7.0))
    second.close()
    assert read(tmp_path / metrics.FILE) == [row(1, eval_loss=2.0), row(2, loss=7.0)]


def test_tensorboard_gets_what_the_file_gets(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    threads = SinkThreads({"tensorboard": TensorBoard}, SinkRun("a", tmp_path, 2))
    both = metrics_in(tmp_path, Console(file=StringIO()), sinks=threads)
    for step in (1, 2):
        both.row(row(step, lr=1e-3 * step, step_time_s=0.5, time_data_s=0.1, mfu=None))
    both.evaluation(2, {"eval_loss": 2.0, "perplexity": 7.4})
    both.close()
    threads.close("done", limit_s=60)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = {
        "train/loss",
        "train/lr",
        "time/step_time_s",
        "time/data_s",
        "validation/loss",
        "validation/perplexity",
    }
    assert tags == set(events.Tags()["scalars"])
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
    assert scalars["train/lr"] == [(1, pytest.approx(1e-3)), (2, pytest.approx(2e-3))]
    assert scalars["validation/loss"] == [(2, 2.0)]
