"""Experts that are dealt out over ranks, beyond what the parity table sees."""

import pytest
import torch
from torch import nn

from meshtrain.experts import Experts
from meshtrain.parallel.expert import _sort_by_expert
from meshtrain.parallel.sharding import expert_shard_dim
from meshtrain.parallel.tp_plan import SplitError, expert_modules

PLAN = {"experts": "ep_dispatch_experts"}


def test_rows_are_sorted_by_expert_then_source() -> None:
    for table in ([[2, 0, 1], [0, 3, 1]], [[0], [2]], [[0, 0], [0, 0]], [[], []]):
        counts = torch.tensor(table, dtype=torch.int64)
        rows = [(e, p, i) for p, row in enumerate(table) for e, count in enumerate(row) for i in range(count)]
        order, inverse = _sort_by_expert(counts, len(rows))
        assert [rows[i] for i in order.tolist()] == sorted(rows)
        assert order[inverse].tolist() == list(range(len(rows)))


def test_fsdp_cuts_experts_while_each_shard_has_one() -> None:
    assert expert_shard_dim((8, 6, 4), ep=2, efsdp=4) == 0
    assert expert_shard_dim((8, 6, 4), ep=4, efsdp=3) == 1
    assert expert_shard_dim((8, 6, 4), ep=4, efsdp=4) == 0  # 6 rows do not divide: some ranks have no part


class _Scaled(nn.Module):
    """Another layer of experts, which does not compute by `dispatch`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 3))


class _WithBias(Experts):
    def __init__(self, *shape: int) -> None:
        super().__init__(4, 3, 2)
        self.bias = nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize("module", [_Scaled(), _WithBias(), _WithBias(3, 4), nn.Sequential(Experts(4, 3, 2))])
def test_a_plan_that_names_something_else_is_refused(module: nn.Module) -> None:
    model = nn.Module()
    model.experts = module
    with pytest.raises(SplitError, match="names experts, which is no layer of experts"):
        expert_modules(model, PLAN)
    model.experts = _WithBias(4, 3)
    assert expert_modules(model, PLAN) == {"experts": 4}
    with pytest.raises(SplitError, match=r"'layers.*' matches no module.* is 'rowwise': use ep_dispatch_experts"):
        expert_modules(model, {"layers.*": "rowwise"})
