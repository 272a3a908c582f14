"""Checkpoints of torch.distributed.checkpoint: a loop of others goes on here and comes back, bit for
bit; what does not fit, and what is no plain data, is refused."""

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from random import Random
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

from meshtrain.checkpoint.dcp.folder import DcpFolder
from meshtrain.checkpoint.dcp.load import Loaded, load
from meshtrain.checkpoint.dcp.names import NAMINGS, Heads
from meshtrain.checkpoint.state import State
from meshtrain.cli.checkpoint_import import import_checkpoint, wanted_tensors
from meshtrain.cli.export_dcp import export_dcp
from meshtrain.cli.main import main
from meshtrain.config import Config, spec_of
from meshtrain.data.batch import IGNORE, Batch
from meshtrain.data.loader import train_batches
from meshtrain.errors import DamagedError, InputError
from meshtrain.job.environment import read_environment
from meshtrain.job.process import Job
from meshtrain.modeling.build import build_model
from meshtrain.optim.optimizer import Optimizer
from meshtrain.run.setup import load_data
from tests.checkpoint.by_hand import bits_of, tensors_of
from tests.comparing import ALONE, CPU, train
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
    "self_attn.": "attention.",
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


@pytest.mark.ranks(2)
def test_parts_of_any_sharding_are_read(job: Job, shared_path: Path) -> None:
    """Rows, columns, uneven shares, one that is empty, views and copies."""
    mesh = init_device_mesh("cpu", (2,))
    whole = {f"{rows}x3": torch.randn(rows, 3) for rows in (1, 5, 8)}
    whole |= {"scalar": torch.tensor(2.5), "turned": torch.randn(4, 6).t(), "long": torch.arange(9)}
    for tensor in whole.values():
        dist.broadcast(tensor, 0)
    saved: dict[str, Any] = {"plain": whole, "rows": {}, "columns": {}}
    for name, tensor in whole.items():
        if tensor.dim() > 0:
            saved["rows"][name] = distribute_tensor(tensor, mesh, [Shard(0)])
            saved["columns"][name] = distribute_tensor(tensor, mesh, [Shard(tensor.dim() - 1)])
    dcp.save(saved, checkpoint_id=shared_path / "dcp")
    with DcpFolder(shared_path / "dcp") as folder:
        assert folder.value("plain.scalar") == 2.5
        for name, tensor in flat_of(saved).items():
            expected = whole[name.partition(".")[2]]
            for first in range(len(expected) if expected.dim() else 0):
                part = (slice(first, len(expected)), slice(1, 3))[: expected.dim()]
                assert torch.equal(folder.read(name, part), expected[part]), (name, tensor)


def flat_of(saved: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Its tensors, by their names in the folder."""
    found: dict[str, Tensor] = {}
    for name, value in saved.items():
        if isinstance(value, Mapping):
            found |= flat_of(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            found[f"{prefix}{name}"] = value
    return found


# What fits, and what does not, in one process ----------------------------------------------------


def config_of(*overrides: str) -> Config:
    return Config.load(QUICKSTART, [*KEYS, "train.precision=float32", "data.path=x", *overrides])


def plain_state(config: Config, *, flat: bool = True) -> dict[str, Any]:
    """A model, and an AdamW after two updates of it."""
    torch.manual_seed(1)
    model = spec_of(config).module.Model(spec_of(config).config)
    decaying = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups: Any = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for _ in range(2):
        model(torch.arange(12).view(2, 6)).square().sum().backward()
        adamw.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, optimizer = get_state_dict(model, adamw, options=options)
    return {"model": weights, "optimizer": optimizer}


def save(folder: Path, state: Mapping[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return folder


def imported(folder: Path, config: Config, **options: Any) -> Loaded:
    return load(DcpFolder(folder), wanted_tensors(config), **options)


def values_of(loaded: Loaded, rows: int = 7) -> dict[str, Tensor]:
    """All tensors, read a few rows at a time."""
    values = {}
    for name, placement in loaded.placements.items():
        pieces = []
        for first in range(0, placement.dims[0], rows):
            span = slice(first, min(first + rows, placement.dims[0]))
            others = [slice(0, size) for size in placement.dims[1:]]
            pieces.append(loaded.read(name, (span, *others)))
        values[name] = torch.cat(pieces).view(placement.shape)
    return values


def expected_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """A flat state, by the names of a checkpoint."""
    found = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, value in state["optimizer"].items():
        if name.startswith("state.") and not name.endswith(".step"):
            found[f"optimizer.{name.removeprefix('state.')}"] = value
    return found | {"optimizer.step": torch.tensor(2.0)}


def under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in values.items()}


def titan_0_2(config: Config, state: Mapping[str, Any]) -> dict[str, Any]:
    """What torchtitan 0.2 saves."""
    keys = spec_of(config).config
    paired = config.model.name == "llama"

    def renamed(name: str) -> str:
        name = titan_name(name).replace("qkv_linear.", "")
        return name.replace("lm_head", "output")

    def value(name: str, tensor: Any) -> Any:
        is_matrix = isinstance(tensor, Tensor) and tensor.dim() == 2
        return titan_values(name, tensor, keys) if paired and is_matrix else tensor

    saved = {renamed(name): value(name, tensor) for name, tensor in state["model"].items()}
    optimizer = state["optimizer"].items()
    saved["optimizer"] = {renamed(name): value(name, tensor) for name, tensor in optimizer}
    return saved | {"train_state": {"step": 9, "ntokens_seen": 5}}


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_torchtitans_names_before_0_3(model: str, tmp_path: Path) -> None:
    config = config_of(f"model.name={model}", "model.head_dim=12")
    state = plain_state(config)
    loaded = imported(
        save(tmp_path / "dcp", titan_0_2(config, state)),
        config,
        naming=NAMINGS[model],
        heads=Heads.of(config.model.keys),
    )
    same_bits(values_of(loaded), expected_of(state))
    assert loaded.step == 9, "that of train_state"


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("", "optim."),
        ("app.model.", "app.optimizer."),
        ("model.module.", "optimizer."),
        ("model._orig_mod.", "optimizer."),
    ],
)
def test_prefixes_are_found(model: str, optimizer: str, tmp_path: Path) -> None:
    config = config_of()
    state = plain_state(config)
    saved = under(model, state["model"]) | under(optimizer, state["optimizer"])
    if model:
        saved |= under("ema.", state["model"])
    loaded = imported(save(tmp_path / "dcp", saved), config)
    same_bits(values_of(loaded), expected_of(state))
    assert any("left out: ema (21)" in note for note in loaded.notes) == (model != "")


def test_tied_weights_are_read_once(tmp_path: Path) -> None:
    config = config_of("model.tie_word_embeddings=true")
    state = plain_state(config)
    assert "lm_head.weight" in state["model"]
    loaded = imported(save(tmp_path / "dcp", state), config)
    expected = expected_of(state)
    del expected["model.lm_head.weight"]
    same_bits(values_of(loaded), expected)
    state["model"]["lm_head.weight"] = state["model"]["lm_head.weight"] + 1
    other = imported(save(tmp_path / "other", state), config)
    with pytest.raises(InputError, match=r"give model\.tie_word_embeddings: false"):
        values_of(other)


def test_types_become_wider_and_weights_go_on_alone(tmp_path: Path) -> None:
    """Without an optimizer its moments are zero, and averages begin with the weights."""
    config = config_of("optimizer.ema_decay=0.9")
    weights = plain_state(config)["model"]
    halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
    loaded = imported(save(tmp_path / "dcp", halves), config)
    values = values_of(loaded)
    for name, tensor in halves.items():
        assert torch.equal(values[f"model.{name}"], tensor.float())
        assert torch.equal(values[f"optimizer.{name}.ema"], tensor.float())
        assert not values[f"optimizer.{name}.exp_avg"].any()
    assert (loaded.step, values["optimizer.step"].item()) == (0, 0)
    assert any("BF16 become F32" in note for note in loaded.notes)
    assert any("as in a new run" in note for note in loaded.notes)


def test_other_options_are_named(tmp_path: Path) -> None:
    config = config_of(
        "optimizer.lr=0.02", "optimizer.betas=[0.9, 0.99]", "optimizer.weight_decay=0"
    )
    for flat in (True, False):
        folder = save(tmp_path / str(flat), plain_state(config, flat=flat))
        warnings = [n for n in imported(folder, config).notes if n.startswith("warning")]
        assert [note.split(",")[0] for note in warnings] == [
            "warning: the optimizer's lr is 0.01 there and 0.02 here",
            "warning: the optimizer's betas is (0.9",
            "warning: the optimizer's weight_decay is 0.1 there and 0.0 here",
        ], warnings
        assert "model.layers.{0-1}.self_attn.q_proj.weight" in warnings[-1]
        assert "norm" not in warnings[-1]


def dropped(state: dict[str, Any], name: str) -> None:
    del state["model"][name]


def momentum(state: dict[str, Any]) -> None:
    optimizer = state["optimizer"]
    for name in [name for name in optimizer if name.endswith(".exp_avg")]:
        optimizer[name.replace("exp_avg", "momentum_buffer")] = optimizer.pop(name)
        del optimizer[name + "_sq"]


def numbered(state: dict[str, Any]) -> None:
    state["optimizer"] = {f"state.{i}.exp_avg": torch.ones(2) for i in range(3)}


NORM = "model.norm.weight"
HEAD = "lm_head.weight"
MISFITS: dict[str, tuple[Any, str]] = {
    "no weight": (lambda s: dropped(s, HEAD), "missing lm_head.weight .do they tie it"),
    "another weight": (
        lambda s: s["model"].update({"model.extra.bias": torch.ones(2)}),
        "the run has no model.model.extra.bias",
    ),
    "another shape": (
        lambda s: s["model"].update({NORM: torch.ones(3)}),
        r"model.model.norm.weight has the shape \[3\], and by the config \[48\]",
    ),
    "rounding": (
        lambda s: s["model"].update({NORM: s["model"][NORM].double()}),
        "has the type F64, and by the config F32",
    ),
    "no moment": (
        lambda s: s["optimizer"].pop(f"state.{NORM}.exp_avg_sq"),
        "the optimizer's state has no model.norm.weight.exp_avg_sq",
    ),
    "another moment": (
        lambda s: s["optimizer"].update({f"state.{NORM}.max_exp_avg_sq": torch.ones(48)}),
        "the run has no optimizer.state.model.norm.weight.max_exp_avg_sq",
    ),
    "other updates": (
        lambda s: s["optimizer"].update({f"state.{NORM}.step": torch.tensor(7.0)}),
        "numbers of updates .step. are not the same .*7.0 of optimizer.state.model.norm.weight",
    ),
    "no updates": (
        lambda s: [s["optimizer"].pop(n) for n in list(s["optimizer"]) if n.endswith(".step")],
        "numbers of updates .step. are not the same .* there is none",
    ),
    "another optimizer": (momentum, "momentum_buffer. is not AdamW's"),
    "numbers": (numbered, "numbers in place of the parameters' names.*get_optimizer_state_dict"),
    "amsgrad": (
        lambda s: s["optimizer"].update({f"param_groups.{NORM}.amsgrad": True}),
        "its AdamW has amsgrad",
    ),
    "Adam": (
        lambda s: s["optimizer"].update({f"param_groups.{HEAD}.decoupled_weight_decay": False}),
        "its optimizer is Adam",
    ),
    "a copy": (
        lambda s: s.update({"old": {"model": dict(s["model"])}}),
        "there several times, under model. and old.model.",
    ),
    "torchtitan's names": (
        lambda s: s.update({"model": {titan_name(n): t for n, t in s["model"].items()}}),
        "has model.tok_embeddings.weight, as torchtitan names it: give --as llama or qwen3",
    ),
    "nothing": (lambda s: s.update({"model": {"a": torch.ones(1)}}), "its tensors are model.a"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_named(misfit: str, tmp_path: Path) -> None:
    config = config_of()
    state = plain_state(config)
    change, says = MISFITS[misfit]
    change(state)
    with pytest.raises(InputError, match=says):
        imported(save(tmp_path / "dcp", state), config)


def test_names_are_those_of_the_model(tmp_path: Path) -> None:
    config = config_of("model.name=qwen3")
    folder = save(tmp_path / "dcp", plain_state(config))
    heads = Heads.of(config.model.keys)
    with pytest.raises(InputError, match=r"has no model.layers.{0-1}.self_attn.q_norm.weight"):
        imported(folder, config, naming=NAMINGS["llama"], heads=heads)
    muon = config_of("optimizer.name=muon")
    with pytest.raises(InputError, match="only AdamW's state is imported"):
        imported(save(tmp_path / "llama", plain_state(muon)), muon)


# The command --------------------------------------------------------------------------------------


def test_many_files_and_nothing_on_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tmp_path / "words.txt"
    words.write_text(" ".join(map(str, range(3000))))
    overrides = [
        *KEYS,
        "train.precision=float32",
        f"data.path={words}",
        f"data.cache={tmp_path / 'cache'}",
    ]
    config = Config.load(QUICKSTART, overrides)
    state = plain_state(config)
    folder = save(tmp_path / "dcp", state)
    run = tmp_path / "run"
    monkeypatch.setattr("meshtrain.cli.checkpoint_import.ROWS", 2000)
    checkpoint = import_checkpoint(folder, run, QUICKSTART, overrides, file_bytes=100_000)
    assert checkpoint == run / "checkpoints/step_0000002"
    assert len(list(checkpoint.glob("*.safetensors"))) > 5
    same_bits(tensors_of(checkpoint), expected_of(state))
    assert main(["checkpoint", "verify", str(run)]) == 0

    def typed(*arguments: object) -> str:
        assert main([*map(str, arguments)]) == 2
        return capsys.readouterr().err

    again = ("checkpoint", "import", folder, run, "--config", QUICKSTART, *overrides)
    assert "holds checkpoints already, the last of step 2" in typed(*again)
    other = tmp_path / "other"
    later = ("checkpoint", "import", folder, other, "--step", 9)
    assert "is of step 9, and the run ends at step 4" in typed(
        *later, "--config", QUICKSTART, *overrides
    )
    word = ("checkpoint", "import", folder, other, "--as", "qwen3")
    assert "is model.name: qwen3 here, and the config's model is llama" in typed(
        *word, "--config", QUICKSTART, *overrides
    )
    assert not other.exists()

    out = tmp_path / "out"
    export_dcp(checkpoint, out, file_bytes=50_000)
    assert len(list(out.glob("__*_0.distcp"))) > 5
    same_bits(values_of(imported(out, config)), expected_of(state))
    assert "which no export has written" in typed("export", run, out, "--format", "dcp")
    word = ("export", run, tmp_path / "x", "--format", "dcp", "--as", "qwen3")
    assert "the checkpoint's model is 'llama'" in typed(*word)
    assert "--as is for --format dcp" in typed("export", run, tmp_path / "x", "--as", "llama")
    (checkpoint / "rank_00003.safetensors").write_bytes(
        (checkpoint / "rank_00003.safetensors").read_bytes()[:-1] + b"\x07"
    )
    assert "not those that were written" in typed(
        "export", checkpoint, tmp_path / "x", "--format", "dcp"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["words.txt", "cache", "dcp", "run", "out"]
    )


# Files of a stranger ------------------------------------------------------------------------------


class Command:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_no_pickle_is_obeyed(tmp_path: Path) -> None:
    config = config_of()
    state = plain_state(config)
    folder = save(tmp_path / "dcp", state | {"train_state": {"step": 5}})
    marker = tmp_path / "was_run"

    # A value that nobody needs is not even looked at; one that is needed and is not plain is left
    # out.
    saved = state | {"dataloader": {"x": Command(marker)}, "train_state": {"step": Command(marker)}}
    loaded = imported(save(tmp_path / "values", saved), config)
    assert loaded.step == 2
    assert any("names 'posix.system'" in note for note in loaded.notes), loaded.notes

    metadata = folder / ".metadata"
    whole = metadata.read_bytes()
    for data in (
        pickle.dumps(Command(marker)),
        whole[:-1] + pickle.dumps(Command(marker))[2:],
        whole.replace(b"ChunkStorageMetadata", b"DefaultSavePlanner__"),
        b"cposix\nsystem\n(Vtouch x\ntR.",
    ):
        metadata.write_bytes(data)
        with pytest.raises(DamagedError, match="no plain data: nothing of it was run"):
            imported(folder, config)
    assert not marker.exists()

    # In the place of a tensor, with the same length.
    metadata.write_bytes(whole)
    (file,) = folder.glob("*.distcp")
    entries = file.read_bytes()
    file.write_bytes(entries.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v3"))
    with pytest.raises(DamagedError, match=r"names 'torch._utils._rebuild_tensor_v3'"):
        values_of(imported(folder, config))


def test_damage_is_named_whatever_it_is(tmp_path: Path) -> None:
    """Bytes are changed one after the other: the file is read, or refused, and nothing else."""
    config = config_of("model.num_hidden_layers=1", "model.hidden_size=8")
    folder = save(tmp_path / "dcp", plain_state(config))
    (entries,) = folder.glob("*.distcp")
    random = Random(0)
    refused = 0
    for path in (folder / ".metadata", entries):
        whole = path.read_bytes()
        for _ in range(40):
            data = bytearray(whole)
            for _ in range(3):
                data[random.randrange(len(data))] = random.randrange(256)
            path.write_bytes(data)
            try:
                values_of(imported(folder, config))
            except InputError:
                refused += 1
        path.write_bytes(whole)
    assert refused > 15
    entries.write_bytes(entries.read_bytes()[:-2000])
    with pytest.raises(DamagedError, match=r"by .metadata there are"):
        values_of(imported(folder, config))


def test_a_folder_that_is_none_says_what_would_work(tmp_path: Path) -> None:
    config = config_of()
    folder = save(tmp_path / "steps/step-100", plain_state(config))
    for path, says in {
        tmp_path / "none": "there is no folder",
        tmp_path / "steps": "holds several checkpoints: name one of them, step-100",
    }.items():
        with pytest.raises(InputError, match=says):
            DcpFolder(path)
    (folder / ".metadata").rename(folder / "__0.metadata")
    with pytest.raises(InputError, match="saved without collectives"):
        DcpFolder(folder)
    (folder / "__0.metadata").unlink()
    with pytest.raises(InputError, match="the save has not ended, or the file was not copied"):
        DcpFolder(folder)


# What a run has ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer.ema_decay=0.9", "model.tie_word_embeddings=true"),
        ("optimizer.state_precision=bfloat16", "train.precision=bfloat16"),
        ("train.precision=float64", "train.freeze=['*norm*']"),
        ("train.lora={rank: 2}",),
        ("model={name: qwen3_moe, num_experts: 4}",),
    ],
)
def test_the_wanted_tensors_are_those_that_a_run_saves(overrides: tuple[str, ...]) -> None:
    config = config_of(*overrides)
    model = build_model(config, ALONE, CPU)
    optimizer = Optimizer(model, config.optimizer, ALONE, 1)
    saved = State(model, optimizer, ALONE, Job(read_environment({}), CPU, None)).placements
    wanted = {}
    for tensor in wanted_tensors(config):
        wanted[f"model.{tensor.names[0]}"] = tensor.placement
        for kind, placement in tensor.states.items():
            wanted[f"optimizer.{tensor.names[0]}.{kind}"] = placement
    del saved["optimizer.step"]
    assert wanted == saved
