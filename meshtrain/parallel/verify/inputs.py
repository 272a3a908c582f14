"""Refuses inputs of a parallelized model's forward that would mean something else there."""

from typing import Any

from torch import Tensor, nn

from meshtrain.attention import AttentionContext
from meshtrain.errors import InputError
from meshtrain.parallel.context import ContextParallel, ShardedContext
from meshtrain.parallel.tensor_parallel import VocabParallelEmbedding


def refuse_single_tokens(model: nn.Module) -> None:
    """Makes embeddings reject as many tokens as `tp` has ranks, of which each would have one:
    `Dropout` takes a second dim of 1 for the whole sequence. Other data ranks, and other stages, do
    not see it."""
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.register_forward_pre_hook(_refuse_single_tokens, with_kwargs=True)


def _refuse_single_tokens(
    embedding: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]
) -> None:
    assert isinstance(embedding, VocabParallelEmbedding)
    tokens = next(iter((*inputs, *named.values())))
    tp = embedding.axis_group.size
    if embedding.training and tokens.shape[-1] == tp:
        raise InputError(
            f"dropout with sequence_parallel: of {tp} tokens over tp {tp} each rank has one, which "
            "would be taken for the whole sequence: use longer sequences (data.seq_len), a smaller "
            "tp or sequence_parallel: false"
        )


def take_only_parts(model: nn.Module, context: ContextParallel) -> None:
    """Makes a model reject whole sequences: over `cp` it takes what `context.shard` returns."""

    def check(
        model: nn.Module,
        inputs: tuple[Any, ...],
        named: dict[str, Any],
        # Held here, so that the groups of `cp` live as long as the model. Not as an attribute of
        # it, which a copy of the model would copy.
        held: ContextParallel = context,
    ) -> None:
        _, positions, record = (*inputs, None, None, None)[:3]
        positions = named.get("positions", positions)
        record = named.get("documents", record)
        if isinstance(record, AttentionContext) and record.cache is not None:
            return  # in generation each rank has whole sequences
        if not isinstance(record, ShardedContext) or positions is None:
            raise InputError(
                "with cp the model takes parts of sequences: call ContextParallel(mesh, "
                "...).shard(batch), and model(*inputs) with the inputs of what it returns"
            )

    # Before FSDP's own hook, which gathers parameters.
    model.register_forward_pre_hook(check, with_kwargs=True, prepend=True)
