"""Measured runs compared with their predictions, and the hardware file that fits runs best."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from meshtrain.config import Config
from meshtrain.config.yaml_reader import write
from meshtrain.errors import InputError
from meshtrain.foresight.hardware import Hardware, Link
from meshtrain.foresight.prediction import Prediction
from meshtrain.foresight.steptime import COPIES_OF_STATES, StepTime
from meshtrain.job.parsing import parse_json
from meshtrain.metrics.logger import read

WARM_UP = 3  # first steps, which do not count: caches fill, blocks are compiled
PHASES = ("forward", "backward", "communication", "update", "step")
COLUMNS = {  # phase -> column of a run's metrics.jsonl
    "forward": "time_forward_s",
    "backward": "time_backward_s",
    "communication": "time_communication_s",
    "update": "time_optimizer_s",
    "step": "step_time_s",
}
SENT = "sent_bytes_"  # begin of the columns with the bytes sent over an axis
ERROR = 0.05  # standard error of the logarithm of a measured phase
SMALL = 0.02  # share of a step that is added to both sides, so that tiny phases carry no weight
PRIORS = {  # fitted constant -> standard error of the logarithm of the file's value
    "launch": 0.6,
    "stream": 0.3,
    "matmul": 0.3,
    "attention": 0.3,
    "within_host": 0.6,
    "between_hosts": 0.6,
}
# constants that are shares of a data sheet's rate: at most 1
SHARES = ("stream", "matmul", "attention")
NARROWEST = 0.005  # step of the search for a factor's logarithm at which it ends

Foresee = Callable[[Hardware], StepTime]  # predicts one run


@dataclass(frozen=True)
class MeasuredRun:
    """Measurements from a run's folder.

    Attributes:
        seconds: phase of `PHASES` -> median over the run's steps.
        memory: peak GiB of the fullest rank; None on a CPU, where only resident memory is known.
        usable: share of the allocator's reserved memory that tensors had; None on a CPU.
        sent: axis -> bytes that rank 0 sent in the last step.
    """

    config: Config
    seconds: dict[str, float]
    memory: float | None
    usable: float | None
    sent: dict[str, float]

    @classmethod
    def load(cls, folder: Path) -> "MeasuredRun":
        """Raises InputError: the folder is not that of a run with more than `WARM_UP` steps."""
        try:
            rows = read(folder / "metrics.jsonl")
            table = (folder / "layout.txt").read_text()
        except OSError as error:
            raise InputError(f"{folder} is not the folder of a run: {error}") from error
        steps = [row for row in rows[WARM_UP:] if row.get("step_time_s")]
        if not steps:
            raise InputError(
                f"{folder}/metrics.jsonl has {len(rows)} steps, of which {WARM_UP} do not count: "
                "run more"
            )
        placed = _hosts(table)
        config = Config.load(str(folder / "config.yaml"), world_size=sum(placed.values()))
        assert config.resolved is not None
        layout = config.resolved.on_hosts(list(placed.values()), list(placed))

        last = steps[-1]
        memory = usable = None
        reserved = last.get("memory_reserved_gib")
        if reserved:  # on a GPU
            of_fullest_rank = [row["memory_max_gib"] for row in rows if "memory_max_gib" in row]
            memory = max([last["memory_gib"], *of_fullest_rank])
            usable = last["memory_gib"] / reserved
        # Medians: a step in which a checkpoint is written, or a neighbour is busy, is no measure.
        seconds = {}
        for phase, column in COLUMNS.items():
            seconds[phase] = median(row[column] for row in steps)
        return cls(
            config=replace(config, resolved=layout),
            seconds=seconds,
            memory=memory,
            usable=usable,
            sent={
                column.removeprefix(SENT): nbytes
                for column, nbytes in last.items()
                if column.startswith(SENT)
            },
        )

    def foresee(self, hardware: Hardware) -> StepTime:
        return Prediction(self.config, hardware).step


def _hosts(table: str) -> Counter[str]:
    """Host -> number of its processes, from the table of a `layout.txt`: `rank  host  local ...`
    below the first empty line."""
    _, rows, *_ = table.split("\n\n")
    return Counter(row.split()[1] for row in rows.splitlines()[1:])


def phases(step: StepTime) -> dict[str, float]:
    """A prediction's seconds by the phases that a run measures."""
    named = {name: step.parts.get(name, 0.0) for name in ("forward", "backward", "update")}
    named["update"] += step.parts.get(COPIES_OF_STATES, 0.0)
    return {**named, "communication": step.seconds - sum(named.values()), "step": step.seconds}


@dataclass(frozen=True)
class Comparison:
    """A line of `--against`, with both values in `unit`; None: not known for this run."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None

    def describe(self) -> str:
        off = ""
        if self.predicted is not None and self.measured:
            off = f"{100 * (self.predicted / self.measured - 1):+.1f} %"
        predicted, measured = self._text(self.predicted), self._text(self.measured)
        return f"{self.name:24}{predicted:>18}{measured:>18} {self.unit:3}  {off}".rstrip()

    def _text(self, value: float | None) -> str:
        if value is None:
            return "-"
        return f"{value:,.0f}" if self.unit == "B" else f"{value:.4g}"


def against(
    run: MeasuredRun, hardware: Hardware, memory: float | None, sent: Mapping[str, float]
) -> list[Comparison]:
    """Predicted and measured values of a run.

    Args:
        memory: predicted GiB at the peak.
        sent: axis -> predicted bytes that the blocks of rank 0 send in a step.
    """
    step = run.foresee(hardware)
    foreseen = phases(step)
    rows = [
        Comparison(name, "s", foreseen[name], run.seconds[name])
        for name in ("step", "forward", "backward", "communication", "update")
    ]
    rows.append(Comparison("memory", "GiB", memory, run.memory))
    foreseen_bytes = {**sent, **step.sent}
    for axis in dict.fromkeys((*run.sent, *foreseen_bytes)):
        measured = run.sent.get(axis, 0.0)
        rows.append(Comparison(f"sent over {axis}", "B", foreseen_bytes.get(axis), measured))
    return rows


def calibrate(paths: Sequence[str], hardware: Hardware) -> Hardware:
    """The hardware that best fits runs (folders) and reports of `meshtrain doctor --json`
    (files)."""
    reports = [Path(path) for path in paths if Path(path).is_file()]
    runs = [MeasuredRun.load(Path(path)) for path in paths if not Path(path).is_file()]
    for report in reports:
        hardware = with_links(hardware, report)
    # The doctor has measured the links by themselves: runs do not change them.
    fixed = ("within_host", "between_hosts") if reports else ()
    hardware = fit([(run.foresee, run.seconds) for run in runs], hardware, fixed)
    usable = [run.usable for run in runs if run.usable is not None]
    if usable:
        device = replace(hardware.device, usable=min(1.0, *usable))
        hardware = replace(hardware, device=device)
    return replace(hardware, source=f"measured by {', '.join(paths)}")


def as_yaml(hardware: Hardware) -> str:
    """The hardware as YAML text, numbers to four digits."""

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: rounded(entry) for name, entry in value.items()}
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return write(rounded(asdict(hardware)))


# Fit ----------------------------------------------------------------------------------------------


def scaled(hardware: Hardware, constant: str, factor: float) -> Hardware:
    """The hardware with one constant of `PRIORS` slower by a factor; for a link both its latency
    and its bandwidth."""
    if constant in ("within_host", "between_hosts"):
        link: Link = getattr(hardware, constant)
        return replace(hardware, **{constant: link.slower(factor)})  # type: ignore[arg-type]
    now = getattr(hardware.compute, constant)
    value = min(1.0, now / factor) if constant in SHARES else now * factor
    return replace(hardware, compute=replace(hardware.compute, **{constant: value}))


def misfit(runs: Iterable[tuple[Foresee, Mapping[str, float]]], hardware: Hardware) -> float:
    """Sum over runs and phases of the squared logarithm of predicted / measured, in units of
    `ERROR`."""
    total = 0.0
    for foresee, measured in runs:
        small = SMALL * measured["step"]
        foreseen = phases(foresee(hardware))
        for name in PHASES:
            ratio = (foreseen[name] + small) / (measured[name] + small)
            total += (math.log(ratio) / ERROR) ** 2
    return total


def fit(
    runs: Sequence[tuple[Foresee, Mapping[str, float]]],
    hardware: Hardware,
    fixed: Iterable[str] = (),
) -> Hardware:
    """Fits one factor per constant to the measured phases of runs; a constant that runs do not show
    stays close to the file's value (a maximum a posteriori fit with `PRIORS`).

    Args:
        runs: for each run its prediction as a function of hardware, and the measured seconds of its
            phases.
        fixed: constants that keep their values.
    """
    if not runs:
        return hardware

    def built(logs: Mapping[str, float]) -> Hardware:
        changed = hardware
        for name, log in logs.items():
            changed = scaled(changed, name, math.exp(log))
        return changed

    def cost(logs: Mapping[str, float]) -> float:
        prior = sum((log / PRIORS[name]) ** 2 for name, log in logs.items())
        return misfit(runs, built(logs)) + prior

    # Coordinate search: there are few constants, and the misfit is not smooth.
    logs = {name: 0.0 for name in PRIORS if name not in fixed}  # of each constant's factor
    best = cost(logs)
    width = 1.0
    while width > NARROWEST:
        before = best
        for name in logs:
            for log in (logs[name] - width, logs[name] + width):
                total = cost({**logs, name: log})
                if total < best:
                    best = total
                    logs[name] = log
        if best == before:
            width /= 2

    fitted = built(logs)
    off = [abs(math.log(foresee(fitted).seconds / measured["step"])) for foresee, measured in runs]
    return replace(fitted, error=min(0.5, max(0.02, *off)))


RINGS = ("all-gather", "reduce-scatter")  # of the collectives that the doctor times


def with_links(hardware: Hardware, report: Path) -> Hardware:
    """The hardware with the links and the hosts' memory that `meshtrain doctor --json` has seen;
    links that it did not see stay as they are. Raises InputError: not such a report."""
    try:
        cluster = parse_json(report.read_bytes())["seen"]
        pairs = cluster["timings"]["links"]
        rings = [
            _Ring(row["ranks"], row["hosts"], row["seconds"], row["fixed"], row["bandwidth"])
            for row in cluster["timings"]["timings"]
            if row["what"] in RINGS and row["ranks"] > 1
        ]
        host_of = {rank: i for i, host in enumerate(cluster["hosts"]) for rank in host["ranks"]}
        memories = [host["memory_gib"] for host in cluster["hosts"] if host.get("memory_gib")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{report} is not what `meshtrain doctor --json` prints of a job with ranks: {error!r}"
        ) from error

    inside = hardware.within_host
    near = [ring for ring in rings if ring.hosts == 1]
    if near:
        # See `collective.seconds` for the steps of a ring.
        steps = [max(0.0, ring.fixed - inside.message) / (ring.ranks - 1) for ring in near]
        bandwidth = median(ring.bandwidth for ring in near)
        inside = replace(inside, bandwidth=bandwidth, latency=median(steps))

    outside = hardware.between_hosts
    far = [ring for ring in rings if ring.hosts > 1]
    if far:
        steps = []
        table: dict[int, float] = {}
        ranks_of_host = max(Counter(host_of.values()).values())
        for ring in far:
            in_hosts = (ring.ranks - ring.hosts) * inside.latency
            steps.append(max(0.0, ring.fixed - outside.message - in_hosts) / (ring.hosts - 1))
            # All ranks of a host together have the interfaces of all of them.
            whole_hosts = ring.bandwidth * ranks_of_host * ring.hosts / ring.ranks
            table[ring.hosts] = max(whole_hosts, table.get(ring.hosts, 0.0))
        outside = replace(outside, bandwidth=dict(sorted(table.items())), latency=median(steps))
    elif between := [
        pair["bandwidth"] / 1e9
        for pair in pairs
        if host_of[pair["source"]] != host_of[pair["target"]]
    ]:
        outside = replace(outside, bandwidth=median(between))
    host = hardware.host
    if memories:
        host = replace(host, memory_gib=min(memories))
    return replace(hardware, within_host=inside, between_hosts=outside, host=host)


@dataclass(frozen=True)
class _Ring:
    """A collective that the doctor has timed, which took one round."""

    ranks: int
    hosts: int
    seconds: float
    fixed: float  # of `seconds`, whatever the size
    bus_bandwidth: float  # bytes / s, all of `seconds` counted

    @property
    def bandwidth(self) -> float:
        """GB/s of a rank, without what is fixed."""
        sent = self.bus_bandwidth * self.seconds
        return sent / max(self.seconds - self.fixed, 0.1 * self.seconds) / 1e9
