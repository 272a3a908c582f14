"""What the engine decides before it sends anything: one order for all, what is learnt from it, the form of a tensor."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.pipeline.actions import Schedule, Transfer
from meshtrain.pipeline.loop_schedules import forwards_alone
from meshtrain.pipeline.p2p import DTYPES, TensorMeta, Transfers, sends_confirmed_by, transfer_order
from meshtrain.pipeline.schedule import NAMES, build
from meshtrain.pipeline.simulate import simulate
from tests.properties import given, settings, st

SCHEDULES = [(name, ranks, microbatches) for name in NAMES for ranks, microbatches in product((2, 3, 4), (1, 3, 4, 9))]


def all_transfers(schedule: Schedule) -> set[Transfer]:
    return {
        transfer
        for rank in range(schedule.ranks)
        for action in schedule.actions_of(rank)
        for transfer in schedule.sends(action)
    }


@pytest.mark.parametrize(("name", "ranks", "microbatches"), SCHEDULES)
def test_messages_could_be_sent_strictly_one_after_the_other(name: str, ranks: int, microbatches: int) -> None:
    """Every rank posts its own in the order of all; a rank that comes to one waits until the other end has, too."""
    schedule = build(name, ranks=ranks, microbatches=microbatches)
    order = transfer_order(schedule)
    assert len(order) == len(set(order))
    assert set(order) == all_transfers(schedule)
    place = {transfer: i for i, transfer in enumerate(order)}
    done: set[object] = set()
    at = [0] * ranks
    left = [schedule.actions_of(rank) for rank in range(ranks)]
    for transfer in order:  # each in turn: its sender can come to the action that makes it without any later one
        source = transfer.source
        while transfer not in done:
            action = left[source][at[source]]
            assert all(need in done for need in schedule.receives(action))
            assert all(place[need] < place[transfer] for need in schedule.receives(action))
            done.update(schedule.sends(action))
            at[source] += 1


@pytest.mark.parametrize(("ranks", "microbatches"), list(product((2, 3, 4), (1, 4, 9))))
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv"])
def test_forwards_alone_fill_the_pipeline(name: str, ranks: int, microbatches: int) -> None:
    """All of them, on the ranks of the schedule's stages, without waiting but to fill and to empty it."""
    placement = build(name, ranks=ranks, microbatches=microbatches).placement
    plan = forwards_alone(placement, microbatches)
    actions = [action for rank in range(ranks) for action in plan.actions_of(rank)]
    assert len(actions) == len(set(actions)) == len(placement) * microbatches
    assert all(plan.rank_of(action.stage) == rank for rank in range(ranks) for action in plan.actions_of(rank))
    bubble = simulate(plan).makespan - len(placement) // ranks * microbatches
    assert bubble <= len(placement) - 1
    assert set(transfer_order(plan)) == all_transfers(plan)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), SCHEDULES)
def test_what_has_come_back_had_been_used(name: str, ranks: int, microbatches: int) -> None:
    schedule = build(name, ranks=ranks, microbatches=microbatches)
    for rank in range(ranks):
        learnt = sends_confirmed_by(schedule, rank)
        told = [sent for many in learnt.values() for sent in many]
        assert len(told) == len(set(told)), "each is let go once"
        for got, many in learnt.items():
            assert got.target == rank
            row = schedule.actions_of(got.source)
            makes = next(i for i, action in enumerate(row) if got in schedule.sends(action))
            for sent in many:
                assert (sent.source, sent.target) == (rank, got.source)
                uses = next(i for i, action in enumerate(row) if sent in schedule.receives(action))
                assert uses <= makes
        activations = {t for t in all_transfers(schedule) if t.source == rank and t.kind == "activation"}
        assert activations <= set(told), "the gradient of an activation is the latest that tells of it"


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(0, 4), max_size=5),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(DTYPES),
)
def test_a_tensor_arrives_with_its_numbers_and_its_strides(shape: list[int], seed: int, dtype: torch.dtype) -> None:
    turned = torch.randperm(len(shape), generator=torch.Generator().manual_seed(seed)).tolist()
    tensor = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape).permute(turned)
    form = TensorMeta.unpacked(TensorMeta.of(tensor).packed())
    assert form == TensorMeta.of(tensor)
    memory = form.empty(torch.device("cpu"))
    sent = form.lay_out(tensor)
    assert sent.is_contiguous()
    assert (memory.shape, memory.dtype) == (sent.shape, sent.dtype)
    memory.copy_(sent)
    arrived = form.view(memory)
    assert torch.equal(arrived, tensor)
    if tensor.numel() > 1 and 1 not in tensor.shape:
        assert arrived.stride() == tensor.stride()


def test_what_is_contiguous_is_not_copied() -> None:
    """The order of the sequence first, as tensor-parallel layers give it."""
    tensor = torch.zeros(6, 2, 4).transpose(0, 1)
    assert TensorMeta.of(tensor).lay_out(tensor).data_ptr() == tensor.data_ptr()


class Posted:
    """Takes what is sent and forgets it."""

    def __init__(self) -> None:
        self.shapes: list[list[int]] = []

    def __call__(self, tensor: torch.Tensor, *to: Any) -> Any:
        self.shapes.append(list(tensor.shape))
        return SimpleNamespace(wait=lambda: None)


def test_each_microbatch_has_a_form_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver makes memory of the form that it was told, so a sender may not send any other."""
    sent = Posted()
    monkeypatch.setattr(dist, "isend", sent)
    monkeypatch.setattr(dist, "irecv", Posted())
    mesh = Mesh(Layout({"pp": 2}), 0, "cpu", None, {(0, 1): Any})
    schedule = build("gpipe", ranks=2, microbatches=3)
    first, second, third = (Transfer("activation", 1, i, 0, 1) for i in range(3))
    for keys, known in (("aba", [18]), ("aaa", [])):
        transfers = Transfers(mesh, torch.device("cpu"))
        transfers.begin(transfer_order(schedule), keys)
        sent.shapes.clear()
        transfers.send(first, torch.zeros(2, 12, 4))
        assert sent.shapes == [[18], [2, 12, 4]], "the form goes before the tensor"
        if known:
            transfers.send(second, torch.zeros(2, 7, 4))
            transfers.send(third, torch.zeros(2, 12, 4))
            assert sent.shapes[2:] == [known, [2, 7, 4], [2, 12, 4]]
            continue
        for other in (torch.zeros(2, 7, 4), torch.zeros(2, 12, 4, dtype=torch.float64)):
            with pytest.raises(InputError, match=r"activation for stage 1 of microbatch 1 is .*use pp: 1"):
                transfers.send(second, other)
        assert len(sent.shapes) == 2, "nothing was sent that the other end does not expect"
