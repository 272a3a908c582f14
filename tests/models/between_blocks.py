"""A Llama with extra operations between its blocks, such as Gemma's scaling of the embedding and
soft cap of the logits, in the model's forward or inside its blocks, or with an unusual treatment of
its head, as `tweak` says.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshtrain.job.locate import model_file
from meshtrain.loss import attach
from meshtrain.rotary import Rotary, cos_sin

llama = model_file("llama")
init_plan, tp_plan, check = llama.init_plan, llama.tp_plan, llama.check


@dataclass(frozen=True)
class Config(llama.Config):
    tweak: str = "none"


class ScaledEmbedding(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.embedding_dim**0.5


class CappedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return soft_cap(super().forward(x))


def soft_cap(x: Tensor) -> Tensor:
    return 2 * torch.tanh(x / 2)


class Model(llama.Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.tweak = config.tweak
        head = self.lm_head
        match self.tweak:
            case "inside":
                self.model.embed_tokens = ScaledEmbedding(config.vocab_size, config.hidden_size)
                self.lm_head = CappedLinear(config.hidden_size, config.vocab_size, bias=False)
            case "rotary":
                self.rotary = RotaryEmbedding(config)
            case "bias":
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
            case "forward":
                head.forward = lambda x: 2 * nn.Linear.forward(head, x)  # type: ignore[method-assign]
            case "hook":
                head.register_forward_hook(lambda layer, inputs, output: 2 * output)
            case "hook in place":
                head.register_forward_hook(lambda layer, inputs, output: output.mul_(2))
            case "gradient of outputs":
                head.register_full_backward_pre_hook(lambda layer, grads: (2 * grads[0],))
            case "input by a hook":
                head.register_forward_pre_hook(lambda layer, inputs: (2 * inputs[0],))
            case "in a block":
                mlp = self.model.layers[0].mlp
                mlp.register_forward_hook(
                    lambda mlp, inputs, x: x * head(x).detach().softmax(-1).amax(-1, True)
                )

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        tweak = self.tweak
        mask = (tokens != 0)[:, None, None] if tweak == "mask" else None
        if tweak == "ids":
            tokens = tokens.clamp(max=255)
        x = self.model.dropout(self.model.embed_tokens(tokens))
        if tweak == "scale":
            x = x * x.shape[-1] ** 0.5
        if tweak == "in place":
            x *= 2
        if tweak == "values" and bool((positions < 0).any()):
            x = x * 2
        if tweak == "rotary":
            rotary = self.rotary(positions)
        else:
            rotary = Rotary(
                *cos_sin(positions, *self.config.rope, self.config.rotary_width, 0, x.dtype)
            )
        first = x
        for i, layer in enumerate(self.model.layers):
            x = layer(x, rotary, mask)
            if tweak == "middle" and i == 0:
                x = torch.relu(x)
            if tweak == "skip" and i == 1:
                x = layer(x, Rotary(first.mean() * rotary.cos, rotary.sin), None)
        if tweak == "order":
            x = self.model.layers[0](x, rotary, mask)
        if tweak == "eval" and not self.training:
            x = x[:, -1:]
        return self.changed(self.lm_head(self.model.norm(x)))

    def changed(self, logits: Tensor) -> Tensor:
        match self.tweak:
            case "cap":
                return soft_cap(logits)
            case "float":
                return logits.float()
            case "loss":  # attached in training steps only
                return attach(logits, "z", logits.logsumexp(-1).square())
            case "loss of training" if torch.is_grad_enabled():
                return attach(logits, "z", logits.logsumexp(-1).square())
            case "other loss":
                return attach(logits, "norm", self.model.norm.weight.sum().expand(logits.shape[:2]))
            case "twice":
                self.lm_head(torch.zeros_like(logits[..., : self.config.hidden_size]))
            case "in place of logits":
                logits.mul_(2)
            case "gradient" if logits.requires_grad:
                logits.register_hook(lambda grad: 2 * grad)
            case "fails":
                assert logits.max() < 1e9
        return logits


class RotaryEmbedding(nn.Module):
    """As in Hugging Face's models: a module without parameters that belongs to no block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self, positions: Tensor) -> Rotary:
        return Rotary(
            *cos_sin(positions, *self.config.rope, self.config.rotary_width, 0, torch.float32)
        )
