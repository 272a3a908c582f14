"""A Llama with experts in all layers but the first: sigmoid routing with a bias correction and
groups, or softmax."""

from dataclasses import dataclass

from torch import Tensor, nn

from meshtrain.experts import Balance, Experts, Router
from meshtrain.job.locate import model_file

llama = model_file("llama")
check, tp_plan, cp_plan = llama.check, llama.tp_plan, llama.cp_plan
ep_plan = {"model.layers.*.mlp.experts": "ep_dispatch_experts"}
init_plan = {
    "*norm.weight": "ones",
    "*.loads": "zeros",
    "*.e_score_correction_bias": "zeros",
    "*": "normal",
}


@dataclass(frozen=True)
class Config(llama.Config):
    num_experts: int = 6
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 24
    score: str = "softmax"
    router_balance: str = "batch"
    router_aux_loss_coef: float = 0.1
    router_z_loss_coef: float = 0.01
    router_bias_speed: float = 0.05


class MixtureOfExperts(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        balance = Balance(
            config.num_experts,
            config.num_hidden_layers - 1,
            layer,
            kind=config.router_balance,
            aux_loss_coef=config.router_aux_loss_coef,
            z_loss_coef=config.router_z_loss_coef,
            bias_speed=config.router_bias_speed,
        )
        sigmoid = config.score == "sigmoid"
        more = (
            {"score": "sigmoid", "scale": 1.5, "bias": True, "groups": 3, "groups_per_token": 2}
            if sigmoid
            else {}
        )
        e, d = config.num_experts, config.hidden_size
        self.gate = Router(d, e, config.num_experts_per_tok, balance=balance, **more)
        self.experts = Experts(e, d, config.moe_intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x))


class Model(llama.Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for n, layer in enumerate(self.model.layers):
            if n:
                layer.mlp = MixtureOfExperts(config, n)
