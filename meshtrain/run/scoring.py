"""Log-likelihoods of texts under a model on any layout. All ranks score the same texts together."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.attention import AttentionContext, KVCache
from meshtrain.evaluate import evaluation_mode
from meshtrain.parallel.cross_entropy import gather_logits
from meshtrain.parallel.tensor_parallel import whole_sequences
from meshtrain.pipeline.engine import Pipeline

# the preceding tokens, at least one, and the predicted ones
Pair = tuple[Sequence[int], Sequence[int]]


class Score(NamedTuple):
    log_likelihood: float  # of the predicted tokens, in nats
    is_likeliest: bool  # whether each of them is the likeliest one


class Scorer:
    """Scores continuations, several per forward; each rank has whole sequences, as in
    generation."""

    def __init__(self, model: nn.Module, device: torch.device, seq_len: int, batch: int) -> None:
        """`model`: one with a `cp_plan`. `seq_len`: the most tokens that it sees; of longer pairs
        the last ones."""
        self.model = model
        self.device = device
        self.seq_len = seq_len
        self.batch = batch

    @torch.no_grad()
    def score(self, pairs: Sequence[Pair]) -> list[Score]:
        """The score of each pair. Pairs of similar length share a forward."""
        # With the longest first, what does not fit into memory fails at once.
        order = sorted(range(len(pairs)), key=lambda i: _length(pairs[i]), reverse=True)
        scores: dict[int, Score] = {}
        with (
            evaluation_mode(self.model),
            whole_sequences(self.model),
            # Each batch has a shape of its own, for which it is not worth compiling.
            torch.compiler.set_stance("force_eager"),
        ):
            for first in range(0, len(order), self.batch):
                chosen = order[first : first + self.batch]
                batch = [pairs[i] for i in chosen]
                scores.update(zip(chosen, self._score_batch(batch), strict=True))
        return [scores[i] for i in range(len(pairs))]

    def _score_batch(self, pairs: Sequence[Pair]) -> list[Score]:
        # A row is what the model sees of a pair, and one token more: the last target.
        longest = self.seq_len + 1
        rows = []
        for before, predicted in pairs:
            tokens = [*before, *predicted]
            rows.append(tokens[-longest:])
        logits = self._logits(rows)

        # Two numbers of each row, which all ranks get: only a pipeline's last stage has logits.
        log_likelihoods = [0.0] * len(rows)
        likeliest = [0.0] * len(rows)
        if logits is not None:
            for i, (_, predicted) in enumerate(pairs):
                score = _score_row(logits, i, rows[i], len(predicted))
                log_likelihoods[i] = score.log_likelihood
                likeliest[i] = float(score.is_likeliest)
        if isinstance(self.model, Pipeline):
            numbers = self.model.from_last([*log_likelihoods, *likeliest])
            log_likelihoods = numbers[: len(rows)]
            likeliest = numbers[len(rows) :]

        scores = []
        for log_likelihood, is_likeliest in zip(log_likelihoods, likeliest, strict=True):
            scores.append(Score(log_likelihood, bool(is_likeliest)))
        return scores

    def _logits(self, rows: Sequence[list[int]]) -> Tensor | None:
        """What the model predicts after each token of each row but the last, (b, s, v) or this
        rank's part of it; None: another stage has it."""
        longest = max(len(row) for row in rows) - 1
        # Rows end together, so that their predictions do; shorter ones begin with padding, which
        # the cache keeps out of the attention.
        #
        #   tokens      p p a b c        positions   0 0 0 1 2
        #               d e f g h                    0 1 2 3 4
        tokens = []
        paddings = []
        for row in rows:
            seen = row[:-1]
            padding = longest - len(seen)
            paddings.append(padding)
            tokens.append([row[0]] * padding + seen)
        starts = torch.tensor(paddings)
        positions = (torch.arange(longest) - starts[:, None]).clamp(min=0)

        context = AttentionContext(cache=KVCache(starts.to(self.device)), length=longest)
        inputs = torch.tensor(tokens).to(self.device)
        return self.model(inputs, positions.to(self.device), context)


def _score_row(logits: Tensor, i: int, row: list[int], count: int) -> Score:
    """The score of the last `count` tokens of row `i`."""
    # A row that was cut may have fewer; its first token is predicted by none.
    scored = min(count, len(row) - 1)
    # The last logits predict the row's last token.
    places = slice(logits.shape[1] - scored, None)
    row_logits = gather_logits(logits, i, places)  # (scored, v)
    targets = torch.tensor(row[len(row) - scored :], device=row_logits.device)

    at_least_float32 = torch.promote_types(row_logits.dtype, torch.float32)
    losses = F.cross_entropy(row_logits.to(at_least_float32), targets, reduction="none")
    log_likelihood = -float(losses.double().sum())
    is_likeliest = (row_logits.argmax(-1) == targets).all()
    return Score(log_likelihood, bool(is_likeliest))


def _length(pair: Pair) -> int:
    before, predicted = pair
    return len(before) + len(predicted)
