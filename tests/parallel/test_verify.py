"""A model that is split over `tp` is compared with the plain one before its first step."""

from pathlib import Path

from meshtrain.metrics.logger import read
from tests.launching import forked
from tests.parallel.test_tensor_parallel import assert_none_failed
from tests.parity.experiments import MODELS, QUICKSTART, SMALL

HERE = Path(__file__).parent


def test_what_the_check_finds_and_what_it_leaves_alone() -> None:
    assert_none_failed(forked(2, HERE / "verify_cases.py", timeout=120), 2, 200)


def test_a_run_is_refused_before_its_first_step(tmp_path: Path) -> None:
    keys = (*SMALL, f"model.name={MODELS / 'fused.py'}", "layout={tp: 2}", f"data.cache={tmp_path / 'cache'}")
    done = forked(2, "-m", "meshtrain.train", QUICKSTART, *keys, f"train.output={tmp_path / 'run'}")
    assert done.status == 2
    assert done.err.count("does not compute what it does on one device: model.layers.0: output 0 differs by") == 1
    assert "Use tp: 1, or mend the model or its tp_plan" in done.err
    assert "parallel.verify: false" in done.err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_check_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    """Nor is sequence parallelism switched off without a word where nothing splits the sequence."""
    keys = (*SMALL, "train.steps=3", f"model.name={MODELS / 'whole_sequence.py'}", "layout={tp: 2}")
    keys = (*keys, f"data.cache={tmp_path / 'cache'}", "model.hidden_dropout=0.1")
    rows = []
    for verify in ("true", "false"):
        own = (f"parallel.verify={verify}", f"train.output={tmp_path / verify}")
        done = forked(2, "-m", "meshtrain.train", QUICKSTART, *keys, *own).check()
        assert done.out.count("parallel.sequence_parallel is off: the tp_plan has no embedding_rowwise layer") == 1
        rows.append([(row["loss"], row["grad_norm"]) for row in read(tmp_path / verify / "metrics.jsonl")])
    assert len(rows[0]) == 3
    assert rows[0] == rows[1]
