"""Tensor-parallel training with torch's own tools: `parallelize_module` with a plan, and
`fully_shard` over `dp_shard`.

The baseline of meshtrain's tensor parallelism. The plan is the usual one for a Llama (as in
torchtitan): q, k and v share one gathered input, as do gate and up; the logits stay sharded by
vocabulary, and the loss is computed from the shards (`loss_parallel`). FSDP keeps its parameters
for a step and reduces gradients in the last microbatch.

From meshtrain it uses the plain model and the order of the samples.
"""

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from baseline import Task
from plain_ddp import adamw


def train(task: Task) -> None:
    """Trains on this rank; rank 0 writes each step's loss. The section `layout` has `tp` and may
    have `dp_shard`; `parallel.sequence_parallel` is whether activations between the parallel
    regions are shards of the sequence."""
    dist.init_process_group("gloo")
    dp = task.config["layout"].get("dp_shard", 1)
    tp = task.config["layout"]["tp"]
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp_shard", "tp"))
    model = task.plain_model()
    parallelize(model, mesh, task.config["parallel"]["sequence_parallel"])
    optimizer = adamw(model, task.learning_rate)
    micro = task.micro_size
    share = task.global_size // dp
    first = mesh.get_local_rank("dp_shard") * share
    with task.writing() if dist.get_rank() == 0 else nullcontext() as write_step:
        for step, samples in task.steps():
            mine = samples[first : first + share]
            total = torch.zeros(())
            for i in range(0, share, micro):
                last_microbatch(model, i + micro >= share)
                inputs, targets = task.read(mine[i : i + micro])
                with loss_parallel():
                    loss: Any = task.loss(model(inputs), targets)  # a DTensor
                    (loss * dp).backward()  # FSDP takes the mean over the ranks of dp_shard
                total += loss.detach().to_local()
            norm = clip(model, 1.0, mesh)
            optimizer.step()
            optimizer.zero_grad()
            if dp > 1:
                dist.all_reduce(total, group=mesh.get_group("dp_shard"))
            if write_step is not None:
                write_step(step, {"loss": total.item(), "grad_norm": norm.item()})
    dist.barrier()
    dist.destroy_process_group()


def parallelize(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Splits the parameters of a Llama over `tp`, and the parts over `dp_shard`."""
    parallelize_module(model, mesh["tp"], plan(Shard(1) if sequence_parallel else Replicate()))
    if mesh.size(0) > 1:
        # a unit per layer takes longer
        fully_shard(model, mesh=mesh["dp_shard"], reshard_after_forward=False)


def plan(between: Placement) -> dict[str, ParallelStyle]:
    """How each layer is split. `between`: placement of activations (b, s, d) between the parallel
    regions."""
    attention = PrepareModuleInput(
        input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
    )
    styles: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "model.layers.*.self_attn": attention,
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=between),
        "model.layers.*.mlp": PrepareModuleInput(
            input_layouts=between, desired_input_layouts=Replicate()
        ),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    # else each rank of tp has the whole norm and its whole gradient, as in one process
    if between.is_shard():
        norms = (
            "model.layers.*.input_layernorm",
            "model.layers.*.post_attention_layernorm",
            "model.norm",
        )
        styles |= {name: SequenceParallel() for name in norms}
    return styles


def last_microbatch(model: nn.Module, last: bool) -> None:
    """Makes FSDP keep whole parameters and gradients until the last backward of a step."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        model.set_is_last_backward(last)


def clip(model: nn.Module, largest: float, mesh: DeviceMesh) -> Tensor:
    """Clips gradients to a norm of at most `largest` with one all-reduce; returns the norm
    before."""
    squares = torch.zeros(())
    parts: list[Tensor] = []
    for parameter in model.parameters():
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            if gradient.placements != parameter.placements:
                # The embedding's is whole on every rank; a norm's under sequence_parallel is still
                # a partial sum.
                gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
            gradient = gradient.to_local()
        squares += gradient.square().sum() / copies(parameter, mesh)
        parts.append(gradient)
    dist.all_reduce(squares)
    norm = squares.sqrt()
    torch._foreach_mul_(parts, torch.clamp(largest / (norm + 1e-6), max=1.0))
    return norm


def copies(parameter: Tensor, mesh: DeviceMesh) -> int:
    """How many ranks of the mesh hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return mesh.size()
    # Where FSDP splits what tp has already split, a placement is not a plain Shard.
    parts = [
        parameter.device_mesh.size(i)
        for i, place in enumerate(parameter.placements)
        if not place.is_replicate()
    ]
    return mesh.size() // math.prod(parts)
