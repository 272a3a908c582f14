"""What an update costs, as the plan predicts it: counted from the operators that run."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from meshtrain.job.locate import model_file
from meshtrain.optim.groups import update_bytes, update_flops
from meshtrain.optim.registry import OPTIMIZERS
from meshtrain.parallel.sharding import ParameterSpec
from tests.optim.steps import config, optimizer_of, set_gradients, update

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
WITHOUT_TRAFFIC = {"detach", "empty", "empty_like", "new_empty", "_unsafe_view"}
ONLY_WRITES = {"arange", "full", "full_like", "ones_like", "zeros", "zeros_like"}


class Traffic(TorchDispatchMode):
    """Counts the bytes of the tensors that operators read and write, without products."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in PRODUCTS | WITHOUT_TRAFFIC:
            return result
        if name == "copy_":
            read = [args[1]]
        elif name in ONLY_WRITES:
            read = []
        else:
            read = [args, kwargs]
        written = [result]
        if result is None:
            written = changed_arguments(func, args, kwargs or {})
        for tensor in tree_leaves((read, written)):
            if isinstance(tensor, Tensor):
                self.nbytes += tensor.numel() * tensor.element_size()
        return result


def changed_arguments(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """Of an operator on lists of tensors, which returns nothing."""
    changed = []
    for argument, tensors in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        # The schema of a fused kernel names gradients, which it writes only to scale them.
        if argument.name == "grads" and kwargs.get("grad_scale") is None:
            continue
        changed.append(tensors)
    return changed


def costs_of_update(model: nn.Module, **settings: Any) -> tuple[int, int]:
    """Bytes and FLOPs of the end of a step."""
    optimizer = optimizer_of(model, **settings)
    set_gradients(model, 1)
    factor = None
    if settings.get("clip_norm", 1.0) is not None:
        factor = torch.tensor(0.5, dtype=torch.float64)
    with Traffic() as traffic, FlopCounterMode(display=False) as products:
        update(optimizer, 1, factor)
    return traffic.nbytes, products.get_total_flops()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"name": "adamw"},
        {"name": "adamw", "clip_norm": None},
        {"name": "adamw", "ema_decay": 0.9},
        {"name": "adamw", "state_precision": "bfloat16"},
        {"name": "adamw", "state_precision": "bfloat16", "clip_norm": None},
        {"name": "sgd"},
        {"name": "sgd", "nesterov": False, "clip_norm": None},
        {"name": "muon"},
        {"name": "muon", "nesterov": False, "clip_norm": None},
    ],
    ids=lambda settings: " ".join(f"{value}" for value in settings.values()),
)
def test_an_update_costs_what_its_operators_move(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    spec, keys = ParameterSpec("weight", (128, 512)), config(**settings)
    nbytes, flops = costs_of_update(nn.Linear(512, 128, bias=False).to(dtype), **settings)
    # The operators also touch a few scalars.
    assert nbytes == pytest.approx(update_bytes(keys, spec, dtype.itemsize), rel=1e-3)
    assert flops == update_flops(keys, spec)
    assert bool(flops) == (settings["name"] == "muon")


def test_stacked_experts_are_as_many_matrices_as_files_hold() -> None:
    """The gate and the up projection of an expert are orthogonalized apart."""
    module = model_file("qwen3_moe")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = module.Model(
        module.Config(
            **sizes, num_experts=3, moe_intermediate_size=10, intermediate_size=24, vocab_size=11
        )
    )
    keys = config(name="muon")
    specs = [ParameterSpec(name, tuple(p.shape)) for name, p in model.named_parameters()]
    _, flops = costs_of_update(model, name="muon")
    assert flops == sum(update_flops(keys, spec, module.stored_as) for spec in specs)


def test_a_rule_that_says_nothing_of_its_costs_gets_an_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "normalized", "tests.optim.toy_optimizer:NormalizedMomentum")
    vector, keys = ParameterSpec("bias", (8192,)), config(name="normalized")
    nbytes, flops = costs_of_update(nn.ParameterList([torch.ones(8192)]), name="normalized")
    assert nbytes == pytest.approx(update_bytes(keys, vector, 4), rel=0.2)
    assert flops == update_flops(keys, vector) == 0
