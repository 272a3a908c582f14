"""A Llama or a GPT-2 of transformers, whose class gives first values by `_init_weights`: it has no
`init_plan`, and the Llama has angles in a buffer."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Config:
    kind: str = "llama"
    vocab_size: int = 256
    width: int = 16
    layers: int = 2
    heads: int = 4
    tied: bool = False

    @property
    def of_llama(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.width,
            intermediate_size=2 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            tie_word_embeddings=self.tied,
        )

    @property
    def of_gpt2(self) -> GPT2Config:
        return GPT2Config(
            vocab_size=self.vocab_size,
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.heads,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=self.tied,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )


class Llama(LlamaForCausalLM):
    def forward(self, tokens: Tensor, positions: Tensor, documents: Any = None) -> Tensor:
        forward = super().forward
        return forward(input_ids=tokens, position_ids=positions, use_cache=False).logits

    def blocks(self) -> list[nn.Module]:
        return [self.model.embed_tokens, *self.model.layers, self.model.norm, self.lm_head]


class GPT2(GPT2LMHeadModel):
    def forward(self, tokens: Tensor, positions: Tensor, documents: Any = None) -> Tensor:
        forward = super().forward
        return forward(input_ids=tokens, position_ids=positions, use_cache=False).logits

    def blocks(self) -> list[nn.Module]:
        own = self.transformer
        return [own.wte, own.wpe, *own.h, own.ln_f, self.lm_head]


def Model(config: Config) -> nn.Module:  # noqa: N802  (the name that a model file exports)
    return Llama(config.of_llama) if config.kind == "llama" else GPT2(config.of_gpt2)


tp_plan = {
    "model.layers.*.self_attn.[qkv]_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
