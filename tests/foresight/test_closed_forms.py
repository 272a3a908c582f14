"""What a traced block leaves for its backward is what the table of docs/tensor-parallel.md says, in
every cell."""

import itertools

import torch

import meshtrain
from meshtrain.foresight.live import LiveBytes, watched
from meshtrain.foresight.trace import fake_world
from meshtrain.layout import Layout
from meshtrain.parallel.torch_private import to_local
from models.llama import Config, Model, Rotary

# samples, tokens, widths of a block and its feed-forward, heads, width of a head
B, S, D, F, H, E = (
    2,
    8,
    24,
    40,
    4,
    6,
)
SIZES = {
    "hidden_size": D,
    "intermediate_size": F,
    "num_attention_heads": H,
    "num_hidden_layers": 1,
    "vocab_size": 32,
}


def traced(tp: int, recompute: str, regather: bool, kv: int) -> float:
    """In elements; float32."""
    with fake_world(Layout({"tp": tp}), 0, "cpu") as mesh:
        with torch.device("meta"):
            plain = Model(Config(**SIZES, num_key_value_heads=kv))
        block = meshtrain.parallelize(
            plain,
            mesh,
            recompute=recompute,
            regather=regather,
            verify=False,
            symmetric_memory=False,
        ).model.layers[0]
        live = LiveBytes()
        with watched(live):
            for parameter in block.parameters():
                live.see(to_local(parameter.detach()))
            x = torch.empty(S // tp, B, D, device="meta").transpose(0, 1).requires_grad_()
            before = live.total  # the leaf of the graph, too
            inputs = [
                x * 1,
                Rotary(*(torch.empty(1, S, 1, E // 2, device="meta") for _ in range(2))),
            ]
            output = block(*inputs, None)
            del inputs
            return (live.total - before - output.untyped_storage().nbytes()) / 4


def of_table(t: int, recompute: str, regather: bool, kv: int) -> float:
    n = B * S
    # of each: its input, the same normalised, and a number per token
    norms = 2 * (2 * n * D + n) // t
    # q, k, v, gate and up; a head for each rank at least
    products = n * ((H + 2 * max(kv, t)) * E + 2 * F) // t
    attended = n * (H * E + H) // t  # the output, and a number per query
    # what the ranks' parts of two inputs make together
    gathered = 2 * n * D if t > 1 and not regather else 0
    rest = {
        "none": norms + products + attended + 2 * n * F // t + (gathered or 2 * n * D // t),
        "selective": n * D // t + products + attended + gathered + 2 * n * D // t,
        "full": n * D // t,
    }
    return S * E + rest[recompute]


def test_every_cell() -> None:
    cells = list(itertools.product((1, 2, 4), ("none", "selective", "full"), (False, True), (4, 2)))
    assert {cell: traced(*cell) for cell in cells} == {cell: of_table(*cell) for cell in cells}
