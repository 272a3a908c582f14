"""Runs cells, and makes smaller those that fail: `python -m tests.fuzz [--seed 1] [--cells
200]`."""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path

from tests.fuzz.cells import Cell, drawn, smaller
from tests.fuzz.test_fuzz import recipe
from tests.launching import ROOT

MOST_TRIES = 40  # of a failing cell


def run(environment: dict[str, str], quiet: bool) -> dict[str, str]:
    """Runs the cells that `environment` names: test -> `passed`, `skipped` or `failure`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = "-m '' -q -rs -p no:cacheprovider"
        command = [
            sys.executable,
            "-m",
            "pytest",
            *shlex.split(options),
            f"--junitxml={report}",
            "tests/fuzz/test_fuzz.py",
        ]
        output = subprocess.DEVNULL if quiet else None
        subprocess.run(command, cwd=ROOT, env=os.environ | environment, stdout=output, check=False)
        ends = {}
        for case in ET.parse(report).iter("testcase"):
            tags = {child.tag for child in case}
            ends[str(case.get("name"))] = (
                "failure" if tags & {"failure", "error"} else "skipped" if tags else "passed"
            )
    return ends


def fails(cell: Cell) -> bool:
    return "failure" in run({"FUZZ_CELL": json.dumps(asdict(cell))}, quiet=True).values()


def shrunk(cell: Cell) -> Cell:
    """The smallest cell on the way down that still fails."""
    tries = 0
    while True:
        for candidate in smaller(cell):
            tries += 1
            if tries > MOST_TRIES:
                return cell
            if fails(candidate):
                cell = candidate
                break
        else:
            return cell


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock")
    parser.add_argument("--cells", type=int, default=60)
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    print(f"seed {seed}, {options.cells} cells", flush=True)
    ends = run({"FUZZ_SEED": str(seed), "FUZZ_CELLS": str(options.cells)}, quiet=False)
    failed = [name for name, end in ends.items() if end == "failure"]
    for name in failed:
        number = int(name.rpartition("/")[2].rstrip("]"))
        print(
            f"\n=== cell {seed}/{number}, made smaller:\n{recipe(shrunk(drawn(seed, number)))}",
            flush=True,
        )
    counts = [list(ends.values()).count(end) for end in ("passed", "skipped", "failure")]
    print(f"\nseed {seed}: {counts[0]} like one process, {counts[1]} refused, {counts[2]} failed")
    return 1 if failed or not ends else 0


if __name__ == "__main__":
    sys.exit(main())
