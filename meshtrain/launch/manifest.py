"""The manifest of a job for Kubernetes (a JobSet) or SkyPilot (a task): the one of tools/k8s or
tools/sky, filled in with what the job requests."""

import re
import shlex
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import yaml

from meshtrain.errors import InputError
from meshtrain.launch.request import Request, seconds
from meshtrain.launch.script import CPUS_PER_GPU

Manifest = dict[str, Any]
CONFIGS = "/etc/meshtrain"  # where a pod has the config of a job
# Kubernetes takes 63 characters for a pod's name, which is the JobSet's with the node's behind it.
_LONGEST_NAME = 40


def name_of_job(request: Request, config_name: str) -> str:
    """The job's name: --job-name, or the config's with its other characters replaced. Raises
    InputError: Kubernetes or SkyPilot would not take it."""
    plain = re.sub(r"[^a-z0-9]+", "-", config_name.lower()).strip("-")
    name = request.job_name or f"{plain:.{_LONGEST_NAME}}".strip("-")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > _LONGEST_NAME:
        raise InputError(
            f"--job-name {name}: expected lower-case letters, digits and -, the first one a letter "
            f"and the last one no -, at most {_LONGEST_NAME} of them"
        )
    return name


def with_time_limit(words: Sequence[str], request: Request) -> list[str]:
    """The words of a job that saves and stops within --time, which neither Kubernetes nor SkyPilot
    sees to."""
    is_given = any(word.startswith("train.time_limit=") for word in words)
    if request.time is None or is_given:
        return list(words)
    return [*words, f"train.time_limit={seconds(request.time)}"]


def jobset(
    template: Manifest,
    request: Request,
    words: Sequence[str],
    *,
    name: str,
    output: str,
    config_file: tuple[str, str] | None,
) -> list[Manifest]:
    """The manifests of a job.

    Args:
        template: tools/k8s/jobset.yaml.
        words: the config and its overrides.
        output: the run's folder.
        config_file: name and text of the config, which pods get as a file; None: it is one of
            meshtrain's own, which the image has.
    """
    job = deepcopy(template)
    job["metadata"]["name"] = name
    if request.partition is not None:
        job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": request.partition}
    (node,) = job["spec"]["replicatedJobs"]
    spec = node["template"]["spec"]
    spec["parallelism"] = spec["completions"] = request.nodes
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]

    container["image"] = request.image
    container["args"] = [f"--log-dir={output}/logs", *_options_of(container["args"]), *words]
    values = {
        "PET_NNODES": str(request.nodes),
        "PET_NPROC_PER_NODE": str(request.gpus_per_node),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
    }
    for variable in container["env"]:
        if variable["name"] in values:
            variable["value"] = values[variable["name"]]
    container["env"] += [{"name": key, "value": value} for key, value in request.variables]
    container["resources"] = _resources(request)

    # The template's claim makes room for those of the request; shared memory stays.
    volumes = [volume for volume in pod["volumes"] if "persistentVolumeClaim" not in volume]
    names = {volume["name"] for volume in volumes}
    mounts = [mount for mount in container["volumeMounts"] if mount["name"] in names]
    pod["volumes"], container["volumeMounts"] = volumes, mounts
    for number, (claim, folder) in enumerate(request.mounts):
        volume = f"volume-{number}"
        volumes.append({"name": volume, "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": volume, "mountPath": folder})
    if config_file is None:
        return [job]

    file_name, text = config_file
    # A key of a ConfigMap has letters, digits, -, _ and . only.
    file_name = re.sub(r"[^-.\w]+", "-", file_name, flags=re.ASCII)
    container["args"][-len(words)] = f"{CONFIGS}/{file_name}"
    volumes.append({"name": "config", "configMap": {"name": f"{name}-config"}})
    mounts.append({"name": "config", "mountPath": CONFIGS})
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-config"},
        "data": {file_name: text},
    }
    return [config_map, job]


def _options_of(arguments: Sequence[str]) -> list[str]:
    """torchrun's part of a template's arguments, up to the module; not its folder of logs, which is
    another for each job."""
    end = arguments.index("-m") + 2
    return [word for word in arguments[:end] if not word.startswith("--log-dir=")]


def _resources(request: Request) -> Manifest:
    gpu = request.gres or "nvidia.com/gpu"
    gpus = {gpu: str(request.gpus_per_node)}
    cpus = request.cpus_per_task or CPUS_PER_GPU * request.gpus_per_node
    return {"requests": {"cpu": str(cpus), **gpus}, "limits": gpus}


def sky_task(template: Manifest, request: Request, words: Sequence[str], *, name: str) -> Manifest:
    """The task of a job. Arguments as of `jobset`: but SkyPilot copies the working folder to each
    node, and so the config."""
    assert request.gres is not None  # read_request refuses a job for SkyPilot without
    task = {**deepcopy(template), "name": name, "num_nodes": request.nodes}
    resources: Manifest = {"accelerators": {request.gres: request.gpus_per_node}}
    if request.partition is not None:
        resources["infra"] = request.partition
    if request.cpus_per_task is not None:
        resources["cpus"] = f"{request.cpus_per_task}+"
    if request.image is not None:
        resources["image_id"] = f"docker:{request.image}"
        del task["setup"]  # the image has meshtrain
    task["resources"] = resources

    buckets = {}
    volumes = {}
    for source, folder in request.mounts:
        if "://" in source:
            buckets[folder] = {"source": source, "mode": "MOUNT"}
        else:
            volumes[folder] = source
    optional: Mapping[str, Any] = {
        "file_mounts": buckets,
        "volumes": volumes,
        "envs": dict(request.variables),
    }
    task |= {key: value for key, value in optional.items() if value}

    command, module, _ = template["run"].partition("-m meshtrain.train")
    task["run"] = f"{command}{module} {shlex.join(words)}\n"
    return task


def text_of(manifests: Sequence[Manifest], remark: str) -> str:
    """Manifests as a file, whose first line is a remark for people."""
    documents = yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=120)
    return f"# {' '.join(remark.split())}\n{documents}"


class _Dumper(yaml.SafeDumper):
    """Writes scripts line by line, and a value that occurs twice twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)
