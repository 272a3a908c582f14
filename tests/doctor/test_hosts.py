"""The doctor on several hosts, which are network namespaces of this machine: each trouble is told from the others."""

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

import meshtrain
from tests.launching import ROOT, environment, free_port, run, run_together, torchrun
from tests.nethosts import Network, why_not

REASON = why_not()


def needs_hosts(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.cluster(pytest.mark.skipif(REASON is not None, reason=str(REASON))(test))


CONFIG = "configs/quickstart.yaml"
WAIT = "4"
STARTED_WRONG = yaml.safe_load(Path(__file__).with_name("started_wrong.yaml").read_text())
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
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for host in network.hosts
        }

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
            return dict(
                zip(tasks, pool.map(lambda host: self._ask(host, tasks[host]), tasks), strict=True)
            )

    def _ask(self, host: int, task: object) -> list[Finding]:
        process = self._processes[host]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        return [
            finding
            for finding in json.loads(process.stdout.readline())
            if finding["id"] not in CIRCUMSTANCES
        ]

    def close(self) -> None:
        for process in self._processes.values():
            process.stdin.close()  # type: ignore[union-attr]
            process.wait(10)


@pytest.fixture(scope="module")
def doctors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doctors]:
    with Network(2, tmp_path_factory.mktemp("network"), second=True) as network:
        running = Doctors(network)
        running.wait()
        yield running
        running.close()


C10D = "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint="
STATIC = "--nnodes=2 --master-addr=node1 --master-port=29500"


def c10d(id_: str = "job") -> str:
    return f"{C10D}node1:29500 --rdzv-id={id_}"


BOTH = {1: c10d(), 2: c10d()}


def ids(findings: list[Finding]) -> list[str]:
    return [str(finding["id"]) for finding in findings]


@needs_hosts
@pytest.mark.parametrize("case", STARTED_WRONG)
def test_nodes_that_are_started_wrong(doctors: Doctors, case: str) -> None:
    row = STARTED_WRONG[case]
    lines = {
        host: line.replace("C10D ", C10D).replace("STATIC", STATIC)
        for host, line in row["start"].items()
    }
    findings = doctors.run(lines)
    assert {host: ids(findings) for host, findings in findings.items()} == row["finds"], findings
    last = findings[max(findings)]
    assert any(row["says"] in f"{finding['what']}{finding['fix']}" for finding in last), last


@needs_hosts
def test_ports_that_are_dropped(doctors: Doctors) -> None:
    network = doctors.network
    network.drop(1, 29500)
    dropped = doctors.run(BOTH)
    network.open_again(1)
    assert [ids(dropped[host]) for host in (1, 2)] == [["nodes-missing"], ["endpoint-port-dropped"]]
    for host in (1, 2):
        network.drop_all_but(host, 29500)
    closed = doctors.run(BOTH)
    for host in (1, 2):
        network.open_again(host)
    assert [ids(closed[host]) for host in (1, 2)] == [["ports-closed"], ["ports-closed"]]
    network.cut(2)
    cut = doctors.run(BOTH)
    network.heal(2)
    assert [ids(cut[host]) for host in (1, 2)] == [["nodes-missing"], ["endpoint-unreachable"]]


@needs_hosts
def test_the_wrong_one_of_two_interfaces(doctors: Doctors) -> None:
    findings = doctors.run(
        BOTH, {1: {"GLOO_SOCKET_IFNAME": "eth0"}, 2: {"GLOO_SOCKET_IFNAME": "eth1"}}
    )
    assert ids(findings[1]) == ["interface-wrong"]
    assert re.search(r"10\.88\.0\.2 (gets no answer|finds no route)", str(findings[1][0]["what"]))
    assert findings[1][0]["fix"] == "export GLOO_SOCKET_IFNAME=eth0 on node2"
    findings = doctors.run(
        BOTH, {1: {"GLOO_SOCKET_IFNAME": "eth0"}, 2: {"GLOO_SOCKET_IFNAME": "ib0"}}
    )
    assert ids(findings[1]) == ["interface-missing"]


@needs_hosts
def test_a_name_that_resolves_to_the_loopback(doctors: Doctors) -> None:
    network, right = doctors.network, [f"10.77.0.{i} node{i}" for i in (1, 2)]
    network.names(2, ["127.0.1.1 node2", right[0]])
    own_name = doctors.run(BOTH)
    # as in the image of a machine that was once node1
    network.names(2, ["127.0.1.1 node1", right[1]])
    endpoint = doctors.run(BOTH)
    network.names(2, right)
    assert ids(own_name[1]) == ids(own_name[2]) == ["name-is-loopback"]
    assert "on node2 its own name resolves to 127.0.1.1" in str(own_name[1][0]["what"])
    assert "nodes-missing" in ids(endpoint[1])
    assert "endpoint-loopback" in ids(endpoint[2])


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
        config = f"{CONFIG} train.output={tmp_path}/run"
        findings = doctors.run(
            {1: f"{c10d()} {config}", 2: f"{c10d('other')} {config} train.seed=7"},
            {1: {"OMP_NUM_THREADS": "1"}, 2: {"OMP_NUM_THREADS": "2"}},
            {1: 0.0, 2: 90.0},
        )
    sentences = {str(finding["id"]): str(finding["what"]) for finding in findings[1]}
    same = {
        "config-differs",
        "code-differs",
        "einops-differs",
        "environment-differs",
        "clock-differs",
    }
    assert set(sentences) == same | {NO_TIMING}
    assert "- seed: 0; + seed: 7" in sentences["config-differs"]
    assert sentences["code-differs"].endswith("meshtrain/trainer.py")
    assert "0.0.1 on node2" in sentences["einops-differs"]
    assert "node2 is 90.0 s ahead of" in sentences["clock-differs"]
    assert findings[1] == findings[2], "all nodes are told the same"


@needs_hosts
def test_paths_that_one_host_does_not_have(doctors: Doctors, tmp_path: Path) -> None:
    data, shared = tmp_path / "data", tmp_path / "shared"
    data.mkdir()
    shared.mkdir()
    (data / "corpus.txt").write_text("Once upon a time. " * 1000)
    config = f"{CONFIG} data.source=text data.path={data}/corpus.txt train.output={shared}/run"
    both = {host: f"{c10d(f'job{host}')} {config}" for host in (1, 2)}
    findings = doctors.run(both)
    assert ids(findings[1]) == [NO_TIMING], "one file system for all hosts"
    with ExitStack() as stack:
        for folder in (data, shared):  # a disk of its own in its place
            doctors.network.do(2, "mount", "-t", "tmpfs", "none", str(folder))
            stack.callback(doctors.network.do, 2, "umount", str(folder))
        findings = doctors.run(both)
        sentences = {str(finding["id"]): finding for finding in findings[1]}
        assert set(sentences) == {NO_TIMING, "path-missing", "folder-not-shared"}
        assert sentences["path-missing"]["where"] == ["node2"]
        assert "is not there" in str(sentences["path-missing"]["what"])
        assert "tmpfs on node2" in str(sentences["folder-not-shared"]["what"])
        doctors.network.do(2, "sh", "-c", f"echo another > {data}/corpus.txt")
        findings = doctors.run(both)
        assert ids(findings[1]) == [NO_TIMING, "data-differs", "folder-not-shared"]
    assert list(shared.iterdir()) == [], "nothing is left behind"


@needs_hosts
def test_the_collectives_of_unequal_hosts_and_the_slow_link(tmp_path: Path) -> None:
    """The command itself, on three hosts with 2, 1 and 1 processes, of which the third has a slow link."""
    with Network(3, tmp_path) as network:
        network.slow(3, "60mbit")
        jobs = run_together(
            [
                network.on(
                    host,
                    sys.executable,
                    "-m",
                    "meshtrain.cli",
                    "doctor",
                    "--nnodes=3",
                    f"--nproc-per-node={count}",
                    "--rdzv-backend=c10d",
                    "--rdzv-endpoint=node1:29500",
                    "--json",
                    CONFIG,
                    f"train.output={tmp_path}/run",
                    "layout={dp_replicate: 2, dp_shard: 2}",
                )
                for host, count in ((1, 2), (2, 1), (3, 1))
            ],
            timeout=120,
        )
    assert [job.status for job in jobs] == [0, 0, 0], jobs
    assert [bool(job.out) for job in jobs] == [True, False, False], "one document"
    report = json.loads(jobs[0].out)
    findings = {finding["id"]: finding for finding in report["findings"]}
    assert findings["slow-link"]["where"] == ["node3"]
    timings = report["seen"]["timings"]
    assert len(timings["timings"]) + len(timings["left_out"]) == 12
    assert all(
        finding["bandwidth"] > 0 and finding["latency"] > 0 for finding in timings["timings"]
    )
    assert len(timings["links"]) == 3
    assert timings["stuck"] == {}
    assert timings["timings"][0]["axes"] == "dp_replicate"
    assert timings["timings"][0]["crosses"]
    assert sorted(timings["compute"]) == ["0", "1", "2", "3"]


# One host -----------------------------------------------------------------------------------------------------------


def test_a_host_alone(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "meshtrain.cli",
        "doctor",
        "--local",
        "--nproc-per-node=2",
        CONFIG,
    ]
    job = run([*command, "layout={dp_shard: 3}", f"train.output={tmp_path}/run"], timeout=100)
    assert job.status == 1
    assert "ERROR layout-does-not-fit" in job.out
    assert "first mend layout-does-not-fit" in job.out


@pytest.mark.slow
def test_workers_of_torchrun(tmp_path: Path) -> None:
    job = torchrun(2, "-m", "meshtrain.doctor", CONFIG, f"train.output={tmp_path}/run")
    assert "all is well" in job.check().out
    assert job.out.count("collectives over gloo") == 1


@pytest.mark.slow
def test_tasks_of_srun(tmp_path: Path) -> None:
    """Two nodes with two tasks and one, as SLURM numbers them; here all are on this machine."""
    common = {
        "SLURM_NTASKS": "3",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "a[1-2]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    tasks = [("0", "0", "0"), ("1", "0", "1"), ("2", "1", "0")]
    jobs = run_together(
        [
            [
                "env",
                *(f"{name}={value}" for name, value in common.items()),
                f"SLURM_PROCID={rank}",
                f"SLURM_NODEID={node}",
                f"SLURM_LOCALID={local}",
                f"SLURMD_NODENAME=a{node}",
                sys.executable,
                "-m",
                "meshtrain.cli",
                "doctor",
                "--json",
                CONFIG,
                f"train.output={tmp_path}/run",
            ]
            for rank, node, local in tasks
        ],
        timeout=120,
    )
    assert [job.status for job in jobs] == [0, 0, 0], jobs
    report = json.loads(jobs[0].out)
    assert [host["ranks"] for host in report["seen"]["hosts"]] == [[0, 1], [2]]
    assert sorted(report["seen"]["timings"]["compute"]) == ["0", "1", "2"], "every task took part"
    assert jobs[1].out == "", "a task that does not speak for its node keeps quiet"
