"""Samples text from a model. All ranks call it together, because a sharded model needs them all for each forward."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtrain.evaluate import evaluation_mode
from meshtrain.modeling.init import generator
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
    """
    ids = list(prompt)
    draws = generator(seed, "generate")
    window = torch.zeros(1, seq_len, dtype=torch.int64)
    positions = torch.arange(seq_len, device=device)[None]
    with evaluation_mode(model):
        for _ in range(length):
            latest = ids[-seq_len:]
            window[0, : len(latest)] = torch.tensor(latest)
            logits = model(window.to(device), positions, None)
            token = 0
            if logits is not None:  # another stage of a pipeline has them
                last = 0, len(latest) - 1
                following = gather_logits(logits, *last) if isinstance(logits, DTensor) else logits[last]
                token = _draw(following.double().cpu(), temperature, draws)
            ids.append(model.from_last(token) if isinstance(model, Pipeline) else token)
    return ids


def _draw(logits: Tensor, temperature: float, draws: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=draws))
