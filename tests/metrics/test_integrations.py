"""Sinks and the programs that read them, as they are: Prometheus' parser, W&B offline, promtool.
`make test-integrations`."""

import json
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from meshtrain.metrics import sink_threads
from meshtrain.metrics.sink_threads import SinkThreads
from meshtrain.metrics.sinks import MLflow, Wandb
from tests.metrics.test_sinks import ROW, hand_on, prometheus, run_of

pytestmark = pytest.mark.integrations
MONITORING = Path(__file__).resolve().parents[2] / "tools" / "monitoring"


def test_promtool_accepts_what_is_written_and_the_alerts_fire(tmp_path: Path) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("there is no promtool: apt-get install prometheus")
    hand_on(tmp_path, prometheus(every_s=0))
    text = (tmp_path / "metrics.prom").read_text()
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, text=True, timeout=60, check=False
    )
    assert done.returncode in (0, 3)  # 3: it can be read, and has no help texts
    subprocess.run([promtool, "check", "rules", MONITORING / "alerts.yml"], timeout=60, check=True)
    subprocess.run(
        [promtool, "test", "rules", MONITORING / "alerts_test.yml"], timeout=60, check=True
    )
    for panel in json.loads((MONITORING / "grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            rule = {"record": "a:b", "expr": target["expr"].replace("$run", "a")}
            (tmp_path / "rule.yml").write_text(
                json.dumps({"groups": [{"name": "a", "rules": [rule]}]})
            )
            subprocess.run(
                [promtool, "check", "rules", tmp_path / "rule.yml"], timeout=60, check=True
            )


def test_grafanas_own_models_hold_all_of_the_dashboard() -> None:
    """They are made from the schemas of its panels: what a schema does not have would be lost on
    the way back."""
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard").Dashboard
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    given = json.loads((MONITORING / "grafana.json").read_text())
    marked = deepcopy(given)
    for panel in marked["panels"]:
        panel["unknown"] = panel["fieldConfig"]["unknown"] = panel["options"]["unknown"] = True
    back = json.loads(JSONEncoder().encode(dashboard.from_json(marked)))
    assert held(marked, back) == given


def held(given: Any, back: Any) -> Any:
    """Of `back` what was given: it may have defaults besides."""
    if isinstance(given, dict) and isinstance(back, dict):
        return {key: held(value, back[key]) for key, value in given.items() if key in back}
    if isinstance(given, list) and isinstance(back, list):
        return [held(*pair) for pair in zip(given, back, strict=True)]
    return back


def test_wandb_offline_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(Wandb, "close_s", 120.0)
    for step, status in ((0, "stopped"), (2, "done")):
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        makers = {"wandb": lambda run: Wandb(run, project="p", mode="offline")}
        hand_on(tmp_path, makers, status, step=step, config={"train": {"steps": 4}})
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    identity = (tmp_path / "wandb_id").read_text()
    # A second run of the same second gets "-1" behind its id.
    assert {folder.name.split("-")[3] for folder in folders} == {identity}
    written = next(folders[0].glob("*.wandb")).read_bytes()
    assert all(
        name in written for name in (b"train/loss", b"validation/perplexity", b"time/step_time_s")
    )
    assert wandb.run is None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("store", ["sqlite", "file"])
def test_mlflow_keeps_one_run(
    store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Over a job that was stopped, and one that repeats its last step."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MLflow, "close_s", 240.0)
    monkeypatch.setattr(sink_threads, "START_S", 240.0)  # its imports take long on a busy machine
    uri = f"sqlite:///{tmp_path}/mlflow.db" if store == "sqlite" else f"file://{tmp_path}/store"
    makers = {"mlflow": lambda run: MLflow(run, tracking_uri=uri, experiment="tests")}
    config = {"train": {"steps": 4, "chaos": [{"fault": "kill"}]}, "data": {"path": None}}
    hand_on(tmp_path, makers, "stopped", config=config)
    client = mlflow.MlflowClient(tracking_uri=uri)
    identity = (tmp_path / "mlflow_id").read_text()
    assert client.get_run(identity).info.status == "KILLED"

    threads = SinkThreads(makers, run_of(tmp_path, step=1, config=config))
    threads.tell("row", ROW | {"step": 2, "loss": 9.0})
    threads.tell("row", ROW | {"step": 3, "loss": float("nan"), "source_loss/a:b": 1.0})
    threads.close("done")
    (experiment,) = [found for found in client.search_experiments() if found.name == "tests"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.status) == (identity, "FINISHED")
    assert run.data.params["train.steps"] == "4"
    history = client.get_metric_history(identity, "train/loss")
    assert [metric.step for metric in history] == [1, 2, 3]
    assert [metric.value for metric in history[:2]] == [2.5, 2.5]
    assert run.data.metrics["validation/perplexity"] == 7.4
    assert run.data.metrics["train/source_loss/a_b"] == 1.0
    assert "metrics.sinks" not in capfd.readouterr().err


def test_mlflow_without_its_server_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(sink_threads, "START_S", 240.0)
    hand_on(tmp_path, {"mlflow": lambda run: MLflow(run, tracking_uri="http://127.0.0.1:9")})
    assert "metrics.sinks: mlflow is left out; the run goes on" in capfd.readouterr().err
