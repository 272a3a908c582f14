"""Names of other frameworks: in which rows of which of their tensors each tensor of a model lies.

torchtitan's Llama rotates neighbouring dims of a head together, as complex numbers, and meshtrain's
(and Hugging Face's) dim i with dim i + e/2 of e. So the rows of q and k have another order in each
head. torchtitan's Qwen3 has the same order as here
(https://github.com/pytorch/torchtitan, its state_dict_adapter.py of each model). Pure.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from meshtrain.errors import InputError, any_of
from meshtrain.parallel.sharding import Shape


class Run(NamedTuple):
    """Rows of a model's tensor, and where they lie in another one: with a step."""

    own: slice
    there: slice


@dataclass(frozen=True)
class Place:
    """Where a model's tensor lies in another checkpoint."""

    name: str  # of the tensor there
    # the index there of each of its heads; none: the tensors are equal
    heads: tuple[int, ...] = ()
    width: int = 0  # rows of a head
    paired: bool = False  # whether rows that rotate together are neighbours there
    all_heads: int = 0  # of the tensor there, which may have heads of several tensors

    def shape(self, own: Shape) -> Shape:
        """The shape of the tensor there."""
        return (self.all_heads * self.width, *own[1:]) if self.heads else own

    def runs(self, rows: slice) -> Iterator[Run]:
        """These rows of the model's tensor, in runs that lie in the same order there."""
        if not self.heads:
            yield Run(rows, rows)
            return
        # Of paired rows, each half of a head has every second row.
        step = 2 if self.paired else 1
        length = self.width // step
        first = rows.start
        while first < rows.stop:
            part, start = divmod(first, length)
            head, half = divmod(part, step)
            end = min(first + length - start, rows.stop)
            there = self.heads[head] * self.width + half + step * start
            last = there + step * (end - first - 1)
            yield Run(slice(first, end), slice(there, last + 1, step))
            first = end


class Heads(NamedTuple):
    """The heads of a model's attention."""

    query: int
    kv: int
    width: int  # rows of each in the weights of q, k and v

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> "Heads":
        """From the keys of a model. Raises InputError: they do not say."""
        query: Any = keys.get("num_attention_heads")
        kv: Any = keys.get("num_key_value_heads")
        width: Any = keys.get("head_dim")
        if kv is None:
            kv = query
        if width is None and isinstance(keys.get("hidden_size"), int) and isinstance(query, int):
            width = keys["hidden_size"] // max(1, query)
        found = cls(query, kv, width)
        if not all(isinstance(number, int) and number > 0 for number in found):
            raise InputError(f"the model's keys do not say how many heads it has: {found}")
        return found


@dataclass(frozen=True)
class Naming:
    """How a framework names the tensors of one model."""

    title: str
    model: str  # `model.name` of the model
    # Pattern of a tensor's name, in which `*` is the number of a layer -> its names there, that of
    # the newest version first.
    names: Mapping[str, Sequence[str]]
    paired: bool  # whether rows of q and k that rotate together are neighbours

    def places(self, name: str, heads: Heads, *, of_state: bool = False) -> list[Place]:
        """Where a tensor may lie, the place in the newest version first; none: it has no name.
        `of_state`: in the optimizer's state."""
        words = name.split(".")
        numbers = [word for word in words if word.isdecimal()]
        layer = numbers[0] if numbers else "*"
        pattern = ".".join("*" if word == layer else word for word in words)
        # `q_proj` of `model.layers.*.self_attn.q_proj.weight`
        _, _, role = pattern.removesuffix(".weight").rpartition(".")

        places = [self._alone(other, role, heads) for other in self.names.get(pattern, ())]
        if places and role in _IN_GROUP:
            # torchtitan trains one matrix for q, k and v, whose state it saves as it is, and its
            # weights in three.
            fused = _fused(role, heads, self.paired)
            places = [fused, *places] if of_state else [*places, fused]
        return [_in_layer(place, layer) for place in places]

    def _alone(self, name: str, role: str, heads: Heads) -> Place:
        """A tensor that lies there by itself."""
        if not self.paired or role not in ("q_proj", "k_proj"):
            return Place(name)
        count = heads.query if role == "q_proj" else heads.kv
        return Place(name, tuple(range(count)), heads.width, paired=True, all_heads=count)


_IN_GROUP = ("q_proj", "k_proj", "v_proj")


def _fused(role: str, heads: Heads, paired: bool) -> Place:
    """Heads in torchtitan's `wqkv`: for each head of k and v the heads of q that use it, then the
    head of k, then that of v."""
    queries = heads.query // heads.kv
    group = queries + 2
    indices = []
    for kv in range(heads.kv):
        members = {"q_proj": range(queries), "k_proj": [queries], "v_proj": [queries + 1]}[role]
        indices += [kv * group + member for member in members]
    return Place(
        FUSED,
        tuple(indices),
        heads.width,
        paired=paired and role != "v_proj",
        all_heads=heads.kv * group,
    )


def _in_layer(place: Place, layer: str) -> Place:
    return replace(place, name=place.name.replace("*", layer))


TITAN_EMBEDDING = "tok_embeddings.weight"
FUSED = "layers.*.attention.qkv_linear.wqkv.weight"
_LLAMA = {
    "model.embed_tokens.weight": (TITAN_EMBEDDING,),
    "model.layers.*.self_attn.q_proj.weight": (
        "layers.*.attention.qkv_linear.wq.weight",
        "layers.*.attention.wq.weight",
    ),
    "model.layers.*.self_attn.k_proj.weight": (
        "layers.*.attention.qkv_linear.wk.weight",
        "layers.*.attention.wk.weight",
    ),
    "model.layers.*.self_attn.v_proj.weight": (
        "layers.*.attention.qkv_linear.wv.weight",
        "layers.*.attention.wv.weight",
    ),
    "model.layers.*.self_attn.o_proj.weight": ("layers.*.attention.wo.weight",),
    "model.layers.*.mlp.gate_proj.weight": ("layers.*.feed_forward.w1.weight",),
    "model.layers.*.mlp.down_proj.weight": ("layers.*.feed_forward.w2.weight",),
    "model.layers.*.mlp.up_proj.weight": ("layers.*.feed_forward.w3.weight",),
    "model.layers.*.input_layernorm.weight": ("layers.*.attention_norm.weight",),
    "model.layers.*.post_attention_layernorm.weight": ("layers.*.ffn_norm.weight",),
    "model.norm.weight": ("norm.weight",),
    "lm_head.weight": ("lm_head.weight", "output.weight"),
}
_QWEN3 = _LLAMA | {
    "model.layers.*.self_attn.q_norm.weight": ("layers.*.attention.q_norm.weight",),
    "model.layers.*.self_attn.k_norm.weight": ("layers.*.attention.k_norm.weight",),
}
# by the word of `--as`
NAMINGS = {
    "llama": Naming("torchtitan's Llama", "llama", _LLAMA, paired=True),
    "qwen3": Naming("torchtitan's Qwen3", "qwen3", _QWEN3, paired=False),
}


# Prefixes -----------------------------------------------------------------------------------------


def find_prefix(stored: Iterable[str], wanted: Sequence[Sequence[str]]) -> str | None:
    """The prefix with which most of the wanted names are stored; None: none of them is.

    `wanted`: for each tensor, the names that it may have. Raises InputError: it may be one or
    another.
    """
    names = {name for alternatives in wanted for name in alternatives}
    prefixes: dict[str, set[str]] = {name: set() for name in names}
    for name in stored:
        words = name.split(".")
        for first in range(len(words)):
            own = ".".join(words[first:])
            if own in names:
                prefixes[own].add(name.removesuffix(own))
    counts: Counter[str] = Counter()
    for alternatives in wanted:
        counts.update(set().union(*(prefixes[name] for name in alternatives)))
    most = max(counts.values(), default=0)
    best = [prefix for prefix, count in counts.items() if count == most]
    if len(best) > 1:
        # Of a model and a copy of it, such as averages, it is the model.
        best = [
            prefix for prefix in best if prefix == "" or _USUAL & set(prefix.split("."))
        ] or best
    if len(best) > 1:
        raise InputError(
            f"the tensors are there several times, under {any_of(sorted(best), 'and')}: leave all "
            "but one of them out of the save"
        )
    return best[0] if best else None


_USUAL = {"model", "state"}
