"""torchrun's options and launchers' variables as a place to meet; interfaces as NCCL and gloo read their names."""

import argparse
import subprocess
import sys
from collections.abc import Mapping

import pytest

from meshtrain.doctor.bandwidth import choose_size, pairs_in_rounds, wire_bytes
from meshtrain.doctor.command import add_arguments
from meshtrain.doctor.facts import processes_of
from meshtrain.doctor.nccl import gloo_interfaces, nccl_interfaces
from meshtrain.doctor.ports import peers_to_check
from meshtrain.doctor.records import Interface, Place
from meshtrain.doctor.torchrun_options import read_place, speaks_for_node
from meshtrain.errors import InputError
from meshtrain.job.environment import expand_hosts
from meshtrain.metrics.nvidia_smi import throttle_reasons
from tests.launching import environment


def parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return parser.parse_intermixed_args(line.split())


def place(line: str, variables: Mapping[str, str] | None = None) -> Place:
    return read_place(parse(line), variables or {})


def test_the_command_line_of_torchrun_is_understood() -> None:
    found = place(
        "--nnodes=2:4 --nproc_per_node=8 --rdzv-backend=c10d --rdzv_endpoint node1:29500 --rdzv-id=job7 "
        "--rdzv-conf is_host=1,join_timeout=60 --max-restarts=3 --tee 3 --log-dir logs -m meshtrain.train my.yaml"
    )
    assert found == Place("torchrun's options", "c10d", "node1", 29500, "job7", 2, 4, None, "8", True)
    assert found.endpoint == "node1:29500"
    assert found.nodes == "2:4"


@pytest.mark.parametrize("module", ["meshtrain.doctor", "meshtrain.operate.doctor"])
def test_the_doctor_is_run_as_a_module_by_both_names(module: str) -> None:
    command = [sys.executable, "-m", module, "--nnodes=2:1"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (2, "--nnodes 2:1: expected a number of nodes, or MIN:MAX such as 2:4\n")


def test_the_config_stands_where_the_script_would() -> None:
    given = parse("--nnodes=2 -m meshtrain.train my.yaml train.steps=5 --wait 3")
    assert given.module
    assert [given.config, *given.overrides] == ["meshtrain.train", "my.yaml", "train.steps=5"]
    assert given.wait == 3.0


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--nnodes=2 --node-rank=1 --master-addr=10.0.0.1 --master-port=1234", ("static", "10.0.0.1", 1234, 1, False)),
        ("--nnodes=2 --node-rank=0 --master-addr=node1", ("static", "node1", 29500, 0, True)),
        ("--nnodes=2 --node-rank=1", ("static", "127.0.0.1", 29500, 1, False)),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node1", ("c10d", "node1", 29400, None, None)),
        (
            "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=[fe80::1]:1 --rdzv-conf=is_host=0",
            ("c10d", "fe80::1", 1, None, False),
        ),
    ],
)
def test_backends_and_endpoints(line: str, expected: tuple[object, ...]) -> None:
    found = place(line)
    assert (found.backend, found.address, found.port, found.node_rank, found.serves) == expected


@pytest.mark.parametrize("line", ["", "--local", "--standalone --nproc-per-node=2", "--nproc-per-node=2"])
def test_one_node_needs_no_meeting(line: str) -> None:
    assert place(line).launcher == "local"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--nnodes=0", "--nnodes 0"),
        ("--nnodes=4:2", "MIN:MAX"),
        ("--nnodes=2 --nproc-per-node=all", "--nproc-per-node all"),
        ("--nnodes=2 --node-rank=2 --master-addr=a", "from 0 to 1"),
        ("--nnodes=2 --node-rank=x --master-addr=a", "--node-rank x"),
        ("--nnodes=2 --rdzv-backend=c10d", "needs --rdzv-endpoint"),
        ("--nnodes=2 --rdzv-backend=etcd --rdzv-endpoint=a:1", "c10d or static"),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a:b:c", "expected HOST:PORT"),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a:99999", "expected HOST:PORT"),
        ("--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=a:1 --rdzv-conf=is_host=maybe", "is_host=maybe"),
    ],
)
def test_options_that_torchrun_would_not_understand(line: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        place(line)


def test_defaults_come_from_the_variables_that_torchrun_reads() -> None:
    variables = {"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "a:1", "PET_NPROC_PER_NODE": "4"}
    assert place("", variables) == Place("torchrun's options", "c10d", "a", 1, "none", 2, 2, None, "4", None)
    assert place("--rdzv-endpoint=b:2", variables).endpoint == "b:2", "an option wins"


def test_a_worker_of_torchrun() -> None:
    variables = {
        "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a",
        "MASTER_PORT": "1", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job",
    }  # fmt: skip
    found = place("", variables)
    assert found == Place("torchrun", "c10d", "a", 1, "job", 2, 2, 1, "4", False, (4, 5, 6, 7))
    assert not speaks_for_node(variables, found)
    assert speaks_for_node(variables | {"LOCAL_RANK": "0"}, found)


def test_a_task_of_srun() -> None:
    variables = {
        "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_NODEID": "1", "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[01-02]", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "6,2", "SLURMD_NODENAME": "gpu02",
    }  # fmt: skip
    found = place("", variables)
    assert (found.launcher, found.address, found.id, found.most, found.node_rank) == ("srun", "gpu01", "77", 2, 1)
    assert (found.processes, found.ranks, found.expected, found.serves) == ("2", (6, 7), ("gpu01", "gpu02"), False)
    assert place("", variables | {"SLURM_GTIDS": "1,3"}).ranks == (1, 3), "as --distribution=cyclic deals them"
    assert speaks_for_node(variables, found)
    assert not speaks_for_node(variables | {"SLURM_LOCALID": "1"}, found)
    assert place("", variables | {"SLURM_NODEID": "0", "SLURM_PROCID": "0"}).serves
    del variables["SLURM_STEP_NUM_NODES"]
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_NODEID"):
        with pytest.raises(InputError, match=f"^{name} two: expected a number"):
            place("", variables | {name: "two", "MASTER_ADDR": "gpu01"})


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("node1", ["node1"]),
        ("gpu[07-09,12],login1", ["gpu07", "gpu08", "gpu09", "gpu12", "login1"]),
        ("a[098-101]b,c", ["a098b", "a099b", "a100b", "a101b", "c"]),
    ],
)
def test_a_node_list_of_slurm(nodes: str, names: list[str]) -> None:
    assert list(expand_hosts(nodes)) == names


@pytest.mark.parametrize("nodes", ["a[1-2", "[", "a]"])
def test_a_node_list_that_is_none(nodes: str) -> None:
    with pytest.raises(InputError, match="SLURM's form"):
        expand_hosts(nodes)


# Interfaces ---------------------------------------------------------------------------------------------------------

LO, ETH0 = Interface("lo", ("127.0.0.1",)), Interface("eth0", ("10.0.0.1",))
ETH1, VIRBR = Interface("eth1", ("10.1.0.1",)), Interface("virbr0", ("10.3.0.1",))
DOCKER, IB, DOWN = Interface("docker0", ("172.17.0.1",)), Interface("ib0", ("10.2.0.1",)), Interface("eth2", ())
ALL = (LO, DOCKER, ETH0, ETH1, IB, DOWN)


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (None, ["ib0"]),
        ("eth", ["eth0", "eth1"]),
        ("eth1,eth0", ["eth0", "eth1"]),
        ("=eth", []),
        ("=eth0", ["eth0"]),
        ("^docker,lo", ["eth0", "eth1", "ib0"]),
        ("^=docker0,lo", ["eth0", "eth1", "ib0"]),
        ("^=docker", ["lo", "docker0", "eth0", "eth1", "ib0"]),
        ("eth2", []),
        ("wlan0", []),
    ],
)
def test_interfaces_as_nccl_reads_them(asked: str | None, chosen: list[str]) -> None:
    assert [one.name for one in nccl_interfaces(ALL, asked)] == chosen


@pytest.mark.parametrize(
    ("there", "chosen"),
    [((LO, DOCKER, ETH0), "eth0"), ((LO, DOCKER), "docker0"), ((LO,), "lo"), ((VIRBR, LO), "lo")],
)
def test_what_nccl_takes_unasked(there: tuple[Interface, ...], chosen: str) -> None:
    assert [one.name for one in nccl_interfaces(there, None)] == [chosen]


@pytest.mark.parametrize(
    ("asked", "own", "chosen"),
    [
        ("eth0", (), ["eth0"]),
        ("eth", (), []),
        ("eth0,eth1", (), ["eth0", "eth1"]),
        (None, ("10.1.0.1",), ["eth1"]),
        (None, ("127.0.1.1",), ["lo"]),
        (None, ("9.9.9.9", "10.0.0.1"), ["eth0"]),
        (None, (), ["lo"]),
    ],
)
def test_interfaces_as_gloo_takes_them(asked: str | None, own: tuple[str, ...], chosen: list[str]) -> None:
    assert [one.name for one in gloo_interfaces(ALL, asked, own)] == chosen


# Sizes and pairs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(0, 10))
def test_every_pair_of_few_hosts_meets_once_and_nobody_has_two_partners(count: int) -> None:
    rounds = pairs_in_rounds(count, most=9)
    every = [pair for pairs in rounds for pair in pairs]
    assert sorted(every) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for pairs in rounds:
        busy = [one for pair in pairs for one in pair]
        assert len(busy) == len(set(busy))


def test_many_hosts_meet_some() -> None:
    assert len(pairs_in_rounds(1000)) == 7
    assert peers_to_check(3, 4) == [0, 1, 2]
    many = peers_to_check(999, 1000)
    assert many[:4] == [0, 1, 3, 7]
    assert len(many) == 10


def test_the_size_of_a_message_follows_from_the_time_of_a_small_one() -> None:
    sizes = (2**20, 2**24)
    assert choose_size(1e-5, sizes) == 2**24
    assert choose_size(1e-2, sizes) == 2**20
    assert choose_size(1.0, sizes) == 2**18
    assert wire_bytes("all-reduce", 4, 8) == 12
    assert wire_bytes("all-gather", 4, 8) == 6
    assert wire_bytes("broadcast", 4, 8) == 8


# What tools print ---------------------------------------------------------------------------------------------------


def test_throttle_reasons_of_nvidia_smi() -> None:
    assert throttle_reasons("0x0000000000000000") == ""
    assert throttle_reasons("0x0000000000000001") == "", "an idle GPU is not slowed down"
    assert throttle_reasons("0x0000000000000044") == "the power limit, heat (hardware)"
    assert throttle_reasons("[N/A]") == ""


@pytest.mark.parametrize(
    ("asked", "gpus", "count"),
    [("4", 8, 4), ("gpu", 8, 8), ("auto", 8, 8), ("auto", 0, 16), ("cpu", 8, 16), ("gpu", 0, 0)],
)
def test_the_number_of_processes(asked: str, gpus: int, count: int) -> None:
    assert processes_of(asked, gpus, 16) == count
