"""Run by forked.py: layers of experts over ranks against one process: outputs, gradients, loads, and the bytes that
every rank sends against closed forms; prints failures."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshtrain
from meshtrain.data.batch import IGNORE
from meshtrain.data.order import share
from meshtrain.errors import InputError
from meshtrain.experts import Balance, Experts, Router
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.loss import GlobalCount, StepTerms, agree_on_fields, sample_losses, valid_targets
from meshtrain.mesh import Mesh
from meshtrain.modeling.experts import dispatch_bytes
from meshtrain.parallel import ddp, fsdp
from meshtrain.parallel.expert import RowLimit, limit_rows
from meshtrain.parallel.grad_sync import set_is_last_backward
from meshtrain.parallel.sharding import chunk_range, local_part

fsdp.MIN_UNIT_SIZE = 0  # make each block an FSDP unit
ddp.BUCKET_BYTES = 2000  # several buckets

S, V, D, WIDE, LAYERS = 5, 11, 7, 4, 2
ALONE = Mesh(Layout({"dp_shard": 1}), 0, "cpu", None, {})
ep_plan = {"layers.*.experts": "ep_dispatch_experts"}
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid": {"score": "sigmoid", "bias": True, "groups": 2, "groups_per_token": 1, "scale": 1.5},
}


@dataclass(frozen=True)
class Case:
    layout: tuple[tuple[str, int], ...]
    ep: int
    kind: str = "softmax"
    experts: int = 4
    per_token: int = 2
    samples: int = 7
    router: float = 1.0  # factor on the router's weights: 0 makes all scores equal
    recompute: str = "none"
    reshard: bool = True
    precision: str = "float64"
    room: float | None = None  # `expert_rows`, for messages of a fixed size
    meta: bool = False  # whether it is built on the meta device and materialized after sharding


def cases(world: int) -> Iterator[Case]:
    layouts = {
        2: [({"dp_shard": 2}, (2,)), ({"dp_replicate": 2}, (2,))],
        3: [({"dp_shard": 3}, (3,)), ({"dp_replicate": 3}, (3,))],
        4: [
            ({"dp_shard": 4}, (2, 4)),
            ({"dp_replicate": 2, "dp_shard": 2}, (2, 4)),
            ({"dp_replicate": 4}, (2, 4)),
        ],
    }
    for sizes, eps in layouts[world]:
        for ep, kind in product(eps, KINDS):
            case = Case(tuple(sizes.items()), ep, kind)
            if kind == "sigmoid":  # groups of experts divide them
                yield replace(case, experts=6, recompute="full", reshard=False)
                continue
            yield case
            yield replace(case, experts=5, recompute="selective")
            yield replace(case, experts=3, samples=2, recompute="full", room=float(ep))
            yield replace(case, experts=3, samples=2, recompute="full")  # ranks without experts, or with padding only
            yield replace(case, experts=2, per_token=1, router=0.0, reshard=False)  # all tokens to the first expert
            yield replace(case, precision="bfloat16")
            if len(sizes) == 2 and ep == 2:  # replicas of experts that FSDP does not shard
                yield replace(case, meta=True)


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
            bias_speed=0.05 if case.kind == "sigmoid" else 0.0,
        )
        self.norm = nn.RMSNorm(D)
        self.gate = Router(D, case.experts, case.per_token, balance=balance, **KINDS[case.kind])
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


@dataclass
class Step:
    losses: Tensor  # of each sample of this rank
    gradients: dict[str, Tensor]
    sums: Tensor  # sums of the attached terms and the loads over all ranks


def take_step(model: nn.Module, tokens: Tensor, mine: Sequence[tuple[list[int], int]], mesh: Mesh) -> Step:
    """`mine`: this rank's microbatches, each as (samples, number of samples that are not padding)."""
    model.zero_grad()
    mesh.comm_bytes.restart()
    targets = tokens.roll(-1, 1)
    targets[:, -1] = IGNORE
    count = GlobalCount(
        sum(valid_targets(targets[samples[:real]]) for samples, real in mine), mesh, torch.device("cpu")
    )
    terms, losses = StepTerms(count), []
    for i, (samples, real) in enumerate(mine):
        set_is_last_backward(model, i == len(mine) - 1)
        with terms.of_microbatch(len(samples), real):
            of_samples = sample_losses(model(tokens[samples]), targets[samples])[:real]
            (of_samples.sum() / count.value().to(of_samples.dtype)).backward()
            losses.append(of_samples.detach())
    fields = agree_on_fields(terms, mesh, same_tokens=False)
    sums = mesh.sum(terms.stack(fields))
    terms.receive(dict(zip(fields, sums.split(list(fields.values())), strict=True)), torch.tensor(False))
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.sub_(0.3 * p.grad)
    return Step(torch.cat(losses), grads, sums)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def microbatches(case: Case, data: int, index: int) -> list[tuple[list[int], int]]:
    """Microbatches of one sample each; a rank with fewer samples than another has padding."""
    own, most = share(case.samples, data, index), -(-case.samples // data)
    return [([own[i]], 1) if i < len(own) else ([0], 0) for i in range(most)]


def bytes_sent(case: Case, mesh: Mesh, chosen: list[Tensor]) -> int:
    """The closed form, given the routing in one process: `chosen` experts of each layer, (samples, s, j)."""
    ranks, data = mesh.layout.group(mesh.rank, "ep"), mesh.size(*DATA_AXES)
    every = [microbatches(case, data, mesh.layout.index(rank, *DATA_AXES)) for rank in ranks]
    owner = [
        next(r for r in range(case.ep) if e < chunk_range(case.experts, case.ep, r).stop) for e in range(case.experts)
    ]
    me, sent = ranks.index(mesh.rank), 0
    own = owner.count(me)
    if case.room is not None:  # room for all: a message has the rows of all slots of a microbatch
        most = S * case.per_token
        out, answered = most * (len(set(owner)) - (own > 0)), most * (case.ep - 1) * (own > 0)
        return LAYERS * len(every[0]) * dispatch_bytes(out, answered, D, 8, case.experts - own, case.recompute)
    for layer, i in product(chosen, range(len(every[0]))):
        slots = [[owner[e] for e in layer[b[i][0][0]].flatten().tolist()] * b[i][1] for b in every]
        out = sum(target != me for target in slots[me])
        answered = sum(of_source.count(me) for source, of_source in enumerate(slots) if source != me)
        sent += dispatch_bytes(out, answered, D, 8, case.experts - own, case.recompute)
    return sent


def run(case: Case, world_rank: int) -> list[str]:
    mesh = meshtrain.build_mesh(Layout(dict(case.layout)).with_experts(case.ep))
    tokens = torch.randint(V, (case.samples, S), generator=torch.Generator().manual_seed(7))
    options = {"precision": case.precision, "recompute": case.recompute, "reshard_after_forward": case.reshard}
    model = meshtrain.parallelize(Model(case).to("meta") if case.meta else Model(case), mesh, **options)
    if case.meta:
        fill(model, dict(Model(case).double().named_parameters()))
    if case.precision == "bfloat16":
        return weights_stay_wide(model, tokens, mesh)
    one = Model(case).double()
    mine = microbatches(case, mesh.size(*DATA_AXES), mesh.index(*DATA_AXES))
    routed: list[Tensor] = []
    for layer in one.layers:
        layer.gate.register_forward_hook(lambda _, inputs, output: routed.append(output[0]))
    problems = []
    for number in range(2):
        routed.clear()
        limit = None if case.room is None else RowLimit(case.room, torch.device("cpu"))
        with limit_rows(model, limit):
            ours = take_step(model, tokens, mine, mesh)
        if limit is not None and limit.overflow:
            problems.append(f"{limit.overflow} rows without room")
        sent = mesh.comm_bytes.by_kind("ep")
        alone = take_step(one, tokens, [(list(range(case.samples)), case.samples)], ALONE)
        expected = bytes_sent(case, mesh, routed)
        if sent != {"all_to_all": expected}:
            problems.append(f"step {number}: sent {sent}, expected {expected}")
        own = [samples[0] for samples, real in mine if real]
        pairs = {"losses": (ours.losses, alone.losses[own]), "sums": (ours.sums, alone.sums)}
        pairs |= {name: (grad, alone.gradients[name]) for name, grad in ours.gradients.items()}
        state = {
            name: (p, dict(one.named_parameters())[name]) for name, p in model.named_parameters() if not p.requires_grad
        }
        for name, (a, b) in (pairs | state).items():
            if not torch.allclose(a, b, rtol=1e-10, atol=1e-12):
                problems.append(f"step {number}: {name} off by {float((a - b).abs().max()):.1e}")
    with torch.no_grad():
        same = torch.allclose(model(tokens[:1]), one(tokens[:1]), rtol=1e-10, atol=1e-12)
    return problems + ([] if same else ["evaluation"])


@torch.no_grad()
def fill(model: nn.Module, values: dict[str, Tensor]) -> None:
    model.to_empty(device="cpu")
    for name, p in model.named_parameters():
        local, part = local_part(p)
        local.copy_(values[name][part])


def weights_stay_wide(model: nn.Module, tokens: Tensor, mesh: Mesh) -> list[str]:
    """In 16 bits, the routing weights and the loads stay in float32, whoever casts the parameters."""
    types: set[tuple[torch.dtype, ...]] = set()
    for layer in model.layers:
        products = layer.experts._products

        def record(rows: Tensor, counts: Tensor, layer: nn.Module = layer, products: Any = products) -> Tensor:
            loads = layer.gate.balance.loads
            types.add((loads.dtype, layer.gate.weight.dtype, layer.experts.down_proj.dtype, rows.dtype))
            return products(rows, counts)

        layer.experts._products = record
        layer.experts.register_forward_pre_hook(lambda _, inputs: types.add((inputs[2].dtype,)))
    model(tokens[:1].expand(2, -1)).float().square().sum().backward()
    wide, narrow = torch.float32, torch.bfloat16
    expected = {(wide,), (wide, narrow, narrow, narrow)}
    return [] if types == expected else [f"types {types}"]


def shared_experts_are_refused(world: int) -> list[str]:
    model = Model(Case((("dp_shard", world),), 2))
    model.layers[1].experts.down_proj = model.layers[0].experts.down_proj
    mesh = meshtrain.build_mesh(Layout({"dp_shard": world}).with_experts(2))
    try:
        meshtrain.parallelize(model, mesh)
    except InputError as error:
        right = f"layers.1.experts shares down_proj with another layer, and FSDP .* use expert_parallel: {world}"
        return [] if re.search(right, str(error)) else [str(error)]
    return ["experts of two layers that FSDP cannot shard were taken"]


def gathered_ahead() -> list[str]:
    """A layer prefetches its experts and the next layer, in backward the previous one, whatever is recomputed."""
    mesh, tokens = meshtrain.build_mesh(Layout({"dp_shard": 4}).with_experts(2)), torch.arange(S)[None]
    # Gathers of the whole model, layers and experts; the last layer stays gathered from its forward to its backward.
    forward, problems = "all layer experts layer run0 experts run1 ", []
    for recompute, reshard, expected in (
        ("none", True, forward + "back1 layer back0 experts"),
        ("full", True, forward + "back1 layer run1 back0 experts run0"),
        ("none", False, forward + "back1 back0 run0 run1 back1 back0"),
    ):
        model, log = Model(Case((), 2)), list[str]()
        for number, layer in enumerate(model.layers):

            def run(x: Tensor, number: int = number, forward: Any = layer.forward, log: list = log) -> Tensor:
                log.append(f"run{number}")
                y = forward(x)
                y.register_hook(lambda _: log.append(f"back{number}"))
                return y

            layer.forward = run

        def count(mesh: Mesh, axis: str, kind: str, whole: Tensor, log: list = log) -> None:
            if kind == "all_gather":
                rest = "all" if whole.numel() >= 2 * V * D else "layer"
                log.append("experts" if axis == fsdp.EXPERT_SHARD else rest)

        with patch.object(fsdp, "PREFETCHED_ON", ("cpu",)), patch.object(fsdp, "_count", count):
            meshtrain.parallelize(model, mesh, recompute=recompute, reshard_after_forward=reshard)
            for last in (True,) if reshard else (False, True):
                set_is_last_backward(model, last)
                model(tokens).square().sum().backward()
        if " ".join(log) != expected:
            problems.append(f"gathered ahead, {recompute}, {reshard}: {' '.join(log)} and not {expected}")
    return problems


if __name__ == "__main__":
    with meshtrain.start(120) as job:
        failures, count = [], 0
        if job.world_size == 4:
            failures += shared_experts_are_refused(4) + gathered_ahead()
        for case in cases(job.world_size):
            count += 1
            failures += [f"{case}: {problem}" for problem in run(case, job.rank)]
        print(json.dumps({"rank": job.rank, "checked": count, "failures": failures}) + "\n", end="", flush=True)
