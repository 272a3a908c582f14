"""Layers of experts over ranks against one process: losses, gradients, loads, and bytes against closed forms."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshtrain
from meshtrain.data.batch import IGNORE
from meshtrain.data.order import share
from meshtrain.errors import InputError
from meshtrain.experts import Balance, Experts, Router
from meshtrain.job.process import Job
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.loss import GlobalCount, StepTerms, agree_on_fields, sample_losses, valid_targets
from meshtrain.mesh import Mesh
from meshtrain.modeling.experts import dispatch_bytes
from meshtrain.parallel import ddp, fsdp
from meshtrain.parallel.expert import RowLimit, limit_rows
from meshtrain.parallel.grad_sync import set_is_last_backward
from meshtrain.parallel.sharding import chunk_range, local_part
from tests.comparing import ALONE, CPU, gradients, same, same_gradients

S, V, D, WIDE, LAYERS = 5, 11, 7, 4, 2
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
each_place = pytest.mark.parametrize(
    ("job", "sizes", "ep"),
    PLACES,
    indirect=["job"],
    ids=[f"{world}-ranks-{'-'.join(sizes)}-ep{ep}" for world, sizes, ep in PLACES],
)


@dataclass(frozen=True)
class Case:
    experts: int = 4
    per_token: int = 2
    samples: int = 7
    router: float = 1.0  # factor on the router's weights: 0 makes all scores equal
    recompute: str = "none"
    reshard: bool = True
    room: bool = False  # messages of a fixed size, with room for all rows
    sigmoid: bool = False


CASES = {
    "plain": Case(),
    "selective": Case(experts=5, recompute="selective"),
    "room for all": Case(experts=3, samples=2, recompute="full", room=True),
    "ranks without experts, or with padding only": Case(experts=3, samples=2, recompute="full"),
    "all tokens to the first expert": Case(experts=2, per_token=1, router=0.0, reshard=False),
    "sigmoid": Case(experts=6, recompute="full", reshard=False, sigmoid=True),
}


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is a unit of FSDP, and DDP has several buckets."""
    monkeypatch.setattr(fsdp, "MIN_UNIT_SIZE", 0)
    monkeypatch.setattr(ddp, "BUCKET_BYTES", 2000)


class Layer(nn.Module):
    def __init__(self, case: Case, number: int) -> None:
        super().__init__()
        # Per-sample sums, since every layer here has whole samples.
        balance = Balance(
            case.experts,
            LAYERS,
            number,
            kind=("batch", "sequence")[number],
            aux_loss_coef=0.1,
            z_loss_coef=0.01,
            bias_speed=0.05 if case.sigmoid else 0.0,
        )
        options: dict[str, Any] = {}
        if case.sigmoid:
            options = {"score": "sigmoid", "bias": True, "groups": 2, "groups_per_token": 1, "scale": 1.5}
        self.norm = nn.RMSNorm(D)
        self.gate = Router(D, case.experts, case.per_token, balance=balance, **options)
        self.experts = Experts(case.experts, D, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.experts(y, *self.gate(y))


class Model(nn.Module):
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


Microbatches = Sequence[tuple[list[int], int]]  # each as (samples, number of samples that are not padding)


def take_step(model: nn.Module, tokens: Tensor, microbatches: Microbatches, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Leaves the gradients in the model.

    Returns:
        losses of the samples of this rank; sums of the attached terms and the loads over all ranks.
    """
    model.zero_grad()
    mesh.comm_bytes.restart()
    targets = tokens.roll(-1, 1)
    targets[:, -1] = IGNORE
    valid = sum(valid_targets(targets[samples[:real]]) for samples, real in microbatches)
    count = GlobalCount(valid, mesh, CPU)
    terms, losses = StepTerms(count), []
    for i, (samples, real) in enumerate(microbatches):
        set_is_last_backward(model, i == len(microbatches) - 1)
        with terms.of_microbatch(len(samples), real):
            of_samples = sample_losses(model(tokens[samples]), targets[samples])[:real]
            (of_samples.sum() / count.value().to(of_samples.dtype)).backward()
            losses.append(of_samples.detach())
    fields = agree_on_fields(terms, mesh, same_tokens=False)
    sums = mesh.sum(terms.stack(fields))
    terms.receive(dict(zip(fields, sums.split(list(fields.values())), strict=True)), torch.tensor(False))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.sub_(0.3 * p.grad)
    return torch.cat(losses), sums


def microbatches_of(case: Case, data: int, index: int) -> Microbatches:
    """Microbatches of one sample each; a rank with fewer samples than another has padding."""
    own, most = share(case.samples, data, index), -(-case.samples // data)
    return [([own[i]], 1) if i < len(own) else ([0], 0) for i in range(most)]


def bytes_sent(case: Case, mesh: Mesh, chosen: list[Tensor]) -> int:
    """The closed form, given the routing in one process: `chosen` experts of each layer, (samples, s, j)."""
    ranks, data, ep = mesh.layout.group(mesh.rank, "ep"), mesh.size(*DATA_AXES), mesh.size("ep")
    microbatches = [microbatches_of(case, data, mesh.layout.index(rank, *DATA_AXES)) for rank in ranks]
    parts = [chunk_range(case.experts, ep, rank) for rank in range(ep)]
    owner = [rank for rank, part in enumerate(parts) for _ in range(part.start, part.stop)]
    here = ranks.index(mesh.rank)
    own = owner.count(here)
    foreign = case.experts - own
    if case.room:  # a message has the rows of all slots of a microbatch
        most = S * case.per_token
        out, answered = most * (len(set(owner)) - (own > 0)), most * (ep - 1) * (own > 0)
        return LAYERS * len(microbatches[0]) * dispatch_bytes(out, answered, D, 8, foreign, case.recompute)
    sent = 0
    for layer, parallel in product(chosen, zip(*microbatches, strict=True)):
        slots = [[owner[e] for e in layer[samples[0]].flatten().tolist()] * real for samples, real in parallel]
        out = len(slots[here]) - slots[here].count(here)
        answered = sum(targets.count(here) for targets in slots) - slots[here].count(here)
        sent += dispatch_bytes(out, answered, D, 8, foreign, case.recompute)
    return sent


def compare_steps(case: Case, mesh: Mesh, model: nn.Module) -> None:
    """Compares two steps and an evaluation with those of one process."""
    model = meshtrain.parallelize(
        model, mesh, precision="float64", recompute=case.recompute, reshard_after_forward=case.reshard
    )
    if next(model.parameters()).is_meta:
        fill(model, dict(Model(case).double().named_parameters()))
    plain = Model(case).double()
    routed: list[Tensor] = []
    for layer in plain.layers:
        layer.gate.register_forward_hook(lambda _, inputs, output: routed.append(output[0]))
    tokens = torch.randint(V, (case.samples, S), generator=torch.Generator().manual_seed(7))
    microbatches = microbatches_of(case, mesh.size(*DATA_AXES), mesh.index(*DATA_AXES))
    own = [samples[0] for samples, real in microbatches if real]
    for _ in range(2):
        routed.clear()
        limit = RowLimit(float(mesh.size("ep")), CPU) if case.room else None
        with limit_rows(model, limit):
            losses, sums = take_step(model, tokens, microbatches, mesh)
        assert limit is None or not limit.overflow
        sent = mesh.comm_bytes.by_kind("ep")
        expected_losses, expected_sums = take_step(plain, tokens, [([*range(case.samples)], case.samples)], ALONE)
        assert sent == {"all_to_all": bytes_sent(case, mesh, routed)}
        same(losses, expected_losses[own], "losses")
        same(sums, expected_sums, "sums")
        same_gradients(model, gradients(plain))
        corrections = dict(plain.named_parameters())
        for name, p in model.named_parameters():
            if not p.requires_grad:
                same(p, corrections[name], name)
    with torch.no_grad():
        same(model(tokens[:1]), plain(tokens[:1]), "evaluation")


@torch.no_grad()
def fill(model: nn.Module, values: dict[str, Tensor]) -> None:
    model.to_empty(device="cpu")
    for name, p in model.named_parameters():
        local, part = local_part(p)
        local.copy_(values[name][part])


@each_place
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_steps_are_those_of_one_process(job: Job, sizes: dict[str, int], ep: int, case: Case) -> None:
    compare_steps(case, meshtrain.build_mesh(Layout(sizes).with_experts(ep)), Model(case))


@pytest.mark.ranks(4)
def test_replicas_of_experts_that_fsdp_does_not_shard_start_on_the_meta_device(job: Job) -> None:
    mesh = meshtrain.build_mesh(Layout({"dp_replicate": 2, "dp_shard": 2}).with_experts(2))
    compare_steps(Case(), mesh, Model(Case()).to("meta"))


@each_place
def test_routing_weights_and_loads_stay_in_float32(job: Job, sizes: dict[str, int], ep: int) -> None:
    """In 16 bits, whoever casts the parameters."""
    mesh = meshtrain.build_mesh(Layout(sizes).with_experts(ep))
    model = meshtrain.parallelize(Model(Case()), mesh, precision="bfloat16")
    types: set[tuple[torch.dtype, ...]] = set()
    for layer in model.layers:
        products = layer.experts._products

        def record(rows: Tensor, counts: Tensor, layer: nn.Module = layer, products: Any = products) -> Tensor:
            tensors = layer.gate.balance.loads, layer.gate.weight, layer.experts.down_proj, rows
            types.add(tuple(x.dtype for x in tensors))
            return products(rows, counts)

        layer.experts._products = record
        layer.experts.register_forward_pre_hook(lambda _, inputs: types.add((inputs[2].dtype,)))
    model(torch.arange(S).expand(2, -1)).float().square().sum().backward()
    wide, narrow = torch.float32, torch.bfloat16
    assert types == {(wide,), (wide, narrow, narrow, narrow)}


@pytest.mark.ranks(4)
def test_experts_of_two_layers_that_fsdp_cannot_shard_are_refused(job: Job) -> None:
    model = Model(Case())
    model.layers[1].experts.down_proj = model.layers[0].experts.down_proj
    mesh = meshtrain.build_mesh(Layout({"dp_shard": 4}).with_experts(2))
    message = "layers.1.experts shares down_proj with another layer, and FSDP .* use expert_parallel: 4"
    with pytest.raises(InputError, match=message):
        meshtrain.parallelize(model, mesh)


# Gathers of the whole model, layers and experts; the last layer stays gathered from its forward to its backward.
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
        model(torch.arange(S)[None]).square().sum().backward()
    assert " ".join(events) == f"{FORWARD} {backward}"
