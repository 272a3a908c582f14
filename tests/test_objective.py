"""A loss of the user's own: what it sees of a microbatch, what samples count, and what is refused."""

import math
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from meshtrain.config.own_loss import loss_functions
from meshtrain.data.batch import Batch
from meshtrain.errors import InputError
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.loss import Field, GlobalCount, full, mean_of
from meshtrain.mesh import build_mesh
from meshtrain.objective import CrossEntropy, OwnLoss
from meshtrain.parallel.collectives import axis_group
from tests.comparing import ALONE, CPU

NAN, INF = math.nan, math.inf


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def batch_of(targets: Any, real: int | None = None) -> Batch:
    """A microbatch whose samples are 10, 11, ... of the data set."""
    rows = len(targets if isinstance(targets, Tensor) else next(iter(targets.values())))
    samples = tuple(range(10, 10 + (rows if real is None else real)))
    return Batch({"images": torch.zeros(rows, 3)}, targets, samples)


# What it sees --------------------------------------------------------------------------------


@pytest.mark.parametrize("real", [0, 1, 3])
def test_padding_reaches_no_function_and_nan_in_it_changes_nothing(real: int) -> None:
    seen = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append((len(outputs), len(targets)))
        return squares(outputs, targets)

    def weight(targets: Tensor) -> Tensor:
        seen.append((len(targets), len(targets)))
        return targets.sum(1)

    values = torch.arange(8.0).view(4, 2)
    values[real:] = NAN
    outputs = values.clone().requires_grad_()
    batch = batch_of(values + 1, real)
    own = OwnLoss(loss, weight)
    found = own.losses(outputs, batch)
    found.samples.sum().backward()
    weights = own.counts(batch).weights

    assert found.samples.tolist() == [2.0] * real
    assert outputs.grad is not None
    assert outputs.grad[:real].tolist() == [[-2.0, -2.0]] * real
    assert outputs.grad[real:].eq(0).all()
    assert weights == (values[:real] + 1).sum(1).tolist()
    assert set(seen) == {(real, real)}


def test_named_outputs_and_targets_lose_their_padding_too() -> None:
    def loss(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
        assert {name: len(x) for name, x in outputs.items()} == {"a": 2, "b": 2}
        assert {name: len(x) for name, x in targets.items()} == {"x": 2, "y": 2}
        return outputs["a"] * targets["x"] + outputs["b"].sum((1, 2)) * targets["y"]

    outputs = {"a": torch.ones(3), "b": torch.ones(3, 2, 2)}
    targets = {"x": torch.tensor([1.0, 2, 3]), "y": torch.tensor([True, False, True])}
    found = OwnLoss(loss, None).losses(outputs, batch_of(targets, 2))
    assert found.samples.tolist() == [5.0, 2.0]


def test_a_rank_without_samples_has_a_backward_whatever_the_loss_is_made_of() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.tensor([float(x.sum()) for x in outputs])  # of nothing if there is no sample

    outputs = torch.full((2, 2), NAN, requires_grad=True)
    found = OwnLoss(loss, None).losses(outputs, batch_of(torch.zeros(2, 2), 0))
    found.samples.sum().backward()
    assert outputs.grad is not None
    assert outputs.grad.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sums_are_added_up_in_float32(dtype: torch.dtype) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum(1)

    outputs = torch.ones(3, 2, dtype=dtype)
    batch = batch_of(torch.zeros(3, dtype=torch.int64))
    assert OwnLoss(loss, None).losses(outputs, batch).samples.dtype == torch.float32
    exact = OwnLoss(loss, None, dtype=torch.float64)
    assert exact.losses(outputs, batch).samples.dtype == torch.float64


def test_it_is_the_cross_entropy_if_it_computes_that() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 7, generator=draw)
    targets = torch.randint(0, 7, (3, 5), generator=draw)
    targets[1, 2:] = -100
    targets[2] = -100

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).sum(1)

    batch = batch_of(targets)
    own, built_in = OwnLoss(loss, None), CrossEntropy(counts_correct=False)
    assert own.counts(batch) == built_in.counts(batch) == ([5, 2, 0], 7)
    torch.testing.assert_close(
        own.losses(logits, batch).samples, built_in.losses(logits, batch).samples
    )


# What samples count --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "weights"),
    [
        (torch.tensor([3, -100, 0]), [1, 0, 1]),
        (torch.tensor([[3, -100], [-100, -100], [0, 1]]), [1, 0, 2]),
        (torch.tensor([[3, -100], [0, 1], [0, 1]], dtype=torch.int32), [1, 2, 2]),
        (torch.tensor([3.0, -100, 0]), [1, 1, 1]),
        (torch.tensor([[True, False]] * 3), [1, 1, 1]),
        ({"words": torch.tensor([3, -100, 0])}, [1, 1, 1]),
    ],
    ids=["classes", "tokens", "int32", "float", "bool", "named"],
)
def test_the_default_weight(targets: Any, weights: list[float]) -> None:
    own = OwnLoss(squares, None)
    assert own.counts(batch_of(targets)) == (weights, sum(weights))
    # A sample that counts 1 does so on one of the ranks that have its parts.
    counts_tokens = isinstance(targets, Tensor) and targets.dtype in (torch.int64, torch.int32)
    other = OwnLoss(squares, None, first_part=False).counts(batch_of(targets))
    assert other.weights == (weights if counts_tokens else [0, 0, 0])


def test_a_sum_of_weights_below_1_is_a_divisor_too() -> None:
    for total, mean in ((0.25, 8.0), (2.0, 1.0), (0.0, 2.0)):
        count = GlobalCount(total, ALONE, CPU)
        assert count.mean(torch.tensor(2.0)) == mean == mean_of(2.0, total)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([1.0, -0.5], "gives -0.5 for sample 11 of the data set"),
        ([NAN, 1.0], "gives nan for sample 10 of the data set"),
        ([1.0, INF], "gives inf for sample 11 of the data set"),
        ([1.0], "is a tensor (1,): expected a tensor (2,)"),
        ([[1.0], [1.0]], "is a tensor (2, 1): expected a tensor (2,)"),
        (None, "is a NoneType: expected a tensor (2,)"),
    ],
)
def test_weights_that_are_refused(weights: Any, says: str) -> None:
    returned = None if weights is None else torch.tensor(weights)
    own = OwnLoss(squares, lambda targets: returned)
    with pytest.raises(InputError) as raised:
        own.counts(batch_of(torch.zeros(2, 2)))
    assert says in str(raised.value)


# What it returns -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (torch.zeros(()), "is a tensor (): expected a tensor (2,)"),
        (torch.zeros(2, 2), "is a tensor (2, 2): expected a tensor (2,)"),
        (torch.zeros(3), "is a tensor (3,): expected a tensor (2,)"),
        (torch.zeros(2, dtype=torch.complex64), "is a tensor of torch.complex64"),
        (0.5, "is a float: expected a tensor (2,)"),
        ((torch.zeros(2), torch.zeros(2)), "returned a tuple of 2: expected (sums"),
        ((torch.zeros(2), {"x": torch.zeros(2)}), "a Tensor for the metric x"),
        ((torch.zeros(2), {"x": (torch.zeros(2), 2)}), "counts of the metric x is a int"),
        (
            (torch.zeros(2), {"x": (torch.zeros(1), torch.ones(2))}),
            "sums of the metric x is a tensor",
        ),
        *(
            ((torch.zeros(2), {name: (torch.zeros(2), torch.ones(2))}), f"called {name!r}")
            for name in ("loss", "accuracy", "eval_x", "mean/x", "time_own_s", "")
        ),
    ],
)
def test_what_a_loss_returns_is_refused(returned: Any, says: str) -> None:
    own = OwnLoss(lambda outputs, targets: returned, None)
    with pytest.raises(InputError) as raised:
        own.losses(torch.zeros(2, 2), batch_of(torch.zeros(2, 2)))
    assert says in str(raised.value)


@pytest.mark.ranks(2)
def test_sums_made_of_parts_of_logits_are_refused(job: Job) -> None:
    """They are DTensors; `full` and `token_losses` make plain ones of them."""
    mesh = build_mesh(Layout({"tp": 2}))
    group = axis_group(mesh, "tp")  # as a model that is split keeps it
    logits = torch.arange(12.0).view(3, 4)
    split = DTensor.from_local(logits.chunk(2, 1)[job.rank].clone(), mesh.submesh("tp"), [Shard(1)])
    batch = batch_of(torch.tensor([0, 3, -100]), 2)

    with pytest.raises(InputError, match=r"a DTensor \(2,\).*use meshtrain.loss.full"):
        OwnLoss(lambda outputs, targets: outputs.sum(1), None).losses(split, batch)

    whole = OwnLoss(lambda outputs, targets: full(outputs).sum(1), None).losses(split, batch)
    assert whole.samples.tolist() == logits.sum(1)[:2].tolist()

    # What mixes both kinds fails in torch; the error says more.
    with pytest.raises(RuntimeError) as raised:
        OwnLoss(lambda outputs, targets: outputs.sum(1) + targets, None).losses(split, batch)
    assert "meshtrain.loss.full(outputs)" in raised.value.__notes__[0]
    assert group.size == 2


def test_metrics_are_sums_and_counts_under_the_same_names() -> None:
    names = ["a", "b/c"]

    def loss(outputs: Tensor, targets: Tensor) -> Any:
        counts = torch.tensor([1, 2])
        return outputs.sum(1), {name: (outputs.sum(1), counts) for name in names}

    own = OwnLoss(loss, None)
    batch = batch_of(torch.zeros(3, 2), 2)
    found = own.losses(torch.tensor([[1.0, 2], [3, 4], [NAN, 0]]), batch)
    assert {str(name): sums.tolist() for name, sums in found.metrics.items()} == {
        "a": [10.0, 3.0],
        "b/c": [10.0, 3.0],
    }
    names.pop()
    with pytest.raises(InputError, match="each call has to return the same names"):
        own.losses(torch.zeros(3, 2), batch)


def test_a_metric_is_left_out_where_nothing_counts() -> None:
    field = Field("metric", "x", size=2)
    assert field.metric([3.0, 4.0], targets=7) == 0.75
    assert field.metric([0.0, 0.0], targets=7) is None


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        (torch.zeros(()), "the model's output is a tensor ()"),
        (torch.zeros(3, 2), "the model's output is a tensor (3, 2)"),
        ((torch.zeros(2), torch.zeros(2)), "the model's output is tuple"),
        ({"a": torch.zeros(2), "b": torch.zeros(())}, "output 'b' is a tensor ()"),
        ({"a": None}, "output 'a' is NoneType"),
        ({}, "is an empty dict"),
    ],
)
def test_what_a_model_returns_is_refused(outputs: Any, says: str) -> None:
    with pytest.raises(InputError) as raised:
        OwnLoss(squares, None).losses(outputs, batch_of(torch.zeros(2, 2)))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("outputs", "targets", "correct"),
    [
        (torch.eye(3), torch.tensor([0, 2, -100]), 1),
        (torch.zeros(3), torch.tensor([0, 2, 1]), None),
        (torch.zeros(3, 1), torch.tensor([0, 0, 0]), None),
        ({"logits": torch.eye(3)}, torch.tensor([0, 1, 2]), None),
    ],
    ids=["logits", "numbers", "one number", "named"],
)
def test_predictions_are_counted_where_outputs_are_logits(
    outputs: Any, targets: Tensor, correct: int | None
) -> None:
    own = OwnLoss(lambda outputs, targets: torch.zeros(3), None, counts_correct=True)
    found = own.losses(outputs, batch_of(targets)).correct
    assert found is not None
    assert (None if found.isnan() else int(found)) == correct


# What a model file defines -------------------------------------------------------------------


def module_of(**names: Any) -> ModuleType:
    module = ModuleType("mine")
    vars(module).update(names)
    return module


def test_functions_of_a_model_file() -> None:
    assert loss_functions(module_of()) is None
    found = loss_functions(module_of(loss=squares, weight=torch.sum, over_whole_samples=True))
    assert found is not None
    assert (found.loss, found.weight, found.over_whole_samples) == (squares, torch.sum, True)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"loss": 3}, "`loss` is a int: expected a function `loss(outputs, targets)`"),
        ({"loss": lambda outputs: outputs}, "is called as `loss(outputs, targets)`"),
        ({"loss": squares, "weight": lambda: 1}, "is called as `weight(targets)`"),
        ({"loss": squares, "over_whole_samples": 1}, "`over_whole_samples` is a int"),
        ({"weight": lambda targets: 1}, "it defines `weight` and no `loss`"),
        ({"over_whole_samples": True}, "it defines `over_whole_samples` and no `loss`"),
    ],
)
def test_functions_that_are_refused(names: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as raised:
        loss_functions(module_of(**names))
    assert says in str(raised.value)
