"""Are all ranks alike? What they have is compared before anything is built, and a difference is told key by key.

Ranks that compute different things do not fail: they hang, or train something that nobody has described. A digest per
topic goes to rank 0; only where digests differ the values themselves follow, of one rank for each digest. So a start
in which all is well costs one small message per rank, whatever there is to compare.
"""

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from meshtrain import locate
from meshtrain.errors import AgreedError
from meshtrain.runtime import Job

if TYPE_CHECKING:
    from meshtrain.config import Config

PACKAGES = ("meshtrain", "numpy")  # torch and Python tell their versions themselves
VARIABLES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "CUBLAS_", "OMP_", "MKL_")  # change results or traffic
OF_EACH_HOST = ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_HOSTID")
NOT_SET = "(not set)"
MOST_VALUES = 8  # of a topic that are looked at
MOST_LINES = 12
MOST_NAMES = 4
MOST_CHARACTERS = 100


@dataclass(frozen=True)
class Topic:
    """What all ranks should have alike.

    Attributes:
        name: for people: `the config`.
        values: key -> value, both as people know them; None: another rank of this host has looked.
        remedy: what to do about a difference.
        refused: whether a job with a difference does not start; if not, rank 0 says it.
    """

    name: str
    values: Mapping[str, str] | None
    remedy: str
    refused: bool = True


def agree(job: Job, *topics: Topic) -> None:
    """Goes on if all ranks have the same values. All ranks call it, with the same topics.

    Raises:
        AgreedError: on every rank: the keys that differ, with each value and the ranks and hosts that have it.
    """
    found = _exchange(job, topics)
    wrong = []
    for topic, lines in zip(topics, found, strict=True):
        if lines:
            text = f"{topic.name} is not the same on all ranks:\n" + "".join(f"  {line}\n" for line in lines)
            wrong += [text + topic.remedy] if topic.refused else []
            if not topic.refused:
                job.say(f"warning: {text}{topic.remedy}")
    if wrong:
        raise AgreedError("\n".join(wrong))


def _exchange(job: Job, topics: Sequence[Topic]) -> list[list[str]]:
    """For each topic the differences in words, the same on all ranks."""
    digests = [_digest(topic.values) for topic in topics]
    what = "comparing " + ", ".join(topic.name for topic in topics)
    meeting = job.round()
    meeting.give([job.host, digests])
    seen: list[Any] = []
    alike: list[list[list[int]]] = []
    if job.rank == 0:
        seen = meeting.collect(what)
        alike = [_alike([each[i] for _, each in seen]) for i in range(len(topics))]
        meeting.answer([[ranks[0] for ranks in one[:MOST_VALUES]] if len(one) > 1 else [] for one in alike])
    speakers = meeting.answered(what)  # for each topic the ranks whose values are looked at
    if not any(speakers):
        return [[] for _ in topics]
    meeting = job.round()
    given = [topic.values if job.rank in of else None for topic, of in zip(topics, speakers, strict=True)]
    meeting.give([dict(values) if values is not None else None for values in given])
    if job.rank == 0:
        given = meeting.collect(what)
        hosts = [host for host, _ in seen]
        meeting.answer(
            [
                differences([given[rank][i] for rank in ranks], groups, hosts) if ranks else []
                for i, (ranks, groups) in enumerate(zip(speakers, alike, strict=True))
            ]
        )
    return meeting.answered(what)


def _digest(values: Mapping[str, str] | None) -> str | None:
    return None if values is None else hashlib.sha256(json.dumps(sorted(values.items())).encode()).hexdigest()[:24]


def _alike(digests: Sequence[str | None]) -> list[list[int]]:
    """The ranks that have the same, in the order of their first ranks; without those that have not looked."""
    groups: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        if digest is not None:
            groups.setdefault(digest, []).append(rank)
    return list(groups.values())


# In words (pure) -----------------------------------------------------------------------------------------------------


def differences(
    values: Sequence[Mapping[str, str]], groups: Sequence[Sequence[int]], hosts: Sequence[str]
) -> list[str]:
    """The keys in which groups of ranks differ, a line each; none where there is but one group.

    `optimizer.lr: 0.001 on ranks 0-3 (host a), 0.0003 on rank 4 (host b)`

    Args:
        values: of the groups; those of later groups may be missing.
        groups: each the ranks that have the same values.
        hosts: by rank.
    """
    lines = []
    for key in dict.fromkeys(key for each in values for key in each):
        having: dict[str, list[int]] = {}
        for each, ranks in zip(values, groups, strict=False):
            having.setdefault(each.get(key, NOT_SET), []).extend(ranks)
        if len(having) > 1:
            lines.append(f"{key}: " + ", ".join(f"{_cut(has)} on {who(on, hosts)}" for has, on in having.items()))
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES} more"]
    unseen = [rank for ranks in groups[len(values) :] for rank in ranks]
    return lines + ([f"and {who(unseen, hosts)} differ from all of these"] if unseen else [])


def who(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """`rank 4 (host b)`, `ranks 0-3, 9 (hosts a, c)`; long lists are cut.

    Args:
        hosts: by rank.
    """
    ordered = sorted(ranks)
    starts = [ordered[0], *(after for before, after in pairwise(ordered) if after != before + 1)]
    ends = [*(before for before, after in pairwise(ordered) if after != before + 1), ordered[-1]]
    runs = [f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    names = list(dict.fromkeys(hosts[rank] for rank in ordered))
    return f"rank{'s' * (len(ordered) > 1)} {_some(runs)} (host{'s' * (len(names) > 1)} {_some(names)})"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


def flat(nested: Mapping[str, Any], start: str = "") -> dict[str, str]:
    """`{"optimizer": {"lr": 1e-3}}` as `{"optimizer.lr": "0.001"}`; None is `null`, as the YAML has it."""
    found: dict[str, str] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{start}{key}.")
        else:
            found[f"{start}{key}"] = "null" if value is None else str(value)
    return found


# What a run is made of -----------------------------------------------------------------------------------------------


def ingredients(config: "Config", variables: Mapping[str, str]) -> Iterator[Topic]:
    """What has to be the same on all ranks before a run is built; its data have a topic of their own.

    Args:
        variables: the environment.
    """
    plain = config.plain()
    layout = ", ".join(f"{axis}: {size}" for axis, size in plain.pop("layout").items())  # their order counts
    yield Topic(
        "the config",
        flat(plain) | {"layout": f"{{{layout}}}"},
        "start every process with the same file and the same overrides",
    )
    yield Topic(
        "the code",
        locate.code() | _own_files(config),
        "install the same version on all hosts (git status, git log -1), or run it from a folder that all of them see",
    )
    yield Topic(
        "the software",
        versions(),
        "install the same versions on all hosts, from one lock file or one container image",
    )
    yield Topic(
        "the environment",
        {name: value for name, value in variables.items() if name.startswith(VARIABLES) and name not in OF_EACH_HOST},
        "training goes on; export each variable with one value on all hosts, or nowhere",
        refused=False,
    )


def _own_files(config: "Config") -> dict[str, str]:
    """The user's own files that the config names -> digest."""
    named = [name for name in (config.model.name, config.data.source) if name.endswith(".py")]
    named += [name for name in (config.pipeline.schedule,) if name.endswith(".csv")]
    return {name: locate.digest(Path(name).expanduser()) for name in named}


def versions() -> dict[str, str]:
    """Name -> version of what computes and communicates."""
    found = {"torch": str(torch.__version__), "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # meshtrain may run in a clone where nothing was installed
            continue
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found
