"""`meshtrain prepare`: tokenizes the text of a config before its job, in several processes on one
host or on several.

The token files are the same that the job would make, and where the job looks for them
(`data.cache`).
"""

import argparse
import multiprocessing
import os
import signal
import sys
import time
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.queues import SimpleQueue

from meshtrain.config import Config
from meshtrain.data.prepare import Preparation, loss_share, preparations
from meshtrain.errors import InputError, plural
from meshtrain.job.host_limits import usable_cores
from meshtrain.job.parsing import parse_json
from meshtrain.job.signals import end_with_parent
from meshtrain.job.storage import warn

_SAY_EVERY_S = 10.0
_say = partial(print, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="a YAML file, or the name of a built-in config")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="override keys of the config"
    )
    # Elsewhere the system's own libraries may not survive a fork.
    processes = usable_cores() if sys.platform == "linux" else 1
    parser.add_argument(
        "--workers", type=int, default=processes, metavar="N", help=f"processes ({processes})"
    )
    about = "do only the part of host I (0 to K - 1) of K; hosts need no locks"
    parser.add_argument("--host", type=_share, default=(0, 1), metavar="I/K", help=about)


def _share(text: str) -> tuple[int, int]:
    host, _, hosts = text.partition("/")
    if not (host.isdecimal() and hosts.isdecimal() and int(host) < int(hosts)):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected I/K, such as 0/4 for the first of four hosts"
        )
    return int(host), int(hosts)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status: 1 on a disk error or an interrupt. Raises InputError: the config or
    a text is wrong."""
    if arguments.workers < 1:
        raise InputError(f"--workers is {arguments.workers}: expected at least 1")
    host, hosts = arguments.host
    config = Config.load(arguments.config, arguments.overrides)
    for preparation in list(preparations(config.data)):  # all of them exist before the first begins
        try:
            _prepare(preparation, arguments.workers, host, hosts)
        except (OSError, KeyboardInterrupt) as error:
            total = len(preparation.shards)
            finished = total - len(preparation.missing())
            warn(
                f"{preparation.folder} is not prepared: {str(error) or 'stopped'}; {finished} of "
                f"{plural(total, 'shard')} are finished, and the same command goes on with the "
                "others"
            )
            return 1
    return 0


def _prepare(preparation: Preparation, workers: int, host: int, hosts: int) -> None:
    """Makes a token file, or this host's share of its shards."""
    preparation.take_earlier(_say)
    preparation.fetch(_say)
    share = len([shard for shard in preparation.missing() if shard % hosts == host])
    processes = min(workers, share)
    if processes > 1:
        shards = plural(share, "shard")
        _say(f"preparing {preparation.source.name}: {shards} in {processes} processes")
        _work_together(preparation, processes, host, hosts)

    # What the workers have left, if one was killed, and the header.
    is_whole = preparation.run(_say, host, hosts)
    folder = preparation.folder
    if not is_whole:
        missing = plural(len(preparation.missing()), "shard")
        _say(f"host {host}/{hosts} has done its share of {folder}; the others have {missing} to do")
        return
    header = parse_json((folder / "header.json").read_bytes())
    size = f"{plural(header['documents'], 'document')}, {plural(header['tokens'], 'token')}"
    _say(f"{folder} is prepared: {size}, fingerprint {header['fingerprint'][:16]}")
    with_loss = loss_share(folder)
    if with_loss is not None:
        _say(with_loss)


def _work_together(preparation: Preparation, workers: int, host: int, hosts: int) -> None:
    """Tokenizes this host's share in several processes. Shards of a process that is killed are left
    to this one."""
    context = multiprocessing.get_context("fork")
    errors: SimpleQueue[Exception] = context.SimpleQueue()
    arguments = (preparation, host, hosts, errors, os.getpid())
    processes = [context.Process(target=_work, args=arguments, daemon=True) for _ in range(workers)]
    start = last_message = time.monotonic()
    total = len(preparation.missing())
    try:
        for process in processes:
            process.start()
        while errors.empty():
            running = [process.sentinel for process in processes if process.is_alive()]
            if not running:
                break
            wait(running, timeout=1.0)
            now = time.monotonic()
            if now - last_message >= _SAY_EVERY_S:
                last_message = now
                done = total - len(preparation.missing())
                _say(
                    f"preparing {preparation.source.name}: {done:,} of {plural(total, 'shard')} in "
                    f"{now - start:.0f} s"
                )
    finally:
        # On an error or an interrupt the others have no more to do.
        for process in processes:
            if process.pid:
                process.kill()
                process.join()
    if not errors.empty():
        raise errors.get()
    for process in processes:
        if process.exitcode:
            warn(
                f"a worker has ended with status {process.exitcode}: what it has not finished is "
                "done now"
            )


def _work(
    preparation: Preparation, host: int, hosts: int, errors: "SimpleQueue[Exception]", parent: int
) -> None:
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    # otherwise each worker starts threads for all cores
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        preparation.take_shards(lambda line: None, host, hosts, wait=False, note=_say)
    except (InputError, OSError) as error:
        errors.put(error)
