"""Run under torchrun on GPUs: tensor-parallel layers with the fused kernels of torch's symmetric memory against
plain collectives; prints what failed."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshtrain
from meshtrain.layout import Layout
from meshtrain.loss import sample_losses
from tests.parallel.tensor_parallel_cases import Cases, small_llama

# Tolerance for sums of a few hundred products in float32, in another order.
ROUNDING = 1e-4
SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 256}


class Fused(Cases):
    def near(self, found: Tensor, expected: Tensor, what: str) -> None:
        """Equal up to the order of sums: by the largest difference, relative to the largest number."""
        self.equal(float((found - expected).abs().max() / expected.abs().max()) < ROUNDING, True, what)

    def step(self, model: nn.Module, device: torch.device) -> dict[str, Tensor]:
        """The losses of two samples, and this rank's part of each gradient."""
        tokens = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(1)).to(device)
        losses = sample_losses(model(tokens), tokens)
        losses.sum().backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        parts = {name: grad.to_local() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
        return {"loss": losses.detach(), **{name: part for name, part in parts.items() if part is not None}}

    def compare(self, device: torch.device) -> None:
        found = []
        # The plain model first: ranks that have set up shared memory keep sharing it.
        for fused in (False, True):
            model = meshtrain.parallelize(small_llama(**SIZES).to(device), self.mesh, symmetric_memory=fused)
            self.equal({layer.axis_group.fused for layer in layers_of(model)}, {fused}, "which kernels are used")
            found.append(self.step(model, device))
        plain, symmetric = found
        self.equal(plain.keys(), symmetric.keys(), "gradients that are there")
        for name, part in plain.items():
            self.near(symmetric[name], part, name)


def layers_of(model: nn.Module) -> list:
    return [module for module in model.modules() if hasattr(module, "axis_group")]


def main() -> None:
    with meshtrain.start() as job:
        cases = Fused(meshtrain.build_mesh(Layout({"tp": job.world_size})))
        cases.compare(job.device)
        cases.tell()


if __name__ == "__main__":
    main()
