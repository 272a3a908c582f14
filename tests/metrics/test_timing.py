"""Every second of a step belongs to one phase, and measuring never waits for the device."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshtrain.metrics import step_timer
from meshtrain.metrics.step_timer import PHASES, StepTimer, memory_gib
from tests.properties import given, st

CPU = torch.device("cpu")


class FakeMarks:
    """Time passes only when a test says so; keeps count of the marks that are out."""

    def __init__(self) -> None:
        self.time = 0.0
        self.waiting = 0.0  # for a core
        self.out = 0
        self.waited: list[float] = []

    def spend(self, seconds: float, waiting: float = 0.0) -> None:
        self.time += seconds
        self.waiting += waiting

    def now(self) -> float:
        self.out += 1
        return self.time

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def wait(self, mark: float) -> None:
        self.waited.append(mark)

    def give_back(self, marks: list[float]) -> None:
        self.out -= len(marks)

    def queued(self) -> float:
        return self.waiting


@pytest.fixture
def marks() -> FakeMarks:
    return FakeMarks()


@pytest.fixture
def clock(marks: FakeMarks) -> StepTimer:
    return StepTimer(CPU, marks)


def phases(times: dict[str, float] | None) -> dict[str, float]:
    return {name: times[f"time_{name}_s"] for name in PHASES}


Tree = st.recursive(
    st.tuples(st.sampled_from(PHASES), st.integers(0, 9), st.just([])),
    lambda inner: st.tuples(
        st.sampled_from(PHASES), st.integers(0, 9), st.lists(inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.lists(Tree, max_size=4))
def test_any_nesting_adds_up(trees: list) -> None:
    marks = FakeMarks()
    clock = StepTimer(CPU, marks)
    expected = dict.fromkeys(PHASES, 0.0)

    def walk(tree: tuple) -> None:
        name, seconds, inner = tree
        with clock.phase(name):
            marks.time += seconds
            expected[name] += seconds
            for each in inner:
                walk(each)
                marks.time += seconds
                expected[name] += seconds

    for tree in trees:
        marks.time += 7
        walk(tree)
    clock.end_step()
    assert phases(clock.pop()) == expected
    assert marks.out == 1, "that of the step that has begun"


def test_steps_come_out_in_order_and_only_pop_waits(clock: StepTimer, marks: FakeMarks) -> None:
    assert clock.pop() is None
    for seconds in (1, 2):
        with clock.phase("forward"):
            marks.time += seconds
        clock.end_step()
    assert marks.waited == []
    assert phases(clock.pop())["forward"] == 1
    assert marks.waited == [1.0]  # for the end of the first step, not of the second
    assert phases(clock.pop())["forward"] == 2
    assert clock.pop() is None


def test_a_rank_that_never_asks_collects_nothing(clock: StepTimer, marks: FakeMarks) -> None:
    for _ in range(100):
        with clock.phase("data"):
            marks.time += 1
        clock.end_step()
    assert marks.out <= 4 * 4 + 1, "four steps of four marks each, and the beginning of the next"


def test_own_time_is_all_but_the_waits_and_restart_forgets_what_was_no_step(
    clock: StepTimer, marks: FakeMarks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the waits for a core those in the rank's own time count."""
    monkeypatch.setattr(step_timer, "time", SimpleNamespace(perf_counter=lambda: marks.time))
    clock.restart()
    with clock.phase("backward"):
        marks.spend(1, waiting=2)
        with clock.phase("communication"):
            marks.spend(10, waiting=100)
        marks.spend(2, waiting=4)
    marks.spend(20, waiting=1)  # between two phases
    clock.end_step()
    marks.spend(3)  # between two steps, in the second
    with clock.phase("forward"):
        marks.spend(4)
    clock.end_step()
    marks.spend(50, waiting=50)  # an evaluation
    clock.restart()
    marks.spend(0, waiting=8)
    with clock.phase("communication"):
        marks.spend(6)
    clock.end_step()
    steps = list(iter(clock.pop, None))
    names = ("time_own_s", "time_queued_s", "step_time_s")
    assert [[step[name] for name in names] for step in steps] == [[23, 7, 33], [7, 0, 7], [0, 8, 6]]


def test_a_phase_in_which_waits_hide_is_not_its_own(marks: FakeMarks) -> None:
    clock = StepTimer(CPU, marks, hiding=("forward",))
    for name, seconds in (("data", 1), ("forward", 10), ("optimizer", 2)):
        with clock.phase(name):
            marks.spend(seconds, waiting=seconds)
            with clock.phase("communication"):
                marks.spend(0, waiting=100)
            marks.spend(0, waiting=seconds)
    clock.end_step()
    times = clock.pop()
    assert (times["time_own_s"], times["time_forward_s"], times["time_queued_s"]) == (3, 10, 6)


def test_a_step_ends_outside_of_all_phases(clock: StepTimer) -> None:
    with clock.phase("forward"):
        with pytest.raises(RuntimeError, match="forward"):
            clock.end_step()
        with pytest.raises(RuntimeError, match="forward"):
            clock.restart()
    with pytest.raises(KeyError), clock.phase("lunch"):
        pass
    with pytest.raises(ZeroDivisionError), clock.phase("forward"), clock.phase("communication"):
        _ = 1 / 0
    clock.end_step()  # the error has closed them


def test_a_phase_may_be_entered_from_the_thread_of_a_backward(
    clock: StepTimer, marks: FakeMarks
) -> None:
    def hook() -> None:
        with clock.phase("communication"):
            marks.time += 3

    with clock.phase("backward"):
        marks.time += 1
        thread = threading.Thread(target=hook)
        thread.start()
        thread.join()
    clock.end_step()
    times = phases(clock.pop())
    assert (times["backward"], times["communication"]) == (1, 3)


def test_on_the_hosts_own_counter() -> None:
    clock = StepTimer(CPU)
    with clock.phase("forward"):
        time.sleep(0.02)
        with clock.phase("communication"):
            time.sleep(0.01)
    clock.end_step()
    times = clock.pop()
    assert times["time_forward_s"] >= 0.02
    assert times["time_communication_s"] >= 0.01
    assert sum(phases(times).values()) <= times["step_time_s"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: measures with CUDA events")
def test_on_cuda_events() -> None:
    clock = StepTimer(torch.device("cuda"))
    matrix = torch.rand(4096, 4096, device="cuda")
    for _ in range(3):
        with clock.phase("forward"):
            for _ in range(20):
                matrix = matrix @ matrix.softmax(0)
        with clock.phase("optimizer"):
            pass
        clock.end_step()
    torch.cuda.synchronize()
    times = [clock.pop() for _ in range(3)]
    last = times[-1]
    assert last["time_forward_s"] > 10 * last["time_optimizer_s"] > 0


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux: compares with what /proc says"
)
def test_memory_is_the_processs_peak() -> None:
    block = torch.ones(2**26)  # 0.25 GiB, and touched
    (peak,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
    assert memory_gib(CPU) == pytest.approx(int(peak.split()[1]) * 1024 / 2**30, rel=0.05)
    assert memory_gib(CPU) * 2**30 > block.nbytes
