"""Layers of experts over ranks against one process: losses, gradients, loads, and bytes against
closed forms."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshtrain
from meshtrain.errors import InputError
from meshtrain.experts import Balance, Experts, Router
from meshtrain.job.process import Job
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.mesh import Mesh
from meshtrain.modeling.experts import dispatch_bytes
from meshtrain.parallel import fsdp
from meshtrain.parallel.expert import RowLimit, limit_rows
from meshtrain.parallel.grad_sync import set_is_last_backward
from meshtrain.parallel.sharding import chunk_range, expert_shard_dim, local_part
from meshtrain.parallel.tp_plan import SplitError, expert_modules
from tests import ranks
from tests.comparing import CPU, B, S, V, compare_step, same, tokens

D, WIDE, LAYERS, MICROBATCHES = 7, 4, 2, 2
pytestmark = pytest.mark.usefixtures("small_units")
ep_plan = {"layers.*.experts": "ep_dispatch_experts"}  # of the models of this file
# World size, layout, size of `ep`.
PLACES: list[tuple[int, dict[str, int], int]] = [
    (2, {"dp_shard": 2}, 2),
    (2, {"dp_replicate": 2}, 2),
    (3, {"dp_shard": 3}, 3),
    (3, {"dp_replicate": 3}, 3),
    (4, {"dp_shard": 4}, 2),
    (4, {"dp_shard": 4}, 4),
    (4, {"dp_replicate": 2, "dp_shard": 2}, 2),
    (4, {"dp_replicate": 2, "dp_shard": 2}, 4),
    (4, {"dp_replicate": 4}, 2),
    (4, {"dp_replicate": 4}, 4),
]
SLOW_PLACES = PLACES[1:3] + PLACES[5:6] + PLACES[7:9]
each_place = pytest.mark.parametrize(
    ("job", "sizes", "ep"),
    [
        ranks.row(
            world,
            sizes,
            ep,
            name=f"{'-'.join(sizes)}-ep{ep}",
            slow=(world, sizes, ep) in SLOW_PLACES,
        )
        for world, sizes, ep in PLACES
    ],
    indirect=["job"],
)


@dataclass(frozen=True)
class Case:
    experts: int = 4
    per_token: int = 2
    router: float = 1.0  # factor on the router's weights: 0 makes all scores equal
    recompute: str = "none"
    reshard: bool = True
    room: bool = False  # messages of a fixed size, with room for all rows
    sigmoid: bool = False


CASES = {
    "plain": Case(),
    "selective": Case(experts=5, recompute="selective"),
    "room for all": Case(experts=3, recompute="full", room=True),
    "ranks without experts": Case(experts=3, recompute="full"),
    "all tokens to the first expert": Case(experts=2, per_token=1, router=0.0, reshard=False),
    "sigmoid": Case(experts=6, recompute="full", reshard=False, sigmoid=True),
}


class Layer(nn.Module):
    def __init__(self, case: Case, number: int) -> None:
        super().__init__()
        balance = Balance(case.experts, LAYERS, number)
        options: dict[str, Any] = {}
        if case.sigmoid:
            options = {
                "score": "sigmoid",
                "bias": True,
                "groups": 2,
                "groups_per_token": 1,
                "scale": 1.5,
            }
        self.norm = nn.RMSNorm(D)
        self.gate = Router(D, case.experts, case.per_token, balance=balance, **options)
        self.experts = Experts(case.experts, D, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.experts(y, *self.gate(y))


class Model(nn.Module):
    """Terms of the loss and corrections of the routers are in the parity table."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.layers = nn.ModuleList([Layer(case, i) for i in range(LAYERS)])
        for i, (name, p) in enumerate(self.named_parameters()):
            if p.requires_grad and "norm" not in name:
                nn.init.normal_(p.data, std=0.5, generator=torch.Generator().manual_seed(i))
                p.data *= case.router if name.endswith("gate.weight") else 1.0

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def chosen_experts(plain: nn.Module, data_rank: int, microbatch: int) -> list[Tensor]:
    """Of each layer, (b, s, j)."""
    chosen: list[Tensor] = []
    hooks = [
        layer.gate.register_forward_hook(lambda *call: chosen.append(call[2][0]))
        for layer in plain.layers
    ]
    plain(tokens(data_rank, microbatch))
    for hook in hooks:
        hook.remove()
    return chosen


def bytes_sent(case: Case, mesh: Mesh, plain: nn.Module) -> int:
    """The closed form, given the routing in one process."""
    ranks, ep = mesh.layout.group(mesh.rank, "ep"), mesh.size("ep")
    parts = [chunk_range(case.experts, ep, rank) for rank in range(ep)]
    owner = [rank for rank, part in enumerate(parts) for _ in range(part.start, part.stop)]
    here = ranks.index(mesh.rank)
    own = owner.count(here)
    foreign = case.experts - own
    if case.room:  # a message has the rows of all slots of a microbatch
        most = B * S * case.per_token
        out, answered = most * (len(set(owner)) - (own > 0)), most * (ep - 1) * (own > 0)
        return LAYERS * MICROBATCHES * dispatch_bytes(out, answered, D, 8, foreign, case.recompute)
    sent = 0
    for microbatch in range(MICROBATCHES):
        of_ranks = [
            chosen_experts(plain, mesh.layout.index(rank, *DATA_AXES), microbatch) for rank in ranks
        ]
        for of_layer in zip(*of_ranks, strict=True):
            slots = [[owner[expert] for expert in chosen.flatten().tolist()] for chosen in of_layer]
            out = len(slots[here]) - slots[here].count(here)
            answered = sum(targets.count(here) for targets in slots) - slots[here].count(here)
            sent += dispatch_bytes(out, answered, D, 8, foreign, case.recompute)
    return sent


def compare_steps(case: Case, mesh: Mesh, model: nn.Module) -> None:
    """Compares two steps and an evaluation with those of one process."""
    options = {"recompute": case.recompute, "reshard_after_forward": case.reshard}
    model = meshtrain.parallelize(model, mesh, precision="float64", **options)
    plain = Model(case).double()
    if next(model.parameters()).is_meta:
        fill(model, dict(plain.named_parameters()))
    limit = RowLimit(float(mesh.size("ep")), CPU) if case.room else None
    for _ in range(2):
        mesh.comm_bytes.restart()
        with limit_rows(model, limit):
            compare_step(model, plain, mesh, microbatches=MICROBATCHES)
        assert mesh.comm_bytes.by_kind("ep") == {"all_to_all": bytes_sent(case, mesh, plain)}
    assert limit is None or not limit.overflow
    with torch.no_grad():
        same(model(tokens()), plain(tokens()), "evaluation")


@torch.no_grad()
def fill(model: nn.Module, values: dict[str, Tensor]) -> None:
    model.to_empty(device="cpu")
    for name, p in model.named_parameters():
        local, part = local_part(p)
        local.copy_(values[name][part])


@each_place
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_steps_are_those_of_one_process(
    job: Job, sizes: dict[str, int], ep: int, case: Case
) -> None:
    compare_steps(case, meshtrain.build_mesh(Layout(sizes).with_experts(ep)), Model(case))


@pytest.mark.ranks(4)
def test_replicas_of_experts_that_fsdp_does_not_shard_start_on_the_meta_device(job: Job) -> None:
    mesh = meshtrain.build_mesh(Layout({"dp_replicate": 2, "dp_shard": 2}).with_experts(2))
    compare_steps(Case(), mesh, Model(Case()).to("meta"))


@each_place
def test_routing_weights_and_loads_stay_in_float32(
    job: Job, sizes: dict[str, int], ep: int
) -> None:
    """In 16 bits, whoever casts the parameters."""
    mesh = meshtrain.build_mesh(Layout(sizes).with_experts(ep))
    model = meshtrain.parallelize(Model(Case()), mesh, precision="bfloat16")
    types: set[tuple[torch.dtype, ...]] = set()
    for layer in model.layers:
        products = layer.experts._products

        def record(
            rows: Tensor, counts: Tensor, layer: nn.Module = layer, products: Any = products
        ) -> Tensor:
            tensors = layer.gate.balance.loads, layer.gate.weight, layer.experts.down_proj, rows
            types.add(tuple(x.dtype for x in tensors))
            return products(rows, counts)

        layer.experts._products = record
        layer.experts.register_forward_pre_hook(lambda _, inputs: types.add((inputs[2].dtype,)))
    model(tokens()).float().square().sum().backward()
    wide, narrow = torch.float32, torch.bfloat16
    assert types == {(wide,), (wide, narrow, narrow, narrow)}


@pytest.mark.ranks(4)
def test_experts_of_two_layers_that_fsdp_cannot_shard_are_refused(job: Job) -> None:
    model = Model(Case())
    model.layers[1].experts.down_proj = model.layers[0].experts.down_proj
    mesh = meshtrain.build_mesh(Layout({"dp_shard": 4}).with_experts(2))
    message = (
        "layers.1.experts shares down_proj with another layer, and FSDP .* use expert_parallel: 4"
    )
    with pytest.raises(InputError, match=message):
        meshtrain.parallelize(model, mesh)


# Gathers of the whole model, layers and experts; the last layer stays gathered from its forward to
# its backward.
FORWARD = "all layer experts layer run0 experts run1"


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("recompute", "reshard", "backward"),
    [
        ("none", True, "back1 layer back0 experts"),
        ("full", True, "back1 layer run1 back0 experts run0"),
        ("none", False, "back1 back0 run0 run1 back1 back0"),  # a second microbatch gathers nothing
    ],
)
def test_a_layer_gathers_ahead(
    job: Job, recompute: str, reshard: bool, backward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experts and the next layer, in backward the previous one, whatever is recomputed."""
    mesh = meshtrain.build_mesh(Layout({"dp_shard": 4}).with_experts(2))
    model, events = Model(Case()), list[str]()
    for number, layer in enumerate(model.layers):

        def run(x: Tensor, number: int = number, forward: Any = layer.forward) -> Tensor:
            events.append(f"run{number}")
            y = forward(x)
            y.register_hook(lambda _: events.append(f"back{number}"))
            return y

        layer.forward = run

    def count(mesh: Mesh, axis: str, kind: str, whole: Tensor) -> None:
        if kind == "all_gather":
            rest = "all" if whole.numel() >= 2 * V * D else "layer"
            events.append("experts" if axis == fsdp.EXPERT_SHARD else rest)

    monkeypatch.setattr(fsdp, "PREFETCHED_ON", ("cpu",))
    monkeypatch.setattr(fsdp, "_count", count)
    meshtrain.parallelize(model, mesh, recompute=recompute, reshard_after_forward=reshard)
    for is_last in (True,) if reshard else (False, True):
        set_is_last_backward(model, is_last)
        model(tokens()).square().sum().backward()
    assert " ".join(events) == f"{FORWARD} {backward}"


PLAN = {"experts": "ep_dispatch_experts"}


def test_fsdp_cuts_experts_while_each_shard_has_one() -> None:
    assert expert_shard_dim((8, 6, 4), ep=2, efsdp=4) == 0
    assert expert_shard_dim((8, 6, 4), ep=4, efsdp=3) == 1
    # 6 rows do not divide: some ranks have no part
    assert expert_shard_dim((8, 6, 4), ep=4, efsdp=4) == 0


class _Scaled(nn.Module):
    """Another layer of experts, which does not compute by `dispatch`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 3))


class _WithBias(Experts):
    def __init__(self, *shape: int) -> None:
        super().__init__(4, 3, 2)
        self.bias = nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize(
    "module", [_Scaled(), _WithBias(), _WithBias(3, 4), nn.Sequential(Experts(4, 3, 2))]
)
def test_a_plan_that_names_something_else_is_refused(module: nn.Module) -> None:
    model = nn.Module()
    model.experts = module
    with pytest.raises(SplitError, match="names experts, which is no layer of experts"):
        expert_modules(model, PLAN)
    model.experts = _WithBias(4, 3)
    assert expert_modules(model, PLAN) == {"experts": 4}
    with pytest.raises(
        SplitError, match=r"'layers.*' matches no module.* is 'rowwise': use ep_dispatch_experts"
    ):
        expert_modules(model, {"layers.*": "rowwise"})
