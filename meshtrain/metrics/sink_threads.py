"""Threads of the sinks, beside training: each sink runs in its own, behind a bounded queue.

A sink never ends a run or slows it down. Its errors are reported once; a sink that hangs is left
behind.
"""

import importlib.util
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, get_type_hints

from meshtrain.errors import InputError
from meshtrain.job import locate
from meshtrain.job.storage import warn
from meshtrain.metrics.sinks import OWN, Sink, SinkRun

if TYPE_CHECKING:
    from meshtrain.config.schema import MetricsSection

# for which the end of a run waits for a sink under construction: imports take long on a busy host
START_S = 30.0
MOST_WAITING = 1000  # calls in a sink's queue; further ones are dropped

Make = Callable[[SinkRun], Sink]


class SinkThreads:
    """Passes each call on to every sink, and waits for none of them before the end."""

    def __init__(self, makers: Mapping[str, Make], run: SinkRun) -> None:
        """`makers`: from `find_sinks`. They are called in the threads, as a sink may open a
        connection."""
        self._closing = threading.Lock()
        self._threads = [_SinkThread(name, make, run) for name, make in makers.items()]

    def tell(self, method: str, *arguments: Any) -> None:
        """Queues a call of a method of every sink."""
        for sink in self._threads:
            sink.call(method, *arguments)

    def close(self, status: str, limit_s: float = float("inf")) -> None:
        """Closes all sinks, and waits as long as the slowest of them may take, but no longer than
        `limit_s`. Later calls return at once."""
        if not self._closing.acquire(blocking=False):
            return
        # All end at the same time, so that the slowest of them decides how long this takes.
        begin = time.monotonic()
        for sink in self._threads:
            sink.end(status)
        for sink in self._threads:
            wait_s = min(sink.close_s, limit_s)
            sink.thread.join(max(0.0, begin + wait_s - time.monotonic()))
            if sink.thread.is_alive():
                warn(
                    f"metrics.sinks: {sink.name} has not ended within {wait_s:g} s; what it has "
                    "not taken is lost"
                )
            elif sink.lost:
                warn(
                    f"metrics.sinks: {sink.name} was too slow: {sink.lost} of the rows and events "
                    "did not reach it"
                )


class _SinkThread:
    def __init__(self, name: str, make: Make, run: SinkRun) -> None:
        self.name = name
        self._make = make
        self._run = run
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(MOST_WAITING)
        self._status: str | None = None  # of the run, once it ends
        self.close_s = START_S  # until the sink is there, which has a limit of its own
        self.lost = 0  # calls for which the queue had no room
        self._warned = False
        self.thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self.thread.start()

    def call(self, method: str, *arguments: Any) -> None:
        if not self.thread.is_alive():  # the sink could not be made
            return
        try:
            self._calls.put_nowait((method, arguments))
        except queue.Full:
            self.lost += 1

    def end(self, status: str) -> None:
        self._status = status
        with suppress(queue.Full):  # then its thread is awake
            self._calls.put_nowait(("", ()))

    def _work(self) -> None:
        with self._warns_of_errors("is left out"):
            sink = self._make(self._run)
            self.close_s = sink.close_s
            while self._status is None or not self._calls.empty():
                method, arguments = self._calls.get()
                with self._warns_of_errors("has not taken something"):
                    if method:
                        getattr(sink, method)(*arguments)
            sink.close(self._status)

    @contextmanager
    def _warns_of_errors(self, problem: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            if not self._warned:
                self._warned = True
                warn(
                    f"metrics.sinks: {self.name} {problem}; the run goes on "
                    f"({type(error).__name__}: {error})"
                )


def find_sinks(config: "MetricsSection") -> dict[str, Make]:
    """The constructor of each sink; none is called yet. Raises InputError: a sink does not exist,
    is not installed, or takes other options."""
    return {
        name: _find(name, config.sink_options.get(name, {})) for name in dict.fromkeys(config.sinks)
    }


def _find(name: str, options: Mapping[str, Any]) -> Make:
    kind = _class(name)
    if kind.package is not None and importlib.util.find_spec(kind.package) is None:
        install = f"meshtrain[{name}]" if name in OWN else kind.package
        raise InputError(
            f"metrics.sinks: {name} needs the package {kind.package}, which is not installed: "
            f"pip install '{install}', or take {name} out of metrics.sinks"
        )
    _check_options(name, kind, options)
    return lambda run: kind(run, **options)


def _check_options(name: str, kind: type[Sink], options: Mapping[str, Any]) -> None:
    signature = inspect.signature(kind)
    try:
        signature.bind(None, **options)
    except TypeError as error:
        known = ", ".join(list(signature.parameters)[1:])
        raise InputError(
            f"metrics.sink_options.{name}: {error}; its options are: {known or 'none'}"
        ) from error
    if name not in OWN:  # the annotations of a user's class may mean anything
        return
    hints = get_type_hints(kind.__init__)
    for option, value in options.items():
        if not isinstance(value, hints[option]) or isinstance(value, bool):
            expected = inspect.formatannotation(hints[option])
            raise InputError(
                f"metrics.sink_options.{name}.{option}: expected {expected}, found {value!r}"
            )


def _class(name: str) -> type[Sink]:
    if name in OWN:
        return OWN[name]
    path, _, attribute = name.rpartition(":")
    kind = getattr(locate.users_file("metrics.sinks", path), attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, Sink)):
        raise InputError(
            f"metrics.sinks: {path} has no class {attribute} that is a "
            "meshtrain.metrics.sinks.Sink: docs/monitoring.md has an example"
        )
    return kind
