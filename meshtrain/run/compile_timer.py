"""Compile time: how long torch.compile works in the phases of a run, and on how many graphs."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from meshtrain.errors import plural
from meshtrain.metrics.goodput import GoodputTracker
from meshtrain.parallel.torch_private import compile_callbacks, compiled_graphs


class CompileTimer:
    """Gives the time of this process's compiler to the goodput's `compile`, and says what it did and did anew."""

    def __init__(self, goodput: GoodputTracker, say: Callable[[str], None]) -> None:
        self._goodput, self._say = goodput, say
        self._again: set[str] = set()  # phases in which it has worked

    @contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Around a phase of the run: `step`, with its number, or what is between two steps."""
        seconds, before, work = 0.0, compiled_graphs(), ExitStack()

        def begin(event: object) -> None:
            work.enter_context(self._goodput.phase("compile"))
            work.callback(add, time.monotonic())

        def add(begun: float) -> None:
            nonlocal seconds
            seconds += time.monotonic() - begun

        with compile_callbacks(begin, lambda event: work.close()):
            yield
        graphs = compiled_graphs() - before
        if graphs > 0:
            reason = ", for other shapes or values (TORCH_LOGS=recompiles names them)" * (name in self._again)
            again = " again" * (name in self._again)
            label = name if step is None else f"{name} {step}"
            self._say(f"{label}: compiled {plural(graphs, 'graph')}{again} in {seconds:.1f} s{reason}")
            self._again.add(name)
