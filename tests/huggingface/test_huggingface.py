"""Hugging Face weights in and out, against transformers itself: what is read, what is written, what is refused."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from meshtrain.cli import main as cli
from meshtrain.config import Config, ConfigErrors
from meshtrain.config.locate import model_file
from meshtrain.errors import InputError
from meshtrain.huggingface import safetensors as weights
from meshtrain.huggingface.load import check_weights, load_weights, named_tensors, open_folder
from meshtrain.job.environment import read_environment
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.modeling.build import plain_model
from meshtrain.run.weights_export import export, turns
from tests.checkpoint.by_hand import write_checkpoint
from tests.huggingface.test_moe_models import transformers_model
from tests.launching import forked

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "initializer_range": 0.1,  # logits of about 3, where transformers' own ways of attention differ by 2e-6
    "eos_token_id": [1, 2],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "gqa": {"num_key_value_heads": 2},
    "llama3": {"rope_parameters": {"rope_theta": 500.0, **LLAMA3}},
    "head_dim": {"head_dim": 20, "num_key_value_heads": 1, "rms_norm_eps": 1e-3},
    "six": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 257},
    "uneven": {"vocab_size": 257, "intermediate_size": 83, "tie_word_embeddings": True, "num_key_value_heads": 2},
}
REST = "\nbatch: {global_size: 4, micro_size: 4}\ntrain: {steps: 2}\ndata: {seq_len: 32, workers: 0}\n"
TOKENS = torch.randint(256, (2, 60), generator=torch.Generator().manual_seed(0))
TINY = [f"model.{key}={SIZES[key]}" for key in list(SIZES)[:4]]
llama = model_file("llama")
MESH = build_mesh(Layout({}), "cpu")  # of a world of one


def made(**keys: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | keys)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found = model(TOKENS)
    return found if isinstance(found, torch.Tensor) else found.logits


def read(folder: Path, *overrides: str, **given: Any) -> Config:
    path = folder.parent / "mine.yaml"
    path.write_text(f"model: {{weights: {folder}}}{REST}")
    return Config.load(str(path), overrides, **given)


def ours(config: Config) -> nn.Module:
    model = plain_model(config).to_empty(device="cpu")
    if config.model.keys.get("tie_word_embeddings"):
        model.lm_head.weight = model.model.embed_tokens.weight  # to_empty parts them
    with open_folder(config.model.weights) as source:
        load_weights(model, source)
    return model


def alone() -> Job:
    return Job(read_environment({}), torch.device("cpu"), None)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    made().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def changed(folder: Path, **keys: Any) -> Path:
    """With these keys in its config.json; None takes a key away."""
    path = folder / "config.json"
    found = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}, indent=2))
    return folder


# Reading ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["50KB", "1GB"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_transformers(name: str, shard: str, tmp_path: Path) -> None:
    theirs = made(**MODELS[name])
    theirs.save_pretrained(tmp_path / "there", max_shard_size=shard)
    assert (tmp_path / "there" / weights.INDEX).exists() == (shard == "50KB")
    assert (logits(ours(read(tmp_path / "there"))) - logits(theirs)).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_the_older_form_of_config_json(kind: str, tmp_path: Path) -> None:
    theirs = made(**MODELS["llama3"])
    theirs.save_pretrained(tmp_path / "there")
    scaling = {kind if key == "rope_type" else key: value for key, value in LLAMA3.items()}
    older = {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": scaling, "torch_dtype": "float32"}
    changed(tmp_path / "there", **older, dtype=None, head_dim=None)
    assert (logits(ours(read(tmp_path / "there"))) - logits(theirs)).abs().max() <= 1e-5


def test_what_config_json_leaves_out_has_the_value_of_transformers(plain: Path) -> None:
    changed(plain, rms_norm_eps=None, rope_parameters=None, tie_word_embeddings=None)
    keys = read(plain).model.keys
    theirs = LlamaConfig.from_pretrained(plain)
    assert (keys["rms_norm_eps"], keys["rope_theta"]) == (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])


def test_keys_that_are_given_win_and_the_resolved_config_says_all(tmp_path: Path) -> None:
    made(**MODELS["llama3"]).save_pretrained(tmp_path / "there")
    config = read(tmp_path / "there", "model.rope_theta=77.0", "model.rms_norm_eps=0.5")
    assert config.model.keys["rms_norm_eps"] == 0.5
    theta, scaling = llama.Config(**config.model.keys).rope
    assert (theta, scaling) == (77.0, LLAMA3)
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert Config.load(str(tmp_path / "again.yaml")) == config


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floating_type_is_cast(dtype: torch.dtype, plain: Path) -> None:
    found = {name: value.to(dtype) for name, value in load_file(plain / weights.SINGLE).items()}
    save_file(found | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}, plain / weights.SINGLE)
    model = ours(read(plain))
    for name, value in model.state_dict().items():
        assert torch.equal(value, found[name].float())


def test_a_tied_head_may_be_in_the_files_if_it_is_the_same(tmp_path: Path) -> None:
    made(tie_word_embeddings=True).save_pretrained(tmp_path / "there")
    file = tmp_path / "there" / weights.SINGLE
    found = load_file(file)
    assert "lm_head.weight" not in found
    save_file(found | {"lm_head.weight": found["model.embed_tokens.weight"].clone()}, file)
    ours(read(tmp_path / "there"))
    save_file(found | {"lm_head.weight": found["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(InputError, match=r"weight has values of its own.*tie_word_embeddings: false"):
        ours(read(tmp_path / "there"))


# What is refused ----------------------------------------------------------------------------------------------------


def broken(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    found = load_file(folder / weights.SINGLE)
    change(found)
    save_file(found, folder / weights.SINGLE)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"model_type": "mistral"}, ["model_type is mistral", "config.json", "llama only"]),
        ({"model_type": None}, ["model_type is missing"]),
        ({"attention_bias": True}, ["config.json:", "model.attention_bias: true is not built"]),
        ({"mlp_bias": True}, ["config.json:", "model.mlp_bias"]),
        ({"quantization_config": {"bits": 4}}, ["config.json:", "quantized; convert them to bfloat16"]),
        ({"hidden_size": "wide"}, ["config.json:", "model.hidden_size: expected an integer"]),
        ({"rope_parameters": {"rope_type": "su", "factor": 2.0}}, ["mine.yaml:1", "'su' is not built"]),
    ],
)
def test_config_json_is_refused(keys: dict[str, Any], says: list[str], plain: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        read(changed(plain, **keys))
    (error,) = caught.value.errors
    assert all(text in str(error) for text in says), error


@pytest.mark.parametrize("text", ["{", "[]", "\0", '{"a": ' * 2000])
def test_config_json_that_is_none(text: str, plain: Path) -> None:
    (plain / "config.json").write_text(text)
    with pytest.raises(ConfigErrors, match=r"mine.yaml:1: model.weights: .*config.json .*copy the file anew"):
        read(plain)


def test_a_key_twice_inside_of_a_value_of_config_json(plain: Path) -> None:
    text = json.dumps(json.loads((plain / "config.json").read_text()) | {"rope_parameters": {"rope_theta": 2}})
    (plain / "config.json").write_text(text.replace('"rope_theta": 2', '"rope_theta": 2, "rope_theta": 3'))
    with pytest.raises(ConfigErrors, match=r"config\.json:1: the key rope_theta is given twice"):
        read(plain)


def test_folders_that_are_refused(plain: Path) -> None:
    single = plain / weights.SINGLE

    def refused(pattern: str, folder: Path = plain, *overrides: str) -> None:
        with pytest.raises(ConfigErrors, match=pattern):
            read(folder, *overrides, for_training=True)

    read(plain, for_training=True)
    refused("mine.yaml:1: model.weights: there is no .*hf download", plain / "nowhere")
    refused("model.preset and model.weights both give the sizes", plain, "model.preset=llama-3.2-1b")
    whole = single.read_bytes()
    for wrong in (b"", b"x" * 20, whole[:-1], whole[:100], struct.pack("<Q", 2**63) + whole[8:]):
        single.write_bytes(wrong)
        refused("model.safetensors is no whole safetensors file")
    for text in (b"[]", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'):
        single.write_bytes(struct.pack("<Q", len(text)) + text + b"1234")
        refused("no whole safetensors file")
    for offsets in ([[0, 4], [0, 4]], [[4, 8], [8, 12]], [[0, 4], [8, 12]]):  # two in one place, a hole, another one
        both = zip("ab", offsets, strict=True)
        text = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": span} for name, span in both}).encode()
        single.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offsets[-1][-1]))
        refused("do not lie one behind the other")
    about = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    for other in ({"__metadata__": 5}, {"__metadata__": {"a": 5}}, {"a": about["a"] | {"dtype": "Q7"}}):
        text = json.dumps(about | other).encode()
        single.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
        with pytest.raises(InputError, match=r"is no safetensors file: .*: copy it anew"), open_folder(plain):
            pass
    single.unlink()
    refused("has neither model.safetensors nor model.safetensors.index.json")
    (plain / "pytorch_model.bin").touch()
    refused("pytorch_model.bin, a pickle, .*: convert it")
    outside = plain.parent / "other.safetensors"
    outside.write_bytes(whole)
    for name in ("../other.safetensors", str(outside), "x.bin", 3, ".."):
        (plain / weights.INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
        refused("expected the name of a .safetensors file in the same folder")
    (plain / weights.INDEX).write_text(json.dumps({"weight_map": {"nothing": "a.safetensors"}}))
    refused(r"there is no .*a\.safetensors")
    (plain / "a.safetensors").write_bytes(whole)
    refused("lacks nothing, which model.safetensors.index.json says")
    (plain / weights.INDEX).write_text("{")
    refused("is no index of weights")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found.pop("model.norm.weight"), "missing model.norm.weight"),
        (lambda found: found.pop("lm_head.weight"), "missing lm_head.weight .*tie_word_embeddings: true"),
        (lambda found: found.update(extra=torch.ones(2)), "the model has no extra"),
        (
            lambda found: found.update({"model.norm.weight": torch.ones(47)}),
            r"other shapes: model.norm.weight \(there \[47\], the model's \[48\]\)",
        ),
        (lambda found: found.update({"model.norm.weight": torch.ones(48).int()}), r"norm.weight \(I32\): expected F64"),
    ],
)
def test_tensors_that_do_not_fit(change: Callable[[dict[str, Any]], Any], says: str, plain: Path) -> None:
    broken(plain, change)
    config = read(plain)
    with pytest.raises(InputError, match=says), open_folder(plain) as source:
        check_weights(plain_model(config), source, config.model.keys)


def test_a_key_that_contradicts_the_tensors_is_named(plain: Path) -> None:
    config = read(plain, "model.vocab_size=300")
    says = r"vocab_size \(there 256, here 300\): take those keys away"
    with pytest.raises(InputError, match=says), open_folder(plain) as source:
        check_weights(plain_model(config), source, config.model.keys)


# Writing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_exported_transformers_loads(dtype: torch.dtype, tmp_path: Path) -> None:
    for name, most in (("llama3", 20_000), ("tied", 2**30), ("head_dim", 20_000)):
        theirs = made(**MODELS[name])
        theirs.save_pretrained(tmp_path / name)
        model = ours(read(tmp_path / name))
        out = tmp_path / "new" / name
        export(model, out, alone(), MESH, dtype=dtype, config=llama.to_hugging_face(model.config), file_bytes=most)
        files = sorted(path.name for path in out.glob("*.safetensors"))
        assert len(files) > 1 if most == 20_000 else files == [weights.SINGLE]
        again, info = LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert again.dtype == dtype
        for parameter in theirs.parameters():
            parameter.data = parameter.data.to(dtype).float()
        again = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
        assert (logits(again) - logits(theirs)).abs().max() <= 1e-5
        assert (logits(ours(read(out))) - logits(theirs)).abs().max() <= 1e-5  # and back here


def test_an_export_takes_the_place_of_an_earlier_one_and_of_nothing_else(plain: Path, tmp_path: Path) -> None:
    model, out = ours(read(plain)), tmp_path / "out"

    def write(most: int = 2**30) -> None:
        described = llama.to_hugging_face(model.config)
        export(model, out, alone(), MESH, dtype=torch.float32, config=described, file_bytes=most)

    out.mkdir()
    write(20_000)
    write()
    assert sorted(path.name for path in out.iterdir()) == [weights.CONFIG, weights.SINGLE]
    assert weights.export_problem(out) is None
    (out / "notes.txt").touch()
    with pytest.raises(InputError, match=r"holds notes.txt, which no export has written: empty it"):
        write()
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
            read(plain, f"train.export={folder}", for_training=True)


def test_files_go_round_among_the_writers() -> None:
    entries = [weights.Entry(f"t{n}", "F32", (size,)) for n, size in enumerate((10, 10, 30, 1, 1))]
    files = weights.planned_files(entries, most=90)
    assert [[entry.name for entry in file] for file in files.values()] == [["t0", "t1"], ["t2"], ["t3", "t4"]]
    assert list(files) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [[(w, e.name) for w, _, e in turn] for turn in turns(files, [0, 5])] == [
        [(0, "t0"), (5, "t2")],
        [(0, "t1")],
        [(0, "t3")],
        [(0, "t4")],
    ]


# Whole runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_ranks_read_and_write_their_parts(processes: int, tmp_path: Path) -> None:
    torch.save(TOKENS, tmp_path / "tokens.pt")
    names = {2: ("llama3", "gqa", "uneven", "mixtral"), 3: ("six",), 4: ("llama3", "gqa", "uneven", "mixtral")}
    for name in names[processes]:
        theirs = made(**MODELS[name]) if name in MODELS else transformers_model(name)
        place = tmp_path / (name if name in MODELS else f"experts {name}")
        theirs.save_pretrained(place / "weights", max_shard_size="50KB")
        torch.save(logits(theirs), place / "logits.pt")
        config = read(place / "weights", f"model.name={theirs.config.model_type}")
        write_checkpoint(
            place / "checkpoints",
            {f"model.{names[0]}": tensor for names, tensor in named_tensors(theirs).items()},
            sizes={"dp_shard": 2, "tp": 5},
            cuts=lambda name, tensor: (("tp", tensor.dim() - 1), ("dp_shard", 0)),
            config={"model": {"name": config.model.name, **config.model.keys}},
        )
    done = forked(processes, Path(__file__).parent / "huggingface_cases.py", str(tmp_path), timeout=220).check()
    rows = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert len(rows) == processes
    for row in rows:
        assert row["failures"] == []
        assert row["checked"] == {2: 15 + 4, 3: 2, 4: 24 + 5}[processes]
    for written in tmp_path.glob("*/export"):
        AutoModelForCausalLM.from_pretrained(written)


@pytest.mark.timeout(240)
def test_train_export_and_start_from_it(tmp_path: Path) -> None:
    """On two processes: trains two stages and exports, then goes on from the export with another layout.

    `meshtrain export` makes the same bytes of the run's last checkpoint.
    """
    (tmp_path / "mine.yaml").write_text("model: {name: llama}" + REST)
    common = ["train.sample_tokens=8", "optimizer.warmup_steps=0"]
    first = [
        *TINY,
        "layout={pp: 2}",
        f"train.export={tmp_path / 'out'}",
        f"train.output={tmp_path / 'first'}",
        "optimizer.lr=0.01",
    ]
    forked(2, "-m", "meshtrain.train", str(tmp_path / "mine.yaml"), *common, *first).check()
    assert cli.main(["export", str(tmp_path / "first"), str(tmp_path / "again")]) == 0
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == written
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    config = read(tmp_path / "out")
    assert (logits(ours(config)) - logits(theirs)).abs().max() <= 1e-5
    rows = [json.loads(line) for line in (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()]
    second = [f"train.output={tmp_path / 'second'}"]
    forked(2, "-m", "meshtrain.train", str(tmp_path / "mine.yaml"), *common, *second).check()
    after = [json.loads(line) for line in (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()]
    assert after[0]["loss"] < rows[0]["loss"] - 0.1, "the second run starts where the first ended"
    wrong = [*common, f"train.output={tmp_path / 'third'}", "model.vocab_size=300"]
    refused = forked(2, "-m", "meshtrain.train", str(tmp_path / "mine.yaml"), *wrong)
    assert "vocab_size (there 256, here 300)" in refused.err
    assert not (tmp_path / "third" / "exit.json").exists()
