"""The doctor on several hosts, which are network namespaces of this machine: each trouble is told from the others."""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import meshtrain
from tests.launching import ROOT, environment, free_port, run_together, torchrun
from tests.nethosts import Network, why_not

REASON = why_not()


def needs_hosts(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.cluster(pytest.mark.skipif(REASON is not None, reason=str(REASON))(test))


WAIT = "4"
# What depends on the machine that runs the tests.
CIRCUMSTANCES = {"host-busy", "little-memory", "little-disk", "slow-read", "transport", "not-timed"}
NO_TIMING = "id-differs"  # made on purpose where the collectives, which take a while, are not what is tested
Finding = dict[str, object]


class Doctors:
    """Two hosts, and on each a process in which doctors are run."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._processes = {
            host: subprocess.Popen(
                network.on(host, sys.executable, "-m", "tests.doctor.doctor_host"),
                cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for host in network.hosts
        }  # fmt: skip

    def wait(self) -> None:
        """Until all are ready."""
        for process in self._processes.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def run(
        self,
        arguments: Mapping[int, str],
        variables: Mapping[int, Mapping[str, str]] | None = None,
        ahead_s: Mapping[int, float] | None = None,
    ) -> dict[int, list[Finding]]:
        """The findings of each host's doctor, started with these arguments at the same time."""
        tasks = {
            host: {
                "arguments": [*line.split(), "--wait", WAIT],
                "variables": (variables or {}).get(host, {}),
                "ahead_s": (ahead_s or {}).get(host, 0.0),
            }
            for host, line in arguments.items()
        }
        with ThreadPoolExecutor(len(tasks)) as pool:
            return dict(zip(tasks, pool.map(lambda host: self._ask(host, tasks[host]), tasks), strict=True))

    def _ask(self, host: int, task: object) -> list[Finding]:
        process = self._processes[host]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        return [one for one in json.loads(process.stdout.readline()) if one["id"] not in CIRCUMSTANCES]

    def close(self) -> None:
        for process in self._processes.values():
            process.stdin.close()  # type: ignore[union-attr]
            process.wait(10)


@pytest.fixture(scope="module")
def doctors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doctors]:
    with Network(2, tmp_path_factory.mktemp("network"), second=True) as network:
        found = Doctors(network)
        found.wait()
        yield found
        found.close()


def c10d(endpoint: str = "node1:29500", *, id_: str = "job", nodes: str = "2") -> str:
    return f"--nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint={endpoint} --rdzv-id={id_}"


def static(rank: int, master: str = "node1") -> str:
    return f"--nnodes=2 --node-rank={rank} --master-addr={master} --master-port=29500"


def ids(found: list[Finding]) -> list[str]:
    return [str(one["id"]) for one in found]


# What each host is started with, and what the doctor of node 1 and that of node 2 have to find, with words of it.
STARTED_WRONG: dict[str, tuple[dict[int, str], list[str], list[str], str]] = {
    "wrong port": (
        {1: c10d(), 2: c10d("node1:29501")},
        ["nodes-missing"], ["endpoint-refused"], "given node1:29501",
    ),
    "a name that nobody has": (
        {1: c10d(), 2: c10d("node7:29500")},
        ["nodes-missing"], ["endpoint-unresolved"], "node7 does not resolve",
    ),
    "an address that nobody has": (
        {1: c10d(), 2: c10d("10.77.0.9:29500")},
        ["nodes-missing"], ["endpoint-unreachable"], "10.77.0.9 on any port",
    ),
    "each its own name": (
        {1: c10d("node1:29500"), 2: c10d("node2:29500")},
        ["nodes-missing"], ["nodes-missing"], "same endpoint (node2:29500)",
    ),
    "localhost": (
        {1: c10d(), 2: c10d("localhost:29500")},
        ["nodes-missing"], ["endpoint-loopback", "nodes-missing"], "a loopback",
    ),
    "wrong id": (
        {1: c10d(), 2: c10d(id_="another")}, ["id-differs"], ["id-differs"], "job on node1; another on node2",
    ),
    "wrong number of nodes": (
        {1: c10d(), 2: c10d(nodes="3")}, ["nodes-differ"], ["nodes-differ"], "2 on node1; 3 on node2",
    ),
    "one node rank twice": (
        {1: static(0), 2: static(0)}, ["node-rank-twice"], ["node-rank-twice"], "node rank 0 was given to node1, node2",
    ),
    "swapped node ranks": (
        {1: static(1), 2: static(0)}, ["not-serving"], ["serving-elsewhere"], "give --node-rank=0 to the host that",
    ),
    "two that serve": (
        {1: c10d(), 2: f"{c10d()} --rdzv-conf=is_host=1"},
        ["served-twice"], ["served-twice"], "as node1 does. The others go to node1",
    ),
    "the endpoint's address on another interface": (
        {1: c10d("10.88.0.1:29500", nodes="1:2")}, ["serving-unrecognised", "nodes-missing"], [], "is_host=1",
    ),
}  # fmt: skip


@needs_hosts
@pytest.mark.parametrize("case", STARTED_WRONG)
def test_nodes_that_are_started_wrong(doctors: Doctors, case: str) -> None:
    arguments, first, second, words = STARTED_WRONG[case]
    found = doctors.run(arguments)
    assert ids(found[1]) == first, found
    if 2 in found:
        assert ids(found[2]) == second, found
    last = found[max(found)]
    assert any(words in str(one["what"]) + str(one["fix"]) for one in last), last


@needs_hosts
def test_a_node_that_is_not_there(doctors: Doctors) -> None:
    found = doctors.run({1: static(0)})
    assert ids(found[1]) == ["nodes-missing"]
    assert "node ranks that did not come: 1" in str(found[1][0]["what"])


@contextmanager
def fault(start: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    start()
    try:
        yield
    finally:
        end()


@needs_hosts
def test_ports_that_are_dropped(doctors: Doctors) -> None:
    network = doctors.network
    with fault(lambda: network.drop(1, 29500), lambda: network.open_again(1)):
        found = doctors.run({1: c10d(), 2: c10d()})
    assert ids(found[1]) == ["nodes-missing"]
    assert ids(found[2]) == ["endpoint-port-dropped"]
    with ExitStack() as stack:
        for host in (1, 2):
            network.drop_all_but(host, 29500)
            stack.callback(network.open_again, host)
        found = doctors.run({1: c10d(), 2: c10d()})
    assert ids(found[1]) == ids(found[2]) == ["ports-closed"]
    with fault(lambda: network.cut(2), lambda: network.heal(2)):
        found = doctors.run({1: c10d(), 2: c10d()})
    assert ids(found[1]) == ["nodes-missing"]
    assert ids(found[2]) == ["endpoint-unreachable"]


@needs_hosts
def test_the_wrong_one_of_two_interfaces(doctors: Doctors) -> None:
    both = {1: c10d(), 2: c10d()}
    found = doctors.run(both, {1: {"GLOO_SOCKET_IFNAME": "eth0"}, 2: {"GLOO_SOCKET_IFNAME": "eth1"}})
    assert ids(found[1]) == ["interface-wrong"]
    assert "10.88.0.2 gets no answer" in str(found[1][0]["what"])
    assert found[1][0]["fix"] == "export GLOO_SOCKET_IFNAME=eth0 on node2"
    found = doctors.run(both, {1: {"GLOO_SOCKET_IFNAME": "eth0"}, 2: {"GLOO_SOCKET_IFNAME": "ib0"}})
    assert ids(found[1]) == ["interface-missing"]


@needs_hosts
def test_a_name_that_resolves_to_the_loopback(doctors: Doctors) -> None:
    network, names = doctors.network, [f"10.77.0.{i} node{i}" for i in (1, 2)]
    own = ["127.0.1.1 node2", names[0]]
    with fault(lambda: network.names(2, own), lambda: network.names(2, names)):
        found = doctors.run({1: c10d(), 2: c10d()})
    assert ids(found[1]) == ids(found[2]) == ["name-is-loopback"]
    assert "on node2 its own name resolves to 127.0.1.1" in str(found[1][0]["what"])
    endpoint = ["127.0.1.1 node1", names[1]]  # as in the image of a machine that was once node1
    with fault(lambda: network.names(2, endpoint), lambda: network.names(2, names)):
        found = doctors.run({1: c10d(), 2: c10d()})
    assert "nodes-missing" in ids(found[1])
    assert "endpoint-loopback" in ids(found[2])


@needs_hosts
def test_hosts_that_are_not_alike(doctors: Doctors, tmp_path: Path) -> None:
    """Another config, another file of ours, another version of a library, a clock that is ahead: all at once."""
    network = doctors.network
    step = Path(meshtrain.__file__).parent / "trainer.py"
    files = importlib.metadata.files("einops")
    assert files is not None
    package = Path(str(next(file.locate() for file in files if file.name == "METADATA")))
    other_step, other_package = tmp_path / "trainer.py", tmp_path / "METADATA"
    other_step.write_text(step.read_text() + "# changed\n")
    version = importlib.metadata.version("einops")
    other_package.write_text(package.read_text().replace(f"Version: {version}", "Version: 0.0.1"))
    with ExitStack() as stack:
        for there, here in ((step, other_step), (package, other_package)):
            network.do(2, "mount", "--bind", str(here), str(there))
            stack.callback(network.do, 2, "umount", str(there))
        config = f"configs/quickstart.yaml train.output={tmp_path}/run"
        found = doctors.run(
            {1: f"{c10d()} {config}", 2: f"{c10d(id_='other')} {config} train.seed=7"},
            {1: {"OMP_NUM_THREADS": "1"}, 2: {"OMP_NUM_THREADS": "2"}},
            {1: 0.0, 2: 90.0},
        )
    said = {str(one["id"]): str(one["what"]) for one in found[1]}
    same = {"config-differs", "code-differs", "einops-differs", "environment-differs", "clock-differs"}
    assert set(said) == same | {NO_TIMING}
    assert "- seed: 0; + seed: 7" in said["config-differs"]
    assert said["code-differs"].endswith("meshtrain/trainer.py")
    assert "0.0.1 on node2" in said["einops-differs"]
    assert "node2 is 90.0 s ahead of" in said["clock-differs"]
    assert found[1] == found[2], "all nodes are told the same"


@needs_hosts
def test_paths_that_one_host_does_not_have(doctors: Doctors, tmp_path: Path) -> None:
    data, shared = tmp_path / "data", tmp_path / "shared"
    data.mkdir()
    shared.mkdir()
    (data / "corpus.txt").write_text("Once upon a time. " * 1000)
    config = f"configs/quickstart.yaml data.source=text data.path={data}/corpus.txt train.output={shared}/run"
    both = {host: f"{c10d(id_=f'job{host}')} {config}" for host in (1, 2)}
    found = doctors.run(both)
    assert ids(found[1]) == [NO_TIMING], "one file system for all hosts"
    with ExitStack() as stack:
        for folder in (data, shared):  # a disk of its own in its place
            doctors.network.do(2, "mount", "-t", "tmpfs", "none", str(folder))
            stack.callback(doctors.network.do, 2, "umount", str(folder))
        found = doctors.run(both)
        said = {str(one["id"]): one for one in found[1]}
        assert set(said) == {NO_TIMING, "path-missing", "folder-not-shared"}
        assert said["path-missing"]["where"] == ["node2"]
        assert "is not there" in str(said["path-missing"]["what"])
        assert "tmpfs on node2" in str(said["folder-not-shared"]["what"])
        doctors.network.do(2, "sh", "-c", f"echo another > {data}/corpus.txt")
        found = doctors.run(both)
        assert ids(found[1]) == [NO_TIMING, "data-differs", "folder-not-shared"]
    assert list(shared.iterdir()) == [], "nothing is left behind"


@needs_hosts
def test_the_collectives_of_unequal_hosts_and_the_slow_link(tmp_path: Path) -> None:
    """The command itself, on three hosts with 2, 1 and 1 processes, of which the third has a slow link."""
    with Network(3, tmp_path) as network:
        network.slow(3, "60mbit")
        jobs = run_together(
            [
                network.on(
                    host, sys.executable, "-m", "meshtrain.cli", "doctor", "--nnodes=3", f"--nproc-per-node={count}",
                    "--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500", "--json", "configs/quickstart.yaml",
                    f"train.output={tmp_path}/run", "layout={dp_replicate: 2, dp_shard: 2}",
                )
                for host, count in ((1, 2), (2, 1), (3, 1))
            ],
            timeout=120,
        )  # fmt: skip
    assert [job.status for job in jobs] == [0, 0, 0], jobs
    assert [bool(job.out) for job in jobs] == [True, False, False], "one document"
    report = json.loads(jobs[0].out)
    found = {one["id"]: one for one in report["findings"]}
    assert found["slow-link"]["where"] == ["node3"]
    timings = report["seen"]["timings"]
    assert len(timings["timings"]) + len(timings["left_out"]) == 12
    assert all(one["bandwidth"] > 0 and one["latency"] > 0 for one in timings["timings"])
    assert len(timings["links"]) == 3
    assert timings["stuck"] == {}
    assert timings["timings"][0]["axes"] == "dp_replicate"
    assert timings["timings"][0]["crosses"]
    assert sorted(timings["compute"]) == ["0", "1", "2", "3"]


# One host -----------------------------------------------------------------------------------------------------------


def test_a_host_alone_and_a_command_line_that_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "meshtrain.cli", "doctor", "--local", "--nproc-per-node=2"]
    output = f"train.output={tmp_path}/run"
    (wrong,) = run_together([[*command, "configs/quickstart.yaml", "layout={dp_shard: 3}", output]], timeout=100)
    assert wrong.status == 1
    assert "ERROR layout-does-not-fit" in wrong.out
    assert "first mend layout-does-not-fit" in wrong.out
    (nonsense,) = run_together([[*command[:-2], "--nnodes=2:1"]], timeout=100)
    assert nonsense.status == 2
    assert "--nnodes 2:1" in nonsense.err


def test_workers_of_torchrun(tmp_path: Path) -> None:
    job = torchrun(2, "-m", "meshtrain.doctor", "configs/quickstart.yaml", f"train.output={tmp_path}/run")
    assert "all is well" in job.check().out
    assert job.out.count("collectives over gloo") == 1


def test_tasks_of_srun(tmp_path: Path) -> None:
    """Two nodes with two tasks and one, as SLURM numbers them; here all are on this machine."""
    common = {
        "SLURM_NTASKS": "3", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a[1-2]",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "2,1", "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    tasks = [("0", "0", "0"), ("1", "0", "1"), ("2", "1", "0")]
    jobs = run_together(
        [
            [
                "env", *(f"{name}={value}" for name, value in common.items()),
                f"SLURM_PROCID={rank}", f"SLURM_NODEID={node}", f"SLURM_LOCALID={local}", f"SLURMD_NODENAME=a{node}",
                sys.executable, "-m", "meshtrain.cli", "doctor", "--json", "configs/quickstart.yaml",
                f"train.output={tmp_path}/run",
            ]
            for rank, node, local in tasks
        ],
        timeout=120,
    )  # fmt: skip
    assert [job.status for job in jobs] == [0, 0, 0], jobs
    report = json.loads(jobs[0].out)
    assert [host["ranks"] for host in report["seen"]["hosts"]] == [[0, 1], [2]]
    assert sorted(report["seen"]["timings"]["compute"]) == ["0", "1", "2"], "every task took part"
    assert jobs[1].out == "", "a task that does not speak for its node keeps quiet"
