"""Classes of transformers, split by their own plans, against one process in float64."""

from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshtrain.mesh import Mesh
from meshtrain.optim import param_groups
from meshtrain.parallel.sharding import local_part
from meshtrain.parallel.torch_private import to_local
from tests.comparing import V, compare, same, token_losses
from tests.float64_inside import keep_float64

pytestmark = pytest.mark.ranks(2)

SIZES = {
    "vocab_size": V,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
# what a class has of its own
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},  # one layer of queries, keys and values, and one of gate and up
    "olmo2": {},  # norms over all heads
    "glm4": {"partial_rotary_factor": 0.5},  # one layer of gate and up
    "gemma": {},  # head and embedding share a weight, and the embedding scales what it looks up
    "gemma2": {"query_pre_attn_scalar": 6, "sliding_window": 4},
    "mistral": {"sliding_window": 4},
    "cohere": {},  # tied, with a scale of the logits
    "gpt_neox": {"attention_bias": True},  # queries, keys and values of each head in a row
    "granite_swa": {},  # a number per head
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "deepseek_v2": {  # latent attention
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 8,
        "q_lora_rank": 8,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 6,
        "head_dim": 2,
    },
}


class Causal(nn.Module):
    """A class of transformers that returns its logits."""

    def __init__(self, family: str, attention: str = "eager", **keys: Any) -> None:
        super().__init__()
        import transformers

        keep_float64("transformers")
        settings = SIZES | FAMILIES[family] | keys
        config = transformers.AutoConfig.for_model(family, **settings)
        config.use_cache = False
        self.inner = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, experts_implementation="eager"
        )
        with torch.no_grad():  # biases and the like, of which many begin with zeros or ones
            for parameter in self.parameters():
                parameter += 0.1 * torch.randn_like(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(tokens).logits
        return logits


def plan_of(model: Causal) -> dict[str, str]:
    """The class's own plan, of the layers that this size has."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    plan = {f"inner.{pattern}": word for pattern, word in model.inner.tp_plan.items()}
    return {
        pattern: word
        for pattern, word in plan.items()
        if any(fnmatchcase(name, pattern) for name in names)
    }


def same_as_one_process(mesh: Mesh, family: str, **keys: Any) -> nn.Module:
    """Losses and gradients of two steps, and then parameters after three of AdamW."""
    torch.manual_seed(0)
    plan = plan_of(Causal(family, **keys))
    model, plain = compare(
        lambda: Causal(family, **keys), mesh, steps=2, tp_plan=plan, verify=keys == {}
    )
    updates = torch.optim.AdamW(param_groups(model), lr=1e-2)
    expected = torch.optim.AdamW(param_groups(plain), lr=1e-2)
    for step in range(3):
        for one, optimizer in ((model, updates), (plain, expected)):
            optimizer.zero_grad()
            token_losses(one, 0, step).sum().backward()
            optimizer.step()
    whole = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        part = whole[name][local_part(parameter)[1]]
        same(to_local(parameter), part, f"{name} after three updates", tolerance=1e-9)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_class_by_its_own_plan(tp: Mesh, family: str) -> None:
    same_as_one_process(tp, family)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (12, 3)])
def test_ranks_that_share_key_heads(tp: Mesh, heads: int, kv_heads: int, attention: str) -> None:
    """A class keeps how many queries share a head, which is another number on a rank."""
    keys = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 2}
    same_as_one_process(tp, "llama", attention=attention, **keys)
