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
VARIABLES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "CUBLAS_", "OMP_", "MKL_")
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
    differences_of = _gather_differences(job, fingerprints)
    problems = []
    for fingerprint, lines in zip(fingerprints, differences_of, strict=True):
        if not lines:
            continue
        head = f"{fingerprint.name} is not the same on all ranks:"
        text = "\n".join([head, *(f"  {line}" for line in lines), fingerprint.remedy])
        if fingerprint.refused:
            problems.append(text)
        else:
            job.say(f"warning: {text}")
    if problems:
        raise AgreedError("\n".join(problems))


def _gather_differences(job: Job, fingerprints: Sequence[Fingerprint]) -> list[list[str]]:
    activity = f"comparing {', '.join(fingerprint.name for fingerprint in fingerprints)}"

    # Every rank sends a digest of each fingerprint; rank 0 groups the ranks by them.
    meeting = job.round()
    meeting.put([job.host, [_digest(fingerprint.values) for fingerprint in fingerprints]])
    hosts: list[str] = []
    alike: list[list[list[int]]] = []  # for each fingerprint, the groups of ranks with equal values
    if job.rank == 0:
        rows = meeting.gather(activity)
        hosts = [host for host, _ in rows]
        alike = [_ranks_by_digest(rows, i) for i in range(len(fingerprints))]
        meeting.broadcast([_speakers(groups) for groups in alike])

    # For each fingerprint that differs, one rank of each group sends its values.
    speakers = meeting.receive(activity)
    if not any(speakers):
        return [[] for _ in fingerprints]
    values = []
    for fingerprint, ranks in zip(fingerprints, speakers, strict=True):
        sends = job.rank in ranks and fingerprint.values is not None
        values.append(dict(fingerprint.values or {}) if sends else None)

    def compare(gathered: list) -> list[list[str]]:
        """On rank 0, from what each rank has sent."""
        found: list[list[str]] = []
        for i, (ranks, groups) in enumerate(zip(speakers, alike, strict=True)):
            of_groups = [gathered[rank][i] for rank in ranks]
            found.append(differences(of_groups, groups, hosts) if ranks else [])
        return found

    return job.reduce(activity, values, compare)


def _ranks_by_digest(rows: list, i: int) -> list[list[int]]:
    """The groups of ranks whose fingerprint `i` has one digest, from [host, digests] of every rank;
    without ranks that leave it to another one of their host."""
    digests = [(own[i], rank) for rank, (_, own) in enumerate(rows)]
    return list(group_values(pair for pair in digests if pair[0] is not None).values())


def _speakers(groups: Sequence[Sequence[int]]) -> list[int]:
    """The ranks whose values are compared by key; none where all are alike."""
    if len(groups) == 1:
        return []
    return [group[0] for group in groups[:MOST_VALUES]]


def _digest(values: Mapping[str, str] | None) -> str | None:
    if values is None:
        return None
    text = json.dumps(sorted(values.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def differences(
    values: Sequence[Mapping[str, str]], groups: Sequence[Sequence[int]], hosts: Sequence[str]
) -> list[str]:
    """One line for each key in which groups of ranks differ; none if there is only one group.

    `optimizer.lr: 0.001 on ranks 0-3 (host a), 0.0003 on rank 4 (host b)`. `values`: of each group,
    in order; those of the last groups may be missing. `groups`: the ranks with equal values.
    `hosts`: host name by rank.
    """
    keys: dict[str, None] = {}
    for by_key in values:
        keys.update(dict.fromkeys(by_key))

    lines = []
    for key in keys:
        ranks_of: dict[str, list[int]] = {}
        for by_key, ranks in zip(values, groups, strict=False):
            ranks_of.setdefault(by_key.get(key, NOT_SET), []).extend(ranks)
        if len(ranks_of) > 1:
            described = []
            for value, ranks in ranks_of.items():
                described.append(f"{_cut(value)} on {describe_ranks(ranks, hosts)}")
            lines.append(f"{key}: {', '.join(described)}")
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES} more"]

    unseen: list[int] = []
    for ranks in groups[len(values) :]:
        unseen += ranks
    if unseen:
        lines.append(f"and {describe_ranks(unseen, hosts)} differ from all of these")
    return lines


def _cut(value: str) -> str:
    return value if len(value) <= MOST_CHARACTERS else f"{value[:MOST_CHARACTERS]}..."


def describe_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """`rank 4 (host b)`, `ranks 0-3, 9 (hosts a, c)`; long lists are cut. `hosts`: host name by
    rank."""
    ordered = sorted(ranks)
    names = list(dict.fromkeys(hosts[rank] for rank in ordered))
    word = "ranks" if len(ordered) > 1 else "rank"
    host_word = "hosts" if len(names) > 1 else "host"
    of_hosts = f"({host_word} {join_some(names, MOST_NAMES)})"
    return f"{word} {join_some(ranges(ordered), MOST_NAMES)} {of_hosts}"


def flat(nested: Mapping[str, Any]) -> dict[str, str]:
    """`{"optimizer": {"lr": 1e-3}}` as `{"optimizer.lr": "0.001"}`; None is `null`, as in YAML."""
    return {name: "null" if value is None else str(value) for name, value in flat_items(nested)}


def run_fingerprints(config: "Config", variables: Mapping[str, str]) -> Iterator[Fingerprint]:
    """Everything but data that must be the same on all ranks before a run is built. `variables`:
    the environment."""
    plain = config.plain()
    # The order of axes matters.
    layout = ", ".join(f"{axis}: {size}" for axis, size in plain.pop("layout").items())
    yield Fingerprint(
        "the config",
        flat(plain) | {"layout": f"{{{layout}}}"},
        "start every process with the same file and the same overrides",
    )

    own = {}
    for name in (config.model.name, config.data.source, config.pipeline.schedule):
        if name.endswith((".py", ".csv")):
            own[name] = locate.digest(Path(name).expanduser())
    yield Fingerprint(
        "the code",
        locate.code() | own,
        "install the same version on all hosts (git status, git log -1), or run it from a folder "
        "that all of them see",
    )
    yield Fingerprint(
        "the software",
        versions(),
        "install the same versions on all hosts, from one lock file or one container image",
    )

    names = [name for name in variables if name.startswith(VARIABLES) and not is_of_host(name)]
    exported = {name: variables[name] for name in names}
    remedy = "training goes on; export each variable with one value on all hosts, or nowhere"
    yield Fingerprint("the environment", exported, remedy, refused=False)


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
    code = locate.code().items()
    files = {name: digest for name, digest in code if name.startswith("meshtrain/")}
    files["model"] = locate.digest(Path(str(model.__file__)))
    known = {"meshtrain": "of a clone"} | versions()
    return {
        "meshtrain": known["meshtrain"],
        "torch": known["torch"],
        "python": known["python"],
        "code": str(_digest(files))[:16],
    }
