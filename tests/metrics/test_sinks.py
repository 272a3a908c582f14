"""Sinks get what metrics.jsonl gets; one that raises, hangs or is slow neither ends the run nor
holds it."""

import re
import socket
import struct
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import yaml
from prometheus_client import generate_latest
from rich.console import Console

from meshtrain.config import Config, ConfigErrors, schema
from meshtrain.errors import InputError
from meshtrain.metrics import sink_threads, sinks
from meshtrain.metrics.logger import Metrics
from meshtrain.metrics.sink_threads import Make, SinkThreads, find_sinks
from meshtrain.metrics.sinks import Prometheus, Sink, SinkRun
from tests.launching import free_port

HERE = Path(__file__).parent
ROW = {
    "step": 1,
    "loss": 2.5,
    "lr": 1e-3,
    "mfu": None,
    "samples_digest": "00ff",
    "sent_bytes_tp": 3,
    "step_time_s": 0.5,
}


def run_of(folder: Path, **more: Any) -> SinkRun:
    return SinkRun("quickstart", folder, 4, **more)


def config(*names: str, **options: Any) -> schema.MetricsSection:
    return schema.MetricsSection(sinks=names, sink_options=options)


def hand_on(
    folder: Path, makers: Mapping[str, Callable[[SinkRun], Sink]], status: str = "done", **more: Any
) -> Metrics:
    """Two rows, an evaluation, a message and an epoch, handed on to the end."""
    threads = SinkThreads(makers, run_of(folder, **more))
    metrics = Metrics(
        folder, task="language", steps=4, sinks=threads, console=Console(file=StringIO())
    )
    metrics.row(ROW)
    metrics.row(ROW | {"step": 2})
    metrics.evaluation(2, {"eval_loss": 2.0, "perplexity": 7.4})
    metrics.say("rank 1 is slow")
    metrics.epoch(1, {"loss": 2.5})
    metrics.close()
    threads.close(status)
    threads.close("failed")  # the run ends once
    return metrics


def refuse(run: SinkRun) -> Sink:
    raise SystemExit("no network")


def test_a_sink_gets_all_in_order_in_a_thread_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that cannot be made is left out, and the others are not."""
    sink, threads = Mock(spec=Sink, close_s=60.0), []

    def make(run: SinkRun) -> Sink:
        threads.append(threading.current_thread())
        return sink

    hand_on(tmp_path, {"bad": refuse, "notes": make}, "stopped")
    assert threads != [threading.main_thread()]
    assert sink.mock_calls == [
        call.row(ROW),
        call.row(ROW | {"step": 2}),
        call.evaluation(2, {"eval_loss": 2.0, "perplexity": 7.4}),
        call.event("message", {"text": "rank 1 is slow"}),
        call.event("epoch", {"epoch": 1, "loss": 2.5}),
        call.close("stopped"),
    ]
    assert (
        capfd.readouterr().err.count("bad is left out; the run goes on (SystemExit: no network)")
        == 1
    )


def test_what_a_sink_raises_is_said_once_and_what_comes_later_reaches_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sink = Mock(spec=Sink, close_s=60.0)
    sink.row.side_effect = ValueError("no")
    hand_on(tmp_path, {"notes": lambda run: sink})
    sink.evaluation.assert_called_once()
    err = capfd.readouterr().err
    warning = "notes has not taken something; the run goes on (ValueError: no)"
    assert err.count("metrics.sinks") == err.count(warning) == 1


@pytest.mark.parametrize(
    ("hangs", "warning"),
    [
        (True, "slow has not ended within 0.2 s"),
        (False, "slow was too slow: 7 of the rows and events did not reach it"),
    ],
)
def test_a_sink_that_hangs_holds_nobody_and_rows_that_a_slow_one_missed_are_counted(
    hangs: bool,
    warning: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on, begun = threading.Event(), threading.Event()

    class Slow(Sink):
        close_s = 0.2 if hangs else 60.0

        def row(self, values: dict[str, Any]) -> None:
            begun.set()
            goes_on.wait()

    monkeypatch.setattr(sink_threads, "MOST_WAITING", 3)
    threads = SinkThreads({"slow": Slow}, run_of(tmp_path))
    threads.tell("row", ROW)
    begun.wait()
    for _ in range(10):
        threads.tell("row", ROW)
    if not hangs:
        goes_on.set()
    threads.close("done")
    assert warning in capfd.readouterr().err
    goes_on.set()


def prometheus(**options: Any) -> dict[str, Make]:
    return {"prometheus": lambda run: Prometheus(run, **options)}


def text_of(sink: Prometheus) -> str:
    return generate_latest(sink.registry).decode()


def values_in(text: str) -> dict[str, float]:
    return {
        match[1]: float(match[2])
        for match in re.finditer(r"^(\w+\{.*\}) (\S+)$", text, re.MULTILINE)
    }


def of_run(name: str, more: str = "") -> str:
    return f'meshtrain_{name}{{run="quickstart"{more}}}'


def of_status(status: str) -> str:
    return of_run("status", f',status="{status}"')


def test_prometheus_text_file(tmp_path: Path) -> None:
    hand_on(tmp_path, prometheus(every_s=0))
    values = values_in((tmp_path / "metrics.prom").read_text())
    assert values.pop(of_run("step_timestamp_seconds")) <= time.time()
    expected = {
        "steps": 4,
        "step": 2,
        "loss": 2.5,
        "lr": 1e-3,
        "sent_bytes_tp": 3,
        "step_time_s": 0.5,
    }
    expected |= {"eval_loss": 2.0, "perplexity": 7.4, "eval_step": 2}
    statuses = {
        status: float(status == "done") for status in ("running", "done", "stopped", "failed")
    }
    assert values == {of_run(name): value for name, value in expected.items()} | {
        of_status(status): value for status, value in statuses.items()
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.prom"]


def test_prometheus_names_and_values_that_need_care(tmp_path: Path) -> None:
    sink = Prometheus(SinkRun('a "b" \\ c', tmp_path, 4))
    sink.row({"step": 1, "loss": float("nan"), "mean/a-b": float("inf"), "x": -float("inf")})
    lines = text_of(sink).splitlines()
    label = '{run="a \\"b\\" \\\\ c"}'
    assert {
        f"meshtrain_loss{label} NaN",
        f"meshtrain_mean_a_b{label} +Inf",
        f"meshtrain_x{label} -Inf",
    } < set(lines)


def test_prometheus_writes_seldom_and_the_last_row_for_sure(tmp_path: Path) -> None:
    def values() -> list[float]:
        now = values_in((tmp_path / "metrics.prom").read_text())
        return [now[of_run("step")], now[of_status("failed")]]

    sink = Prometheus(run_of(tmp_path), every_s=1000)
    sink.row(ROW | {"step": 3})
    assert values() == [0, 0]
    sink.close("failed")
    assert values() == [3, 1]


def test_prometheus_over_http_until_the_run_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Who asks and goes leaves the terminal alone."""
    port = free_port()
    page = f"http://127.0.0.1:{port}/metrics"
    # Servers of other tests in this process may keep theirs for as long as a client holds on.
    threads_before = set(threading.enumerate())
    sink = Prometheus(run_of(tmp_path), port=port)
    sink.row(ROW)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"GET /met")
        # closed by a reset
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with urllib.request.urlopen(page, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert answer.read().decode() == text_of(sink)
    for thread in set(threading.enumerate()) - threads_before:
        if "process_request_thread" in thread.name:
            thread.join(60)
    sink.close("done")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(page, timeout=60)
    assert capfd.readouterr().err == ""


def test_a_port_that_is_taken_leaves_the_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        hand_on(tmp_path, prometheus(port=taken.getsockname()[1], every_s=0))
    assert 'meshtrain_step{run="quickstart"} 2' in (tmp_path / "metrics.prom").read_text()
    assert capfd.readouterr().err.count("prometheus cannot listen on 127.0.0.1:") == 1


def fake_wandb(monkeypatch: pytest.MonkeyPatch, first_step: int = 0) -> Mock:
    """In place of the package, which begins one run; `first_step`: the first one that the run
    takes."""
    wandb = Mock(Settings=dict)
    wandb.init.return_value = Mock(step=first_step)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return wandb


def test_wandb_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fake_wandb(monkeypatch)
    hand_on(
        tmp_path,
        {"wandb": lambda run: sinks.Wandb(run, project="p", mode="offline")},
        "stopped",
        config={"a": {}},
    )
    numbers = {
        "train/loss": 2.5,
        "train/lr": 1e-3,
        "train/sent_bytes_tp": 3,
        "time/step_time_s": 0.5,
    }
    evaluation = call.log({"validation/loss": 2.0, "validation/perplexity": 7.4}, step=2)
    rows = [call.log(numbers, step=step) for step in (1, 2)]
    stopped = [call.mark_preempting(), call.finish(exit_code=0)]
    assert first.init.return_value.mock_calls == [*rows, evaluation, *stopped]
    second = fake_wandb(monkeypatch, first_step=2)
    (tmp_path / "metrics.jsonl").unlink()
    hand_on(tmp_path, {"wandb": sinks.Wandb}, "failed", step=1)
    assert second.init.return_value.mock_calls == [rows[1], evaluation, call.finish(exit_code=1)]
    begun, again = first.init.call_args.kwargs, second.init.call_args.kwargs
    assert begun["id"] == again["id"]
    expected = {"resume": "allow", "mode": "offline", "project": "p", "config": {"a": {}}}
    assert begun | expected == begun


def test_a_package_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sink_threads.importlib.util, "find_spec", lambda name: None)
    for name in sinks.OWN:
        with pytest.raises(InputError, match=rf"pip install 'meshtrain\[{name}\]'"):
            find_sinks(config(name))


OWN = """
from meshtrain.metrics.sinks import Sink
class Mine(Sink):
    def __init__(self, run, *, file, often=1):
        self.file, self.run = file, run
    def close(self, status):
        open(self.file, "w").write(f"{self.run.name} {status}")
class Other: pass
"""


def test_a_sink_of_the_users_own_and_wrong_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    hand_on(
        tmp_path,
        find_sinks(config("mine.py:Mine", **{"mine.py:Mine": {"file": "written"}})),
        "failed",
    )
    assert (tmp_path / "written").read_text() == "quickstart failed"
    for case in yaml.safe_load((HERE / "sink_refusals.yaml").read_text()):
        with pytest.raises(InputError, match=case["text"]):
            find_sinks(config(case["sink"], **{case["sink"]: case["options"]}))


def load(*overrides: str) -> schema.MetricsSection:
    return Config.load("configs/quickstart.yaml", overrides).metrics


def test_sinks_in_a_config() -> None:
    metrics = load(
        "metrics.sinks=[prometheus, my.py:Sink]", "metrics.sink_options={prometheus: {port: 9400}}"
    )
    assert metrics.sink_options == {"prometheus": {"port": 9400}}
    assert metrics.sinks == ("prometheus", "my.py:Sink")
    assert set(schema.SINKS) == set(sinks.OWN)
    for override, problem in (
        ("metrics.sinks=[promtheus]", "there is no sink 'promtheus': name prometheus"),
        ("metrics.sink_options={wandb: {project: a}}", "wandb, which is not among metrics.sinks"),
    ):
        with pytest.raises(ConfigErrors, match=problem):
            load(override)


def test_dashboard_and_alerts_name_metrics_that_a_run_has(tmp_path: Path) -> None:
    """The fields of docs/metrics.md are what a run writes: the names come from there, and from the
    sink itself."""
    fields = set(
        re.findall(
            r"`(\w+)`",
            "".join(re.findall(r"^\| .*? \|", Path("docs/metrics.md").read_text(), re.M)),
        )
    )
    fields |= set(re.findall(r"`(wall_\w+_s|goodput|wall_s)`", Path("docs/metrics.md").read_text()))
    sink = Prometheus(run_of(tmp_path))
    sink.row(ROW | dict.fromkeys(fields - {"step"}, 1.0))
    sink.evaluation(1, {"eval_loss": 1.0})
    written = set(re.findall(r"^# TYPE (\w+)", text_of(sink), re.MULTILINE))
    for name in ("grafana.json", "alerts.yml"):
        text = (Path("tools/monitoring") / name).read_text()
        rules = "".join(re.findall(r'(?:expr: |"expr": |"query": ).*', text))
        named = set(re.findall(r"meshtrain_\w+", rules))
        assert len(named) > 5
        assert named - written == set()
