"""What the sbatch scripts decide, with SLURM's commands played: test_cluster.py runs them in a real SLURM."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launching import ROOT

SLURM = ROOT / "tools" / "slurm"
SCRIPTS = ("train.sbatch", "train-srun.sbatch")

PLAYED = {
    "python": f"""[[ $2 != meshtrain.launch.requeue ]] || exec "{sys.executable}" "$@"
    if [[ $1 == -m ]]; then grep SigIgn /proc/$$/status > "$STAGE/ignored"; fi; echo "$STAGE/run" """,
    "scontrol": """case "$1 $2" in
        "show hostnames") if [[ $3 == *"["* ]]; then cat "$STAGE/hostnames"; else tr , '\\n' <<< "$3"; fi ;;
        "show node") [[ -f $STAGE/node ]] && echo "NodeName=$3 NodeAddr=$(cat "$STAGE/node")$3 OS=Linux" ;;
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
    variables: dict[str, str | None] = field(default_factory=dict)  # None: not set

    def __post_init__(self) -> None:
        (self.folder / "bin").mkdir()
        (self.folder / "run").mkdir()
        for name, text in PLAYED.items():
            (self.folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (self.folder / "bin" / name).chmod(0o755)
        self.write(
            hostnames="gpu07\ngpu08\n",
            job="ExcNodeList=(null) PreemptTime=None",
            requeue_status="0",
            step_status="0",
            during="",
            partition="gpu01\ngpu02\ngpu07\ngpu08\n",
            states="",
            unfit="none",
            help="--container-image=PATH",
        )

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def leave(self, end: Mapping[str, object], start: str = "json") -> None:
        """What the run leaves; `start`: in that start of the step."""
        defaults = {"code": 0, "reason": "", "step": 5, "kind": "", "hosts": []}
        self.write(**{f"exit.{start}": json.dumps(defaults | end) + "\n"})

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def run(self, script: str, *words: str) -> subprocess.CompletedProcess[str]:
        variables = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "STAGE": str(self.folder),
            "ACTIVATE": "",
            "SLURM_JOB_ID": "70001",
            "SLURM_JOB_NODELIST": "gpu[07-08]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_PER_TASK": "6",
            "SLURM_NTASKS_PER_NODE": "4",
            "SLURM_JOB_PARTITION": "main",
            "SLURMD_NODENAME": "gpu07",
            "PYTHONPATH": str(ROOT),
        }
        variables = {
            name: value for name, value in (variables | self.variables).items() if value is not None
        }
        command = ["bash", str(SLURM / script), *(words or ("mine.yaml",))]
        return subprocess.run(
            command, env=variables, cwd=self.folder, capture_output=True, text=True, timeout=60,
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


ENDS = yaml.safe_load(Path(__file__).with_name("ends.yaml").read_text())


@pytest.mark.parametrize("script", SCRIPTS)
def test_how_a_job_ends(tmp_path: Path, script: str) -> None:
    wrong = []
    for number, (name, row) in enumerate(ENDS.items()):
        if row.get("script", script) == script and (
            problem := wrong_end(tmp_path / f"a stage {number}", script, row)
        ):
            wrong.append(f"{name}: {problem}")
    assert not wrong, "\n".join(wrong)


def wrong_end(folder: Path, script: str, row: Mapping[str, Any]) -> str:
    """In what the end of a row's job differs from the row."""
    folder.mkdir()
    stage = Stage(folder, row.get("variables", {}))
    stage.write(**row.get("stage", {}))
    stage.write(**{"my env": 'export FROM_IT="$SURELY_UNSET"here\n'})
    for key, start in (("left", "json"), ("left 1", "1"), ("left 2", "2")):
        if key in row:
            stage.leave(row[key], start)
    if "before" in row:
        stage.leave(row["before"], "before")
        shutil.move(folder / "exit.before", folder / "run" / "exit.json")
    ended = stage.run(script)
    updated = f"ExcNodeList={row['updated']}\n" if "updated" in row else ""
    files = {
        "step": "srun",
        "step of the check": "srun.one",
        "env": "env",
        "torchrun": "torchrun.0",
        "torchrun of the second node": "torchrun.1",
    }
    lines = {
        name: set(stage.read(file).replace(str(folder), "FOLDER").splitlines())
        for name, file in files.items()
    }
    missing = {
        name: {*row.get(name, ()), *row.get(f"{name} of {script}", ())} - lines[name]
        for name in files
    }
    fits = {
        "status": ended.returncode == row["ends"],
        "queue": stage.requeued == row.get("back", False),
        "update": stage.read("updated") == updated,
        "starts": stage.read("starts") == row.get("starts", stage.read("starts")),
        "output": row.get("out", "") in ended.stdout and row.get("err", "") in ended.stderr,
        f"lines {missing}": not any(missing.values()),
        "exit": not ("left" in row and row["ends"] != 2) or (folder / "run" / "exit.json").exists(),
    }
    wrong = [name for name, fit in fits.items() if not fit]
    return f"{wrong}: {ended}" if wrong else ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_config(script: str) -> None:
    variables = {**os.environ, "SLURM_JOB_ID": "1"}
    ended = subprocess.run(
        ["bash", SLURM / script], env=variables, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, "no config was named" in ended.stderr) == (1, True)


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_the_step_gets(stage: Stage, script: str) -> None:
    """And nothing that was not asked for."""
    own = ["my config.yaml", "train.output=runs/a b"]
    stage.run(script, *own)
    assert stage.read("srun").splitlines()[-2:] == own
    if script == "train.sbatch":
        for node in range(2):
            assert stage.read(f"torchrun.{node}").splitlines()[-4:] == [
                "-m",
                "meshtrain.train",
                *own,
            ]
    files = ("torchrun.0", "torchrun.1", "env") if script == "train.sbatch" else ("srun", "env")
    given = "".join(map(stage.read, files))
    assert not re.findall("--cpu-bind|--numa-binding|SOCKET_IFNAME", given)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_site_that_gives_no_cpus_per_task(stage: Stage, script: str) -> None:
    stage.variables = {"SLURM_CPUS_PER_TASK": None}
    assert stage.run(script).returncode == 0
    assert "--cpus-per-task" not in stage.read("srun")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_host_engine_that_does_not_answer_says_nothing_of_a_node(
    stage: Stage, script: str
) -> None:
    """`dcgmi` is there, and users may not ask it."""
    dcgmi = stage.folder / "bin" / "dcgmi"
    dcgmi.write_text("#!/bin/bash\necho 'Error: Unable to connect to host engine.'; exit 235\n")
    dcgmi.chmod(0o755)
    stage.variables = {"PREFLIGHT": "1"}
    ended = stage.run(script)
    assert ended.returncode == 0, ended
    assert stage.read("starts") == "gpu07 gpu08\n"
    shutil.rmtree(stage.folder / "run" / "logs")  # with the marks of nodes that are fit
    dcgmi.write_text("#!/bin/bash\n[[ $1 == discovery || $SLURMD_NODENAME != gpu08 ]]\n")
    assert "not fit to train: gpu08" in stage.run(script).stdout


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
    stage.variables = {
        "CONTAINER_RUNTIME": "apptainer",
        "CONTAINER_IMAGE": "a.sif",
        "CONTAINER_MOUNTS": "/data:/d",
    }
    stage.variables |= {"ACTIVATE": "no/such/activate"}
    stage.write(**{"a.sif": ""})
    ended = stage.run(script, "mine.yaml", "train.steps=3")
    assert ended.returncode == 0, ended
    calls = stage.read("apptainer").split("exec\n--nv\n")[1:]
    assert len(calls) == 3, "the check, and a task of each node"
    for call in calls:
        assert call.startswith(
            f"--bind={stage.folder}:{stage.folder},/data:/d\n--pwd={stage.folder}\na.sif\n"
        )
        assert call.endswith("\nmine.yaml\ntrain.steps=3\n")
    assert calls[0].splitlines()[3:5] == ["python", "-"]
    assert calls[1].splitlines()[3] == ("torchrun" if script == "train.sbatch" else "python")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_signal_that_comes_early_kills_nothing(stage: Stage, script: str) -> None:
    """SIGUSR1 while python and torchrun start, which cannot hear it yet; SIGTERM ends them as ever."""
    stage.run(script)
    ignored = int(stage.read("ignored").split()[1], 16)
    assert ignored & 1 << (signal.SIGUSR1 - 1)
    assert not ignored & 1 << (signal.SIGTERM - 1)


def test_torchrun_may_open_as_many_files_as_the_node_allows(stage: Stage) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        stage.run("train.sbatch")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert stage.read("files").split() == [str(hard), str(hard)]


def test_both_scripts_share_what_is_no_part_of_the_step() -> None:
    """sbatch copies one file to the node, so that they cannot share it in another way."""
    part = r"^# --- The (job|end): the same in .*?(?=^# --- |\Z)"
    texts = [(SLURM / script).read_text() for script in SCRIPTS]
    shared = [
        {found[1]: found[0] for found in re.finditer(part, text, re.M | re.S)} for text in texts
    ]
    assert list(shared[0]) == ["job", "end"]
    assert shared[0] == shared[1]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_has_nothing_to_say() -> None:
    command = ["shellcheck", *(str(SLURM / script) for script in SCRIPTS)]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == ""
