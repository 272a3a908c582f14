"""The doctor's report, as text and as JSON."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from meshtrain.doctor.findings import Finding, status
from meshtrain.doctor.nccl import interface_of
from meshtrain.doctor.records import ClusterFacts, Host, Timing
from meshtrain.errors import plural, printable, ranges

MARKS = {"error": "ERROR", "warning": "warning", "note": "note"}
WIDTH = 140  # of output that does not go to a terminal
MOST_HOSTS = 32  # in the table; `--json` has all


def print_report(cluster: ClusterFacts, findings: Sequence[Finding], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report_json(cluster, findings)), flush=True)
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH)
    if cluster.attempt is None:
        console.print(_hosts_table(cluster))
    if cluster.timings is not None and cluster.timings.timings:
        console.print(_timings_table(cluster.timings.timings, cluster.timings.backend))
    print(findings_text(findings), flush=True)


def print_summary(findings: Sequence[Finding], host: str, leader: str, quiet: bool) -> None:
    """Prints what concerns this host, as another host prints it all; nothing if `quiet` and all is
    well here."""
    own = [finding for finding in findings if host in finding.where]
    if not status(own):
        if quiet:
            return
        but = ", but the job has errors" if status(findings) else ""
        print(f"{host}: nothing is wrong with this host{but}")
    print("\n".join([*map(block, own), f"(the whole report is on {leader})"]), flush=True)


def findings_text(findings: Sequence[Finding]) -> str:
    severities = [finding.severity for finding in findings]
    errors, warnings = severities.count("error"), severities.count("warning")
    if errors:
        summary = f"{plural(errors, 'error')}, {plural(warnings, 'warning')}"
    elif warnings:
        summary = f"all is well, with {plural(warnings, 'warning')}"
    else:
        summary = "all is well"
    return "\n".join([*map(block, findings), summary])


def block(finding: Finding) -> str:
    message = printable(finding.what).replace("\n", "\n  ")
    fix = f"\n  fix: {printable(finding.fix)}" if finding.fix else ""
    return f"{MARKS[finding.severity]} {finding.id}: {message}{fix}"


def report_json(cluster: ClusterFacts, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "status": status(findings),
        "findings": [asdict(finding) for finding in findings],
        "seen": asdict(cluster),
    }


def _table(title: str, columns: Sequence[str], left_aligned: Sequence[str]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in columns:
        # a narrow terminal folds lines, but no word of these is cut
        widest = max(map(len, name.split() or [""]))
        justify: Any = "left" if name in left_aligned else "right"
        table.add_column(name, justify=justify, min_width=widest, overflow="fold")
    return table


def _hosts_table(cluster: ClusterFacts) -> Any:
    columns = (
        "node",
        "host",
        "processes",
        "ranks",
        "GPUs",
        "by",
        "clock",
        "memory free",
        "disk free",
    )
    left_aligned = [name for name in columns if name not in ("node", "processes")]
    title = f"{len(cluster.hosts)} of {cluster.hosts[0].place.nodes} nodes"
    table = _table(title, columns, left_aligned)
    for i, (name, host) in enumerate(cluster.labelled[:MOST_HOSTS]):
        # The first host's clock is what the others are compared with.
        clock = cluster.clocks[i] if 0 < i < len(cluster.clocks) else None
        cells = (
            str(i),
            name,
            str(host.processes),
            ", ".join(ranges(host.ranks)),
            _gpus_text(host),
            _route_text(host),
            "" if clock is None else f"{clock[0]:+.3f} s",
            f"{host.memory_free_gib:.0f} of {host.memory_gib:.0f} GiB",
            _disk_text(host),
        )
        table.add_row(*map(printable, cells))
    if len(cluster.hosts) > MOST_HOSTS:
        table.add_row("...", f"{len(cluster.hosts) - MOST_HOSTS} more")
    return table


def _gpus_text(host: Host) -> str:
    if host.gpus and host.gpus_seen:
        return f"{host.gpus_seen} {host.gpus[0].name}"
    return str(host.gpus_seen)


def _route_text(host: Host) -> str:
    interface = interface_of(host.interfaces, host.route)
    return host.route if interface is None else f"{interface.name} {host.route}"


def _disk_text(host: Host) -> str:
    """The free space where the job writes first."""
    for path in host.paths:
        if path.free_gib is not None:
            return f"{path.free_gib:.0f} GiB"
    return ""


def _timings_table(timings: Sequence[Timing], backend: str) -> Any:
    columns = ("axis", "ranks", "", "collective", "latency", "size", "time", "bandwidth", "spread")
    title = f"collectives over {backend}, the slowest group of each"
    table = _table(title, columns, ("axis", "", "collective"))
    for row in timings:
        table.add_row(
            row.axes,
            str(row.ranks),
            "between hosts" if row.crosses else "inside",
            row.what,
            f"{1e6 * row.latency:.0f} us",
            f"{row.size / 2**20:.2f} MiB",
            f"{1e3 * row.seconds:.2f} ms",
            f"{row.bandwidth / 1e9:.3f} GB/s",
            f"{row.spread:.1f} x",
        )
    return table
