"""Checkpoints of torch.distributed.checkpoint: a loop of others goes on here and comes back, bit for
bit; what does not fit, and what is no plain data, is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshtrain.cli.main import main
from meshtrain.config import Config, spec_of
from meshtrain.data.batch import IGNORE, Batch
from meshtrain.data.loader import train_batches
from meshtrain.job.process import Job
from meshtrain.run.setup import load_data
from tests.checkpoint.by_hand import bits_of, tensors_of
from tests.comparing import train
from tests.parity.experiments import QUICKSTART, SMALL

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
HALF, END = 2, 4  # steps: the other loop saves after the first, both end with the last
KEYS = (
    *SMALL,
    "train.precision=float64",
    f"train.steps={END}",
    "optimizer.warmup_steps=0",
    "optimizer.schedule=constant",
    "optimizer.clip_norm=null",
    f"optimizer.lr={LR}",
    "data.validation=0",
    "data.source=text",
)


def keys(folder: Path) -> list[str]:
    path = folder / "words.txt"
    if dist.get_rank() == 0:
        path.write_text(" ".join(str(number**2) for number in range(3000)))
    dist.barrier()
    return [*KEYS, f"data.path={path}", f"data.cache={folder / 'cache'}"]


# The loop of somebody else: FSDP2 and torch's AdamW ----------------------------------------------


class Loop:
    """On the samples that meshtrain's run of the same config has."""

    def __init__(self, job: Job, overrides: list[str]) -> None:
        config = Config.load(QUICKSTART, overrides, world_size=job.world_size)
        before, job.layout = job.layout, config.resolved
        self.data = load_data(config, job)
        job.layout = before
        self.config, self.job = config, job
        torch.manual_seed(0)
        self.model = spec_of(config).module.Model(spec_of(config).config).double()
        mesh = init_device_mesh("cpu", (job.world_size,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        decaying = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decaying}, {"params": others, "weight_decay": 0.0}],
            lr=LR,
            betas=BETAS,
            eps=EPS,
            weight_decay=DECAY,
        )

    def run(self, first: int, end: int) -> list[float]:
        """The losses of steps first + 1 to end."""
        batches = train_batches(
            self.data.train,
            seed=self.config.train.seed,
            first_step=first,
            steps=end,
            global_size=self.config.batch.global_size,
            micro_size=self.config.batch.micro_size,
            rank=self.job.rank,
            ranks=self.job.world_size,
            workers=0,
        )
        return [self._step(microbatches) for microbatches in batches]

    def _step(self, microbatches: list[Batch]) -> float:
        count = torch.tensor(sum(int((b.targets != IGNORE).sum()) for b in microbatches))
        dist.all_reduce(count)
        loss = torch.zeros(1, dtype=torch.float64)
        for batch in microbatches:
            logits = self.model(*batch.inputs)
            of_batch = nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.targets.flatten(), reduction="sum"
            )
            # FSDP averages gradients over the ranks
            (self.job.world_size * of_batch / count).backward()
            loss += of_batch.detach() / count
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss)
        return loss.item()

    def state(self, flat: bool = True) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )

    def tensors(self) -> dict[str, Tensor]:
        """By the names of a checkpoint, whole."""
        state = self.state()
        found = {f"model.{name}": _whole(tensor) for name, tensor in state["model"].items()}
        for name, value in state["optimizer"].items():
            if name.startswith("state.") and not name.endswith(".step"):
                found[f"optimizer.{name.removeprefix('state.')}"] = _whole(value)
            elif name.endswith(".step"):
                found["optimizer.step"] = _whole(value)
        return found


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def same_bits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits_of(actual[name]), bits_of(tensor)), name


# torchtitan's names, by its own formulas ---------------------------------------------------------

TITAN = {
    "model.embed_tokens": "tok_embeddings",
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "layers",
    "model.norm": "norm",
}


def titan_name(name: str) -> str:
    for own, other in TITAN.items():
        name = name.replace(own, other)
    return name


def titan_values(name: str, tensor: Tensor, config: Any) -> Tensor:
    """The inverse of its `_permute`: w.view(h, 2, e / 2, d).transpose(1, 2)."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.kv_heads}
    for word, count in heads.items():
        if f".{word}." in name:
            halves = tensor.view(count, 2, -1, tensor.shape[-1])
            return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


def titan_state(loop: Loop) -> dict[str, Any]:
    """What torchtitan 0.3 saves: the weights of q, k and v in three, their moments in one."""
    config = spec_of(loop.config).config
    state = loop.state()
    mesh = init_device_mesh("cpu", (loop.job.world_size,))

    def sharded(tensor: Tensor) -> DTensor:
        return distribute_tensor(tensor, mesh, [Shard(0)])

    whole = {name: _whole(tensor) for name, tensor in state["model"].items()}
    saved: dict[str, Any] = {
        titan_name(name): sharded(titan_values(name, tensor, config))
        for name, tensor in whole.items()
    }
    optimizer: dict[str, Any] = {}
    group = config.num_attention_heads // config.kv_heads
    for name, value in state["optimizer"].items():
        section, _, rest = name.partition(".")
        own, _, kind = rest.rpartition(".")
        if ".self_attn." not in name or ".o_proj." in name:
            is_sharded = isinstance(value, DTensor)
            new = f"{section}.{titan_name(own)}.{kind}"
            optimizer[new] = sharded(_whole(value)) if is_sharded else value
        elif ".q_proj." in name:
            new = f"{section}.{titan_name(own).replace('.wq.', '.wqkv.')}.{kind}"
            optimizer[new] = value
            if isinstance(value, DTensor):
                parts = []
                for word in ("q_proj", "k_proj", "v_proj"):
                    other = own.replace("q_proj", word)
                    values = _whole(state["optimizer"][f"{section}.{other}.{kind}"])
                    values = titan_values(other, values, config)
                    count = group if word == "q_proj" else 1
                    parts.append(values.view(config.kv_heads, count, -1, values.shape[-1]))
                optimizer[new] = sharded(torch.cat(parts, 1).flatten(0, 2))
    saved["optimizer"] = optimizer
    saved["train_state"] = {"step": HALF, "ntokens_seen": 1234}
    saved["lr_scheduler"] = {"last_epoch": HALF}
    saved["dataloader"] = {"dp_rank_0": b"\x80\x04any bytes."}
    return saved


@pytest.mark.ranks(2)
@pytest.mark.parametrize("names", ["ours", "torchtitan's"])
def test_a_loop_of_fsdp2_goes_on_here_and_comes_back(
    job: Job, names: str, shared_path: Path
) -> None:
    overrides = keys(shared_path)
    loop = Loop(job, overrides)
    loop.run(0, HALF)
    saved = loop.state(flat=False) if names == "ours" else titan_state(loop)
    dcp.save(saved, checkpoint_id=shared_path / "dcp")
    saved_tensors = {name: tensor.clone() for name, tensor in flat_of(saved).items()}
    at_half = loop.tensors()
    losses = loop.run(HALF, END)

    # It goes on here, on another layout.
    run = shared_path / "run"
    options = [] if names == "ours" else ["--as", "llama"]
    if job.rank == 0:
        config = ["--config", QUICKSTART, *overrides]
        folders = [str(shared_path / "dcp"), str(run)]
        assert main(["checkpoint", "import", *folders, *options, *config]) == 0
    dist.barrier()
    imported = run / f"checkpoints/step_{HALF:07d}"
    same_bits(tensors_of(imported), at_half)
    rows = train(job, run, *overrides, "layout={tp: 2}")
    assert [row["step"] for row in rows] == list(range(HALF + 1, END + 1))
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-9)

    # And back.
    for step in (HALF, END):
        checkpoint = run / f"checkpoints/step_{step:07d}"
        back = shared_path / f"back{step}"
        if job.rank == 0:
            assert main(["export", str(checkpoint), str(back), "--format", "dcp", *options]) == 0
        dist.barrier()
        if names == "ours":
            other = Loop(job, overrides)
            other.run(0, 1)  # so that there are moments to be replaced
            other.load(back)
            same_bits(other.tensors(), tensors_of(checkpoint))
    there = {name: torch.zeros_like(tensor) for name, tensor in saved_tensors.items()}
    dcp.load(there, checkpoint_id=shared_path / f"back{HALF}")
    for name, tensor in saved_tensors.items():
        assert torch.equal(_whole(there[name]), _whole(tensor)), name


def flat_of(saved: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Its tensors, by their names in the folder."""
    found: dict[str, Tensor] = {}
    for name, value in saved.items():
        if isinstance(value, Mapping):
            found |= flat_of(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            found[f"{prefix}{name}"] = value
    return found
