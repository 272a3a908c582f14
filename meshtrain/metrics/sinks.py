"""Sinks pass what a run measures on to Prometheus, W&B, TensorBoard, or a class of the user's own.

docs/monitoring.md shows how to write one. `sink_threads.py` runs them beside training.
"""

import http.server
import re
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from meshtrain.job.storage import read_guarded, warn, write_whole

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

    # the package that it imports, and the extra of meshtrain that installs it
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
    def row(self, values: dict[str, Any]) -> None:
        self._add_numbers(
            values["step"], {_tag(name): value for name, value in values.items() if name != "step"}
        )

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        self._add_numbers(
            step,
            {f"validation/{name.removeprefix('eval_')}": value for name, value in values.items()},
        )

    def _add_numbers(self, step: int, values: dict[str, Any]) -> None:
        self.add(
            step, {tag: value for tag, value in values.items() if isinstance(value, int | float)}
        )

    def add(self, step: int, values: dict[str, float]) -> None:
        raise NotImplementedError


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


class Prometheus(Sink):
    """The latest values in Prometheus' text format: in a file for node_exporter's textfile
    collector, and with a `port` also over HTTP at `/metrics` as long as the run lasts."""

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
        self._file = (
            run.folder / "metrics.prom" if textfile is None else Path(textfile).expanduser()
        )
        self._run, self._every_s, self._written, self._status = run.name, every_s, 0.0, "running"
        self._values: dict[str, Any] = {"steps": run.steps, "step": run.step}
        self._server: http.server.ThreadingHTTPServer | None = None
        try:
            if port is not None:
                self._server = _serve(self, bind, port)
        except (OSError, OverflowError) as error:  # the file still works
            warn(
                f"metrics.sinks: prometheus cannot listen on {bind}:{port} ({error}); it writes "
                f"{self._file} alone"
            )
        self._write()

    def row(self, values: dict[str, Any]) -> None:
        self._values |= values | {"step_timestamp_seconds": time.time()}
        self._write()

    def evaluation(self, step: int, values: dict[str, Any]) -> None:
        self._values |= values | {"eval_step": step}
        self._write()

    def close(self, status: str) -> None:
        self._status = status
        try:
            self._write()
        finally:
            if self._server is not None:
                self._server.shutdown()
                self._server.server_close()

    def text(self) -> str:
        """The text that Prometheus scrapes."""
        run = self._run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        lines = []
        for name, value in list(self._values.items()):
            if isinstance(value, int | float):
                metric = "meshtrain_" + re.sub(r"\W", "_", name, flags=re.ASCII)
                lines += [f"# TYPE {metric} gauge", f'{metric}{{run="{run}"}} {float(value)!r}']
        lines.append("# TYPE meshtrain_status gauge")
        for status in STATUSES:
            lines.append(
                f'meshtrain_status{{run="{run}",status="{status}"}} {int(status == self._status)}'
            )
        return "\n".join(lines) + "\n"

    def _write(self) -> None:
        if self._status != "running" or time.monotonic() - self._written >= self._every_s:
            self._written = time.monotonic()
            write_whole(self._file, self.text())


def _serve(sink: Prometheus, bind: str, port: int) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 10  # seconds for a request

        def handle(self) -> None:
            with suppress(ConnectionError):  # the client has gone: keep that off the terminal
                super().handle()

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            body = sink.text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Keeps requests off the terminal, too."""

    server = http.server.ThreadingHTTPServer((bind, port), Handler)
    threading.Thread(
        target=server.serve_forever, name="sink prometheus /metrics", daemon=True
    ).start()
    return server


def _tag(name: str) -> str:
    return (
        f"time/{name.removeprefix('time_')}"
        if name.startswith(("time_", "step_time", "wall_"))
        else f"train/{name}"
    )


OWN: dict[str, type[Sink]] = {"prometheus": Prometheus, "tensorboard": TensorBoard, "wandb": Wandb}
