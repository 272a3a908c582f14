"""Samples text from a model. All ranks call it together, because a sharded model needs them all for each forward."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtrain.data.batch import Batch
from meshtrain.evaluate import evaluation_mode
from meshtrain.modeling.init import generator
from meshtrain.parallel.context import ContextParallel
from meshtrain.parallel.cross_entropy import gather_logits
from meshtrain.pipeline.engine import Pipeline


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    length: int,
    *,
    seq_len: int,
    device: torch.device,
    seed: int,
    temperature: float = 0.8,
    context: ContextParallel | None = None,
) -> list[int]:
    """Continues a prompt, token by token, each drawn from the model's distribution; returns all ids.

    Every rank draws the same numbers, so every rank has the same text. The model always sees `seq_len` tokens, padded
    behind the last one where causal attention does not look: one shape, which compiles once.

    Args:
        model: of (tokens, positions, documents), each (b, s) or None, to logits (b, s, v).
        prompt: token ids, at least one.
        length: how many tokens to add.
        seq_len: how many tokens the model sees at most; older ones are forgotten.
        temperature: logits are divided by it; 0 takes the likeliest token.
        context: how sequences lie over `cp`, where the model's do.
    """
    ids = list(prompt)
    draws = generator(seed, "generate")
    window = torch.zeros(1, seq_len, dtype=torch.int64)
    positions = torch.arange(seq_len)[None]
    shard = Batch.batch if context is None else context.shard
    with evaluation_mode(model):
        for _ in range(length):
            latest = ids[-seq_len:]
            window[0, : len(latest)] = torch.tensor(latest)
            window_part = shard(Batch.of((window, positions, None), window)).to(device, torch.float32)
            logits = model(*window_part.inputs)
            token = 0
            if logits is not None:  # another stage of a pipeline has them
                index, last = (0, len(latest) - 1) if context is None else context.owner(len(latest) - 1, seq_len)
                following = gather_logits(logits, 0, last) if isinstance(logits, DTensor) else logits[0, last]
                if context is not None and context.group is not None:
                    dist.broadcast(following, group_src=index, group=context.group)
                token = _draw(following.double().cpu(), temperature, draws)
            ids.append(model.from_last(token) if isinstance(model, Pipeline) else token)
    return ids


def _draw(logits: Tensor, temperature: float, draws: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=draws))
