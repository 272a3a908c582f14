"""The manifest: what is written is read again, any other text is refused with a reason, and it
stays small."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshtrain.checkpoint import manifest as room
from meshtrain.checkpoint.manifest import MAX_BYTES, File, Manifest, file_of
from meshtrain.checkpoint.placement import Placement
from meshtrain.errors import DamagedError, InputError
from meshtrain.layout import Layout
from tests.checkpoint.test_placement import placements, with_experts
from tests.properties import given, settings, st

WHERE = Path("step_0000100/manifest.json")
# Tensors of a pair of ranks and stages, from which each refused manifest differs in one place.
TENSORS = {"model.a": Placement((4, 2), "F32", (("dp_shard", 0),), (0, 1))}
REFUSED = yaml.safe_load(Path(__file__).with_name("refused_manifests.yaml").read_text())


def made(layout: Layout, tensors: dict[str, Placement], **about: Any) -> Manifest:
    manifest = Manifest(
        step=100,
        samples=51_200,
        tokens=13_107_200,
        layout=layout,
        tensors=tensors,
        files={file_of(rank): File(10_000, f"{rank:08x}") for rank in range(layout.world_size)},
        config={"model": {"name": "llama"}, "optimizer": {"betas": [0.9, 0.95]}},
        data={"fingerprint": "ab", "train": 10},
        versions={"torch": "2.13.0"},
        rng={"seed": 0, "rule": "(seed, step, data rank)"},
        counters={},
        evaluation={"eval_loss": 3.25},
        written="2026-01-02T03:04:05Z",
    )
    return replace(manifest, **about)


GOOD = made(Layout({"pp": 2, "dp_shard": 2}), TENSORS)


@pytest.fixture(scope="module")
def schema() -> Any:
    """A validator of the JSON Schema that is beside the code."""
    import jsonschema

    text = Path(room.__file__).with_name("manifest.schema.json").read_text()
    jsonschema.Draft202012Validator.check_schema(json.loads(text))
    return jsonschema.Draft202012Validator(json.loads(text))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(), inside, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(
    st.data(),
    st.dictionaries(st.text(), JSON, max_size=3),
    st.none() | st.dictionaries(st.just("x"), st.floats()),
)
def test_what_is_written_is_read(
    schema: Any, data: st.DataObject, counters: dict[str, Any], evaluation: dict[str, float] | None
) -> None:
    layout = data.draw(with_experts())
    names = data.draw(
        st.sets(st.text(st.characters(categories=["L", "N", "P"]), min_size=1), max_size=4)
    )
    tensors = {name: data.draw(placements(layout)) for name in sorted(names)}
    manifest = made(layout, tensors, counters=counters, evaluation=evaluation)
    text = manifest.to_json()
    parsed = Manifest.parse(text, WHERE)
    assert repr(parsed) == repr(manifest)  # NaN is not equal to itself
    assert parsed.layout == layout
    schema.validate(json.loads(text))
    assert sum(len(parsed.entries(rank)) for rank in range(layout.world_size)) >= len(tensors)


def test_infinity_and_nan_are_json_that_any_program_reads() -> None:
    clip = {"clip": [math.inf, -math.inf]}
    manifest = made(
        Layout({}), {}, counters={"loss": math.nan}, config=clip, evaluation={"l": math.inf}
    )
    plain = json.loads(manifest.to_json(), parse_constant=pytest.fail)
    assert plain["books"] == {"loss": {"$float": "nan"}}
    assert repr(Manifest.parse(manifest.to_json(), WHERE)) == repr(manifest)


def test_a_tensor_and_a_file_have_a_line_each() -> None:
    lines = GOOD.to_json().splitlines()
    assert (
        '"model.a": {"dtype":"F32","shape":[4,2],"cuts":[["dp_shard",0]],"stages":[0,1]}' in lines
    )
    assert '"rank_00001.safetensors": {"size":10000,"crc32":"00000001"},' in lines


def test_it_does_not_grow_with_ranks_times_tensors() -> None:
    """A model of 405 billion parameters: 126 layers of 9 tensors, 3 more, and AdamW's two moments;
    4,096 ranks."""
    layout = Layout({"pp": 16, "dp_replicate": 1, "dp_shard": 32, "tp": 8})
    whole = {"embed_tokens": (128256, 16384), "norm": (16384,), "lm_head": (128256, 16384)}
    shapes = [
        (16384, 16384),
        (1024, 16384),
        (1024, 16384),
        (16384, 16384),
        (53248, 16384),
        (53248, 16384),
    ]
    shapes += [(16384, 53248), (16384,), (16384,)]
    whole |= {
        f"model.layers.{layer}.{i}.weight": shape
        for layer in range(126)
        for i, shape in enumerate(shapes)
    }
    cuts = {1: (("dp_shard", 0),), 2: (("tp", 0), ("dp_shard", 0))}
    tensors = {
        f"{kind}.{name}{end}": Placement(
            shape, "F32", cuts[len(shape)], (index * 16 // len(whole),)
        )
        for kind, end in (("model", ""), ("optimizer", ".exp_avg"), ("optimizer", ".exp_avg_sq"))
        for index, (name, shape) in enumerate(whole.items())
    }
    total = sum(12 * math.prod(shape) for shape in whole.values())
    files = {file_of(rank): File(total // 4096 + 60_000, f"{rank:08x}") for rank in range(4096)}
    manifest = made(layout, tensors, files=files)
    text = manifest.to_json()
    assert len(text) < 700_000
    assert Manifest.parse(text, WHERE) == manifest
    assert manifest.total_bytes > total > 4.8e12
    assert len(text) * 32 < MAX_BYTES, "131,072 ranks have room, too"


# Refused ------------------------------------------------------------------------------------------


def changed(row: dict[str, Any]) -> dict[str, Any]:
    """The good manifest with the change of a row."""
    manifest = inside = json.loads(GOOD.to_json())
    path = row.get("set", row.get("rename"))
    *parents, key = path if isinstance(path, list) else [path]
    for parent in parents:
        inside = inside[parent]
    if "rename" in row:
        inside[row["to"]] = inside.pop(key)
    else:
        inside[key] = row["to"]
    return manifest


def texts() -> dict[str | bytes, str]:
    """Texts, and why they are refused."""
    deep = json.loads("[" * 200 + "]" * 200)
    steps = {
        "NaN": "NaN is no number",
        "1e999": "too large a number",
        "9" * 4000: f"found {'9' * 77}...",
        "9" * 9000: "no JSON",
    }
    without_step = {
        key: value for key, value in changed({"set": "step", "to": 0}).items() if key != "step"
    }
    return {
        "": "is empty",
        "{": "no JSON",
        b'{"\xff": 1}': "no JSON",
        "[]": "no JSON object",
        "[" * 100_000: "no JSON",
        '{"format": 1, "format": 1}': "'format' stands twice",
        json.dumps(without_step): "lacks 'step'",
        json.dumps(changed({"set": "books", "to": deep})): "more than 50 deep",
        json.dumps(
            changed({"set": ["tensors", "model.a", "shape"], "to": [1] * 65})
        ): "model.a: expected a shape",
        **{
            GOOD.to_json().replace('"step": 100', f'"step": {step}'): reason
            for step, reason in steps.items()
        },
        **{json.dumps(changed(row)): row["says"] for row in REFUSED},
    }


def test_hostile_manifests_are_refused() -> None:
    problems = []
    for text, reason in texts().items():
        try:
            Manifest.parse(text, WHERE)
            message = "taken"
        except DamagedError as error:
            message = str(error)
        good = message.startswith("step_0000100/manifest.json: ") and reason in message
        if not good or len(message) >= 500 or not message.isprintable():
            problems.append((text[:1000], reason, message))
    assert not problems
    # how they are made is not what is wrong
    Manifest.parse(json.dumps(changed({"set": "step", "to": 7})), WHERE)


def test_the_schema_refuses_some_too(schema: Any) -> None:
    rows = [row for row in REFUSED if row.get("schema")]
    assert [row for row in rows if schema.is_valid(changed(row))] == []
    assert len(rows) == 5


def test_a_newer_format_is_no_damage() -> None:
    with pytest.raises(
        InputError, match=r"step_0000100/manifest.json has format 3, and this meshtrain"
    ) as refused:
        Manifest.parse('{"format": 3, "tensors": "elsewhere"}', WHERE)
    assert not isinstance(refused.value, DamagedError)


def test_what_no_reader_would_take_is_not_written() -> None:
    with pytest.raises(DamagedError, match="expected cuts"):
        made(Layout({}), TENSORS).to_json()


def test_format_1_had_no_experts(schema: Any) -> None:
    manifest = changed({"set": "format", "to": 1})
    del manifest["experts"]
    schema.validate(manifest)
    assert Manifest.parse(json.dumps(manifest), WHERE) == GOOD
