"""Models on a mesh of this job against the same models in one process, in float64 to the last
digits."""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshtrain
import meshtrain.train
from meshtrain.config import Config
from meshtrain.job.locate import model_file
from meshtrain.job.process import Job
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.loss import sample_losses
from meshtrain.mesh import Mesh
from meshtrain.metrics.logger import read
from meshtrain.metrics.step_timer import StepTimer
from meshtrain.modeling.build import build_model
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel import gloo_collectives
from meshtrain.parallel.grad_sync import (
    defer_waits,
    finish_reduce,
    set_is_last_backward,
    start_reduce,
)
from meshtrain.parallel.sharding import local_part
from meshtrain.parallel.torch_private import to_local
from meshtrain.trainer import Trainer
from tests.parity.experiments import QUICKSTART, SMALL

B, S, V, D = 2, 12, 11, 10  # samples of a microbatch, tokens of a sample, vocabulary, width
TOLERANCE = 1e-12
CPU = torch.device("cpu")
ALONE = Mesh(Layout({}), 0, "cpu", None, {})
llama = model_file("llama")

# (model, data rank, microbatch) -> losses of the samples
Losses = Callable[[nn.Module, int, int], Tensor]


def same(actual: Tensor, expected: Tensor, what: str = "", *, tolerance: float = TOLERANCE) -> None:
    """Asserts equal shapes, and values that are equal up to rounding."""
    torch.testing.assert_close(
        actual.detach(),
        expected.detach(),
        rtol=tolerance,
        atol=tolerance,
        check_dtype=False,
        msg=lambda text: f"{what}: {text}",
    )


def gradients(plain: nn.Module) -> dict[str, Tensor]:
    """By name; a shared parameter has all of its names."""
    parameters = plain.named_parameters(remove_duplicate=False)
    return {name: parameter.grad for name, parameter in parameters if parameter.grad is not None}


def same_gradients(
    model: nn.Module, expected: Mapping[str, Tensor], *, tolerance: float = TOLERANCE
) -> None:
    """Asserts that the parts of this rank are those of whole gradients; what has no gradient may
    have zeros."""
    parameters = dict(model.named_parameters())
    assert parameters
    for name, parameter in parameters.items():
        if name in expected:
            assert parameter.grad is not None, f"{name} has no gradient"
            _, part = local_part(parameter)
            same(
                to_local(parameter.grad),
                expected[name][part],
                f"gradient of {name}",
                tolerance=tolerance,
            )
        else:
            assert parameter.grad is None or not to_local(parameter.grad).any(), (
                f"{name} has a gradient"
            )


def tokens(data_rank: int = 0, microbatch: int = 0, *, vocabulary: int = V) -> Tensor:
    draws = torch.Generator().manual_seed(100 * data_rank + microbatch)
    return torch.randint(vocabulary, (B, S), generator=draws)


def token_losses(model: nn.Module, data_rank: int, microbatch: int) -> Tensor:
    inputs = tokens(data_rank, microbatch)
    return sample_losses(model(inputs), inputs)


def compare(
    make: Callable[[], nn.Module],
    mesh: Mesh,
    losses: Losses = token_losses,
    *,
    steps: int = 1,
    microbatches: int = 1,
    **options: Any,
) -> tuple[nn.Module, nn.Module]:
    """Compares losses and gradients of steps on the mesh, with these options of `parallelize`, and
    in one process, on the samples of all data ranks. `mesh.comm_bytes` counts the steps.

    Returns:
        both models.
    """
    torch.manual_seed(0)
    model = meshtrain.parallelize(make(), mesh, **{"precision": "float64", **options})
    torch.manual_seed(0)
    plain = make().double()
    mesh.comm_bytes.restart()
    for _ in range(steps):  # a step must leave nothing behind that affects the next one
        compare_step(model, plain, mesh, losses, microbatches=microbatches)
    return model, plain


def compare_step(
    model: nn.Module,
    plain: nn.Module,
    mesh: Mesh,
    losses: Losses = token_losses,
    *,
    microbatches: int = 1,
    set_to_none: bool = True,
    as_in_a_pipeline: bool = False,
    tolerance: float = TOLERANCE,
) -> None:
    """`as_in_a_pipeline`: reductions over `tp` follow those over the data ranks."""
    own = mesh.index(*DATA_AXES)
    model.zero_grad(set_to_none)
    plain.zero_grad()
    if as_in_a_pipeline:
        defer_waits(model)
    for microbatch in range(microbatches):
        set_is_last_backward(model, microbatch == microbatches - 1)
        actual = losses(model, own, microbatch)
        actual.sum().backward()
        for data_rank in range(mesh.size(*DATA_AXES)):
            expected = losses(plain, data_rank, microbatch)
            expected.sum().backward()
            if data_rank == own:
                same(actual, expected, f"losses of microbatch {microbatch}", tolerance=tolerance)
    if as_in_a_pipeline:
        start_reduce(model)
        finish_reduce(model)
    same_gradients(model, gradients(plain), tolerance=tolerance)


def train(job: Job, output: Path, *overrides: str) -> list[dict[str, Any]]:
    """Trains the small quickstart on all ranks of this job, as the command does.

    Returns:
        the rows of its metrics.
    """
    keys = [*SMALL, f"train.output={output}", f"data.cache={output.parent / 'cache'}", *overrides]
    layout = job.layout
    status = meshtrain.train.run(
        Config.load(QUICKSTART, keys, world_size=job.world_size, for_training=True), job
    )
    assert status == 0
    job.layout = layout
    dist.barrier()
    return read(output / "metrics.jsonl")


def trainer_of(config: Config, mesh: Mesh) -> Trainer:
    """For ten updates."""
    model = build_model(config, mesh, CPU)
    optimizer = Optimizer(model, config.optimizer, mesh, 10)
    return Trainer(model, optimizer, config, mesh, CPU, task="language", timer=StepTimer(CPU))


def small_llama(kind: Callable[[Any], nn.Module] = llama.Model, **keys: Any) -> nn.Module:
    """A small plain Llama or one of another kind, with the same weights at each call."""
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": V,
    }
    torch.manual_seed(0)
    return kind(llama.Config(**(sizes | keys)))


def latent_attention() -> nn.Module:
    """A plain DeepSeek-V3 of one layer, without experts."""
    deepseek = model_file("deepseek_v3")
    config = deepseek.Config(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=V,
        v_head_dim=6,
        q_lora_rank=8,
        kv_lora_rank=10,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
    )
    torch.manual_seed(0)
    return deepseek.Model(config)


class Sent:
    """Bytes that this rank really sends to others point to point, as gloo's collectives here do,
    and the groups over which it sends between stages, by the target's rank."""

    def __init__(self) -> None:
        self.bytes = 0
        self.groups: dict[int, set[Any]] = defaultdict(set)
        self._between_stages = dist.isend
        self._of_collectives = gloo_collectives.start_send

    def __enter__(self) -> "Sent":
        dist.isend = self._count_between_stages
        gloo_collectives.start_send = self._count
        return self

    def __exit__(self, *error: object) -> None:
        dist.isend = self._between_stages
        gloo_collectives.start_send = self._of_collectives

    def _count_between_stages(self, tensor: Tensor, target: int, group: Any) -> Any:
        self.bytes += tensor.nbytes
        self.groups[target].add(group)
        return self._between_stages(tensor, target, group)

    def _count(self, tensor: Tensor, group: Any, target: int) -> Any:
        self.bytes += tensor.nbytes
        return self._of_collectives(tensor, group, target)


class Created(TorchDispatchMode):
    """Tracks the memory of all tensors made while active, whoever holds it in the end. Those on the
    meta device have none."""

    def __init__(self, besides: Iterable[Tensor]) -> None:
        """`besides`: tensors whose memory, also through views, does not count."""
        super().__init__()
        self._known = {local_part(tensor)[0].untyped_storage()._cdata for tensor in besides}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = to_local(tensor.detach()).untyped_storage()
                if storage._cdata not in self._known:
                    self._made.setdefault(
                        storage._cdata, (StorageWeakRef(storage), storage.nbytes())
                    )
        return result

    def held(self) -> int:
        """The bytes that are still held."""
        gc.collect()
        return sum(size for storage, size in self._made.values() if not storage.expired())


class Peak(Created):
    """The most memory that such tensors had at a time, and the largest of them, in bytes."""

    bytes = largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        alive = [size for storage, size in self._made.values() if not storage.expired()]
        self.bytes = max(self.bytes, sum(alive))
        self.largest = max(self.largest, *alive, 0)
        return result
