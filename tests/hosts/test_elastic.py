"""Hosts come and go while a run trains, and links break: it goes on with those that are left, or
says why it cannot."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from meshtrain.data.order import describe_batch
from tests.hosts.agents import Agents, needs_hosts, rows, same_as, small_run
from tests.launching import root_cause, run
from tests.nethosts import Network

pytestmark = needs_hosts

# Every start has a store of its own: without it torchrun gives ranks that of an earlier one when
# rank 0 moves.
ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# A node that is silent for 5 s is lost, and after the smallest number has come 3 s are left for
# others.
QUICK = "--rdzv-conf=join_timeout=120,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"


def launch(nodes: str, endpoint: str = "node1:29500", restarts: int = 3) -> str:
    return (
        f"--nnodes={nodes} --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint={endpoint} "
        f"--rdzv-id=job {QUICK} "
        f"--max-restarts={restarts}"
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_run(tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="module")
def alone(small: str) -> Path:
    """The run of one process, without any interruption."""
    output = Path(small).with_name("alone")
    run([sys.executable, "-m", "meshtrain.train", small, f"train.output={output}"]).check()
    return output


def begin(agents: Agents, hosts: range, options: str, *words: str) -> None:
    """Starts a job on these hosts and waits until its run is under way, with a checkpoint."""
    agents.pace.set(0.3)
    for host in hosts:
        agents.start(host, options, *words, variables=ELASTIC)
    agents.wait(lambda: len(rows(agents.run)) >= 8)


def ended(agents: Agents) -> dict[str, str]:
    return json.loads((agents.run / "exit.json").read_text())


def test_a_host_is_lost_and_another_one_comes(small: str, alone: Path, tmp_path: Path) -> None:
    """The host of rank 0 is lost: ranks get other numbers. Then another host joins: they do so
    again.

    With `resume: none`, which is about a run's first start. The losses and samples are those of one
    process.
    """
    options = launch("2:3", "node4:29500")  # on a host that stays
    with Network(4, tmp_path) as network:
        agents = Agents(network, tmp_path)
        words = (small, agents.pace.override, "checkpoint.resume=none")
        # it is late each time
        fourth = agents.start(4, f"{options} --monitor-interval=4", *words, variables=ELASTIC)
        begin(agents, range(2, 4), options, *words)
        _, lost, third = agents.agents
        assert "met at node2:" in lost.printed
        network.kill(2)
        agents.wait(lambda: "goes on from" in third.printed and len(rows(agents.run)) > 12)
        agents.pace.set(2.0)
        ended_before = third.printed.count("closing signal SIGTERM")
        joined = agents.start(1, options, *words, variables=ELASTIC)
        agents.wait(lambda: third.printed.count("closing signal SIGTERM") > ended_before)
        # all ranks stop at once, and the fourth host's agent has not looked yet
        agents.pace.set(0.0)
        agents.end(third, fourth, joined)
    # Its kernel may have said good-bye for its processes before it was gone, or not.
    assert re.search("stops, because (rank 0 on )?host node2", third.printed + fourth.printed), (
        agents.printed
    )
    assert "met at node3:" in third.printed
    assert "layout: {dp_shard: 3} -> {dp_shard: 2}" in third.printed
    assert "asked to stop by SIGTERM" in third.printed, (
        "its state was saved before it was started again with one more"
    )
    assert "layout: {dp_shard: 2} -> {dp_shard: 3}" in joined.printed
    assert describe_batch(12, 6, 3) in joined.printed
    same_as(agents.run, alone)
    assert ended(agents)["status"] == "done"


def test_the_hosts_that_are_left_cannot_form_the_layout(small: str, tmp_path: Path) -> None:
    with Network(2, tmp_path) as network:
        agents = Agents(network, tmp_path)
        words = (small, agents.pace.override, "layout={dp_shard: 2}", "train.steps=999")
        begin(agents, range(1, 3), launch("1:2", restarts=2), *words)
        network.kill(2)
        assert agents.agents[0].ends() == 1
    printed = agents.agents[0].printed
    refusal = "layout {dp_shard: 2} needs 2 processes and there is 1: start 2, or use {dp_shard: 1}"
    assert refusal in root_cause(printed)
    assert printed.count(refusal) == 2, "once by the rank, and once in torchrun's report"
    assert (
        "started again with 1: 2 processes can form it, and with dp_shard: -1 any number can"
        in printed
    )
    assert "exitcode  : 2" in printed


def test_a_link_is_cut_and_the_run_goes_on_without_that_host(
    small: str, alone: Path, tmp_path: Path
) -> None:
    """It is the host of rank 0, which has the run's folder until it knows. Nothing comes from the
    other host, not even that it is gone, and both sides say so."""
    with Network(2, tmp_path) as network:
        agents = Agents(network, tmp_path)
        words = (small, agents.pace.override, "train.step_timeout_s=15")
        begin(agents, range(1, 3), launch("1:2", "node2:29500"), *words)
        lost, left = agents.agents
        network.cut(1)
        agents.wait(lambda: "goes on from" in left.printed)
        agents.pace.set(0.0)
        agents.end(left)
        reason = "cannot be reached: it is down, or the network between is cut"
        headline = (
            f"rank 0 on host node1 (dp_shard 0) stops, because host node2 {reason} (host node2: "
            "rank 1"
        )
        agents.wait(lambda: headline in lost.printed)
    assert f"because host node1 {reason}" in left.printed
    assert "layout: {dp_shard: 2} -> {dp_shard: 1}" in left.printed
    same_as(agents.run, alone)
    assert ended(agents)["status"] == "done"


def test_a_node_is_taken_away_politely(small: str, alone: Path, tmp_path: Path) -> None:
    """Its torchrun gets SIGTERM: the run saves its state, and goes on from it on the others."""
    with Network(2, tmp_path) as network:
        agents = Agents(network, tmp_path)
        begin(
            agents, range(1, 3), launch("1:2"), small, agents.pace.override, "checkpoint.every=1000"
        )
        left, goes = agents.agents
        os.kill(goes.torchrun, signal.SIGTERM)
        agents.wait(lambda: "goes on from" in left.printed)
        agents.pace.set(0.0)
        agents.end(left)
        assert goes.ends() != 0
    assert "asked to stop by SIGTERM on rank 1" in left.printed
    assert "was not told to end itself: its torchrun starts it again" in left.printed
    assert "layout: {dp_shard: 2} -> {dp_shard: 1}" in left.printed
    same_as(agents.run, alone)
    assert ended(agents)["status"] == "done"


def test_the_host_of_the_endpoint_is_lost(small: str, alone: Path, tmp_path: Path) -> None:
    """The job ends, soon and on all nodes; started again with another endpoint it goes on from its
    checkpoint."""
    with Network(3, tmp_path) as network:
        agents = Agents(network, tmp_path)
        words = (small, agents.pace.override)
        begin(agents, range(1, 4), launch("1:3", "node3:29500"), *words)
        network.kill(3)
        assert [agent.ends(60) for agent in agents.agents[:2]] == [1, 1]
        assert ended(agents)["status"] == "failed"
        agents.pace.set(0.0)
        again = agents.start(1, launch("1", "node1:29500"), *words, variables=ELASTIC)
        agents.end(again)
    assert "goes on from" in again.printed
    same_as(agents.run, alone)


def test_ones_own_name_that_leads_back_is_refused(small: str, tmp_path: Path) -> None:
    """Debian gives a host 127.0.1.1 under its own name; gloo would listen there."""
    with Network(2, tmp_path) as network:
        network.names(2, ["127.0.1.1 node2", f"{network.address(1)} node1"])
        agents = Agents(network, tmp_path)
        for host in (1, 2):
            agents.start(host, launch("2", restarts=0), small)
        assert [agent.ends() for agent in agents.agents] == [1, 1]
    assert (
        "rank 1: on host node2 its own name is 127.0.1.1: gloo would listen where no other host"
        in agents.printed
    )
    assert (
        "GLOO_SOCKET_IFNAME with the interface that leads to the others (there is eth0)"
        in agents.printed
    )
    assert "exitcode  : 2" in agents.printed
