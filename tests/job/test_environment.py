"""Who a process is, by the environment of each launcher."""

from pathlib import Path

import pytest
import yaml

from meshtrain.errors import InputError
from meshtrain.job.environment import Environment, expand_hosts, read_environment

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
BATCH = {"ENVIRONMENT": "BATCH"}
EMPTY = {"SLURM_RESTART_COUNT": "", "SLURM_STEP_ID": "", "TORCHELASTIC_RESTART_COUNT": ""}
NODES = yaml.safe_load(Path(__file__).with_name("node_lists.yaml").read_text())


def without(variables: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in variables.items() if key != name}


def place(environment: Environment) -> tuple[str, int, int, int]:
    return environment.launcher, environment.rank, environment.world_size, environment.local_rank


def test_torchrun() -> None:
    environment = read_environment(TORCHRUN)
    assert place(environment) == ("torchrun", 5, 8, 1)
    assert environment.master == ("a", 29500)
    assert not environment.hosts_store, "torchrun's agent serves the store"
    assert read_environment(SRUN | TORCHRUN).launcher == "torchrun", "also inside of srun"
    own_store = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert not read_environment(own_store).hosts_store
    assert read_environment(own_store | {"RANK": "0"}).hosts_store


def test_srun() -> None:
    environment = read_environment(SRUN | {"SLURMD_NODENAME": "gpu04"})
    assert place(environment) == ("srun", 5, 8, 1)
    assert environment.master is not None
    assert environment.master[0] == "gpu03"
    assert environment.host == "gpu04"
    assert not environment.hosts_store
    first_node = {"SLURM_PROCID": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert read_environment(SRUN | first_node).hosts_store, "wherever task 0 sits"
    assert not read_environment(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).hosts_store
    exported = read_environment(SRUN | {"MASTER_ADDR": "login", "MASTER_PORT": "1234", "SLURM_PROCID": "0"})
    assert exported.master == ("login", 1234)
    assert exported.hosts_store, "the exported address is that of task 0"
    assert read_environment(SRUN | {"MASTER_PORT": "1234"}).master == ("gpu03", 1234)


@pytest.mark.parametrize(
    ("variables", "size"),
    [({"HOME": "/root"}, 1), (without(SRUN, "SLURM_STEP_ID") | BATCH, 1), (SRUN | BATCH, 8), (SRUN | EMPTY | BATCH, 1)],
)
def test_nothing_and_the_shell_of_a_batch_script_are_a_world_of_one(variables: dict[str, str], size: int) -> None:
    """A step inside of it is none."""
    assert read_environment(variables).world_size == size
    if size == 1:
        assert place(read_environment(variables)) == ("none", 0, 1, 0)
        assert read_environment(variables).master is None


@pytest.mark.parametrize(
    ("launcher", "count"),
    [(TORCHRUN, "TORCHELASTIC_RESTART_COUNT"), (SRUN, "SLURM_RESTART_COUNT"), ({}, "SLURM_RESTART_COUNT")],
)
def test_a_job_that_was_started_again_knows_it(launcher: dict[str, str], count: str) -> None:
    """Also a world of one in a batch script. What SLURM leaves empty is not set."""
    for variables in ({}, {count: "0"}, EMPTY):
        assert not read_environment(launcher | variables).again
    assert read_environment(launcher | {count: "1"}).again
    assert read_environment(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}).restarts == 2


def test_under_srun_jobs_have_ports_of_their_own() -> None:
    """And none that Linux gives to an outgoing connection."""
    places = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(70) for step in range(16)]
    masters = [read_environment(SRUN | place).master for place in [*places, {"SLURM_JOB_ID": "67043327"}]]
    ports = [master[1] for master in masters if master is not None]
    assert len(set(ports[:-1])) == len(places)
    assert min(ports) >= 1024
    assert max(ports) < 32768
    assert read_environment(SRUN | EMPTY).master == read_environment(SRUN).master


def test_what_is_missing_or_no_number_is_named() -> None:
    required = [(TORCHRUN, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
    required += [(SRUN, name) for name in ("SLURM_LOCALID", "SLURM_NTASKS")]
    for launcher, name in required:
        with pytest.raises(InputError, match=f"not {name}"):
            read_environment(without(launcher, name))
    with pytest.raises(InputError, match="MASTER_ADDR"):
        read_environment(without(SRUN, "SLURM_STEP_NODELIST"))
    for launcher, name in ((TORCHRUN, "WORLD_SIZE"), (SRUN, "SLURM_RESTART_COUNT")):
        with pytest.raises(InputError, match=f"{name} should be a number and is 'eight'"):
            read_environment(launcher | {name: "eight"})


def test_node_lists() -> None:
    assert {nodes: list(expand_hosts(nodes)) for nodes in NODES["hosts"]} == NODES["hosts"]
    for nodes in NODES["broken"]:
        with pytest.raises(InputError, match="node list"):
            read_environment(SRUN | {"SLURM_STEP_NODELIST": nodes})
    with pytest.raises(InputError, match="is not of SLURM's form"):  # a long one at once
        expand_hosts(100 * "gpu-cluster-node-" + "[01-0x]")
