"""`meshtrain verify`, as it is started."""

import argparse
import html.parser
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from meshtrain.errors import InputError
from meshtrain.verify import command
from meshtrain.verify.kinds import KINDS
from meshtrain.verify.page import page
from meshtrain.verify.report import largest, status_of
from meshtrain.verify.session import Outcome
from tests.launching import ROOT, Finished, forked
from tests.verify.planted import BASE, SMALL

EQUAL = Outcome({"tp": 2}, "equal", apart=((1e-16, 0.0), (2e-16, 1e-15)))
DIFFERENT = Outcome(
    {"pp": 2}, "different", "it <is> other", 3, "layers.0.w", 0.25, "factor", ((0.1, 0.2),)
)
REFUSED = Outcome({"cp": 2}, "refused", "a reason [with brackets]")
REFERENCE = {
    "target": "a&b.yaml",
    "small": ["model.hidden_size=64"],
    "precision": "float64",
    "steps": 2,
    "loss": 5.5,
    "tolerance": 1e-9,
}


def verify(*arguments: str | Path) -> Finished:
    return forked(1, "-m", "meshtrain.cli", "verify", *arguments)


def test_layouts_equal_and_refused(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    layouts = ("--layouts", "{pp: 2}", "{tp: 3}")
    # overrides on both sides of the layouts
    done = verify(BASE, SMALL[0], *layouts, *SMALL[1:], "--steps", "2", "--json", "--html", file)
    assert done.status == 2, done.err
    report = json.loads(done.out)
    assert report["reference"]["steps"] == 2
    equal, refused = report["layouts"]
    names = {"layout", "status", "reason", "step", "parameter", "difference", "kind"}
    assert set(equal) == set(refused) == names
    assert equal == dict.fromkeys(names) | {"layout": {"pp": 2}, "status": "equal"}
    assert (refused["layout"], refused["status"]) == ({"tp": 3}, "refused")
    assert "4 query heads do not divide over tp 3" in refused["reason"]
    assert "1 equal, 0 different, 1 refused" in file.read_text()


def test_a_script_that_depends_on_an_axis(tmp_path: Path) -> None:
    script = Path(__file__).with_name("by_rank.py")
    layouts = ("--layouts", "{dp_replicate: 2}", "{dp_shard: 2}", "{cp: 2}")
    done = verify(script, *layouts, "--steps", "2", "--json")
    assert done.status == 1, done.err
    report = json.loads(done.out)
    assert report["reference"]["steps"] == 2
    equal, different, refused = report["layouts"]
    assert equal["status"] == "equal"
    assert (different["status"], different["step"]) == ("different", 1)
    assert different["kind"] == "forward"
    assert refused["status"] == "refused"
    assert refused["reason"].startswith(
        "MESHTRAIN_LAYOUT: layout {cp: 2}: with cp a rank has a part"
    )
    assert not Path("runs/by_rank").exists(), "runs have folders of their own"


@pytest.mark.slow
def test_16_bits_differ_as_one_process_does_between_precisions(tmp_path: Path) -> None:
    arguments = (BASE, *SMALL, "--steps", "3", "--layouts", "{tp: 2}", "--precision", "bfloat16")
    done = verify(*arguments, "--json").check()
    report = json.loads(done.out)
    assert 1e-4 < report["reference"]["tolerance"] < 1e-1
    assert report["layouts"][0]["status"] == "equal"


# What the command line says ----------------------------------------------------------------------


def read(*words: str) -> tuple:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command._read(parser.parse_intermixed_args(words))


def test_overrides_stand_on_either_side() -> None:
    subject, layouts = read(
        "quickstart", "train.seed=1", "--layouts", "{tp: 2}", "{pp: 2, cp: 2}", "data.seq_len=8"
    )
    assert subject.target == "quickstart"
    assert subject.overrides == ["train.seed=1", "data.seq_len=8"]
    assert layouts == [{"tp": 2}, {"pp": 2, "cp": 2}]
    subject, layouts = read("--layouts", "{tp: 2}", "quickstart", "--steps", "3", "a.b={c: 1}")
    assert (subject.target, subject.overrides) == ("quickstart", ["a.b={c: 1}"])
    assert subject.steps == 3


def test_without_layouts_a_covering_set() -> None:
    _, layouts = read("quickstart", "--ranks", "4")
    assert {"tp": 4} in layouts
    assert {"pp": 2, "tp": 2} in layouts


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "takes a config, or a script"),
        (("quickstart", "moe", "--layouts", "{tp: 2}"), "moe is no override"),
        (("quickstart", "--layouts", "{tp: 2}", "--ranks", "2"), "take one of them away"),
        (("quickstart", "--ranks", "1"), "a layout has at least 2"),
        (("quickstart", "--steps", "0"), "expected at least 1"),
        (("quickstart", "--layouts", "{xp: 2}"), "--layouts {xp: 2}"),
        (("missing.py", "--layouts", "{tp: 2}"), "there is no script missing.py"),
        (("quickstart", "--html", "missing/x.html"), "expected a file in a folder that is there"),
    ],
)
def test_wrong_words(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(InputError) as raised:
        read(*words)
    assert says in str(raised.value)


def test_a_folder_that_is_a_file_or_not_empty(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for given, says in ((tmp_path / "file", "cannot write"), (tmp_path, "is not empty")):
        with pytest.raises(InputError, match=says), command._folder(str(given)):
            raise AssertionError


def test_the_page_of_the_documentation_lists_every_kind() -> None:
    text = (ROOT / "docs" / "verify.md").read_text()
    table = text.split("<!-- kinds:")[1].split("<!-- end of kinds")[0]
    assert dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", table, re.MULTILINE)) == KINDS


# Reports -----------------------------------------------------------------------------------------


def test_the_status_of_a_report() -> None:
    assert status_of([EQUAL]) == 0
    assert status_of([EQUAL, REFUSED]) == 2
    assert status_of([REFUSED, DIFFERENT, EQUAL]) == 1


def test_a_number_that_is_none_is_the_largest_difference() -> None:
    apart = ((1e-16, 0.0), (math.inf, 1e-15))
    assert largest(replace(EQUAL, apart=apart)) == "inf"
    assert largest(EQUAL) == "1e-15"
    assert largest(replace(EQUAL, apart=((0.0, 0.0),))) == "0"
    assert largest(REFUSED) == ""


class Tags(html.parser.HTMLParser):
    """Which tags are open, and all text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "circle", "polyline"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_says_what_the_report_says() -> None:
    text = page(REFERENCE, [EQUAL, DIFFERENT, REFUSED], "meshtrain verify a&b.yaml")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "script" not in tags.seen
    assert tags.seen.count("svg") == 2, "a refused layout has no steps"
    for part in ("a&b.yaml", "it <is> other", "layers.0.w", "[with brackets]", KINDS["factor"]):
        assert part in tags.text
    assert "1 equal, 1 different, 1 refused" in tags.text
