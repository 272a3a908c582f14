"""A model class for lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), on any layout.

Every rank runs the harness with the same requests, so that all of them come to the same forwards.
"""

from typing import Any

from lm_eval.api.model import TemplateLM

from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import InputError
from meshtrain.generate import generate_batch
from meshtrain.run.scoring import Scorer

GENERATED = 256  # tokens, where a task does not say how many


class HarnessModel(TemplateLM):
    """What the harness asks of a model: likelihoods of continuations, and texts."""

    backend = "causal"

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.scorer, self.tokenizer = scorer, tokenizer

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.end

    def tok_encode(self, string: str, **unused: Any) -> list[int]:
        return self.tokenizer.encode(string)

    def _loglikelihood_tokens(self, requests: list[Any], **unused: Any) -> list[tuple[float, bool]]:
        return self.scorer.score([(before, predicted) for _, before, predicted in requests])

    def loglikelihood_rolling(self, requests: list[Any], **unused: Any) -> list[float]:
        """Raises InputError: whole texts are measured by `--files`, and not by a task."""
        raise InputError(
            "tasks of the type loglikelihood_rolling are not scored: use --files for the perplexity of texts"
        )

    def generate_until(self, requests: list[Any], **unused: Any) -> list[str]:
        return [self._generate(*request.args) for request in requests]

    def _generate(self, prompt: str, options: dict[str, Any]) -> str:
        until = [options["until"]] if isinstance(options.get("until"), str) else list(options.get("until") or ())
        length = min(options.get("max_gen_toks", GENERATED), self.scorer.seq_len - 1)
        tokens = self.tok_encode(prompt)[-(self.scorer.seq_len - length) :] or [self.eot_token_id]
        settings: dict[str, Any] = {"seq_len": self.scorer.seq_len, "device": self.scorer.device, "seed": 0}
        settings["temperature"] = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
        (row,) = generate_batch(self.scorer.model, [tokens], length, **settings)
        added = row[len(tokens) :]
        if self.eot_token_id in added:
            added = added[: added.index(self.eot_token_id)]
        text = self.tokenizer.decode(added)
        return text[: min([len(text), *(at for stop in until if stop and (at := text.find(stop)) >= 0)])]
