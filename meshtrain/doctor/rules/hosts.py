"""Rules for hosts: whether every host has what the job needs, and whether they are alike. No
I/O."""

import difflib
from collections.abc import Iterator
from dataclasses import replace

from meshtrain.config.layout_advice import host_warnings, resolve
from meshtrain.doctor.findings import Finding, Groups, finding, names_text
from meshtrain.doctor.nccl import SlowSetting, slow_settings
from meshtrain.doctor.records import ClusterFacts, Host
from meshtrain.job.environment import OWN_DESCRIPTORS, is_of_host
from meshtrain.layout import LayoutError

CLOCK_S = 0.5  # apart, beyond the error of the measurement
DISK_GIB, DISK_ERROR_GIB = 20.0, 1.0
MEMORY_SHARE = 0.1
SHARED_MEMORY_GIB = 1.0
GPU_USED_GIB = 1.0
BUSY = 1.5  # runnable processes per core
MOST_LINES = 6  # of a difference
# Other versions that differ may surprise; these break a job.
MUST_AGREE = ("torch", "python", "nccl", "cuda", "meshtrain")
MAY_DIFFER = ("executable",)


def hosts(cluster: ClusterFacts) -> Iterator[Finding]:
    for name, host in cluster.labelled:
        yield from _gpus(name, host)
        yield from _memory(name, host)
        yield from _disks(name, host)
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


# One host -----------------------------------------------------------------------------------------


def _gpus(name: str, host: Host) -> Iterator[Finding]:
    # Under srun each task may see a GPU of its own.
    per_task = host.place.launcher == "srun" and host.gpus_seen == 1
    if 0 < host.gpus_seen < host.processes and not per_task:
        visible = host.variables.get("CUDA_VISIBLE_DEVICES", "(not set)")
        yield finding("too-few-gpus", name, host=host, visible=visible)
    if host.processes == 0:
        yield finding("no-processes", name, host=host)
    if host.gpus and not host.gpus_seen:
        torch_version = host.versions.get("torch")
        yield finding("gpus-not-used", name, gpus=len(host.gpus), torch=torch_version)

    in_use = [gpu for gpu in host.gpus if gpu.used_gib > GPU_USED_GIB]
    if in_use:
        numbers = names_text([str(gpu.index) for gpu in in_use])
        most = max(gpu.used_gib for gpu in in_use)
        yield finding("gpu-in-use", name, gpus=numbers, used=most)
    for gpu in host.gpus:
        if gpu.throttled:
            yield finding("gpu-throttled", name, gpu=gpu)


def _memory(name: str, host: Host) -> Iterator[Finding]:
    if host.memory_gib and host.memory_free_gib < MEMORY_SHARE * host.memory_gib:
        yield finding("little-memory", name, host=host)
    # NCCL's processes of a host exchange data through /dev/shm.
    if host.gpus and host.shared_memory_gib < SHARED_MEMORY_GIB:
        mib = 1024 * host.shared_memory_gib
        yield finding("little-shared-memory", name, mib=mib)
    # RDMA cards read and write only memory that is locked.
    if host.ports and host.locked_memory_kib is not None:
        yield finding("locked-memory-limited", name, host=host)
    if host.load > BUSY * host.cores:
        yield finding("host-busy", name, host=host)


def _disks(name: str, host: Host) -> Iterator[Finding]:
    for path in host.paths:
        if path.free_gib is not None and path.free_gib < DISK_GIB:
            severity = "error" if path.free_gib < DISK_ERROR_GIB else "warning"
            yield finding("little-disk", name, severity, path=path)


# All hosts ----------------------------------------------------------------------------------------


def _layout(cluster: ClusterFacts) -> Iterator[Finding]:
    sizes = cluster.layout
    world = sum(host.processes for host in cluster.hosts)
    missing = len(cluster.hosts) < cluster.hosts[0].place.fewest
    if sizes is None or world == 0 or missing or cluster.attempt is not None:
        return
    try:
        layout = resolve(sizes, world)
    except LayoutError as error:
        counts = {name: f"{host.processes} processes" for name, host in cluster.labelled}
        yield finding("layout-does-not-fit", world=world, counts=Groups.of(counts), problem=error)
        return

    names = {rank: name for name, host in cluster.labelled for rank in host.ranks}
    if sorted(names) == list(range(world)):
        placed = layout.on_hosts([1] * world, [names[rank] for rank in range(world)])
        for problem in host_warnings(placed):
            yield finding("layout-crosses-hosts", problem=problem)


def _config(cluster: ClusterFacts) -> Iterator[Finding]:
    errors = {}
    configs = {}
    for name, host in cluster.labelled:
        if host.config_error:
            errors[name] = host.config_error
        else:
            configs[name] = "\n".join(host.config)
    for problem, hosts in Groups.of(errors).by_value.items():
        yield finding("config-wrong", hosts, problem=problem)

    groups = Groups.of(configs)
    if groups.differ:
        (usual, same), *others = groups.by_value.items()
        for text, hosts in others:
            difference = _difference(usual, text)
            yield finding("config-differs", hosts, same=names_text(same), difference=difference)


def _difference(first: str, second: str) -> str:
    lines = difflib.ndiff(first.splitlines(), second.splitlines())
    changed = [f"{line[0]} {line[2:].strip()}" for line in lines if line[0] in "+-"]
    text = "; ".join(changed[:MOST_LINES])
    if len(changed) > MOST_LINES:
        text += f"; {len(changed) - MOST_LINES} more"
    return text


def _code(cluster: ClusterFacts) -> Iterator[Finding]:
    codes = {name: host.code for name, host in cluster.labelled}
    groups = Groups.of({name: repr(sorted(code.items())) for name, code in codes.items()})
    same, *others = groups.by_value.values()
    usual = codes[same[0]]
    for hosts in others:
        other = codes[hosts[0]]
        # Files that only one of them has differ, too.
        differing = {file for file, _ in usual.items() ^ other.items()}
        files = names_text(sorted(differing))
        yield finding("code-differs", hosts, same=names_text(same), files=files)


def _versions(cluster: ClusterFacts) -> Iterator[Finding]:
    programs = {program for host in cluster.hosts for program in host.versions}
    for program in sorted(programs - set(MAY_DIFFER)):
        groups = Groups.of(
            {name: host.versions.get(program, "") for name, host in cluster.labelled}
        )
        if groups.differ:
            found = finding(
                "version-differs",
                groups.minority,
                _severity_of_version(program),
                program=program,
                groups=groups,
            )
            yield replace(found, id=f"{program}-differs")


def _severity_of_version(program: str) -> str:
    if program in MUST_AGREE:
        return "error"
    if program == "kernel":
        return "note"
    return "warning"


def _variables(cluster: ClusterFacts) -> Iterator[Finding]:
    variables = {variable for host in cluster.hosts for variable in host.variables}
    for variable in sorted(filter(_should_agree, variables)):
        groups = Groups.of(
            {name: host.variables.get(variable, "(not set)") for name, host in cluster.labelled}
        )
        if groups.differ:
            yield finding("environment-differs", groups.minority, variable=variable, groups=groups)


def _should_agree(variable: str) -> bool:
    if variable == "LD_LIBRARY_PATH":  # it decides which NCCL and CUDA are loaded
        return True
    return variable != "MASTER_ADDR" and not is_of_host(variable)


def _slow_settings(cluster: ClusterFacts) -> Iterator[Finding]:
    hosts_of: dict[SlowSetting, list[str]] = {}
    for name, host in cluster.labelled:
        for setting in slow_settings(host):
            hosts_of.setdefault(setting, []).append(name)
    for setting, names in hosts_of.items():
        sentence = "slow-switch/file" if setting.of_file else "slow-switch"
        yield finding(sentence, names, setting=setting)


def _clocks(cluster: ClusterFacts) -> Iterator[Finding]:
    names = cluster.labels
    for name, clock in zip(names, cluster.clocks, strict=False):
        if clock is None:
            continue
        ahead, error = clock
        if abs(ahead) > CLOCK_S + error:
            side = "ahead of" if ahead > 0 else "behind"
            yield finding("clock-differs", name, seconds=abs(ahead), side=side, first=names[0])


def _descriptors(cluster: ClusterFacts) -> Iterator[Finding]:
    """The process that serves the job's store, on the first host, needs a file descriptor for each
    rank."""
    name, first = cluster.labelled[0]
    world = sum(host.processes for host in cluster.hosts)
    needed = world + OWN_DESCRIPTORS
    soft, hard = first.open_files or (-1, -1)
    # Under torchrun that process is its agent; one of meshtrain raises its own limit as far as it
    # may.
    by_agent = first.place.launcher.startswith("torchrun")
    if 0 <= hard < needed:
        yield finding("few-descriptors/hard", name, limit=hard, world=world, needed=needed)
    elif 0 <= soft < needed and by_agent:
        yield finding("few-descriptors", name, limit=soft, world=world, needed=needed)
