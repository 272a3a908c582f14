"""What is read of a run's folder, while a run writes into it."""

import json
import math
from pathlib import Path

from meshtrain.watch.run_files import RunFiles


def lines(*steps: int, **values: float | None) -> str:
    return "".join(json.dumps({"step": step, "loss": float(step), **values}) + "\n" for step in steps)


def test_rows_are_read_on_and_a_row_without_its_end_waits(tmp_path: Path) -> None:
    file, run = tmp_path / "metrics.jsonl", RunFiles(tmp_path)
    assert run.page_data(9)["rows"] == 0
    file.write_text(lines(1, 2) + '{"step": 3, "lo')
    assert run.page_data(9)["columns"] == {"loss": [1.0, 2.0]}
    file.write_text(lines(1, 2, 3))
    assert run.page_data(9)["columns"] == {"loss": [1.0, 2.0, 3.0]}


def test_a_resume_that_cuts_the_file_and_writes_on_is_seen(tmp_path: Path) -> None:
    file, run = tmp_path / "metrics.jsonl", RunFiles(tmp_path)
    file.write_text(lines(1, 2, 3, 4))
    run.page_data(9)
    with file.open("r+") as open_file:  # the same file, shorter, then longer than it was
        open_file.truncate(len(lines(1, 2)))
        open_file.seek(0, 2)
        open_file.write(lines(3, 4, 5, mfu=0.5))
    data = run.page_data(9)
    assert data["step"] == [1, 2, 3, 4, 5]
    assert data["columns"]["mfu"] == [None, None, 0.5, 0.5, 0.5]


def test_a_line_that_is_none_is_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(lines(1) + "\0\0\n[1]\n" + lines(2))
    (tmp_path / "exit.json").write_text("{")
    large = 10**400
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {large}}}\n{{"step": 1e400}}\n{{"step": 3, "loss": {large}}}\n' + lines(4))
    data = RunFiles(tmp_path).page_data(9)
    assert data["step"] == [1, 2, 4]
    assert data["columns"]["loss"] == [1.0, 2.0, 4.0]
    assert data["bad_lines"] == 5
    assert data["exit"] is None


def test_many_rows_are_means_of_neighbours(tmp_path: Path) -> None:
    file, run = tmp_path / "metrics.jsonl", RunFiles(tmp_path)
    file.write_text(lines(*range(1, 11)) + lines(11, mfu=0.25))
    data = run.page_data(4)
    assert data["stride"] == 4
    assert data["step"] == [4, 8, 11]
    assert data["columns"] == {"loss": [2.5, 6.5, 10.0], "mfu": [None, None, 0.25]}
    assert data["newest"] == {"loss": 11.0, "mfu": 0.25}
    for last in range(12, 40):  # what was summed up before is what all rows give at once
        with file.open("a") as open_file:
            open_file.write(lines(last, **({"lr": float(last)} if last % 3 else {})))
        assert run.page_data(4) | {"age_s": 0} == RunFiles(tmp_path).page_data(4) | {"age_s": 0}


def test_what_is_no_number_is_null(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN, "lr": null, "name": "x", "ok": true}\n')
    columns = RunFiles(tmp_path).page_data(9)["columns"]
    assert columns == {"loss": [None]}
    (tmp_path / "exit.json").write_text('{"code": NaN, "seconds": 1e999}')
    (tmp_path / "goodput.jsonl").write_text('{"step": 1, "started": Infinity}\n[]\n{"step": 1e400, "saved": true}\n')
    data = RunFiles(tmp_path).page_data(9)
    json.dumps(data, allow_nan=False)  # as the page gets it
    assert data["exit"] == {"code": None, "seconds": None}
    assert data["events"] == [{"kind": "started", "step": 1, "value": None}]
    assert not any(isinstance(v, float) and math.isnan(v) for v in columns["loss"])


def test_events_and_checkpoints(tmp_path: Path) -> None:
    ledger = [{"started": 5.0, "step": 0}, {"step": 7}, {"step": 9, "saved": True}, {"step": 12, "end": "failed"}]
    (tmp_path / "goodput.jsonl").write_text("\n".join(map(json.dumps, ledger)) + "\nno\n")
    (tmp_path / "checkpoints" / "step_0000009").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step_0000012.tmp").mkdir()
    (tmp_path / "failures" / "rank_00003").mkdir(parents=True)
    run = RunFiles(tmp_path)
    data = [run.page_data(9) for _ in range(2)][1]
    assert data["bad_lines"] == 0  # of metrics.jsonl, and not once more each time
    assert data["failures"] == ["rank_00003"]
    assert [(event["kind"], event["step"]) for event in data["events"]] == [("started", 0), ("saved", 9), ("end", 12)]
    assert data["checkpoints"] == ["step_0000009"]


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
    assert data["checkpoints"] == data["failures"] == []
    assert data["rows"] == 0
    assert data["exit"] is None
    assert data["events"] == []
    assert data["layout"] == ""
