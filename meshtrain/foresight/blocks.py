"""The work of each block of a model on a rank, counted in a traced step of one microbatch.

Blocks of one kind are alike, so a model with as few layers as have all kinds is traced. Everything is affine in the
samples of a microbatch: one and two are traced.
"""

import itertools
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshtrain.config import Config
from meshtrain.foresight.trace import META, WITHOUT_SHAPES, TracedStep, fake_world, kind_of, language_batch, watched
from meshtrain.foresight.work import Pass, Product, Send, Work
from meshtrain.layout import Layout
from meshtrain.modeling.build import spec_of
from meshtrain.parallel.collectives import implementations
from meshtrain.parallel.torch_private import to_local
from meshtrain.pipeline.stage import blocks_of

SENT_OVER = ("tp", "cp", "cp_heads", "cp_ring", "ep")  # by blocks; what FSDP and DDP send is not theirs
FREE = ("empty", "empty_like", "empty_strided", "new_empty", "detach")  # operators that start no kernel
_known: dict[tuple[Any, ...], tuple[Any, list[tuple[Work, Work]]]] = {}


def works_of(config: Config, layout: Layout) -> tuple[Work, ...]:
    """Of each block, in order, for one microbatch. Raises RuntimeError, TypeError: the model cannot be traced."""
    spec, parallel, train = spec_of(config), config.parallel, config.train
    cp, tp = layout.size("cp"), layout.size("tp")
    key: tuple[Any, ...] = (
        id(spec),
        cp,
        tp,
        layout.experts,
        layout.context_heads,
        config.data.seq_len,
        config.data.mask_documents,
    )
    key += (parallel.context, parallel.recompute, parallel.regather, parallel.sequence_parallel, parallel.compile)
    key += (train.precision, train.linear_precision)
    if key not in _known:
        small = Layout({"dp_shard": max(1, layout.experts // (cp * tp)), "cp": cp, "tp": tp})
        small = small.with_context_heads(layout.context_heads).with_experts(layout.experts)
        config_of_few, places = _with_few_layers(config)
        pairs = zip(_counted(config_of_few, small, 1), _counted(config_of_few, small, 2), strict=True)
        parted = [_parted(*pair) for pair in pairs]
        _known[key] = spec, [parted[at] for at in places]
    return tuple(_extended(first, two, config.batch.micro_size - 1) for first, two in _known[key][1])


def _with_few_layers(config: Config) -> tuple[Config, list[int]]:
    """The config of a model with as few layers as have all kinds of blocks; for each block of the model one like it."""
    whole = [kind_of(block) for block in blocks_of(spec_of(config).meta)]
    layers = config.model.keys.get("num_hidden_layers", 0)
    for count in range(1, layers):
        keys = {**config.model.keys, "num_hidden_layers": count}
        try:
            few = replace(config, model=replace(config.model, keys=keys))
            kinds = [kind_of(block) for block in blocks_of(spec_of(few).meta)]
        except (ValueError, IndexError):  # of a model that has to have more
            continue
        if set(kinds) == set(whole):
            return few, [kinds.index(kind) for kind in whole]
        if count == 8:
            break
    return config, list(range(len(whole)))


def _counted(config: Config, layout: Layout, samples: int) -> tuple[Work, ...]:
    batch = replace(config.batch, micro_size=samples, global_size=samples * layout.size("dp_shard"))
    config = replace(config, layout=layout.sizes, resolved=layout, batch=batch)
    config = replace(config, parallel=replace(config.parallel, verify=False, symmetric_memory=False))
    with warnings.catch_warnings(), fake_world(layout, 0, "cuda") as mesh:
        warnings.simplefilter("ignore")  # torch's, of its own calls and of views that nobody changes
        step = CountedStep(config, mesh, language_batch(config), META)
        rows = samples * config.data.seq_len * config.model.keys.get("num_experts_per_tok", 1)
        step.live.rows = rows // layout.size("cp", "tp")
        return step.works()


def _parted(first: Work, two: Work) -> tuple[Work, Work]:
    """With the gradients of weights apart: the products of a backward that sum over tokens, so over samples."""
    backward = first.input_grad.products, two.input_grad.products
    sums = [a.k != b.k for a, b in zip(*backward, strict=True)] if len({*map(len, backward)}) == 1 else []
    parted = []
    for work, products in zip((first, two), backward, strict=True):
        of_weights = tuple(itertools.compress(products, sums))
        others = tuple(itertools.compress(products, [not is_sum for is_sum in sums])) if sums else products
        rest = replace(work.input_grad, products=others, operators=work.input_grad.operators - len(of_weights))
        parted.append(replace(work, input_grad=rest, weight_grad=Pass(of_weights, operators=len(of_weights))))
    return parted[0], parted[1]


def _times(products: Sequence[Product]) -> dict[Product, float]:
    times: dict[Product, float] = defaultdict(float)
    for product in products:
        times[replace(product, times=1)] += product.times
    return times


def _extended(first: Any, two: Any, samples: int) -> Any:
    """What is of one sample and of two, for so many samples more than one."""
    if isinstance(first, Work | Pass | Product | Send):
        fields = {name: _extended(value, getattr(two, name), samples) for name, value in vars(first).items()}
        return type(first)(**fields)
    if isinstance(first, tuple) and len(first) != len(two):  # the loss goes in chunks of tokens, more of them for more
        first, second = (_times(products) for products in (first, two))
        times = {
            product: _extended(first.get(product, 0), second.get(product, 0), samples) for product in first | second
        }
        return tuple(replace(product, times=n) for product, n in times.items())
    if isinstance(first, tuple):
        return tuple(_extended(*pair, samples) for pair in zip(first, two, strict=True))
    return first if isinstance(first, str) or first == two else first + samples * (two - first)


@dataclass
class Tally:
    """What one pass through a block does."""

    products: list[Product] = field(default_factory=list)
    attention_flops: float = 0
    moved: float = 0
    operators: int = 0
    sends: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def as_pass(self) -> Pass:
        sends = tuple(Send(axis, kind, sent) for (axis, kind), sent in self.sends.items())
        return Pass(tuple(self.products), self.attention_flops, self.moved, self.operators, sends)


class CountedStep(TracedStep):
    """A step whose operators are counted by block, forward and backward apart."""

    def works(self) -> tuple[Work, ...]:
        """Of each block; what runs outside of them counts as the last one's."""
        blocks = list(blocks_of(self.model))
        names = {block: name for name, block in self.model.named_modules() if block in set(blocks)}
        self.last = names[blocks[-1]]
        for block in blocks:
            block.forward = self._weighed(names[block], block.forward)
        add, comm_bytes = self.mesh.comm_bytes.add, self.mesh.comm_bytes

        def send(axis: str, kind: str, sent: float) -> None:
            add(axis, kind, sent)
            if axis in SENT_OVER:
                self._tally().sends[axis, kind] += sent

        comm_bytes.add = send  # type: ignore[method-assign]
        with watched(self.live):
            for parameter in self.model.parameters():
                self.live.see(to_local(parameter.detach()))
            for _ in range(2):  # the first step makes what stays
                self.tallies: dict[tuple[str, bool], Tally] = defaultdict(Tally)
                self.bytes: dict[str, dict[str, float]] = defaultdict(dict)
                self.live.watch, self.live.block = self._count, ""
                self.trainer.forward_backward(1, self.microbatches)
        return tuple(self._work(block, names[block]) for block in blocks)

    def _work(self, block: nn.Module, name: str) -> Work:
        parameters = sum(map(_before_fsdp, block.parameters()))
        forward, backward = (self.tallies[name, is_backward].as_pass() for is_backward in (False, True))
        sizes = self.bytes[name]
        saved = sizes["after"] - sizes["before"] - sizes["output"] + sizes["input"]
        peaks = sizes["peak"] - sizes["before"], sizes.get("backward", 0.0)
        return Work(name, parameters, forward, backward, Pass(), saved, *peaks)

    def _weighed(self, name: str, forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            sizes, live = self.bytes[name], self.live
            sizes |= {"before": live.total, "input": _nbytes((args, kwargs)), "peak": live.total}
            output = forward(*args, **kwargs)
            sizes |= {"after": live.total, "output": _nbytes(output)}
            # A tensor of its own: its gradient's hooks are not those of the next block's input.
            return output if name == self.last else output.view_as(output)

        return run

    def _tally(self) -> Tally:
        return self.tallies[self.live.block or self.last, self.live.phase == "backward"]

    def _count(self, func: Any, args: Any, out: Any) -> None:
        name, block = func.name().split(".")[0], self.live.block
        if name in implementations and name not in WITHOUT_SHAPES:
            return  # what it does was counted
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        on_device = any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves((args, out)))
        if views or not on_device or name.partition("::")[2] in FREE:
            return
        product, tally = _product(name, args), self._tally()
        tally.operators += 1
        if product is not None:
            tally.products.append(product)
        elif "attention" in name:
            tally.attention_flops += _attention_flops(name, args)
        else:
            tally.moved += _nbytes(args) + _nbytes(out)
        if block:
            sizes, total = self.bytes[block], self.live.total
            if self.live.phase == "backward":
                sizes["backward"] = max(sizes.get("backward", 0.0), total - sizes.setdefault("start", total))
            else:
                sizes["peak"] = max(sizes["peak"], total)


def _before_fsdp(parameter: nn.Parameter) -> int:
    """Elements on a rank, of all shards that FSDP makes of them."""
    elements, mesh = to_local(parameter.detach()).numel(), getattr(parameter, "device_mesh", None)
    for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True) if mesh is not None else ():
        elements *= size if name in ("dp_shard", "fsdp", "efsdp") else 1
    return elements


def _nbytes(tree: Any) -> float:
    return sum(x.numel() * x.itemsize for x in tree_leaves(tree) if isinstance(x, Tensor))


def _attention_flops(name: str, args: Any) -> float:
    """Of all pairs of tokens, as everyone counts them; a backward computes the scores again, and four products."""
    backward = "backward" in name
    q, k, v = args[backward : 3 + backward]
    keys = k.shape[2 if "dot_product" in name else 1]
    return 2 * q.numel() // q.shape[-1] * keys * (q.shape[-1] + v.shape[-1]) * (2.5 if backward else 1)


def _product(name: str, args: Any) -> Product | None:
    """The product of matrices that an operator is."""
    name = name.removesuffix("_")
    a, b = args[1:3] if name in ("aten::addmm", "aten::baddbmm") else (*args, None, None)[:2]
    if name in ("aten::mm", "aten::addmm", "aten::_scaled_mm"):
        return Product(a.shape[0], b.shape[1], a.shape[1])
    if name in ("aten::bmm", "aten::baddbmm"):
        return Product(a.shape[1], b.shape[2], a.shape[2], a.shape[0])
    if name in ("aten::linear", "aten::matmul"):
        return Product(a.numel() // a.shape[-1], b.numel() // a.shape[-1], a.shape[-1])
    if name.startswith("meshtrain::grouped") and b.dim() == 2:  # of weights: each expert sums over its rows
        return Product(a.shape[1], b.shape[1], a.shape[0])
    if name.startswith("meshtrain::grouped"):
        width = b.shape[-1] if b.shape[-2] == a.shape[1] else b.shape[-2]
        return Product(max(1, a.shape[0] // b.shape[0]), width, a.shape[1], b.shape[0])
    return None
