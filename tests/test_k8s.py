"""tools/k8s: Kubeflow's own models read the manifests, and their commands train where Kubeflow would run them.

What the operators put into a container's environment is taken from their sources (Trainer 2.3: the torch plugin;
Training Operator 1.9: envvar.go, elastic.go); so are the rules of their webhooks.
"""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml
from kubeflow.training import ApiClient
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from torch.distributed.run import get_args_parser

from meshtrain.config import Config
from meshtrain.config.layout_advice import host_warnings
from meshtrain.doctor.torchrun_options import read_place
from meshtrain.layout import Layout
from tests.doctor.test_torchrun_options import parse
from tests.launching import TORCHRUN, free_port, run_together

K8S = Path(__file__).resolve().parent.parent / "tools" / "k8s"
SHORT = ["train.steps=2", "train.eval_every=0", "train.sample_tokens=0", "batch.global_size=4", "data.workers=0"]
Json = dict[str, Any]


def manifest(name: str, options: bool = False) -> Json:
    """`options`: with the lines in which a `#` stands right before a word."""
    text = (K8S / f"{name}.yaml").read_text()
    return yaml.safe_load(re.sub(r"^( *)#(?=\S)", r"\1", text, flags=re.MULTILINE) if options else text)


# Kubeflow's models -------------------------------------------------------------------------------------------------


def read_trainjob(job: Json) -> Json:
    """What Kubeflow Trainer's API makes of a manifest: keys that it does not know are gone."""
    return TrainerV1alpha1TrainJob.from_dict(job).to_dict()


def read_pytorchjob(job: Json) -> Json:
    client = ApiClient()
    read = client.deserialize(SimpleNamespace(data=json.dumps(job)), "KubeflowOrgV1PyTorchJob")
    return client.sanitize_for_serialization(read)


READERS: dict[str, Callable[[Json], Json]] = {"trainjob": read_trainjob, "pytorchjob": read_pytorchjob}


@pytest.mark.parametrize("name", READERS)
def test_kubeflow_understands_all_of_a_manifest(name: str) -> None:
    assert READERS[name](manifest(name)) == manifest(name)


@pytest.mark.parametrize("name", READERS)
def test_kubeflow_understands_the_lines_for_fast_networks(name: str) -> None:
    plain, job = manifest(name), manifest(name, options=True)
    assert READERS[name](job) == job
    container = container_of(job)
    limits = (container.get("resources") or container["resourcesPerNode"])["limits"]
    assert {"rdma/hca", "vpc.amazonaws.com/efa", "hugepages-2Mi"} == set(limits) - {"nvidia.com/gpu"}
    assert pod_of(job)["containers"][0]["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    new = [one["name"] for one in container["env"] if one not in container_of(plain)["env"]]
    assert new == ["NCCL_DEBUG", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"]
    assert "rdma" not in str(plain), "most clusters have no such resource, and a pod would wait for it"


# The fields that Kueue's API (kueue.x-k8s.io/v1beta1) has, as far as a small queue needs them.
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([KMGTPE]i?|m|k)?$"}
KUEUE: dict[str, Json] = {
    "ResourceFlavor": {"nodeLabels": {"type": "object"}, "topologyName": {"type": "string"}},
    "LocalQueue": {"clusterQueue": {"type": "string"}},
    "ClusterQueue": {
        "namespaceSelector": {"type": "object"},
        "queueingStrategy": {"enum": ["StrictFIFO", "BestEffortFIFO"]},
        "resourceGroups": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["coveredResources", "flavors"],
                "properties": {
                    "coveredResources": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 16},
                    "flavors": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["name", "resources"],
                            "properties": {
                                "name": {"type": "string"},
                                "resources": {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "additionalProperties": False,
                                        "required": ["name", "nominalQuota"],
                                        "properties": {"name": {"type": "string"}, "nominalQuota": QUANTITY},
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


def amount(quantity: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(Gi|Ti|)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * {"": 1, "Gi": 2**30, "Ti": 2**40}[unit]


def queue_objects() -> dict[str, Json]:
    return {one["kind"]: one for one in yaml.safe_load_all((K8S / "kueue.yaml").read_text())}


def test_kueue_understands_the_queue() -> None:
    found = queue_objects()
    assert set(found) == set(KUEUE)
    for kind, one in found.items():
        assert one["apiVersion"] == "kueue.x-k8s.io/v1beta1"
        schema = {"type": "object", "additionalProperties": False, "properties": KUEUE[kind]}
        jsonschema.validate(one.get("spec", {}), schema)
    assert found["LocalQueue"]["spec"]["clusterQueue"] == found["ClusterQueue"]["metadata"]["name"]
    (group,) = found["ClusterQueue"]["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert flavor["name"] == found["ResourceFlavor"]["metadata"]["name"]
    assert [one["name"] for one in flavor["resources"]] == group["coveredResources"], "Kueue wants one order"


@pytest.mark.parametrize("name", READERS)
def test_the_queue_has_room_for_a_job(name: str) -> None:
    """All that a pod asks for is covered, with the lines for fast networks; and so many pods fit its quota at once."""
    job, found = manifest(name, options=True), queue_objects()
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == found["LocalQueue"]["metadata"]["name"]
    resources = container_of(job).get("resources") or container_of(job)["resourcesPerNode"]
    asked = resources["limits"] | resources["requests"]
    (group,) = found["ClusterQueue"]["spec"]["resourceGroups"]
    quota = {one["name"]: amount(one["nominalQuota"]) for one in group["flavors"][0]["resources"]}
    for resource, each in asked.items():
        assert nodes_of(job)[1] * amount(each) <= quota[resource], resource


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("trainjob", ("spec", "trainer", "numNode"), 2),
        ("trainjob", ("spec", "trainer", "numNodes"), "2"),
        ("trainjob", ("spec", "podTemplateOverrides"), []),  # of Trainer before 2.2
        ("trainjob", ("spec", "trainer", "args", 0), 3),
        ("pytorchjob", ("spec", "nprocPerNode"), 8),
        ("pytorchjob", ("spec", "elasticPolicy", "minReplica"), 2),
        ("pytorchjob", ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "container"), []),
    ],
)
def test_a_mistake_in_a_manifest_is_noticed(name: str, path: tuple[str | int, ...], value: object) -> None:
    job = copy.deepcopy(manifest(name))
    inner: Any = job
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    try:
        assert READERS[name](job) != job
    except ValueError:  # the model refuses a type
        return


def test_what_the_webhook_of_trainer_asks_for() -> None:
    job = manifest("trainjob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    (patch,) = job["spec"]["runtimePatches"]
    assert re.fullmatch(r"[a-z0-9.-]+/[\w.-]+", patch["manager"]), "the manager is a name behind a domain"
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    # The names of the runtime torch-distributed; the environment of its container is set by the trainer alone.
    assert (node["name"], [(one["name"], "env" in one) for one in pod["containers"]]) == ("node", [("node", False)])
    assert not [one for one in job["spec"]["trainer"].get("env", []) if one["name"].startswith("PET_")]


def test_what_the_webhook_of_the_training_operator_asks_for() -> None:
    spec = manifest("pytorchjob")["spec"]
    assert list(spec["pytorchReplicaSpecs"]) == ["Worker"]
    (container,) = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert [port["name"] for port in container["ports"]] == ["pytorchjob-port"]
    policy, replicas = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
    assert policy["minReplicas"] <= replicas <= policy["maxReplicas"]


# The job ------------------------------------------------------------------------------------------------------------


def container_of(job: Json) -> Json:
    if job["kind"] == "TrainJob":
        return {"env": [], **job["spec"]["trainer"]}
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]


def pod_of(job: Json) -> Json:
    """What the manifest says of the pods besides the container's command."""
    if job["kind"] == "TrainJob":
        (patch,) = job["spec"]["runtimePatches"]
        (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        return node["template"]["spec"]["template"]["spec"]
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


def nodes_of(job: Json) -> tuple[int, int, int]:
    """The fewest nodes, the most, and the processes of each."""
    spec = job["spec"]
    if job["kind"] == "TrainJob":
        return spec["trainer"]["numNodes"], spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]
    return spec["elasticPolicy"]["minReplicas"], spec["elasticPolicy"]["maxReplicas"], int(spec["nprocPerNode"])


def operators_variables(job: Json, node: int) -> dict[str, str]:
    """What the operator puts into the container of one node, besides what the manifest says."""
    name, (fewest, most, processes) = job["metadata"]["name"], nodes_of(job)
    own = {one["name"]: one["value"] for one in container_of(job).get("env", [])}
    if job["kind"] == "TrainJob":
        return own | {
            "PET_NNODES": str(most),
            "PET_NPROC_PER_NODE": str(processes),
            "PET_NODE_RANK": str(node),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "PET_MASTER_PORT": "29500",
        }
    policy, (port,) = job["spec"]["elasticPolicy"], container_of(job)["ports"]
    return own | {
        "PYTHONUNBUFFERED": "1",
        "PET_NPROC_PER_NODE": str(processes),
        "PET_RDZV_ENDPOINT": f"{name}-worker-0:{port['containerPort']}",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_NNODES": f"{fewest}:{most}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }


@pytest.mark.parametrize("name", READERS)
def test_the_command_is_torchruns_and_the_nodes_fit_the_config(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = manifest(name)
    container, (fewest, most, processes) = container_of(job), nodes_of(job)
    assert container["command"] == ["torchrun"]
    for variable, value in operators_variables(job, node=0).items():
        monkeypatch.setenv(variable, value)
    given = get_args_parser().parse_args(container["args"])
    assert (given.module, given.training_script) == (True, "meshtrain.train")
    assert given.nnodes == (str(most) if fewest == most else f"{fewest}:{most}")
    assert given.nproc_per_node == str(processes)
    config, *overrides = given.training_script_args
    for nodes in range(fewest, most + 1):
        read = Config.load(config, overrides, world_size=nodes * processes)
        placed = Layout.resolve(read.layout, nodes * processes).on_hosts([processes] * nodes)
        assert host_warnings(placed) == []
    resources = container.get("resources") or container["resourcesPerNode"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == str(processes)

    # Everything that is written lies on the volume of all nodes, and saving has time before the pod is killed.
    pod = pod_of(job)
    mounts = {one["name"]: one["mountPath"] for one in (container | pod["containers"][0])["volumeMounts"]}
    claims = {one["name"] for one in pod["volumes"] if "persistentVolumeClaim" in one}
    assert {mounts[claim] for claim in claims} == {"/workspace"}
    assert set(mounts) == {one["name"] for one in pod["volumes"]}
    assert mounts["shared-memory"] == "/dev/shm"
    assert read.train.output.startswith("/workspace/")
    assert given.log_dir == f"{read.train.output}/logs"
    assert given.shutdown_timeout < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", READERS)
def test_the_doctor_reads_the_same_job(name: str) -> None:
    """As the manifests say: with `command: [meshtrain, doctor]` the nodes are checked instead."""
    job = manifest(name)
    fewest, most, processes = nodes_of(job)
    place = read_place(parse(" ".join(container_of(job)["args"])), operators_variables(job, node=1))
    endpoint = {"trainjob": "meshtrain-node-0-0.meshtrain:29500", "pytorchjob": "meshtrain-worker-0:23456"}[name]
    assert place.endpoint == endpoint
    assert (place.fewest, place.most, place.processes) == (fewest, most, str(processes))
    assert place.node_rank == (1 if name == "trainjob" else None)


@pytest.mark.cluster
@pytest.mark.parametrize("name", READERS)
def test_two_nodes_train(name: str, tmp_path: Path) -> None:
    """The container's own command with what the operator tells it, but for names that only a cluster can resolve."""
    job = manifest(name)
    if name == "trainjob":
        job["spec"]["trainer"] |= {"numNodes": 2, "numProcPerNode": 1}
    else:
        job["spec"]["nprocPerNode"] = "1"
        job["spec"]["elasticPolicy"] |= {"minReplicas": 2, "maxReplicas": 2}
    arguments = [one.replace("/workspace", str(tmp_path)) for one in container_of(job)["args"]]
    port = free_port()
    nodes = []
    for node in range(2):
        variables = operators_variables(job, node)
        variables |= {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(port)} if name == "trainjob" else {}
        variables |= {"PET_RDZV_ENDPOINT": f"localhost:{port}"} if name == "pytorchjob" else {}
        own = [f"{variable}={value}" for variable, value in variables.items()]
        nodes.append(["env", *own, *TORCHRUN, *arguments, *SHORT])
    for finished in run_together(nodes):
        finished.check()
    folder = tmp_path / "runs" / "quickstart"
    assert json.loads((folder / "exit.json").read_text())["status"] == "done"
    assert len((folder / "layout.txt").read_text().splitlines()) > 2
    logs = sorted(path.relative_to(folder / "logs").parts[-2:] for path in folder.glob("logs/*/*/*/stdout.log"))
    assert logs == [("0", "stdout.log"), ("0", "stdout.log")], "one of each node's rank"
