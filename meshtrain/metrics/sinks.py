"""Sinks pass what a run measures on to Prometheus, W&B, MLflow, TensorBoard, or a class of the
user's own.

docs/monitoring.md shows how to write one. `sink_threads.py` runs them beside training.
"""

import os
import re
import time
import uuid
import wsgiref.simple_server
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from meshtrain.errors import flat_items
from meshtrain.job.storage import read_guarded, warn, write_whole

if TYPE_CHECKING:
    import prometheus_client

STATUSES = ("running", "done", "stopped", "failed")


@dataclass(frozen=True)
class SinkRun:
    """The run that a sink is told about."""

    name: str  # of the config
    folder: Path
    steps: int  # of the whole run
    step: int = 0  # from which this job resumes; an earlier job may have reported later ones
    config: Mapping[str, Any] | None = None  # section -> key -> value


class Sink:
    """The calls that a sink receives; it implements those that it needs. All run in the sink's own
    thread, also the constructor, which gets the run and the options of the config: `__init__(self,
    run, *, port: int = 9400)`."""

    # the package that it imports, without which the config is refused
    package: ClassVar[str | None] = None
    close_s: ClassVar[float] = 5.0  # how long the end of the run waits for it

    def __init__(self, run: SinkRun) -> None:
        self.run = run

    def row(self, values: dict[str, Any]) -> None:
        """A step is done: `step` and its numbers and texts, under the names in docs/metrics.md."""

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        """The evaluation after `step`, whose row was the last."""

    def event(self, kind: str, values: dict[str, Any]) -> None:
        """`epoch`: `epoch`, `loss`, and `accuracy` for a classifier. `message`: `text`, which the
        terminal shows."""

    def close(self, status: str) -> None:
        """The run ends: "done", "stopped" or "failed", as in exit.json."""


class _Curves(Sink):
    """A sink that draws a curve of each number, under a tag."""

    def row(self, values: dict[str, Any]) -> None:
        curves = {_tag(name): value for name, value in values.items() if name != "step"}
        self.add(values["step"], _numbers(curves))

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        curves = {
            f"validation/{name.removeprefix('eval_')}": value for name, value in values.items()
        }
        self.add(step, _numbers(curves))

    def add(self, step: int, values: dict[str, float]) -> None:
        raise NotImplementedError


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


class TensorBoard(_Curves):
    """Event files in `tensorboard/` of the run's folder."""

    package = "tensorboard"

    def __init__(self, run: SinkRun) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second of imports, only if it is used

        # Values that an earlier job wrote for steps that are repeated are hidden, as metrics.jsonl
        # drops them.
        purge = run.step + 1 if run.step else None
        self._writer = SummaryWriter(
            str(run.folder / "tensorboard"), purge_step=purge, flush_secs=10
        )

    def add(self, step: int, values: dict[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self, status: str) -> None:
        self._writer.close()


class Wandb(_Curves):
    """One run of W&B, which keeps its id over restarts of the job: the file `wandb_id` in the run's
    folder."""

    package = "wandb"
    close_s = 30.0

    def __init__(
        self,
        run: SinkRun,
        *,
        project: str = "meshtrain",
        entity: str | None = None,
        name: str | None = None,
        mode: str | None = None,
    ) -> None:
        """`mode`: online, offline or disabled; None: the value of WANDB_MODE."""
        import wandb

        file = run.folder / "wandb_id"
        if not file.exists():
            write_whole(file, uuid.uuid4().hex[:12])
        config = None if run.config is None else dict(run.config)
        self._run = wandb.init(
            project=project,
            entity=entity,
            name=name or run.name,
            resume="allow",
            id=read_guarded(file).decode().strip(),
            dir=str(run.folder),
            mode=cast(Any, mode),
            config=config,
            settings=wandb.Settings(console="off"),
        )

    def add(self, step: int, values: dict[str, float]) -> None:
        if step >= self._run.step:  # it has the steps before from an earlier job, and rejects them
            self._run.log(values, step=step)

    def close(self, status: str) -> None:
        if status == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=1 if status == "failed" else 0)


class MLflow(_Curves):
    """One run of MLflow, which goes on over restarts of the job: the file `mlflow_id` in the run's
    folder has its id. MLflow would keep two values of a step that is repeated after a failure; it
    gets the first alone, as W&B does."""

    package = "mlflow"
    close_s = 30.0
    _STATUSES: ClassVar = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

    def __init__(
        self,
        run: SinkRun,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        name: str | None = None,
    ) -> None:
        """`tracking_uri` None: the value of MLFLOW_TRACKING_URI; `experiment` None: that of
        MLFLOW_EXPERIMENT_NAME, or `meshtrain`."""
        from mlflow import MlflowClient, entities  # only if it is used

        self._entities = entities
        self._client = MlflowClient(tracking_uri=tracking_uri)
        self._id_file = run.folder / "mlflow_id"
        self._last: dict[str, int] = {}  # name of a metric -> its last step
        experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "meshtrain"
        known = self._known_run()
        self._goes_on = known is not None
        if known is None:
            known = self._client.create_run(
                self._experiment_id(experiment), run_name=name or run.name
            )
            write_whole(self._id_file, known.info.run_id)
        else:
            self._client.update_run(known.info.run_id, status="RUNNING")
        self._id = known.info.run_id
        self._log_config(run.config or {}, known.data.params)

    def _known_run(self) -> Any:
        """The run that an earlier job has begun; None: there is none, or the server does not have
        it."""
        from mlflow.exceptions import MlflowException

        try:
            identity = read_guarded(self._id_file).decode().strip()
        except FileNotFoundError:
            return None
        try:
            return self._client.get_run(identity)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            warn(f"metrics.sinks: mlflow has no run {identity} there: a new one begins")
            return None

    def _experiment_id(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        try:
            return self._client.create_experiment(name)
        except MlflowException:  # another run has just made it
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return found.experiment_id

    def _log_config(self, config: Mapping[str, Any], there: Mapping[str, str]) -> None:
        """The config as parameters, without those that are there: MLflow refuses another value."""
        parameters = []
        for key, value in flat_items(config):
            if key not in there:
                parameters.append(self._entities.Param(_mlflow_name(key), str(value)[:500]))
        for first in range(0, len(parameters), 100):  # as many as a request may have
            self._client.log_batch(self._id, params=parameters[first : first + 100])

    def add(self, step: int, values: dict[str, float]) -> None:
        now_ms = int(1000 * time.time())
        metrics = []
        for tag, value in values.items():
            name = _mlflow_name(tag)
            if step > self._last_step(name):
                metrics.append(self._entities.Metric(name, float(value), now_ms, step))
                self._last[name] = step
        if metrics:
            self._client.log_batch(self._id, metrics=metrics)

    def _last_step(self, name: str) -> int:
        """The last step of which the run has this metric; -1: of none."""
        if name not in self._last:
            history = self._client.get_metric_history(self._id, name) if self._goes_on else []
            self._last[name] = max((metric.step for metric in history), default=-1)
        return self._last[name]

    def close(self, status: str) -> None:
        self._client.set_terminated(self._id, self._STATUSES[status])


def _mlflow_name(name: str) -> str:
    """A name that every MLflow takes."""
    return re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII)


class Prometheus(Sink):
    """The latest values in Prometheus' text format: in a file for node_exporter's textfile
    collector, and with a `port` also over HTTP at `/metrics` as long as the run lasts."""

    package = "prometheus_client"

    def __init__(
        self,
        run: SinkRun,
        *,
        textfile: str | None = None,
        port: int | None = None,
        bind: str = "127.0.0.1",
        every_s: float | int = 5,
    ) -> None:
        """`textfile`: None: `metrics.prom` in the run's folder; written at most every `every_s`
        seconds."""
        import prometheus_client  # only if it is used

        self._client = prometheus_client
        self.registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, prometheus_client.Gauge] = {}
        self._run = run.name
        self._file = run.folder / "metrics.prom"
        if textfile is not None:
            self._file = Path(textfile).expanduser()
        self._every_s = every_s
        self._written = 0.0
        self._server: wsgiref.simple_server.WSGIServer | None = None

        self._set({"steps": run.steps, "step": run.step})
        self._set_status("running")
        try:
            if port is not None:
                self._server, _ = prometheus_client.start_http_server(port, bind, self.registry)
                # A client that has gone must not leave its traceback on the terminal.
                self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        except (OSError, OverflowError) as error:  # the file still works
            warn(
                f"metrics.sinks: prometheus cannot listen on {bind}:{port} ({error}); it writes "
                f"{self._file} alone"
            )
        self._write()

    def row(self, values: dict[str, Any]) -> None:
        self._set({**values, "step_timestamp_seconds": time.time()})
        self._write_if_due()

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        self._set({**values, "eval_step": step})
        self._write_if_due()

    def close(self, status: str) -> None:
        self._set_status(status)
        try:
            self._write()
        finally:
            if self._server is not None:
                self._server.shutdown()
                self._server.server_close()

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                metric = "meshtrain_" + re.sub(r"\W", "_", name, flags=re.ASCII)
                about = f"The last {name} of metrics.jsonl"
                self._gauge(metric, about, "run").labels(self._run).set(value)

    def _set_status(self, status: str) -> None:
        gauge = self._gauge("meshtrain_status", "How the run goes, or has ended", "run", "status")
        for each in STATUSES:
            gauge.labels(self._run, each).set(int(each == status))

    def _gauge(self, metric: str, about: str, *labels: str) -> "prometheus_client.Gauge":
        if metric not in self._gauges:
            gauge = self._client.Gauge(metric, about, labels, registry=self.registry)
            self._gauges[metric] = gauge
        return self._gauges[metric]

    def _write_if_due(self) -> None:
        if time.monotonic() - self._written >= self._every_s:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        write_whole(self._file, self._client.generate_latest(self.registry))


def _tag(name: str) -> str:
    if name.startswith(("time_", "step_time", "wall_")):
        return f"time/{name.removeprefix('time_')}"
    return f"train/{name}"


OWN: dict[str, type[Sink]] = {
    "mlflow": MLflow,
    "prometheus": Prometheus,
    "tensorboard": TensorBoard,
    "wandb": Wandb,
}
