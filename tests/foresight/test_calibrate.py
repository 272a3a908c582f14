"""What runs have measured: folders and doctor's report are read, compared, and give back the
hardware they ran on."""

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from meshtrain.errors import InputError
from meshtrain.foresight import calibrate, steptime
from meshtrain.foresight.calibrate import MeasuredRun, against, as_yaml, fit, misfit, phases, scaled
from meshtrain.foresight.collective import Group, seconds
from meshtrain.foresight.hardware import Hardware, load
from meshtrain.foresight.steptime import StepPlan, StepTime
from meshtrain.foresight.work import Parameter, Pass, Product, Send, Work
from meshtrain.layout import Layout

H100 = load("h100")
PHASES = {"forward": 1.0, "backward": 2.0, "communication": 0.5, "update": 0.1, "step": 3.7}


def run_of(size: int, layout: Mapping[str, int], operators: int = 30):
    """What is foreseen on hardware of two blocks, with products of this side."""
    forward = Pass(
        (Product(size, 4096, 4096),),
        1e7 * size,
        1e5 * size,
        operators,
        (Send("tp", "all_reduce", 1e4 * size),),
    )
    weights = (Parameter("block.weight", (2 * 10**8,)),)
    weight_grad = replace(forward, attention_flops=0)
    work = Work("block", weights, forward, forward, weight_grad)
    plan = StepPlan(layout=Layout(layout).on_hosts([8]), microbatches=4)
    return lambda hardware: steptime.step_time([work, work], plan, hardware)


RUNS = [
    run_of(8192, {"dp_shard": 4, "tp": 2}),
    run_of(64, {"dp_shard": 4, "tp": 2}),
    run_of(8192, {"dp_shard": 8}),
]


def measured_on(hardware: Hardware) -> list[tuple]:
    return [(run, phases(run(hardware))) for run in RUNS]


def test_the_phases_of_a_step_are_all_of_it() -> None:
    times = phases(RUNS[0](H100))
    assert sum(times.values()) == pytest.approx(2 * times["step"])
    assert min(times.values()) > 0


def test_runs_on_the_files_own_hardware_move_nothing() -> None:
    assert fit(measured_on(H100), H100) == replace(H100, error=0.02)


@pytest.mark.parametrize("seed", range(4))
def test_runs_on_other_hardware_show_what_it_is(seed: int) -> None:
    drawn = random.Random(seed)
    true = H100
    for constant in ("launch", "stream", "matmul", "within_host"):
        true = scaled(true, constant, drawn.uniform(1.2, 2.5))
    fitted = fit(measured_on(true), H100)
    assert misfit(measured_on(true), fitted) < 1 < misfit(measured_on(true), H100)
    other = run_of(2048, {"dp_shard": 2, "tp": 4})
    assert other(fitted).seconds == pytest.approx(other(true).seconds, rel=0.05)
    assert other(H100).seconds < 0.85 * other(true).seconds


def test_what_no_run_shows_stays_and_what_is_fixed_too() -> None:
    true = scaled(scaled(H100, "between_hosts", 3), "within_host", 3)
    fitted = fit(measured_on(true), H100, fixed=("within_host",))
    assert fitted.between_hosts == H100.between_hosts  # all runs had one host
    assert fitted.within_host == H100.within_host
    assert fitted.error > 0.02  # the links that were not to move are still wrong
    assert fit([], H100) == H100


def test_a_share_stays_a_share() -> None:
    assert scaled(H100, "matmul", 0.1).compute.matmul == 1.0
    assert scaled(H100, "launch", 2).compute.launch == 2 * H100.compute.launch
    assert scaled(H100, "within_host", 2).within_host.bandwidth == H100.within_host.bandwidth / 2


def test_a_calibrated_file_reads_as_it_was_written(tmp_path: Path) -> None:
    fitted = replace(scaled(H100, "launch", 1.2345678), source="measured by runs/x")
    path = tmp_path / "mine.yaml"
    path.write_text(as_yaml(fitted))
    again = load(str(path))
    assert again.compute.launch == pytest.approx(fitted.compute.launch, rel=1e-3)
    assert replace(again, compute=fitted.compute) == fitted


def folder_of_run(path: Path, steps: int = 6, **fields: object) -> Path:
    path.mkdir()
    text = (
        Path("configs/quickstart.yaml")
        .read_text()
        .replace("\n  dp_shard: -1", "\n  dp_shard: -1\n  tp: 2")
    )
    (path / "config.yaml").write_text(text)
    ranks = "".join(f"   {rank}  {'ab'[rank // 2]}  {rank % 2}  0  0\n" for rank in range(4))
    text = f"layout dp_shard 2 x tp 2 on 4 processes\n\nrank  host  local\n{ranks}\ntp: ...\n"
    (path / "layout.txt").write_text(text)
    times = {column: PHASES[name] for name, column in calibrate.COLUMNS.items()}
    row = {**times, "memory_gib": 3.0, "memory_reserved_gib": 4.0, "sent_bytes_tp": 100, **fields}
    rows = [
        {**row, "step": step, "step_time_s": 3.7 if step > 3 else 60}
        for step in range(1, steps + 1)
    ]
    rows[-1]["memory_max_gib"] = 3.5
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_folder_of_a_run_has_what_it_measured(tmp_path: Path) -> None:
    run = MeasuredRun.load(folder_of_run(tmp_path / "x"))
    assert run.seconds == PHASES  # the first three steps do not count
    assert (run.memory, run.usable, run.sent) == (3.5, 0.75, {"tp": 100})
    assert run.config.resolved is not None
    assert run.config.resolved.host_counts() == {"a": 2, "b": 2}
    on_cpu = MeasuredRun.load(folder_of_run(tmp_path / "cpu", memory_reserved_gib=None))
    assert (on_cpu.memory, on_cpu.usable) == (None, None)
    with pytest.raises(InputError, match="has 3 steps, of which 3 do not count"):
        MeasuredRun.load(folder_of_run(tmp_path / "short", steps=3))
    with pytest.raises(InputError, match="not the folder of a run"):
        MeasuredRun.load(tmp_path)


def foreseen(run: MeasuredRun, hardware: Hardware) -> StepTime:
    return StepTime(
        4.0, {"forward": 1.0, "backward": 2.5, "tp": 0.25, "update": 0.25}, {}, {"products": 1.0}
    )


def test_predicted_stands_beside_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MeasuredRun, "foresee", foreseen)
    run = MeasuredRun.load(folder_of_run(tmp_path / "x"))
    rows = {row.name: row for row in against(run, H100, 3.6, {"tp": 100, "pp": 7})}
    assert {name: (row.predicted, row.measured) for name, row in rows.items()} == {
        "step": (4.0, 3.7),
        "forward": (1.0, 1.0),
        "backward": (2.5, 2.0),
        "communication": (0.25, 0.5),
        "update": (0.25, 0.1),
        "memory": (3.6, 3.5),
        "sent over tp": (100, 100),
        "sent over pp": (7, 0.0),
    }
    assert rows["backward"].describe().split() == ["backward", "2.5", "2", "s", "+25.0", "%"]
    assert rows["sent over pp"].describe().split() == ["sent", "over", "pp", "7", "0", "B"]


def seen_by_doctor(hardware: Hardware, hosts: int = 8) -> dict[str, Any]:
    """What a doctor sees of hosts of 4 ranks, on hardware of which all is known."""
    groups = {(4, 1): 4, (hosts, hosts): 1, (4 * hosts, hosts): 4, (8, 2): 4, (16, 4): 4}
    rows = []
    for (ranks, of_hosts), on_host in groups.items():
        group = Group(ranks, on_host, ranks_of_host=4)
        fixed = seconds("all_gather", 0, group, hardware)
        took = seconds("all_gather", 1e8, group, hardware)
        row = {"ranks": ranks, "hosts": of_hosts, "fixed": fixed, "seconds": took}
        rows.append({**row, "what": "all-gather", "bandwidth": 1e8 / took})
        rows.append({**row, "what": "all-reduce", "bandwidth": 1.0, "fixed": 1.0})  # maybe a tree
    ranks_of = [
        {"ranks": list(range(4 * i, 4 * i + 4)), "memory_gib": 1000.0 + i} for i in range(hosts)
    ]
    links = [{"source": 0, "target": 4, "bandwidth": 4e10}]
    return {"timings": {"timings": rows, "links": links}, "hosts": ranks_of}


def test_a_report_of_the_doctor_has_the_links_by_hosts(tmp_path: Path) -> None:
    """Whatever they are, the file that is made of it has them."""
    table = {2: 180.0, 4: 100.0, 8: 60.0}
    between = replace(H100.between_hosts, bandwidth=table, latency=6e-5)
    true = replace(H100, between_hosts=between)
    report = tmp_path / "doctor.json"
    report.write_text(json.dumps({"seen": seen_by_doctor(true)}))
    seen = calibrate.with_links(H100, report)
    assert seen.between_hosts.bandwidth == pytest.approx(table)
    assert seen.between_hosts.latency == pytest.approx(6e-5)
    assert seen.within_host.of_rank() == pytest.approx(360)
    assert seen.within_host.latency == pytest.approx(H100.within_host.latency)
    assert seen.host == replace(H100.host, memory_gib=1000.0)
    path = tmp_path / "mine.yaml"
    path.write_text(as_yaml(replace(seen, source="doctor.json")))
    assert load(str(path)).between_hosts.bandwidth == pytest.approx(table)
    # Where no collective was timed, pairs of ranks tell.
    report.write_text(json.dumps({"seen": seen_by_doctor(true) | {"timings": {
        "timings": [], "links": [{"source": 0, "target": 4, "bandwidth": 4e10}]}}}))  # fmt: skip
    assert calibrate.with_links(H100, report).between_hosts.bandwidth == 40


def test_calibrate_reads_runs_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "doctor.json"
    report.write_text(json.dumps({"seen": seen_by_doctor(H100)}))
    of_report = calibrate.calibrate([str(report)], H100)
    assert of_report.within_host == replace(H100.within_host, latency=ANY)
    assert of_report.within_host.latency == pytest.approx(H100.within_host.latency)
    monkeypatch.setattr(MeasuredRun, "foresee", lambda run, hardware: RUNS[0](hardware))
    run = folder_of_run(tmp_path / "x")
    both = calibrate.calibrate([str(run), str(report)], H100)
    assert both.within_host == of_report.within_host
    assert both.compute.matmul < H100.compute.matmul
    assert both.device.usable == 0.75
    assert both.source == f"measured by {run}, {report}"
    report.write_text('{"status": "ok"}')
    with pytest.raises(InputError, match="is not what `meshtrain doctor --json` prints"):
        calibrate.calibrate([str(report)], H100)
