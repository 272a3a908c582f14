"""What the first edition documented (promises.yaml) is still there: keys, names, commands, metrics,
files, statuses."""

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshtrain.cli.main import COMMANDS, main
from meshtrain.metrics.logger import read
from tests.launching import ROOT, forked, run

PROMISES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "promises.yaml").read_text())
TINY = """
model.hidden_size=24 model.intermediate_size=32 model.num_hidden_layers=1 data.seq_len=16 data.workers=0
batch.global_size=4 batch.micro_size=2 optimizer.warmup_steps=0 train.sample_tokens=0 train.eval_samples=8
parallel.compile=false train.steps=41 train.eval_every=41 checkpoint.every=20 metrics.profile=[2,2]
"""
Schema = dict[str, Any]


def alternatives(schema: Schema) -> list[Schema]:
    return (
        [part for option in schema["anyOf"] for part in alternatives(option)]
        if "anyOf" in schema
        else [schema]
    )


def keys_of(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every key by its path; the keys of one model's or one fault's alternative carry its title."""
    for alternative in alternatives(schema):
        title = alternative.get("title", "")
        for name, value in alternative.get("properties", {}).items():
            key = ".".join(
                part for part in (path, f"<{title}>" if title and path else "", name) if part
            )
            yield key, value
            yield from keys_of(value, key)
            yield from keys_of(value.get("items", {}), key)
    # the section `model`: common keys beside each model's own
    if "anyOf" in schema and "properties" in schema:
        yield from keys_of({"properties": schema["properties"]}, path)


def test_a_key_takes_what_it_took() -> None:
    """Values of each type and at each bound are still allowed, and what happens without the key is
    the same."""
    from jsonschema import Draft7Validator

    schemas: dict[str, list[Schema]] = {}
    for key, schema in keys_of(json.loads((ROOT / "configs" / "schema.json").read_text())):
        schemas.setdefault(key, []).append(schema)
    lost = []
    for key, promise in PROMISES["keys"].items():
        today = schemas.get(key, [])
        checks = [Draft7Validator(schema) for schema in today]
        refused = [
            value
            for value in promise["takes"]
            if not any(check.is_valid(value) for check in checks)
        ]
        lost += [f"{key} does not take {value!r}" for value in refused]
        if "default" in promise and promise["default"] not in [
            schema.get("default", ...) for schema in today
        ]:
            lost.append(f"{key} has another default")
    assert lost == []


def test_every_documented_field_is_still_documented() -> None:
    quoted = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "metrics.md").read_text())
    words = {word for text in quoted for word in re.split(r"[,=\s]+", text)}
    assert set(PROMISES["documented"].split()) <= words


def test_a_run_writes_every_documented_field_and_file(tmp_path: Path) -> None:
    """Steps on two ranks, long enough for the ranks to be compared."""
    config = str(ROOT / "configs/quickstart.yaml")
    finished = forked(
        2, "-m", "meshtrain.train", config, *TINY.split(), f"train.output={tmp_path}"
    ).check()
    rows = read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 42))
    assert all(set(PROMISES["row"].split()) <= row.keys() for row in rows)
    compared = {"own_time_median_s", "own_time_max_s", "own_time_max_rank", "memory_max_gib"}
    assert any(compared <= row.keys() for row in rows)
    assert all(rows[-1][name] is not None for name in ("eval_loss", "perplexity", "bits_per_byte"))
    # loss.png: in test_train.py
    names = [
        "config.yaml",
        "layout.txt",
        "goodput.jsonl",
        "profile/rank_00000.json",
    ]
    names += [
        f"checkpoints/step_0000041/{name}"
        for name in ("manifest.json", "rank_00000.safetensors", "COMPLETE")
    ]
    assert [name for name in names if not (tmp_path / name).exists()] == []
    exit_file = json.loads((tmp_path / "exit.json").read_text())
    assert (exit_file["status"], exit_file["code"], exit_file["step"]) == ("done", 0, 41)
    assert {"jobs", "wall_s", "wall_training_s", "wall_between_s"} <= exit_file["goodput"].keys()
    for text in (
        "2 processes = 1 host",
        "global batch 4",
        "FLOP per sample",
        "peak ",
        "wall time ",
        "(goodput)",
    ):
        assert text in finished.out, text


def test_public_names_can_be_imported() -> None:
    missing = [
        f"{module}.{name}"
        for module, names in PROMISES["names"].items()
        for name in names
        if not hasattr(importlib.import_module(module), name)
    ]
    assert missing == []


def test_an_own_loop_of_the_first_edition_runs() -> None:
    text = (ROOT / "tools/examples/own_loop.py").read_text()
    for today, then in PROMISES["own_loop"].items():
        assert today in text
        text = text.replace(today, then)
    printed = run([sys.executable, "-c", text]).check().out
    assert re.search(r": loss \d\.\d{9}, gradient norm \d\.\d{9} after 3 steps", printed)


@pytest.mark.parametrize("command", PROMISES["commands"])
def test_a_command_has_its_arguments(command: str) -> None:
    name, _, action = command.partition(" ")
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
    if action:
        (actions,) = (
            found for found in parser._actions if isinstance(found, argparse._SubParsersAction)
        )
        parser = actions.choices[action]
    promise = PROMISES["commands"][command]
    positional = [action.dest for action in parser._actions if not action.option_strings]
    assert positional == promise["arguments"].split()
    assert set(promise["options"].split()) <= set(parser._option_string_actions)


def test_modules_can_be_run() -> None:
    for module in PROMISES["modules"].split():
        assert "usage: " in forked(1, "-m", module, "--help").check().out


@pytest.mark.parametrize("command", PROMISES["statuses"])
def test_exit_statuses(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(command.split()) == PROMISES["statuses"][command]
