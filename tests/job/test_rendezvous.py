"""How the ranks of a job meet at its store: what they ask of it, and what they say of those that do
not come."""

import os
import re
import socket
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from meshtrain.errors import (
    InputError,
    StartError,
)
from meshtrain.job import rendezvous
from meshtrain.job.environment import Environment
from meshtrain.job.process import Job
from tests.job.fakes import on_ranks, place


def test_ranks_that_wait_ask_more_and_more_seldom_and_each_start_has_a_name_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last rank comes late. The second start finds all that the first has left in the store."""
    world, store, names = 16, Mock(wraps=dist.HashStore()), []
    sleep, pauses = time.sleep, defaultdict(list)

    def pause(seconds: float) -> None:
        pauses[threading.current_thread().name].append(seconds)
        sleep(0.001)

    def meet(rank: int) -> str:
        while rank == world - 1 and len(pauses["0"]) <= 20:
            sleep(0.001)
        return rendezvous.agree_on_start(place(rank, world), store)

    monkeypatch.setattr(rendezvous.time, "sleep", pause)
    for _ in range(2):
        pauses.clear()
        names += set(on_ranks(world, meet))
        assert pauses["0"][20] == 0.25
        for waits in pauses.values():
            assert waits == sorted(waits)
            assert len(set(waits[:5])) == len(waits[:5]), "each is longer than the one before"
    assert len(set(names)) == len(names) == 2
    assert len(store.set.mock_calls) == 2 * world, "rank 0 answers many at once"


def test_a_start_that_a_rank_does_not_come_to_ends_and_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 0, 1, 2 and 5 of 6 come, of which 5 has a host of its own."""
    store = dist.HashStore()
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a,b,c")

    def meet(rank: int) -> str:
        if rank in (3, 4):
            return ""
        environment = Environment("srun", rank, 6, 0, "c" if rank == 5 else "a", ("a", 1))
        with pytest.raises(StartError) as error:
            rendezvous.agree_on_start(environment, store, time.monotonic() + 1)
        return str(error.value)

    told = on_ranks(6, meet)
    assert re.fullmatch(
        r"the job does not begin: after \d+ s it still waits for ranks 3-4 \(no rank of host b has "
        r"come\)",
        told[0],
    )
    assert told[1] == told[2] == told[5] == told[0], "rank 0 tells those that have come"


def test_a_start_without_rank_0_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LATER_S", 0.1)
    with pytest.raises(
        StartError, match=r"rank 1 on host \S+ has waited \d+ s for rank 0 to begin the job"
    ):
        rendezvous.agree_on_start(place(1, 2), dist.HashStore(), time.monotonic() + 0.1)


def test_two_processes_of_the_same_rank_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 is missing therefore, and would be waited for; each process says what is wrong
    instead."""
    monkeypatch.setattr(rendezvous, "LOOK_FOR_TWIN_S", 0.05)
    store = dist.HashStore()

    def meet(process: int) -> str:
        rank, host = [(0, "a"), (1, "b"), (1, "c")][process]
        with pytest.raises(InputError) as error:
            rendezvous.agree_on_start(
                Environment("none", rank, 3, 0, host, ("a", 1)), store, time.monotonic() + 30
            )
        return str(error.value)

    for told in on_ranks(3, meet):
        hosts = "hosts (b and c|c and b)"
        assert re.fullmatch(
            rf"two processes were started as rank 1, on {hosts}: give each process .*", told
        )


def test_a_rank_that_has_come_twice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two said hello and was answered before the other did."""
    store = dist.HashStore()
    monkeypatch.setattr(rendezvous.uuid, "uuid4", lambda: Mock(hex="token"))
    store.append("token/met", "1\n1\n")
    with pytest.raises(InputError, match="two processes were started as rank 1: give each process"):
        rendezvous.agree_on_start(place(0, 3), store)


def test_twins_of_an_earlier_start_are_forgotten() -> None:
    """torchrun keeps its store when it starts the workers again."""
    store = dist.HashStore()
    store.set(rendezvous.TWINS, "1 token b")
    store.set("hello/1", "another c")
    rendezvous.check_for_twins(store)
    store.set("hello/1", "token c")
    with pytest.raises(InputError, match="two processes were started as rank 1, on hosts b and c"):
        rendezvous.check_for_twins(store)


def test_a_rank_whose_store_ends_before_the_job_begins_says_so() -> None:
    """Without a watchdog there is nobody yet to find out who has ended; rank 0, which serves the
    store, says why."""
    store = Mock(
        spec=dist.Store,
        append=Mock(side_effect=dist.DistNetworkError("Failed to recv, got 0 bytes")),
    )
    job = Job(place(1, 3), torch.device("cpu"), store, limit_s=60)
    said = r"rank 1 on host a has lost the job's store at a:1 before the job began"
    with pytest.raises(StartError, match=said) as told:
        job.gather("exchanging", None)
    assert told.value.follows, "torchrun's report shall name another one"


@pytest.mark.parametrize(
    ("hosts", "nodes", "text"),
    [
        (["a", "a", None, "a"], [], "rank 2 (host a)"),
        (["a", None, None, "b"], [], "ranks 1-2 (ranks have come from hosts a, b)"),
        (["a", "a", None, None], ["a", "b"], "ranks 2-3 (no rank of host b has come)"),
        (
            ["a.site", None, "b", None, "b"],
            ["a", "b", "c"],
            "ranks 1, 3 (host b; no rank of host c has come)",
        ),
    ],
)
def test_missing_ranks_are_named_with_what_is_known_of_their_hosts(
    hosts: list[str | None], nodes: list[str], text: str
) -> None:
    assert rendezvous.describe_missing(hosts, nodes) == text


def test_a_meeting_before_there_is_a_watchdog_ends_and_names_who_is_missing() -> None:
    job = Job(
        place(0, 3), torch.device("cpu"), dist.HashStore(), limit_s=0.2, known_hosts=("a", "b", "b")
    )
    with pytest.raises(
        StartError, match=r"exchanging: 2 of 3 ranks \(1-2 on host b\) did not come within 0\.2 s"
    ):
        job.gather("exchanging", None)


@pytest.mark.parametrize("holder", ["another program", "another rank 0"])
def test_a_port_that_is_taken_is_said_to_be(holder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank 0 has begun to wait for its ranks there; another program does not answer."""
    with ExitStack() as stack:
        if holder == "another program":
            monkeypatch.setattr(rendezvous, "LOOK_S", 0.5)
            port = stack.enter_context(socket.create_server(("", 0))).getsockname()[1]
            said = (
                rf"port {port} of host a, .*in use by another program \(ss -ltnp .*export another "
                rf"MASTER_PORT"
            )
        else:
            server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            server.set("hello/0", "token a")
            port = server.port
            said = (
                rf"port {port} of host a, .*held by another rank 0 .*two processes were started as "
                rf"rank 0"
            )
        environment = Environment("none", 0, 2, 0, "a", ("127.0.0.1", port), hosts_store=True)
        with pytest.raises(InputError, match=said):
            rendezvous.meet_at_store(environment, 60)


def test_where_a_node_has_another_name_for_slurm_than_for_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "scontrol"
    program.write_text(
        '#!/bin/bash\n[[ $* == *"show node rack1-n7"* ]] || exit 1\n'
        "echo NodeName=rack1-n7 Arch=x86_64 NodeAddr=10.0.0.7 NodeHostName=host7 OS=Linux 6.1 "
        "Comment=a=b\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def look_up(name: str, *_: object, **__: object) -> list:
        if name == "known":
            return []
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", look_up)
    assert [rendezvous.address_of_node(name) for name in ("known", "rack1-n7", "unknown")] == [
        "known",
        "10.0.0.7",
        "unknown",
    ]
