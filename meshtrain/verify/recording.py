"""Records a run from inside, on each rank: the samples that are read, the loss of each, gradients
and weights around each update.

One process writes whole tensors. A rank of another run compares its parts with those on the spot,
and writes its own only for the first step in which they differ: where a rank has written none, its
parts are those of one process.

    rank_00000.json                 a list of steps, compare.RankStep each
    rank_00000_step_0003.safetensors   gradient/NAME, weight/NAME (after the update); of a rank its
                                    parts, with their places in the metadata
    contributions.safetensors       NAME -> (microbatches, ...), what each adds to the gradient
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from meshtrain.observer import Observer
from meshtrain.optim.grad_norm import LocalParameter
from meshtrain.parallel.sharding import Part, local_part, parameters_of
from meshtrain.parallel.torch_private import to_local
from meshtrain.verify.compare import GRADIENT, WEIGHT, RankStep, Tolerances

# A tensor that is zero but for rounding has no digits to compare: differences count beside a norm
# of at least this share of what all parameters together have.
LEAST = 1e-2
CONTRIBUTIONS = "contributions.safetensors"


@dataclass(frozen=True)
class Held:
    """A tensor on one rank, and its place in the whole."""

    part: Part
    value: Tensor


Tensors = dict[str, Held]  # by `gradient/NAME` or `weight/NAME`


def file_of(folder: Path, rank: int, step: int) -> Path:
    return folder / f"rank_{rank:05}_step_{step:04}.safetensors"


class Recorder(Observer):
    """Records the steps of this process.

    Args:
        reference: the folder of one process's recording; None: this is that one, which writes all.
        contributions: a step, of which the gradient of each microbatch is written too, in one
            process.

    Attributes:
        problem: why something could not be written, as on a full disk: which says nothing about the
            run. None: all was.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        reference: Path | None = None,
        tolerances: Tolerances | None = None,
        contributions: int | None = None,
    ) -> None:
        self.problem: str | None = None
        self._folder = folder
        self._rank = rank
        self._reference = reference
        self._tolerances = tolerances
        self._contributions = contributions
        self._steps: list[RankStep] = []
        self._now: dict[str, Any] = {}  # what is known of the step that is under way
        self._has_written = False
        self._added: list[dict[str, Tensor]] = []  # gradients after each backward of that step

    def close(self) -> None:
        """Writes what was recorded."""
        file = self._folder / f"rank_{self._rank:05}.json"
        with suppress(OSError), self._writing(file) as unfinished:
            unfinished.write_text(json.dumps([asdict(step) for step in self._steps]))

    @contextmanager
    def _writing(self, file: Path) -> Iterator[Path]:
        """Where a file is written before it gets its name: a rank may be killed while it writes.
        Raises OSError: it cannot be written, which is the `problem`."""
        unfinished = file.with_name(f".{file.name}.tmp")
        try:
            yield unfinished
            unfinished.replace(file)
        except (OSError, SafetensorError) as error:
            self.problem = self.problem or f"{file}: {error}"
            raise OSError(self.problem) from error

    # Called by the run ----------------------------------------------------------------------------

    def samples(self, items: Sequence[tuple[int, int]], tensors: Sequence[Tensor]) -> None:
        read = self._now.setdefault("samples", [])
        for row, (epoch, index) in enumerate(items):
            digest = hashlib.sha256()
            for x in tensors:
                if x.dim() and len(x) > row:
                    digest.update(x[row].contiguous().numpy().tobytes())
            read.append([epoch, index, digest.hexdigest()[:12]])

    def losses(self, first: int, real: int, losses: Tensor, *, speaks: bool) -> None:
        values = losses.detach().double().tolist()
        self._now |= {"first": first, "real": real, "losses": values, "speaks": speaks}

    def after_backward(self, model: nn.Module) -> None:
        # The initial weights are recorded at the first update.
        if self._contributions == max(len(self._steps), 1):
            held = {
                spec.name: to_local(p.grad).clone()
                for spec, p in parameters_of(model)
                if p.grad is not None
            }
            self._added.append(held)

    @contextmanager
    def updating(self, parameters: Sequence[LocalParameter]) -> Iterator[None]:
        if not self._steps:  # before the first step, the initial weights
            samples_and_losses, self._now = self._now, {}
            self._record(0, [], self._weights_of(parameters))
            self._now = samples_and_losses
        step = len(self._steps)
        gradients = [(p, self._gradient_of(p)) for p in parameters]
        if self._contributions == step:
            self._write_contributions()
        yield
        self._now["scales"] = {
            p.spec.name: _scale(before.value, p.local.grad) for p, before in gradients
        }
        named = [(f"{GRADIENT}/{p.spec.name}", held) for p, held in gradients]
        self._record(step, named, self._weights_of(parameters))

    # Tensors --------------------------------------------------------------------------------------

    def _gradient_of(self, p: LocalParameter) -> Held:
        assert p.local.grad is not None
        return Held(p.part, p.local.grad.detach().clone())

    def _weights_of(self, parameters: Sequence[LocalParameter]) -> list[tuple[str, Held]]:
        """All that this rank holds of them, with ZeRO-1 also what others update."""
        held = []
        for p in parameters:
            local, part = local_part(p.parameter.detach())
            held.append((f"{WEIGHT}/{p.spec.name}", Held(part, local)))
        return held

    def _record(
        self, step: int, gradients: list[tuple[str, Held]], weights: list[tuple[str, Held]]
    ) -> None:
        tensors = [*gradients, *weights]
        if self._reference is None:
            self._write(step, tensors)
        else:
            self._compare(step, tensors)
        self._steps.append(RankStep(step=step, **self._now))
        self._now = {}

    def _write(self, step: int, tensors: list[tuple[str, Held]]) -> None:
        """Writes tensors by name, and in the metadata the place of each: [[start, stop], ...]."""
        values: dict[str, Tensor] = {}
        places: dict[str, str] = {}
        for n, (name, held) in enumerate(tensors):
            key = name
            if key in values:
                # A parameter that two stages of a rank share is there twice.
                key = f"{name}#{n}"
            # A clone: no two tensors of a file may share memory.
            values[key] = held.value.detach().cpu().contiguous().clone()
            place = [[cut.start, cut.stop] for cut in held.part]
            places[key] = json.dumps(place)
        with self._writing(file_of(self._folder, self._rank, step)) as unfinished:
            save_file(values, unfinished, places)

    def _compare(self, step: int, tensors: list[tuple[str, Held]]) -> None:
        """Compares this rank's parts with those of one process."""
        assert self._reference is not None
        assert self._tolerances is not None
        file = file_of(self._reference, 0, step)
        if not file.exists():  # it has ended before
            return
        apart: dict[str, dict[str, float]] = {GRADIENT: {}, WEIGHT: {}}
        with Whole.open(file) as whole:
            for name, held in tensors:
                kind, _, parameter = name.partition("/")
                difference = whole.difference(name, held)
                if not difference <= apart[kind].get(parameter, 0.0):
                    apart[kind][parameter] = difference
        self._now |= {"gradients": apart[GRADIENT], "weights": apart[WEIGHT]}
        limits = {GRADIENT: self._tolerances.gradient, WEIGHT: self._tolerances.weight}
        differs = False
        for kind, limit in limits.items():
            # not `>`: NaN differs
            differs = differs or any(not size <= limit for size in apart[kind].values())
        if differs and not self._has_written:
            self._has_written = True
            self._write(step, tensors)

    def _write_contributions(self) -> None:
        """What each microbatch has added to each gradient: (microbatches, ...)."""
        before: dict[str, Tensor] = {}
        parts: dict[str, list[Tensor]] = {}
        for n, sums in enumerate(self._added):
            for name, total in sums.items():
                if name not in parts:  # microbatches before this one have not used it
                    parts[name] = [torch.zeros_like(total)] * n
                parts[name].append(total - before[name] if name in before else total)
            before = sums
        stacked = {name: torch.stack(of_name) for name, of_name in parts.items()}
        with self._writing(self._folder / CONTRIBUTIONS) as unfinished:
            save_file(stacked, unfinished)


def _scale(before: Tensor, after: Tensor | None) -> float | None:
    """The number by which a gradient was multiplied; None: it was zero, or is another one now."""
    if after is None or before.numel() == 0:
        return None
    before = before.double()
    after = after.double()
    square = float(before.square().sum())
    if square == 0:
        return None
    # The scale for which |after - scale before| is least: the least squares of one unknown.
    scale = float((before * after).sum()) / square
    apart = float((after - scale * before).norm())
    size = abs(scale) * math.sqrt(square)
    return scale if apart <= 1e-3 * size else None


@dataclass
class Whole:
    """The tensors that one process has written of a step."""

    file: Any
    norms: dict[str, float]
    least: dict[str, float]  # kind -> the smallest norm beside which differences count

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator["Whole"]:
        """Context with the tensors of a file, which are read when they are asked for."""
        with safe_open(path, framework="pt") as file:
            norms: dict[str, float] = {}
            of_kind: dict[str, list[float]] = {GRADIENT: [], WEIGHT: []}
            for name in file.keys():  # noqa: SIM118  no mapping
                norm = float(file.get_tensor(name).double().norm())
                kind, _, _ = name.partition("/")
                norms[name] = norm
                of_kind[kind].append(norm)
            # Beside the whole gradient, and beside the largest weight.
            least = {
                GRADIENT: LEAST * math.hypot(*of_kind[GRADIENT]),
                WEIGHT: LEAST * max(of_kind[WEIGHT], default=0.0),
            }
            yield cls(file, norms, least)

    def difference(self, name: str, held: Held) -> float:
        """The norm of the difference of a part from that of the whole tensor, beside the latter's
        norm; infinite where there is no such tensor."""
        if name not in self.norms:
            return math.inf
        if held.value.numel() == 0:
            return 0.0
        own = to_local(held.value.detach()).cpu().double()
        apart = float((own - self.part(name, held.part).double().reshape(own.shape)).norm())
        kind, _, _ = name.partition("/")
        size = max(self.norms[name], self.least[kind])
        if size == 0:
            return math.inf if apart else 0.0
        return apart / size

    def part(self, name: str, part: Part) -> Tensor:
        if not self.file.get_slice(name).get_shape():
            return self.file.get_tensor(name)
        return self.file.get_slice(name)[part]


# Read by the process that compares ----------------------------------------------------------------


def read_steps(folder: Path, world: int) -> list[list[RankStep]]:
    """For each step, what each rank has recorded; up to the last step that all of them have."""
    ranks = []
    for rank in range(world):
        file = folder / f"rank_{rank:05}.json"
        steps = json.loads(file.read_text()) if file.exists() else []
        ranks.append([RankStep(**step) for step in steps])
    return [list(of_step) for of_step in zip(*ranks, strict=False)]


def read_tensors(file: Path) -> list[tuple[str, Held]]:
    """What a rank has written of a step; none, where it has written nothing."""
    if not file.exists():
        return []
    with safe_open(file, framework="pt") as opened:
        places = opened.metadata() or {}
        tensors = []
        for key in opened.keys():  # noqa: SIM118  no mapping
            part = tuple(slice(*cut) for cut in json.loads(places[key]))
            tensors.append((key.partition("#")[0], Held(part, opened.get_tensor(key))))
    return tensors
