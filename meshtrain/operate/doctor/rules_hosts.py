"""PURE: is every host what the job needs, and are they alike?"""

import difflib
from collections.abc import Iterator, Mapping

from meshtrain.environment import OWN_DESCRIPTORS
from meshtrain.layout import Layout, LayoutError
from meshtrain.operate.doctor.finding import Finding, by_value, error, labels, note, odd_ones, some, told, warning
from meshtrain.operate.doctor.record import Host, Seen
from meshtrain.operate.doctor.transport import slow_switches

CLOCK_S = 0.5  # apart, beyond the error of the measurement
DISK_GIB, DISK_ERROR_GIB = 20.0, 1.0
MEMORY_SHARE = 0.1
SHARED_MEMORY_GIB = 1.0
GPU_USED_GIB = 1.0
BUSY = 1.5  # processes that want to run, per core
MOST_LINES = 6  # of a difference
MUST_AGREE = ("torch", "python", "nccl", "cuda", "meshtrain")  # versions; others may surprise, these break
MAY_DIFFER = ("executable",)
OWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MASTER_ADDR")  # of each host


def hosts(seen: Seen) -> Iterator[Finding]:
    """GPUs, layout, sameness, clocks, room."""
    yield from _gpus(seen)
    yield from _layout(seen)
    yield from _config(seen)
    yield from _code(seen)
    yield from _versions(seen)
    yield from _variables(seen)
    yield from _clocks(seen)
    yield from _room(seen)


def _gpus(seen: Seen) -> Iterator[Finding]:
    names = labels(seen)
    have = [host.gpus_seen for host in seen.hosts]
    for name, host in zip(names, seen.hosts, strict=True):
        per_task = host.place.launcher == "srun" and host.gpus_seen == 1  # each task sees its own
        if 0 < host.gpus_seen < host.processes and not per_task:
            yield error(
                "too-few-gpus",
                f"{name} is to start {host.processes} processes and finds {host.gpus_seen} GPUs",
                (name,),
                f"--nproc-per-node={host.gpus_seen}, or look why GPUs are missing: nvidia-smi, CUDA_VISIBLE_DEVICES="
                f"{(host.variables or {}).get('CUDA_VISIBLE_DEVICES', '(not set)')}",
            )
        if host.processes == 0:
            yield error(
                "no-processes",
                f"--nproc-per-node={host.place.processes} comes to 0 processes on {name}: torch finds no GPU there",
                (name,),
                "look at nvidia-smi on that host; a torch built for CPUs only finds none either",
            )
        if len(host.gpus) > host.gpus_seen == 0:
            yield warning(
                "gpus-not-used",
                f"{name} has {len(host.gpus)} GPUs and torch {(host.versions or {}).get('torch')} finds none",
                (name,),
                "install a torch for CUDA of this driver, and look at CUDA_VISIBLE_DEVICES",
            )
        yield from _condition(name, host)
    if any(have) and not all(have):
        yield error(
            "gpus-missing",
            f"some hosts have GPUs and {some([n for n, count in zip(names, have, strict=True) if not count])} has none",
            [n for n, count in zip(names, have, strict=True) if not count],
            "look at nvidia-smi there; a job runs over NCCL on GPUs or over gloo on CPUs, not over both",
        )


def _condition(name: str, host: Host) -> Iterator[Finding]:
    used = [gpu for gpu in host.gpus if gpu.used_gib > GPU_USED_GIB]
    if used:
        yield warning(
            "gpu-in-use",
            f"GPUs {some([str(gpu.index) for gpu in used])} of {name} are in use: "
            f"{max(gpu.used_gib for gpu in used):.1f} GiB are taken",
            (name,),
            "look at nvidia-smi for a process left over from an earlier job",
        )
    for gpu in host.gpus:
        if gpu.throttled:
            yield warning(
                "gpu-throttled",
                f"GPU {gpu.index} of {name} is slowed down by {gpu.throttled}: every other rank will wait for it",
                (name,),
                "look at cooling and power (nvidia-smi -q -d PERFORMANCE), or leave this host out",
            )


def _layout(seen: Seen) -> Iterator[Finding]:
    """hosts x processes = world, and the layout makes that world."""
    sizes = next((host.layout for host in seen.hosts if host.layout is not None), None)
    world = sum(host.processes for host in seen.hosts)
    if sizes is None or world == 0 or len(seen.hosts) < seen.hosts[0].place.fewest or seen.attempt is not None:
        return
    counts = told(by_value(labels(seen), [f"{host.processes} processes" for host in seen.hosts]))
    try:
        layout = Layout.resolve(sizes, world)
    except LayoutError as problem:
        yield error("layout-does-not-fit", f"{world} processes ({counts}): {problem}", (), "as it says")
        return
    by_rank = {rank: i for i, host in enumerate(seen.hosts) for rank in host.ranks}
    if sorted(by_rank) == list(range(world)):
        names = labels(seen)
        placed = layout.on_hosts([1] * world, [names[by_rank[rank]] for rank in range(world)])
        for text in placed.warnings():
            yield warning("layout-crosses-hosts", text, (), "as it says")


def _config(seen: Seen) -> Iterator[Finding]:
    names = labels(seen)
    wrong = by_value(
        [name for name, host in zip(names, seen.hosts, strict=True) if host.config_error],
        [host.config_error for host in seen.hosts if host.config_error],
    )
    for text, where in wrong.items():
        yield error("config-wrong", f"the config is wrong on {some(where)}:\n{text}", where, "as it says")
    read = [(name, host.config) for name, host in zip(names, seen.hosts, strict=True) if not host.config_error]
    groups = by_value([name for name, _ in read], ["\n".join(lines) for _, lines in read])
    if len(groups) > 1:
        (first, same), *others = groups.items()
        for text, where in others:
            yield error(
                "config-differs",
                f"the config of {some(where)} is not that of {some(same)}: {_difference(first, text)}",
                where,
                "give every node the same file and the same overrides, or none the file from a disk of its own",
            )


def _difference(ours: str, theirs: str) -> str:
    lines = list(difflib.ndiff(ours.splitlines(), theirs.splitlines()))
    changed = [f"{line[0]} {line[2:].strip()}" for line in lines if line[0] in "+-"]
    more = f"; {len(changed) - MOST_LINES} more" if len(changed) > MOST_LINES else ""
    return "; ".join(changed[:MOST_LINES]) + more


def _code(seen: Seen) -> Iterator[Finding]:
    names, codes = labels(seen), [host.code or {} for host in seen.hosts]
    groups = by_value(names, [repr(sorted(code.items())) for code in codes])
    if len(groups) < 2:
        return
    same, *others = groups.values()
    first = codes[names.index(same[0])]
    for where in others:
        files = _unlike(first, codes[names.index(where[0])])
        yield error(
            "code-differs",
            f"meshtrain's code on {some(where)} is not that on {some(same)}: {some(files)}",
            where,
            "install the same version everywhere (the same commit: git status, git log -1), or run it from a folder "
            "that all nodes share",
        )


def _unlike(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def _versions(seen: Seen) -> Iterator[Finding]:
    names, versions = labels(seen), [host.versions or {} for host in seen.hosts]
    for program in sorted({name for found in versions for name in found} - set(MAY_DIFFER)):
        groups = by_value(names, [found.get(program, "") for found in versions])
        if len(groups) > 1:
            grave = program in MUST_AGREE
            kind = error if grave else note if program == "kernel" else warning
            yield kind(
                f"{program}-differs",
                f"{program} is not the same everywhere: {told(groups)}",
                odd_ones(groups),
                "install the same versions on all nodes, from one lock file or one container image",
            )


def _variables(seen: Seen) -> Iterator[Finding]:
    names, variables = labels(seen), [host.variables or {} for host in seen.hosts]
    for name in sorted({one for found in variables for one in found} - set(OWN_VARIABLES)):
        groups = by_value(names, [found.get(name, "(not set)") for found in variables])
        if len(groups) > 1:
            yield warning(
                "environment-differs",
                f"{name} is not the same everywhere: {told(groups)}",
                odd_ones(groups),
                f"export {name} with one value on all nodes, or nowhere",
            )
    on: dict[tuple[str, str, bool], list[str]] = {}
    for name, host in zip(names, seen.hosts, strict=True):
        for switch, means in slow_switches(host).items():
            of_file = switch.partition("=")[0] in (host.nccl_conf or {})
            on.setdefault((switch, means, of_file), []).append(name)
    for (switch, means, of_file), where in on.items():
        files = "take it out of ~/.nccl.conf, the file that NCCL_CONF_FILE names, or /etc/nccl.conf"
        fix = files if of_file else f"unset {switch.partition('=')[0]}"
        yield warning("slow-switch", f"{switch} is set on {some(where)}: {means}", where, fix)


def _clocks(seen: Seen) -> Iterator[Finding]:
    names = labels(seen)
    for name, clock in zip(names, seen.clocks, strict=False):
        if clock is not None and abs(clock[0]) > CLOCK_S + clock[1]:
            yield warning(
                "clock-differs",
                f"the clock of {name} is {abs(clock[0]):.1f} s {'ahead of' if clock[0] > 0 else 'behind'} that of "
                f"{names[0]}: logs of the two do not line up, and file times and certificates may surprise",
                (name,),
                "let chrony or systemd-timesyncd set it (timedatectl, chronyc tracking)",
            )


def _room(seen: Seen) -> Iterator[Finding]:
    """Disk, memory, other people's work."""
    for name, host in zip(labels(seen), seen.hosts, strict=True):
        if host.memory_gib and host.memory_free_gib < MEMORY_SHARE * host.memory_gib:
            yield warning(
                "little-memory",
                f"{name} has {host.memory_free_gib:.1f} of {host.memory_gib:.0f} GiB of memory free",
                (name,),
                "look for left-over processes (ps aux --sort=-rss | head)",
            )
        if len(host.gpus) and host.shared_memory_gib < SHARED_MEMORY_GIB:
            yield warning(
                "little-shared-memory",
                f"/dev/shm of {name} has {1024 * host.shared_memory_gib:.0f} MiB free: NCCL and data loaders need more",
                (name,),
                "start the container with --shm-size=16g or --ipc=host",
            )
        if host.ports and host.locked_memory_kib is not None:
            yield warning(
                "locked-memory-limited",
                f"a process on {name} may lock {host.locked_memory_kib} KiB of memory, and InfiniBand needs much more",
                (name,),
                "ulimit -l unlimited, in the service that starts jobs (LimitMEMLOCK=infinity) or the container",
            )
        if host.load > BUSY * host.cores:
            yield warning(
                "host-busy",
                f"{name} is busy before the job starts: a load of {host.load:.1f} on {host.cores} cores",
                (name,),
                "look for other people's or left-over processes (top)",
            )
    yield from _descriptors(seen)
    yield from _disks(seen)


def _descriptors(seen: Seen) -> Iterator[Finding]:
    """The process that serves the job's store has one for each rank: on the first host."""
    name, first, world = labels(seen)[0], seen.hosts[0], sum(host.processes for host in seen.hosts)
    soft, hard = first.open_files or (-1, -1)
    needed = world + OWN_DESCRIPTORS
    raise_ = f"before the job's command: ulimit -n {needed}"
    if 0 <= hard < needed:
        raise_ = "raise it by LimitNOFILE of the service that starts jobs, or nofile in /etc/security/limits.conf"
    elif not (0 <= soft < needed and first.place.launcher.startswith("torchrun")):
        return  # a process of meshtrain raises its own limit as far as it may
    yield (error if 0 <= hard < needed else warning)(
        "few-descriptors",
        f"on {name} a process may open {hard if 0 <= hard < needed else soft} files, and the one that serves the "
        f"store to {world} ranks needs {needed}",
        (name,),
        raise_,
    )


def _disks(seen: Seen) -> Iterator[Finding]:
    for name, host in zip(labels(seen), seen.hosts, strict=True):
        for one in host.paths:
            if one.free_gib is not None and one.free_gib < DISK_GIB:
                yield (error if one.free_gib < DISK_ERROR_GIB else warning)(
                    "little-disk",
                    f"{one.key} on {name} has {one.free_gib:.1f} GiB free ({one.seen})",
                    (name,),
                    f"make room, or name another folder with {one.key}=FOLDER",
                )
