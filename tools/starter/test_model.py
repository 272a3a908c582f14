"""The project's own test: the model learns, and its loss is the same on every layout. Under pytest,
or by itself:

python test_model.py
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
STEPS = 20


def losses(folder: Path, processes: int, layout: str) -> list[float]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
    ]
    command += ["-m", "meshtrain.train", "train.yaml", f"layout={layout}", f"train.output={folder}"]
    subprocess.run(
        [*command, f"train.steps={STEPS}", "train.eval_every=0", "train.precision=float64"],
        cwd=HERE,
        check=True,
    )
    return [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def test_the_layout_does_not_change_the_loss(tmp_path: Path) -> None:
    alone = losses(tmp_path / "alone", 1, "{}")
    assert len(alone) == STEPS
    assert alone[-1] < 0.9 * alone[0]
    for number, layout in enumerate(("{dp_shard: 2}", "{tp: 2}", "{pp: 2}")):
        for step, pair in enumerate(
            zip(losses(tmp_path / str(number), 2, layout), alone, strict=True), 1
        ):
            assert math.isclose(*pair, rel_tol=1e-9), (
                f"step {step} of {layout} has the losses {pair}"
            )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        test_the_layout_does_not_change_the_loss(Path(folder))
    print("the losses of all layouts are equal")
