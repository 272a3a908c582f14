"""The sbatch scripts in a real SLURM, on two nodes of two processes."""

import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshtrain.checkpoint.directory import complete_steps
from tests.checkpoint.going_on import small_run
from tests.launching import ROOT, forked
from tests.slurm.cluster import Cluster, why_not

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(why_not() is not None, reason=f"no SLURM here: {why_not()}"),
]

SCRIPTS = {"train.sbatch": 1, "train-srun.sbatch": 2}  # -> tasks per node
both = pytest.mark.parametrize("script", SCRIPTS)
STEPS = 20
SLOW = "train.chaos=[{fault: slow, rank: 0, step: 1, until: 16, seconds: 1, again: true}]"


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
    forked(4, "-m", "meshtrain.train", config, f"train.steps={STEPS}", f"train.output={output}").check()
    return [row["loss"] for row in Run(output).rows]


@dataclass(frozen=True)
class Run:
    """A run's folder, from outside."""

    folder: Path

    @property
    def rows(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        # The last line may be half there while the run writes.
        return (
            [json.loads(line) for line in path.read_text().splitlines(True) if line[-1] == "\n"]
            if path.exists()
            else []
        )

    @property
    def exit(self) -> dict:
        return json.loads((self.folder / "exit.json").read_text())

    @property
    def checkpoints(self) -> list[int]:
        return sorted(complete_steps(self.folder / "checkpoints"))

    def logs(self, start: int) -> dict[str, str]:
        """The logs of the ranks in one start of its job, by their path in the folder of that start."""
        (folder,) = self.folder.glob(f"logs/slurm-*.{start}")
        return {str(log.relative_to(folder)): log.read_text() for log in folder.rglob("*.log")}

    def reaches(self, steps: int, cluster: Cluster, job: str) -> None:
        """Waits until so many steps are done."""
        cluster.wait(job, lambda found: len(self.rows) >= steps or found["JobState"] not in ("PENDING", "RUNNING"))
        assert len(self.rows) >= steps, f"{cluster.job(job)}\n{self.logs(0)}"


Submitted = tuple[str, Run, Path]  # the job, the run, and the file with what the job prints


def submitted(
    cluster: Cluster, config: Path, folder: Path, script: str, *overrides: str, options: Sequence[str] = (),
    **variables: str,
) -> Submitted:  # fmt: skip
    """A run with a script of tools/slurm or a path, by default on two nodes of two processes."""
    options = options or (f"--ntasks-per-node={SCRIPTS[script]}", "--gpus-per-node=2")
    job = cluster.sbatch(
        "--cpus-per-task=2", f"--output={folder}/%j.out", *options,
        str(ROOT / "tools" / "slurm" / script), str(config), f"train.steps={STEPS}", f"train.output={folder}/the run",
        *overrides,
        env={"ACTIVATE": str(Path(sys.executable).parent / "activate")} | variables,
    )  # fmt: skip
    return job, Run(folder / "the run"), folder / f"{job}.out"


@pytest.fixture
def submit(cluster: Cluster, config: Path, tmp_path: Path) -> Iterator[Callable[..., Submitted]]:
    """Submits a run with a script; what of it is still there after the test is ended."""
    jobs = []

    def submit(script: str, *overrides: str, options: Sequence[str] = (), **variables: str) -> Submitted:
        found = submitted(cluster, config, tmp_path, script, *overrides, options=options, **variables)
        jobs.append(found[0])
        return found

    yield submit
    for job in jobs:
        cluster.end(job)


def preempt(cluster: Cluster) -> str:
    """A job that needs both nodes for a moment, and comes first."""
    return cluster.sbatch("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")


@both
def test_a_run_trains_to_its_end(cluster: Cluster, submit: Callable, losses: list[float], script: str) -> None:
    job, run, printed = submit(script)
    found = cluster.wait(job)
    assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0"), printed.read_text()
    assert (run.exit["status"], run.exit["step"]) == ("done", STEPS)
    assert [row["loss"] for row in run.rows] == losses
    assert "4 processes = 2 hosts x 2" in "".join(run.logs(0).values())
    names = sorted(run.logs(0))
    if script == "train.sbatch":
        assert [name.split("/")[0] for name in names] == ["node_0"] * 4 + ["node_1"] * 4, "stdout and stderr of each"
        assert "[rank0]: layout" in printed.read_text()
    else:
        assert names == [f"rank_{rank:05d}.log" for rank in range(4)]


def test_srun_without_a_script(cluster: Cluster, config: Path, losses: list[float], tmp_path: Path) -> None:
    """The nodes meet where the job's own number says; the doctor, and then a training."""
    run, python = Run(tmp_path / "run"), sys.executable
    output = f"train.steps={STEPS} train.output={run.folder}"
    doctor = f"srun {python} -m meshtrain.cli doctor '{config}' {output}"
    training = f"srun --kill-on-bad-exit=0 {python} -m meshtrain.train '{config}' {output}"
    printed = tmp_path / "job.out"
    job = cluster.sbatch(
        "--nodes=2", "--ntasks-per-node=2", f"--output={printed}", "--wrap", f"{doctor} && {training}"
    )  # fmt: skip
    found = cluster.wait(job)
    assert found["JobState"] == "COMPLETED", printed.read_text()
    assert printed.read_text().count("collectives over gloo") == 1, printed.read_text()
    assert "met at node1:" in printed.read_text()
    assert [row["loss"] for row in run.rows] == losses


@both
def test_a_run_that_is_stopped_comes_back(cluster: Cluster, submit: Callable, losses: list[float], script: str) -> None:
    """By scancel --signal, then by a job that takes its nodes; each time it goes on from where it stopped."""
    job, run, printed = submit(script, SLOW)
    run.reaches(3, cluster, job)
    cluster.ask("scancel", "--signal=USR1", job)
    cluster.start_again(job, restarts=1)
    assert run.exit["status"] == "stopped"
    assert run.exit["reason"].startswith("asked to stop by SIGUSR1"), "on rank 0, or on one that heard it earlier"
    stopped = run.exit["step"]
    assert 3 <= stopped < STEPS
    assert run.checkpoints[-1] == stopped

    run.reaches(stopped + 2, cluster, job)
    urgent = preempt(cluster)
    assert cluster.wait(urgent)["JobState"] == "COMPLETED"
    cluster.start_again(job, restarts=2)
    assert run.exit["status"] == "stopped"
    assert run.exit["reason"].startswith("asked to stop by SIGTERM"), "on rank 0, or on one that heard it earlier"
    preempted = run.exit["step"]
    assert stopped + 2 <= preempted < STEPS
    found = cluster.wait(job, lambda found: found["JobState"] == "RUNNING")
    assert found["PreemptTime"] == "None", "of this start: an older one would bring back a job that failed"

    found = cluster.wait(job)
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "2"), printed.read_text()
    assert [row["step"] for row in run.rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in run.rows] == losses
    for start, step in ((1, stopped), (2, preempted)):
        assert f"goes on from {run.folder}/checkpoints/step_{step:07d}" in "".join(run.logs(start).values())


def test_a_run_that_is_preempted_while_it_starts_comes_back(
    cluster: Cluster, submit: Callable, losses: list[float]
) -> None:
    """If the signal comes before anybody hears it, SLURM ends the job after its grace time, before the run is done."""
    slow = "train.chaos=[{fault: slow, rank: 0, step: 1, until: 19, seconds: 10}]"
    job, run, printed = submit("train.sbatch", slow)
    cluster.wait(job, lambda found: (run.folder / "logs").exists())
    urgent = preempt(cluster)
    assert cluster.wait(urgent)["JobState"] == "COMPLETED"
    cluster.start_again(job, restarts=1)
    assert cluster.wait(job)["JobState"] == "COMPLETED", printed.read_text()
    assert [row["loss"] for row in run.rows] == losses


def test_a_run_saves_before_its_time_limit_and_comes_back(
    cluster: Cluster, submit: Callable, losses: list[float]
) -> None:
    """SLURM sends the signal itself: 60 seconds before the end of these two minutes, or up to 30 seconds earlier."""
    slow = "train.chaos=[{fault: slow, rank: 0, step: 1, until: 19, seconds: 6}]"
    options = ("--gpus-per-node=2", "--time=2", "--signal=USR1@60")
    job, run, printed = submit("train.sbatch", slow, options=options)
    cluster.start_again(job, restarts=1)
    assert (run.exit["status"], run.checkpoints[-1]) == ("stopped", run.exit["step"]), printed.read_text()
    assert run.exit["reason"].startswith("asked to stop by SIGUSR1")
    stopped = run.exit["step"]
    found = cluster.wait(job)
    assert found["JobState"] == "COMPLETED", printed.read_text()
    assert [row["loss"] for row in run.rows] == losses
    assert f"goes on from {run.folder}/checkpoints/step_{stopped:07d}" in "".join(run.logs(1).values())


@both
def test_a_person_ends_a_run(cluster: Cluster, submit: Callable, script: str) -> None:
    """scancel; the state is saved in the time that is left, and nothing comes back."""
    job, run, printed = submit(script, SLOW)
    run.reaches(2, cluster, job)
    cluster.ask("scancel", job)
    found = cluster.wait(job, lambda found: found["JobState"] == "CANCELLED")
    assert (run.exit["status"], run.checkpoints[-1]) == ("stopped", run.exit["step"]), printed.read_text()
    time.sleep(2)
    assert cluster.job(job)["JobState"] == "CANCELLED"
    assert found["Restarts"] == "0"


def test_a_person_stops_a_run_with_a_file(cluster: Cluster, submit: Callable) -> None:
    job, run, printed = submit("train.sbatch", SLOW)
    run.reaches(2, cluster, job)
    (run.folder / "STOP").touch()
    found = cluster.wait(job)
    assert (found["JobState"], found["Restarts"], found["ExitCode"]) == ("COMPLETED", "0", "0:0"), printed.read_text()
    assert (run.exit["status"], run.checkpoints[-1]) == ("stopped", run.exit["step"])


def test_torchrun_makes_up_for_a_lost_process(cluster: Cluster, submit: Callable, losses: list[float]) -> None:
    """A rank of the second node is killed; both nodes start anew from the last checkpoint, in the same job."""
    job, run, printed = submit("train.sbatch", "train.chaos=[{fault: kill, rank: 3, step: 10}]")
    found = cluster.wait(job)
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "0"), printed.read_text()
    assert [row["loss"] for row in run.rows] == losses
    assert [name for name in run.logs(0) if "/attempt_1/" in name]


def test_a_lost_process_ends_a_job_of_srun(cluster: Cluster, submit: Callable) -> None:
    """The others end too, and it is not tried again where MAX_TRIES says so."""
    fault = "train.chaos=[{fault: kill, rank: 3, step: 10}]"
    job, run, printed = submit("train-srun.sbatch", fault, MAX_TRIES="0")
    found = cluster.wait(job)
    assert (found["JobState"], found["Restarts"]) == ("FAILED", "0"), printed.read_text()
    assert (run.exit["status"], run.exit["kind"], run.exit["hosts"]) == ("failed", "gone", ["node2"])
    assert "rank 3 on host node2" in "".join(run.logs(0).values())


def test_a_wrong_config_ends_the_job_before_the_step(cluster: Cluster, submit: Callable) -> None:
    job, run, printed = submit("train.sbatch", "train.stepz=3")
    found = cluster.wait(job)
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "2:0")
    assert "stepz" in printed.read_text()
    assert not run.folder.exists()


# A container runtime with the words of apptainer, for a folder as image: the programs of the host are put there.
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


def test_a_container_and_a_preflight(cluster: Cluster, config: Path, losses: list[float], tmp_path: Path) -> None:
    """The config is inside of the image only, so that checking it and training can only have been done there."""
    image, runtime, here = tmp_path / "image", tmp_path / "runtime", tmp_path / "here"
    (image / "experiment").mkdir(parents=True)
    here.mkdir()
    shutil.copy(config, image / "experiment")
    runtime.write_text(RUNTIME)
    runtime.chmod(0o755)
    mounts = {str(here), str(config.parent), str(Path(sys.prefix).resolve()), str(Path(sys.base_prefix).resolve())}
    variables = {"CONTAINER_IMAGE": str(image), "CONTAINER_RUNTIME": str(runtime), "PREFLIGHT": "1"}
    variables["CONTAINER_MOUNTS"] = ",".join(f"{one}:{one}" for one in sorted(mounts - {"/usr"}))
    inside = Path("/experiment") / config.name
    job, run, printed = submitted(cluster, inside, here, "train.sbatch", **variables)
    assert cluster.wait(job)["JobState"] == "COMPLETED", printed.read_text()
    assert [row["loss"] for row in run.rows] == losses
    (folder,) = run.folder.glob("logs/slurm-*.0")
    assert {log.name for log in folder.glob("preflight_*.log")} == {"preflight_node1.log", "preflight_node2.log"}
    assert "collectives over gloo" in (folder / "preflight_node2.log").read_text()


def test_an_image_that_is_missing_ends_the_job_before_the_step(cluster: Cluster, config: Path, tmp_path: Path) -> None:
    variables = {"CONTAINER_IMAGE": "/no/image.sqsh", "CONTAINER_RUNTIME": "true"}
    job, run, printed = submitted(cluster, config, tmp_path, "train.sbatch", **variables)
    assert cluster.wait(job)["JobState"] == "FAILED"
    assert "CONTAINER_IMAGE is /no/image.sqsh, which is not there" in printed.read_text()
    assert not run.folder.exists()


def test_nodes_with_different_numbers_of_gpus(
    config: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    forked(3, "-m", "meshtrain.train", config, f"train.steps={STEPS}", f"train.output={tmp_path}/plain").check()
    expected = [row["loss"] for row in Run(tmp_path / "plain").rows]
    per_task = tmp_path / "per_task.sbatch"
    text = (ROOT / "tools" / "slurm" / "train-srun.sbatch").read_text()
    text = text.replace("--ntasks-per-node=8", "--ntasks=3").replace("--gpus-per-node=8", "--gpus-per-task=1")
    per_task.write_text(text)
    with Cluster(tmp_path_factory.mktemp("gpus"), gpus={1: 1}) as cluster:
        for script, options in (("train.sbatch", ("--gpus-per-node=0", "--gpus=3")), (str(per_task), ("--nodes=2",))):
            folder = tmp_path / Path(script).stem
            folder.mkdir()
            job, run, printed = submitted(cluster, config, folder, script, options=options)
            assert cluster.wait(job)["JobState"] == "COMPLETED", printed.read_text()
            assert "3 processes = 1 on node1 + 2 on node2" in "".join(run.logs(0).values())
            assert [row["loss"] for row in run.rows] == expected


@pytest.fixture(scope="module")
def losing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that has a node less after some of the tests below."""
    with Cluster(tmp_path_factory.mktemp("losing"), nodes=5, lost_after_s=40) as cluster:
        yield cluster


def nodes_of(printed: Path, start: int) -> list[str]:
    """On which the ranks ran, in that start of the job."""
    (nodes,) = re.findall(rf"2 nodes \((.*)\), start {start};", printed.read_text())
    return nodes.split()


@both
def test_a_spare_node_takes_the_place_of_one_that_dies(
    losing: Cluster, config: Path, losses: list[float], tmp_path: Path, script: str
) -> None:
    """Within the allocation, which SLURM keeps."""
    options = (f"--ntasks-per-node={SCRIPTS[script]}", "--gpus-per-node=2", "--nodes=3", "--no-kill")
    variables = {"SPARE_NODES": "1", "MAX_RESTARTS": "0", "FAILED_SECONDS": "5"}
    job, run, printed = submitted(
        losing, config, tmp_path, script, SLOW.replace("16", "8"), options=options, **variables
    )
    run.reaches(4, losing, job)
    first, second = nodes_of(printed, 0)
    losing.lose(int(second[-1]))
    found = losing.wait(job)
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "0"), printed.read_text()
    assert nodes_of(printed, 1)[0] == first
    assert nodes_of(printed, 1)[1] != second
    assert [row["loss"] for row in run.rows] == losses


def test_a_job_comes_back_without_the_node_that_it_was_lost_by(
    losing: Cluster, config: Path, losses: list[float], tmp_path: Path
) -> None:
    """SLURM takes that node to be well: a process was killed there, as by a GPU that has fallen off its bus."""
    fault = "train.chaos=[{fault: kill, rank: 3, step: 10}]"
    job, run, printed = submitted(losing, config, tmp_path, "train-srun.sbatch", fault)
    losing.start_again(job, restarts=1)
    found = losing.wait(job)
    assert (found["JobState"], found["ExcNodeList"]) == ("COMPLETED", nodes_of(printed, 0)[1]), printed.read_text()
    assert nodes_of(printed, 0)[1] not in nodes_of(printed, 1)
    assert [row["loss"] for row in run.rows] == losses


def test_slurm_itself_brings_a_job_back_that_has_lost_a_node(
    losing: Cluster, config: Path, losses: list[float], tmp_path: Path
) -> None:
    job, run, printed = submitted(losing, config, tmp_path, "train-srun.sbatch", SLOW)
    run.reaches(6, losing, job)
    losing.lose(int(nodes_of(printed, 0)[1][-1]))
    losing.start_again(job, restarts=1)
    assert losing.wait(job)["JobState"] == "COMPLETED", printed.read_text()
    assert nodes_of(printed, 0)[1] not in nodes_of(printed, 1)
    assert [row["loss"] for row in run.rows] == losses
