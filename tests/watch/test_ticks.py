"""Marks of the page's axes, by node."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import meshtrain.watch


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_marks_end_also_where_a_step_is_too_small_to_be_added() -> None:
    script = (Path(meshtrain.watch.__file__).parent / "page" / "watch.js").read_text()
    function = re.search(r"^function ticks.*?^}", script, re.DOTALL | re.MULTILINE)
    assert function is not None
    ranges = [[0, 10], [1, 1], [-3, 7.5], [2**53, 2**53 + 8], [1e300, 1e300 * (1 + 1e-15)]]
    calls = f"console.log(JSON.stringify({json.dumps(ranges)}.map(([a, b]) => ticks(a, b))))"
    done = subprocess.run(
        ["node", "-e", f"{function[0]}\n{calls}"], capture_output=True, timeout=60, check=True
    )
    marks = json.loads(done.stdout)
    assert marks[:3] == [[0, 2, 4, 6, 8, 10], [1], [0, 5]]
    assert all(len(of_range) <= 21 for of_range in marks)
