"""Offloading changes no bit on any layout; that it changes nothing beside the other settings is in
the cells of covering.py."""

from functools import partial

import pytest
import torch

from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.optim import host_states
from meshtrain.parallel import activation_offload, fsdp, host_link
from meshtrain.parallel.torch_private import to_local
from meshtrain.pipeline.schedule import NAMES
from tests.parallel.late_copies import Late
from tests.pipeline.steps import train
from tests.ranks import row

IN_16_BITS = "train.precision=bfloat16"
CELLS = [
    row(2, {"dp_shard": 2}, "1f1b", (IN_16_BITS, "parallel.recompute=selective"), name="fsdp"),
    row(
        2,
        {"tp": 2},
        "1f1b",
        ("parallel.recompute=full", "optimizer.ema_decay=0.9"),
        name="tp",
        slow=True,
    ),
    row(2, {"pp": 2}, "zbv", (), name="zbv"),
    row(
        2,
        {"dp_shard": 2},
        "1f1b",
        (IN_16_BITS, "parallel.compile=true"),
        name="compiled",
        slow=True,
    ),
    row(2, {"dp_replicate": 2}, "1f1b", ("parallel.shard_optimizer=true",), name="zero", slow=True),
    row(4, {"dp_replicate": 2, "dp_shard": 2}, "1f1b", (IN_16_BITS,), name="hsdp", slow=True),
    *(
        row(
            2,
            {"pp": 2},
            name,
            (IN_16_BITS, f"parallel.recompute={recompute}"),
            slow=True,
            name=f"{name}, {recompute}",
        )
        for name in NAMES
        for recompute in ("none", "selective")
    ),
]


@pytest.mark.parametrize(("job", "sizes", "schedule", "keys"), CELLS, indirect=["job"])
def test_not_a_bit_changes(
    job: Job,
    sizes: dict[str, int],
    schedule: str,
    keys: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With copies that are done as late as they may be."""
    late = Late()
    monkeypatch.setattr(host_link, "copier_of", lambda device: late)
    monkeypatch.setattr(activation_offload, "LEAST", 0)
    monkeypatch.setattr(host_states, "BUCKET", 2**13)
    monkeypatch.setattr(fsdp, "MIN_UNIT_SIZE", 0)
    backend = "aot_eager_decomp_partition"  # graphs without generated code
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    mesh = build_mesh(Layout(sizes))
    model, numbers = train(mesh, schedule, 4, *keys)
    offloaded, own_numbers = train(mesh, schedule, 4, *keys, "parallel.offload=both")
    assert own_numbers == numbers
    for (name, own), (_, other) in zip(
        offloaded.named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(to_local(own.detach()), to_local(other.detach())), name
    kinds = [kind for kind, _ in late.log]
    assert kinds.count("out") > 8
    assert kinds.count("in") > 8
