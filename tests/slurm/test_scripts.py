"""What the sbatch scripts decide, with SLURM's commands played: test_cluster.py runs them in a real SLURM."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.launching import ROOT

SLURM = ROOT / "tools" / "slurm"
SCRIPTS = ("train.sbatch", "train-srun.sbatch")

PLAYED = {
    "python": f"""[[ $2 != meshtrain.launch.requeue ]] || exec "{sys.executable}" "$@"
    if [[ $1 == -m ]]; then grep SigIgn /proc/$$/status > "$STAGE/ignored"; fi; echo "$STAGE/run" """,
    "scontrol": """case "$1 $2" in
        "show hostnames") if [[ $3 == *"["* ]]; then cat "$STAGE/hostnames"; else tr , '\\n' <<< "$3"; fi ;;
        "show job") cat "$STAGE/job" ;;
        "requeue 70001") touch "$STAGE/requeued"; exit "$(cat "$STAGE/requeue_status")" ;;
        "update JobId=70001") [[ -f $STAGE/requeued ]] && echo "$3" > "$STAGE/updated" ;;
        *) exit 9 ;;
    esac""",
    # Of the partition it knows all nodes, of the job's the states.
    "sinfo": """[[ $* == *--partition* ]] && cat "$STAGE/partition" || cat "$STAGE/states" """,
    "all_reduce_perf": """! grep --quiet "$SLURMD_NODENAME" "$STAGE/unfit" """,
    # It does what the step would do, leaves what the run would leave, and ends as the step would end.
    "srun": """if [[ $1 == --help ]]; then cat "$STAGE/help"; exit; fi
    if [[ $* != *" bash -c "* ]]; then  # a program alone, in the container
        printf '%s\\n' "$@" > "$STAGE/srun.one"; while [[ $1 != python ]]; do shift; done; exec "$@"
    fi
    env > "$STAGE/env"; printf '%s\\n' "$@" > "$STAGE/srun"
    mapfile -t on < "$STAGE/hostnames"
    for word; do [[ $word != --nodelist=* ]] || IFS=, read -ra on <<< "${word#*=}"; done
    [[ $* != *preflight* ]] || test=yes
    while [[ $1 != bash ]]; do shift; done
    for ((SLURM_NODEID = 0; SLURM_NODEID < ${#on[@]}; SLURM_NODEID++)); do
        export SLURM_NODEID SLURMD_NODENAME=${on[SLURM_NODEID]}; "$@"
    done
    [[ -z ${test-} ]] || exit 0
    echo "${on[*]}" >> "$STAGE/starts"
    if [[ -f $STAGE/exit.$(wc -l < "$STAGE/starts") ]]; then
        cp "$STAGE/exit.$(wc -l < "$STAGE/starts")" "$STAGE/exit.json"; touch "$STAGE/exit.json"
    fi
    source "$STAGE/during"
    [[ ! -f $STAGE/exit.json ]] || cp "$STAGE/exit.json" "$STAGE/run/exit.json"
    exit "$(cat "$STAGE/step_status")" """,
    "apptainer": """printf '%s\\n' "$@" >> "$STAGE/apptainer"
    [[ $* != *unknown/image* ]] || { echo "FATAL: no such image" >&2; exit 255; }
    while [[ $1 != python && $1 != torchrun ]]; do shift; done; exec "$@" """,
    "torchrun": """printf '%s\\n' "$@" > "$STAGE/torchrun.$SLURM_NODEID"
    grep SigIgn /proc/$$/status > "$STAGE/ignored"; echo "$(ulimit -n) $(ulimit -Hn)" > "$STAGE/files" """,
}


@dataclass
class Stage:
    """A folder with the commands that a script calls, and what they have seen."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "bin").mkdir()
        (self.folder / "run").mkdir()
        for name, text in PLAYED.items():
            (self.folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (self.folder / "bin" / name).chmod(0o755)
        self.write(
            hostnames="gpu07\ngpu08\n", job="ExcNodeList=(null) PreemptTime=None", requeue_status="0", step_status="0",
            during="", partition="gpu01\ngpu02\ngpu07\ngpu08\n", states="", unfit="none", help="--container-image=PATH",
        )  # fmt: skip

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def exit(
        self, status: str, reason: str = "", kind: str = "", hosts: Sequence[str] = (), start: str = "json"
    ) -> None:
        """What the run leaves; `start`: in that start of the step."""
        end = {"status": status, "code": 0, "reason": reason, "step": 5, "kind": kind, "hosts": list(hosts)}
        self.write(**{f"exit.{start}": json.dumps(end) + "\n"})

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def run(self, script: str, *words: str) -> subprocess.CompletedProcess[str]:
        variables = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "STAGE": str(self.folder), "ACTIVATE": "",
            "SLURM_JOB_ID": "70001", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_PER_TASK": "6", "SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_PARTITION": "main",
            "SLURMD_NODENAME": "gpu07",
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = ["bash", str(SLURM / script), *(words or ("mine.yaml",))]
        return subprocess.run(
            command, env=variables | self.variables, cwd=self.folder, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip

    @property
    def requeued(self) -> bool:
        return (self.folder / "requeued").exists()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    folder = tmp_path / "a stage"
    folder.mkdir()
    return Stage(folder)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("status", "reason", "step_status", "again"),
    [
        ("stopped", "asked to stop by SIGUSR1", "1", True),
        ("stopped", "asked to stop by the end of SLURM job 70001", "75", True),
        ("stopped", "asked to stop by the file runs/mine/STOP", "0", False),
        ("done", "all steps are done", "0", False),
        ("failed", "TrainingError: it says it stopped", "1", False),
    ],
)
def test_what_goes_back_into_the_queue(
    stage: Stage, script: str, status: str, reason: str, step_status: str, again: bool
) -> None:
    stage.exit(status, reason, kind="training" if status == "failed" else "")
    stage.write(step_status=step_status)
    ended = stage.run(script)
    assert (stage.requeued, ended.returncode) == (again, 75 if again else int(step_status)), ended


def test_how_an_earlier_job_ended_does_not_count(stage: Stage) -> None:
    """A run that is refused leaves the folder as it was."""
    stage.exit("stopped", "asked to stop by SIGUSR1")
    shutil.move(stage.folder / "exit.json", stage.folder / "run" / "exit.json")
    stage.write(step_status="2")
    assert stage.run("train.sbatch").returncode == 2
    assert not stage.requeued


def test_a_job_that_was_preempted_while_it_started_goes_back(stage: Stage) -> None:
    stage.write(step_status="143", job="   PreemptEligibleTime=x PreemptTime=2026-11-21T23:23:40")
    assert stage.run("train.sbatch").returncode == 75
    assert stage.requeued


def test_a_preempted_job_that_has_failed_or_is_done_does_not_go_back(stage: Stage) -> None:
    stage.write(step_status="1", job="   PreemptEligibleTime=x PreemptTime=2026-11-21T23:23:40")
    for status in ("failed", "done"):
        stage.exit(status, kind="input" if status == "failed" else status)
        assert stage.run("train.sbatch").returncode == 1
    assert not stage.requeued


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_job_that_has_lost_a_node_comes_back_without_it(stage: Stage, script: str) -> None:
    stage.exit("failed", "rank 9 on host gpu08 is gone", "gone", ["gpu08.cluster"])
    stage.write(step_status="1", job="ExcNodeList=gpu01 PreemptTime=None")
    ended = stage.run(script)
    assert (ended.returncode, stage.requeued) == (75, True), ended
    assert stage.read("updated") == "ExcNodeList=gpu08,gpu01\n"
    assert "comes back without gpu08" in ended.stdout


def test_no_node_is_left_out_where_there_are_no_others(stage: Stage) -> None:
    stage.exit("failed", "rank 9 on host gpu08 is gone", "gone", ["gpu08"])
    stage.write(step_status="1", partition="gpu07\ngpu08\n")
    ended = stage.run("train-srun.sbatch")
    assert (ended.returncode, stage.requeued, stage.read("updated")) == (75, True, ""), ended
    assert "keeps gpu08: main has 1 nodes besides, and the job needs 2" in ended.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_spare_node_takes_the_place_of_a_lost_one(stage: Stage, script: str) -> None:
    """Within the job; when the spare is used up too, the job comes back without both."""
    stage.variables = {"SLURM_JOB_NUM_NODES": "3", "SPARE_NODES": "1"}
    stage.write(hostnames="gpu07\ngpu08\ngpu09\n", step_status="1", partition="gpu01\ngpu02\ngpu03\ngpu07\ngpu08\n")
    stage.exit("failed", "rank 1 on host gpu07 is gone", "gone", ["gpu07"], start="1")
    stage.exit("failed", "rank 0 on host gpu08 cannot be reached", "unreachable", ["gpu08"], start="2")
    ended = stage.run(script)
    assert (ended.returncode, stage.requeued) == (75, True), ended
    assert stage.read("starts").splitlines() == ["gpu07 gpu08", "gpu08 gpu09"]
    assert stage.read("updated") == "ExcNodeList=gpu07,gpu08\n"
    assert "--overlap" in stage.read("srun").splitlines()
    assert {"MASTER_ADDR=gpu08", "MASTER_PORT=20017", "SLURM_RESTART_COUNT=1"} <= set(stage.read("env").splitlines())
    if "srun" in script:
        assert "--ntasks=8" in stage.read("srun").splitlines()


def test_a_failure_that_no_node_is_to_blame_for_is_tried_again_at_once_and_so_often(stage: Stage) -> None:
    stage.exit("failed", "ValueError: x", "failed", ["gpu08"])
    stage.write(step_status="1")
    stage.variables = {"MAX_TRIES": "2"}
    ended = stage.run("train.sbatch")
    assert (ended.returncode, stage.requeued, stage.read("updated")) == (1, False, "")
    assert len(stage.read("starts").splitlines()) == 3
    assert "end: ValueError: x: 3 failures in a row have got no further than step 0" in ended.stdout


def test_a_node_that_slurm_has_lost_while_the_ranks_started(stage: Stage) -> None:
    stage.write(step_status="1", states="gpu07 mix\ngpu08 down*\n")
    assert stage.run("train-srun.sbatch").returncode == 75
    assert stage.read("updated") == "ExcNodeList=gpu08\n"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_node_that_is_not_fit_is_left_out(stage: Stage, script: str) -> None:
    stage.write(unfit="gpu08")
    stage.variables = {"PREFLIGHT": "1"}
    ended = stage.run(script)
    assert (ended.returncode, stage.read("updated")) == (75, "ExcNodeList=gpu08\n"), ended
    assert "not fit to train: gpu08 (see " in ended.stdout
    assert stage.read("starts") == ""
    stage.write(unfit="none")
    assert stage.run(script).returncode == 0
    assert stage.read("starts") == "gpu07 gpu08\n"


def test_a_job_goes_back_so_many_times(stage: Stage) -> None:
    stage.exit("stopped", "asked to stop by SIGUSR1")
    stage.variables = {"SLURM_RESTART_COUNT": "3", "MAX_REQUEUES": "3"}
    ended = stage.run("train-srun.sbatch")
    assert (ended.returncode, stage.requeued) == (1, False)
    assert "MAX_REQUEUES is 3" in ended.stderr
    stage.variables["SLURM_RESTART_COUNT"] = "2"
    assert stage.run("train-srun.sbatch").returncode == 75


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_count_of_starts_that_was_inherited_is_not_the_jobs(stage: Stage, script: str) -> None:
    """The job was submitted in one that SLURM had started again; `scontrol show job` has its own count."""
    stage.exit("done")
    stage.write(job="Requeue=1 Restarts=0 BatchFlag=1 ExcNodeList=(null) PreemptTime=None")
    stage.variables = {"SLURM_RESTART_COUNT": "3"}
    assert stage.run(script).returncode == 0
    assert "SLURM_RESTART_COUNT=0" in stage.read("env").splitlines()


def test_slurm_may_refuse_to_take_it_back(stage: Stage) -> None:
    stage.exit("stopped", "asked to stop by SIGUSR1")
    stage.write(requeue_status="1")
    ended = stage.run("train.sbatch")
    assert ended.returncode == 1
    assert "submit the same again" in ended.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_job_that_slurm_ends_does_not_go_back(stage: Stage, script: str) -> None:
    """scancel sends SIGTERM to this shell too; the run uses the time that is left for its checkpoint."""
    stage.exit("stopped", "asked to stop by SIGTERM")
    stage.write(during="kill -TERM $PPID; sleep 0.5\n", step_status="1")
    assert stage.run(script).returncode == 1
    assert not stage.requeued
    assert (stage.folder / "run" / "exit.json").exists(), "the shell waited for the step"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_signal_for_the_shell_alone_is_passed_on(stage: Stage, script: str) -> None:
    stage.exit("stopped", "asked to stop by SIGUSR1")
    stage.write(during='trap "heard=yes" USR1; kill -USR1 $PPID; sleep 0.5; [[ $heard == yes ]] || exit 9\n')
    ended = stage.run(script)
    assert (ended.returncode, stage.requeued) == (75, True), ended


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("hosts", ["", "gpu07\n", "localhost\n"])
def test_a_node_list_that_cannot_be_read_ends_the_job(stage: Stage, script: str, hosts: str) -> None:
    stage.write(hostnames=hosts)
    ended = stage.run(script)
    assert ended.returncode == 1
    assert "cannot read 'gpu[07-08]'" in ended.stderr
    assert not (stage.folder / "srun").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_config_and_no_environment(stage: Stage, script: str) -> None:
    alone = subprocess.run(
        ["bash", str(SLURM / script)], env={**os.environ, "SLURM_JOB_ID": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (alone.returncode, "no config was named" in alone.stderr) == (1, True)
    stage.variables = {"ACTIVATE": "no/such/activate"}
    ended = stage.run(script)
    assert (ended.returncode, "no/such/activate is no file" in ended.stderr) == (1, True)
    (stage.folder / "my env").write_text('export FROM_IT="$SURELY_UNSET"here\n')
    stage.variables = {"ACTIVATE": "my env"}
    assert stage.run(script).returncode == 0
    assert "FROM_IT=here" in (stage.folder / "env").read_text().splitlines()


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_the_step_gets(stage: Stage, script: str) -> None:
    stage.run(script, "my config.yaml", "train.output=runs/a b")
    words = (stage.folder / "srun").read_text().splitlines()
    assert words[-2:] == ["my config.yaml", "train.output=runs/a b"]
    assert {"--cpus-per-task=6", "--kill-on-bad-exit=0", "--export=ALL"} <= set(words)
    variables = (stage.folder / "env").read_text().splitlines()
    assert {"MASTER_ADDR=gpu07", "MASTER_PORT=20001"} <= set(variables)
    assert not [line for line in variables if "SOCKET_IFNAME" in line]
    stage.variables = {"SOCKET_INTERFACE": "=ib0"}
    stage.run(script)
    variables = (stage.folder / "env").read_text().splitlines()
    assert {"NCCL_SOCKET_IFNAME==ib0", "GLOO_SOCKET_IFNAME=ib0"} <= set(variables)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_runs_folder_is_the_one_that_training_has(stage: Stage, script: str) -> None:
    """Where `~` stands in the config no shell replaces it."""
    real = f'[[ $1 == -m ]] || exec "{sys.executable}" "$@"'
    (stage.folder / "bin" / "python").write_text(f"#!/bin/bash\n{real}\n")
    stage.variables = {"HOME": str(stage.folder / "home"), "PYTHONPATH": str(ROOT)}
    ended = stage.run(script, str(ROOT / "configs/quickstart.yaml"), "train.output=~/a run")
    assert f"the run is in {stage.folder}/home/a run, " in ended.stdout, ended
    assert (stage.folder / "home/a run/logs/slurm-70001.0").is_dir()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_container_by_apptainer(stage: Stage, script: str) -> None:
    """The check of the config runs in it, and the ranks; no environment of the host is needed."""
    stage.variables = {"CONTAINER_RUNTIME": "apptainer", "CONTAINER_IMAGE": "a.sif", "CONTAINER_MOUNTS": "/data:/d"}
    stage.variables |= {"ACTIVATE": "no/such/activate"}
    stage.write(**{"a.sif": ""})
    ended = stage.run(script, "mine.yaml", "train.steps=3")
    assert ended.returncode == 0, ended
    calls = stage.read("apptainer").split("exec\n--nv\n")[1:]
    assert len(calls) == 3, "the check, and a task of each node"
    for call in calls:
        assert call.startswith(f"--bind={stage.folder}:{stage.folder},/data:/d\n--pwd={stage.folder}\na.sif\n")
        assert call.endswith("\nmine.yaml\ntrain.steps=3\n")
    assert calls[0].splitlines()[3:5] == ["python", "-"]
    assert calls[1].splitlines()[3] == ("torchrun" if script == "train.sbatch" else "python")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_container_by_pyxis_and_options_of_srun(stage: Stage, script: str) -> None:
    stage.variables = {
        "CONTAINER_IMAGE": "nvcr.io/a/b:1",
        "CONTAINER_MOUNTS": "/data:/d",
        "SRUN_ARGS": "--label '--x=a b'",
    }
    assert stage.run(script).returncode == 0
    container = {"--container-image=nvcr.io/a/b:1", f"--container-workdir={stage.folder}", "--label", "--x=a b"}
    container |= {f"--container-mounts={stage.folder}:{stage.folder},/data:/d"}
    assert container <= set(stage.read("srun").splitlines())
    assert container | {"--ntasks=1", "--nodelist=gpu07", "--overlap"} <= set(stage.read("srun.one").splitlines())


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"CONTAINER_IMAGE": "./no.sif", "CONTAINER_RUNTIME": "apptainer"},
            "CONTAINER_IMAGE is ./no.sif, which is not",
        ),
        ({"CONTAINER_IMAGE": "a.sqsh"}, "CONTAINER_IMAGE is a.sqsh, which is not there"),
        ({"CONTAINER_IMAGE": "a", "CONTAINER_RUNTIME": "podhuman"}, "CONTAINER_RUNTIME is podhuman, and "),
        ({"CONTAINER_IMAGE": "a"}, "this SLURM has no pyxis: set CONTAINER_RUNTIME=apptainer"),
        (
            {"CONTAINER_IMAGE": "docker://unknown/image", "CONTAINER_RUNTIME": "apptainer"},
            "FATAL: no such image\n.*python with meshtrain could not be started in docker://unknown/image",
        ),
        ({"SPARE_NODES": "2"}, "SPARE_NODES is 2, and the job has 2 nodes"),
    ],
)
def test_what_a_job_cannot_have_ends_it_with_a_sentence(stage: Stage, variables: dict[str, str], said: str) -> None:
    stage.variables = variables
    stage.write(help="no plugins" if "pyxis" in said else "--container-image")
    ended = stage.run("train-srun.sbatch")
    assert ended.returncode not in (0, 75)
    assert re.search(said, ended.stderr, re.DOTALL), ended
    assert not (stage.folder / "srun").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_signal_that_comes_early_kills_nothing(stage: Stage, script: str) -> None:
    """SIGUSR1 while python and torchrun start, which cannot hear it yet; SIGTERM ends them as ever."""
    stage.run(script)
    ignored = int((stage.folder / "ignored").read_text().split()[1], 16)
    assert ignored & 1 << (signal.SIGUSR1 - 1)
    assert not ignored & 1 << (signal.SIGTERM - 1)


@pytest.mark.parametrize(
    ("script", "variable", "seen_by", "option"),
    [
        ("train.sbatch", "NUMA_BINDING", "torchrun.1", "--numa-binding=node"),
        ("train-srun.sbatch", "CPU_BIND", "srun", "--cpu-bind=node"),
    ],
)
def test_processes_are_bound_where_that_is_asked_for(
    stage: Stage, script: str, variable: str, seen_by: str, option: str
) -> None:
    stage.run(script)
    assert option[:10] not in (stage.folder / seen_by).read_text()
    stage.variables = {variable: "node"}
    stage.run(script)
    assert option in (stage.folder / seen_by).read_text().splitlines()


def test_torchrun_may_open_as_many_files_as_the_node_allows(stage: Stage) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        stage.run("train.sbatch")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (stage.folder / "files").read_text().split() == [str(hard), str(hard)]


def test_torchrun_of_each_node(stage: Stage) -> None:
    stage.variables = {"SAVE_SECONDS": "77", "PROCESSES_PER_NODE": "3"}
    stage.run("train.sbatch", "my config.yaml", "train.output=runs/a b")
    first, second = ((stage.folder / f"torchrun.{node}").read_text().splitlines() for node in (0, 1))
    assert {"--rdzv-conf=is_host=1", "--local-addr=gpu07"} <= set(first)
    assert {"--rdzv-conf=is_host=0", "--local-addr=gpu08"} <= set(second)
    for words in (first, second):
        assert words[-4:] == ["-m", "meshtrain.train", "my config.yaml", "train.output=runs/a b"]
        assert {"--nnodes=2", "--nproc-per-node=3", "--rdzv-id=70001", "--rdzv-endpoint=gpu07:20001"} <= set(words)
        assert {"--shutdown-timeout=77", "--redirects=3", "--tee=3"} <= set(words)
        assert "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" in words


@pytest.mark.parametrize(("variables", "processes"), [({}, "gpu"), ({"SLURM_GPUS_ON_NODE": "5"}, "5")])
def test_processes_of_a_node_are_its_gpus(stage: Stage, variables: dict[str, str], processes: str) -> None:
    stage.variables = variables
    stage.run("train.sbatch", "my config.yaml")
    assert f"--nproc-per-node={processes}" in (stage.folder / "torchrun.0").read_text().splitlines()


def test_both_scripts_share_what_is_no_part_of_the_step() -> None:
    """sbatch copies one file to the node, so that they cannot share it in another way."""
    texts = [(SLURM / script).read_text() for script in SCRIPTS]
    shared = [re.findall(r"^# --- The (job|end): the same in .*?(?=^# --- |\Z)", text, re.M | re.S) for text in texts]
    assert shared == [["job", "end"], ["job", "end"]]
    for name in ("job", "end"):
        one, other = (re.search(rf"^# --- The {name}:.*?(?=^# --- |\Z)", text, re.M | re.S) for text in texts)
        assert one is not None
        assert other is not None
        assert one[0] == other[0]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_has_nothing_to_say() -> None:
    said = subprocess.run(
        ["shellcheck", *(str(SLURM / script) for script in SCRIPTS)], capture_output=True, text=True, check=False
    )
    assert said.stdout == ""
