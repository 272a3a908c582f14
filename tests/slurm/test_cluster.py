"""The sbatch scripts, and those of `meshtrain launch`, in a real SLURM, on two nodes of two
processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshtrain.checkpoint.directory import complete_steps
from meshtrain.job.watchdog.status_server import process_state
from tests.hosts.agents import Pace, small_run
from tests.launching import ROOT, forked, wait_for
from tests.slurm.cluster import Cluster, why_not

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(why_not() is not None, reason=f"no SLURM here: {why_not()}"),
]

SCRIPTS = {"train.sbatch": 1, "train-srun.sbatch": 2}  # -> tasks per node
both = pytest.mark.parametrize("script", SCRIPTS)
STEPS = 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "with spaces"
    folder.mkdir()
    return small_run(folder)


@pytest.fixture(scope="module")
def losses(config: Path) -> list[float]:
    """Of the run on four processes that nothing interrupts, without SLURM."""
    output = config.parent / "plain"
    forked(
        4, "-m", "meshtrain.train", config, f"train.steps={STEPS}", f"train.output={output}"
    ).check()
    return Run(output).losses


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    """How many seconds a step of a run with the overrides `slowed(pace)` takes; one at first."""
    pace = Pace(tmp_path)
    pace.set(1.0)
    return pace


def slowed(pace: Pace) -> tuple[str, str]:
    """Without the comparison of the model before the first step, which would be slow as well."""
    return pace.override, "parallel.verify=false"


@dataclass(frozen=True)
class Run:
    """A run's folder, from outside."""

    folder: Path

    @property
    def losses(self) -> list[float]:
        """Of the steps so far."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(True) if path.exists() else []
        # the last may be half there
        return [json.loads(line)["loss"] for line in lines if line[-1] == "\n"]

    @property
    def exit(self) -> dict:
        return json.loads((self.folder / "exit.json").read_text())

    @property
    def stopped_at(self) -> int:
        """The step at which it has stopped and saved its state."""
        assert self.exit["status"] == "stopped"
        step = self.exit["step"]
        assert complete_steps(self.folder / "checkpoints")[-1] == step
        return step

    def logs(self, start: int) -> dict[str, str]:
        """The logs of the ranks in one start of its job, by their path in the folder of that
        start."""
        (folder,) = self.folder.glob(f"logs/slurm-*.{start}")
        return {str(log.relative_to(folder)): log.read_text() for log in folder.rglob("*.log")}

    def printed(self, start: int) -> str:
        return "".join(self.logs(start).values())

    def goes_on(self, start: int, step: int) -> bool:
        return f"goes on from {self.folder}/checkpoints/step_{step:07d}" in self.printed(start)


@dataclass(frozen=True)
class Job:
    """A job of SLURM, its run, and the file with what it prints."""

    cluster: Cluster
    number: str
    run: Run
    out: Path

    @property
    def printed(self) -> str:
        return self.out.read_text()

    def reaches(self, steps: int) -> None:
        """Waits until so many steps are done."""
        self.cluster.wait(
            self.number,
            lambda job: (
                len(self.run.losses) >= steps or job["JobState"] not in ("PENDING", "RUNNING")
            ),
        )
        assert len(self.run.losses) >= steps, f"{self.cluster.job(self.number)}\n{self.run.logs(0)}"

    def ends(self, state: str) -> dict[str, str]:
        """Waits until it ends in that state; what SLURM knows of it."""
        job = self.cluster.wait(self.number)
        assert job["JobState"] == state, f"{job}\n{self.printed}"
        return job

    def completes(self, losses: list[float]) -> dict[str, str]:
        """Waits until it ends well, with the losses of a run that nothing interrupts."""
        job = self.ends("COMPLETED")
        assert self.run.losses == losses
        return job

    def start_again(self, restarts: int) -> None:
        self.cluster.start_again(self.number, restarts)


def submitted(
    cluster: Cluster,
    config: Path,
    folder: Path,
    script: str,
    *overrides: str,
    options: Sequence[str] = (),
    **variables: str,
) -> Job:
    """A run with a script of tools/slurm or a path, by default on two nodes of two processes."""
    options = options or (f"--ntasks-per-node={SCRIPTS[script]}", "--gpus-per-node=2")
    number = cluster.sbatch(
        "--cpus-per-task=2",
        f"--output={folder}/%j.out",
        *options,
        str(ROOT / "tools" / "slurm" / script),
        str(config),
        f"train.steps={STEPS}",
        f"train.output={folder}/the run",
        *overrides,
        env={"ACTIVATE": str(Path(sys.executable).parent / "activate")} | variables,
    )
    return Job(cluster, number, Run(folder / "the run"), folder / f"{number}.out")


Submit = Callable[..., Job]


@pytest.fixture
def submit(cluster: Cluster, config: Path, tmp_path: Path) -> Iterator[Submit]:
    """Submits a run with a script; what of it is still there after the test is ended."""
    jobs = []

    def submit(script: str, *overrides: str, options: Sequence[str] = (), **variables: str) -> Job:
        jobs.append(
            submitted(cluster, config, tmp_path, script, *overrides, options=options, **variables)
        )
        return jobs[-1]

    yield submit
    for job in jobs:
        cluster.end(job.number)


def preempt(cluster: Cluster) -> None:
    """A job that needs both nodes for a moment, and comes first."""
    urgent = cluster.sbatch(
        "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"
    )
    assert cluster.wait(urgent)["JobState"] == "COMPLETED"


@both
def test_a_launched_run_trains_to_its_end(
    cluster: Cluster, config: Path, losses: list[float], tmp_path: Path, script: str
) -> None:
    """`meshtrain launch` writes the script, and sbatch reads it."""
    here = tmp_path / "a folder"
    here.mkdir()
    options = [
        "--slurm",
        "--nodes",
        "2",
        "--gpus-per-node",
        "2",
        "--cpus-per-task",
        "2",
        "--time",
        "10",
    ]
    if script == "train-srun.sbatch":
        options += ["--srun", "--gres", "gpu"]
    run = (
        str(config),
        f"train.steps={STEPS}",
        "train.output=runs/a 50% run",
        "--env",
        "OMP_NUM_THREADS=1",
    )
    printed = cluster.ask(sys.executable, "-m", "meshtrain.cli", "launch", *options, *run, cwd=here)
    (number,) = re.findall(r"as job (\d+)", printed)
    output = here / "runs" / "a 50% run"
    job = Job(cluster, number, Run(output), output / "logs" / f"slurm-{number}.out")

    ended = job.completes(losses)
    assert (ended["NumNodes"], ended["TimeLimit"], ended["JobName"]) == (
        "2",
        "00:10:00",
        config.stem,
    )
    assert ended["ExitCode"] == "0:0"
    assert (job.run.exit["status"], job.run.exit["step"]) == ("done", STEPS)
    assert "4 processes = 2 hosts x 2" in job.run.printed(0)
    names = sorted(job.run.logs(0))
    if script == "train.sbatch":
        assert [name.split("/")[0] for name in names] == ["node_0"] * 4 + ["node_1"] * 4, (
            "stdout and stderr of each"
        )
        assert "[rank0]: layout" in job.printed
    else:
        assert names == [f"rank_{rank:05d}.log" for rank in range(4)]


def test_srun_without_a_script(
    cluster: Cluster, config: Path, losses: list[float], tmp_path: Path
) -> None:
    """The nodes meet where the job's own number says; the doctor, and then a training."""
    python, output = sys.executable, f"train.steps={STEPS} train.output={tmp_path}/run"
    doctor = f"srun {python} -m meshtrain.cli doctor '{config}' {output}"
    training = f"srun --kill-on-bad-exit=0 {python} -m meshtrain.train '{config}' {output}"
    out = tmp_path / "job.out"
    words = (
        "--nodes=2",
        "--ntasks-per-node=2",
        f"--output={out}",
        "--wrap",
        f"{doctor} && {training}",
    )
    job = Job(cluster, cluster.sbatch(*words), Run(tmp_path / "run"), out)
    job.completes(losses)
    assert job.printed.count("collectives over gloo") == 1, job.printed
    assert "met at node1:" in job.printed


@both
def test_a_run_that_is_stopped_comes_back(
    cluster: Cluster, submit: Submit, losses: list[float], script: str, pace: Pace
) -> None:
    """By scancel --signal, then by a job that takes its nodes; each time it goes on from where it
    stopped."""
    job = submit(script, *slowed(pace))
    job.reaches(3)
    cluster.ask("scancel", "--signal=USR1", job.number)
    job.start_again(restarts=1)
    stopped = job.run.stopped_at
    assert job.run.exit["reason"].startswith("asked to stop by SIGUSR1"), (
        "on rank 0, or on one that heard it earlier"
    )
    assert 3 <= stopped < STEPS

    job.reaches(stopped + 2)
    preempt(cluster)
    job.start_again(restarts=2)
    preempted = job.run.stopped_at
    assert job.run.exit["reason"].startswith("asked to stop by SIGTERM"), (
        "on rank 0, or on one that heard it earlier"
    )
    assert stopped + 2 <= preempted < STEPS
    running = cluster.wait(job.number, lambda found: found["JobState"] == "RUNNING")
    assert running["PreemptTime"] == "None", (
        "of this start: an older one would bring back a job that failed"
    )

    assert job.completes(losses)["Restarts"] == "2"
    assert job.run.goes_on(1, stopped)
    assert job.run.goes_on(2, preempted)


def test_a_run_that_is_preempted_while_it_starts_comes_back(
    cluster: Cluster, submit: Submit, losses: list[float], pace: Pace
) -> None:
    """If the signal comes before anybody hears it, SLURM ends the job after its grace time, before
    the run is done."""
    pace.set(10.0)
    job = submit("train.sbatch", *slowed(pace))
    cluster.wait(job.number, lambda found: (job.run.folder / "logs").exists())
    preempt(cluster)
    job.start_again(restarts=1)
    pace.set(0.0)
    job.completes(losses)


def test_a_run_saves_before_its_time_limit_and_comes_back(
    cluster: Cluster, submit: Submit, losses: list[float], pace: Pace
) -> None:
    """SLURM sends the signal itself: 60 seconds before the end of the job's time, or up to 30
    seconds earlier.

    The time is shortened once the run trains, however long its start has taken: 2 to 3 minutes are
    left then.
    """
    pace.set(8.0)
    job = submit(
        "train.sbatch",
        *slowed(pace),
        options=("--gpus-per-node=2", "--time=30", "--signal=USR1@60"),
    )
    job.reaches(1)
    _, minutes, _ = map(int, cluster.job(job.number)["RunTime"].split(":"))
    cluster.ask("scontrol", "update", f"JobId={job.number}", f"TimeLimit={minutes + 3}")
    job.start_again(restarts=1)
    pace.set(0.0)
    stopped = job.run.stopped_at
    assert job.run.exit["reason"].startswith("asked to stop by SIGUSR1")
    job.completes(losses)
    assert job.run.goes_on(1, stopped)


@both
def test_a_person_ends_a_run(cluster: Cluster, submit: Submit, script: str, pace: Pace) -> None:
    """scancel; the state is saved in the time that is left, and nothing comes back."""
    job = submit(script, *slowed(pace))
    job.reaches(2)
    cluster.ask("scancel", job.number)
    cancelled = cluster.wait(job.number, lambda found: found["JobState"] == "CANCELLED")
    assert job.run.stopped_at
    time.sleep(2)
    assert cluster.job(job.number)["JobState"] == "CANCELLED"
    assert cancelled["Restarts"] == "0"


def test_torchrun_makes_up_for_a_lost_process(submit: Submit, losses: list[float]) -> None:
    """A rank of the second node is killed; both nodes start anew from the last checkpoint, in the
    same job."""
    job = submit("train.sbatch", "train.chaos=[{fault: kill, rank: 3, step: 10}]")
    assert job.completes(losses)["Restarts"] == "0"
    assert [name for name in job.run.logs(0) if "/attempt_1/" in name]


def test_a_wrong_config_ends_the_job_before_the_step(submit: Submit) -> None:
    job = submit("train.sbatch", "train.stepz=3")
    assert job.ends("FAILED")["ExitCode"] == "2:0"
    assert "stepz" in job.printed
    assert not job.run.folder.exists()


TASK = """
import os, sys, time
from meshtrain.job.signals import end_with_launcher

end_with_launcher(os.environ)
print("began", flush=True)
time.sleep(float(sys.argv[1]))
print("ended", flush=True)
"""


def processes_of(command: list[str]) -> list[int]:
    """The processes with this command line, also those of other namespaces."""
    wanted = "".join(f"{argument}\0" for argument in command).encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes() == wanted:
                found.append(int(folder.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_task_of_srun_dies_with_the_process_that_watches_over_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    """And with nothing else: the first job ends by itself."""
    script = tmp_path / "task.py"
    script.write_text(TASK)
    task = ["srun", "--nodes=1", sys.executable, str(script)]
    assert cluster.ask(*task, "5").split() == ["began", "ended"]
    job = subprocess.Popen(
        cluster.on(*task, "600"), env=cluster.variables(), stdout=subprocess.PIPE, text=True
    )
    assert job.stdout.readline() == "began\n"
    (worker,) = processes_of([sys.executable, str(script), "600"])
    os.kill(parent_of(worker), signal.SIGKILL)
    wait_for(lambda: process_state(worker) in ("", "Z"))
    job.kill()
    job.wait()


# A container runtime with the words of apptainer, for a folder as image: the programs of the host
# are put there.
RUNTIME = r"""#!/bin/bash
[[ $1 == exec ]] && shift || exit 2
while [[ $1 == --* ]]; do
    case $1 in --bind=*) binds=${1#*=} ;; --pwd=*) pwd=${1#*=} ;; --nv) ;; *) exit 2 ;; esac
    shift
done
exec unshare --mount bash -c '
    set -e
    IFS=, read -ra binds <<< "$1" && image=$2 pwd=$3 && shift 3
    for folder in /usr /lib /lib64 /bin /sbin /etc /proc /sys /dev; do binds+=("$folder:$folder"); done
    for bind in "${binds[@]}"; do
        mkdir -p "$image${bind#*:}" && mount --rbind "${bind%%:*}" "$image${bind#*:}"
    done
    exec chroot "$image" bash -c "cd \"\$0\" && exec \"\$@\"" "$pwd" "$@"
' inside "$binds" "$1" "$pwd" "${@:2}"
"""


def test_a_container_and_a_preflight(
    cluster: Cluster, config: Path, losses: list[float], tmp_path: Path
) -> None:
    """The config is inside of the image only, so that checking it and training can only have been
    done there."""
    image, runtime, here = tmp_path / "image", tmp_path / "runtime", tmp_path / "here"
    (image / "experiment").mkdir(parents=True)
    here.mkdir()
    shutil.copy(config, image / "experiment")
    runtime.write_text(RUNTIME)
    runtime.chmod(0o755)
    mounts = {
        str(here),
        str(config.parent),
        str(Path(sys.prefix).resolve()),
        str(Path(sys.base_prefix).resolve()),
    }
    variables = {"CONTAINER_IMAGE": str(image), "CONTAINER_RUNTIME": str(runtime), "PREFLIGHT": "1"}
    variables["CONTAINER_MOUNTS"] = ",".join(
        f"{mount}:{mount}" for mount in sorted(mounts - {"/usr"})
    )
    inside = Path("/experiment") / config.name
    job = submitted(cluster, inside, here, "train.sbatch", **variables)
    job.completes(losses)
    (folder,) = job.run.folder.glob("logs/slurm-*.0")
    assert {log.name for log in folder.glob("preflight_*.log")} == {
        "preflight_node1.log",
        "preflight_node2.log",
    }
    assert "collectives over gloo" in (folder / "preflight_node2.log").read_text()


def test_nodes_with_different_numbers_of_gpus(
    config: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    forked(
        3, "-m", "meshtrain.train", config, f"train.steps={STEPS}", f"train.output={tmp_path}/plain"
    ).check()
    expected = Run(tmp_path / "plain").losses
    per_task = tmp_path / "per_task.sbatch"
    text = (ROOT / "tools" / "slurm" / "train-srun.sbatch").read_text()
    text = text.replace("--ntasks-per-node=8", "--ntasks=3").replace(
        "--gpus-per-node=8", "--gpus-per-task=1"
    )
    per_task.write_text(text)
    with Cluster(tmp_path_factory.mktemp("gpus"), gpus={1: 1}) as cluster:
        for script, options in (
            ("train.sbatch", ("--gpus-per-node=0", "--gpus=3")),
            (str(per_task), ("--nodes=2",)),
        ):
            folder = tmp_path / Path(script).stem
            folder.mkdir()
            job = submitted(cluster, config, folder, script, options=options)
            job.completes(expected)
            assert "3 processes = 1 on node1 + 2 on node2" in job.run.printed(0)


@pytest.fixture(scope="module")
def losing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that has a node less after some of the tests below."""
    with Cluster(tmp_path_factory.mktemp("losing"), nodes=5, lost_after_s=40) as cluster:
        yield cluster


def nodes_of(job: Job, start: int) -> list[str]:
    """On which the ranks ran, in that start of the job."""
    (nodes,) = re.findall(rf"2 nodes \((.*)\), start {start};", job.printed)
    return nodes.split()


@both
def test_a_spare_node_takes_the_place_of_one_that_dies(
    losing: Cluster, config: Path, losses: list[float], tmp_path: Path, script: str, pace: Pace
) -> None:
    """Within the allocation, which SLURM keeps."""
    options = (
        f"--ntasks-per-node={SCRIPTS[script]}",
        "--gpus-per-node=2",
        "--nodes=3",
        "--no-kill",
    )
    variables = {"SPARE_NODES": "1", "MAX_RESTARTS": "0", "FAILED_SECONDS": "5"}
    job = submitted(losing, config, tmp_path, script, *slowed(pace), options=options, **variables)
    job.reaches(4)
    first, second = nodes_of(job, 0)
    losing.lose(int(second[-1]))
    assert job.completes(losses)["Restarts"] == "0"
    assert nodes_of(job, 1)[0] == first
    assert nodes_of(job, 1)[1] != second


def test_a_job_comes_back_without_the_node_that_it_was_lost_by(
    losing: Cluster, config: Path, losses: list[float], tmp_path: Path
) -> None:
    """SLURM takes that node to be well: a process was killed there, as by a GPU that has fallen off
    its bus."""
    fault = "train.chaos=[{fault: kill, rank: 3, step: 10}]"
    job = submitted(losing, config, tmp_path, "train-srun.sbatch", fault)
    job.start_again(restarts=1)
    assert job.completes(losses)["ExcNodeList"] == nodes_of(job, 0)[1]
    assert nodes_of(job, 0)[1] not in nodes_of(job, 1)


def test_slurm_itself_brings_a_job_back_that_has_lost_a_node(
    losing: Cluster, config: Path, losses: list[float], tmp_path: Path, pace: Pace
) -> None:
    job = submitted(losing, config, tmp_path, "train-srun.sbatch", *slowed(pace))
    job.reaches(6)
    losing.lose(int(nodes_of(job, 0)[1][-1]))
    job.start_again(restarts=1)
    job.completes(losses)
    assert nodes_of(job, 0)[1] not in nodes_of(job, 1)
