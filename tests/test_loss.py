"""Terms that modules attach to the loss, and statistics that they record."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshtrain.errors import AgreedError, InputError
from meshtrain.layout import Layout
from meshtrain.loss import (
    Field,
    GlobalCount,
    StepTerms,
    agree_on_fields,
    attach,
    record,
    sample_losses,
)
from meshtrain.mesh import Mesh
from tests.comparing import ALONE, CPU


class Attaching(nn.Module):
    """Two layers of 4 features; the first adds the squares of its output to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.inside(x))

    def inside(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        if self.on:
            record("positive", (x > 0).sum(-1))
            record("square", x.square(), torch.ones_like(x))
            x = attach(x, "hidden", x.square().sum(-1))
        return x


class Recomputed(Attaching):
    def inside(self, x: Tensor) -> Tensor:
        return checkpoint(super().inside, x, use_reentrant=False)


@pytest.mark.parametrize("kind", [Attaching, Recomputed])
@pytest.mark.parametrize("scale", [None, 64.0])
def test_an_attached_term_is_as_if_it_were_added_to_the_loss(
    kind: type[Attaching], scale: float | None
) -> None:
    """In two microbatches of 3 samples, of which the last one is padding; 10 valid targets."""
    torch.manual_seed(0)
    model, x = kind().double(), torch.randn(6, 2, 4, dtype=torch.float64)
    factor = scale or 1.0
    terms = StepTerms(GlobalCount(10, ALONE, CPU), scale and torch.tensor(scale))
    for rows, real in ((x[:3], 3), (x[3:], 2)):
        with terms.of_microbatch(3, real):
            (model(rows)[:real].sum() * factor / 10).backward()
    attached = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.on = False
    hidden = model.first(x[:5]).tanh()
    (factor * (model(x[:5]).sum() + hidden.square().sum()) / 10).backward()
    torch.testing.assert_close(
        attached, [p.grad for p in model.parameters()], rtol=1e-12, atol=1e-14
    )
    squares = hidden.square().sum().item()
    sums = {str(field): values.tolist() for field, values in terms.sums.items()}
    assert sums == {
        "loss/hidden": pytest.approx([squares], rel=1e-12),
        "sum/positive": [(hidden > 0).sum()],
        "mean/square": pytest.approx([squares, hidden.numel()]),
    }


def test_outside_of_a_step_nothing_is_attached() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    assert attach(x, "hidden", x.square()) is x
    record("hidden", x)
    terms = StepTerms(GlobalCount(1, ALONE, CPU))
    with terms.of_microbatch(2, 2), torch.no_grad():
        assert attach(x, "hidden", x.square()) is x
    assert terms.sums == {}


def test_a_term_in_bfloat16_is_summed_in_float32() -> None:
    """Which part of a batch a rank has must not be seen in the rounding of a sum."""
    term = torch.full((3, 1000), 1.0078125, dtype=torch.bfloat16)  # its multiples are rounded
    terms = StepTerms(GlobalCount(1, ALONE, CPU))
    with terms.of_microbatch(3, 3):
        attach(torch.zeros(3, 2), "hidden", term)
    assert terms.sums[Field("loss", "hidden")].item() == 3000 * 1.0078125


@pytest.mark.parametrize("term", [torch.tensor(1.0), torch.zeros(3, 2)])
def test_a_term_has_a_number_for_each_sample(term: Tensor) -> None:
    terms = StepTerms(GlobalCount(1, ALONE, CPU))
    with (
        terms.of_microbatch(2, 2),
        pytest.raises(ValueError, match="a number for each of the 2 samples"),
    ):
        attach(torch.zeros(2, 2), "hidden", term)


@pytest.mark.parametrize("term", [torch.zeros(2), torch.zeros(2, 4)])
def test_with_padding_of_tokens_a_term_has_a_number_for_each_token(term: Tensor) -> None:
    """A number for each sample cannot be said to be of padding or not."""
    terms = StepTerms(GlobalCount(1, ALONE, CPU))
    of_tokens = torch.tensor([True, True, False])
    with (
        terms.of_microbatch(2, 2, of_tokens),
        pytest.raises(ValueError, match="a number for each of this rank's 3 tokens"),
    ):
        attach(torch.zeros(2, 3), "hidden", term)


def test_ranks_agree_on_the_fields_and_on_what_they_have_computed_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four ranks, two stages of two tensor ranks: each stage attaches something of its own."""
    mesh = Mesh(Layout({"pp": 2, "tp": 2}), 0, "cpu", None, {tuple(range(4)): object()})  # type: ignore[dict-item]
    loss, other = Field("loss", "b"), Field("sum", "a")
    every = [{loss: [1.0]}, {loss: [1.0]}, {other: [2.0]}, {other: [2.0]}]

    def gather(result: list, own: object, group: object) -> None:
        result[:] = every

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    terms = StepTerms(GlobalCount(1, ALONE, CPU))
    assert agree_on_fields(terms, mesh, same_tokens=True) == (loss, other)
    every[3] = {other: [2.1]}
    assert agree_on_fields(terms, mesh, same_tokens=False) == (loss, other)
    with pytest.raises(AgreedError, match=r"sum/a differs between ranks 2-3"):
        agree_on_fields(terms, mesh, same_tokens=True)


@pytest.mark.parametrize(
    ("kind", "sums", "expected"),
    [
        ("loss", [6.0], 1.5),
        ("sum", [6.0], 6.0),
        ("mean", [6.0, 3.0], 2.0),
        ("mean", [0.0, 0.0], 0.0),
        ("source_loss", [6.0, 3.0], 2.0),
        ("source_loss", [0.0, 0.0], None),  # the step had no target of this source
        ("tally", [6.0, 3.0, 1.0], None),
    ],
)
def test_the_metric_of_a_field(kind: Any, sums: list[float], expected: float | None) -> None:
    """Of a global batch with 4 valid targets, and of one with none, whose losses are 0."""
    field = Field(kind, "name", size=len(sums))
    assert field.metric(sums, targets=4) == expected
    assert Field("loss", "name").metric([0.0], targets=0) == 0


def test_what_is_no_logits_is_refused() -> None:
    targets = torch.zeros(2, 3, dtype=torch.int64)
    wrong: dict[str, Any] = {
        "a dict": {"logits": targets},
        r"a tensor \(2, 4, 4\)": torch.zeros(2, 4, 4),
    }
    for name, output in wrong.items():
        with pytest.raises(
            InputError, match=f"the model's output is {name}: its forward has to return"
        ):
            sample_losses(output, targets)
