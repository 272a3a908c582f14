"""Peak memory of one rank, traced: the trainer's own step runs on the meta device under a fake
process group.

Every operator is watched and every live storage counted, so no part of the model is described a
second time. Not seen: workspaces inside of kernels, and the allocator's fragmentation.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshtrain.config import Config, spec_of
from meshtrain.data.batch import Batch
from meshtrain.data.order import microbatches
from meshtrain.dropout import set_dropout
from meshtrain.foresight.compiled import compiled_by_graphs
from meshtrain.foresight.live import LiveBytes, Peak, watched
from meshtrain.foresight.memory import (
    ACTIVATIONS,
    COPIES,
    GATHERED,
    GRADIENTS,
    REFERENCE,
    STATES,
    UPDATE,
    WEIGHTS,
)
from meshtrain.foresight.model import alike, batch_of, untraced_errors
from meshtrain.foresight.torch_patches import META, fake_process_groups, meta_stands_for
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.loss import Field, StepTerms
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.modeling import build
from meshtrain.modeling.kinds import repeated, without
from meshtrain.modeling.reference import Reference, reference_config
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel import torch_private
from meshtrain.parallel.fsdp import FSDPModule
from meshtrain.parallel.grad_sync import gradient_syncs
from meshtrain.parallel.host_link import HostLink, link_of
from meshtrain.parallel.mixed_precision import ComputeCopies
from meshtrain.parallel.torch_private import to_local
from meshtrain.pipeline.engine import Pipeline, shapes_of
from meshtrain.pipeline.forms import Activation, form_of
from meshtrain.pipeline.stage import OtherStageBlock, blocks_of
from meshtrain.run.setup import preparation
from meshtrain.step_terms import TermSums
from meshtrain.trainer import Trainer

ENDS = "embedding, logits and loss"  # part of memory that belongs to no block


@dataclass(frozen=True)
class RankTrace:
    """Memory of one rank in one step, in bytes."""

    resident: dict[str, int]  # part -> alive between two steps
    parts: dict[str, int]  # part -> alive at the peak
    peak: int
    moment: str  # of the peak, for people
    sent: dict[str, int]  # axis -> sent in the traced step
    compiled: bool  # whether the blocks are compiled
    host: int = 0  # of the host's memory, with `parallel.offload`


class _RanksLayout(Layout):
    """A layout that lists only the groups of one rank: a fake world has no others."""

    own_rank: int

    @classmethod
    def of(cls, layout: Layout, rank: int) -> "_RanksLayout":
        own = cls.__new__(cls)
        own.__dict__.update(vars(layout), own_rank=rank)
        return own

    def groups(self, *axes: str) -> list[list[int]]:
        return [self.group(self.own_rank, *axes)]


@contextmanager
def fake_world(layout: Layout, rank: int, device_type: str) -> Iterator[Mesh]:
    """A mesh of process groups whose collectives do nothing, in a context in which the meta device
    stands for `device_type`: "cpu" or "cuda"."""
    with (
        _quiet_compiler(),
        meta_stands_for(device_type),
        compiled_by_graphs(),
        fake_process_groups(rank, layout.world_size),
    ):
        yield build_mesh(_RanksLayout.of(layout, rank), device_type)


@contextmanager
def _quiet_compiler() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class _Phases(StepTimer):
    """Tells `live` the phase of the step; measures nothing."""

    def __init__(self, live: LiveBytes) -> None:
        self.live = live
        self.stack = [""]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        # Communication belongs to the phase that waits for it.
        self.stack.append(self.stack[-1] if name == "communication" else name)
        before = self.live.phase, self.live.part
        self.live.phase = self.stack[-1]
        if name == "optimizer":
            self.live.part = UPDATE
        try:
            yield
        finally:
            self.stack.pop()
            self.live.phase, part = before
            if name == "optimizer":
                self.live.part = part

    def end_step(self) -> None:
        pass


class _TermSums(TermSums):
    def agree(self, terms: StepTerms) -> tuple[Field, ...]:
        # In a run the ranks agree on them by communicating values, of which there are none here.
        return tuple(sorted(terms.sums))


class _Trainer(Trainer):
    term_sums = _TermSums


class TracedStep:
    """One rank's model and trainer on a mesh, watched by `live`. `device`: the meta device, or a
    real one, with which tests compare it. `skipped`: blocks replaced by the identity."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        device: torch.device,
        skipped: Sequence[int] = (),
    ) -> None:
        self.mesh = mesh
        self.live = LiveBytes(device.type)
        # Symmetric memory takes GPUs that reach each other's; a fake group has no other rank.
        config = replace(config, parallel=replace(config.parallel, symmetric_memory=False))
        few = _with_few_blocks(config, skipped)
        kind = mesh.device_type
        self.compiled = build.compile_choice(few, mesh.layout, device, kind).compiles
        self.model = build.build_model(few, mesh, device, device_type=kind)
        self.reference = self._reference_of(config, mesh, device, skipped)
        self.optimizer = Optimizer(self.model, config.optimizer, mesh, total_steps=1000)
        task = "language" if "vocab_size" in config.model.keys else "classification"
        self.trainer = _Trainer(
            self.model,
            self.optimizer,
            config,
            mesh,
            device,
            task=task,
            timer=_Phases(self.live),
            objective=build.objective_of(config, task, mesh),
            reference=self.reference,
        )
        count = microbatches(
            config.batch.sizes.largest, config.batch.micro_size, mesh.size(*DATA_AXES)
        )
        batch = prepared_batch(config, mesh)
        if count == 1:
            batch = replace(batch, together=config.batch.sizes.largest)
        self.microbatches = [batch] * count
        # The first step creates lasting state, for which few microbatches are enough, but the
        # schedule of a file has a fixed number.
        from_file = config.pipeline.schedule.endswith(".csv")
        self.first_microbatches = self.microbatches if from_file else self.microbatches[:2]
        self.live.rows = routed_rows(config, batch, mesh)
        self._mark_blocks()
        if isinstance(self.model, Pipeline) and device.type == "meta":
            self._tell_shapes(config)

    def _reference_of(
        self, config: Config, mesh: Mesh, device: torch.device, skipped: Sequence[int]
    ) -> Reference | None:
        """The frozen second model of a run that has one, with as many blocks as the first."""
        own = reference_config(config)
        if own is None:
            return None
        few = _with_few_blocks(own, skipped)
        model = build.build_model(few, mesh, device, device_type=mesh.device_type)
        return Reference(model, device, config.train.precision)

    def _models(self) -> dict[str, nn.Module]:
        """The models of the run, by the part of memory that their weights are."""
        models = {WEIGHTS: self.model}
        if self.reference is not None:
            models[REFERENCE] = self.reference.model
        return models

    def trace(self) -> RankTrace:
        """Traces three steps: the first, of few microbatches, creates lasting state (optimizer
        states, copies), the second finds the peak, and the third looks at the parts of memory
        there."""
        live = self.live
        parts: dict[str, int] = {}

        def look() -> None:
            with torch_private.without_dispatch_modes():
                parts.update(live.parts(self.owners()))

        with watched(live):
            # Made before anything was watched.
            for model in self._models().values():
                for parameter in model.parameters():
                    live.see(to_local(parameter.detach()))
            self._run(self.first_microbatches)
            peak = self._run(self.microbatches)
            live.then = peak.operators, look
            peak_again = self._run(self.microbatches)
        assert peak == peak_again  # every step allocates alike
        gc.collect()
        return RankTrace(
            resident=live.parts(self.owners()),
            parts=parts,
            peak=peak.nbytes,
            moment=peak.words,
            sent=self.mesh.comm_bytes.by_axis(),
            compiled=self.compiled,
            host=0 if self.link is None else self.link.host_bytes,
        )

    @property
    def link(self) -> HostLink | None:
        """The link by which the rank's model offloads; None: it does not."""
        stages = self.model.stages() if isinstance(self.model, Pipeline) else [self.model]
        return link_of(stages[0])

    def _run(self, microbatches: list[Batch]) -> Peak:
        """Runs a step; returns its peak."""
        # Reference cycles, the compiler's too, would hold memory until some later collection.
        gc.collect()
        self.live.peak = Peak()
        self.live.count = 0
        self.trainer.forward_backward(1, microbatches)
        self.trainer.optimizer_step(1)
        return self.live.peak

    def owners(self) -> dict[int, str]:
        """Storage -> its part of memory, for the long-lived tensors of this rank's model and
        optimizer."""
        owners: dict[int, str] = {}

        def own(part: str, *tensors: Tensor | None) -> None:
            for tensor in tensors:
                if tensor is not None:
                    local = getattr(tensor, "_local_tensor", tensor)
                    owners[local.untyped_storage()._cdata] = part

        for weights, model in self._models().items():
            own(weights, *model.parameters())
            for module in model.modules():
                for sync in gradient_syncs(module):
                    if isinstance(sync, ComputeCopies):
                        own(COPIES, *(copy.values for copy in sync._copies.values()))
                # FSDP holds a parameter several times: its shard, what it has gathered, and,
                # between microbatches, a gradient that is not yet reduced.
                for p in _fsdp_parameters(module):
                    gathered = getattr(p, "_unsharded_param", None)
                    own(GATHERED, *p.all_gather_outputs, gathered)
                    own(GRADIENTS, p.unsharded_accumulated_grad, getattr(gathered, "grad", None))
                    own(weights, p._sharded_param_data, p.sharded_param)
        for local in self.optimizer._parameters:
            own(STATES, *local.state.values())
            own(GRADIENTS, local.parameter.grad)
            own(WEIGHTS, local.local)
        return owners

    def _mark_blocks(self) -> None:
        """Attributes new storages to activations inside of a block's forward and backward, and to
        the model's ends (embedding, logits, loss) outside."""
        stages = self.model.stages() if isinstance(self.model, Pipeline) else [self.model]
        for stage in stages:
            names = {module: name for name, module in stage.named_modules()}
            for block in blocks_of(stage):
                if not isinstance(block, OtherStageBlock):
                    block.forward = self.marks(names[block], block.forward)

    def marks(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward that tells `live` when the step enters and leaves the block, in both
        directions: by its call, and by hooks on the gradients of its outputs and its inputs."""
        live = self.live

        def enter() -> None:
            live.part, live.block = ACTIVATIONS, name

        def leave() -> None:
            live.part, live.block = ENDS, ""

        def at_gradient(tree: Any, then: Callable[[], None]) -> None:
            for tensor in tree_leaves(tree):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: then())

        def run(*args: Any, **kwargs: Any) -> Any:
            # A backward enters where the forward left: it comes to the outputs first.
            at_gradient((args, kwargs), leave)
            enter()
            output = forward(*args, **kwargs)
            leave()
            at_gradient(output, enter)
            return output

        return run

    def _tell_shapes(self, config: Config) -> None:
        """Gives the pipeline the shapes between stages, which a run exchanges before its first
        messages; found by a forward with one block of each kind."""
        assert isinstance(self.model, Pipeline)
        layout = self.mesh.layout
        options = replace(
            build.options_of(config, layout, META, device_type=self.mesh.device_type),
            recompute="none",
            compile=False,
        )
        first = alike(config)
        few = _with_few_blocks(config, repeated(first))
        model = build.build_stage(few, self.mesh, META, options)
        outputs: list[Any] = []
        for block in blocks_of(model):
            block.register_forward_hook(lambda block, inputs, output: outputs.append(output))
        batch = self.microbatches[0].to(META, self.trainer.dtype)
        set_dropout(model, seed=0, step=0, samples=range(len(batch.targets)))
        with torch.no_grad():
            model(*batch.inputs)

        key = shapes_of(self.microbatches[0].inputs)
        _, split = build.stages_of(config, layout)
        values = [outputs[number] for number in first]  # of every block
        for stage, (begin, _) in enumerate(split.bounds):
            if stage > 0:
                earlier = tuple(map(form_of, values[: begin - 1]))
                for pipeline in self._models().values():
                    assert isinstance(pipeline, Pipeline)
                    pipeline.describe(key, stage, Activation(values[begin - 1], earlier))


def _fsdp_parameters(module: nn.Module) -> list[Any]:
    """FSDP's records of the parameters of one of its units."""
    if not isinstance(module, FSDPModule):
        return []
    unit = module._get_fsdp_state()._fsdp_param_group
    return [] if unit is None else unit.fsdp_params


def _with_few_blocks(config: Config, skipped: Sequence[int]) -> Config:
    """The config with a model in which these blocks are the identity."""
    return replace(config, spec=without(spec_of(config), skipped)) if skipped else config


def prepared_batch(config: Config, mesh: Mesh) -> Batch:
    """A microbatch of one rank as the run's data loaders yield it."""
    prepare = preparation(config, mesh)
    return prepare(batch_of(config))


def routed_rows(config: Config, batch: Batch, mesh: Mesh) -> int:
    """Token rows that this rank sends to experts for a microbatch."""
    per_token = config.model.keys.get("num_experts_per_tok", 1)
    return batch.targets.numel() * per_token // mesh.size("tp")


def trace_rank(config: Config, layout: Layout, rank: int, device_type: str = "cuda") -> RankTrace:
    """Traces a rank. Raises UntracedError."""
    gc.freeze()  # the trace's collections need not visit objects that exist already
    try:
        with untraced_errors(), fake_world(layout, rank, device_type) as mesh:
            return TracedStep(config, mesh, META).trace()
    finally:
        gc.unfreeze()
