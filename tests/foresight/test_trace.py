"""A traced step has the live bytes of the same step with real CPU tensors, to the byte, and sends what it counts."""

import json
from dataclasses import asdict

import pytest
import torch

from meshtrain.config import Config
from meshtrain.foresight import trace
from meshtrain.parallel import fsdp
from meshtrain.pipeline.schedule import NAMES
from tests.foresight.traced import SMALL
from tests.launching import ROOT, forked

QUICKSTART, CONVNET, EXPERTS = "configs/quickstart.yaml", "configs/digits.yaml", "configs/moe.yaml"
DDP, FSDP, TP, CP, PP = (f"layout={{{axis}: 2}}" for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp"))
CASES = {
    "DDP": (QUICKSTART, DDP, "train.precision=bfloat16"),
    "FSDP": (QUICKSTART, FSDP),
    "FSDP that keeps": (QUICKSTART, FSDP, "parallel.reshard_after_forward=false", "train.precision=bfloat16"),
    "tp": (QUICKSTART, TP),
    "tp, full": (QUICKSTART, TP, "parallel.recompute=full", "parallel.regather=true"),
    "tp, selective": (QUICKSTART, TP, "parallel.recompute=selective", "train.precision=bfloat16"),
    "cp": (QUICKSTART, CP),
    "ep": (EXPERTS, FSDP, "parallel.expert_parallel=2"),
    "convnet": (CONVNET, FSDP),
    "ZeRO-1": (QUICKSTART, DDP, "parallel.shard_optimizer=true", "optimizer.ema_decay=0.9"),
    "Muon": (QUICKSTART, FSDP, "optimizer.name=muon"),
    **{f"pp, {name}": (QUICKSTART, PP, f"pipeline.schedule={name}") for name in NAMES},
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What the two processes of a job have seen of each case."""
    folder = tmp_path_factory.mktemp("traced")
    cases = {name: [file, [*SMALL[file], *overrides]] for name, (file, *overrides) in CASES.items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    forked(2, ROOT / "tests/foresight/trace_cases.py", folder / "cases.json", folder).check()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_equals_real_tensors(name: str, real: list[dict], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "MIN_UNIT_SIZE", 0)
    file, *overrides = CASES[name]
    config = Config.load(ROOT / file, [*SMALL[file], *overrides], world_size=2)
    rank = int(name.startswith("pp"))  # of a pipeline the one that receives activations
    traced = trace.trace_rank(config, config.resolved, rank, device_type="cpu")
    assert asdict(traced) == real[rank][name]


def test_a_norm_saves_what_a_gpus_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its input in 16 bits and a number for each row. H100, torch 2.11: 28 layers of Qwen3 kept 6.6 GiB less than with
    the float32 that the norms of torch's meta device save."""
    saved: list[tuple[torch.Size, torch.dtype]] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append((x.shape, x.dtype))
        return x

    x, weight = (torch.ones(*size, device="meta", dtype=torch.bfloat16).requires_grad_() for size in ((3, 8), (8,)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        trace._rms_norm(x, (8,), weight, 1e-6).sum().backward()
    expected = [((3, 8), torch.bfloat16), ((3, 1), torch.float32), ((8,), torch.bfloat16)]
    assert [entry for entry in saved if entry[0] != ()] == expected
    assert (x.grad.dtype, weight.grad.shape) == (torch.bfloat16, weight.shape)
