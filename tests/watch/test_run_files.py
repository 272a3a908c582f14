"""What is read of a run's folder, while a run writes into it."""

import json
from pathlib import Path

import pytest
import yaml

from meshtrain.watch import run_files
from meshtrain.watch.run_files import RunFiles


def lines(*steps: int, **values: float | None) -> str:
    return "".join(
        json.dumps({"step": step, "loss": float(step), **values}) + "\n" for step in steps
    )


def test_what_the_page_gets(tmp_path: Path) -> None:
    for case in yaml.safe_load(Path(__file__).with_name("page_data.yaml").read_text()):
        folder = tmp_path / case["about"]
        folder.mkdir()
        for name, text in case["files"].items():
            (folder / name).write_text(text)
        for name in case.get("folders", ()):
            (folder / name).mkdir(parents=True)
        run = RunFiles(folder)
        for _ in range(2):  # a line is counted once
            data = run.page_data(case.get("points", 9))
            json.dumps(data, allow_nan=False)  # as the page gets it
            assert data | case["data"] == data, case["about"]


def test_rows_are_read_on_and_a_resume_that_cuts_the_file_is_seen(tmp_path: Path) -> None:
    file, run = tmp_path / "metrics.jsonl", RunFiles(tmp_path)
    assert run.page_data(9)["rows"] == 0
    file.write_text(lines(1, 2) + '{"step": 3, "lo')
    assert run.page_data(9)["step"] == [1, 2]
    file.write_text(lines(1, 2, 3, 4))
    assert run.page_data(9)["step"] == [1, 2, 3, 4]
    with file.open("r+") as open_file:  # the same file, shorter, then longer than it was
        open_file.truncate(len(lines(1, 2)))
        open_file.seek(0, 2)
        open_file.write(lines(3, 4, 5, mfu=0.5))
    data = run.page_data(9)
    assert data["step"] == [1, 2, 3, 4, 5]
    assert data["columns"]["mfu"] == [None, None, 0.5, 0.5, 0.5]


def test_what_was_summed_up_before_is_what_all_rows_give_at_once(tmp_path: Path) -> None:
    file, run = tmp_path / "metrics.jsonl", RunFiles(tmp_path)
    large = 10**400  # is none
    file.write_text(f'{{"step": {large}}}\n{{"step": 1, "loss": {large}}}\n')
    for last in range(2, 40):
        with file.open("a") as open_file:
            open_file.write(lines(last, **({"lr": float(last)} if last % 3 else {})))
        assert run.page_data(4) | {"age_s": 0} == RunFiles(tmp_path).page_data(4) | {"age_s": 0}
    assert run.page_data(99)["step"] == list(range(2, 40))
    assert run.page_data(4)["bad_lines"] == 2


def test_nothing_outside_of_the_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(lines(1, secret=1.0))
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("metrics.jsonl", "exit.json", "goodput.jsonl", "layout.txt"):
        (folder / name).symlink_to(tmp_path / "secret")
    (tmp_path / "elsewhere" / "step_0000001").mkdir(parents=True)
    for name in ("checkpoints", "failures"):
        (folder / name).symlink_to(tmp_path / "elsewhere")
    data = RunFiles(folder).page_data(9)
    assert (
        data
        | {"checkpoints": [], "failures": [], "rows": 0, "exit": None, "events": [], "layout": ""}
        == data
    )


def test_no_line_of_a_stranger_stops_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deep, long, or of a step that a page cannot tell from the next one: it is a bad line, and the
    run goes on."""
    monkeypatch.setattr(run_files, "LONGEST", 1000)
    file, run = tmp_path / "metrics.jsonl", RunFiles(tmp_path)
    deep, long = 900 * "[", '{"step": 2, "text": "' + 5000 * "a" + '"}'
    far = [f'{{"step": {2**53 + 2}, "loss": 1}}', '{"step": 1e300}']
    (tmp_path / "goodput.jsonl").write_text(
        f'{100_000 * "["}\n{{"step": {10**30}, "started": 1}}\n'
    )
    file.write_text("\n".join([deep, long, *far]) + "\n" + lines(3))
    data = run.page_data(9)
    assert (data["step"], data["bad_lines"]) == ([3], 4)
    assert [event["step"] for event in data["events"]] == [2**53]
    with file.open(
        "a"
    ) as open_file:  # a line that does not end is passed over as it grows, and not read anew
        open_file.write(2500 * "a")
    assert run.page_data(9)["bad_lines"] == 5
    seen: list[int] = []
    take = run._take
    monkeypatch.setattr(
        run, "_take", lambda line, is_whole: seen.append(len(line)) or take(line, is_whole)
    )
    with file.open("a") as open_file:
        open_file.write(2500 * "a" + "\n" + lines(4))
    data = run.page_data(9)
    assert (data["step"], data["bad_lines"]) == ([3, 4], 5)
    assert sum(seen) == 500 + 2501 + len(lines(4))


def test_rows_with_ever_new_fields_have_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(lines(step, **{f"field_{step}": 1.0}) for step in range(1, 700)))
    data = RunFiles(tmp_path).page_data(9)
    assert len(data["columns"]) == run_files.COLUMNS
    assert data["left_out"] == 700 - run_files.COLUMNS
    assert data["rows"] == 699


def test_a_long_file_is_read_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "AT_ONCE", 100)
    (tmp_path / "metrics.jsonl").write_text(lines(*range(1, 40)))
    run = RunFiles(tmp_path)
    counts = [run.page_data(9)["rows"] for _ in range(20)]
    assert counts[0] < counts[1] < counts[-1] == 39
    assert counts == sorted(counts)
