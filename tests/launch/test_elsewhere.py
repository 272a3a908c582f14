"""`meshtrain launch --to k8s` and `--to sky`: the manifests that it writes are what JobSet and
SkyPilot read, and their commands train."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from meshtrain.cli import main as cli
from meshtrain.config import Config
from tests.launching import ROOT, run
from tests.test_k8s import container_of, nodes_of, operators_variables, pod_of, read_by_kubeflow

NODES = ("--nodes", "2", "--gpus-per-node", "4", "--dry-run")
K8S = ("--to", "k8s", "--container-image", "lab/meshtrain:1", *NODES)
ON_VOLUME = ("--container-mounts", "claim:/workspace", "train.output=/workspace/mine")
SKY = ("--to", "sky", "--gres", "H100", *NODES)
MINE = """
model: {name: llama, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}
batch: {global_size: 8, micro_size: 1}
train: {steps: 2, sample_tokens: 0, eval_every: 0}
optimizer: {warmup_steps: 0}
data: {seq_len: 16, workers: 0, validation: 0}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.yaml").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(capsys: pytest.CaptureFixture[str], *words: str, config: str = "mine.yaml") -> list[Any]:
    """The manifests of a job, which are also in a file."""
    status = cli.main(["launch", config, *words])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    (file,) = Path().glob("launch-*.yaml")
    assert file.read_text() == printed.out
    file.unlink()
    return list(yaml.safe_load_all(printed.out))


def test_a_job_set_is_jobsets_and_asks_for_what_was_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--time", "3:50:00", "--env", "NCCL_DEBUG=INFO", "--partition", "training")
    words = (*K8S, *ON_VOLUME, *options, "--cpus-per-task", "16", "train.steps=5")
    config_map, job = launch(capsys, *words)
    assert read_by_kubeflow(job) == job
    assert config_map["data"] == {"mine.yaml": MINE}
    assert job["metadata"] == {
        "name": "mine",
        "labels": {"kueue.x-k8s.io/queue-name": "training"},
    }
    assert nodes_of(job) == (2, 2, 4)
    container, pod = container_of(job), pod_of(job)
    assert container["image"] == "lab/meshtrain:1"
    assert container["args"][:2] == ["--log-dir=/workspace/mine/logs", "--tee=3"]
    assert container["args"][-4:] == [
        "/etc/meshtrain/mine.yaml",
        "train.output=/workspace/mine",
        "train.steps=5",
        "train.time_limit=13800",
    ]
    variables = operators_variables(job, node=1)
    assert variables["PET_MASTER_ADDR"] == "mine-node-0-0.mine"
    assert (variables["PET_NODE_RANK"], variables["NCCL_DEBUG"]) == ("1", "INFO")
    assert container["resources"] == {
        "requests": {"cpu": "16", "nvidia.com/gpu": "4"},
        "limits": {"nvidia.com/gpu": "4"},
    }
    places = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert places.keys() == {"/dev/shm", "/workspace", "/etc/meshtrain"}
    assert set(places.values()) == volumes.keys()
    assert volumes[places["/workspace"]] == {"persistentVolumeClaim": {"claimName": "claim"}}
    assert volumes[places["/etc/meshtrain"]] == {"configMap": {"name": "mine-config"}}


def test_a_config_of_meshtrains_own_is_in_the_image(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*K8S, "--gres", "amd.com/gpu", *ON_VOLUME)
    (job,) = launch(capsys, *words, config="configs/quickstart.yaml")
    assert "configs/quickstart.yaml" in container_of(job)["args"]
    assert container_of(job)["resources"]["limits"] == {"amd.com/gpu": "4"}


def test_a_task_is_skypilots_and_asks_for_what_was_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    schema = yaml.safe_load((ROOT / "tests" / "sky_schema.yaml").read_text())["task"]
    template = yaml.safe_load((ROOT / "tools" / "sky" / "train.yaml").read_text())
    jsonschema.validate(template, schema)
    assert Config.load("quickstart", ["checkpoint.upload=s3://my-bucket/quickstart"])
    mounts = ("--container-mounts", "checkpoints:/workspace,s3://texts/en:/texts")
    options = ("--partition", "aws/us-east-1", "--env", "A=b c", "--cpus-per-task", "64")
    words = (*SKY, *mounts, *options, "train.output=/workspace/mine", "--time", "240")
    (task,) = launch(capsys, *words)
    jsonschema.validate(task, schema)
    run_text = task.pop("run")
    assert task == {
        "name": "mine",
        "num_nodes": 2,
        "workdir": ".",
        "resources": {"accelerators": {"H100": 4}, "infra": "aws/us-east-1", "cpus": "64+"},
        "setup": template["setup"],
        "file_mounts": {"/texts": {"source": "s3://texts/en", "mode": "MOUNT"}},
        "volumes": {"/workspace": "checkpoints"},
        "envs": {"A": "b c"},
    }
    assert run_text.endswith(
        "-m meshtrain.train mine.yaml train.output=/workspace/mine train.time_limit=14400\n"
    )
    (task,) = launch(
        capsys, *SKY, "--nodes", "1", "--container-image", "a/b", "checkpoint.upload=s3://b/c"
    )
    assert "setup" not in task
    assert task["resources"]["image_id"] == "docker:a/b"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--to", "pbs", *NODES), "say which scheduler: --to slurm, k8s or sky"),
        (("--to", "sky", "--slurm", *NODES), "say which scheduler"),
        (("--to", "k8s", *NODES, *ON_VOLUME), "--container-image is missing"),
        (("--to", "sky", *NODES, *ON_VOLUME), "--gres is missing: SkyPilot looks for GPUs"),
        (
            (*K8S, *ON_VOLUME, "--spare-nodes", "1"),
            "--spare-nodes is an option of SLURM alone, and the job is for k8s",
        ),
        ((*K8S, *ON_VOLUME, "--srun", "label="), "--srun is an option of SLURM alone"),
        (K8S, "checkpoints would be written to runs/mine, which is on no volume"),
        (
            (*K8S, "--container-mounts", "claim:/data"),
            "--container-mounts CLAIM:/workspace train.output",
        ),
        (
            (*SKY, "--container-mounts", "s3://a/b:/workspace", "train.output=/workspace/x"),
            "on no volume",
        ),
        ((*SKY, "checkpoint.upload=s3://a/b"), "or for one node checkpoint.upload"),
        ((*K8S, "--container-mounts", "claim"), "expected VOLUME:/FOLDER"),
        ((*K8S, "--container-mounts", "claim:/"), "expected VOLUME:/FOLDER"),
        ((*K8S, *ON_VOLUME, "--job-name", "My_Run"), "expected lower-case letters, digits and -"),
        ((*K8S, *ON_VOLUME, "layout.dp_shard=3"), "use {dp_shard: 8}"),
        ((*K8S, *ON_VOLUME, "layout={dp_shard: 1, tp: 8}"), "tp"),
    ],
)
def test_what_is_wrong_is_refused(
    words: tuple[str, ...], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", "mine.yaml", *words]) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.out == ""
    assert [path.name for path in folder.iterdir()] == ["mine.yaml"]


def test_a_long_name_of_a_config_becomes_one_of_a_job(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.yaml").rename(folder / f"A run_{'x' * 60}.yaml")
    config_map, job = launch(capsys, *K8S, *ON_VOLUME, config=f"A run_{'x' * 60}.yaml")
    assert job["metadata"]["name"] == f"a-run-{'x' * 34}"
    assert list(config_map["data"]) == [f"A-run_{'x' * 60}.yaml"]
    assert f"/etc/meshtrain/A-run_{'x' * 60}.yaml" in container_of(job)["args"]


def test_files_that_the_job_has_to_have_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("data.source=jsonl", "data.path=/texts")
    assert cli.main(["launch", "mine.yaml", *K8S, *ON_VOLUME, *keys]) == 0
    assert "have to be in the image or a volume: data.path" in capsys.readouterr().err


def test_skypilot_gets_the_config_from_below_the_working_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (task,) = launch(capsys, *SKY, *ON_VOLUME, config=str(folder / "mine.yaml"))
    assert "-m meshtrain.train mine.yaml " in task["run"]
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert cli.main(["launch", "../mine.yaml", *SKY, *ON_VOLUME]) == 2
    assert f"cd {folder} first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "program"), [((*K8S, *ON_VOLUME), "kubectl"), ((*SKY, *ON_VOLUME), "sky")]
)
def test_a_job_is_submitted(
    words: tuple[str, ...],
    program: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a stand-in; without the program nothing is written."""
    words = tuple(word for word in words if word != "--dry-run")
    monkeypatch.setenv("PATH", str(folder / "bin"))
    assert cli.main(["launch", "mine.yaml", *words]) == 2
    assert f"there is no {program} on this host" in capsys.readouterr().err
    assert not list(folder.glob("launch-*"))
    (folder / "bin").mkdir()
    stand_in = folder / "bin" / program
    stand_in.write_text('#!/bin/bash\necho "$@" > bin/words; [[ ! -e refuse ]]\n')
    stand_in.chmod(0o755)
    assert cli.main(["launch", "mine.yaml", *words]) == 0
    assert (folder / "bin" / "words").read_text().split()[-1] == "launch-mine.yaml"
    assert "mine" in capsys.readouterr().out.splitlines()[-1]
    (folder / "refuse").touch()
    assert cli.main(["launch", "mine.yaml", *words]) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_commands_of_both_train(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On one node of two processes, with the variables that the schedulers set."""
    one = ("--nodes", "1", "--gpus-per-node", "2", f"--container-mounts=claim:{folder}")
    output = f"train.output={folder}/run"
    _, job = launch(capsys, "--to", "k8s", "--container-image=a", *one, "--dry-run", output)
    words = [word.replace("/etc/meshtrain/", f"{folder}/") for word in container_of(job)["args"]]
    variables = operators_variables(job, node=0) | {"PET_MASTER_ADDR": "127.0.0.1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    run([*torchrun, *words], env=variables, cwd=folder).check()
    rows = [json.loads(row) for row in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]

    (task,) = launch(
        capsys, "--to", "sky", "--gres=H100", *one, "--dry-run", f"train.output={folder}/again"
    )
    own = {
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NUM_GPUS_PER_NODE": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n10.0.0.2",
    }
    command = task["run"].replace("torchrun ", f"{shlex.join(torchrun)} ", 1)
    run(["bash", "-c", command], env=own, cwd=folder).check()
    again = [
        json.loads(row) for row in (folder / "again" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]


@pytest.mark.integrations
def test_skypilot_reads_the_task(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it is installed: its packages do not fit those of the other tests."""
    sky = pytest.importorskip("sky")
    assert sky.Task.from_yaml(str(ROOT / "tools" / "sky" / "train.yaml")).num_nodes == 1
    mounts = ("--container-mounts", "checkpoints:/workspace,gs://texts/en:/texts")
    options = ("--partition", "aws/us-east-1", "--env", "A=1", "--cpus-per-task", "64")
    (task,) = launch(capsys, *SKY, *mounts, *options, "train.output=/workspace/mine")
    Path("task.yaml").write_text(yaml.safe_dump(task))
    read = sky.Task.from_yaml("task.yaml")
    read.expand_and_validate_workdir()
    assert (read.name, read.num_nodes, read.workdir) == ("mine", 2, str(folder))
    assert (read.run, read.setup) == (task["run"], task["setup"])
    assert read.envs == {"A": "1"}
    assert read.volumes == {"/workspace": "checkpoints"}
    (bucket,) = read.storage_mounts.values()
    assert (bucket.source, bucket.mode.value) == ("gs://texts/en", "MOUNT")
    (resources,) = read.resources
    assert (resources.accelerators, resources.cpus) == ({"H100": 4}, "64+")
    assert (resources.infra.cloud, resources.infra.region) == ("AWS", "us-east-1")

    one = ("--nodes", "1", "--container-image", "a/b", "--partition", "k8s")
    (task,) = launch(capsys, *SKY, *one, "checkpoint.upload=s3://b/c")
    Path("task.yaml").write_text(yaml.safe_dump(task))
    read = sky.Task.from_yaml("task.yaml")
    assert (read.num_nodes, read.setup) == (1, None)
    (resources,) = read.resources
    assert resources.image_id == {None: "docker:a/b"}
    assert resources.infra.cloud == "Kubernetes"
