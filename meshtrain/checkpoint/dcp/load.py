"""Loading a DCP folder as the state of a run: which of its tensors are the model's weights and
AdamW's moments, and whether all of it fits.

Tensors are found by their names in the run's model, with any prefix: `model.` or `app.model.` of
weights, `optimizer.state.` or `state.` of moments. What does not fit is found from `.metadata`,
before anything is written.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from meshtrain.checkpoint.dcp.folder import DcpFolder
from meshtrain.checkpoint.dcp.names import (
    NAMINGS,
    TITAN_EMBEDDING,
    Heads,
    Naming,
    Place,
    find_prefix,
)
from meshtrain.checkpoint.dcp.options import WITHOUT, Options, StoredOptions
from meshtrain.checkpoint.placement import Placement
from meshtrain.checkpoint.state import MODEL, OPTIMIZER, UPDATES
from meshtrain.errors import DamagedError, InputError, any_of, fold_names, join_some, plural
from meshtrain.huggingface.load import DTYPES, HARMLESS
from meshtrain.huggingface.safetensors import by_numbers
from meshtrain.optim.groups import EMA
from meshtrain.parallel.sharding import Part, shape_of

MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = "train_state.step"  # torchtitan's number of steps
NAMED = 10  # tensors that a message names per problem
# Parts of names that wrappers of modules add.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# Tensors that follow from the config, in older checkpoints.
_HARMLESS = (*HARMLESS, "*freqs_cis", "*rope.cache")
# The first words of what a training loop keeps beside model and optimizer.
_OF_LOOP = ("lr_scheduler", "scheduler", "dataloader", "train_state", "rng", "rng_state")
# What each type can become without rounding.
_WIDER = {"BF16": ("F32", "F64"), "F16": ("F32", "F64"), "F32": ("F64",)}


@dataclass(frozen=True)
class Wanted:
    """A tensor of the run's model, with the optimizer's state of it."""

    names: tuple[str, ...]  # all of its names in the model; a checkpoint has the first
    placement: Placement
    states: Mapping[str, Placement]  # by their kinds; empty: no update changes it
    rule: str = "adamw"  # the optimizer that updates it
    options: Options | None = None  # those of AdamW


@dataclass(frozen=True)
class Stored:
    """A tensor of a folder, or rows of one, as a checkpoint's tensor."""

    placement: Placement
    # Its name in the folder, and where its rows are; of tied tensors that of each.
    places: tuple[tuple[str, Place], ...]

    def read(self, folder: DcpFolder, part: Part) -> Tensor:
        name, place = self.places[0]
        values = _read_rows(folder, name, place, part)
        for twin, place_of_twin in self.places[1:]:
            if not torch.equal(values, _read_rows(folder, twin, place_of_twin, part)):
                raise InputError(
                    f"{folder.path}: {twin} has values of its own, and the model ties it to "
                    f"{name}: give model.tie_word_embeddings: false"
                )
        return values.to(DTYPES[self.placement.dtype])


@dataclass(frozen=True)
class Constant:
    """A checkpoint's tensor that no folder has."""

    placement: Placement
    value: float

    def read(self, folder: DcpFolder, part: Part) -> Tensor:
        return torch.full(shape_of(part), self.value, dtype=DTYPES[self.placement.dtype])


def _read_rows(folder: DcpFolder, name: str, place: Place, part: Part) -> Tensor:
    rows, *columns = part
    pieces = []
    for run in place.runs(rows):
        span = slice(run.there.start, run.there.stop)
        pieces.append(folder.read(name, (span, *columns))[:: run.there.step])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@dataclass(frozen=True)
class Loaded:
    """A folder as the state of a run, by the names of a checkpoint."""

    folder: DcpFolder
    sources: Mapping[str, Stored | Constant]
    step: int  # steps done
    notes: Sequence[str]  # lines for people

    @property
    def placements(self) -> dict[str, Placement]:
        names = sorted(self.sources, key=by_numbers)
        return {name: self.sources[name].placement for name in names}

    def read(self, name: str, part: Part) -> Tensor:
        """A part of a tensor, in the dtype of the checkpoint. Raises DamagedError: a file is not
        what torch has written; InputError: tied tensors have other values; UnreadableError."""
        return self.sources[name].read(self.folder, part)


def load(
    folder: DcpFolder,
    wanted: Sequence[Wanted],
    *,
    naming: Naming | None = None,
    heads: Heads | None = None,
    step: int | None = None,
) -> Loaded:
    """Finds the state of a run in a folder.

    Args:
        naming, heads: another framework's names, and the model's heads; None: the model's own.
        step: steps done; None: as the folder says.

    Raises InputError: something does not fit; names all of it. DamagedError: something cannot be
    read.
    """
    index = _Index(folder)
    fit = _Fit(index, wanted, naming, heads)
    fit.find_weights()
    updates = fit.find_states()
    fit.look_at_others()
    if fit.problems:
        raise InputError(f"{folder.path} does not fit the run: {'; '.join(fit.problems)}")
    fit.compare_options()
    if step is None:
        counted = index.value(STEPS)
        step = counted if type(counted) is int and counted >= 0 else updates
    if step != updates:
        fit.notes.append(f"{plural(step, 'step')} are done, with {plural(updates, 'update')}")
    return Loaded(folder, fit.sources, step, [*fit.notes, *index.notes])


class _Index:
    """The names of a folder without what wrappers add, -> the names that are there."""

    def __init__(self, folder: DcpFolder) -> None:
        self.folder = folder
        self.tensors = {_unwrapped(name): name for name in folder.tensors}
        self.values = {_unwrapped(name): name for name in folder.values}
        self.notes: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.tensors or name in self.values

    def require(self, name: str) -> Any:
        """A number, a text or a container. Raises DamagedError: it is not plain."""
        return self.folder.value(self.tensors.get(name) or self.values[name])

    def value(self, name: str) -> Any:
        """The same; None: there is none, or it is not plain, which a note says."""
        if name not in self:
            return None
        try:
            return self.require(name)
        except DamagedError as error:
            self.notes.append(f"left out: {error}")
            return None


class _Fit:
    """What of a folder is what of a run."""

    def __init__(
        self,
        index: _Index,
        wanted: Sequence[Wanted],
        naming: Naming | None,
        heads: Heads | None,
    ) -> None:
        """Raises InputError: the naming is another model's."""
        self.sources: dict[str, Stored | Constant] = {}  # by the names of a checkpoint
        self.notes: list[str] = []
        self.problems: list[str] = []
        self._index = index
        self._path = index.folder.path
        self._wanted = wanted
        self._trained = [tensor for tensor in wanted if tensor.states]
        self._naming = naming
        self._heads = heads
        self._prefix = ""  # of the weights
        self._states: str | None = None  # prefix of the optimizer's state; None: there is none
        self._claimed: set[str] = set()  # names of the folder
        self._widened: dict[str, list[str]] = {}  # `BF16 become F32` -> tensors
        unnamed = [tensor.names[0] for tensor in wanted if not self._places(tensor)]
        if naming is not None and unnamed:
            raise InputError(
                f"{naming.title} has no {_listed(unnamed)}: --as has to name the config's model"
            )

    # Weights and moments ------------------------------------------------------------------------

    def find_weights(self) -> None:
        """Raises InputError: there are none."""
        self._require_own_names()
        names = [[place.name for place in self._places(tensor)] for tensor in self._wanted]
        prefix = find_prefix(self._index.tensors, names)
        if prefix is None:
            raise InputError(self._nothing_found(names[0][0]))
        self._prefix = prefix
        missing = []
        for tensor in self._wanted:
            found = self._find(tensor, prefix)
            if found:
                self._take(f"{MODEL}.{tensor.names[0]}", tensor.placement, found)
            else:
                missing.append(tensor.names[0])
        if missing:
            remedy = ""
            if missing == ["lm_head.weight"]:
                remedy = " (do they tie it? then give model.tie_word_embeddings: true)"
            self.problems.append(f"missing {_listed(missing)}{remedy}")

    def find_states(self) -> int:
        """Finds the moments; returns the number of updates. Raises InputError: they are not
        AdamW's."""
        for tensor in self._trained:
            if tensor.rule != "adamw":
                raise InputError(
                    f"the config updates {tensor.names[0]} with {tensor.rule}, and only AdamW's "
                    "state is imported: give optimizer.name: adamw"
                )
        names = []
        for tensor in self._trained:
            places = self._places(tensor, of_state=True)
            names.append([f"{place.name}.{MOMENTS[0]}" for place in places])
        self._states = find_prefix(self._index.tensors, names)
        if self._states is None:
            self._require_no_states()
        missing = []
        for tensor in self._trained:
            for kind, placement in tensor.states.items():
                if not self._take_state(tensor, kind, placement):
                    missing.append(f"{tensor.names[0]}.{kind}")
        if missing:
            self.problems.append(f"the optimizer's state has no {_listed(missing)}")
        updates = 0 if self._states is None else self._count_updates()
        self.sources[UPDATES] = Constant(Placement((), "F32"), float(updates))
        return updates

    def _take_state(self, tensor: Wanted, kind: str, placement: Placement) -> bool:
        """Whether there is such a state of a tensor."""
        name = f"{OPTIMIZER}.{tensor.names[0]}.{kind}"
        if kind == EMA:  # it begins with the weights, as in a new run
            weights = self.sources.get(f"{MODEL}.{tensor.names[0]}")
            if weights is not None:
                self.sources[name] = weights
            return True
        if self._states is None:
            self.sources[name] = Constant(placement, 0.0)
            return True
        found = self._find(tensor, self._states, f".{kind}")
        if found:
            self._take(name, placement, found[:1])
        return bool(found)

    def _count_updates(self) -> int:
        """The number of updates, which all parameters have in common here."""
        names_of: dict[Any, list[str]] = {}
        for tensor in self._trained:
            for place in self._places(tensor, of_state=True):
                name = f"{self._states}{place.name}.step"
                if name in self._index:
                    self._claimed.add(name)
                    count = self._index.require(name)
                    is_number = isinstance(count, int | float)
                    names_of.setdefault(count if is_number else None, []).append(name)
                    break
        counts = list(names_of)
        if len(counts) != 1 or counts[0] is None or counts[0] < 0 or counts[0] % 1:
            shown = [f"{count} of {names[0]}" for count, names in names_of.items()]
            self.problems.append(
                "the numbers of updates (step) are not the same for all parameters: "
                f"{join_some(shown) or 'there is none'}"
            )
            return 0
        return int(counts[0])

    def _places(self, tensor: Wanted, of_state: bool = False) -> list[Place]:
        """Where a tensor may lie, under any of its names."""
        places: list[Place] = []
        for name in tensor.names:
            places += self._places_of(name, of_state)
        return places

    def _places_of(self, name: str, of_state: bool) -> list[Place]:
        if self._naming is None:
            return [Place(name)]
        assert self._heads is not None
        return self._naming.places(name, self._heads, of_state=of_state)

    def _find(self, tensor: Wanted, prefix: str, suffix: str = "") -> list[tuple[str, Place]]:
        """Where a tensor, or a state of it, is in the folder: one place for each of its names."""
        found = []
        for own in tensor.names:
            for place in self._places_of(own, of_state=bool(suffix)):
                name = f"{prefix}{place.name}{suffix}"
                if name in self._index.tensors:
                    found.append((name, place))
                    break
        return found

    def _take(self, own: str, placement: Placement, found: list[tuple[str, Place]]) -> None:
        """Notes where a checkpoint's tensor comes from, and what does not fit."""
        places = []
        for name, place in found:
            self._claimed.add(name)
            tensor = self._index.folder.tensors[self._index.tensors[name]]
            shape = place.shape(placement.shape)
            if tensor.shape != shape:
                self.problems.append(
                    f"{tensor.name} has the shape {list(tensor.shape)}, and by the config "
                    f"{list(shape)}"
                )
            if placement.dtype in _WIDER.get(tensor.dtype, ()):
                widened = f"{tensor.dtype} become {placement.dtype}"
                self._widened.setdefault(widened, []).append(tensor.name)
            elif tensor.dtype != placement.dtype:
                self.problems.append(
                    f"{tensor.name} has the type {tensor.dtype}, and by the config "
                    f"{placement.dtype} (train.precision, optimizer.state_precision)"
                )
            places.append((tensor.name, place))
        self.sources[own] = Stored(placement, tuple(places))

    # What does not fit --------------------------------------------------------------------------

    def _nothing_found(self, expected: str) -> str:
        listed = join_some(list(self._index.tensors)) or "none"
        return f"{self._path} has no {expected}, with any prefix: its tensors are {listed}"

    def _require_own_names(self) -> None:
        """Raises InputError: the names are torchtitan's, and nobody has said so."""
        if self._naming is not None:
            return
        own = {name for tensor in self._wanted for name in tensor.names}
        for name in self._index.tensors:
            if name.endswith(TITAN_EMBEDDING) and TITAN_EMBEDDING not in own:
                raise InputError(
                    f"{self._path} has {name}, as torchtitan names it: give --as "
                    f"{any_of(list(NAMINGS))}"
                )

    def _require_no_states(self) -> None:
        """A folder without moments has weights alone. Raises InputError: it has some of another
        form."""
        endings = tuple(f".{kind}" for kind in (*MOMENTS, "momentum_buffer"))
        states = [name for name in self._index.tensors if name.endswith(endings)]
        if not states:
            self.notes.append(
                "warning: it has no optimizer: AdamW's moments begin with zero, and its updates "
                "with 0, as in a new run"
            )
            return
        problem = f"{self._path}: the optimizer's state ({states[0]})"
        if states[0].split(".")[-2].isdecimal():
            raise InputError(
                f"{problem} has numbers in place of the parameters' names: save that of "
                "get_optimizer_state_dict (torch.distributed.checkpoint.state_dict), or " + WITHOUT
            )
        raise InputError(f"{problem} is not AdamW's of this model: {WITHOUT}")

    def look_at_others(self) -> None:
        """Looks at everything that is neither a weight nor a moment."""
        unknown = []
        left_out = []
        for name in self._index.tensors:
            if name in self._claimed or self._is_option(name) or _matches(name, _HARMLESS):
                continue
            is_state = self._states is not None and name.startswith(self._states)
            of_loop = name.partition(".")[0] in _OF_LOOP
            if is_state or (name.startswith(self._prefix) and not of_loop):
                unknown.append(name)
            else:
                left_out.append(name)
        others = self._index.values.keys() - self._claimed
        left_out += [name for name in others if not self._is_option(name)]
        if unknown:
            self.problems.append(f"the run has no {_listed(unknown)}")
        counts = Counter(name.partition(".")[0] for name in left_out if name != STEPS)
        if counts:
            words = [f"{word} ({count})" for word, count in sorted(counts.items())]
            self.notes.append(
                f"left out: {', '.join(words)}: the next samples and the learning rate follow from "
                "the config"
            )
        for widened, names in self._widened.items():
            self.notes.append(f"{plural(len(names), 'tensor')} of {widened}, without rounding")

    def _is_option(self, name: str) -> bool:
        return self._states is not None and name.startswith(self._options)

    @property
    def _options(self) -> str:
        """The prefix of the optimizer's options."""
        assert self._states is not None
        return f"{self._states.removesuffix('state.')}param_groups."

    def compare_options(self) -> None:
        """Notes what the other optimizer did otherwise. Raises InputError: it was not AdamW."""
        if self._states is None:
            return
        values = [*self._index.values, *self._index.tensors]
        stored = StoredOptions(values, self._options, self._index.value)
        differing: dict[str, list[str]] = {}
        for tensor in self._trained:
            assert tensor.options is not None
            for place in self._places(tensor, of_state=True):
                there = stored.of(place.name)
                if not there:
                    continue
                try:
                    for line in tensor.options.differences(there):
                        differing.setdefault(line, []).append(tensor.names[0])
                except InputError as error:
                    raise InputError(f"{self._path}: {error}") from None
                break
        for line, names in differing.items():
            self.notes.append(
                f"warning: the optimizer's {line}, for {_listed(names, most=4)}: the run goes on "
                "with its own"
            )


def _unwrapped(name: str) -> str:
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _listed(names: Iterable[str], most: int = NAMED) -> str:
    """Names for people: those of many layers are one."""
    return join_some([name for name, _, _ in fold_names((name, None) for name in names)], most)
