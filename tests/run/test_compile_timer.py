"""The time of torch.compile in a run: it is a part of the wall time, and what is compiled anew is said."""

import torch
from torch import Tensor

from meshtrain.metrics.goodput import GoodputTracker
from meshtrain.run.phase_monitor import CompileTimer


def test_the_time_of_the_compiler_is_no_training() -> None:
    torch.compiler.reset()
    printed: list[str] = []
    goodput = GoodputTracker(None, 0, 0.0)
    goodput.begin()
    timer = CompileTimer(goodput, printed.append)

    def double(x: Tensor) -> Tensor:
        return (2 * x).sum()

    run = torch.compile(double, backend="aot_eager", dynamic=False)
    for step, length in enumerate((3, 3, 4), start=1):
        before = goodput.summary().seconds
        with timer.phase("step", step):
            run(torch.ones(length, requires_grad=True)).backward()
        after = goodput.summary().seconds
        assert (after["compile"] > before["compile"]) == (step != 2)
        assert after["training"] > before["training"]
    with timer.phase("evaluation"), torch.no_grad():
        run(torch.ones(3))
    run(torch.ones(5))  # outside of any phase nobody is told
    first, second, third = printed
    assert first.startswith("step 1: compiled 1 graph in ")
    assert second.startswith("step 3: compiled 1 graph again in ")
    assert "TORCH_LOGS=recompiles" in second
    assert third.startswith("evaluation: compiled 1 graph in ")
