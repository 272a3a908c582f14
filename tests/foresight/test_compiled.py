"""Compiled blocks save for their backward in a trace what they save when the compiler has made
kernels of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch.fx.experimental.proxy_tensor import make_fx

from meshtrain.config import Config
from meshtrain.dropout import set_dropout
from meshtrain.foresight.compiled import Graph
from meshtrain.foresight.live import LiveBytes, watched
from meshtrain.foresight.trace import META, TracedStep, fake_world
from meshtrain.mesh import build_mesh
from tests.foresight.traced import BATCH, SMALL
from tests.launching import ROOT

QUICKSTART, CONVNET = "configs/quickstart.yaml", "configs/digits.yaml"
GPT2 = f"model={{name: {Path(__file__).parent / 'gpt2.py'}}}"
CASES = {
    "llama": (QUICKSTART, "parallel.recompute=selective"),
    "gpt2": (QUICKSTART, GPT2, "data.seq_len=32", *BATCH),
    "convnet": (CONVNET,),
}


def saved(step: TracedStep) -> list[int]:
    """Bytes of each tensor that a forward leaves for its backward, beside the parameters."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype != torch.uint8:  # the state of a generator
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    batch = step.microbatches[0].to(
        next(step.model.parameters()).device, step.trainer.dtype, with_targets=True
    )
    set_dropout(step.model, seed=0, step=0, samples=range(len(batch.targets)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = step.model(*batch.inputs)
    weights = {parameter.untyped_storage()._cdata for parameter in step.model.parameters()}
    sizes = [storage.nbytes() for key, storage in storages.items() if key not in weights]
    assert output.requires_grad
    return sorted(sizes)


def test_a_convolution_is_counted_with_all_its_arguments() -> None:
    x, weight = (torch.empty(*sizes, device="meta") for sizes in ((2, 4, 9, 9), (4, 4, 3, 3)))
    settings = [2, 2], [1, 1], [1, 1], False, [0, 0], 1

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.aten.convolution(x, weight, None, *settings)

    called: list[tuple[Any, ...]] = []
    live = LiveBytes("meta")
    live.watch = lambda func, arguments, output: called.append(arguments)
    graph = Graph(make_fx(run, tracing_mode="fake")(x, weight))
    with watched(live):
        graph([x, weight])
    [arguments] = called
    assert arguments == (x, weight, None, *settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_saves_what_real_kernels_save(name: str) -> None:
    file, *overrides = CASES[name]
    small = () if any(override.startswith("model=") for override in overrides) else SMALL[file]
    config = Config.load(ROOT / file, [*small, *overrides, "parallel.compile=true"], world_size=1)
    torch.compiler.reset()
    with fake_world(config.resolved, 0, "cpu") as mesh:
        traced = saved(TracedStep(config, mesh, META))
    torch.compiler.reset()
    cpu = torch.device("cpu")
    with inductor.patch(layout_optimization=False):  # it copies weights of convolutions
        real = saved(TracedStep(config, build_mesh(config.resolved, "cpu"), cpu))
    assert traced == real
