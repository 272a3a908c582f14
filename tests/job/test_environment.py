"""Who a process is, by the environment of each launcher."""

import pytest

from meshtrain.errors import InputError
from meshtrain.job.environment import expand_hosts, read_environment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


def test_torchrun() -> None:
    found = read_environment(TORCHRUN)
    assert (found.launcher, found.rank, found.world_size, found.local_rank) == ("torchrun", 5, 8, 1)
    assert found.master == ("a", 29500)
    assert not found.hosts_store, "torchrun's agent serves the store"
    assert read_environment(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}).restarts == 2


@pytest.mark.parametrize(
    ("launcher", "again"), [(TORCHRUN, "TORCHELASTIC_RESTART_COUNT"), (SRUN, "SLURM_RESTART_COUNT")]
)
def test_a_job_that_was_started_again_knows_it(launcher: dict[str, str], again: str) -> None:
    assert not read_environment(launcher).again
    assert not read_environment(launcher | {again: "0"}).again
    assert read_environment(launcher | {again: "1"}).again
    assert read_environment({"SLURM_RESTART_COUNT": "1"}).again, "also a world of one in a batch script"


def test_without_the_agents_store_rank_0_serves_it() -> None:
    without = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert not read_environment(without).hosts_store
    assert read_environment(without | {"RANK": "0"}).hosts_store


def test_torchrun_inside_of_srun_is_torchrun() -> None:
    assert read_environment(SRUN | TORCHRUN).launcher == "torchrun"


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_of_torchrun_is_named(name: str) -> None:
    with pytest.raises(InputError, match=f"not {name}"):
        read_environment({key: value for key, value in TORCHRUN.items() if key != name})


def test_srun() -> None:
    found = read_environment(SRUN)
    assert (found.launcher, found.rank, found.world_size, found.local_rank) == ("srun", 5, 8, 1)
    assert found.master is not None
    assert found.master[0] == "gpu03"
    assert not found.hosts_store


def test_under_srun_jobs_have_ports_of_their_own() -> None:
    """And none that Linux gives to an outgoing connection."""
    places = [SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(70) for step in range(16)]
    masters = [read_environment(place).master for place in places]
    ports = {master[1] for master in masters if master is not None}
    assert len(ports) == len(places)
    assert min(ports) >= 1024
    assert max(ports) < 32768
    last = read_environment(SRUN | {"SLURM_JOB_ID": "67043327"}).master
    assert last is not None
    assert 1024 <= last[1] < 32768


def test_under_srun_the_host_is_slurms_node() -> None:
    assert read_environment(SRUN | {"SLURMD_NODENAME": "gpu04"}).host == "gpu04"


def test_under_srun_the_first_node_serves_the_store_wherever_task_0_sits() -> None:
    assert read_environment(SRUN | {"SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}).hosts_store
    assert not read_environment(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}).hosts_store


def test_under_srun_an_exported_address_and_port_win() -> None:
    found = read_environment(SRUN | {"MASTER_ADDR": "login", "MASTER_PORT": "1234", "SLURM_PROCID": "0"})
    assert found.master == ("login", 1234)
    assert found.hosts_store, "the exported address is that of task 0"
    assert read_environment(SRUN | {"MASTER_PORT": "1234"}).master == ("gpu03", 1234)


@pytest.mark.parametrize("name", ["SLURM_LOCALID", "SLURM_NTASKS"])
def test_a_missing_variable_of_srun_is_named(name: str) -> None:
    with pytest.raises(InputError, match=f"not {name}"):
        read_environment({key: value for key, value in SRUN.items() if key != name})


def test_srun_without_a_node_list_asks_for_the_address() -> None:
    with pytest.raises(InputError, match="MASTER_ADDR"):
        read_environment({key: value for key, value in SRUN.items() if key != "SLURM_STEP_NODELIST"})


def test_a_number_that_is_none_is_an_error() -> None:
    with pytest.raises(InputError, match="WORLD_SIZE should be a number and is 'eight'"):
        read_environment(TORCHRUN | {"WORLD_SIZE": "eight"})


def test_what_slurm_leaves_empty_is_not_set() -> None:
    empty = {"SLURM_RESTART_COUNT": "", "SLURM_STEP_ID": "", "TORCHELASTIC_RESTART_COUNT": ""}
    assert not read_environment(SRUN | empty).again
    assert read_environment(SRUN | empty).master == read_environment(SRUN).master
    assert read_environment(SRUN | empty | {"ENVIRONMENT": "BATCH"}).world_size == 1
    assert read_environment(TORCHRUN | empty).restarts == 0
    with pytest.raises(InputError, match="SLURM_RESTART_COUNT should be a number and is 'once'"):
        read_environment(SRUN | {"SLURM_RESTART_COUNT": "once"})


def test_nothing_is_a_world_of_one() -> None:
    found = read_environment({"HOME": "/root"})
    assert (found.launcher, found.rank, found.world_size, found.master) == ("none", 0, 1, None)


def test_the_shell_of_a_batch_script_is_a_world_of_one() -> None:
    batch = {key: value for key, value in SRUN.items() if key != "SLURM_STEP_ID"} | {"ENVIRONMENT": "BATCH"}
    assert read_environment(batch).world_size == 1
    assert read_environment(SRUN | {"ENVIRONMENT": "BATCH"}).world_size == 8, "a step inside of it is none"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[007-012,020],login1", "gpu007"),
        ("a-b-[3,5]", "a-b-3"),
        ("rack[1-2]-n", "rack1-n"),
        ("n[01-16]", "n01"),
        ("rack[1-2]node[01-04,07],login", "rack1node01"),
        ("host.domain.org,other", "host.domain.org"),
        ("rack[1-2]gpu[007-012,020],login1", "rack1gpu007"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert expand_hosts(nodes)[0] == first


def test_all_hosts_of_a_node_list() -> None:
    """Several brackets in a name go like digits, the last one fastest."""
    assert expand_hosts("rack[1-2]gpu[007-008,020],login1") == (
        "rack1gpu007", "rack1gpu008", "rack1gpu020", "rack2gpu007", "rack2gpu008", "rack2gpu020", "login1",
    )  # fmt: skip
    assert expand_hosts("n[09-11]-ib") == ("n09-ib", "n10-ib", "n11-ib")
    assert expand_hosts(" ") == ()


@pytest.mark.parametrize("nodes", ["", "[1-2]", "gpu[", "gpu[]", "a,,b", "gpu[1-]"])
def test_a_broken_node_list_is_an_error(nodes: str) -> None:
    with pytest.raises(InputError, match="node list"):
        read_environment(SRUN | {"SLURM_STEP_NODELIST": nodes})


def test_a_long_name_with_a_broken_list_is_refused_at_once() -> None:
    with pytest.raises(InputError, match="is not of SLURM's form"):
        expand_hosts(100 * "gpu-cluster-node-" + "[01-0x]")
