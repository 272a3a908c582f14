"""Log-likelihoods of texts under a model on any layout. All ranks score the same texts together."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshtrain.attention import AttentionContext, KVCache
from meshtrain.evaluate import evaluation_mode
from meshtrain.parallel.cross_entropy import gather_logits
from meshtrain.parallel.tensor_parallel import whole_sequences
from meshtrain.pipeline.engine import Pipeline

# the preceding tokens, at least one, and the predicted ones
Pair = tuple[Sequence[int], Sequence[int]]


class Scorer:
    """Scores continuations, several per forward; each rank has whole sequences, as in
    generation."""

    def __init__(self, model: nn.Module, device: torch.device, seq_len: int, batch: int) -> None:
        """`model`: one with a `cp_plan`. `seq_len`: the most tokens that it sees; of longer pairs
        the last ones."""
        self.model, self.device, self.seq_len, self.batch = model, device, seq_len, batch

    @torch.no_grad()
    def score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """For each pair, the log-likelihood of the predicted tokens in nats, and whether each of
        them is the likeliest. Pairs of similar length share a forward."""
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
        results: dict[int, tuple[float, bool]] = {}
        with (
            evaluation_mode(self.model),
            whole_sequences(self.model),
            torch.compiler.set_stance("force_eager"),
        ):
            for first in range(0, len(order), self.batch):
                chosen = order[first : first + self.batch]
                results |= dict(zip(chosen, self._score([pairs[i] for i in chosen]), strict=True))
        return [results[i] for i in range(len(pairs))]

    def _score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        rows = [[*before, *predicted][-self.seq_len - 1 :] for before, predicted in pairs]
        longest = max(map(len, rows)) - 1
        starts = torch.tensor([longest - len(row) + 1 for row in rows])
        tokens = torch.tensor([[row[0]] * (longest - len(row) + 1) + row[:-1] for row in rows])
        positions = (torch.arange(longest) - starts[:, None]).clamp(min=0)
        context = AttentionContext(cache=KVCache(starts.to(self.device)), length=longest)
        logits = self.model(tokens.to(self.device), positions.to(self.device), context)
        numbers = [0.0] * 2 * len(rows)
        if logits is not None:  # another stage of a pipeline has them
            numbers = [
                n
                for i, pair in enumerate(pairs)
                for n in self._of_row(logits, i, rows[i], len(pair[1]))
            ]
        if isinstance(self.model, Pipeline):
            numbers = self.model.from_last(numbers)
        return [
            (total, bool(likeliest))
            for total, likeliest in zip(numbers[::2], numbers[1::2], strict=True)
        ]

    def _of_row(self, logits: Tensor, i: int, row: list[int], count: int) -> list[float]:
        count = min(count, len(row) - 1)
        last = slice(logits.shape[1] - count, None)
        own = gather_logits(logits, i, last)
        targets = torch.tensor(row[len(row) - count :], device=own.device)
        values = torch.promote_types(own.dtype, torch.float32)
        losses = torch.nn.functional.cross_entropy(own.to(values), targets, reduction="none")
        return [-float(losses.double().sum()), float((own.argmax(-1) == targets).all())]
