"""A Llama with an unusual treatment of its head or its logits, as `tweak` says."""

import torch
from torch import Tensor, nn

from meshtrain.config.locate import model_file
from meshtrain.loss import attach
from tests.models import between_blocks

llama = model_file("llama")
init_plan, tp_plan, check = llama.init_plan, llama.tp_plan, llama.check
Config = between_blocks.Config


class Model(between_blocks.Model):
    def __init__(self, config: between_blocks.Config) -> None:
        super().__init__(config)
        head = self.lm_head
        match config.tweak:
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
                mlp.register_forward_hook(lambda mlp, inputs, x: x * head(x).detach().softmax(-1).amax(-1, True))

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        logits = super().forward(tokens, positions, documents)
        match self.tweak:
            case "loss":  # attached in training steps only
                logits = attach(logits, "z", logits.logsumexp(-1).square())
            case "twice":
                self.lm_head(torch.zeros_like(logits[..., : self.config.hidden_size]))
            case "in place of logits":
                logits.mul_(2)
            case "other loss":
                logits = attach(logits, "norm", self.model.norm.weight.sum().expand(logits.shape[:2]))
            case "loss of training" if torch.is_grad_enabled():
                logits = attach(logits, "z", logits.logsumexp(-1).square())
            case "gradient" if logits.requires_grad:
                logits.register_hook(lambda grad: 2 * grad)
            case "fails":
                assert logits.max() < 1e9
        return logits
