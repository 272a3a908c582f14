"""Muon: the formula, which rank computes which matrix, and that ranks which share matrices update
them as one does."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import meshtrain
from meshtrain.job.locate import model_file
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.loss import sample_losses
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.optim import Optimizer
from meshtrain.optim.groups import suits_muon
from meshtrain.optim.matrices import Piece, deal_out, holders_of, matrices_of, plan_exchange
from meshtrain.parallel import fsdp
from meshtrain.parallel.sharding import Cut, ParameterSpec, local_part
from tests.comparing import ALONE, small_llama, tokens
from tests.optim.steps import config, optimizer_of, set_gradients, update


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
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    config = module.Config(
        **sizes, num_experts=3, moe_intermediate_size=10, vocab_size=11, mlp_only_layers=[1]
    )
    return module.Model(config).double()


@pytest.mark.parametrize("nesterov", [False, True])
def test_every_matrix_follows_the_formula(nesterov: bool) -> None:
    """Gate and up of each expert are matrices of their own; the router is one; embedding, head and
    norms are none."""
    ours, theirs = small_moe(), small_moe()
    optimizer = optimizer_of(
        ours, name="muon", lr=0.02, momentum=0.9, nesterov=nesterov, weight_decay=0.1
    )
    trained = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    matrices = {
        name: p for name, p in trained.items() if suits_muon(ParameterSpec(name, tuple(p.shape)))
    }
    momenta = {name: torch.zeros_like(p) for name, p in matrices.items()}
    count = 0
    for step in (1, 2, 3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        update(optimizer, step)
        for name, p in matrices.items():
            momenta[name].mul_(0.9).add_(0.1 * p.grad)
            direction = 0.1 * p.grad + 0.9 * momenta[name] if nesterov else momenta[name]
            parts = (
                [direction]
                if p.dim() == 2
                else [m for e in direction for m in e.chunk(2 if "gate" in name else 1)]
            )
            count += len(parts)
            with torch.no_grad():
                p.mul_(1 - 0.02 * 0.1).sub_(
                    0.02 * torch.cat([formula(part) for part in parts]).view_as(p)
                )
    for name, p in matrices.items():
        torch.testing.assert_close(ours.get_parameter(name), p, rtol=1e-9, atol=1e-12)
    assert count == 3 * (2 * 4 + 1 + 3 * 3 + 3), (
        "q, k, v, o; a router and three of each expert; gate, up, down"
    )


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
    spec = ParameterSpec("a.gate_up", (5, 4, 3), (Cut("ep", 0, 2), Cut("efsdp", 0, 2)))
    parts = matrices_of(spec, {"*.gate_up": ("*.{}.gate", "*.{}.up")})
    assert len(parts) == 10
    assert parts[3] == (slice(1, 2), slice(2, 4), slice(0, 3))
    assert len(matrices_of(spec, {})) == 5
    for table in ({}, {"w": ()}):  # the second: one that no file has
        assert matrices_of(ParameterSpec("w", (4, 3)), table) == [(slice(0, 4), slice(0, 3))]
    layout = Layout({"dp_replicate": 2, "dp_shard": 4}).with_experts(2)
    holders = [
        (part[0].start, part[0].stop, places) for part, places in holders_of(spec, layout, range(8))
    ]
    assert holders == [(0, 2, [0, 4]), (3, 4, [1, 5]), (2, 3, [2, 6]), (4, 5, [3, 7])]


@pytest.mark.parametrize(
    ("layout", "cuts"),
    [
        (Layout({"dp_shard": 4}), [Cut("dp_shard", 0, 4)]),
        (Layout({"dp_replicate": 2, "tp": 3}), [Cut("tp", 1, 3)]),
        (Layout({"dp_shard": 3, "tp": 2}), [Cut("tp", 0, 2), Cut("dp_shard", 0, 3)]),
    ],
    ids=str,
)
def test_both_ends_of_a_message_know_its_pieces(layout: Layout, cuts: list[Cut]) -> None:
    """Each matrix arrives once at its owner, and its result at all holders; of 5 rows some ranks
    have none."""
    specs = [
        ParameterSpec("a", (5, 6), tuple(cuts)),
        ParameterSpec("experts.gate_up", (3, 4, 6), tuple(cuts)),
        ParameterSpec("whole", (2, 2)),
    ]
    table = {"*.gate_up": ("*.{}.gate", "*.{}.up")}
    ranks = range(layout.world_size)
    plans = [plan_exchange([(spec, table) for spec in specs], layout, ranks, me) for me in ranks]

    def between(messages: list[tuple[int, Piece]], other: int) -> list[tuple[int, object]]:
        return [(piece.matrix.number, piece.part) for rank, piece in messages if rank == other]

    for sender in ranks:
        for receiver in ranks:
            for way in ("to_owners", "to_holders"):
                sent, taken = getattr(plans[sender], way), getattr(plans[receiver], way)
                assert between(sent.outgoing, receiver) == between(taken.arriving, sender)

    gathered, returned = Counter[int](), Counter[int]()
    for plan in plans:
        for _, piece in plan.to_owners.arriving:
            gathered[piece.matrix.number] += piece.numel
        for _, piece in plan.to_holders.arriving:
            returned[piece.matrix.number] += piece.numel
    sizes = [30] + 6 * [12] + [4]
    assert gathered == dict(enumerate(sizes))
    for number, size in enumerate(sizes):
        spec = specs[(number > 0) + (number > 6)]
        assert returned[number] == size * spec.copies(layout)


def trained(mesh: Mesh) -> nn.Module:
    """Three updates of a model by its own gradients."""
    model = meshtrain.parallelize(small_llama(), mesh, precision="float64")
    optimizer = Optimizer(model, config(name="muon", lr=0.02, momentum=0.9), mesh, 10)
    samples = tokens().chunk(mesh.size("dp_shard"))[mesh.index("dp_shard")]
    for step in (1, 2, 3):
        sample_losses(model(samples), samples).sum().backward()
        update(optimizer, step)
        optimizer.zero_grad()
    return model


@pytest.mark.ranks(2, 4)
def test_ranks_that_share_matrices_update_them_as_one_process(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix is orthogonalized by one rank, which receives its parts and sends the parts of the
    result back."""
    monkeypatch.setattr(fsdp, "MIN_UNIT_SIZE", 0)
    plain = trained(ALONE)
    mesh = build_mesh(Layout({"dp_shard": 2, "tp": job.world_size // 2}))
    for name, parameter in trained(mesh).named_parameters():
        part, where = local_part(parameter)
        torch.testing.assert_close(
            part, plain.get_parameter(name)[where], rtol=1e-9, atol=1e-12, msg=name
        )
