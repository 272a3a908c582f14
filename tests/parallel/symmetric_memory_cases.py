"""Run under torchrun on GPUs: tensor-parallel layers with the fused kernels of torch's symmetric
memory against plain collectives."""

import torch
from torch import Tensor, nn

import meshtrain
from meshtrain.layout import Layout
from meshtrain.loss import sample_losses
from meshtrain.parallel.torch_private import to_local
from tests.comparing import gradients, small_llama

# Tolerance for sums of a few hundred products in float32, in another order, relative to the largest
# number.
ROUNDING = 1e-4
SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 256}


def step(model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """The losses of two samples, and this rank's part of each gradient."""
    tokens = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(1)).to(device)
    losses = sample_losses(model(tokens), tokens)
    losses.sum().backward()
    parts = {name: to_local(grad) for name, grad in gradients(model).items()}
    return {"loss": losses.detach(), **parts}


def main() -> None:
    with meshtrain.start() as job:
        mesh = meshtrain.build_mesh(Layout({"tp": job.world_size}))
        results = []
        # The plain model first: ranks that have set up shared memory keep sharing it.
        for fused in (False, True):
            model = meshtrain.parallelize(
                small_llama(**SIZES).to(job.device), mesh, symmetric_memory=fused
            )
            groups = [layer.axis_group for layer in model.modules() if hasattr(layer, "axis_group")]
            assert {group.fused for group in groups} == {fused}
            results.append(step(model, job.device))
        plain, symmetric = results
        assert plain.keys() == symmetric.keys()
        for name, part in plain.items():
            error = (symmetric[name] - part).abs().max() / part.abs().max()
            assert error < ROUNDING, f"{name} is off by {error}"


if __name__ == "__main__":
    main()
