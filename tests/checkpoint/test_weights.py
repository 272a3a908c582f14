"""The weights alone of a checkpoint: into a plain model, and as `model.weights` of a new run."""

import shutil
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshtrain.checkpoint import directory, load_weights
from meshtrain.checkpoint.directory import open_manifest
from meshtrain.checkpoint.manifest import MANIFEST, file_of
from meshtrain.checkpoint.shard_file import ShardReader
from meshtrain.checkpoint.weights import read_part
from meshtrain.config import Config, ConfigErrors
from meshtrain.errors import DamagedError, InputError
from meshtrain.job.locate import model_file
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.modeling.build import build_model, check_first_values
from tests.checkpoint.by_hand import SHARDED, weights_of, write_checkpoint
from tests.comparing import small_llama

REST = (
    "\nbatch: {global_size: 4, micro_size: 4}\ntrain: {steps: 2}\ndata: {seq_len: 32, workers: 0}\n"
)
llama = model_file("llama")


def made(**keys: Any) -> nn.Module:
    return small_llama(vocab_size=257, rms_norm_eps=1e-06, **keys)  # in YAML 1e-06 is a text


def checkpoint_of(model: nn.Module, where: Path, **how: Any) -> Path:
    config = {"model": {"name": "llama", **asdict(model.config)}, "train": {"precision": "float32"}}
    return write_checkpoint(
        where, weights_of(model) | {"optimizer.step": torch.tensor(1.0)}, config=config, **how
    )


def equal(one: nn.Module, other: nn.Module, dtype: torch.dtype = torch.float32) -> bool:
    wanted = other.state_dict()
    return all(
        torch.equal(value, wanted[name].to(dtype)) for name, value in one.state_dict().items()
    )


def test_any_part_of_a_tensor(tmp_path: Path) -> None:
    """Rows and columns that begin and end anywhere, of a tensor that two axes cut."""
    whole = torch.arange(7.0 * 11 * 3).view(7, 11, 3)
    sizes = {"dp_replicate": 2, "dp_shard": 2, "tp": 3}
    path = write_checkpoint(
        tmp_path, {"w": whole}, sizes=sizes, cuts=lambda *_: (("tp", 1), ("dp_shard", 0))
    )
    with ShardReader(path, open_manifest(path)[0]) as files:
        for top, bottom in combinations(range(8), 2):
            for left, right in combinations(range(12), 2):
                for last in (slice(1, 3), slice(0, 3)):
                    part = (slice(top, bottom), slice(left, right), last)
                    assert torch.equal(read_part(files, "w", part), whole[part])


def test_a_file_that_holds_another_shape_than_the_manifest_says(tmp_path: Path) -> None:
    """Both are whole; a reader that took the file's word would read past its part."""
    write_checkpoint(tmp_path, {"w": torch.zeros(4)})
    square = write_checkpoint(tmp_path, {"w": torch.zeros(2, 2)}, step=200)
    unfinished = directory.begin(tmp_path, 300)
    shutil.copy(square / file_of(0), unfinished)
    text = (square / MANIFEST).read_text()
    text = text.replace('"step": 200', '"step": 300').replace("[2,2]", "[4]")
    path = directory.finish(tmp_path, 300, text)
    with (
        ShardReader(path, open_manifest(path)[0]) as files,
        pytest.raises(
            DamagedError, match=r"w: is F32 \[2, 2\], and by the manifest it is F32 \[4\]"
        ),
    ):
        read_part(files, "w", (slice(0, 4),))


# Into a plain model -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tied", "dtype"), [(False, torch.float64), (True, torch.float32), (False, torch.bfloat16)]
)
def test_a_plain_model_of_any_type(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = made(tie_word_embeddings=tied)
    checkpoint_of(model, tmp_path / "run" / "checkpoints", step=3, **SHARDED)
    other = llama.Model(model.config).to(dtype)
    load_weights(tmp_path / "run", other)
    assert equal(other, model, dtype)
    assert (other.lm_head.weight is other.model.embed_tokens.weight) == tied


def test_buffers_of_any_type_and_scalars(tmp_path: Path) -> None:
    def small() -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4))
        model.register_parameter("scale", nn.Parameter(torch.randn(())))
        model.register_buffer("here", torch.randn(3), persistent=False)
        return model

    one, other = small(), small()
    one[1].num_batches_tracked += 12
    before = other.here.clone()
    load_weights(write_checkpoint(tmp_path, weights_of(one), **SHARDED), other)
    assert equal(other, one)
    assert torch.equal(other.here, before)


def test_what_does_not_fit_is_named_and_nothing_is_changed(tmp_path: Path) -> None:
    tensors = weights_of(made())
    del tensors["model.lm_head.weight"], tensors["model.model.norm.weight"]
    tensors |= {"model.one": torch.ones(2), "model.two": torch.ones(2)}
    for layer in range(2):
        tensors[f"model.model.layers.{layer}.self_attn.q_proj.weight"] = torch.ones(24, 23)
    tensors["model.model.layers.0.mlp.up_proj.weight"] = torch.ones(40, 24, dtype=torch.int32)
    checkpoint = write_checkpoint(tmp_path, tensors)
    other = made()
    with pytest.raises(InputError) as caught:
        load_weights(checkpoint, other)
    for says in (
        f"the weights in {checkpoint} do not fit the model: missing model.norm.weight, "
        "lm_head.weight;",
        "the model has no one, two;",
        "other shapes: model.layers.{0-1}.self_attn.q_proj.weight (there [24, 23], the model's "
        "[24, 24]);",
        "model.layers.0.mlp.up_proj.weight (I32)",
    ):
        assert says in str(caught.value)
    assert equal(other, made())


def test_a_model_that_ties_what_the_checkpoint_does_not(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(made(), tmp_path)
    with pytest.raises(InputError, match=r"values of its own.*tie_word_embeddings: false"):
        load_weights(checkpoint, made(tie_word_embeddings=True))
    checkpoint = checkpoint_of(made(tie_word_embeddings=True), tmp_path)
    with pytest.raises(InputError, match=r"missing lm_head.weight .do they tie it"):
        load_weights(checkpoint, made())


def test_a_model_without_memory(tmp_path: Path) -> None:
    model = made()
    with torch.device("meta"):
        other = llama.Model(model.config)
    with pytest.raises(InputError, match=r"have no memory: model.to_empty"):
        load_weights(checkpoint_of(model, tmp_path), other)


def test_no_checkpoint_holds_no_weights() -> None:
    with pytest.raises(InputError, match="holds no checkpoint"):
        load_weights(Path(__file__).parent, made())


# model.weights ------------------------------------------------------------------------------------


def read(start: Path, *overrides: str, model: str = "", **given: Any) -> Config:
    path = start.parent / "mine.yaml"
    path.write_text(f"model: {{weights: {start}{model}}}{REST}")
    return Config.load(str(path), overrides, **given)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with two checkpoints."""
    checkpoint_of(made(hidden_dropout=0.25), tmp_path / "run" / "checkpoints", step=9)
    checkpoint_of(made(hidden_size=8), tmp_path / "run" / "checkpoints", step=2)
    return tmp_path / "run"


def test_the_manifest_gives_the_keys_that_the_config_does_not(run: Path) -> None:
    newest = run / "checkpoints" / "step_0000009"
    for start in (run, run / "checkpoints", newest):
        config = read(start, "model.rope_theta=77.0", for_training=True)
        assert config.model.weights == str(newest)
        assert config.model.keys == asdict(made(rope_theta=77.0, hidden_dropout=0.25).config)
        (run / "again.yaml").write_text(config.to_yaml())
        assert Config.load(str(run / "again.yaml")) == config
        check_first_values(config)
    assert read(run / "checkpoints" / "step_0000002").model.keys["hidden_size"] == 8


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_a_new_run_has_these_weights(precision: str, run: Path) -> None:
    config = read(run, f"train.precision={precision}")
    model = build_model(config, build_mesh(Layout({}), "cpu"), torch.device("cpu"))
    kind = torch.float64 if precision == "float64" else torch.float32
    assert all(parameter.dtype == kind for parameter in model.parameters())
    assert equal(model, made(), kind)


def test_a_model_of_ones_own_without_a_hugging_face_form(tmp_path: Path) -> None:
    source = (
        "from dataclasses import dataclass\nfrom torch import nn\n@dataclass\nclass Config:\n    "
        "width: int\n"
    )
    source += (
        "class Model(nn.Linear):\n    def __init__(self, config):\n        "
        "super().__init__(config.width, 2)\n"
    )
    for name in ("before.py", "after.py"):  # the file has moved
        (tmp_path / name).write_text(source)
    config = {"model": {"name": str(tmp_path / "before.py"), "width": 5}}
    write_checkpoint(tmp_path / "run", weights_of(nn.Linear(5, 2)), config=config)
    found = read(tmp_path / "run", model=f", name: {tmp_path / 'after.py'}")
    assert found.model.keys == {"width": 5}
    check_first_values(found)


def test_what_is_refused(run: Path) -> None:
    newest = run / "checkpoints" / "step_0000009"

    def refused(pattern: str, *overrides: str, start: Path = run, **given: Any) -> None:
        with pytest.raises(ConfigErrors, match=pattern):
            read(start, *overrides, for_training=True, **given)

    refused("preset and model.weights both give the sizes", "model.preset=llama-3.2-1b")
    refused("holds the model llama, and model.name is convnet", "model.name=convnet")
    (run.parent / "empty").mkdir()
    refused(
        r"there is no .*empty/config.json: .*a run's folder has checkpoints",
        start=run.parent / "empty",
    )
    (run / "checkpoints" / "step_0000010").mkdir()
    refused("COMPLETE: is missing", start=run / "checkpoints" / "step_0000010")
    (newest / "rank_00000.safetensors").rename(newest / "gone")
    refused(r"mine.yaml:1: model.weights: .*rank_00000.safetensors: is missing")
    (newest / "gone").rename(newest / "rank_00000.safetensors")
    config = read(run, "model.vocab_size=300")
    with pytest.raises(
        InputError, match=r"vocab_size \(there 257, here 300\): take those keys away"
    ):
        check_first_values(config)
    (newest / "COMPLETE").unlink()
    (run / "checkpoints" / "step_0000002" / "COMPLETE").unlink()
    refused(r"model.weights: no checkpoint in .*run is complete")


def test_keys_that_this_meshtrain_does_not_know_are_named_with_the_manifest(tmp_path: Path) -> None:
    config = {"model": {"name": "llama", "preset": None, "hidden_sise": 3, "attention_bias": True}}
    checkpoint = write_checkpoint(tmp_path / "run", {"model.w": torch.ones(1)}, config=config)
    with pytest.raises(ConfigErrors) as caught:
        read(checkpoint)
    assert len(caught.value.errors) == 2
    for says in (
        "manifest.json: config: there is no key model.hidden_sise",
        "attention_bias: true is not built",
    ):
        assert says in str(caught.value)
