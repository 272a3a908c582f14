"""A Llama that predicts further tokens, as a user writes one."""

from dataclasses import dataclass

from torch import Tensor, nn

from meshtrain.attention import AttentionContext
from meshtrain.job.locate import model_file
from meshtrain.prediction import MultiTokenPrediction
from meshtrain.rotary import Rotary, cos_sin

llama = model_file("llama")


@dataclass(frozen=True)
class Config(llama.Config):
    predicted: int = 2  # tokens after the next one


class Model(llama.Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.mtp = MultiTokenPrediction(
            [llama.Layer(config) for _ in range(config.predicted)],
            embedding=self.model.embed_tokens,
            head=self.lm_head,
            norm=lambda: nn.RMSNorm(config.hidden_size),
        )

    def blocks(self) -> list[nn.Module]:
        *decoder, head = super().blocks()
        return [*decoder, *self.mtp.blocks(), head]

    def forward(self, tokens: Tensor, positions: Tensor, documents: AttentionContext) -> Tensor:
        context = AttentionContext.of(documents)
        x = self.model.embed_tokens(tokens)
        theta, scaling = self.config.rope
        cos, sin = cos_sin(
            positions,
            theta,
            scaling,
            width=self.config.rotary_width,
            max_position_embeddings=self.config.max_position_embeddings,
            dtype=x.dtype,
        )
        rotary = Rotary(cos, sin)
        for layer in self.model.layers:
            x = layer(x, rotary, context)
        x = self.mtp(self.model.norm(x), lambda depth: (rotary, context))
        return self.lm_head(x)


def _everywhere(plan: dict[str, str]) -> dict[str, str]:
    """A plan of Llama's, for its layers and those of predictions."""
    return {pattern.replace("model.layers.*", "*"): word for pattern, word in plan.items()}


check, init_plan = llama.check, llama.init_plan
cp_plan = _everywhere(llama.cp_plan)
tp_plan = {
    **_everywhere(llama.tp_plan),
    "*.ahead.embed_tokens": "embedding_rowwise_sequence",
    "*.eh_proj": "replicate",
    "*.head.lm_head": "colwise_logits",
}
