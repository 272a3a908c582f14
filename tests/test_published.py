"""tools/bench/published.py: docs/which-layout.md shows what it predicts, and README.md what `plan`
does."""

import runpy
from typing import Any

import pytest
import yaml

import published
from tests.documents import REPO

TABLE: dict[str, Any] = yaml.safe_load(published.TABLE.read_text())
PAGE = published.PAGE.read_text()
CHEAP = "torchtitan 8B compiled, 8 GPUs"


def test_the_page_shows_what_is_predicted_of_a_published_run() -> None:
    (case,) = (case for case in TABLE["cases"] if case["name"] == CHEAP)
    row = published.predicted(case, TABLE)
    assert published.published_row(case, row, TABLE["sources"]) in PAGE


@pytest.mark.slow
def test_the_page_shows_what_is_predicted() -> None:
    """Else: `python tools/bench/published.py --write`."""
    assert published.page(PAGE, TABLE) == PAGE


def test_every_published_run_is_on_the_page() -> None:
    for case in TABLE["cases"]:
        assert f"[{case['name']}]({TABLE['sources'][case['source']]['url']})" in PAGE


def test_the_first_page_shows_the_config_that_its_picture_is_of() -> None:
    script = runpy.run_path(str(REPO / "tools" / "pictures" / "plan.py"))
    readme = (REPO / "README.md").read_text()
    assert f"```yaml\n{script['CONFIG']}```" in readme
    assert f"```yaml\n{script['CONFIG']}```" in PAGE
    within = PAGE.split(" within 10 %")[0].rsplit(", ", 1)[1]
    assert f"{within} of {len(TABLE['cases'])} are within 10 %" in readme
