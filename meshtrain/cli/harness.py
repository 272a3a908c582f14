"""A model class for lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), on
any layout.

Every rank runs the harness with the same requests, so that all ranks run the same forwards.
"""

from itertools import islice
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from meshtrain.cli.checkpoint_model import with_begin
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import InputError
from meshtrain.generate import generate_batch
from meshtrain.run.scoring import Scorer

GENERATED = 256  # tokens, if a task does not say how many
# the first one given counts
_LENGTHS = (
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
)
_OPTIONS = {"until", "do_sample", "temperature", "top_p", *_LENGTHS}


class HarnessModel(TemplateLM):
    """The harness's interface of a model: log-likelihoods of continuations and of texts, and
    generation of texts."""

    backend = "causal"

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.scorer, self.tokenizer = scorer, tokenizer

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.end

    @property
    def prefix_token_id(self) -> int:
        """What is before a whole text: the token that begins the run's documents, or else the one
        that ends them."""
        return self.eot_token_id if self.tokenizer.begin is None else self.tokenizer.begin

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **unused: Any
    ) -> list[int]:
        """`add_special_tokens`: false for a text that the harness puts behind a prefix."""
        ids = self.tokenizer.encode(string)
        return ids if add_special_tokens is False else with_begin(ids, self.tokenizer)

    def _loglikelihood_tokens(self, requests: list[Any], **unused: Any) -> list[tuple[float, bool]]:
        # The harness puts the prefix before an answer without a question, and encodes the answer as
        # a prompt, so that a token that begins prompts is there twice.
        twice = [self.tokenizer.begin]
        pairs = []
        for _, before, predicted in requests:
            is_twice = before == twice == predicted[:1]
            pairs.append((before, predicted[1:] if is_twice else predicted))
        return list(self.scorer.score(pairs))

    def loglikelihood_rolling(self, requests: list[Any], **unused: Any) -> list[float]:
        """Each token of a text is predicted once, the first one after the prefix; the last window
        has as much context before it as the model sees."""
        pairs: list[Any] = []  # of all texts, which are scored together
        counts = []  # pairs of each text
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = list(
                get_rolling_token_windows(tokens, self.prefix_token_id, self.scorer.seq_len, 1)
            )
            pairs += [make_disjoint_window(window) for window in windows]
            counts.append(len(windows))
        scores = iter(self.scorer.score(pairs))
        return [sum(value for value, _ in islice(scores, count)) for count in counts]

    def generate_until(self, requests: list[Any], **unused: Any) -> list[str]:
        return [self._generate(*request.args) for request in requests]

    def _generate(self, prompt: str, options: dict[str, Any]) -> str:
        """Raises InputError: the task has a generation option that is not supported here."""
        # Values that say nothing (0, 1, null) may be given for any option.
        others = [
            key
            for key, value in options.items()
            if key not in _OPTIONS and value not in (None, 0, 1)
        ]
        if others:
            raise InputError(
                f"generation_kwargs: {', '.join(others)}: expected of "
                f"{', '.join(sorted(_OPTIONS))} only, in the task"
            )

        lengths = [int(options[key]) for key in _LENGTHS if options.get(key) is not None]
        length = lengths[0] if lengths else GENERATED
        tokens = self._prompt_tokens(prompt, length)
        length = min(length, self.scorer.seq_len - len(tokens))

        samples = options.get("do_sample")
        if samples is False or options.get("top_k") == 1:
            temperature = 0.0
        else:
            temperature = float(options.get("temperature", 1.0 if samples else 0.0))
        (row,) = generate_batch(
            self.scorer.model,
            [tokens],
            length,
            seq_len=self.scorer.seq_len,
            device=self.scorer.device,
            seed=0,
            temperature=temperature,
            top_p=float(options.get("top_p", 1.0)),
            stops=self.tokenizer.stops,
        )

        added = row[len(tokens) :]
        if added and added[-1] in self.tokenizer.stops:
            added = added[:-1]
        text = self.tokenizer.decode(added)
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else until
        ends = [text.find(stop) for stop in stops if stop and stop in text]
        return text[: min(ends, default=len(text))]

    def _prompt_tokens(self, prompt: str, length: int) -> list[int]:
        """The tokens of a prompt that `length` more are to follow. A long one is cut at its
        beginning; but at least half of what the model sees is left for the prompt."""
        most = self.scorer.seq_len
        room = max(most - length, most // 2)
        if self.tokenizer.begin is not None:
            room -= 1
        tokens = self.tok_encode(prompt, add_special_tokens=False)[-room:]
        return with_begin(tokens, self.tokenizer) or [self.prefix_token_id]
