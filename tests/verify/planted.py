"""Plants mistakes, and prints what a verification says of each:

    python -m tests.verify.planted RESULT.json NAME ...          names of mistakes.yaml

A mistake is a patch of the product in this process, which the ranks that are forked from it have
too. One process has no process group, by which it is left as it is.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

import meshtrain.data.loader
import meshtrain.optim.optimizer
import meshtrain.trainer
from meshtrain.data.batch import IGNORE
from meshtrain.loss import GlobalCount
from meshtrain.optim import adamw, grad_norm
from meshtrain.parallel import ddp, fsdp, tp_linear
from meshtrain.parallel.context import ContextParallel
from meshtrain.parallel.context.attention import Exchange
from meshtrain.parallel.grad_sync import TPGradSync
from meshtrain.parallel.torch_private import to_local
from meshtrain.pipeline.tied import TiedGradients
from meshtrain.trainer import Trainer
from meshtrain.verify.ranks import ForkedRanks
from meshtrain.verify.session import Subject, Verification, read_layouts
from tests.parity.runs import shortened

MISTAKES = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())
BASE = "tests/fuzz/base.yaml"
STEPS = 2
SMALL = (
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.vocab_size=64",
    "data.source=tests/fuzz/answers.py",
    "data.seq_len=20",
    "batch.global_size=8",
    "batch.micro_size=2",
    "optimizer.warmup_steps=0",
)
PLANTS: dict[str, Callable[[], Any]] = {}


def plant(name: str) -> Callable[[Callable], Callable]:
    """Registers what plants a mistake: a context manager."""

    def register(function: Callable) -> Callable:
        PLANTS[name] = function
        return function

    return register


def instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    """A patch by what `make` makes of the function that is there; one process keeps that."""
    original = getattr(owner, name)
    changed = make(original)

    def run(*args: Any, **kwargs: Any) -> Any:
        return (changed if dist.is_initialized() else original)(*args, **kwargs)

    return patch.object(owner, name, run)


def with_gradients(change: Callable[[grad_norm.LocalParameter, Tensor], None]) -> Any:
    """Changes the gradients, after all sums and before the norm."""

    def make(original: Any) -> Any:
        def squared_norm(parameters: Any, device: Any) -> Tensor:
            for parameter in parameters:
                if parameter.parameter.grad is not None:
                    change(parameter, to_local(parameter.parameter.grad))
            return original(parameters, device)

        return squared_norm

    return instead(meshtrain.optim.optimizer, "squared_norm", make)


@plant("sum for mean")
def sum_for_mean() -> Any:
    return with_gradients(lambda _, grad: grad.mul_(dist.get_world_size()))


@plant("norms twice under tp")
def norms_twice() -> Any:
    def add_up(parameter: grad_norm.LocalParameter, grad: Tensor) -> None:
        if "norm" in parameter.spec.name:
            dist.all_reduce(grad)

    return with_gradients(add_up)


@plant("a bucket without its sum")
@contextmanager
def bucket_without_sum() -> Iterator[None]:
    own: list[tuple[Tensor, Tensor]] = []

    def keep(original: Any) -> Any:
        def start(self: Any, bucket: Any, flat: Tensor) -> None:
            if not own:
                last = next(iter(bucket.views.values()))
                own.append((flat[: last.numel()], flat[: last.numel()].clone()))
            original(self, bucket, flat)

        return start

    def restore(original: Any) -> Any:
        def finish(self: Any) -> None:
            original(self)
            for place, value in own:
                place.copy_(value)
            own.clear()

        return finish

    reducer = ddp.BucketedAllReduce
    with instead(reducer, "_start", keep), instead(reducer, "_finish_buckets", restore):
        yield


@plant("norms under sequence parallelism")
def norms_without_sum() -> Any:
    return instead(TPGradSync, "finish_reduce", lambda _: lambda self: None)


@plant("parts of a sequence")
def parts_of_a_sequence() -> Any:
    def own_rows(output: Tensor, whole: Tensor, group: Any) -> None:
        output.copy_(whole.chunk(group.size())[group.rank()])

    return instead(fsdp, "reduce_scatter", lambda _: own_rows)


@plant("a tied matrix once")
def tied_once() -> Any:
    return instead(TiedGradients, "sum", lambda _: lambda self: None)


@plant("a dropped sample")
def dropped_sample() -> Any:
    def make(original: Any) -> Any:
        def batch(self: Any, microbatch: int) -> Any:
            found = original(self, microbatch)
            if microbatch + 1 < len(self._step.batches):
                return found
            targets = found.targets.clone()
            targets[-1] = IGNORE
            return replace(found, targets=targets)

        return batch

    return instead(Trainer, "_batch", make)


@plant("a skipped microbatch")
@contextmanager
def skipped_microbatch() -> Iterator[None]:
    """The head computes its gradient in the forward, times this factor."""
    running: list[int] = []

    def note(original: Any) -> Any:
        def microbatch(self: Any, model: Any, number: int) -> Any:
            running[:] = [number]
            return original(self, model, number)

        return microbatch

    def make(original: Any) -> Any:
        return lambda self: original(self) * (running != [1])

    with instead(Trainer, "_microbatch", note), instead(Trainer, "_factor", make):
        yield


@plant("padding with a loss")
def padding_with_a_loss() -> Any:
    def make(original: Any) -> Any:
        def read(self: Any, slots: Any) -> Any:
            items, _ = slots
            found = self.samples.read(items, len(items))
            original(self, slots)  # as it was, for who watches
            return found

        return read

    return instead(meshtrain.data.loader._Reader, "__getitems__", make)


@plant("a neighbour's sample")
def neighbours_sample() -> Any:
    def make(original: Any) -> Any:
        def fill(own: Any, *args: Any) -> Any:
            if dist.get_rank() == 1:
                (epoch, index), *others = own
                own = [(epoch, index + 1), *others]
            return original(own, *args)

        return fill

    return instead(meshtrain.data.loader, "_fill", make)


@plant("a mean of means")
def mean_of_means() -> Any:
    class OwnCount(GlobalCount):
        def __init__(self, count: float, mesh: Any, device: torch.device) -> None:
            total = count * dist.get_world_size()
            self._total = torch.full((), total, dtype=torch.float64, device=device)
            self._work = None

    return instead(meshtrain.trainer, "GlobalCount", lambda _: OwnCount)


@plant("positions from 0")
def positions_from_0() -> Any:
    def make(original: Any) -> Any:
        def shard(self: Any, batch: Any) -> Any:
            part = original(self, batch)
            positions = part.tensors["positions"]
            own = torch.arange(positions.shape[1]).expand_as(positions).contiguous()
            return replace(part, tensors={**part.tensors, "positions": own})

        return shard

    return instead(ContextParallel, "shard", make)


@plant("a mask at the border")
def border_mask() -> Any:
    def make(original: Any) -> Any:
        def arrivals(self: Any) -> Any:
            for chunks, keys in original(self):
                keys = keys.clone()
                for place, chunk in enumerate(chunks):
                    if chunk not in self.visibility.own:
                        keys[:, :, (place + 1) * self.visibility.chunk - 1] = 0
                yield chunks, keys

        return arrivals

    return instead(Exchange, "arrivals", make)


@plant("a product without its sum")
def product_without_sum() -> Any:
    calls = []

    def make(original: Any) -> Any:
        def start_sum(axis: Any, addends: Tensor, sequence: bool) -> Any:
            calls.append(1)
            own = addends.clone()
            result = original(axis, addends, sequence)
            if len(calls) != 2:  # the first may be that of the embedding
                return result
            result.wait()
            return type(result)(axis, [], lambda: own)

        return start_sum

    return instead(tp_linear, "_start_sum", make)


@plant("dropout by rank")
def dropout_by_rank() -> Any:
    def make(original: Any) -> Any:
        def keep_mask(keys: Tensor, *args: Any) -> Tensor:
            return original(keys + dist.get_rank() + 1, *args)

        return keep_mask

    return instead(meshtrain.dropout, "keep_mask", make)


@plant("experts counted twice")
def experts_twice() -> Any:
    def make(original: Any) -> Any:
        def squared_norm(parameters: Any, device: Any) -> Tensor:
            experts = [p for p in parameters if ".experts." in p.spec.name]
            return original(parameters, device) + original(experts, device)

        return squared_norm

    return instead(meshtrain.optim.optimizer, "squared_norm", make)


@plant("a clip of its own")
def clip_of_its_own() -> Any:
    def make(original: Any) -> Any:
        def factor(self: Any, norm: Tensor, scale: Tensor) -> Any:
            return original(self, self.optimizer.squared_norm().sqrt(), scale)

        return factor

    return instead(Trainer, "_grad_factor", make)


@plant("rows that are not gathered")
def rows_not_gathered() -> Any:
    return instead(ddp.BucketedReduceScatter, "gather_parameters", lambda _: lambda self: None)


@plant("decay twice")
def decay_twice() -> Any:
    def make(original: Any) -> Any:
        def update(self: Any, *args: Any) -> None:
            for group in self.groups:
                for parameter in group.parameters:
                    if parameter.spec.cuts:
                        decay = 1 - group.lr * group.options.weight_decay
                        parameter.local.detach().mul_(decay)
            original(self, *args)

        return update

    return instead(adamw.AdamW, "update", make)


@plant("a sum in 16 bits")
def sum_in_16_bits() -> Any:
    def make(original: Any) -> Any:
        def reduce_scatter(output: Tensor, whole: Tensor, group: Any) -> None:
            original(output, whole.bfloat16().to(whole.dtype), group)

        return reduce_scatter

    return instead(fsdp, "reduce_scatter", make)


def said(names: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """What a verification says of each mistake. One process trains once for all with the same
    keys."""
    by_keys: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        by_keys.setdefault(tuple(MISTAKES[name].get("keys", ())), []).append(name)
    found = {}
    for number, (keys, alike) in enumerate(by_keys.items()):
        layouts = {name: read_layouts([MISTAKES[name]["layout"]])[0] for name in alike}
        verification = Verification(
            subject=Subject(BASE, [*SMALL, *keys], [], STEPS, "float64"),
            ranks=ForkedRanks(),
            folder=folder / str(number),
            layouts=list(layouts.values()),
        )
        verification.begin()
        for name, layout in layouts.items():
            with PLANTS[name]():
                found[name] = asdict(verification.verify(layout))
    return found


def main(result: str, *names: str) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, shortened(0):
        found = said(list(names) or list(MISTAKES), Path(folder))
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
