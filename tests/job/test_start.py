"""The start of a job in worlds of several sizes: what a rank asks of the store, and is told by it,
does not grow."""

from datetime import timedelta

import pytest
import torch.distributed as dist

import start

FEW, MANY = 16, 48  # of 8 ranks to a host


def meet(ranks: int, real: int | None = None) -> start.Start:
    """Every rank has a connection of its own to a store of this world."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(minutes=2)
    return start.meet(
        ranks, lambda: dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit), real
    )


@pytest.fixture(scope="module")
def starts() -> tuple[start.Start, start.Start]:
    return meet(FEW), meet(MANY)


def test_calls_of_the_store_do_not_grow_with_the_world(
    starts: tuple[start.Start, start.Start],
) -> None:
    few, many = starts
    assert (few.rounds, few.calls) == (many.rounds, many.calls), "of any rank but rank 0"
    assert many.calls == 3 * many.rounds + 3, (
        "two to give and one to get in each round, and three to meet at all"
    )
    # Rank 0 reads what has been given as often as it finds more of it; it looks more seldom in a
    # larger world.
    assert many.calls_of_rank_0 < 30 * many.rounds
    assert many.polls < 50 * many.rounds


def test_a_rank_is_told_of_hosts_and_of_where_others_listen_alone(
    starts: tuple[start.Start, start.Start],
) -> None:
    few, many = starts
    rest = [of.bytes - of.largest for of in starts]
    assert rest[1] - rest[0] < 32 * (MANY - FEW) / start.GPUS, "names of hosts"
    assert many.largest - few.largest < 64 * (MANY - FEW), "numbers of processes and ports"
    assert rest[1] < 40 * many.rounds, "what is all right takes few words"


def test_groups_are_made_by_as_many_calls_in_any_world() -> None:
    (few, _), (many, _) = map(start.make_groups, (64, 4096))
    assert few == many
    assert not dist.is_initialized()
