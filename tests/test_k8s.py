"""tools/k8s: Kubeflow's own models, which have JobSet's, read the manifests, and torchrun,
meshtrain and its doctor their commands.

What the operators put into a container's environment is taken from their sources (Trainer 2.3: the
torch plugin; Training Operator 1.9: envvar.go, elastic.go); so are the rules of their webhooks.
"""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from meshtrain.config import Config
from meshtrain.config.layout_advice import host_warnings
from meshtrain.doctor.torchrun_options import read_place
from meshtrain.layout import Layout
from tests.doctor.test_torchrun_options import parse
from tests.launching import ROOT

K8S = ROOT / "tools" / "k8s"
Json = dict[str, Any]
MEETS_AT = {
    "trainjob": "meshtrain-node-0-0.meshtrain:29500",
    "pytorchjob": "meshtrain-worker-0:23456",
    "jobset": "meshtrain-node-0-0.meshtrain:29500",
}
each_job = pytest.mark.parametrize("name", MEETS_AT)


def manifest(name: str, options: bool = False) -> Json:
    """`options`: with the lines in which a `#` stands right before a word."""
    text = (K8S / f"{name}.yaml").read_text()
    return yaml.safe_load(
        re.sub(r"^( *)#(?=\S)", r"\1", text, flags=re.MULTILINE) if options else text
    )


def container_of(job: Json) -> Json:
    if job["kind"] == "TrainJob":
        return {"env": [], **job["spec"]["trainer"]}
    if job["kind"] == "JobSet":
        return pod_of(job)["containers"][0]
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]


def pod_of(job: Json) -> Json:
    """What the manifest says of the pods besides the container's command."""
    if job["kind"] == "TrainJob":
        (patch,) = job["spec"]["runtimePatches"]
        (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        return node["template"]["spec"]["template"]["spec"]
    if job["kind"] == "JobSet":
        (node,) = job["spec"]["replicatedJobs"]
        return node["template"]["spec"]["template"]["spec"]
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


def resources_of(job: Json) -> Json:
    container = container_of(job)
    return container.get("resources") or container["resourcesPerNode"]


def nodes_of(job: Json) -> tuple[int, int, int]:
    """The fewest nodes, the most, and the processes of each."""
    spec = job["spec"]
    if job["kind"] == "TrainJob":
        return (
            spec["trainer"]["numNodes"],
            spec["trainer"]["numNodes"],
            spec["trainer"]["numProcPerNode"],
        )
    if job["kind"] == "JobSet":
        (node,) = spec["replicatedJobs"]
        of_job = node["template"]["spec"]
        assert of_job["parallelism"] == of_job["completions"], "all of them at once"
        values = {each["name"]: each.get("value") for each in container_of(job)["env"]}
        assert values["PET_NNODES"] == str(of_job["completions"])
        return of_job["completions"], of_job["completions"], int(values["PET_NPROC_PER_NODE"])
    return (
        spec["elasticPolicy"]["minReplicas"],
        spec["elasticPolicy"]["maxReplicas"],
        int(spec["nprocPerNode"]),
    )


# What Kubeflow and Kueue understand ---------------------------------------------------------------


def read_by_kubeflow(job: Json) -> Json:
    """What Kubeflow's API makes of a manifest: keys that it does not know are gone."""
    if job["kind"] == "TrainJob":
        from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

        return TrainerV1alpha1TrainJob.from_dict(job).to_dict()
    if job["kind"] == "JobSet":
        from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

        return JobsetV1alpha2JobSet.from_dict(job).to_dict()
    from kubeflow.training import ApiClient

    client = ApiClient()
    read = client.deserialize(SimpleNamespace(data=json.dumps(job)), "KubeflowOrgV1PyTorchJob")
    return client.sanitize_for_serialization(read)


@each_job
def test_kubeflow_understands_a_manifest_and_its_lines_for_fast_networks(name: str) -> None:
    plain, job = manifest(name), manifest(name, options=True)
    assert read_by_kubeflow(plain) == plain
    assert read_by_kubeflow(job) == job
    assert {"rdma/hca", "vpc.amazonaws.com/efa", "hugepages-2Mi"} == set(
        resources_of(job)["limits"]
    ) - {"nvidia.com/gpu"}
    assert pod_of(job)["containers"][0]["securityContext"] == {
        "capabilities": {"add": ["IPC_LOCK"]}
    }
    new = [
        variable["name"]
        for variable in container_of(job)["env"]
        if variable not in container_of(plain)["env"]
    ]
    assert new == ["NCCL_DEBUG", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"]
    assert "rdma" not in str(plain), (
        "most clusters have no such resource, and a pod would wait for it"
    )


def amount(quantity: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(Gi|Ti|)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * {"": 1, "Gi": 2**30, "Ti": 2**40}[unit]


def test_the_queue_is_kueue_s_and_has_room_for_a_job() -> None:
    """All that a pod asks for is covered, with the lines for fast networks; and so many pods fit
    its quota at once."""
    import jsonschema

    queue = {part["kind"]: part for part in yaml.safe_load_all((K8S / "kueue.yaml").read_text())}
    schemas = yaml.safe_load((ROOT / "tests" / "kueue_schema.yaml").read_text())
    assert set(queue) == set(schemas)
    for kind, schema in schemas.items():
        assert queue[kind]["apiVersion"] == "kueue.x-k8s.io/v1beta1"
        jsonschema.validate(queue[kind].get("spec", {}), schema)
    assert queue["LocalQueue"]["spec"]["clusterQueue"] == queue["ClusterQueue"]["metadata"]["name"]
    (group,) = queue["ClusterQueue"]["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert flavor["name"] == queue["ResourceFlavor"]["metadata"]["name"]
    quota = {resource["name"]: amount(resource["nominalQuota"]) for resource in flavor["resources"]}
    assert list(quota) == group["coveredResources"], "Kueue wants one order"
    for name in MEETS_AT:
        job = manifest(name, options=True)
        assert (
            job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
            == queue["LocalQueue"]["metadata"]["name"]
        )
        needs = resources_of(job)["limits"] | resources_of(job)["requests"]
        for resource, quantity in needs.items():
            assert nodes_of(job)[1] * amount(quantity) <= quota[resource], resource


def test_what_the_webhooks_ask_for() -> None:
    job = manifest("trainjob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    (patch,) = job["spec"]["runtimePatches"]
    assert re.fullmatch(r"[a-z0-9.-]+/[\w.-]+", patch["manager"]), (
        "the manager is a name behind a domain"
    )
    # The names of the runtime torch-distributed; the environment of its container is set by the
    # trainer alone.
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    (container,) = pod_of(job)["containers"]
    assert (node["name"], container["name"], "env" in container) == ("node", "node", False)
    assert not [
        variable for variable in container_of(job)["env"] if variable["name"].startswith("PET_")
    ]

    job = manifest("pytorchjob")
    ((role, worker),) = job["spec"]["pytorchReplicaSpecs"].items()
    (container,) = pod_of(job)["containers"]
    (port,) = container["ports"]
    assert (role, container["name"], port["name"]) == ("Worker", "pytorch", "pytorchjob-port")
    fewest, most, _ = nodes_of(job)
    assert fewest <= worker["replicas"] <= most


# The job ------------------------------------------------------------------------------------------


def operators_variables(job: Json, node: int) -> dict[str, str]:
    """What the operator puts into the container of one node, besides what the manifest says."""
    name, (fewest, most, processes) = job["metadata"]["name"], nodes_of(job)
    own = {
        variable["name"]: variable.get("value", str(node))  # the index of its pod
        for variable in container_of(job).get("env", [])
    }
    if job["kind"] == "JobSet":
        return own
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


@each_job
def test_the_command_is_torchruns_and_the_nodes_fit_the_config(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.run import get_args_parser

    job = manifest(name)
    container, (fewest, most, processes) = container_of(job), nodes_of(job)
    assert container["command"] == ["torchrun"]
    for variable, value in operators_variables(job, node=0).items():
        monkeypatch.setenv(variable, value)
    options = get_args_parser().parse_args(container["args"])
    assert (options.module, options.training_script) == (True, "meshtrain.train")
    assert options.nnodes == (str(most) if fewest == most else f"{fewest}:{most}")
    assert options.nproc_per_node == str(processes)
    # With `command: [meshtrain, doctor]`, as the manifests say, the nodes are checked instead.
    place = read_place(parse(" ".join(container["args"])), operators_variables(job, node=1))
    assert (place.endpoint, place.node_rank) == (
        MEETS_AT[name],
        None if name == "pytorchjob" else 1,
    )
    assert (place.fewest, place.most, place.processes) == (fewest, most, str(processes))
    path, *overrides = options.training_script_args
    for nodes in range(fewest, most + 1):
        config = Config.load(path, overrides, world_size=nodes * processes)
        placed = Layout.resolve(config.layout, nodes * processes).on_hosts([processes] * nodes)
        assert host_warnings(placed) == []
    resources = resources_of(job)
    assert (
        resources["limits"]["nvidia.com/gpu"]
        == resources["requests"]["nvidia.com/gpu"]
        == str(processes)
    )

    # Everything that is written lies on the volume of all nodes, and saving has time before the pod
    # is killed.
    pod = pod_of(job)
    mounts = {
        mount["name"]: mount["mountPath"]
        for mount in (container | pod["containers"][0])["volumeMounts"]
    }
    claims = {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
    assert {mounts[claim] for claim in claims} == {"/workspace"}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert mounts["shared-memory"] == "/dev/shm"
    assert config.train.output.startswith("/workspace/")
    assert options.log_dir == f"{config.train.output}/logs"
    assert options.shutdown_timeout < pod["terminationGracePeriodSeconds"]
