"""Compiled blocks in a trace: inductor's graphs of their forward and backward, run on the meta
device.

Inductor's whole pipeline runs except for code generation: its decompositions, its passes, and its
partitioner, which chooses what the forward saves for the backward by the same rules on all devices.
Of a fused kernel only the results take memory, not its intermediate values. Results are taken to
be: outputs and inputs of operators that inductor calls instead of generating, values smaller than
their inputs (reductions), and outputs of the graph. An input that a kernel reads for the last time
is freed before its result is allocated.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._prims import rng_prims
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from meshtrain.foresight.live import LiveBytes, is_view
from meshtrain.parallel.torch_private import without_dispatch_modes

# Names of operators that inductor calls as they are, besides its own fallbacks; and prefixes of
# those that write into an existing buffer.
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
WRITES = ("scatter", "index_put", "copy_")


class Graph:
    """A callable graph. It takes its arguments as a list and empties it, as inductor's compiled
    functions do."""

    def __init__(self, module: fx.GraphModule, *_: Any, **unused: Any) -> None:
        self._boxed_call = True
        self.module = module
        self.nodes: list[Any] = list(module.graph.nodes)
        self.computed = {node for node in self.nodes if _is_computed(node)}  # by generated kernels
        self.results = {node for node in self.computed if _is_result(node)}
        for node in self.nodes:
            if node.op != "placeholder" and node not in self.computed and not _is_view(node):
                self.results |= self.computed & set(map(_base_of, node.all_input_nodes))
        # Intermediate values of kernels, and their views, are never in memory.
        self.unseen = {
            node for node in self.nodes if _base_of(node) in self.computed - self.results
        }
        self.made = {
            node for node in self.nodes if node.op == "call_function" and _is_made(node)
        } - self.unseen
        at = {node: i for i, node in enumerate(self.nodes)}
        until: dict[Any, int] = {}
        # index of a node -> values that are freed after it
        self.ends: dict[int, list[Any]] = defaultdict(list)
        for node in reversed(self.nodes):
            inner = [
                user for user in node.users if user in self.computed and user not in self.results
            ]
            until[node] = max(
                [at[node], *(at[user] for user in node.users), *(until[user] for user in inner)]
            )
            self.ends[until[node]].append(node)

    def __call__(self, arguments: list[Any]) -> Any:
        live = next(
            (mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, LiveBytes)),
            None,
        )
        # placeholders come first
        values: dict[Any, Any] = dict(zip(self.nodes, arguments, strict=False))
        arguments.clear()
        for i, node in enumerate(self.nodes):
            if node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
            if node.op == "get_attr":
                values[node] = operator.attrgetter(node.target)(self.module)
            elif node in self.made:
                with without_dispatch_modes():
                    values[node] = tree_map_only(Tensor, _like, node.meta["val"])
                if node not in self.computed and live is not None:
                    live.ran(
                        node.target, [values[other] for other in node.all_input_nodes], values[node]
                    )
            elif node.op == "call_function" and node not in self.unseen:
                with without_dispatch_modes() if node in self.computed else nullcontext():
                    values[node] = self._run(node, values)
            ends = [other for other in self.ends[i] if other is not node]
            for other in ends:
                values.pop(other, None)
            if node in self.results and live is not None:
                for tensor in tree_leaves(values[node]):
                    live.see(tensor)
                live.look(node.target.__name__)
            if len(ends) < len(self.ends[i]):
                values.pop(node, None)
        raise AssertionError("a graph without an output")

    def _run(self, node: Any, values: dict[Any, Any]) -> Any:
        function, inputs = node.target, fx.map_arg((node.args, node.kwargs), values.__getitem__)
        args, kwargs = inputs
        if function is rng_prims.run_and_save_rng_state:  # the meta device has no random generator
            return torch.empty(0, dtype=torch.uint8), args[0](*args[1:], **kwargs)
        if function is rng_prims.run_with_rng_state:
            return args[1](*args[2:], **kwargs)
        return function(*args, **kwargs)


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _is_made(node: Any) -> bool:
    """Whether a node returns new tensors of known shapes, so that they can be allocated without
    running it."""
    target = node.target
    is_atens = isinstance(target, OpOverload) and target.namespace in ("aten", "prims")
    return is_atens and not _is_view(node) and not target._schema.is_mutable and "val" in node.meta


def _is_view(node: Any) -> bool:
    return node.target is operator.getitem or (
        isinstance(node.target, OpOverload) and is_view(node.target)
    )


def _is_computed(node: Any) -> bool:
    """Whether inductor generates a kernel for a node."""
    from torch._inductor.lowering import fallbacks

    target = node.target
    if (
        not isinstance(target, OpOverload)
        or target.namespace not in ("aten", "prims")
        or _is_view(node)
    ):
        return False
    return target not in fallbacks and target._opname not in CALLED


def _is_result(node: Any) -> bool:
    """Whether a kernel writes this value to memory whatever reads it."""
    sizes = [
        other.meta["val"].numel()
        for other in node.all_input_nodes
        if isinstance(other.meta.get("val"), Tensor)
    ]
    value = node.meta.get("val")
    is_smaller = isinstance(value, Tensor) and bool(sizes) and value.numel() < max(sizes)
    return is_smaller or node.target._opname.startswith(WRITES)


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
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config

    # torch caches this list: fill it before functions are patched
    torch.overrides.get_overridable_functions()
    compile_ = torch.compile

    def graphs(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        return compile_(function, backend=inductor, **settings)

    with ExitStack() as stack:
        stack.enter_context(shared_graphs())
        stack.enter_context(patch.object(torch, "compile", graphs))
        stack.enter_context(
            torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=256)
        )
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        # It would fold a graph on the meta device into constants.
        stack.enter_context(torch._inductor.config.patch(joint_graph_constant_folding=False))
        yield
