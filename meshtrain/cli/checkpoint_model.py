"""The model of a checkpoint, parallelized over the processes of this job, for commands that run it.

A checkpoint may come from a stranger, so a model file that it names is not run: `--model` says
which file may be.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from meshtrain.config import spec_of
from meshtrain.config.checks import scales_dynamically
from meshtrain.config.removed import without_removed
from meshtrain.errors import InputError
from meshtrain.huggingface.former_models import of_today
from meshtrain.huggingface.rope_keys import one_form
from meshtrain.job import locate

if TYPE_CHECKING:
    from torch import nn

    from meshtrain.config import Config
    from meshtrain.data.tokenizer import Tokenizer
    from meshtrain.job.process import Job
    from meshtrain.mesh import Mesh

# Keys of a run that describe its training, which another layout may not allow; and the preset,
# whose sizes are keys.
_DEFAULTS = (
    "model.preset=null",
    "pipeline={}",
    "parallel={compile: false, verify: false}",
    "train.chaos=[]",
    "train.linear_precision=null",
)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", help="a checkpoint, or a run's folder, for its newest complete checkpoint"
    )
    parser.add_argument(
        "--layout", default="{dp_shard: -1}", help="layout of this job's processes, as in a config"
    )
    parser.add_argument("--precision", help="as train.precision (default: the run's)")
    parser.add_argument(
        "--tokenizer", metavar="FILE.json", help="a tokenizer file, or bytes (default: the run's)"
    )
    parser.add_argument(
        "--model", metavar="FILE.py", help="the run's own model file, if it has one; it is executed"
    )


@contextmanager
def opened_model(
    options: argparse.Namespace, reads_text: bool = True
) -> "Iterator[tuple[nn.Module, Config, Job, Mesh]]":
    """The parallelized model of `add_model_arguments`, with its weights. `reads_text`: it will get
    texts of any length, with padding. Raises SystemExit: the input is wrong."""
    from meshtrain.job.watchdog.watchdog import start  # torch comes only now
    from meshtrain.mesh import build_mesh
    from meshtrain.modeling.build import build_model
    from meshtrain.parallel.mixed_precision import set_numerics

    with start() as job:
        with job.collective_check("reading the checkpoint"):
            config = read_config(options, job.world_size, job.device.type, reads_text)
        names, counts = job.hosts()
        assert config.resolved is not None  # it was loaded for this number of processes
        job.layout = config.resolved.on_hosts(counts, names)
        set_numerics(config.train.deterministic)
        mesh = build_mesh(job.layout, job.device.type)
        yield build_model(config, mesh, job.device), config, job, mesh


def read_config(
    options: argparse.Namespace, world_size: int, device: str, reads_text: bool = True
) -> "Config":
    """The config of the run that wrote a checkpoint, with this job's layout and the checkpoint's
    weights."""
    from meshtrain.checkpoint.directory import read_manifest, require_checkpoint
    from meshtrain.config import Config

    checkpoint = require_checkpoint(options.checkpoint)
    manifest, _ = read_manifest(checkpoint)
    model = of_today(one_form(manifest.section("model")))
    name = model.get("name")
    if options.model is None and name is None:
        raise InputError(
            "the run's model stands in a script, and a checkpoint does not run it: --model FILE.py "
            "says which file has it"
        )
    if options.model is None and name not in locate.names("models", ".py"):
        raise InputError(
            f"the run's model is the file {name!r}, and a file that a checkpoint names is not run: "
            "--model FILE.py says which file may be"
        )
    overrides = [
        f"model.weights={json.dumps(str(checkpoint))}",
        f"layout={options.layout}",
        *_DEFAULTS,
    ]
    if options.model is not None:
        overrides.append(f"model.name={json.dumps(options.model)}")
    if getattr(options, "validation", False):
        overrides += _data_file(options, manifest.section("data").get("source"))
    if options.precision is not None:
        overrides.append(f"train.precision={options.precision}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.yaml"
        # JSON is YAML. Older versions of meshtrain wrote a default of rope_theta beside the
        # rope_parameters that count.
        written = {**without_removed(manifest.config), "model": model}
        path.write_text(json.dumps(written))
        config = Config.load(str(path), overrides, world_size=world_size, device=device)
    if reads_text and spec_of(config).plan("cp_plan") is None:
        raise InputError(
            f"the model {config.model.name} has no cp_plan, by which it says that its attention "
            "takes what it must know of the tokens from an AttentionContext: padding and a cache "
            "are not for it (docs/context-parallel.md)"
        )
    return config


def _data_file(options: argparse.Namespace, source: object) -> list[str]:
    """The override that names the run's own data file. Raises InputError: nobody but the checkpoint
    has named it."""
    if options.data is not None:
        return [f"data.source={json.dumps(options.data)}"]
    is_model = isinstance(source, str) and source == options.model
    if isinstance(source, str) and source.endswith(".py") and not is_model:
        raise InputError(
            f"the run's data are of the file {source!r}, and a file that a checkpoint names is not "
            "run: --data FILE.py says which file may be"
        )
    return []


def tokenizer_of(config: "Config", name: str | None) -> "Tokenizer":
    """The tokenizer of `--tokenizer`, or of the run. Raises InputError: the run's data does not say
    which it is."""
    from meshtrain.data.prepare import TEXT
    from meshtrain.data.tokenizer import open_tokenizer

    data = config.data
    sources = {data.source}
    if data.sources:
        sources = {part.source or data.source for part in data.sources}
    # With files of ids the run has read no text, and its key is the default.
    if name is None and data.tokenizer == "bytes" and not sources <= TEXT.keys():
        raise InputError(
            "the run's data.tokenizer does not say by which tokenizer the ids of its files were "
            "made: name it with --tokenizer FILE.json, or --tokenizer bytes"
        )
    return open_tokenizer(name or data.tokenizer, data.begin_token, data.end_token)


def ids_of(
    text: str, tokenizer: "Tokenizer", config: "Config", *, plain: bool = False
) -> list[int]:
    """The token ids of a prompt, which begins as the documents of the run's data do. It may spell
    control tokens; `plain`: they are text, as in documents. Raises InputError: it is not UTF-8, or
    an id is outside the vocabulary."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{text[:40]!r} is not text in UTF-8: {error.reason}") from error
    ids = with_begin(tokenizer.encode(text, plain=plain), tokenizer)
    largest = max(ids, default=-1)
    size = config.model.keys.get("vocab_size")
    if size is not None and largest >= size:
        raise InputError(
            f"the text {text[:40]!r} has the token id {largest} by {tokenizer.identity}, and "
            f"model.vocab_size is {size}: name the tokenizer that the model was trained with by "
            "--tokenizer"
        )
    return ids


def with_begin(ids: list[int], tokenizer: "Tokenizer") -> list[int]:
    """The ids behind the token that begins a document, if the run's documents have one and these do
    not."""
    if tokenizer.begin is None or ids[:1] == [tokenizer.begin]:
        return ids
    return [tokenizer.begin, *ids]


def check_length(length: int, config: "Config") -> None:
    """Raises InputError: a text of `length` tokens is longer than the model supports."""
    keys = config.model.keys
    most = keys.get("max_position_embeddings")
    if most is None or length <= most:
        return
    if scales_dynamically(keys.get("rope_scaling"), keys.get("rope_parameters")):
        return
    raise InputError(
        f"a prompt and what is added have {length} tokens together, and "
        f"model.max_position_embeddings is {most}: shorten the prompt, or give a smaller --length"
    )
