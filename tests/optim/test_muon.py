"""Muon: the formula, torch's own, and which rank computes which matrix. That layouts agree is in the parity table."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.config.locate import model_file
from meshtrain.config.schema import Optimizer as Keys
from meshtrain.config.schema import ParamGroup
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.optim import Optimizer
from meshtrain.optim.groups import group_options
from meshtrain.optim.matrices import deal_out, holders_of, matrices_of
from meshtrain.parallel.sharding import Cut, ParameterSpec

MESH = build_mesh(Layout({"dp_shard": 1}))
KEYS: dict[str, Any] = {"name": "muon", "lr": 0.02, "schedule": "constant", "warmup_steps": 0}


def formula(gradient: Tensor) -> Tensor:
    """Of one matrix: as it is written down."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient / max(gradient.norm().item(), 1e-7)
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    x = x.T if gradient.shape[0] > gradient.shape[1] else x
    return 0.2 * math.sqrt(max(gradient.shape)) * x


def small_moe() -> nn.Module:
    module = model_file("qwen3_moe")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = module.Config(**sizes, num_experts=3, moe_intermediate_size=10, vocab_size=11, mlp_only_layers=[1])
    return module.Model(config).double()


def set_gradients(model: nn.Module, step: int) -> None:
    for p in model.parameters():
        p.grad = torch.cos(step * p.detach() * 100) if p.requires_grad else None


def update_both(
    step: int, model: nn.Module, optimizer: Optimizer, plain: nn.Module, torchs: torch.optim.Optimizer
) -> None:
    """One step of each, by the same gradients where the weights are the same."""
    set_gradients(model, step)
    set_gradients(plain, step)
    optimizer.squared_norm()
    optimizer.update(step, None, torch.tensor(False))
    torchs.step()


def test_every_matrix_follows_the_formula_and_the_rest_adamw() -> None:
    """Gate and up of each expert are matrices of their own; the router is one; embedding, head and norms are none."""
    model, plain = small_moe(), small_moe()
    optimizer = Optimizer(model, Keys(**KEYS, momentum=0.9, weight_decay=0.1), MESH, 10)
    momenta = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    others = {name: p for name, p in plain.named_parameters() if p.dim() == 1 or name in ENDS}
    groups = [{"params": [p], "weight_decay": 0.1 * (p.dim() > 1)} for p in others.values() if p.requires_grad]
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8)
    matrices = 0
    for step in (1, 2, 3):
        update_both(step, model, optimizer, plain, adamw)
        for name, p in plain.named_parameters():
            if name in others:
                continue
            momenta[name].mul_(0.9).add_(0.1 * p.grad)
            direction = 0.1 * p.grad + 0.9 * momenta[name]
            parts = [direction] if p.dim() == 2 else [m for e in direction for m in e.chunk(2 if "gate" in name else 1)]
            matrices += len(parts)
            with torch.no_grad():
                p.mul_(1 - 0.02 * 0.1).sub_(0.02 * torch.cat([formula(part) for part in parts]).view_as(p))
    for (name, ours), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12, msg=name)
    assert matrices == 3 * (2 * 4 + 1 + 3 * 3 + 3), "q, k, v, o; a router and three of each expert; gate, up, down"
    assert {name for name, p in model.named_parameters() if "exp_avg" in optimizer.state(p)} == {
        name for name, p in others.items() if p.requires_grad
    }


ENDS = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_torchs_within_bfloat16(nesterov: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.ModuleList([nn.Linear(12, 20, bias=False), nn.Linear(20, 12, bias=False)]) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer = Optimizer(ours, Keys(**KEYS, nesterov=nesterov), MESH, 10)
    reference = torch.optim.Muon(
        theirs.parameters(), lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
    )
    for step in (1, 2, 3):
        update_both(step, ours, optimizer, theirs, reference)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3 * 0.02 * 0.2 * math.sqrt(20) * 2**-7)
        assert (a - b).square().mean().sqrt() < 0.02 * 0.2 * 2**-6, "an update has a root mean square of 0.2 lr"


def test_a_skipped_update_changes_nothing() -> None:
    model = small_moe()
    optimizer = Optimizer(model, Keys(**KEYS), MESH, 10)
    set_gradients(model, 1)
    optimizer.squared_norm()
    optimizer.update(1, None, torch.tensor(False))
    local = [p for group in optimizer.param_groups for p in group.parameters]
    before = [t.detach().clone() for p in local for t in (p.local, *p.state.values())]
    for p in local:
        p.parameter.grad = torch.full_like(p.parameter, math.nan)
    optimizer.squared_norm()
    optimizer.update(2, torch.tensor(1.0), torch.tensor(True))
    after = [t for p in local for t in (p.local, *p.state.values())]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_groups_choose_what_muon_is_for() -> None:
    def chosen(name: str, shape: tuple[int, ...], *groups: ParamGroup) -> str:
        return group_options(Keys(name="muon", groups=groups), ParameterSpec(name, shape)).name

    assert chosen("layers.0.proj.weight", (3, 4)) == "muon"
    assert chosen("layers.0.mlp.experts.down_proj", (2, 3, 4)) == "muon"
    assert chosen("layers.0.proj.bias", (3,)) == "adamw"
    assert chosen("conv.weight", (3, 4, 2)) == "adamw", "a kernel is no stack of matrices"
    assert chosen("model.embed_tokens.weight", (3, 4)) == "adamw"
    assert chosen("layers.0.proj.weight", (3, 4), ParamGroup("*proj*", name="sgd")) == "sgd"
    assert chosen("conv.weight", (3, 4, 2), ParamGroup("conv*", name="muon")) == "muon"
    assert chosen("model.embed_tokens.weight", (3, 4), ParamGroup("*", name="muon")) == "muon"
    assert chosen("model.norm.weight", (3,), ParamGroup("*", name="muon")) == "adamw"


def test_the_work_is_dealt_out_evenly() -> None:
    shapes = [(64, 64)] * 13 + [(64, 192)] * 9 + [(8, 64)] * 50
    owners = deal_out(shapes, 4)
    load = Counter[int]()
    for (m, n), owner in zip(shapes, owners, strict=True):
        load[owner] += min(m, n) ** 2 * max(m, n)
    assert len(load) == 4
    assert max(load.values()) < 1.05 * sum(load.values()) / 4
    assert sorted(deal_out(shapes[:3], 4)) == [0, 1, 2]


def test_matrices_and_who_holds_parts_of_them() -> None:
    table = {"*.gate_up": ("*.{}.gate", "*.{}.up")}
    spec = ParameterSpec("a.gate_up", (5, 4, 3), (Cut("ep", 0, 2), Cut("efsdp", 0, 2)))
    parts = matrices_of(spec, table)
    assert len(parts) == 10
    assert parts[3] == (slice(1, 2), slice(2, 4), slice(0, 3))
    assert len(matrices_of(spec, {})) == 5
    assert matrices_of(ParameterSpec("w", (4, 3)), {}) == [(slice(0, 4), slice(0, 3))]
    assert matrices_of(ParameterSpec("w", (4, 3)), {"w": ()}) == [(slice(0, 4), slice(0, 3))], "that no file has"
    layout = Layout({"dp_replicate": 2, "dp_shard": 4}).with_experts(2)
    held = holders_of(spec, layout, range(8))
    assert [(part[0].start, part[0].stop, places) for part, places in held] == [
        (0, 2, [0, 4]),
        (3, 4, [1, 5]),
        (2, 3, [2, 6]),
        (4, 5, [3, 7]),
    ]
