"""First values: functions of seed, name and block of rows, the same however a parameter is
split."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshtrain.job.locate import model_file
from meshtrain.modeling.init import BLOCK_ELEMENTS, initialise, materialise

PLAN = {"*.bias": "zeros", "norm.weight": "ones", "deep.weight": "kaiming", "*": "normal"}
ROWS = 3 * BLOCK_ELEMENTS // 64 + 17  # several blocks of rows and a part of one


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, ROWS)
        self.deep = nn.Conv2d(8, 40, 3)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)


def drawn(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = Small().to(dtype)
    initialise(model, PLAN, seed=seed, std=0.02)
    return {name: p.detach() for name, p in model.named_parameters()}


def test_rules() -> None:
    values = drawn()
    assert values["wide.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(values["wide.weight"].mean().item()) < 1e-4
    assert values["deep.weight"].std().item() == pytest.approx(math.sqrt(2 / 72), rel=0.05)
    assert (values["norm.weight"] == 1).all()
    assert (values["wide.bias"] == 0).all()


def test_values_depend_on_seed_and_name_and_on_nothing_else() -> None:
    first = drawn()
    torch.manual_seed(99)
    again, other, double = drawn(), drawn(seed=1), drawn(dtype=torch.float64)
    wide, rows = first["wide.weight"], BLOCK_ELEMENTS // 64
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert torch.equal(double["wide.weight"].float(), wide), "precision does not change the draw"
    assert not torch.equal(wide, other["wide.weight"])
    assert not torch.equal(wide.flatten()[:32], first["head.weight"].flatten())
    assert not torch.equal(wide[:rows], wide[rows : 2 * rows]), "blocks differ"


# torch remembers the coordinate of a mesh of one shape, so each world in this process has a size of
# its own.
@pytest.mark.parametrize(("rank", "world"), [(0, 3), (1, 4), (4, 5), (6, 7), (66, 67)])
def test_a_shard_holds_its_part_of_the_whole(rank: int, world: int) -> None:
    """Shards of rows, and of columns, of which the last is short or empty."""
    whole = drawn()["wide.weight"]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,))
        for placement in (Shard(0), Shard(1), Replicate()):
            expected = distribute_tensor(whole, mesh, [placement], src_data_rank=None).to_local()
            module = nn.Module()
            module.wide = nn.Linear(64, ROWS, bias=False)
            empty = torch.zeros(ROWS, 64)
            module.wide.weight = nn.Parameter(
                distribute_tensor(empty, mesh, [placement], src_data_rank=None)
            )
            initialise(module, PLAN, seed=0, std=0.02)
            assert torch.equal(module.wide.weight.to_local(), expected), placement
    finally:
        dist.destroy_process_group()


def test_memory_for_a_model_on_the_meta_device_keeps_ties() -> None:
    llama = model_file("llama")
    with torch.device("meta"):
        model = llama.Model(llama.Config(tie_word_embeddings=True))
    materialise(model, torch.device("cpu"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    ("plan", "message"),
    [({"*.weight": "ones", "[!h]*.bias": "zeros"}, r"head\.bias"), ({"*": "xavier"}, "'xavier'")],
)
def test_a_parameter_without_a_rule_is_named(plan: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        initialise(Small(), plan, seed=0, std=1)
