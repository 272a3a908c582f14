"""What the engine decides before it sends anything: one order for all, what is learnt from it, the
form of a tensor."""

from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.pipeline.actions import Schedule, Transfer
from meshtrain.pipeline.forms import TensorMeta
from meshtrain.pipeline.loop_schedules import forwards_alone
from meshtrain.pipeline.p2p import Transfers, sends_confirmed_by, transfer_order
from meshtrain.pipeline.schedule import NAMES, build
from meshtrain.pipeline.simulate import simulate
from tests.properties import given, settings, st


def schedules(name: str) -> list[Schedule]:
    return [
        build(name, ranks=ranks, microbatches=m) for ranks, m in product((2, 3, 4), (1, 3, 4, 9))
    ]


def all_transfers(schedule: Schedule) -> set[Transfer]:
    """What is sent, all of which is received."""
    every = [(rank, action) for rank, row in enumerate(schedule.actions) for action in row]
    sent = [(rank, transfer) for rank, action in every for transfer in schedule.sends(action)]
    received = [
        (rank, transfer) for rank, action in every for transfer in schedule.receives(action)
    ]
    assert all(rank == transfer.source for rank, transfer in sent)
    assert all(rank == transfer.target for rank, transfer in received)
    assert len(sent) == len(received)
    assert {transfer for _, transfer in sent} == {transfer for _, transfer in received}
    return {transfer for _, transfer in sent}


@pytest.mark.parametrize("name", NAMES)
def test_messages_could_be_sent_strictly_one_after_the_other(name: str) -> None:
    """Every rank posts its own in the order of all; a rank that comes to one waits until the other
    end has, too."""
    for schedule in schedules(name):
        order = transfer_order(schedule)
        assert len(order) == len(set(order))
        assert set(order) == all_transfers(schedule)
        across = sum(a != b for a, b in pairwise(schedule.placement))
        assert len(order) == 2 * across * schedule.microbatches
        sent: set[Transfer] = set()
        waiting = [list(schedule.actions_of(rank)) for rank in range(schedule.ranks)]
        # each in turn: its sender can come to the action that makes it without any later one
        for transfer in order:
            while transfer not in sent:
                action = waiting[transfer.source].pop(0)
                arrived = set(order[: order.index(transfer)])
                assert arrived.issuperset(schedule.receives(action)), schedule.title
                sent.update(schedule.sends(action))


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv"])
def test_forwards_alone_fill_the_pipeline(name: str) -> None:
    """All of them, on the ranks of the schedule's stages, without waiting but to fill and to empty
    it."""
    for schedule in schedules(name):
        placement = schedule.placement
        plan = forwards_alone(placement, schedule.microbatches)
        actions = [action for rank in range(plan.ranks) for action in plan.actions_of(rank)]
        assert len(actions) == len(set(actions)) == len(placement) * schedule.microbatches
        assert all(
            plan.rank_of(action.stage) == rank
            for rank, row in enumerate(plan.actions)
            for action in row
        )
        bubble = simulate(plan).makespan - len(placement) // plan.ranks * schedule.microbatches
        assert bubble <= len(placement) - 1


@pytest.mark.parametrize("name", NAMES)
def test_what_has_come_back_had_been_used(name: str) -> None:
    for schedule, rank in product(schedules(name), range(4)):
        confirmed = sends_confirmed_by(schedule, rank)
        every = [sent for sends in confirmed.values() for sent in sends]
        assert len(every) == len(set(every)), "each is let go once"
        for received, sends in confirmed.items():
            assert received.target == rank
            row = schedule.actions_of(received.source)
            sent_by = next(i for i, action in enumerate(row) if received in schedule.sends(action))
            before = [
                transfer for action in row[: sent_by + 1] for transfer in schedule.receives(action)
            ]
            assert set(sends) <= {transfer for transfer in before if transfer.source == rank}
        activations = {
            t for t in all_transfers(schedule) if t.source == rank and t.kind == "activation"
        }
        assert activations <= set(every), (
            "the gradient of an activation is the latest that tells of it"
        )


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 4), max_size=5),
    st.randoms(),
    st.sampled_from((torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)),
)
def test_a_tensor_arrives_with_its_numbers_and_its_strides(
    shape: list[int], random: Any, dtype: torch.dtype
) -> None:
    order = random.sample(range(len(shape)), len(shape))
    tensor = torch.arange(torch.Size(shape).numel()).to(dtype).view(shape).permute(order)
    form = TensorMeta.of(tensor)
    sent = form.lay_out(tensor)
    assert sent.is_contiguous()
    memory = form.empty(torch.device("cpu"))
    assert (memory.shape, memory.dtype) == (sent.shape, sent.dtype)
    arrived = form.view(memory.copy_(sent))
    assert torch.equal(arrived, tensor)
    if tensor.numel() > 1 and 1 not in tensor.shape:
        assert arrived.stride() == tensor.stride()
        assert sent.data_ptr() == tensor.data_ptr(), "what is contiguous is not copied"


def test_each_microbatch_has_a_form_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver makes memory of the form that it was told, so a sender may not send any other."""
    shapes: list[Any] = []

    def post(tensor: Tensor, *to: Any) -> Any:
        shapes.append("about" if tensor.dtype == torch.uint8 else tuple(tensor.shape))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "isend", post)
    mesh = Mesh(Layout({"pp": 2}), 0, "cpu", None, {(0, 1): Any})
    order = transfer_order(forwards_alone((0, 1), 3))
    expected = {
        "aba": [(1,), "about", (2, 12, 4), (1,), "about", (2, 7, 4), (2, 12, 4)],
        "aaa": [(1,), "about", (2, 12, 4)],
    }
    short = torch.zeros(2, 7, 4)
    for keys in expected:
        transfers = Transfers(mesh, torch.device("cpu"))
        transfers.begin(order, keys)
        shapes.clear()
        transfers.send(order[0], [torch.zeros(2, 12, 4)])
        if keys == "aba":
            transfers.send(order[1], [short])
            transfers.send(order[2], [torch.zeros(2, 12, 4)])
        else:
            others = ([short], [torch.zeros(2, 12, 4, dtype=torch.float64)], [short, short], [])
            for other in others:
                with pytest.raises(
                    InputError, match=r"activation for stage 1 of microbatch 1 is .*use pp: 1"
                ):
                    transfers.send(order[1], other)
            with pytest.raises(InputError, match="another plain value"):
                transfers.send(order[1], [torch.zeros(2, 12, 4)], about=1)
        assert shapes == expected[keys], (
            "the form goes before the tensor, and nothing goes that nobody expects"
        )
