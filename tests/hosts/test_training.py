"""Several hosts, which are network namespaces of this machine, train to the losses of one
process."""

import re
import sys
from pathlib import Path

import pytest

from tests.hosts.agents import Agents, needs_hosts, same_as
from tests.launching import run
from tests.nethosts import Network
from tests.parity.experiments import QUICKSTART, SMALL

pytestmark = needs_hosts

C10D = "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node1:29500 --rdzv-id=job"
STATIC = "--nnodes=2 --master-addr=node1 --master-port=29501 --node-rank={node}"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    cache = tmp_path_factory.mktemp("cache")
    return (QUICKSTART, *SMALL, f"data.cache={cache}", "train.steps=5", "train.precision=float64")


@pytest.fixture(scope="module")
def alone(llama: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    output = tmp_path_factory.mktemp("alone") / "run"
    run([sys.executable, "-m", "meshtrain.train", *llama, f"train.output={output}"]).check()
    return output


def train(
    agents: Agents, launch: str, counts: tuple[int, int], *words: str, **variables: str
) -> str:
    """A job on two hosts with so many processes; what it has printed."""
    for host, count in enumerate(counts, 1):
        options = f"{launch.format(node=host - 1)} --nproc-per-node={count}"
        agents.start(host, options, *words, variables=variables)
    agents.end(*agents.agents)
    return agents.printed


INSIDE = ["4 processes = 2 hosts x 2, on cpu over gloo, met at node1:"]
ACROSS = [
    "warning: tp crosses hosts in 1 of 1 groups (the first is ranks [0, 1] on node1 and node2)",
    "tp: 2 does not divide the 1 process of node1",
]


@pytest.mark.parametrize(
    ("processes", "says"), [(2, INSIDE), (1, ACROSS)], ids=["inside", "across"]
)
def test_tensor_parallelism_inside_of_hosts_and_across(
    processes: int, says: list[str], llama: tuple[str, ...], alone: Path, tmp_path: Path
) -> None:
    """The same command on both nodes. Across hosts it is slow, and right."""
    with Network(2, tmp_path) as network:
        agents = Agents(network, tmp_path)
        printed = train(
            agents, C10D, (processes, processes), *llama, "layout={dp_shard: -1, tp: 2}"
        )
    same_as(agents.run, alone)
    assert all(line in printed for line in says), printed
    assert ("tp crosses hosts" in printed) == (says == ACROSS)
    table = (agents.run / "layout.txt").read_text()
    assert {"node1", "node2"} <= set(re.findall(r"\w+", table))


def test_two_and_one(llama: tuple[str, ...], alone: Path, tmp_path: Path) -> None:
    """The static form, hosts with different numbers of processes, and a host that knows itself by a
    loopback address.

    Debian gives a host the address 127.0.1.1 under its own name; with an interface named, that does
    no harm.
    """
    with Network(2, tmp_path) as network:
        for host in (1, 2):
            others = [
                f"{network.address(other)} node{other}" for other in network.hosts if other != host
            ]
            network.names(host, [f"127.0.1.1 node{host}", *others])
        agents = Agents(network, tmp_path)
        printed = train(agents, STATIC, (2, 1), *llama, GLOO_SOCKET_IFNAME="eth0")
    same_as(agents.run, alone)
    assert "3 processes = 2 on node1 + 1 on node2, on cpu over gloo, met at node1:29501" in printed
