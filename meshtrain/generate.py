"""Samples text from a model. All ranks call it together, because a sharded model needs them all for
each forward."""

from collections.abc import Callable, Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtrain.attention import AttentionContext, KVCache
from meshtrain.data.batch import Batch
from meshtrain.errors import InputError, TrainingError
from meshtrain.evaluate import evaluation_mode
from meshtrain.modeling.init import generator
from meshtrain.parallel.context import ContextParallel
from meshtrain.parallel.cross_entropy import gather_logits
from meshtrain.parallel.tensor_parallel import whole_sequences
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
    """Continues a prompt token by token, each sampled from the model's distribution; returns all
    ids.

    Every rank draws the same random numbers, so every rank has the same text. The model always gets
    `seq_len` tokens, padded on the right, where causal attention does not look: one shape, which
    compiles once.

    Args:
        model: maps (tokens, positions, documents), each (b, s) or None, to logits (b, s, v).
        prompt, length: at least one token id, and how many to add.
        seq_len: how many tokens the model sees at most; older ones are dropped.
        temperature: logits are divided by it; 0 takes the likeliest token.
        context: how sequences are split over `cp`, if the model's are.
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
            part = shard(Batch.of((window, positions, None), window)).to(device, torch.float32)
            logits = model(*part.inputs)
            token = 0
            if logits is not None:  # else another stage of a pipeline has them
                owner = 0
                last = len(latest) - 1
                if context is not None:  # the rank of cp that has the token, and where
                    owner, last = context.owner(last, seq_len)
                following = gather_logits(logits, 0, last)
                if context is not None and context.group is not None:
                    dist.broadcast(following, group_src=owner, group=context.group)
                token = _draw(following.double().cpu(), temperature, draws)
            ids += _on_all_ranks(model, [token])
    return ids


@torch.no_grad()
def generate_batch(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    seq_len: int,
    device: torch.device,
    seed: int,
    temperature: float = 0.8,
    top_p: float = 1.0,
    stops: Collection[int] = (),
    tick: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """Continues prompts of different lengths together, with a KV cache: each forward takes one new
    token of each. On any layout the texts are those of `generate`, which has no cache; over `cp`,
    and between the layers of `tp`, each rank has whole sequences here. A text does not depend on
    the other prompts.

    Args, in addition to those of `generate`:
        model: one with a `cp_plan`, which takes an `AttentionContext`.
        seq_len: the maximum number of tokens of a prompt and its continuation together.
        top_p: a token is sampled from the likeliest ones whose total probability reaches this
            (https://arxiv.org/abs/1904.09751, section 3.1).
        stops: a text is over after one of these tokens, which is its last; it ends when all texts
            are over.
        tick: called with the number of tokens added to each prompt so far.

    Raises InputError: a prompt is empty, or too long for its continuation to fit.
    """
    _require_room(prompts, length, seq_len)
    longest = max(len(prompt) for prompt in prompts)
    rows = [list(prompt) for prompt in prompts]
    is_over = [False] * len(rows)
    # The first as in `generate`.
    draws = [generator(seed, "generate")]
    draws += [generator(seed, "generate", i) for i in range(1, len(rows))]

    # Shorter prompts are padded on the left, with any token: see `KVCache`.
    starts = torch.tensor([longest - len(row) for row in rows])
    tokens = torch.tensor([[row[0]] * (longest - len(row)) + row for row in rows])
    context = AttentionContext(cache=KVCache(starts.to(device)), length=seq_len)
    first = 0
    with evaluation_mode(model), whole_sequences(model), torch.compiler.set_stance("force_eager"):
        for done in range(1, length + 1):
            columns = torch.arange(first, first + tokens.shape[1])
            positions = (columns - starts[:, None]).clamp(min=0)
            logits = model(tokens.to(device), positions.to(device), context)
            following = _draw_all(model, logits, draws, temperature, top_p)
            for i, token in enumerate(following):
                if is_over[i]:
                    continue  # the others go on; what this row draws is of no text
                rows[i].append(token)
                is_over[i] = token in stops
            first += tokens.shape[1]
            tokens = torch.tensor(following)[:, None]
            tick(done)
            if all(is_over):
                break
    return rows


def _require_room(prompts: Sequence[Sequence[int]], length: int, seq_len: int) -> None:
    lengths = [len(prompt) for prompt in prompts]
    if min(lengths) == 0 or max(lengths) + length > seq_len:
        raise InputError(
            f"prompts of {min(lengths)} to {max(lengths)} tokens, and {length} more: expected at "
            f"least one token in each, and at most {seq_len} together"
        )


def _draw_all(
    model: nn.Module,
    logits: Tensor | None,
    draws: Sequence[torch.Generator],
    temperature: float,
    top_p: float,
) -> list[int]:
    """The next token of each prompt, the same on all ranks. `logits`: (b, s, v), of which the last
    ones count; None: another stage of a pipeline has them."""
    tokens = [0] * len(draws)
    if logits is not None:
        last = gather_logits(logits, slice(None), -1).double().cpu()
        for i, row in enumerate(last):
            tokens[i] = _draw(row, temperature, draws[i], top_p)
    return _on_all_ranks(model, tokens)


def _on_all_ranks(model: nn.Module, tokens: list[int]) -> list[int]:
    """The sampled tokens, of which a pipeline's last stage tells the others. Raises TrainingError,
    on all ranks: one could not be sampled."""
    if isinstance(model, Pipeline):
        tokens = model.from_last(tokens)
    if min(tokens) < 0:
        raise TrainingError(
            "the model's logits are not finite, so it writes no text: its weights have diverged"
        )
    return tokens


def _draw(logits: Tensor, temperature: float, draws: torch.Generator, top_p: float = 1.0) -> int:
    """Samples a token; -1 if the logits give no distribution."""
    if logits.softmax(-1).isnan().any():
        return -1
    if temperature == 0:
        return int(logits.argmax())
    probabilities = (logits / temperature).softmax(-1)
    if top_p < 1:
        ordered, tokens = probabilities.sort(descending=True, stable=True)
        # By the sum of those before a token, so that the likeliest always remains.
        before = ordered.cumsum(0) - ordered
        probabilities[tokens[before >= top_p]] = 0
    return int(torch.multinomial(probabilities, 1, generator=draws))
