"""Context parallelism: every sequence is split over the ranks of `cp`, and attention combines the
parts.

Each rank has two chunks of a sequence (`meshtrain.data.sequence`). Three exact methods of attention
can be combined:

    gather  a rank fetches all keys and values that its queries see
            (Llama 3, https://arxiv.org/abs/2407.21783)
    ring    keys and values arrive from one rank at a time, overlapped with attention to those of
            the previous rank; partial results are merged by their log-sum-exp
            (Liu et al., https://arxiv.org/abs/2310.01889)
    heads   u neighbours exchange parts of the sequence for parts of the heads
            (Ulysses, Jacobs et al., https://arxiv.org/abs/2309.14509); the rest of `cp` uses one of
            the methods above (Fang and Zhao, https://arxiv.org/abs/2405.07719)

The first two are in `attention.py`, the third in `heads.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshtrain.attention import AttentionContext, AttentionOptions
from meshtrain.data.batch import IGNORE, Batch, target_tensors
from meshtrain.data.sequence import chunks_of, kv_heads_of, owner
from meshtrain.dropout import head_keys
from meshtrain.errors import InputError
from meshtrain.layout import context_heads_problem
from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import AxisGroup, axis_group
from meshtrain.parallel.context import attention as _attention  # noqa: F401  (the operators)
from meshtrain.parallel.context import heads as _heads  # noqa: F401

METHODS = ("gather", "ring")
ops = torch.ops.meshtrain


class ContextParallel:
    """How sequences are split over the `cp` ranks of a mesh, and how attention combines the parts.

    It has to live as long as the batches that it has sharded are in use. Without `cp` it changes
    nothing.
    """

    def __init__(
        self, mesh: Mesh, *, method: str = "gather", heads: int = 1, sequence_parallel: bool = True
    ) -> None:
        """`method`: "gather" or "ring". `heads`: how many neighbours on `cp` split attention by
        heads instead. `sequence_parallel`: whether `tp` splits the part of each rank further.

        Raises InputError: an unknown method, `heads` does not divide `cp`, or the mesh lacks the
        groups for `heads`.
        """
        if method not in METHODS:
            raise InputError(
                f"parallel.context: there is no way {method!r}: use {' or '.join(METHODS)}"
            )
        self.size = mesh.size("cp")
        self.index = mesh.index("cp")
        self.group = mesh.group("cp")
        if heads < 1 or self.size % heads:
            raise InputError(context_heads_problem(heads, self.size))
        if 1 < heads < self.size and heads != mesh.size("cp_heads"):
            raise InputError(
                f"heads {heads}: build the mesh of layout.with_context_heads({heads}) for their "
                "groups"
            )
        self.tp = mesh.size("tp") if sequence_parallel else 1
        self.method = method
        # size of the group of neighbours that exchange heads, and this rank's index in it
        self.neighbours = heads, self.index % heads
        # Of "ring" and "heads", if larger than 1. Where only one of them is, it is all of `cp`.
        self.groups: dict[str, AxisGroup] = {}
        if heads < self.size:
            self.groups["ring"] = axis_group(mesh, "cp" if heads == 1 else "cp_ring")
        if heads > 1:
            self.groups["heads"] = axis_group(mesh, "cp" if heads == self.size else "cp_heads")

    def positions(self, length: int) -> Tensor:
        """(s of this rank,) int64: the positions of the padded sequence that this rank has."""
        if self.size == 1:
            return torch.arange(length)
        chunks = chunks_of(length, self.size, self.index, self.tp)
        return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])

    def owner(self, position: int, length: int) -> tuple[int, int]:
        """The rank that has a position: (its index on `cp`, the index among its own positions)."""
        return owner(position, length, self.size, self.tp)

    def shard(self, batch: Batch) -> Batch:
        """This rank's part of a microbatch on the CPU; a `ShardedContext` takes the place of the
        documents.

        Padding repeats the last token and its position, which every model can embed, and has no
        targets.

        Raises InputError: the batch does not have one target per token, or is already sharded.
        """
        if self.size == 1:
            return batch
        shape = batch.sequence_shape()
        if shape is None or len(shape) != 2:
            raise InputError(
                "cp splits sequences, and this batch has one target a sample: use cp: 1"
            )
        record = batch.with_context().tensors.get("documents")
        if isinstance(record, ShardedContext):
            raise InputError("this batch is a rank's part already: call shard once for each batch")
        length = shape[1]
        own = self.positions(length)  # of the padded sequence
        self._require_marks(batch, length, padded=self.size * len(own))

        documents = record.documents if isinstance(record, AttentionContext) else None
        if documents is not None:
            documents = _with_padding(documents, self.size * len(own))
        names = {exchanged: group.name for exchanged, group in self.groups.items()}
        context = ShardedContext(
            documents,
            part=own,
            length=length,
            spans=visible_spans(documents, 2 * self.size),
            method=self.method,
            neighbours=self.neighbours,
            ring=names.get("ring", ""),
            heads=names.get("heads", ""),
        )

        tokens = own.clamp(max=length - 1)  # padding repeats the last one

        def part_of(x: Tensor, dim: int) -> Tensor:
            return x.index_select(dim, tokens)

        def part_of_target(x: Tensor, dim: int) -> Tensor:
            is_padding = (own >= length).view(-1, *[1] * (x.ndim - 2))
            ignored = IGNORE if x.dtype == torch.int64 else 0
            return part_of(x, dim).masked_fill_(is_padding, ignored)

        local = batch.along_sequence(part_of, part_of_target)
        tensors = dict(local.tensors)
        if tensors.get("positions") is None:  # the model would count from 0
            tensors["positions"] = tokens.expand(batch.rows, -1).contiguous()
        tensors["documents"] = context
        return replace(local, tensors=tensors)

    def _require_marks(self, batch: Batch, length: int, padded: int) -> None:
        """Raises InputError: sequences are padded, and no target can say which tokens are
        padding."""
        if padded == length:
            return
        for target in target_tensors(batch.targets):
            if target.dtype == torch.int64 and target.ndim >= 2 and target.shape[1] == length:
                return
        raise InputError(
            f"cp: {self.size} pads sequences of {length} tokens to {padded}, and only whole "
            f"numbers (int64) as targets of each token can say by {IGNORE} which ones are padding: "
            f"use sequences of {padded} tokens, give such targets too, or use cp: 1"
        )


def _with_padding(documents: Tensor, length: int) -> Tensor:
    """(b, s) -> (b, length): padding becomes one more document."""
    padding = length - documents.shape[1]
    one_more = documents.amax(1, keepdim=True) + 1
    return torch.cat([documents, one_more.expand(-1, padding)], dim=1)


def visible_spans(documents: Tensor | None, chunks: int) -> Tensor:
    """(2, chunks) int64: for each chunk the first position that its queries see, and the last
    before its end at which a document begins. If the latter is not larger, they see all keys from
    there up to themselves."""
    if documents is None:
        return torch.zeros(2, chunks, dtype=torch.int64)
    length = documents.shape[1]
    changes = F.pad(documents.diff(dim=1), (1, 0))
    if (changes < 0).any():  # a document may resume: every key may be visible, none is sure to be
        return torch.tensor([[0], [length]]).expand(2, chunks)
    # (b, length): where the document of each token begins
    begins = torch.where(changes > 0, torch.arange(length), 0).cummax(1).values
    step = length // chunks
    first_visible = begins[:, ::step].amin(0)  # begins ascend, so the first query sees most
    last_begin = begins[:, step - 1 :: step].amax(0)
    return torch.stack([first_visible, last_begin])


@dataclass(eq=False, repr=False)
class ShardedContext(AttentionContext):
    """What attention must know for sharded sequences: the documents of the whole padded sequence.

    Numbers that change between microbatches are in tensors, so that they do not cause
    recompilation.
    """

    spans: Tensor | None = None  # from `visible_spans`, always on the CPU
    ring: str = ""  # name of the group that exchanges keys and values; "": none
    method: str = "gather"
    heads: str = ""  # name of the group that exchanges parts of the sequence for heads
    neighbours: tuple[int, int] = (1, 0)  # size of that group, and this rank's index in it

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """q (b, h, s, e), k (b, k, s, e) and v (b, k, s, f) at this rank's positions -> (b, h, s,
        f) there.

        Raises InputError: the number of query heads is not divisible by `context_heads`.
        """
        h, kv_heads = q.shape[1], k.shape[1]
        u, index = self.neighbours
        if h % u:
            raise InputError(
                f"{h} query heads do not divide over context_heads {u}: use a divisor of {h}"
            )
        scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
        bias = None if options.bias is None else options.bias(*self._positions())
        sinks, dropout = options.sinks, options.dropout
        dropout_keys = None
        if dropout is not None:
            samples = dropout.keys_of(len(q)).to(q.device)
            dropout_keys = head_keys(samples, dropout.first_head(h), h)

        # (b, h, s, e) -> (b, h / u, u s, e): fewer heads of a longer part of the sequence
        if u > 1:
            q, k, v = ops.to_heads([q, k, v], [h, kv_heads, kv_heads], self.heads)
            own = slice(index * h // u, (index + 1) * h // u)
            sinks = None if sinks is None else sinks[own]
            bias = None if bias is None else bias[:, own]
            dropout_keys = None if dropout_keys is None else dropout_keys[:, own]
        y, _ = ops.context_attention(
            q,
            k,
            v,
            documents=self.documents,
            spans=self.spans,
            heads=kv_heads_of(h, kv_heads, u, index),
            ring=self.ring,
            method=self.method,
            scale=scale,
            window=options.window,
            soft_cap=options.soft_cap,
            dropout_keys=dropout_keys,
            dropped=0.0 if dropout is None else dropout.p,
            sinks=sinks,
            bias=bias,
        )
        if u > 1:
            [y] = ops.to_sequence([y], [h], self.heads)
        return y

    def _positions(self) -> tuple[Tensor, Tensor]:
        """The positions of the queries that attention has here, this rank's or with neighbours
        theirs too, and of all keys: (1, u s) and (1, length of the padded sequence). Padding has
        that of the last token, for which every bias is defined."""
        assert self.part is not None
        assert self.spans is not None
        u, _ = self.neighbours
        chunk = len(self.part) // 2
        length = self.spans.shape[1] * chunk
        keys = torch.arange(length, device=self.part.device)
        # The first chunks of neighbours follow each other, and so do the second ones, from behind:
        # a chunk of u times the length begins where the first neighbour's does.
        first = self.part[0] // (u * chunk) * (u * chunk) + keys[: u * chunk]
        queries = torch.cat([first, length - 1 - first.flip(0)])
        return queries[None].clamp(max=self.length - 1), keys[None].clamp(max=self.length - 1)

    def to(
        self, device: torch.device, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> Any:
        """A copy on a device. Documents stay on the CPU, so that their visibility is known without
        waiting."""
        without_documents = replace(self, documents=None)
        moved = without_documents.apply(lambda x: x.to(device, non_blocking=non_blocking))
        return replace(moved, documents=self.documents)
