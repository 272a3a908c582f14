"""Refuses modules and parameters of which a layout would change what they compute, by their kind
alone."""

from torch import Tensor, nn

from meshtrain.errors import AgreedError, InputError
from meshtrain.parallel.mixed_precision import state_parameters
from meshtrain.parallel.sync_batch_norm import SyncBatchNorm, can_sync
from meshtrain.parallel.tensor_parallel import VocabParallelEmbedding
from meshtrain.parallel.torch_private import has_accumulation_hooks, has_gradient_hooks


def refuse_batch_statistics(model: nn.Module, of_parts: bool = False) -> None:
    """`of_parts`: ranks would have parts of the sequences, of which a `SyncBatchNorm` knows
    nothing."""
    for name, module in model.named_modules():
        options = [
            key
            for key in ("max_norm", "scale_grad_by_freq", "sparse")
            if getattr(module, key, None)
        ]
        if options and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise AgreedError(
                f"{name} is an embedding with {options[0]}, which goes by the tokens that a rank "
                "happens to have: with "
                f"several data ranks or cp the loss would depend on the layout. Leave {options[0]} "
                "out, or use one "
                "data rank and cp: 1"
            )
        statistics = isinstance(module, nn.modules.batchnorm._NormBase) and (
            isinstance(module, nn.modules.batchnorm._BatchNorm) or module.track_running_stats
        )
        if isinstance(module, SyncBatchNorm) and not of_parts:
            continue
        if statistics and module.training:
            offered = can_sync(module) and not of_parts
            synced = (
                "parallel.sync_batch_norm: true (statistics of all data ranks), " if offered else ""
            )
            raise AgreedError(
                f"{name} is a {type(module).__name__}, which computes with the samples that a rank "
                "happens to have: "
                "with several data ranks, cp or sequence_parallel the loss would depend on the "
                "layout. Use a GroupNorm "
                f"or LayerNorm, {synced}freeze it with eval(), or use one data rank, cp: 1 and "
                "sequence_parallel: false"
            )


def refuse_accumulation_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if has_accumulation_hooks(parameter):
            raise AgreedError(
                f"the parameter {name} has a hook behind the accumulation of its gradient, which "
                "with several data "
                "ranks would act on a part of the sum: use optimizer.clip_norm, an autograd "
                "function in the forward, "
                "a hook by register_hook that is linear, or one data rank"
            )


def refuse_parameters(model: nn.Module, fsdp: bool) -> None:
    """Rejects parameters that cannot be replaced by a part on each rank."""
    state = state_parameters(model)
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter):
            raise AgreedError(
                f"the parameter {name} has a hook on its gradient, which its parts on several "
                "ranks would not have: "
                "change the gradient by an autograd function in the forward, or use dp_replicate "
                "or pp"
            )
        if fsdp and parameter.dim() == 0 and parameter not in state:
            raise AgreedError(
                f"the parameter {name} has no dim that dp_shard or cp could cut: give it one, "
                "torch.zeros(1), or use "
                "dp_replicate"
            )
        if fsdp and parameter.numel() == 0:
            shape = tuple(parameter.shape)
            raise AgreedError(
                f"the parameter {name} of shape {shape} has no elements that dp_shard or cp could "
                "cut: leave it "
                "out, or use dp_replicate"
            )


def refuse_single_tokens(
    embedding: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]
) -> None:
    """`Dropout` takes a second dim of 1 for the whole sequence. Other data ranks, and other stages,
    do not see it."""
    assert isinstance(embedding, VocabParallelEmbedding)
    tokens, tp = next(iter((*inputs, *named.values()))), embedding.axis_group.size
    if embedding.training and tokens.shape[-1] == tp:
        raise InputError(
            f"dropout with sequence_parallel: of {tp} tokens over tp {tp} each rank has one, which "
            "would be taken for "
            "the whole sequence: use longer sequences (data.seq_len), a smaller tp or "
            "sequence_parallel: false"
        )


def refuse_plain_dropout(model: nn.Module) -> None:
    """Without sequence parallelism each rank of `tp` would draw its own mask for the same
    activations."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            own = (
                f"{name} is a {type(module).__name__}, whose mask each rank of tp would draw for "
                "itself"
            )
            same = "without sequence_parallel all of them have the same activations"
            raise InputError(
                f"{own}, and {same}: use meshtrain.dropout.Dropout, a probability of 0, or, if the "
                "model computes the "
                "same with it, sequence_parallel true"
            )
