"""The manifest: what is written is read again, any other text is refused with a reason, and it stays small."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from meshtrain.checkpoint import manifest as room
from meshtrain.checkpoint.manifest import MAX_BYTES, File, Manifest, file_of
from meshtrain.checkpoint.placement import Placement
from meshtrain.errors import DamagedError, InputError
from meshtrain.layout import Layout
from tests.checkpoint.test_placement import placements, with_experts
from tests.properties import given, settings, st

WHERE = Path("step_0000100/manifest.json")
SCHEMA = json.loads(Path(room.__file__).with_name("manifest.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def made(layout: Layout, tensors: dict[str, Placement], **about: Any) -> Manifest:
    files = {file_of(rank): File(10_000, f"{rank:08x}") for rank in range(layout.world_size)}
    found = Manifest(
        step=100,
        samples=51_200,
        tokens=13_107_200,
        layout=layout,
        tensors=tensors,
        files=files,
        config={"model": {"name": "llama"}, "optimizer": {"betas": [0.9, 0.95]}},
        data={"fingerprint": "ab", "train": 10},
        versions={"torch": "2.13.0"},
        rng={"seed": 0, "rule": "(seed, step, data rank)"},
        counters={},
        evaluation={"eval_loss": 3.25},
        written="2026-01-02T03:04:05Z",
    )
    return dataclasses.replace(found, **about)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(), inside, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(st.data(), st.dictionaries(st.text(), JSON, max_size=3), st.none() | st.dictionaries(st.just("x"), st.floats()))
def test_what_is_written_is_read(
    data: st.DataObject, counters: dict[str, Any], evaluation: dict[str, float] | None
) -> None:
    layout = data.draw(with_experts())
    names = data.draw(st.sets(st.text(st.characters(categories=["L", "N", "P"]), min_size=1), max_size=4))
    tensors = {name: data.draw(placements(layout)) for name in sorted(names)}
    written = made(layout, tensors, counters=counters, evaluation=evaluation)
    text = written.to_json()
    found = Manifest.parse(text, WHERE)
    assert repr(found) == repr(written)  # NaN is not equal to itself
    assert found.layout == layout
    VALIDATOR.validate(json.loads(text))
    assert sum(len(found.entries(rank)) for rank in range(layout.world_size)) >= len(tensors)


def test_infinity_and_nan_are_json_that_any_program_reads() -> None:
    written = made(
        Layout({}), {}, counters={"loss": math.nan}, config={"clip": [math.inf, -math.inf]}, evaluation={"l": math.inf}
    )
    plain = json.loads(written.to_json(), parse_constant=pytest.fail)
    assert plain["books"] == {"loss": {"$float": "nan"}}
    found = Manifest.parse(written.to_json(), WHERE)
    assert math.isnan(found.counters["loss"])
    assert found.config == {"clip": [math.inf, -math.inf]}
    assert found.evaluation == {"l": math.inf}


def test_a_tensor_and_a_file_have_a_line_each() -> None:
    text = made(Layout({"tp": 2}), {"model.a": Placement((4, 2), "F32", (("tp", 1),))}).to_json()
    assert '"model.a": {"dtype":"F32","shape":[4,2],"cuts":[["tp",1]],"stages":[0]}' in text.splitlines()
    assert '"rank_00001.safetensors": {"size":10000,"crc32":"00000001"}' in text.splitlines()


def test_it_does_not_grow_with_ranks_times_tensors() -> None:
    """A model of 405 billion parameters: 126 layers of 9 tensors, 3 more, and AdamW's two moments; 4,096 ranks."""
    layout = Layout({"pp": 16, "dp_replicate": 1, "dp_shard": 32, "tp": 8})
    whole = {"embed_tokens": (128256, 16384), "norm": (16384,), "lm_head": (128256, 16384)}
    shapes = [(16384, 16384), (1024, 16384), (1024, 16384), (16384, 16384), (53248, 16384), (53248, 16384)]
    shapes += [(16384, 53248), (16384,), (16384,)]
    whole |= {f"model.layers.{layer}.{i}.weight": shape for layer in range(126) for i, shape in enumerate(shapes)}
    cuts = {1: (("dp_shard", 0),), 2: (("tp", 0), ("dp_shard", 0))}
    tensors = {
        f"{kind}.{name}{end}": Placement(shape, "F32", cuts[len(shape)], (index * 16 // len(whole),))
        for kind, end in (("model", ""), ("optimizer", ".exp_avg"), ("optimizer", ".exp_avg_sq"))
        for index, (name, shape) in enumerate(whole.items())
    }
    total = sum(12 * math.prod(shape) for shape in whole.values())
    files = {file_of(rank): File(total // 4096 + 60_000, f"{rank:08x}") for rank in range(4096)}
    written = made(layout, tensors, files=files)
    text = written.to_json()
    assert (len(tensors), len(files)) == (3 * 1137, 4096)
    assert len(text) < 700_000
    assert Manifest.parse(text, WHERE) == written
    assert written.total_bytes > total > 4.8e12
    # 131,072 ranks have room, too.
    assert len(text) * 32 < MAX_BYTES


# Refused ------------------------------------------------------------------------------------------------------------


TWO = made(Layout({"pp": 2, "dp_shard": 2}), {"model.a": Placement((4, 2), "F32", (("dp_shard", 0),), (0, 1))})
PLAIN: dict[str, Any] = json.loads(TWO.to_json())


def changed(*path: str, to: Any) -> str:
    found = inside = json.loads(TWO.to_json())
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = to
    return json.dumps(found)


def renamed_file(name: str) -> str:
    files = list(PLAIN["files"].items())
    return json.dumps(PLAIN | {"files": dict([(name, files[0][1]), *files[1:]])})


def tensor(**keys: Any) -> str:
    return json.dumps(PLAIN | {"tensors": {"model.a": PLAIN["tensors"]["model.a"] | keys}})


REFUSED: dict[str, tuple[str | bytes, str]] = {
    "nothing": ("", "is empty"),
    "no JSON": ("{", "no JSON"),
    "no UTF-8": (b'{"\xff": 1}', "no JSON"),
    "a list": ("[]", "no JSON object"),
    "deep nesting": ("[" * 100_000, "no JSON"),
    "deep nesting that ends": (changed("books", to=json.loads("[" * 200 + "]" * 200)), "more than 50 deep"),
    "a key twice": ('{"format": 1, "format": 1}', "'format' stands twice"),
    "NaN": (TWO.to_json().replace('"step": 100', '"step": NaN'), "NaN is no number"),
    "1e999": (TWO.to_json().replace('"step": 100', '"step": 1e999'), "too large a number"),
    "many digits": (TWO.to_json().replace('"step": 100', f'"step": {"9" * 4000}'), "step: expected a count"),
    "too many digits": (TWO.to_json().replace('"step": 100', f'"step": {"9" * 9000}'), "no JSON"),
    "experts that do not fold": (changed("experts", to=4), "experts cannot be dealt out over 4 ranks; use one of"),
    "no experts": (changed("experts", to=0), "experts cannot be dealt out over 0 ranks"),
    "experts that are true": (changed("experts", to=True), "experts: expected a count"),
    "an older format": (changed("format", to=0), "format: expected 1"),
    "a format that is true": (changed("format", to=True), "format: expected 1"),
    "no step": (json.dumps({key: value for key, value in PLAIN.items() if key != "step"}), "lacks 'step'"),
    "more keys": (json.dumps(PLAIN | {"pickle": "cos"}), "does not have: 'pickle'"),
    "a negative step": (changed("step", to=-1), "step: expected a count; found -1"),
    "a step that is true": (changed("step", to=True), "step: expected a count"),
    "tokens above 2^63": (changed("tokens", to=2**63), "tokens: expected a count"),
    "a time with an escape": (changed("written", to="\x1b[2J"), r"written: expected a time in UTC; found '\\x1b"),
    "versions with an escape": (changed("versions", "torch", to="\x1b[2J"), "versions"),
    "config that is a list": (changed("config", to=[]), "config: expected an object"),
    "an evaluation of text": (changed("evaluation", to={"loss": "low"}), "evaluation"),
    "an evaluation that is a list": (changed("evaluation", to=[1]), "evaluation"),
    "an unknown axis": (changed("layout", to={"ep": 4}), "no axis 'ep'"),
    "a negative size": (changed("layout", "dp_shard", to=-2), "expected an integer of at least 1"),
    "a size that is true": (changed("layout", "dp_shard", to=True), "expected an integer of at least 1"),
    "too large a layout": (changed("layout", "dp_shard", to=2**62), "names 4 files"),
    "a layout of another size": (changed("layout", "dp_shard", to=4), "names 4 files, and its layout"),
    "a path up": (renamed_file("../../x"), r"'\.\./\.\./x'"),
    "an absolute path": (renamed_file("/etc/passwd"), "'/etc/passwd'"),
    "a path inside": (renamed_file("a/rank_00000.safetensors"), "names files that are not"),
    "a file with a newline": (renamed_file("rank_00000.safetensors\n"), "names files that are not"),
    "a file's number in other digits": (renamed_file("rank_٠٠٠٠٠.safetensors"), "names files that are not"),
    "a file beyond the ranks": (renamed_file("rank_00004.safetensors"), "names files that are not"),
    "a file's number too long": (renamed_file("rank_000000.safetensors"), "names files that are not"),
    "a size of a file below 0": (
        changed("files", file_of(0), "size", to=-1),
        "rank_00000.safetensors: expected a size",
    ),
    "a checksum that is none": (changed("files", file_of(0), "crc32", to="abc"), "a crc32 of 8"),
    "a file that says more": (changed("files", file_of(0), "path", to="../x"), "expected a size"),
    "no name": (json.dumps(PLAIN | {"tensors": {"": PLAIN["tensors"]["model.a"]}}), "names that can be printed"),
    "a name with an escape": (
        json.dumps(PLAIN | {"tensors": {"\x1b[2J": PLAIN["tensors"]["model.a"]}}),
        r"found '\\x1b\[2J'",
    ),
    "half a character": (
        json.dumps(PLAIN | {"tensors": {"\ud800": PLAIN["tensors"]["model.a"]}}),
        r"found '\\ud800'",
    ),
    "the name of the metadata": (
        json.dumps(PLAIN | {"tensors": {"__metadata__": PLAIN["tensors"]["model.a"]}}),
        "names that can be printed",
    ),
    "a tensor that is a number": (json.dumps(PLAIN | {"tensors": {"model.a": 1}}), "model.a: expected dtype"),
    "a tensor that says more": (tensor(rank=0), "model.a: expected dtype"),
    "an unknown type": (tensor(dtype="F8"), "model.a: expected one of the types"),
    "a type that is a list": (tensor(dtype=["F32"]), "model.a: expected one of the types"),
    "a shape that is a text": (tensor(shape="42"), "model.a: expected a shape"),
    "a negative shape": (tensor(shape=[-4, 2]), "model.a: expected a shape"),
    "two negative sizes": (tensor(shape=[-4, -2]), "model.a: expected a shape"),
    "a shape of floats": (tensor(shape=[4.0, 2]), "model.a: expected a shape"),
    "a shape that overflows": (tensor(shape=[2**32, 2**31]), "a shape of less than 2.63 bytes"),
    "too many dims": (tensor(shape=[1] * 65), "model.a: expected a shape"),
    "more than the files": (tensor(shape=[2**20, 2**10]), "names tensors of 4,294,967,296 bytes and files of 40,000"),
    "cuts that are a number": (tensor(cuts=1), "model.a: expected cuts"),
    "a cut of three": (tensor(cuts=[["dp_shard", 0, 0]]), "model.a: expected cuts"),
    "a cut by an unknown axis": (tensor(cuts=[["ep", 0]]), "model.a: expected cuts"),
    "a cut by an axis that is not there": (tensor(cuts=[["tp", 0]]), "model.a: expected cuts"),
    "a cut by pp": (tensor(cuts=[["pp", 0]]), "model.a: expected cuts"),
    "a cut by a list": (tensor(cuts=[[["dp_shard"], 0]]), "model.a: expected cuts"),
    "a cut of an unknown dim": (tensor(cuts=[["dp_shard", 2]]), "model.a: expected cuts of its 2 dims"),
    "a cut of the last dim from behind": (tensor(cuts=[["dp_shard", -1]]), "model.a: expected cuts"),
    "a cut of a scalar's second dim": (tensor(shape=[], cuts=[["dp_shard", 1]]), "cuts of its 1 dims"),
    "an axis twice": (tensor(cuts=[["dp_shard", 0], ["dp_shard", 1]]), "model.a: expected cuts"),
    "no stages": (tensor(stages=[]), "model.a: expected stages"),
    "a stage out of range": (tensor(stages=[0, 2]), "model.a: expected stages from 0 to 1"),
    "a stage below 0": (tensor(stages=[-1]), "model.a: expected stages"),
    "a stage twice": (tensor(stages=[0, 0]), "model.a: expected stages"),
    "stages that descend": (tensor(stages=[1, 0]), "model.a: expected stages"),
    "stages that are a number": (tensor(stages=0), "model.a: expected stages"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_manifest_is_refused(name: str) -> None:
    text, why = REFUSED[name]
    with pytest.raises(DamagedError, match=why) as caught:
        Manifest.parse(text, WHERE)
    assert str(caught.value).startswith("step_0000100/manifest.json: ")
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


def test_the_same_tools_make_manifests_that_are_taken() -> None:
    """What refuses the others is not how they are made."""
    for text in (json.dumps(PLAIN), tensor(), renamed_file(file_of(0)), changed("step", to=7)):
        Manifest.parse(text, WHERE)


def test_a_newer_format_is_no_damage() -> None:
    with pytest.raises(InputError, match=r"step_0000100/manifest.json has format 3, and this meshtrain") as caught:
        Manifest.parse('{"format": 3, "tensors": "elsewhere"}', WHERE)
    assert not isinstance(caught.value, DamagedError)


def test_what_no_reader_would_take_is_not_written() -> None:
    with pytest.raises(DamagedError, match="expected cuts"):
        made(Layout({}), {"model.a": Placement((4,), "F32", (("tp", 0),))}).to_json()


def test_format_1_had_no_experts() -> None:
    of_format_1 = {name: value for name, value in PLAIN.items() if name != "experts"} | {"format": 1}
    VALIDATOR.validate(of_format_1)
    assert Manifest.parse(json.dumps(of_format_1), WHERE) == TWO
    with pytest.raises(DamagedError, match="holds, which format 1 does not have: 'experts'"):
        Manifest.parse(changed("format", to=1), WHERE)


@pytest.mark.parametrize(
    "name", ["a path up", "a negative shape", "an unknown type", "a cut by pp", "more keys", "no step"]
)
def test_the_schema_refuses_it_too(name: str) -> None:
    assert not VALIDATOR.is_valid(json.loads(REFUSED[name][0]))
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
