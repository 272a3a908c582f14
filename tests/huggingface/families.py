"""Tiny models of transformers' classes with experts, as meshtrain trains them."""

from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.huggingface.experts import adopt_experts, attach_balance

SIZES = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 12,
    "moe_intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 5, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "num_key_value_heads": 4,
    },
}


def causal_lm(family: str, **keys: Any) -> Any:
    """A model of transformers itself, the same at each call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(SIZES | FAMILIES.get(family, {}) | keys))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    # Values at which rounding to float32 inside of the class decides nothing, and biases that are
    # not 0.
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" not in name and "inv_freq" not in name:
                tensor.normal_(std=0.3, generator=draws)
    return model


class Model(nn.Module):
    """The class as a child. `tp_plan` splits its attention; ranks of tp have all tokens."""

    def __init__(self, family: str, balance: str | None = None, **keys: Any) -> None:
        super().__init__()
        asked = (
            {} if balance is None else {"output_router_logits": True, "router_aux_loss_coef": 2.0}
        )
        self.plain = causal_lm(family, **asked, **keys)
        self.ep_plan = adopt_experts(self)
        if balance is not None:
            attach_balance(self.plain, balance)

    def blocks(self) -> list[nn.Module]:
        return list(self.plain.model.layers)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Any = None
    ) -> Tensor:
        output = self.plain(input_ids=tokens, use_cache=False, output_router_logits=False)
        return output.logits


def tp_plan(model: nn.Module) -> dict[str, str]:
    """Splits the head, shared experts, and attention where its heads depend on nothing else."""
    plan = {"plain.lm_head": "colwise_gather_output"}
    words = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
    words_of_shared = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    for name, module in model.named_modules():
        if name.endswith("self_attn") and set(dict(module.named_children())) == set(words):
            if not hasattr(module, "sinks"):
                plan |= {f"{name}.{own}": word for own, word in words.items()}
        elif name.endswith("shared_experts"):
            plan |= {f"{name}.{own}": word for own, word in words_of_shared.items()}
    return plan
