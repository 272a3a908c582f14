"""The page in a real browser: that its scripts run, on a wide screen and on a phone's."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from PIL import Image

from meshtrain.pipeline.schedule import build
from meshtrain.pipeline.simulate import simulate
from meshtrain.pipeline.timeline_io import timeline_json
from meshtrain.watch.run_files import RunFiles
from meshtrain.watch.server import PageServer

pytestmark = pytest.mark.integrations


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    for name in ("first", "second"):
        folder = tmp_path / name
        (folder / "checkpoints" / "step_0000040").mkdir(parents=True)
        rows = [
            {"step": n, "loss": 5 / n, "tokens_per_s": 1e4, "step_time_s": 1.0, "time_forward_s": 0.4}
            for n in range(1, 60)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        ranks = {
            "step": 40,
            "axes": {"pp": 2, "tp": 4},
            "hosts": ["n0"] * 8,
            "own_time_s": [0.5] * 7 + [0.9],
            "memory_gib": [1.0] * 8,
        }
        (folder / "ranks.json").write_text(json.dumps(ranks))
        timeline = simulate(build("1f1b", ranks=2, microbatches=4, stages_per_rank=None))
        (folder / "timeline.json").write_text(json.dumps(timeline_json(timeline, "1f1b", "s")))
        (folder / "exit.json").write_text(json.dumps({"status": "done", "reason": "all steps are done"}))
    with PageServer(("127.0.0.1", 0), [RunFiles(tmp_path / name) for name in ("first", "second")]) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("width", "height"), [(1280, 2200), (390, 4000)])
def test_the_page_in_chromium(url: str, tmp_path: Path, width: int, height: int) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium is not None, "apt-get install chromium"
    picture = tmp_path / "page.png"
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               f"--window-size={width},{height}", "--virtual-time-budget=4000"]  # fmt: skip
    done = subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True)
    dom = done.stdout
    assert "no answer" not in dom
    assert "all steps are done" in dom
    assert dom.count("<button") == 2
    assert dom.count("data-chart=") == 7
    assert dom.count("<path") >= 2 * 3  # a curve for each run
    assert "rank 7 (pp 1, tp 3) n0: 0.9 s" in dom
    assert "F" in dom
    assert "on disk: step_0000040" in dom
    subprocess.run([*command, f"--screenshot={picture}", url], capture_output=True, timeout=120, check=True)
    with Image.open(picture) as image:
        assert image.size == (width, height)
        assert len(image.convert("RGB").getcolors(2**20) or []) > 50
