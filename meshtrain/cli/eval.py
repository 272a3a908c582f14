"""`meshtrain eval CHECKPOINT`: scores of a checkpoint's model on any layout: tasks of
lm-evaluation-harness (`--tasks`, https://github.com/EleutherAI/lm-evaluation-harness), the
perplexity of files (`--files`), and the loss of the run's validation data (`--validation`).
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtrain.cli.checkpoint_model import add_model_arguments, ids_of, opened_model, tokenizer_of
from meshtrain.config import spec_of
from meshtrain.errors import InputError
from meshtrain.layout import DATA_AXES

if TYPE_CHECKING:
    from torch import nn

    from meshtrain.config import Config
    from meshtrain.job.process import Job
    from meshtrain.mesh import Mesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--tasks", default="", help="comma-separated names of lm_eval tasks (needs lm_eval)"
    )
    parser.add_argument(
        "--include-path", metavar="DIR", help="a folder of your own tasks in lm_eval's format"
    )
    parser.add_argument("--limit", type=int, help="documents of each task (default: all)")
    parser.add_argument(
        "--fewshot", type=int, help="examples before each document (default: the task's)"
    )
    parser.add_argument(
        "--files",
        nargs="+",
        default=[],
        metavar="FILE",
        help="text files to measure the perplexity of",
    )
    parser.add_argument(
        "--validation",
        action="store_true",
        help="measure the loss of the run's validation data, as its evaluations do",
    )
    parser.add_argument(
        "--data",
        metavar="FILE.py",
        help="with --validation: the run's own data file, if it has one; it is executed",
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences per forward (8)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    scores_text = bool(options.tasks or options.files)
    if not (scores_text or options.validation) or options.batch < 1:
        raise InputError(
            "name what to measure, with --tasks, --files or --validation, and a --batch of at "
            "least 1"
        )
    texts = {name: _text(name) for name in options.files}

    from meshtrain.run.scoring import Scorer  # torch comes only now

    with opened_model(options, scores_text) as (model, config, job, mesh):
        scores: dict[str, Any] = {}
        if options.validation:
            scores["validation"] = _validation(model, config, job, mesh)
        if scores_text:
            scorer = Scorer(model, job.device, config.data.seq_len, options.batch)
            tokenizer = tokenizer_of(config, options.tokenizer)
            for name, text in texts.items():
                tokens = ids_of(text, tokenizer, config, plain=True)
                scores[name] = _perplexity(scorer, tokens, text)
            if options.tasks:
                scores |= _tasks(options, scorer, tokenizer)

        if job.rank == 0:
            lines = [json.dumps(scores)] if options.json else _lines(scores)
            print("\n".join(lines), flush=True)


def _validation(model: "nn.Module", config: "Config", job: "Job", mesh: "Mesh") -> dict[str, float]:
    """The numbers of an evaluation of the run, by its loss."""
    from meshtrain.evaluate import evaluate, evaluation_set
    from meshtrain.modeling.build import objective_of
    from meshtrain.modeling.loss_trial import gathers_samples
    from meshtrain.parallel.mixed_precision import compute_dtype
    from meshtrain.run.setup import load_data, readers, reference_of_run

    data = load_data(config, job)
    held_out = evaluation_set(data, config.train.eval_samples)
    if held_out is None:
        raise InputError("--validation: the run holds nothing out (data.validation is 0)")
    if spec_of(config).loss is not None and gathers_samples(config, data.train, data.task):
        # As many samples meet as in a step of the run, whatever its layout was.
        share = -(-config.batch.sizes.largest // mesh.size(*DATA_AXES))
        config = replace(config, batch=replace(config.batch, micro_size=share))
    _, batches = readers(config, mesh, data, held_out, first_step=0, steps=0)
    assert batches is not None
    objective = objective_of(config, data.task, mesh)
    dtype = compute_dtype(config.train.precision)
    reference = reference_of_run(config, mesh, job, data)
    result = evaluate(model, batches, mesh, job.device, dtype, objective, reference)
    return result.numbers(data.task, data.bytes_per_target)


def _text(name: str) -> str:
    try:
        # a byte order mark is no part of the text
        return Path(name).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(f"--files: {name} cannot be read as text: {error}") from error


def _perplexity(scorer: Any, tokens: Sequence[int], text: str) -> dict[str, float]:
    """Every token except the first is predicted once, from the tokens before it in its window."""
    if len(tokens) < 2:
        raise InputError("--files: a text has fewer than two tokens: there is nothing to predict")
    pairs = list(windows(tokens, scorer.seq_len))
    log_likelihood = sum(value for value, _ in scorer.score(pairs))
    count = len(tokens) - 1
    loss = -log_likelihood / count
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),  # what a float can hold
        "bits_per_byte": -log_likelihood / math.log(2) / len(text.encode()),
        "tokens": count,
    }


def windows(tokens: Sequence[int], seq_len: int) -> Iterator[tuple[list[int], list[int]]]:
    """(before, predicted) for a text: each window begins with the last token of the one before
    it."""
    for last in range(0, len(tokens) - 1, seq_len):  # the last token of the window before
        first = last + 1
        yield [tokens[last]], list(tokens[first : first + seq_len])


def _tasks(options: argparse.Namespace, scorer: Any, tokenizer: Any) -> dict[str, Any]:
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager

        from meshtrain.cli.harness import HarnessModel
    except ImportError as error:
        raise InputError(
            f"--tasks needs lm-evaluation-harness ({error}): pip install lm_eval"
        ) from error
    names = [name for name in options.tasks.split(",") if name]
    manager = TaskManager(include_path=options.include_path)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise InputError(
            f"--tasks: lm_eval knows no {', '.join(unknown)}: --include-path names a folder with "
            "more"
        )
    model = HarnessModel(scorer, tokenizer)
    settings = {"num_fewshot": options.fewshot, "limit": options.limit, "bootstrap_iters": 0}
    results = lm_eval.simple_evaluate(model, tasks=names, task_manager=manager, **settings)
    # None where lm_eval takes this rank for another than 0
    return {} if results is None else dict(results["results"])


def _lines(scores: dict[str, Any]) -> list[str]:
    """A line per file or task, with its numbers."""
    lines = []
    for name, values in scores.items():
        numbers = [
            f"{key} {value:.6g}" for key, value in values.items() if isinstance(value, int | float)
        ]
        lines.append(f"{name}: {', '.join(numbers)}")
    return lines
