"""`meshtrain.Run`: a script's loop computes the same on every layout as plain torch does, goes on
after it was stopped or killed, and ends its job however it ends."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain.checkpoint.directory import complete_steps
from meshtrain.data.order import batch_samples
from tests.launching import ROOT, Finished, forked, root_cause, run, torchrun
from tests.script.program import LOSSES, Layer, Options, make_data, make_model

PROGRAM = str(ROOT / "tests/script/program.py")
PLAIN, SPREAD = (str(ROOT / f"tools/examples/{name}.py") for name in ("plain", "spread"))


def start(processes: int, output: Path, options: Options) -> Finished:
    return forked(processes, PROGRAM, str(output), json.dumps(asdict(options)))


def numbers(output: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step in metrics.jsonl."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [(row["loss"], row["grad_norm"]) for row in rows]


def plain_numbers(options: Options) -> list[tuple[float, float]]:
    """The same, of a loop in plain torch."""
    data, model = make_data(), make_model(options).double()
    optimizer = getattr(torch.optim, options.optimizer)(
        model.parameters(), **options.optimizer_options
    )
    seen = []
    for step in range(options.steps):
        samples = batch_samples(0, step, options.global_size, len(data))
        batch = torch.utils.data.default_collate([data[i] for i in samples])
        Layer.terms.clear()
        total, count = LOSSES[options.loss](model, batch)
        loss = total / count
        optimizer.zero_grad()
        (loss + sum(Layer.terms) / count).backward()
        max_norm = torch.inf if options.clip_norm is None else options.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        seen.append((loss.item(), norm.item()))
    return seen


SGD: dict[str, Any] = {
    "optimizer": "SGD",
    "optimizer_options": {"lr": 0.1, "momentum": 0.9},
    "loss": "regression",
}
BLOCKS: dict[str, Any] = {"model": "blocks", "sample": True, "loss": "by_keyword"}
SPLIT: dict[str, Any] = {"tp_plan": True, "clip_norm": 0.05}


@pytest.mark.parametrize(
    ("processes", "layout", "options"),
    [
        (1, "{}", {"clip_norm": 0.05, "micro_size": 3}),
        (3, "{dp_shard: 3}", {"micro_size": 1}),  # shares of 2 and 3: copies that count 0
        (2, "{dp_replicate: 2}", SGD),
        (2, "{pp: 2}", {**BLOCKS, "micro_size": 2}),
        (2, "{tp: 2}", SPLIT),
        (2, "{pp: 2}", {"attach": True, "micro_size": 2}),
        (3, "{dp_shard: 3}", {"loss": "contrast"}),
        pytest.param(3, "{dp_shard: 3}", {"attach": True, "micro_size": 1}, marks=pytest.mark.slow),
        pytest.param(3, "{dp_shard: 3}", {"global_size": 2}, marks=pytest.mark.slow),
        pytest.param(2, "{dp_shard: 2}", {**BLOCKS, "micro_size": 2}, marks=pytest.mark.slow),
        pytest.param(
            2,
            "{pp: 2}",
            {**SGD, "schedule": "interleaved-1f1b", "micro_size": 2, "global_size": 8},
            marks=pytest.mark.slow,
        ),
        pytest.param(4, "{pp: 2, tp: 2}", {**SPLIT, "schedule": "zb-h1"}, marks=pytest.mark.slow),
        pytest.param(
            4, "{dp_replicate: 2, dp_shard: 2}", {**SGD, "micro_size": 1}, marks=pytest.mark.slow
        ),
    ],
)
def test_every_layout_computes_what_plain_torch_does(
    processes: int, layout: str, options: dict[str, Any], tmp_path: Path
) -> None:
    chosen = Options(layout=layout, **options)
    output = tmp_path / "run"
    printed = start(processes, output, chosen).check().out
    plain = plain_numbers(chosen)
    torch.testing.assert_close(numbers(output), plain, rtol=1e-9, atol=0)
    # What backward has returned is what the rows have, and the first step is step 1.
    seen = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    assert seen["steps"] == list(range(1, chosen.steps + 1))
    assert seen["losses"] == [loss for loss, _ in numbers(output)]


@pytest.mark.parametrize("how", ["signal", "die"])
def test_a_stopped_or_killed_script_goes_on_to_the_bit(how: str, tmp_path: Path) -> None:
    options = Options(steps=6, every=1, dropout=0.1, micro_size=2)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    start(2, whole, options).check()
    first = start(2, broken, replace(options, third_step=how))
    assert first.status == (0 if how == "signal" else 137), first
    if how == "signal":
        assert complete_steps(broken / "checkpoints")[-1] == 3
        end = json.loads((broken / "exit.json").read_text())
        assert (end["status"], end["code"], end["step"]) == ("stopped", 75, 3)
    assert complete_steps(broken / "checkpoints")

    start(2, broken, options).check()
    assert numbers(broken) == numbers(whole)
    assert json.loads((broken / "exit.json").read_text())["status"] == "done"


def test_a_script_goes_on_on_another_layout(tmp_path: Path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    options = Options(steps=8, **SGD)
    start(1, whole, options).check()

    start(3, moved, replace(options, steps=2)).check()
    start(2, moved, replace(options, steps=4, layout="{pp: 2}", micro_size=2)).check()
    start(2, moved, replace(options, steps=6, layout="{tp: 2}", tp_plan=True)).check()
    start(1, moved, options).check()
    torch.testing.assert_close(numbers(moved), numbers(whole), rtol=1e-9, atol=0)

    # All of its steps are done: the loop has none, and the script goes on behind it.
    again = start(1, moved, options).check().out
    assert "has all of its 8 steps already" in again
    assert '{"steps": [], "losses": []}' in again


def test_a_scheduler_that_is_brought_to_its_step_goes_on(tmp_path: Path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    options = Options(steps=4, scheduler=True, **SGD)
    done = start(1, whole, options).check()
    assert "SGD has a scheduler, which is in no checkpoint" in done.out

    start(2, moved, replace(options, steps=2)).check()
    start(1, moved, options).check()
    rows = [json.loads(line) for line in (moved / "metrics.jsonl").read_text().splitlines()]
    assert [row["lr"] for row in rows] == [0.1, 0.05, 0.025, 0.0125]
    torch.testing.assert_close(numbers(moved), numbers(whole), rtol=1e-9, atol=0)


def test_an_optimizer_of_meshtrain_s_own_is_named_by_its_section(tmp_path: Path) -> None:
    section = {"lr": 0.02, "schedule": "constant"}
    options = Options(optimizer="muon", optimizer_options=section)
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    start(1, whole, options).check()
    start(2, moved, replace(options, steps=2)).check()
    start(2, moved, replace(options, layout="{pp: 2}", micro_size=2)).check()
    torch.testing.assert_close(numbers(moved), numbers(whole), rtol=1e-9, atol=0)


def test_a_requested_stop_ends_a_script_alone_with_status_75(tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = Options(steps=500, third_step="stop")  # a file, which is looked for once a second
    done = run([sys.executable, PROGRAM, str(output), json.dumps(asdict(options))])
    assert done.status == 75, done
    assert "to go on, start the same command again" in done.out
    assert not (output / "STOP").exists()
    assert '"steps"' not in done.out  # what follows the loop is for a run that is done


def test_a_loop_that_is_left_early_is_no_run_that_is_done(tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = Options(every=2)
    start(2, output, replace(options, third_step="leave")).check()
    end = json.loads((output / "exit.json").read_text())
    assert (end["status"], end["reason"]) == ("stopped", "the script has left its loop in step 3")
    assert len(numbers(output)) == 3

    start(2, output, options).check()
    assert len(numbers(output)) == options.steps
    assert json.loads((output / "exit.json").read_text())["status"] == "done"


def test_a_rank_that_fails_is_named_and_ends_its_job(tmp_path: Path) -> None:
    options = Options(third_step="raise")
    done = torchrun(2, PROGRAM, str(tmp_path / "run"), json.dumps(asdict(options)))
    assert done.status == 1
    assert "ZeroDivisionError: planted" in done.err
    assert "This was rank 0" in done.err
    assert 'MESHTRAIN_FAILURE {"kind": "failed", "ranks": [0]' in done.err
    assert "ZeroDivisionError: planted" in root_cause(done.err)
    end = json.loads((tmp_path / "run/exit.json").read_text())
    assert end["status"] == "failed"


@pytest.mark.parametrize(
    ("processes", "options", "sentence"),
    [
        (2, {"layout": "{pp: 2}", "loss": "calls_twice"}, "calls the model more than once"),
        (2, {"loss": "contrast", "micro_size": 2}, "leave micro_size out, or use micro_size=4"),
        (3, {"loss": "contrast", "global_size": 2}, "use at most 2 data ranks, or global_size=3"),
        (2, {"layout": "{pp: 2}", "loss": "calls_never"}, "does not call the model"),
        (2, {"layout": "{pp: 2}", "model": "blocks"}, "the parameter places is in none of"),
        (2, {"layout": "{dp_shard: 3}"}, "needs 3 processes and there are 2"),
        (2, {"layout": "{pp: 2}", "loss": "mean_as_sum"}, "a mean over its 7 samples"),
        (2, {"data_of_rank": True}, "a digest of dataset[0]: "),
        (1, {"loss": "penalty"}, "loss_of uses `parameters` of the model"),
    ],
)
def test_what_cannot_be_exact_is_refused(
    processes: int, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    done = start(processes, tmp_path / "run", Options(**options))
    assert done.status == 2, done
    assert sentence in done.err
    assert "Traceback" not in done.err


def test_a_checkpoint_of_another_run_is_refused_in_a_script_s_words(tmp_path: Path) -> None:
    output = tmp_path / "run"
    start(1, output, Options()).check()
    for changes, sentence in (
        ({"global_size": 8}, "batch.global_size: 7 -> 8"),
        ({"steps": 2}, "is of step 4, and this run ends at step 2"),
    ):
        done = start(1, output, Options(**changes))
        assert done.status == 2
        assert sentence in done.err
        assert 'output="FOLDER"' in done.err
        assert "train.output" not in done.err


def test_a_step_that_is_not_finite_stops_before_its_update(tmp_path: Path) -> None:
    done = start(2, tmp_path / "run", Options(loss="not_finite"))
    assert done.status == 1
    assert done.err.count("step 1: the loss of the global batch is") == 2  # text, and its line


def test_a_step_without_any_count_updates_nothing(tmp_path: Path) -> None:
    output = tmp_path / "run"
    start(1, output, Options(loss="nothing_counts")).check()
    assert [loss for loss, _ in numbers(output)] == [None] * 4


def test_the_example_is_a_plain_script_with_12_more_lines() -> None:
    diff = subprocess.run(
        ["git", "diff", "--no-index", "--numstat", PLAIN, SPREAD],
        capture_output=True,
        text=True,
        check=False,
    )
    assert int(diff.stdout.split()[0]) <= 12
    assert all(len(line) <= 100 for line in Path(SPREAD).read_text().splitlines())


def test_the_example_prints_the_same_losses_on_1_2_and_3_ranks(tmp_path: Path) -> None:
    printed = []
    for processes in (1, 2, 3):
        folder = tmp_path / str(processes)
        folder.mkdir()
        lines = forked(processes, SPREAD, cwd=folder).check().out.splitlines()
        printed.append([line for line in lines if line.startswith("step ") and "/" not in line])
    assert len(printed[0]) == 20
    assert printed[0] == printed[1] == printed[2]
