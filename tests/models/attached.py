"""A Llama whose first layer adds an L2 term of its hidden activations to the loss, and records
statistics of them."""

import torch
from torch import Tensor

from meshtrain.job.locate import model_file
from meshtrain.loss import attach, record
from meshtrain.rotary import Rotary

llama = model_file("llama")
Config, init_plan, tp_plan, cp_plan = llama.Config, llama.init_plan, llama.tp_plan, llama.cp_plan
check = llama.check


class AttachedLayer(llama.Layer):
    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None) -> Tensor:
        x = super().forward(x, rotary, mask)
        squares = x.square().mean(-1)
        record("square", squares, torch.ones_like(squares))
        record("positive", (x > 0).sum(-1))
        return attach(x, "hidden", 3 * squares)


class Model(llama.Model):
    def __init__(self, config) -> None:
        super().__init__(config)
        self.model.layers[0] = AttachedLayer(config)
