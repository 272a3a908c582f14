"""The engine computes what one process computes: gradients, forwards, evaluations and text."""

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshtrain.data.batch import Batch
from meshtrain.evaluate import evaluate
from meshtrain.generate import generate
from meshtrain.mesh import Mesh
from meshtrain.pipeline.schedule import build
from tests.comparing import ALONE, CPU, same
from tests.pipeline.formulas import csv_text
from tests.pipeline.steps import B, S, Step, compare_gradients, each_schedule, pipeline, plain, schedules, train

# Samples of a microbatch, lengths of the microbatches in turn.
STEPS = [(B, [S]), (3, [7]), (B, [S]), (B, [12, 7, 5]), (B, [7, 12, 9])]


def compare_step(model: Any, b: int, lengths: list[int]) -> None:
    count = model.schedule.microbatches
    step = Step(count, b, lengths, seed=b + sum(lengths))
    model.zero_grad()
    model.run(step)
    compare_gradients(model, step)
    assert len(step.losses) == (count if model.ends[1] else 0)


@each_schedule
def test_steps_of_changing_shapes(pp: Mesh, schedule: str) -> None:
    """Also within a step; then forwards alone."""
    model = pipeline(pp, schedule, pp.size("pp") + 1)
    for b, lengths in STEPS:
        compare_step(model, b, lengths)
    for b, lengths in STEPS[:2]:
        inputs = Step(1, b, lengths).inputs(0)
        with torch.no_grad():
            logits = model(*inputs)
        assert (logits is not None) == model.ends[1]
        if logits is not None:
            same(logits, plain()(*inputs))


@pytest.mark.ranks(2)
def test_a_schedule_from_a_file(pp: Mesh, shared_path: Path) -> None:
    path = shared_path / "mine.csv"
    if pp.rank == 0:
        path.write_text(csv_text(build("zbv", ranks=2, microbatches=3)))
    dist.barrier()
    model = pipeline(pp, str(path), 3)
    compare_step(model, B, [S])
    assert (model.schedule.name, model.schedule.stages_per_rank) == ("mine", 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_compiled_blocks_with_several_microbatches_in_flight(
    pp: Mesh, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without slow code generation."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    keys = ("model.num_hidden_layers=2", "model.hidden_dropout=0.2", f"parallel.recompute={recompute}")
    _, numbers = train(pp, "1f1b", 3, *keys, "parallel.compile=true")
    _, expected = train(ALONE, "1f1b", 3, *keys)
    torch.testing.assert_close(numbers, expected, rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()


@schedules({2: ["1f1b", "zbv"], 4: ["interleaved-1f1b"]})
def test_an_evaluation_fills_the_pipeline(pp: Mesh, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With batches of two lengths: the last stage begins only after the first has had three batches. Inputs and targets
    are copied only to where they are used."""
    p = pp.size("pp")
    model, batches = pipeline(pp, schedule, p), Step(4 * p + 3, lengths=[12, 7]).batches()
    store, to = dist.distributed_c10d._get_default_store(), Batch.to
    key = f"evaluated {schedule}"
    counts = [0, 0]  # of batches in the first and in the last stage
    copied = set()

    def leave_first(*unused: Any) -> None:
        counts[0] += 1
        if counts[0] == 3:
            store.set(key, "three")

    def enter_last(*unused: Any) -> None:
        counts[1] += 1
        store.wait([key], timedelta(seconds=120))

    def copy(batch: Batch, *place: Any) -> Batch:
        copied.add(place[2:])
        return to(batch, *place)

    if model.ends[0]:
        model.stage(0).register_forward_hook(leave_first)
    if model.ends[1]:
        model.stage(model.schedule.stages - 1).register_forward_pre_hook(enter_last)
    monkeypatch.setattr(Batch, "to", copy)
    result = evaluate(model, batches, pp, CPU, torch.float64)
    assert copied == {model.ends}
    expected = evaluate(plain(), batches, ALONE, CPU, torch.float64)
    same(torch.tensor(result.loss), torch.tensor(expected.loss))
    assert result.targets == expected.targets
    assert counts == [len(batches) * end for end in model.ends]


@pytest.mark.ranks(2)
def test_text_whose_last_stage_is_on_the_first_rank(pp: Mesh) -> None:
    models = pipeline(pp, "zbv", 2), plain()
    text, expected = (generate(model, [1, 2, 3], 20, seq_len=12, device=CPU, seed=5) for model in models)
    assert text == expected
    assert len(set(expected)) > 3
