"""Tests of several ranks are reported one by one, whatever becomes of their ranks."""

import re
import sys

import pytest

from tests.launching import run

SECTION = re.compile(r"^_{3,} (\w+)\[.*\] _{3,}$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_test_is_reported_and_the_job_goes_on() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-rs",
        "tests/rank_examples.py",
    ]
    done = run(command, timeout=500)
    assert done.status == 1
    assert re.search(r"5 failed, 5 passed, 1 skipped", done.out), done.out
    assert "for this reason" in done.out
    _, *parts = SECTION.split(done.out)
    reports = dict(zip(parts[::2], parts[1::2], strict=True))
    assert set(reports) == {
        "test_all_fail",
        "test_one_fails_and_the_other_waits",
        "test_crashes",
        "test_crashes_after_another",
        "test_hangs",
    }
    assert "{'world': 2} == {'world': 7}" in reports["test_all_fail"]
    assert "printed before" in reports["test_all_fail"]
    assert "only rank 1" in reports["test_one_fails_and_the_other_waits"]
    assert re.search(
        r"rank 0: it did not end; it was at\n(.*\n)*.*in barrier",
        reports["test_one_fails_and_the_other_waits"],
    )
    assert "rank 1: it ended with SIGSEGV" in reports["test_crashes"]
    assert "repeated alone, it fails as well" in reports["test_crashes"]
    assert "repeated alone, it passes" in reports["test_crashes_after_another"]
    assert "rank 1: it did not end" in reports["test_hangs"]
