"""`meshtrain export CHECKPOINT DIR`: the weights of a checkpoint as a Hugging Face directory,
without a job; with `--format dcp` its whole state, for torch.distributed.checkpoint
(export_dcp.py).

The files have the same bytes as those that `train.export` writes for these weights. A block of rows
is read at a time, so memory does not grow with the model. A checkpoint may come from a stranger, so
nothing that it names is run: config.json is written by one of meshtrain's own models, or by the
file that `--model` names.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshtrain.checkpoint.dcp.names import NAMINGS
from meshtrain.checkpoint.directory import read_manifest
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.weights import open_checkpoint
from meshtrain.cli.checkpoint import add_names_option
from meshtrain.config.model_spec import ModelSpec
from meshtrain.config.schema import OWN_MODEL_KEYS
from meshtrain.data.tokenizer import local_tokenizer
from meshtrain.errors import InputError, bytes_text
from meshtrain.huggingface.adapter import adapter_config, adapter_source, merged_source
from meshtrain.huggingface.export import (
    ExportFolder,
    WeightFiles,
    as_input_errors,
    plan_export,
)
from meshtrain.huggingface.export_texts import small_files, tokenizer_files
from meshtrain.huggingface.former_models import of_today
from meshtrain.huggingface.load import DTYPES, WeightSource
from meshtrain.huggingface.safetensors import ADAPTER, ADAPTER_CONFIG, FILE_BYTES, SINGLE, Entry
from meshtrain.huggingface.stored_names import StoredTensor, Table, whole_table
from meshtrain.job import locate
from meshtrain.job.parsing import parse_json, read_limited
from meshtrain.parallel.mixed_precision import PRECISIONS, compute_dtype
from meshtrain.run.weights_export import source_files

BLOCK = 64 * 2**20  # bytes that are read at a time, unless a row has more
MOST_ITEMSIZE = 8  # bytes of an element, stored or exported
MAX_TOKENIZER = 2**27  # bytes; files of large vocabularies have a third of that


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", help="a checkpoint, or a run's folder, for its newest complete checkpoint"
    )
    parser.add_argument("folder", metavar="DIR", help="a new folder, or one with an earlier export")
    parser.add_argument(
        "--format",
        choices=("huggingface", "dcp"),
        default="huggingface",
        help="dcp: weights and AdamW's state for torch.distributed.checkpoint",
    )
    add_names_option(parser, when="with --format dcp: ")
    parser.add_argument(
        "--dtype",
        choices=list(PRECISIONS),
        help="dtype of the weights (default: the run's precision)",
    )
    parser.add_argument(
        "--ema", action="store_true", help="export the averaged weights (optimizer.ema_decay)"
    )
    parser.add_argument(
        "--adapter", action="store_true", help="export only the adapters of train.lora, for peft"
    )
    parser.add_argument(
        "--model",
        metavar="FILE.py",
        help=(
            "the run's own model file; it is executed to write config.json (a path in a checkpoint "
            "never is)"
        ),
    )


def run(options: argparse.Namespace) -> None:
    if options.format == "dcp":
        for_weights = ("dtype", "ema", "adapter", "model")
        given = [f"--{name}" for name in for_weights if getattr(options, name)]
        if given:
            raise InputError(f"{given[0]} is for --format huggingface: dcp has the state as it is")
        from meshtrain.cli.export_dcp import export_dcp  # brings torch.distributed.checkpoint

        naming = None if options.names is None else NAMINGS[options.names]
        export_dcp(options.checkpoint, options.folder, naming=naming, say=print)
        return
    if options.names is not None:
        raise InputError("--as is for --format dcp: Hugging Face's names follow from the model")
    export(
        options.checkpoint,
        options.folder,
        dtype=options.dtype,
        model=options.model,
        ema=options.ema,
        adapter=options.adapter,
        say=print,
    )


def export(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    dtype: str | None = None,
    model: str | None = None,
    ema: bool = False,
    adapter: bool = False,
    say: Callable[[str], None] = lambda line: None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes the weights of a checkpoint as `train.export` does, with adapters merged.

    Args:
        checkpoint: a checkpoint, or a run's folder.
        folder: is created, or replaces an earlier export.
        dtype: of the floating tensors, by torch's names; None: the dtype in which the run computes.
        model: the path of a model file to run for config.json; None: one of meshtrain's own, if the
            run used one.
        ema: write the averaged weights instead.
        adapter: write only the LoRA adapters, for peft.
        say: prints what was written, and what could not be.
        file_bytes: the maximum size of one file, unless a tensor is larger.

    Raises:
        DamagedError: the checkpoint is not as it was written; names file and tensor. InputError:
            something else is wrong with it or with the folder. No partial export is left.
    """
    with open_checkpoint(checkpoint, ema=ema) as source:
        manifest, _ = read_manifest(source.path)
        if not source.entries:
            raise InputError(
                f"the checkpoint of step {manifest.step} holds no weights: its tensors are none of "
                "a model"
            )
        torch_dtype = compute_dtype(dtype or _precision(manifest))
        if adapter:
            content = _adapter(source, manifest, torch_dtype, say)
        else:
            content = _weights(source, manifest, torch_dtype, model, file_bytes, say)
        place = ExportFolder(folder)
        if place.target.resolve().is_relative_to(source.path.resolve()):
            raise InputError(
                f"{folder} is inside of the checkpoint {source.path}: name a folder somewhere else"
            )
        with as_input_errors(place.target):
            place.make()
            try:
                with WeightFiles(place.making, content.files) as out:
                    for file, entries in content.files.items():
                        for entry in entries:
                            name, piece = content.parts[entry.name]
                            out.write(file, entry, _blocks(content.source, entry, name, piece))
                place.finish(content.files, content.texts)
            finally:
                place.drop()
    sizes = [entry.nbytes for entries in content.files.values() for entry in entries]
    say(
        f"weights of step {manifest.step} in {folder}: {len(sizes)} tensors, "
        f"{bytes_text(sum(sizes))}"
    )


@dataclass(frozen=True)
class _Content:
    """What an export writes."""

    source: WeightSource
    files: Mapping[str, Sequence[Entry]]
    parts: Mapping[str, tuple[str, StoredTensor]]  # of `plan_export`
    texts: Mapping[str, str]  # of the small files, by their names


def _weights(
    source: WeightSource,
    manifest: Manifest,
    dtype: torch.dtype,
    model: str | None,
    file_bytes: int,
    say: Callable[[str], None],
) -> _Content:
    """The weights, with adapters merged, in the form of the model's published files."""
    merged = merged_source(source, manifest.section("train").get("lora"))
    spec = _spec(manifest, model, say)
    config = _config(spec, say)
    table: Table = {}
    copies: Table = {}
    if spec is not None:
        table = whole_table(spec.plan("stored_as"))
        copies = spec.plan("stored_again") or {}
    tokenizer = _tokenizer(manifest, say)
    beside: Mapping[str, str] = {}
    if config is not None:
        beside = source_files(manifest.section("model").get("weights"), say)
    files, parts = plan_export(merged.entries.values(), dtype, file_bytes, table, copies)
    texts = small_files(config, dtype, tokenizer, manifest.section("data"), beside)
    return _Content(merged, files, parts, texts)


def _adapter(
    source: WeightSource, manifest: Manifest, dtype: torch.dtype, say: Callable[[str], None]
) -> _Content:
    """The LoRA adapters alone, in one file, as peft has them; and the run's tokenizer."""
    lora = manifest.section("train").get("lora")
    base = manifest.section("model").get("weights")
    adapters = adapter_source(source)
    no_limit = 2**63
    files, parts = plan_export(adapters.entries.values(), dtype, no_limit)
    texts = {**_tokenizer(manifest, say), ADAPTER_CONFIG: adapter_config(adapters, lora, base)}
    return _Content(adapters, {ADAPTER: files[SINGLE]}, parts, texts)


def _blocks(
    source: WeightSource, entry: Entry, name: str, piece: StoredTensor
) -> Iterator[memoryview]:
    """A tensor's bytes, one block of rows after the other. `name`, `piece`: the model's tensor, and
    the part of it that is stored."""
    dims = entry.shape or (1,)
    # A stored tensor may lack the first dims of the model's, such as the experts: one index each.
    lead = piece.part[: len(piece.part) - len(dims)]
    rows, *columns = piece.part[len(lead) :]
    row_bytes = math.prod(dims[1:]) * MOST_ITEMSIZE
    step = max(1, BLOCK // max(1, row_bytes))
    for first in range(rows.start, rows.stop, step):
        block = slice(first, min(first + step, rows.stop))
        values = source.read(name, (*lead, block, *columns))
        flat = values.to(DTYPES[entry.dtype]).contiguous().view(-1)
        yield flat.view(torch.uint8).numpy().data


def _precision(manifest: Manifest) -> str:
    precision = manifest.section("train").get("precision")
    if precision not in PRECISIONS:
        raise InputError(
            f"the checkpoint's config has no train.precision that is known ({precision!r}): give "
            "--dtype"
        )
    return precision


def _spec(manifest: Manifest, model: str | None, say: Callable[[str], None]) -> ModelSpec | None:
    """The run's model; None, with a message, if no file is known that may be run."""
    section = of_today(manifest.section("model"))
    name = model
    if name is None:
        name = section.get("name")
        if name not in locate.names("models", ".py"):
            say(
                "config.json is not written, and tensors keep the names that they have in the "
                f"model: the run's model is the file {name!r}, and a file that a checkpoint names "
                "is not run. --model FILE.py says which file may be."
            )
            return None
    try:
        module = locate.model_file(str(name))
    except FileNotFoundError as error:
        raise InputError(f"--model: {error}") from error
    keys = {key: value for key, value in section.items() if key not in OWN_MODEL_KEYS}
    return ModelSpec(module, keys)


def _config(spec: ModelSpec | None, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The contents of config.json; None, with a message, if they are unknown."""
    if spec is None:
        return None
    name = Path(str(spec.module.__file__)).stem
    if not hasattr(spec.module, "to_hugging_face"):
        say(f"config.json is not written: the model {name} has no Hugging Face form")
        return None
    try:
        return spec.module.to_hugging_face(spec.config)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise InputError(
            f"the model {name} refuses the keys in the checkpoint's config: {error}"
        ) from error


def _tokenizer(manifest: Manifest, say: Callable[[str], None]) -> dict[str, str]:
    """The run's tokenizer.json, if it exists and is one, and the files that belong to it: a
    checkpoint must not make this read any other file."""
    name = manifest.section("data").get("tokenizer", "bytes")
    if name == "bytes":
        return {}
    problem = "it is none"
    try:
        path = local_tokenizer(str(name))
        if path.suffix == ".json":
            tokenizer = parse_json(read_limited(path, MAX_TOKENIZER))
            if isinstance(tokenizer, dict) and isinstance(tokenizer.get("model"), dict):
                return tokenizer_files(path)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no home folder
        problem = str(error)
    shown = "".join(character if character.isprintable() else "?" for character in str(name))
    say(f"tokenizer.json is not written: the run's tokenizer is {shown}, and {problem}")
    return {}
