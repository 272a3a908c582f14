"""Models that do something around their blocks, as their authors have written them: `blocks()` names
the layers alone.

    nanogpt    learned positions, dropout, a last norm, a head tied to the embedding
    gpt2       of transformers: the same
    gemma2     of transformers: a scaled embedding, angles that depend on positions, capped logits
    bert       of transformers: a norm behind three embeddings, a pooled token, a classifier
    vit        of transformers: patches, a cls token, positions that are no module
    tuples     layers hand on two streams and more in a tuple, and one of them is a list
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.attention import attention
from meshtrain.dropout import Dropout
from tests.float64_inside import keep_float64

D, HEADS = 16, 4
tp_plan = {  # of nanogpt
    "transformer.wte": "embedding_rowwise",
    "transformer.h.*.up": "colwise",
    "transformer.h.*.down": "rowwise",
    "lm_head": "colwise_gather_output",
}


@dataclass(frozen=True)
class Config:
    kind: str = "nanogpt"
    vocab_size: int = 24
    num_hidden_layers: int = 4
    dropout: float = 0.1
    most_positions: int = 64
    tweak: str = ""


@dataclass(frozen=True)
class ImageConfig:
    image_size: int = 8
    in_channels: int = 1
    num_classes: int = 10
    num_hidden_layers: int = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            part.view(b, s, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        x = x + self.out(attention(q, k, v).transpose(1, 2).reshape(b, s, -1))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """In the form of nanoGPT."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tweak = config.tweak
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, D),
                "wpe": nn.Embedding(config.most_positions, D),
                "drop": Dropout(config.dropout),
                "h": nn.ModuleList(Layer() for _ in range(config.num_hidden_layers)),
                "ln_f": nn.LayerNorm(D),
            }
        )
        self.between = Dropout(config.dropout)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, D))
        self.lm_head = nn.Linear(D, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def blocks(self) -> list[nn.Module]:
        return list(self.transformer.h)

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Any = None
    ) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        embedded = self.transformer.wte(tokens)
        x = self.transformer.drop(embedded + self.transformer.wpe(positions))
        first = x
        for i, layer in enumerate(self.transformer.h):
            x = layer(x)
            x += self.gain * i  # in place, on what a stage has received
            if i == 1:
                x = self.between(x)
            if i == 2 and self.tweak == "skip":
                x = x + first
            if i == 2 and self.tweak == "read" and float(first.sum()) > 0:
                x = x * 2
        if self.tweak == "embedding again":
            x = x + self.transformer.wte(tokens)
        if self.tweak == "embedding kept":
            x = x + embedded
        return self.lm_head(self.transformer.ln_f(x))


class TupleLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mix = Layer(), nn.Linear(D, D)

    def forward(self, hidden: Tensor, streams: tuple[Any, ...]) -> tuple[Any, ...]:
        residual, notes, mask = streams
        hidden = self.layer(hidden) * mask
        residual = residual + self.mix(hidden)
        # The third stops its gradient, the fourth has none.
        return hidden, (residual, [notes[0] + 1, hidden.detach() + notes[1], None], mask)


class Tuples(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, D)
        self.layers = nn.ModuleList(TupleLayer() for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(D, config.vocab_size)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def forward(self, tokens: Tensor, positions: Tensor, documents: Any = None) -> Tensor:
        x = self.embed(tokens)
        streams: tuple[Any, ...] = (torch.zeros_like(x), [0, x * 2], (tokens % 5 > 0)[..., None])
        for layer in self.layers:
            x, streams = layer(x, streams)
        residual, notes, _ = streams
        return self.head(x + residual + notes[1] * notes[0])


class Transformer(nn.Module):
    """A class of transformers, called as a model is called here."""

    def __init__(self, model: nn.Module, layers: str, **named: Any) -> None:
        super().__init__()
        self.model, self.layers, self.named = model, layers, named

    def blocks(self) -> list[nn.Module]:
        return list(self.model.get_submodule(self.layers))


class Causal(Transformer):
    def forward(self, tokens: Tensor, positions: Tensor, documents: Any = None) -> Tensor:
        return self.model(input_ids=tokens, position_ids=positions, use_cache=False).logits


class Classifier(Transformer):
    def forward(self, inputs: Tensor, *unused: Any) -> Tensor:
        return self.model(inputs).logits


def gpt2(config: Config) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=64,
        n_embd=D,
        n_layer=config.num_hidden_layers,
        n_head=HEADS,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    return Causal(GPT2LMHeadModel(sizes), "transformer.h")


def gemma2(config: Config) -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = Gemma2Config(
        vocab_size=config.vocab_size,
        hidden_size=D,
        intermediate_size=24,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=4,
        sliding_window=8,
        final_logit_softcapping=2.0,
        attn_implementation="eager",
    )
    return Causal(Gemma2ForCausalLM(sizes), "model.layers")


def bert(config: Config) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = BertConfig(
        vocab_size=config.vocab_size,
        hidden_size=D,
        intermediate_size=24,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=HEADS,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        num_labels=3,
    )
    return Classifier(BertForSequenceClassification(sizes), "bert.encoder.layer")


def vit(config: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=D,
        intermediate_size=24,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=HEADS,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        num_labels=10,
    )
    model = ViTForImageClassification(sizes)
    layers = next(name for name, m in model.named_modules() if isinstance(m, nn.ModuleList))
    return Classifier(model, layers)


KINDS: dict[str, Callable[[Any], nn.Module]] = {
    "nanogpt": GPT,
    "tuples": Tuples,
    "gpt2": gpt2,
    "gemma2": gemma2,
    "bert": bert,
}


def build(config: Config) -> nn.Module:
    keep_float64("transformers")
    return KINDS[config.kind](config)


Model = build
