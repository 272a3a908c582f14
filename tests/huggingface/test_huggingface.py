"""Hugging Face weights in and out: what is read, what is written, what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshtrain.cli import main as cli
from meshtrain.config import Config, ConfigErrors
from meshtrain.errors import InputError
from meshtrain.huggingface import safetensors as weights
from meshtrain.job.locate import model_file
from meshtrain.run.weights_export import turns
from tests.huggingface.models import (
    MODELS,
    REST,
    assert_loads,
    changed,
    logits,
    run_config,
    stored,
    transformers_model,
    with_weights,
    write,
)
from tests.launching import forked

TINY = [
    f"model.{key}={MODELS['plain'][key]}"
    for key in ("hidden_size", "intermediate_size", "num_attention_heads")
]
llama = model_file("llama")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    transformers_model("plain").save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


# Reading ------------------------------------------------------------------------------------------


def test_what_config_json_leaves_out_has_the_value_of_transformers(plain: Path) -> None:
    from transformers import LlamaConfig

    changed(plain, rms_norm_eps=None, rope_parameters=None, tie_word_embeddings=None)
    keys = run_config(plain).model.keys
    theirs = LlamaConfig.from_pretrained(plain)
    assert (keys["rms_norm_eps"], keys["rope_theta"]) == (
        theirs.rms_norm_eps,
        theirs.rope_parameters["rope_theta"],
    )


def test_keys_that_are_given_win_and_the_resolved_config_says_all(tmp_path: Path) -> None:
    transformers_model("llama3").save_pretrained(tmp_path / "in")
    config = run_config(tmp_path / "in", "model.rope_theta=77.0", "model.rms_norm_eps=0.5")
    assert config.model.keys["rms_norm_eps"] == 0.5
    theta, scaling = llama.Config(**config.model.keys).rope
    assert {"rope_theta": 500.0, **scaling} == MODELS["llama3"]["rope_parameters"]
    assert theta == 77.0
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert Config.load(str(tmp_path / "again.yaml")) == config


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floating_type_is_cast(dtype: torch.dtype, plain: Path) -> None:
    values = {name: value.to(dtype) for name, value in load_file(plain / weights.SINGLE).items()}
    save_file(
        values | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)},
        plain / weights.SINGLE,
    )
    for name, value in with_weights(run_config(plain)).state_dict().items():
        assert torch.equal(value, values[name].float())


def test_a_tied_head_may_be_in_the_files_if_it_is_the_same(tmp_path: Path) -> None:
    transformers_model("tied").save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / weights.SINGLE
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    with_weights(run_config(tmp_path / "in"))
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(
        InputError, match=r"weight has values of its own.*tie_word_embeddings: false"
    ):
        with_weights(run_config(tmp_path / "in"))


# Writing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_type_is_exported(dtype: torch.dtype, tmp_path: Path) -> None:
    """To several files."""
    theirs = transformers_model("llama3")
    theirs.save_pretrained(tmp_path / "in")
    config = run_config(tmp_path / "in")
    write(with_weights(config), tmp_path / "out", config, dtype, file_bytes=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    for parameter in theirs.parameters():
        parameter.data = parameter.data.to(dtype).float()
    assert {value.dtype for value in stored(tmp_path / "out").values()} == {dtype}
    assert_loads(tmp_path / "out", logits(theirs))
    assert (logits(with_weights(run_config(tmp_path / "out"))) - logits(theirs)).abs().max() <= 1e-5


def test_an_export_takes_the_place_of_an_earlier_one_and_of_nothing_else(
    plain: Path, tmp_path: Path
) -> None:
    config, out = run_config(plain), tmp_path / "out"
    model = with_weights(config)
    out.mkdir()
    write(model, out, config, file_bytes=20_000)
    write(model, out, config)
    assert sorted(path.name for path in out.iterdir()) == [weights.CONFIG, weights.SINGLE]
    assert weights.export_problem(out) is None
    (out / "notes.txt").touch()
    with pytest.raises(InputError, match=r"holds notes.txt, which no export has written: empty it"):
        write(model, out, config)
    assert "notes.txt" in str(weights.export_problem(out))
    (out / "notes.txt").unlink()
    shutil.copy(plain / weights.SINGLE, out)  # of transformers: somebody's weights
    assert "model.safetensors" in str(weights.export_problem(out))
    assert "is a file" in str(weights.export_problem(out / weights.CONFIG))
    assert "cannot be made" in str(weights.export_problem(out / weights.CONFIG / "x"))
    (out / weights.SINGLE).unlink()
    assert "config.json" in str(weights.export_problem(out))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "out", "plain"]
    for folder, says in ((out, "holds config.json"), (plain, "is the folder of model.weights")):
        with pytest.raises(ConfigErrors, match=rf"train.export: .*{says}"):
            run_config(plain, f"train.export={folder}", for_training=True)


def test_files_go_round_among_the_writers() -> None:
    entries = [weights.Entry(f"t{n}", "F32", (size,)) for n, size in enumerate((10, 10, 30, 1, 1))]
    files = weights.planned_files(entries, most=90)
    assert [[entry.name for entry in file] for file in files.values()] == [
        ["t0", "t1"],
        ["t2"],
        ["t3", "t4"],
    ]
    assert list(files) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [[(w, e.name) for w, _, e in turn] for turn in turns(files, [0, 5])] == [
        [(0, "t0"), (5, "t2")],
        [(0, "t1")],
        [(0, "t3")],
        [(0, "t4")],
    ]


# Whole runs ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_train_export_and_start_from_it(tmp_path: Path) -> None:
    """On two processes: trains two stages and exports, then goes on from the export with another
    layout.

    `meshtrain export` makes the same bytes of the run's last checkpoint.
    """
    (tmp_path / "mine.yaml").write_text("model: {name: llama}" + REST)
    out = tmp_path / "out"

    def train(name: str, *overrides: str) -> Any:
        options = [
            "train.sample_tokens=8",
            "optimizer.warmup_steps=0",
            f"train.output={tmp_path / name}",
            *overrides,
        ]
        return forked(2, "-m", "meshtrain.train", str(tmp_path / "mine.yaml"), *options)

    def first_loss(name: str) -> float:
        return json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])["loss"]

    train("first", *TINY, "layout={pp: 2}", f"train.export={out}", "optimizer.lr=0.01").check()
    assert cli.main(["export", str(tmp_path / "first"), str(tmp_path / "again")]) == 0
    exported = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == exported
    assert_loads(out, logits(with_weights(run_config(out))))
    train("second").check()
    assert first_loss("second") < first_loss("first") - 0.1, (
        "the second run starts where the first ended"
    )
    refused = train("third", "model.vocab_size=300")
    assert "vocab_size (there 256, here 300)" in refused.err
    assert not (tmp_path / "third" / "exit.json").exists()
