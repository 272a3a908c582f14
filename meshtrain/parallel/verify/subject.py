"""What is judged, and when: a model with all that is known of how it is going to run."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from meshtrain.job.locate import bundled
from meshtrain.layout import LOSS_AXES, Layout
from meshtrain.mesh import Mesh
from meshtrain.parallel.context import ContextParallel
from meshtrain.parallel.options import ParallelOptions, tensor_parallel_of
from meshtrain.parallel.tensor_parallel import TensorParallel
from meshtrain.parallel.verify.recording import Terms, no_terms


class Moment(Enum):
    """When a check can be made."""

    # Each process alone, with the plain model on the meta device.
    START = "before the processes meet"
    # All ranks together, with the whole plain model.
    PLAIN = "before the model is split"
    # The parallelized model, or this rank's stage of it. What such a check finds is raised by the
    # first forward, or by any.
    PARALLEL = "before the first forward"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that is judged, and how it is going to run. Checks for which something is not known
    do not apply."""

    model: nn.Module
    layout: Layout
    options: ParallelOptions
    # Known once the processes have met.
    mesh: Mesh | None = None
    # A new copy of the whole plain model on the meta device, for checks that change it.
    copy: Callable[[], nn.Module] | None = None
    # The arguments of a forward, on any device, of which shapes and dtypes count.
    inputs: Sequence[Tensor | None] | None = None
    # What a forward with such inputs shows (a `probe.Whole`), which may be known already.
    whole: Callable[[Sequence[Tensor | None]], Any] | None = None
    # The model gets tokens and returns a logit for each word of its vocabulary.
    is_language_model: bool = False
    # For each pipeline stage, its first block and the one after its last.
    bounds: Sequence[tuple[int, int]] = ()
    # Samples of a forward on one rank; those of a step, which may grow during the run.
    micro_size: int = 1
    global_sizes: Sequence[int] = ()
    # Rows hold several documents, none of which may depend on another.
    packs_documents: bool = False
    # See `meshtrain.loss.seen_terms`.
    terms: Terms = no_terms
    # How sequences are split over `cp`.
    context: ContextParallel | None = None
    # The blocks that are gathered, compiled or recomputed one by one.
    units: Sequence[nn.Module] = ()

    @property
    def shares_samples_out(self) -> bool:
        """Whether ranks have other samples, or other tokens of a sample."""
        return self.layout.size(*LOSS_AXES) > 1

    @property
    def runs_again(self) -> bool:
        """Whether a block's forward runs a second time in its backward."""
        return self.options.recompute != "none"

    @cached_property
    def compares(self) -> bool:
        """Whether values of the model are compared with those of the plain one."""
        return compares(self.model, self.options)

    @cached_property
    def tp(self) -> TensorParallel | None:
        """How the plain model is split over `tp`; None: it is not. Raises InputError: it cannot
        be."""
        assert self.mesh is not None
        return tensor_parallel_of(self.model, self.mesh, self.options)


def compares(model: nn.Module, options: ParallelOptions) -> bool:
    """Whether values of a model, plain or parallelized, are compared with those of the plain
    one."""
    if options.trace:
        return False
    if options.verify != "auto":
        return options.verify
    # Parity tests prove a model of meshtrain's own, with the plans of its file.
    plans = (options.tp_plan, options.cp_plan, options.ep_plan)
    return any(plan is not None for plan in plans) or not is_ours(model)


def is_ours(model: nn.Module) -> bool:
    """Whether a model, plain or parallelized, is of a file in `models/`, and nothing in it is of a
    class from elsewhere."""
    own_files = bundled("models")

    def is_from_models(kind: type) -> bool:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        return file is not None and Path(file).parent == own_files

    def is_known(kind: type) -> bool:
        package = kind.__module__.partition(".")[0]
        return (
            package in ("torch", "meshtrain")
            or package in sys.stdlib_module_names
            or is_from_models(kind)
        )

    # Base classes too: FSDP derives a class of its own from that of each unit.
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return any(map(is_from_models, type(model).__mro__)) and all(map(is_known, kinds))
