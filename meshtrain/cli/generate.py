"""`meshtrain generate CHECKPOINT --prompt TEXT`: generates text with a checkpoint's model, on any
layout. With several processes: `torchrun --standalone --nproc-per-node=2 -m meshtrain.cli generate
...`.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from meshtrain.cli.checkpoint_model import (
    add_model_arguments,
    check_length,
    ids_of,
    opened_model,
    tokenizer_of,
)
from meshtrain.errors import InputError, printable

if TYPE_CHECKING:
    from meshtrain.data.tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        required=True,
        help="text to continue; may be given several times",
    )
    parser.add_argument("--length", type=int, default=100, help="tokens to add (100)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the most likely token (0.8)"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample among the most likely with this mass (1)"
    )
    past = "go on behind the token that ends a document, which otherwise ends the text"
    parser.add_argument("--ignore-end", action="store_true", help=past)
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (0)")


def run(options: argparse.Namespace) -> None:
    if options.length < 1 or not options.temperature >= 0 or not 0 < options.top_p <= 1:
        raise InputError(
            "expected --length of at least 1, --temperature of at least 0, --top-p above 0 and at "
            "most 1"
        )
    from meshtrain.generate import generate_batch  # torch comes only now

    with opened_model(options) as (model, config, job, _):
        tokenizer = tokenizer_of(config, options.tokenizer)
        stops = frozenset() if options.ignore_end else tokenizer.stops
        prompts = [ids_of(text, tokenizer, config) for text in options.prompt]
        longest = max(map(len, prompts)) + options.length
        check_length(longest, config)
        tick = progress(options.length, len(prompts)) if job.rank == 0 else _silent
        rows = generate_batch(
            model,
            prompts,
            options.length,
            seq_len=max(config.data.seq_len, longest),
            device=job.device,
            seed=options.seed,
            temperature=options.temperature,
            top_p=options.top_p,
            stops=stops,
            tick=tick,
        )

        # All texts may have ended before: the line of the progress never came to its end.
        added = [len(row) - len(prompt) for row, prompt in zip(rows, prompts, strict=True)]
        most = max(added)
        if job.rank == 0 and most < options.length:
            print(f"{most} of at most {options.length} tokens", file=sys.stderr, flush=True)
        for row, prompt in zip(rows, prompts, strict=True):
            text = text_of(row, len(prompt), tokenizer, stops)
            job.say(printable(text) if sys.stdout.isatty() else text)


def text_of(row: list[int], prompt: int, tokenizer: "Tokenizer", stops: Collection[int]) -> str:
    """The text of a prompt of so many tokens and what follows it, without the tokens that begin and
    end a document."""
    is_begun = row[0] == tokenizer.begin
    is_ended = len(row) > prompt and row[-1] in stops
    return tokenizer.decode(row[int(is_begun) : len(row) - int(is_ended)])


def progress(length: int, texts: int) -> Callable[[int], None]:
    """Writes a line to stderr: updated in place if the terminal can, otherwise once at the end."""
    begin = time.monotonic()
    live = sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")

    def tick(done: int) -> None:
        is_end = done == length
        if not live and not is_end:
            return
        rate = done * texts / max(time.monotonic() - begin, 1e-9)
        line = f"{done}/{length} tokens, {rate:.1f} tokens/s"
        if live:
            line = f"\r{line}"
        print(line, end="\n" if is_end else "", file=sys.stderr, flush=True)

    return tick


def _silent(done: int) -> None:
    """The progress of ranks other than 0."""
