"""Compiled blocks in a trace: inductor's graphs of their forward and backward, run on the meta
device.

Inductor's whole pipeline runs except for code generation: its decompositions, its passes, and its
partitioner, which chooses what the forward saves for the backward by the same rules on all devices.
Of a fused kernel only the results take memory, not its intermediate values. Results are taken to
be: outputs and inputs of operators that inductor calls instead of generating, values smaller than
their inputs (reductions), and outputs of the graph. An input that a kernel reads for the last time
is freed before its result is allocated.

The inductor's privates that this uses were read in torch 2.11 to 2.13. To take instead what blocks
take uncompiled would overestimate the peak: by 6 to 12 % for Llama 3.2 1B and Qwen3 0.6B without
recomputation, and by 2 to 4 % with the selective one.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._prims import rng_prims
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from meshtrain.foresight.live import LiveBytes, is_view
from meshtrain.foresight.torch_patches import compiled_by
from meshtrain.parallel.torch_private import without_dispatch_modes

# Names of operators that inductor calls as they are, besides its own fallbacks.
CALLED = {
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_grouped_mm",
    "convolution",
    "convolution_backward",
}
WRITES = ("scatter", "index_put", "copy_")  # prefixes of those that write into an existing buffer


class Graph:
    """A callable graph. It takes its arguments as a list and empties it, as inductor's compiled
    functions do."""

    def __init__(self, module: fx.GraphModule, *_: Any, **unused: Any) -> None:
        self._boxed_call = True
        self.module = module
        self.nodes: list[Any] = list(module.graph.nodes)
        # Nodes that generated kernels compute, and those of them that a kernel writes to memory:
        # by themselves, or because an operator that is called reads them.
        self.computed = {node for node in self.nodes if _is_computed(node)}
        self.results = {node for node in self.computed if _is_result(node)}
        for node in self.nodes:
            is_called = node.op != "placeholder" and node not in self.computed
            if is_called and not _is_view(node):
                self.results |= self.computed & {_base_of(read) for read in node.all_input_nodes}
        # Intermediate values of kernels, and their views, are never in memory.
        inner = self.computed - self.results
        self.unseen = {node for node in self.nodes if _base_of(node) in inner}
        self.allocated = {
            node
            for node in self.nodes
            if node.op == "call_function" and node not in self.unseen and _has_known_shape(node)
        }
        self.freed_after = self._freed_after()

    def _freed_after(self) -> dict[int, list[Any]]:
        """Index of a node -> values that are freed after it. What a kernel reads for an
        intermediate value is read when the kernel runs, which is where that value is read."""
        index = {node: i for i, node in enumerate(self.nodes)}
        last_read: dict[Any, int] = {}
        freed_after: dict[int, list[Any]] = defaultdict(list)
        for node in reversed(self.nodes):
            last = index[node]
            for user in node.users:
                last = max(last, index[user])
                if user in self.computed and user not in self.results:
                    last = max(last, last_read[user])
            last_read[node] = last
            freed_after[last].append(node)
        return freed_after

    def __call__(self, arguments: list[Any]) -> Any:
        live = _watching()
        # placeholders come first
        values: dict[Any, Any] = dict(zip(self.nodes, arguments, strict=False))
        arguments.clear()
        for i, node in enumerate(self.nodes):
            if node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
            self._compute(node, values, live)
            # A kernel's result can take the memory of what it reads for the last time, so this is
            # freed before the result counts.
            for read in self.freed_after[i]:
                if read is not node:
                    values.pop(read, None)
            if node in self.results and live is not None:
                for tensor in tree_leaves(values[node]):
                    live.see(tensor)
                live.look(node.target.__name__)
            if node in self.freed_after[i]:
                values.pop(node, None)
        raise AssertionError("a graph without an output")

    def _compute(self, node: Any, values: dict[Any, Any], live: LiveBytes | None) -> None:
        """Puts a node's value into `values`, if it is ever in memory."""
        if node.op == "get_attr":
            attribute = operator.attrgetter(node.target)
            values[node] = attribute(self.module)
        elif node in self.allocated:
            # On the meta device a result is its shape: it need not be computed.
            with without_dispatch_modes():
                values[node] = tree_map_only(Tensor, _like, node.meta["val"])
            if node not in self.computed and live is not None:
                live.ran(node.target, fx.map_arg(node.args, values.__getitem__), values[node])
        elif node.op == "call_function" and node not in self.unseen:
            # What a generated kernel computes counts as one result, not operator by operator.
            hidden = node in self.computed
            with without_dispatch_modes() if hidden else nullcontext():
                values[node] = self._run(node, values)

    def _run(self, node: Any, values: dict[Any, Any]) -> Any:
        inputs = (node.args, node.kwargs)
        args, kwargs = fx.map_arg(inputs, values.__getitem__)
        # The meta device has no random generator, whose state these save and restore.
        if node.target is rng_prims.run_and_save_rng_state:
            function, *args = args
            state = torch.empty(0, dtype=torch.uint8)
            return state, function(*args, **kwargs)
        if node.target is rng_prims.run_with_rng_state:
            _, function, *args = args
            return function(*args, **kwargs)
        return node.target(*args, **kwargs)


def _watching() -> LiveBytes | None:
    """The mode that counts live bytes, if there is one."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, LiveBytes):
            return mode
    return None


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _is_torchs(target: Any) -> bool:
    return isinstance(target, OpOverload) and target.namespace in ("aten", "prims")


def _has_known_shape(node: Any) -> bool:
    """Whether a node returns new tensors of known shapes, so that they can be allocated without
    running it."""
    if not _is_torchs(node.target) or _is_view(node):
        return False
    return not node.target._schema.is_mutable and "val" in node.meta


def _is_view(node: Any) -> bool:
    if isinstance(node.target, OpOverload):
        return is_view(node.target)
    return node.target is operator.getitem


def _is_computed(node: Any) -> bool:
    """Whether inductor generates a kernel for a node."""
    from torch._inductor.lowering import fallbacks

    target = node.target
    if not _is_torchs(target) or _is_view(node):
        return False
    return target not in fallbacks and target._opname not in CALLED


def _is_result(node: Any) -> bool:
    """Whether a kernel writes this value to memory whatever reads it: a reduction, which is smaller
    than what it reads, or a write into an existing buffer."""
    if node.target._opname.startswith(WRITES):
        return True
    value = node.meta.get("val")
    read = [other.meta.get("val") for other in node.all_input_nodes]
    sizes = [other.numel() for other in read if isinstance(other, Tensor)]
    return isinstance(value, Tensor) and bool(sizes) and value.numel() < max(sizes)


def _base_of(node: Any) -> Any:
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def inductor(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A backend of `torch.compile`: inductor without code generation."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(module, inputs, inner_compile=Graph)  # type: ignore[arg-type]
    return compiled


_sharing: list[None] = []  # one entry for each open `shared_graphs`


@contextmanager
def shared_graphs() -> Iterator[None]:
    """Context in which traces reuse the graphs of earlier ones whose guards match. Exact only for
    traces that differ in what no block sees: the number of layers, microbatches, pipeline ranks.
    Graphs are dropped at its end: their guards would match unrelated traces, too, and dynamo limits
    their number."""
    _sharing.append(None)
    try:
        yield
    finally:
        _sharing.pop()
        if not _sharing:
            torch._dynamo.reset()


@contextmanager
def compiled_by_graphs() -> Iterator[None]:
    """Context in which `torch.compile` makes graphs in the place of kernels."""
    with shared_graphs(), compiled_by(inductor):
        yield
