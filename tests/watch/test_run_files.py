"""What is read of a run's folder, while a run writes into it."""

import json
from pathlib import Path

import yaml

from meshtrain.watch.run_files import RunFiles


def lines(*steps: int, **values: float | None) -> str:
    return "".join(json.dumps({"step": step, "loss": float(step), **values}) + "\n" for step in steps)


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
    assert data | {"checkpoints": [], "failures": [], "rows": 0, "exit": None, "events": [], "layout": ""} == data
