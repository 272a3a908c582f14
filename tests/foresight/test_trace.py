"""A traced step has the live bytes of the same step with real CPU tensors, to the byte, and sends
what it counts."""

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshtrain.modeling.build
from meshtrain.attention import AttentionContext
from meshtrain.config import Config
from meshtrain.data.batch import Batch
from meshtrain.foresight import torch_patches, trace
from meshtrain.foresight.live import _Storage
from meshtrain.foresight.trace import TracedStep
from meshtrain.job.process import Job
from meshtrain.mesh import build_mesh
from meshtrain.parallel import activation_offload, fsdp
from meshtrain.pipeline.schedule import NAMES
from tests.foresight.traced import SMALL
from tests.launching import ROOT
from tests.ranks import made_once

QUICKSTART, CONVNET, EXPERTS = "configs/quickstart.yaml", "configs/digits.yaml", "configs/moe.yaml"
# Without a metric, which only the last of several stages has, and in a trace nobody agrees on.
REFERENCE = (
    QUICKSTART,
    f"model.name={ROOT}/tests/models/with_reference.py",
    "train.reference={weights: none}",
)
DDP, FSDP, TP, CP, PP = (
    f"layout={{{axis}: 2}}" for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp")
)
CASES = {
    "DDP": (QUICKSTART, DDP, "train.precision=bfloat16"),
    "FSDP": (QUICKSTART, FSDP),
    "FSDP that keeps": (
        QUICKSTART,
        FSDP,
        "parallel.reshard_after_forward=false",
        "train.precision=bfloat16",
    ),
    "tp": (QUICKSTART, TP),
    "tp, full": (QUICKSTART, TP, "parallel.recompute=full", "parallel.regather=true"),
    "tp, selective": (QUICKSTART, TP, "parallel.recompute=selective", "train.precision=bfloat16"),
    "cp": (QUICKSTART, CP),
    "ep": (EXPERTS, FSDP, "parallel.expert_parallel=2"),
    "convnet": (CONVNET, FSDP),
    "ZeRO-1": (QUICKSTART, DDP, "parallel.shard_optimizer=true", "optimizer.ema_decay=0.9"),
    "Muon": (QUICKSTART, FSDP, "optimizer.name=muon"),
    **{f"pp, {name}": (QUICKSTART, PP, f"pipeline.schedule={name}") for name in NAMES},
    "offload, FSDP": (QUICKSTART, FSDP, "parallel.offload=both"),
    "offload, DDP, selective": (
        QUICKSTART,
        DDP,
        "train.precision=bfloat16",
        "parallel.recompute=selective",
        "parallel.offload=both",
        "optimizer.ema_decay=0.9",
    ),
    "offload, pp, 1f1b": (QUICKSTART, PP, "parallel.offload=both"),
    "offload, pp, zbv": (QUICKSTART, PP, "pipeline.schedule=zbv", "parallel.offload=both"),
    "reference, DDP": (*REFERENCE, DDP, "train.precision=bfloat16"),
    "reference, FSDP": (*REFERENCE, FSDP),
    "reference, tp": (*REFERENCE, TP),
    "reference, pp": (*REFERENCE, PP),
}
SLOW = [f"pp, {name}" for name in NAMES if name not in ("1f1b", "zbv")]
SLOW += [
    "offload, DDP, selective",
    "offload, pp, 1f1b",
    "FSDP that keeps",
    "tp, selective",
    "ZeRO-1",
    "Muon",
    "reference, DDP",
    "reference, tp",
]


def config_of(name: str) -> Config:
    file, *overrides = CASES[name]
    return Config.load(ROOT / file, [*SMALL[file], *overrides], world_size=2)


def write_traces(names: Sequence[str], folder: Path) -> None:
    """Traces both ranks of each case, in a process of its own: a trace has process groups that send
    nothing."""
    process = get_context("spawn").Process(target=trace_all, args=(names, folder / "traces.json"))
    process.start()
    process.join()
    assert process.exitcode == 0


def trace_all(names: Sequence[str], file: Path) -> None:
    fsdp.MIN_UNIT_SIZE = 0
    activation_offload.LEAST = 0
    traces = {}
    for name in names:
        config = config_of(name)
        ranks = [
            trace.trace_rank(config, config.resolved, rank, device_type="cpu") for rank in range(2)
        ]
        traces[name] = [asdict(traced) for traced in ranks]
    file.write_text(json.dumps(traces))


def in_turn(scores: Tensor, count: int) -> Tensor:
    """Chooses experts round-robin: equally loaded, as a trace assumes."""
    slots = torch.arange(scores.shape[:-1].numel() * count)
    return (slots % scores.shape[-1]).view(*scores.shape[:-1], count)


@pytest.fixture
def as_traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a trace assumes: blocks that are gathered one by one, experts with equal loads, and a
    GPU's copy of a batch, which is another one than the host's. However small a tensor is, it is
    offloaded."""
    to = Batch.to

    def copy(x: Tensor | AttentionContext | None) -> Tensor | AttentionContext | None:
        return x.clone() if isinstance(x, Tensor) else x and x.apply(torch.clone)

    def copied(
        batch: Batch,
        device: torch.device,
        dtype: torch.dtype,
        with_targets: bool = True,
    ) -> Batch:
        tensors = to(batch, device, dtype, with_targets).tensors.items()
        inputs = {name: copy(x) for name, x in tensors}
        targets = batch.targets.clone() if with_targets else batch.targets
        return replace(batch, tensors=inputs, targets=targets)

    monkeypatch.setattr(fsdp, "MIN_UNIT_SIZE", 0)
    monkeypatch.setattr(activation_offload, "LEAST", 0)
    monkeypatch.setattr(Batch, "to", copied)
    with torch.library._scoped_library("meshtrain", "IMPL") as library:
        library.impl("choose", in_turn, "CPU")
        yield


def leave_to_the_host(step: TracedStep, x: Tensor | AttentionContext) -> None:
    """Excludes tensors from the count that would be on the host in a GPU run."""
    for tensor in (x,) if isinstance(x, Tensor) else vars(x).values():
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            step.live._alive[storage._cdata] = _Storage(None, 0, "host")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]
)
@pytest.mark.usefixtures("as_traced")
def test_equals_real_tensors(
    name: str, job: Job, session_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_slow = name in SLOW
    traced_together = [other for other in CASES if (other in SLOW) == is_slow]
    folder = session_path / ("traces of slow cases" if is_slow else "traces")
    if job.rank == 0:
        made_once(folder, partial(write_traces, traced_together))
    dist.barrier()
    traces = json.loads((folder / "traces.json").read_text())
    config = config_of(name)
    # Whatever a reference's weights are: there is no file of them.
    monkeypatch.setattr(meshtrain.modeling.build, "open_weights", nullcontext)
    monkeypatch.setattr(meshtrain.modeling.build, "load_weights", lambda *_: None)
    step = TracedStep(config, build_mesh(config.resolved, "cpu"), torch.device("cpu"))
    for batch in step.microbatches:
        batch.apply(partial(leave_to_the_host, step))
    assert asdict(step.trace()) == traces[name][job.rank]


def test_a_norm_saves_what_a_gpus_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its input in 16 bits and a number for each row. H100, torch 2.11: 28 layers of Qwen3 kept 6.6
    GiB less than with the float32 that the norms of torch's meta device save."""
    saved: list[tuple[torch.Size, torch.dtype]] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append((x.shape, x.dtype))
        return x

    x, weight = (
        torch.ones(*size, device="meta", dtype=torch.bfloat16).requires_grad_()
        for size in ((3, 8), (8,))
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        torch_patches._rms_norm(x, (8,), weight, 1e-6).sum().backward()
    expected = [((3, 8), torch.bfloat16), ((3, 1), torch.float32), ((8,), torch.bfloat16)]
    assert [entry for entry in saved if entry[0] != ()] == expected
    assert (x.grad.dtype, weight.grad.shape) == (torch.bfloat16, weight.shape)
