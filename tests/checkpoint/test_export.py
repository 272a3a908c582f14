"""`meshtrain export`: from checkpoints of any layout the same bytes as a run's own export; failures
leave nothing."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from meshtrain.checkpoint import weights as checkpoint_weights
from meshtrain.cli import export as checkpoint_export
from meshtrain.cli import main as cli
from meshtrain.errors import DamagedError
from meshtrain.huggingface import safetensors as weights
from meshtrain.huggingface.export_texts import special_tokens
from meshtrain.job.environment import read_environment
from meshtrain.job.locate import bundled, model_file
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.run.weights_export import export as export_of_run
from tests.checkpoint.by_hand import SHARDED, Cuts, flip, weights_of, write_checkpoint
from tests.comparing import V, small_llama

llama = model_file("llama")


def made(**keys: Any) -> nn.Module:
    return small_llama(num_hidden_layers=11, **keys)  # 10 sorts behind 2


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Those of a checkpoint, with something of the optimizer's among them."""
    optimizer = {
        "optimizer.lm_head.weight.exp_avg": torch.randn(9, 9),
        "optimizer.step": torch.tensor(3.0),
    }
    return weights_of(model) | optimizer


def config_of(
    model: nn.Module, precision: str = "float32", tokenizer: str = "bytes"
) -> dict[str, Any]:
    keys = {"name": "llama", **asdict(model.config)}
    return {"model": keys, "train": {"precision": precision}, "data": {"tokenizer": tokenizer}}


def over_tp_and_dp_shard(name: str, tensor: Tensor) -> Cuts:
    if tensor.dim() == 2 and name.endswith(("down_proj.weight", "o_proj.weight")):
        return (("tp", 1), ("dp_shard", 0))
    return (
        (("tp", 0), ("dp_shard", 0))
        if tensor.dim() == 2
        else (("dp_shard", 0),) * bool(tensor.dim())
    )


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "DDP": {"sizes": {"dp_replicate": 3}},
    "FSDP": SHARDED,
    "all": {
        "sizes": {"pp": 2, "dp_shard": 2, "tp": 3},
        "cuts": over_tp_and_dp_shard,
        "stages": lambda name: (0, 1) if "embed" in name else (int("norm" in name),),
    },
}


def export_as_a_run_does(model: nn.Module, out: Path, dtype: torch.dtype, **how: Any) -> None:
    job = Job(read_environment({}), torch.device("cpu"), None)
    config = llama.to_hugging_face(model.config)
    export_of_run(model, out, job, build_mesh(Layout({}), "cpu"), dtype=dtype, config=config, **how)


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bytes_as_a_run_writes(
    layout: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(tie_word_embeddings=tied)
    # so that tensors are read in several blocks
    monkeypatch.setattr(checkpoint_export, "BLOCK", 4000)
    monkeypatch.setattr("meshtrain.checkpoint.shard_file.MOST_OPEN", 2 if layout == "FSDP" else 64)
    checkpoint = write_checkpoint(
        tmp_path, tensors_of(model), config=config_of(model, "bfloat16"), **LAYOUTS[layout]
    )
    for most in (2**30, 20_000):
        checkpoint_export.export(checkpoint, tmp_path / "ours", file_bytes=most)
        export_as_a_run_does(model, tmp_path / "run", torch.bfloat16, file_bytes=most)
        ours = files_in(tmp_path / "ours")
        assert ours == files_in(tmp_path / "run")
        assert (len(ours) > 3) == (most == 20_000)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a run's folder the newest complete checkpoint; --dtype; a tokenizer; once more into the
    same folder."""
    listed = '"added_tokens": [{"id": 7, "content": "</s>"}, {"id": 3, "content": "<s>"}]'
    (tmp_path / "mine.json").write_text(
        f'{{"model": {{"type": "BPE"}}, "ä": 1, {listed}}}', encoding="utf-8"
    )
    named = '{"eos_token": "</s>", "bos_token": {"content": "<s>"}, "pad_token": null}'
    beside = {"tokenizer_config.json": named, "chat_template.jinja": "{{ messages }}"}
    for name, text in beside.items():
        (tmp_path / name).write_text(text)
    model = made()
    config = config_of(model, tokenizer=str(tmp_path / "mine.json"))
    run = tmp_path / "run"
    write_checkpoint(run / "checkpoints", {"model.w": torch.ones(3)}, step=99)
    write_checkpoint(run / "checkpoints", tensors_of(model), step=100, config=config)
    newer = write_checkpoint(run / "checkpoints", {"model.w": torch.ones(3)}, step=101)
    (newer / "COMPLETE").unlink()
    for dtype in (torch.float32, torch.float16, torch.float64):
        word = str(dtype).removeprefix("torch.")
        assert (
            cli.main(
                [
                    "export",
                    str(run),
                    str(tmp_path / "out"),
                    *([] if word == "float32" else ["--dtype", word]),
                ]
            )
            == 0
        )
        export_as_a_run_does(
            model, tmp_path / "wanted", dtype, tokenizer=tmp_path / "mine.json", data=config["data"]
        )
        assert files_in(tmp_path / "out") == files_in(tmp_path / "wanted")
        assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
            tmp_path / "mine.json"
        ).read_bytes()
        assert {name: (tmp_path / "out" / name).read_text() for name in beside} == beside
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        assert (written["bos_token_id"], written["eos_token_id"]) == (3, 7)
    assert "weights of step 100 in" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["mine.json", "out", "run", "wanted", *beside]
    )


SOURCE = {
    "config.json": {"eos_token_id": [2, 3], "pad_token_id": 0, "bos_token_id": 1, "vocab_size": V}
}
GENERATION = {"generation_config.json": {"eos_token_id": [2, 3], "temperature": 0.6}}
TEXT_DATA = {"source": "jsonl", "tokenizer": "bytes"}
LISTED = {"model": {"vocab": {"</s>": 7, "<s>": 5, "<|im_end|>": 8, "x": 500}}}


def ends_of(folder: Path) -> tuple[Any, ...]:
    """`eos_token_id` of config.json and of generation_config.json; `bos_token_id` and
    `pad_token_id`."""
    config = json.loads((folder / "config.json").read_text())
    generation = folder / "generation_config.json"
    stops = json.loads(generation.read_text())["eos_token_id"] if generation.exists() else None
    return config["eos_token_id"], stops, config["bos_token_id"], config.get("pad_token_id")


@pytest.mark.parametrize(
    ("source", "named", "data", "expected"),
    [
        # Of the folder alone, of the run alone, of both; ids that the vocabulary does not have are
        # of neither.
        (SOURCE | GENERATION, None, TEXT_DATA, ([2, 3], [2, 3], 1, 0)),
        (SOURCE, None, {"source": "tokens", "tokenizer": "bytes"}, ([2, 3], [2, 3], 1, 0)),
        ({}, None, TEXT_DATA, (0, 0, None, None)),
        ({}, None, {"source": "tokens", "tokenizer": "bytes"}, (None, None, None, None)),
        (
            {},
            None,
            {"sources": [{"source": None}, {"source": "megatron"}], **TEXT_DATA},
            (None, None, None, None),
        ),
        ({}, {"eos_token": "<|im_end|>", "bos_token": "<s>"}, {}, (8, 8, 5, None)),
        ({}, {"eos_token": "<|im_end|>"}, {"end_token": "</s>"}, ([7, 8], [7, 8], None, None)),
        ({}, {}, {"end_token": "</s>", "begin_token": "<s>"}, (7, 7, 5, None)),
        (
            SOURCE | GENERATION,
            {"eos_token": "<|im_end|>", "bos_token": "<s>"},
            {},
            ([2, 3, 8], [2, 3, 8], 1, 0),
        ),
        (
            SOURCE | GENERATION,
            {"eos_token": "<|im_end|>"},
            {"end_token": "</s>"},
            ([2, 3, 7, 8],) * 2 + (1, 0),
        ),
        (SOURCE | GENERATION, {"eos_token": "x"}, {"end_token": "x"}, ([2, 3], [2, 3], 1, 0)),
        (
            GENERATION | {"config.json": {"eos_token_id": 4}},
            None,
            TEXT_DATA,
            ([4, 2, 3], [4, 2, 3], None, None),
        ),
        (
            {"config.json": {"eos_token_id": [True, -1, "2", V, None]}},
            None,
            TEXT_DATA,
            (0, 0, None, None),
        ),
        ({"config.json": [1], "generation_config.json": "["}, {}, {}, (7, 7, None, None)),
    ],
)
def test_an_export_has_the_ends_of_its_source_and_of_its_training(
    source: dict[str, Any],
    named: Any,
    data: dict[str, Any],
    expected: tuple[Any, ...],
    tmp_path: Path,
) -> None:
    """Also if the run started from a checkpoint, whose run started from the folder."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name, content in source.items():
        (folder / name).write_text(json.dumps(content))
    model = made()
    tokenizer = None
    if named is not None:
        (tmp_path / "own").mkdir()
        tokenizer = tmp_path / "own" / "tokenizer.json"
        tokenizer.write_text(json.dumps(LISTED))
        (tmp_path / "own" / "tokenizer_config.json").write_text(json.dumps(named))
        data = {"source": "text", "tokenizer": str(tokenizer), **data}
    config = config_of(model) | {"data": data}
    config["model"]["weights"] = str(folder) if source else None
    first = write_checkpoint(tmp_path / "first", tensors_of(model), config=config)
    config["model"]["weights"] = str(first)
    second = write_checkpoint(tmp_path / "second", tensors_of(model), config=config)
    for number, checkpoint in enumerate((first, second)):
        out = tmp_path / f"out{number}"
        checkpoint_export.export(checkpoint, out)
        assert ends_of(out) == expected
    export_as_a_run_does(
        model,
        tmp_path / "run",
        torch.float32,
        tokenizer=tokenizer,
        data=data,
        weights=config["model"]["weights"],
    )
    assert files_in(tmp_path / "run") == files_in(out)
    if source == SOURCE | GENERATION and expected[0] == [2, 3]:
        assert (out / "generation_config.json").read_bytes() == (
            folder / "generation_config.json"
        ).read_bytes()
    checkpoint_export.export(second, out)  # it takes the place of an earlier one


def test_a_tokenizer_of_the_source_goes_with_its_vocabulary(tmp_path: Path) -> None:
    """If the run has none of its own, or the same one."""
    files = {"tokenizer.json": json.dumps(LISTED), "tokenizer_config.json": '{"eos_token": "</s>"}'}
    files |= {
        "chat_template.jinja": "{{ messages }}",
        "merges.txt": "a b",
        "config.json": json.dumps({"vocab_size": V}),
    }
    folder, own, out = tmp_path / "source", tmp_path / "own.json", tmp_path / "out"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    binary = b"\xef\xbb\xbf\x00\xff\r\n\x80"
    (folder / "tokenizer.model").write_bytes(binary)
    model = made()

    def exported(tokenizer: str, **keys: Any) -> set[str]:
        config = config_of(model, tokenizer=tokenizer)
        config["model"] |= {"weights": str(folder)} | keys
        checkpoint_export.export(
            write_checkpoint(tmp_path / "from", tensors_of(model), config=config), out
        )
        return {path.name for path in out.iterdir()} & files.keys() - {"config.json"}

    everything = files.keys() - {"config.json"}
    assert exported("bytes") == everything
    assert (out / "tokenizer.model").read_bytes() == binary
    assert ends_of(out)[0] == 7
    own.write_text(files["tokenizer.json"])
    assert exported(str(own)) == everything
    own.write_text(json.dumps(LISTED | {"added_tokens": []}))
    assert exported(str(own)) == {"tokenizer.json"}
    (folder / "config.json").write_text(json.dumps({"vocab_size": V + 1}))
    assert exported("bytes") == set()


def test_a_source_that_is_gone_is_told(tmp_path: Path) -> None:
    model = made()
    config = config_of(model)
    config["model"]["weights"] = str(tmp_path / "gone\x1b")
    lines: list[str] = []
    checkpoint = write_checkpoint(tmp_path / "from", tensors_of(model), config=config)
    checkpoint_export.export(checkpoint, tmp_path / "out", say=lines.append)
    assert (
        f"no ends of texts and no tokenizer of {tmp_path}/gone\ufffd, from which the run started"
        in lines[0]
    )


@pytest.mark.parametrize(
    "named", ["", "[]", "{}", '{"eos_token": "other"}', '{"eos_token": {}}', '{"eos_token": []}']
)
@pytest.mark.parametrize(
    "listed", ['{"added_tokens": [{"id": 7, "content": "</s>"}]}', "{}", '{"added_tokens": 3}']
)
def test_special_tokens_that_are_not_known(named: str, listed: str) -> None:
    assert special_tokens({"tokenizer.json": listed, "tokenizer_config.json": named}) == {}


USERS_OWN = """
import pathlib
pathlib.Path({marker!r}).touch()
from meshtrain.job.locate import model_file
from dataclasses import dataclass
Model = model_file("llama").Model
@dataclass(frozen=True)
class Config:
    width: int
def to_hugging_face(config):
    return {{"model_type": "mine", "width": config.width}}
"""


def test_a_file_that_a_checkpoint_names_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marker, own = tmp_path / "was_run", tmp_path / "own.py"
    own.write_text(USERS_OWN.format(marker=str(marker)))
    for name in (
        str(own),
        f"../../../../../../../../..{str(own)[:-3]}",
        os.path.relpath(own, bundled("models"))[:-3],
    ):
        config = {
            "model": {"name": name, "width": 3},
            "train": {"precision": "float32"},
            "data": {},
        }
        checkpoint = write_checkpoint(
            tmp_path / "from", {"model.w": torch.arange(3.0)}, config=config
        )
        out = tmp_path / "out"
        assert cli.main(["export", str(checkpoint), str(out)]) == 0
        assert "config.json is not written" in capsys.readouterr().out
        assert [path.name for path in out.iterdir()] == [weights.SINGLE]
        assert not marker.exists()
    assert cli.main(["export", str(checkpoint), str(out), "--model", str(own)]) == 0
    assert json.loads((out / weights.CONFIG).read_text())["width"] == 3
    assert marker.exists()
    assert (
        cli.main(["export", str(checkpoint), str(out), "--model", str(tmp_path / "gone.py")]) == 2
    )
    assert "there is no file" in capsys.readouterr().err


def test_a_model_without_a_hugging_face_form(tmp_path: Path) -> None:
    """One file with plain names; what is no floating number keeps its type; a scalar and an empty
    tensor."""
    tensors = {
        "model.conv.weight": torch.randn(4, 3, 2, 2),
        "model.norm.running_mean": torch.randn(5).double(),
        "model.norm.num_batches_tracked": torch.tensor(12),
        "model.scale": torch.tensor(0.5),
        "model.nothing": torch.zeros(0, 3),
    }
    config = {"model": {"name": "convnet"}, "train": {"precision": "bfloat16"}, "data": {}}
    lines: list[str] = []
    checkpoint = write_checkpoint(tmp_path, tensors, sizes={"dp_shard": 3}, config=config)
    checkpoint_export.export(checkpoint, tmp_path / "out", say=lines.append)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [weights.SINGLE]
    found = load_file(tmp_path / "out" / weights.SINGLE)
    assert found.keys() == {name.removeprefix("model.") for name in tensors}
    for name, tensor in tensors.items():
        wanted = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert found[name.removeprefix("model.")].dtype == wanted.dtype
        assert torch.equal(found[name.removeprefix("model.")], wanted)
    assert "has no Hugging Face form" in lines[0]


@pytest.mark.timeout(60)
def test_only_a_small_file_that_is_a_tokenizer_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger may name any file: a pipe is waited for, a device has no end, and a large one
    takes all memory."""
    monkeypatch.setattr(checkpoint_export, "MAX_TOKENIZER", 1000)
    tokenizer = '{"model":\r\n {}}'
    for name, text in {
        "secrets.json": '{"password": "x"}',
        "secrets": tokenizer,
        "large.json": tokenizer + 1000 * " ",
        "blob": tokenizer,
    }.items():
        (tmp_path / name).write_bytes(text.encode())
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    # as all files are in Hugging Face's cache
    (tmp_path / "mine.json").symlink_to(tmp_path / "blob")
    names = (
        "secrets.json",
        "secrets",
        "large.json",
        "gone.json",
        ".",
        "pipe",
        "pipe.json",
        "zero.json",
        "mine.json",
    )
    for path in (
        *(str(tmp_path / name) for name in names),
        "/dev/zero",
        "~nobody-here/x.json",
        "\0.json",
    ):
        config = {"model": {}, "train": {"precision": "float32"}, "data": {"tokenizer": path}}
        lines: list[str] = []
        checkpoint = write_checkpoint(tmp_path / "from", {"model.w": torch.ones(3)}, config=config)
        checkpoint_export.export(checkpoint, tmp_path / "out", say=lines.append)
        written = tmp_path / "out" / weights.TOKENIZER
        if path.endswith("mine.json"):
            assert written.read_bytes() == tokenizer.encode()
            continue
        assert not written.exists(), path
        assert any(
            "tokenizer.json is not written: the run's tokenizer is " in line for line in lines
        ), lines


def test_damage_leaves_an_earlier_export(tmp_path: Path) -> None:
    """How it is named, and that nothing else is left: test_faults.py."""
    model = made()
    checkpoint = write_checkpoint(
        tmp_path / "from", weights_of(model), config=config_of(model), **SHARDED
    )
    out = tmp_path / "out"
    export_as_a_run_does(model, out, torch.float32)
    content = files_in(out)
    flip(checkpoint / "rank_00001.safetensors")
    with pytest.raises(DamagedError):
        checkpoint_export.export(checkpoint, out)
    assert sorted(os.listdir(tmp_path)) == ["from", "out"]
    assert files_in(out) == content


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def saved(name: str, tensor: str = "model.w", **config: Any) -> Path:
        return write_checkpoint(tmp_path / name, {tensor: torch.ones(3)}, config=config)

    checkpoint = saved("from", model={"name": "llama"})
    unknown_key = saved(
        "unknown", model={"name": "llama", "hidden_sise": 3}, train={"precision": "float32"}
    )
    mine, float32 = tmp_path / "mine", ("--dtype", "float32")
    mine.mkdir()
    (mine / "notes.txt").touch()
    (tmp_path / "run" / "checkpoints" / ".step_0000001.tmp").mkdir(parents=True)
    for arguments, problem in (
        ((checkpoint, tmp_path / "out"), "no train.precision that is known"),
        ((checkpoint, checkpoint / "out", *float32), "is inside of the checkpoint"),
        ((checkpoint, mine, *float32), "holds notes.txt"),
        ((checkpoint, mine / "notes.txt", *float32), "is a file"),
        ((mine, tmp_path / "out"), "mine holds no checkpoint: name a checkpoint"),
        ((tmp_path / "gone", tmp_path / "out"), "gone is no folder"),
        ((tmp_path / "run", tmp_path / "out"), "run is complete"),
        (
            (unknown_key, tmp_path / "out"),
            "the model llama refuses the keys in the checkpoint's config",
        ),
        ((saved("none", "optimizer.step"), tmp_path / "out", *float32), "holds no weights"),
    ):
        assert cli.main(["export", *map(str, arguments)]) == 2, problem
        assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*.tmp"))


def test_one_row_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing larger than a block is asked of the reader."""
    monkeypatch.setattr(checkpoint_export, "BLOCK", 2000)
    asked: list[int] = []
    really = checkpoint_weights.read_part

    def read(*arguments: Any) -> Tensor:
        found = really(*arguments)
        asked.append(found.nbytes)
        return found

    monkeypatch.setattr(checkpoint_weights, "read_part", read)
    config = {"model": {"name": "x.py"}, "train": {"precision": "float32"}}
    checkpoint = write_checkpoint(
        tmp_path, {"model.w": torch.randn(1000, 3), "model.b": torch.randn(5000)}, config=config
    )
    checkpoint_export.export(checkpoint, tmp_path / "out")
    assert sum(asked) == 32_000
    assert max(asked) <= 2000
