"""A Llama whose layers also attend to the embedding's output: keys and values come from another tensor than queries."""

from einops import rearrange
from torch import Tensor, nn

from meshtrain.attention import attention
from meshtrain.config.locate import model_file
from meshtrain.rotary import Rotary, cos_sin

llama = model_file("llama")
Config, init_plan = llama.Config, llama.init_plan
tp_plan = {
    **llama.tp_plan,
    "model.layers.*.cross.[qkv]_proj": "colwise",
    "model.layers.*.cross.o_proj": "rowwise",
}


class Cross(llama.Attention):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            rearrange(project(read), "b s (h e) -> b h s e", e=self.head_dim)
            for project, read in ((self.q_proj, x), (self.k_proj, memory), (self.v_proj, memory))
        )
        return self.o_proj(rearrange(attention(q, k, v, None), "b h s e -> b s (h e)"))


class Layer(llama.Layer):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.cross, self.cross_norm = Cross(config), nn.RMSNorm(config.hidden_size)

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None, memory: Tensor) -> Tensor:
        return super().forward(x + self.cross(self.cross_norm(x), memory), rotary, mask)


class Model(llama.Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        memory = x = self.model.embed_tokens(tokens)
        rotary = Rotary(*cos_sin(positions, *self.config.rope, self.config.rotary_width, 0, x.dtype))
        for layer in self.model.layers:
            x = layer(x, rotary, None, memory)
        return self.lm_head(self.model.norm(x))
