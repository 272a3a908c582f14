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
DISK_GIB = 20.0
DISK_ERROR_GIB = 1.0
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
    yield from _missing_gpus(cluster)
    yield from _layout(cluster)
    yield from _config(cluster)
    yield from _code(cluster)
    yield from _versions(cluster)
    yield from _variables(cluster)
    yield from _slow_settings(cluster)
    yield from _clocks(cluster)
    yield from _descriptors(cluster)


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
        indices = [str(gpu.index) for gpu in in_use]
        most = max(gpu.used_gib for gpu in in_use)
        yield finding("gpu-in-use", name, gpus=names_text(indices), used=most)
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
        if path.free_gib is None or path.free_gib >= DISK_GIB:
            continue
        severity = "warning"
        if path.free_gib < DISK_ERROR_GIB:
            severity = "error"
        yield finding("little-disk", name, severity, path=path)


# All hosts ----------------------------------------------------------------------------------------


def _missing_gpus(cluster: ClusterFacts) -> Iterator[Finding]:
    without = [name for name, host in cluster.labelled if not host.gpus_seen]
    if 0 < len(without) < len(cluster.hosts):
        yield finding("gpus-missing", without)


def _layout(cluster: ClusterFacts) -> Iterator[Finding]:
    sizes = cluster.layout
    world = sum(host.processes for host in cluster.hosts)
    some_are_missing = len(cluster.hosts) < cluster.hosts[0].place.fewest
    if sizes is None or world == 0 or some_are_missing or cluster.attempt is not None:
        return
    try:
        layout = resolve(sizes, world)
    except LayoutError as error:
        counts = {name: f"{host.processes} processes" for name, host in cluster.labelled}
        yield finding("layout-does-not-fit", world=world, counts=Groups.of(counts), problem=error)
        return

    host_of: dict[int, str] = {}  # by rank
    for name, host in cluster.labelled:
        for rank in host.ranks:
            host_of[rank] = name
    all_ranks = list(range(world))
    if sorted(host_of) != all_ranks:
        return
    # Placed one by one: ranks of a host need not be neighbours.
    one_each = [1] * world
    placed = layout.on_hosts(one_each, [host_of[rank] for rank in all_ranks])
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
    for problem, names in Groups.of(errors).by_value.items():
        yield finding("config-wrong", names, problem=problem)

    groups = Groups.of(configs)
    if groups.differ:
        usual, *others = groups.by_value.items()
        usual_text, same = usual
        for text, names in others:
            difference = _difference(usual_text, text)
            yield finding("config-differs", names, same=names_text(same), difference=difference)


def _difference(first: str, second: str) -> str:
    changed = []
    for line in difflib.ndiff(first.splitlines(), second.splitlines()):
        sign = line[0]
        if sign in "+-":
            changed.append(f"{sign} {line[2:].strip()}")
    text = "; ".join(changed[:MOST_LINES])
    if len(changed) > MOST_LINES:
        text += f"; {len(changed) - MOST_LINES} more"
    return text


def _code(cluster: ClusterFacts) -> Iterator[Finding]:
    codes = {}
    texts = {}
    for name, host in cluster.labelled:
        codes[name] = host.code
        texts[name] = repr(sorted(host.code.items()))
    same, *others = Groups.of(texts).by_value.values()
    usual = codes[same[0]]
    for names in others:
        other = codes[names[0]]
        # Files that only one of them has differ, too.
        differing = usual.items() ^ other.items()
        files = {file for file, _ in differing}
        files_text = names_text(sorted(files))
        yield finding("code-differs", names, same=names_text(same), files=files_text)


def _versions(cluster: ClusterFacts) -> Iterator[Finding]:
    programs = {program for host in cluster.hosts for program in host.versions}
    for program in sorted(programs - set(MAY_DIFFER)):
        versions = {name: host.versions.get(program, "") for name, host in cluster.labelled}
        groups = Groups.of(versions)
        if not groups.differ:
            continue
        severity = _severity_of_version(program)
        found = finding(
            "version-differs",
            groups.minority,
            severity,
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
    for variable in sorted(variables):
        if not _should_agree(variable):
            continue
        values = {}
        for name, host in cluster.labelled:
            values[name] = host.variables.get(variable, "(not set)")
        groups = Groups.of(values)
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
        sentence = "slow-switch"
        if setting.of_file:
            sentence = "slow-switch/file"
        yield finding(sentence, names, setting=setting)


def _clocks(cluster: ClusterFacts) -> Iterator[Finding]:
    names = cluster.labels
    for name, clock in zip(names, cluster.clocks, strict=False):
        if clock is None:
            continue
        ahead, error = clock
        seconds = abs(ahead)
        if seconds <= CLOCK_S + error:
            continue
        side = "behind"
        if ahead > 0:
            side = "ahead of"
        yield finding("clock-differs", name, seconds=seconds, side=side, first=names[0])


def _descriptors(cluster: ClusterFacts) -> Iterator[Finding]:
    """The process that serves the job's store, on the first host, needs a file descriptor for each
    rank."""
    name, first = cluster.labelled[0]
    if first.open_files is None:
        return
    soft, hard = first.open_files  # below 0: no limit
    world = sum(host.processes for host in cluster.hosts)
    needed = world + OWN_DESCRIPTORS
    # Under torchrun that process is its agent; one of meshtrain raises its own limit as far as it
    # may.
    by_agent = first.place.launcher.startswith("torchrun")
    if 0 <= hard < needed:
        yield finding("few-descriptors/hard", name, limit=hard, world=world, needed=needed)
    elif 0 <= soft < needed and by_agent:
        yield finding("few-descriptors", name, limit=soft, world=world, needed=needed)
