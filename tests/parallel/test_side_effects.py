"""What a forward changes besides its output is refused where each rank, or a second run of a block, would change it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.errors import AgreedError
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.parallel.parallelize import parallelize
from meshtrain.parallel.verify.side_effects import refuse_side_effects

# Of two copies, one of which knows nothing of the other.
RANKS: Any = SimpleNamespace(size=lambda *axes: 1 if axes == ("pp",) else 2, uses_fsdp=False, world=None)


class Changing(nn.Module):
    """A layer whose forward in training does something to its own tensors."""

    def __init__(self, change: Callable[["Changing"], None]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(2, 2), change
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("unit", torch.tensor([0.6, 0.8]))
        self.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("cache", torch.zeros(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("nan", torch.full((2,), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.change(self)
        return self.layer(x)


CHANGES: dict[str, Callable[[Changing], object]] = {
    "count": lambda layer: layer.count.add_(1),
    "unit": lambda layer: layer.unit.data.copy_(torch.tensor([1.0, 0.0])),
    "turns": lambda layer: setattr(layer, "turns", 1j + layer.turns),
    "nan": lambda layer: setattr(layer, "nan", torch.cat([layer.nan, layer.nan])),
    "layer.bias": lambda layer: layer.layer.bias.data.zero_(),
}
HARMLESS: dict[str, Callable[[Changing], object]] = {
    "nothing": lambda layer: None,
    "cache": lambda layer: setattr(layer, "cache", torch.ones(3)),
    "scratch": lambda layer: layer.scratch.add_(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_each_rank_would_change_is_refused(name: str) -> None:
    model, x = nn.Sequential(Changing(CHANGES[name])), torch.ones(1, 2)
    refuse_side_effects(model, RANKS, ())
    model.eval()(x)
    refusal = rf"changes 0\.{name} in training, and with several data ranks or cp each rank"
    with pytest.raises(AgreedError, match=refusal):
        model.train()(x)


@pytest.mark.parametrize("name", HARMLESS)
def test_caches_and_what_is_no_state_may_change(name: str) -> None:
    model = nn.Sequential(Changing(HARMLESS[name]))
    refuse_side_effects(model, RANKS, set(model.modules()))
    model(torch.ones(1, 2))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks, "only the first forward is looked at"


def test_a_block_that_runs_again_may_not_count() -> None:
    """Where it does not run again, one process may have its own, as with a batch norm."""

    def placed(recompute: str, verify: bool = True) -> nn.Module:
        model = nn.Sequential(Changing(CHANGES["count"]))
        return parallelize(model, build_mesh(Layout({})), recompute=recompute, verify=verify)

    x, refusal = torch.ones(1, 2), r"changes 0\.count in training, and a block that is recomputed would change it"
    with pytest.raises(AgreedError, match=refusal):
        placed("full")(x)
    for allowed in (placed("none"), placed("full", verify=False)):
        allowed(x).sum().backward()
