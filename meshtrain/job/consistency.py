"""Consistency of ranks: what must be the same on all ranks is compared, key by key, before anything
is built.

Each rank sends rank 0 a digest of each fingerprint; only where digests differ, one rank per digest
sends its values.
"""

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from meshtrain.errors import AgreedError, flat_items, group_values, join_some, ranges
from meshtrain.job import locate
from meshtrain.job.environment import is_of_host
from meshtrain.job.process import Job

if TYPE_CHECKING:
    from meshtrain.config import Config

TESTED_TORCH = ((2, 11), (2, 14))  # the oldest and the newest version with which the tests pass
PACKAGES = ("meshtrain", "numpy")  # torch and Python report their own versions
# change results or traffic
VARIABLES = (
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "CUBLAS_",
    "OMP_",
    "MKL_",
)
NOT_SET = "(not set)"
MOST_VALUES = 8  # distinct sets of values of a fingerprint that are compared by key
MOST_LINES = 12
MOST_NAMES = 4
MOST_CHARACTERS = 100


@dataclass(frozen=True)
class Fingerprint:
    """Values that should be the same on all ranks."""

    name: str  # for people: `the config`
    # readable key -> readable value; None: another rank of this host has them
    values: Mapping[str, str] | None
    remedy: str  # what to do about a difference
    # whether a difference keeps the job from starting; otherwise rank 0 prints it
    refused: bool = True


def require_equal(job: Job, *fingerprints: Fingerprint) -> None:
    """Returns if all ranks have the same values. All ranks call it, with the same fingerprints.
    Raises AgreedError on every rank: names the keys that differ, with each value and the ranks and
    hosts that have it."""
    problems = []
    for fingerprint, lines in zip(
        fingerprints, _gather_differences(job, fingerprints), strict=True
    ):
        if lines:
            head = f"{fingerprint.name} is not the same on all ranks:\n"
            text = head + "".join(f"  {line}\n" for line in lines) + fingerprint.remedy
            if fingerprint.refused:
                problems.append(text)
            else:
                job.say(f"warning: {text}")
    if problems:
        raise AgreedError("\n".join(problems))


def _gather_differences(job: Job, fingerprints: Sequence[Fingerprint]) -> list[list[str]]:
    activity = "comparing " + ", ".join(fingerprint.name for fingerprint in fingerprints)
    meeting = job.round()
    meeting.put([job.host, [_digest(fingerprint.values) for fingerprint in fingerprints]])
    hosts: list[str] = []
    alike: list[list[list[int]]] = []  # for each fingerprint, the groups of ranks with equal values
    if job.rank == 0:
        hosts, digests = map(list, zip(*meeting.gather(activity), strict=True))
        alike = [
            list(
                group_values(
                    (digest, rank) for rank, digest in enumerate(column) if digest is not None
                ).values()
            )
            for column in zip(*digests, strict=True)
        ]
        meeting.broadcast(
            [
                [group[0] for group in groups[:MOST_VALUES]] if len(groups) > 1 else []
                for groups in alike
            ]
        )
    # for each fingerprint, the ranks whose values are compared by key
    speakers = meeting.receive(activity)
    if not any(speakers):
        return [[] for _ in fingerprints]
    values = [
        dict(fingerprint.values) if job.rank in ranks and fingerprint.values is not None else None
        for fingerprint, ranks in zip(fingerprints, speakers, strict=True)
    ]

    def differences_of(gathered: list) -> list[list[str]]:
        return [
            differences([gathered[rank][i] for rank in ranks], groups, hosts) if ranks else []
            for i, (ranks, groups) in enumerate(zip(speakers, alike, strict=True))
        ]

    return job.reduce(activity, values, differences_of)


def _digest(values: Mapping[str, str] | None) -> str | None:
    return (
        None
        if values is None
        else hashlib.sha256(json.dumps(sorted(values.items())).encode()).hexdigest()[:24]
    )


def differences(
    values: Sequence[Mapping[str, str]], groups: Sequence[Sequence[int]], hosts: Sequence[str]
) -> list[str]:
    """One line for each key in which groups of ranks differ; none if there is only one group.

    `optimizer.lr: 0.001 on ranks 0-3 (host a), 0.0003 on rank 4 (host b)`. `values`: of each group,
    in order; those of the last groups may be missing. `groups`: the ranks with equal values.
    `hosts`: host name by rank.
    """
    lines = []
    for key in dict.fromkeys(key for by_key in values for key in by_key):
        pairs = zip(values, groups, strict=False)
        by_value = group_values(
            (by_key.get(key, NOT_SET), rank) for by_key, ranks in pairs for rank in ranks
        )
        if len(by_value) > 1:
            described = [
                f"{value[:MOST_CHARACTERS]}{'...' * (len(value) > MOST_CHARACTERS)} on "
                f"{describe_ranks(ranks, hosts)}"
                for value, ranks in by_value.items()
            ]
            lines.append(f"{key}: {', '.join(described)}")
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES} more"]
    unseen = [rank for ranks in groups[len(values) :] for rank in ranks]
    return lines + (
        [f"and {describe_ranks(unseen, hosts)} differ from all of these"] if unseen else []
    )


def describe_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """`rank 4 (host b)`, `ranks 0-3, 9 (hosts a, c)`; long lists are cut. `hosts`: host name by
    rank."""
    ordered = sorted(ranks)
    names = list(dict.fromkeys(hosts[rank] for rank in ordered))
    of_hosts = f"(host{'s' * (len(names) > 1)} {join_some(names, MOST_NAMES)})"
    return f"rank{'s' * (len(ordered) > 1)} {join_some(ranges(ordered), MOST_NAMES)} {of_hosts}"


def flat(nested: Mapping[str, Any]) -> dict[str, str]:
    """`{"optimizer": {"lr": 1e-3}}` as `{"optimizer.lr": "0.001"}`; None is `null`, as in YAML."""
    return {name: "null" if value is None else str(value) for name, value in flat_items(nested)}


def run_fingerprints(config: "Config", variables: Mapping[str, str]) -> Iterator[Fingerprint]:
    """Everything but data that must be the same on all ranks before a run is built. `variables`:
    the environment."""
    plain = config.plain()
    files = (config.model.name, config.data.source, config.pipeline.schedule)
    own = {
        name: locate.digest(Path(name).expanduser())
        for name in files
        if name.endswith((".py", ".csv"))
    }
    # the order of axes matters
    layout = ", ".join(f"{axis}: {size}" for axis, size in plain.pop("layout").items())
    values = flat(plain) | {"layout": f"{{{layout}}}"}
    yield Fingerprint(
        "the config", values, "start every process with the same file and the same overrides"
    )
    remedy = (
        "install the same version on all hosts (git status, git log -1), or run it from a folder "
        "that all of them see"
    )
    yield Fingerprint("the code", locate.code() | own, remedy)
    remedy = "install the same versions on all hosts, from one lock file or one container image"
    yield Fingerprint("the software", versions(), remedy)
    values = {name: value for name, value in variables.items() if name.startswith(VARIABLES)}
    values = {name: value for name, value in values.items() if not is_of_host(name)}
    remedy = "training goes on; export each variable with one value on all hosts, or nowhere"
    yield Fingerprint("the environment", values, remedy, refused=False)


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Name -> version of torch, Python, CUDA, NCCL, and each of these packages that is
    installed."""
    versions = {"torch": str(torch.__version__), "python": platform.python_version()}
    for package in packages:
        # meshtrain may run from a clone without being installed
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def untested_torch(version: str) -> str | None:
    """What to warn of if this torch is older or newer than those that were tested; None: it is one
    of them."""
    oldest, newest = TESTED_TORCH
    major, minor = map(int, version.split(".")[:2])
    if oldest <= (major, minor) <= newest:
        return None
    tested = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    return (
        f"torch {version} was not tested with this meshtrain, only {tested} were: compare a short "
        "run with theirs"
    )


def checkpoint_versions(model: ModuleType) -> dict[str, str]:
    """For a checkpoint: versions, and a digest of meshtrain's code and the model's file."""
    files = {
        name: digest for name, digest in locate.code().items() if name.startswith("meshtrain/")
    }
    files["model"] = locate.digest(Path(str(model.__file__)))
    own = {"meshtrain": "of a clone"} | versions()
    return {name: own[name] for name in ("meshtrain", "torch", "python")} | {
        "code": str(_digest(files))[:16]
    }
