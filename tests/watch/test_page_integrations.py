"""The page in a real browser: on a wide screen and on a phone's, by keyboard, and while a run
writes."""

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
import yaml

from meshtrain.pipeline.schedule import build
from meshtrain.pipeline.simulate import simulate
from meshtrain.pipeline.timeline_io import timeline_json
from meshtrain.watch.run_files import RunFiles
from meshtrain.watch.server import PageServer
from tests.browser import Page, chromium

pytestmark = pytest.mark.integrations


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    for name in ("first", "second"):
        folder = tmp_path / name
        (folder / "checkpoints" / "step_0000040").mkdir(parents=True)
        rows = [
            {
                "step": n,
                "loss": 5 / n,
                "tokens_per_s": 1e4,
                "step_time_s": 1.0,
                "time_forward_s": 0.4,
            }
            for n in range(1, 60)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for file, values in yaml.safe_load(
            Path(__file__).with_name("page_run.yaml").read_text()
        ).items():
            (folder / file).write_text(json.dumps(values))
        timeline = simulate(build("1f1b", ranks=2, microbatches=4, stages_per_rank=None))
        (folder / "timeline.json").write_text(json.dumps(timeline_json(timeline, "1f1b", "s")))
    with PageServer(
        ("127.0.0.1", 0), [RunFiles(tmp_path / name) for name in ("first", "second")]
    ) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with chromium(tmp_path / "profile") as page:
        yield page
        assert page.complaints == []


def opened(page: Page, url: str, width: int) -> None:
    page.open(url, width)
    page.until("document.querySelectorAll('[data-chart]').length == 9")


CHART = "document.querySelector('[data-chart=\"{}\"]')"


def test_the_page_in_chromium(page: Page, url: str, tmp_path: Path) -> None:
    from PIL import Image

    for width in (1280, 390):
        opened(page, url, width)
        assert page.ask("innerWidth") == width
        assert page.overflow() == 0  # a phone need not be pushed to and fro
        text = page.ask("document.body.innerText")
        assert text.count("all steps are done") == 2  # the two stand side by side
        assert "checkpoints in the run's folder: step_0000040" in text
        assert page.ask("document.querySelectorAll('path').length") == 2 * 4  # curves of each run
        # Ranks of the outer axis stand below each other.
        cells = "[...document.querySelectorAll('[data-chart=\"own time of a step\"] rect')]"
        assert page.ask(f"new Set({cells}.map((cell) => cell.getAttribute('y'))).size") == 2
        picture = tmp_path / f"{width}.png"
        page.picture(picture)
        with Image.open(picture) as image:
            assert image.width == width
            assert len(image.convert("RGB").getcolors(2**20) or []) > 50
    assert all(address.startswith(url) for address in page.requests)  # nothing from the network


def read_out(page: Page, chart: str) -> str:
    return page.ask(f"{chart}.querySelector('output').textContent")


def stays_while_the_run_goes_on(page: Page, chart: str, expected: str, folder: Path) -> None:
    """The second picture is drawn of what the first has left."""
    for step in (60, 61):
        with (folder / "first" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "loss": 0.5}) + "\n")
        page.until(f"document.querySelector('#beside').innerText.includes('{step}')")
        assert read_out(page, chart) == expected


def test_values_are_read_by_a_finger_and_stay_while_the_run_goes_on(
    page: Page, url: str, tmp_path: Path
) -> None:
    opened(page, url, 390)
    loss = CHART.format("loss")
    page.ask(f"{loss}.scrollIntoView()")
    left, top, width, height = page.ask(
        f"(({{x, y, width, height}}) => [x, y, width, "
        f"height])({loss}.querySelector('svg').getBoundingClientRect())"
    )
    page.touch((left + width / 2, top + height / 2))
    assert read_out(page, loss).startswith("step 2")
    page.touch((left + width / 2, top + height / 2), (left + width - 1, top + height / 2))
    expected = "step 59: first loss 0.08475, second loss 0.08475"
    assert read_out(page, loss) == expected
    stays_while_the_run_goes_on(page, loss, expected, tmp_path)


def test_values_are_read_by_keyboard_and_stay_while_the_run_goes_on(
    page: Page, url: str, tmp_path: Path
) -> None:
    opened(page, url, 1280)
    loss = CHART.format("loss")
    for _ in range(20):
        page.press("Tab")
        if page.ask(f"document.activeElement === {loss}"):
            break
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.press(key)
    expected = "step 3: first loss 1.667, second loss 1.667"
    assert read_out(page, loss) == expected
    stays_while_the_run_goes_on(page, loss, expected, tmp_path)
    ranks = CHART.format("own time of a step")
    page.ask(f"{ranks}.focus()")
    for key in ("Home", "ArrowDown", "ArrowRight"):
        page.press(key)
    assert read_out(page, ranks) == "rank 5 (pp 1, tp 1) n0: 0.5 s"
    page.press("End")
    assert read_out(page, ranks) == "rank 7 (pp 1, tp 3) n0: 0.9 s"
    page.ask("document.querySelectorAll('#runs button')[1].focus()")
    page.press("Enter")
    page.until("document.querySelectorAll('#runs button')[1].ariaPressed == 'true'")
