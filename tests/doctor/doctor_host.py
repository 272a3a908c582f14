"""Runs doctors one after the other on a test host, importing torch only once: a JSON line in, a
JSON line out."""

import argparse
import importlib
import json
import os
import sys
import time
from dataclasses import asdict

from meshtrain.doctor.command import DoctorRun, add_arguments, examine
from meshtrain.doctor.torchrun_options import read_place


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    importlib.import_module("torch")  # so that both hosts are equally fast from now on
    print("ready", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        given = parser.parse_intermixed_args(task["arguments"])
        variables = {**os.environ, **task["variables"]}
        place = read_place(given, variables)
        outcome = examine(
            DoctorRun(
                place,
                variables,
                given.config,
                tuple(given.overrides),
                given.wait,
                clock=lambda ahead=task["ahead_s"]: time.time() + ahead,
            )
        )
        print(json.dumps([asdict(one) for one in outcome.findings]), flush=True)


if __name__ == "__main__":
    main()
