"""Checkpoints of torchtitan 0.3 itself: its models, its optimizers and what it saves of them. `make
test-integrations`, where it is installed (`pip install --no-deps torchtitan spmd_types tyro
torchdata torch_checkpointing docstring-parser typeguard`)."""

import importlib
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from meshtrain.checkpoint import load_weights
from meshtrain.cli.main import main
from meshtrain.config import Config, spec_of
from tests.parity.experiments import QUICKSTART

pytestmark = pytest.mark.integrations
V, D, HEADS, KV = 260, 32, 4, 2
LR, STEPS = 1e-2, 99


@pytest.fixture
def titan(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of torchtitan's by the rest of its name."""
    pytest.importorskip("torchtitan")
    # It imports triton, which CPUs do not have, for exchanges that are not used here.
    name = "torchtitan.distributed.minimal_async_ep"
    for module in (name, f"{name}.api", f"{name}.kernels"):
        monkeypatch.setitem(sys.modules, module, MagicMock(__spec__=None))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield lambda module: importlib.import_module(f"torchtitan.{module}")
    dist.destroy_process_group()


class Job:
    """A model of torchtitan's with its optimizer and schedule, and what its checkpoints have."""

    def __init__(self, titan: Any, kind: str) -> None:
        common = titan("models.common")
        attention = titan("models.common.attention").ScaledDotProductAttention
        sizes: dict[str, Any] = {"n_layers": 2, "dim": D, "n_heads": HEADS, "n_kv_heads": KV}
        sizes |= {"hidden_dim": 48, "attn_backend": "flex"}
        if kind == "qwen3":
            own = titan("models.qwen3")
            norm, linear = own._qwen3_norm(D), own._LINEAR_INIT
            rope = common.CosSinRoPE.Config(dim=16, max_seq_len=64, theta=10000.0)
            layers = own._build_qwen3_layers(**sizes, head_dim=16, rope=rope)
            model = own.Qwen3Model
        else:
            own = titan("models.llama3")
            norm = common.RMSNorm.Config(normalized_shape=D, param_init=own._NORM_INIT)
            linear = own._output_linear_init(D)
            rope = common.ComplexRoPE.Config(dim=D // HEADS, max_seq_len=64, theta=10000.0)
            layers = own._build_llama3_layers(**sizes, rope=rope)
            model = own.Llama3Model
        for layer in layers:  # flex attention is for GPUs
            layer.attention.inner_attention = attention.Config()
        tied = kind == "tied"
        embedding = own._EMBEDDING_SKIP_INIT if tied else own._EMBEDDING_INIT
        config = model.Config(
            vocab_size=V,
            dim=D,
            norm=norm,
            enable_weight_tying=tied,
            tok_embeddings=common.Embedding.Config(
                num_embeddings=V, embedding_dim=D, param_init=embedding
            ),
            lm_head=common.Linear.Config(in_features=D, out_features=V, param_init=linear),
            layers=layers,
        )
        torch.manual_seed(0)
        self.model = config.build()
        self.model.init_states()
        self.eps = norm.eps
        optimizer = titan("components.optimizer")
        adamw = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        group = optimizer.ParamGroupConfig(
            pattern=".*", optimizer_name="AdamW", optimizer_kwargs=adamw
        )
        self.optimizer = optimizer.OptimizersContainer.Config(param_groups=[group]).build(
            model_parts=[self.model]
        )
        schedules = titan("components.optimizer.lr_scheduler").LRSchedulersContainer
        self.schedule = schedules.Config(warmup_steps=0).build(
            optimizers=self.optimizer, training_steps=STEPS
        )
        self._wrapper = titan("components.checkpointer.base").ModelWrapper
        self.step = self.ntokens_seen = 0

    def train(self, tokens: Tensor) -> float:
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def states(self) -> dict[str, Any]:
        """As its checkpoint manager collects them, without a data loader."""
        others = {"optimizer": self.optimizer, "lr_scheduler": self.schedule, "train_state": self}
        return others | self._wrapper(self.model).state_dict()

    def load(self, folder: Path) -> None:
        states = self.states()
        dcp.load(states, checkpoint_id=folder)
        weights = {name: value for name, value in states.items() if isinstance(value, Tensor)}
        self.model.load_state_dict(weights)


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen3"])
def test_torchtitan_goes_on_here_and_comes_back(titan: Any, kind: str, tmp_path: Path) -> None:
    job = Job(titan, kind)
    tokens = torch.randint(V, (6, 2, 17), generator=torch.Generator().manual_seed(1))
    for step in range(3):
        job.train(tokens[step])
    dcp.save(job.states(), checkpoint_id=tmp_path / "titan")
    with torch.no_grad():
        logits = job.model(tokens[5])

    word = "qwen3" if kind == "qwen3" else "llama"
    model = {"name": word, "hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 2}
    model |= {"num_attention_heads": HEADS, "num_key_value_heads": KV, "vocab_size": V}
    model |= {"rms_norm_eps": job.eps, "tie_word_embeddings": kind == "tied"}
    model |= {"head_dim": 16} if kind == "qwen3" else {}
    (tmp_path / "words.txt").write_text(" ".join(map(str, range(3000))))
    overrides = [
        f"model={json.dumps(model)}",
        "data={source: text, seq_len: 16, validation: 0, workers: 0}",
        f"data.path={tmp_path / 'words.txt'}",
        f"data.cache={tmp_path / 'cache'}",
        f"train.steps={STEPS}",
        f"optimizer.lr={LR}",
        "optimizer.groups=[{match: '*', weight_decay: 0.1}]",
    ]
    folders = [str(tmp_path / "titan"), str(tmp_path / "run")]
    config = ["--as", word, "--config", QUICKSTART, *overrides]
    assert main(["checkpoint", "import", *folders, *config]) == 0
    spec = spec_of(Config.load(QUICKSTART, overrides))
    own = spec.module.Model(spec.config)
    load_weights(tmp_path / "run", own)
    with torch.no_grad():
        torch.testing.assert_close(own(tokens[5]), logits, rtol=1e-5, atol=1e-5)

    out = ["export", str(tmp_path / "run"), str(tmp_path / "back"), "--format", "dcp"]
    assert main([*out, "--as", word]) == 0
    other = Job(titan, kind)
    other.train(tokens[4])
    other.load(tmp_path / "back")
    assert other.step == 3
    assert other.schedule.schedulers[0].last_epoch == 3
    for name, tensor in job.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], tensor), name
    states = other.optimizer.state_dict()
    for name, value in job.optimizer.state_dict().items():
        if isinstance(value, Tensor):
            assert torch.equal(states[name], value), name
    # the same bits: the learning rates of both schedules differ from now on
    assert other.train(tokens[3]) == job.train(tokens[3])
