"""Rules for hosts: whether every host has what the job needs, and whether they are alike. No
I/O."""

import difflib
from collections.abc import Iterator
from dataclasses import replace

from meshtrain.config.layout_advice import host_warnings, resolve
from meshtrain.doctor.findings import (
    Finding,
    finding,
    group_by_value,
    groups_text,
    minority,
    names_text,
)
from meshtrain.doctor.nccl import slow_settings
from meshtrain.doctor.records import ClusterFacts, Host
from meshtrain.job.environment import OWN_DESCRIPTORS, is_of_host
from meshtrain.layout import LayoutError

CLOCK_S = 0.5  # apart, beyond the error of the measurement
DISK_GIB, DISK_ERROR_GIB = 20.0, 1.0
MEMORY_SHARE, SHARED_MEMORY_GIB, GPU_USED_GIB = 0.1, 1.0, 1.0
BUSY = 1.5  # runnable processes per core
MOST_LINES = 6  # of a difference
# versions; others may surprise, these break a job
MUST_AGREE = (
    "torch",
    "python",
    "nccl",
    "cuda",
    "meshtrain",
)
MAY_DIFFER = ("executable",)


def hosts(cluster: ClusterFacts) -> Iterator[Finding]:
    for name, host in cluster.labelled:
        yield from _gpus(name, host)
        yield from _memory(name, host)
    without = [name for name, host in cluster.labelled if not host.gpus_seen]
    if 0 < len(without) < len(cluster.hosts):
        yield finding("gpus-missing", without)
    for rule in (
        _layout,
        _config,
        _code,
        _versions,
        _variables,
        _slow_settings,
        _clocks,
        _descriptors,
    ):
        yield from rule(cluster)


def _gpus(name: str, host: Host) -> Iterator[Finding]:
    per_task = host.place.launcher == "srun" and host.gpus_seen == 1  # each task sees its own
    if 0 < host.gpus_seen < host.processes and not per_task:
        visible = (host.variables or {}).get("CUDA_VISIBLE_DEVICES", "(not set)")
        yield finding("too-few-gpus", name, host=host, visible=visible)
    if host.processes == 0:
        yield finding("no-processes", name, host=host)
    if len(host.gpus) > host.gpus_seen == 0:
        yield finding(
            "gpus-not-used", name, gpus=len(host.gpus), torch=(host.versions or {}).get("torch")
        )
    used = {str(gpu.index): gpu.used_gib for gpu in host.gpus if gpu.used_gib > GPU_USED_GIB}
    if used:
        yield finding("gpu-in-use", name, gpus=names_text(list(used)), used=max(used.values()))
    for gpu in host.gpus:
        if gpu.throttled:
            yield finding("gpu-throttled", name, gpu=gpu)


def _layout(cluster: ClusterFacts) -> Iterator[Finding]:
    sizes = next((host.layout for host in cluster.hosts if host.layout is not None), None)
    world = sum(host.processes for host in cluster.hosts)
    missing = len(cluster.hosts) < cluster.hosts[0].place.fewest
    if sizes is None or world == 0 or missing or cluster.attempt is not None:
        return
    names = cluster.labels
    try:
        layout = resolve(sizes, world)
    except LayoutError as error:
        counts = groups_text(
            group_by_value(names, [f"{host.processes} processes" for host in cluster.hosts])
        )
        yield finding("layout-does-not-fit", world=world, counts=counts, problem=error)
        return
    by_rank = {rank: i for i, host in enumerate(cluster.hosts) for rank in host.ranks}
    if sorted(by_rank) == list(range(world)):
        placed = layout.on_hosts([1] * world, [names[by_rank[rank]] for rank in range(world)])
        for problem in host_warnings(placed):
            yield finding("layout-crosses-hosts", problem=problem)


def _config(cluster: ClusterFacts) -> Iterator[Finding]:
    wrong = {name: host.config_error for name, host in cluster.labelled if host.config_error}
    for problem, hosts in group_by_value(list(wrong), list(wrong.values())).items():
        yield finding("config-wrong", hosts, problem=problem)
    configs = {
        name: "\n".join(host.config) for name, host in cluster.labelled if not host.config_error
    }
    groups = group_by_value(list(configs), list(configs.values()))
    if len(groups) > 1:
        (first, same), *others = groups.items()
        for text, hosts in others:
            lines = difflib.ndiff(first.splitlines(), text.splitlines())
            changed = [f"{line[0]} {line[2:].strip()}" for line in lines if line[0] in "+-"]
            more = f"; {len(changed) - MOST_LINES} more" if len(changed) > MOST_LINES else ""
            difference = "; ".join(changed[:MOST_LINES]) + more
            yield finding("config-differs", hosts, same=names_text(same), difference=difference)


def _code(cluster: ClusterFacts) -> Iterator[Finding]:
    names, codes = cluster.labels, [host.code or {} for host in cluster.hosts]
    same, *others = group_by_value(names, [repr(sorted(code.items())) for code in codes]).values()
    first = codes[names.index(same[0])]
    for hosts in others:
        other = codes[names.index(hosts[0])]
        files = sorted(
            file for file in first.keys() | other.keys() if first.get(file) != other.get(file)
        )
        yield finding("code-differs", hosts, same=names_text(same), files=names_text(files))


def _versions(cluster: ClusterFacts) -> Iterator[Finding]:
    versions = [host.versions or {} for host in cluster.hosts]
    for program in sorted({program for row in versions for program in row} - set(MAY_DIFFER)):
        groups = group_by_value(cluster.labels, [row.get(program, "") for row in versions])
        if len(groups) > 1:
            severity = (
                "error" if program in MUST_AGREE else "note" if program == "kernel" else "warning"
            )
            row = finding(
                "version-differs",
                minority(groups),
                severity,
                program=program,
                groups=groups_text(groups),
            )
            yield replace(row, id=f"{program}-differs")


def _variables(cluster: ClusterFacts) -> Iterator[Finding]:
    variables = [host.variables or {} for host in cluster.hosts]
    for variable in sorted(
        {variable for row in variables for variable in row if _should_agree(variable)}
    ):
        groups = group_by_value(
            cluster.labels, [row.get(variable, "(not set)") for row in variables]
        )
        if len(groups) > 1:
            yield finding(
                "environment-differs",
                minority(groups),
                variable=variable,
                groups=groups_text(groups),
            )


def _should_agree(variable: str) -> bool:
    if variable == "LD_LIBRARY_PATH":  # it decides which NCCL and CUDA are loaded
        return True
    return variable != "MASTER_ADDR" and not is_of_host(variable)


def _slow_settings(cluster: ClusterFacts) -> Iterator[Finding]:
    hosts_of: dict[tuple[str, str, str], list[str]] = {}
    for name, host in cluster.labelled:
        for setting, effect in slow_settings(host).items():
            of_file = setting.partition("=")[0] in (host.nccl_conf or {})
            hosts_of.setdefault(
                ("slow-switch/file" if of_file else "slow-switch", setting, effect), []
            ).append(name)
    for (key, setting, effect), names in hosts_of.items():
        yield finding(
            key, names, setting=setting, effect=effect, variable=setting.partition("=")[0]
        )


def _clocks(cluster: ClusterFacts) -> Iterator[Finding]:
    names = cluster.labels
    for name, clock in zip(names, cluster.clocks, strict=False):
        if clock is not None and abs(clock[0]) > CLOCK_S + clock[1]:
            side = "ahead of" if clock[0] > 0 else "behind"
            yield finding("clock-differs", name, seconds=abs(clock[0]), side=side, first=names[0])


def _memory(name: str, host: Host) -> Iterator[Finding]:
    if host.memory_gib and host.memory_free_gib < MEMORY_SHARE * host.memory_gib:
        yield finding("little-memory", name, host=host)
    if len(host.gpus) and host.shared_memory_gib < SHARED_MEMORY_GIB:
        yield finding("little-shared-memory", name, mib=1024 * host.shared_memory_gib)
    if host.ports and host.locked_memory_kib is not None:
        yield finding("locked-memory-limited", name, host=host)
    if host.load > BUSY * host.cores:
        yield finding("host-busy", name, host=host)
    for path in host.paths:
        if path.free_gib is not None and path.free_gib < DISK_GIB:
            yield finding(
                "little-disk",
                name,
                "error" if path.free_gib < DISK_ERROR_GIB else "warning",
                path=path,
            )


def _descriptors(cluster: ClusterFacts) -> Iterator[Finding]:
    """The process that serves the job's store, on the first host, needs a file descriptor for each
    rank."""
    name, first, world = (
        cluster.labels[0],
        cluster.hosts[0],
        sum(host.processes for host in cluster.hosts),
    )
    soft, hard = first.open_files or (-1, -1)
    needed = world + OWN_DESCRIPTORS
    words = {"world": world, "needed": needed}
    if 0 <= hard < needed:
        yield finding("few-descriptors/hard", name, limit=hard, **words)
    elif 0 <= soft < needed and first.place.launcher.startswith("torchrun"):
        # Otherwise a process of meshtrain raises its own limit as far as it may.
        yield finding("few-descriptors", name, limit=soft, **words)
