"""Trains the same model undisturbed on one process and through twelve disturbances, and compares.

    python -m tools.witness [FOLDER] [--steps 2000] [--picture FILE] [key.path=value ...]

A Llama of 4.6 million parameters learns Python in 2,000 steps of 1,024 tokens, in float64, where
rounding cannot hide an error. Killed processes, a full disk, a damaged checkpoint and a requeue
come first, on one process: until the layout changes, loss and gradient norm must be bit-equal. Then
ranks are lost, and the run goes on with other layouts and other numbers of ranks; what differs
after that is rounding. Samples must be the same in each step.

Started again, it goes on where it was stopped. About 75 minutes on two idle cores. The exit status
is 1 if the bits, the samples or the rounding are not as they must be.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from meshtrain.checkpoint.directory import complete_steps, name_of
from meshtrain.job.storage import write_whole
from meshtrain.layout import Layout
from meshtrain.metrics.logger import read
from tools.witness.picture import Step, draw
from tools.witness.plan import ONE, Disturbance, Leg, faults, first_change, legs, save_every

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart.yaml"
# 8 samples of 128 tokens, which 3 ranks share as 3, 3 and 2.
OVERRIDES = (
    "model={name: llama, hidden_size: 256, intermediate_size: 704, num_hidden_layers: 6, "
    "num_attention_heads: 8, num_key_value_heads: 4, vocab_size: 256}",
    "data.seq_len=128",
    "data.workers=0",
    "batch.global_size=8",
    "batch.micro_size=4",
    "train.precision=float64",
    # At the config's own rate, 3e-3, training of this model is chaotic: a difference in the last
    # bit grows tenfold every four steps, on one process as on several. At this one it does not.
    "optimizer.lr=5e-4",
    "optimizer.min_lr=5e-5",
    "train.eval_every=0",
    "train.sample_tokens=0",
)
# The contract for 20 steps after a change of layout, by precision.
NEAR = 20
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
COMPARED = ("loss", "grad_norm")
LEGS = "legs.jsonl"  # a row for each job of the disturbed run that has ended as planned
RESULT = "witness.json"


# Jobs ---------------------------------------------------------------------------------------------

# ranks, arguments of python, log -> exit status
Launch = Callable[[int, Sequence[str], Path], int]


def launch(ranks: int, arguments: Sequence[str], log: Path) -> int:
    """Runs a job to its end, under torchrun if it has several ranks."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }
    with log.open("a") as file:
        job = subprocess.Popen(
            [*command, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            # Ctrl-C would reach the ranks too, and the second request ends them without a save.
            start_new_session=True,
        )
        try:
            return job.wait()
        except KeyboardInterrupt:
            job.terminate()  # it saves
            try:
                job.wait()
            finally:
                job.kill()  # after a second Ctrl-C, which does not wait for the save
            raise


@dataclass(frozen=True)
class Witness:
    """Both runs in a folder."""

    folder: Path
    steps: int
    overrides: tuple[str, ...] = ()
    launch: Launch = launch

    @property
    def undisturbed(self) -> Path:
        return self.folder / "undisturbed"

    @property
    def disturbed(self) -> Path:
        return self.folder / "disturbed"

    @property
    def every(self) -> int:
        return save_every(self.steps)

    def train(self, output: Path, layout: str, how: Sequence[str], more: Sequence[str]) -> int:
        """Runs a job; returns its exit status."""
        arguments = [
            "-m",
            "tools.witness.job",
            *how,
            str(CONFIG),
            *OVERRIDES,
            f"train.steps={self.steps}",
            f"checkpoint.every={self.every}",
            f"layout={layout}",
            f"train.output={output}",
            *self.overrides,
            *more,
        ]
        ranks = Layout(yaml.safe_load(layout)).world_size
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.launch(ranks, arguments, self.folder / f"{output.name}.log")

    def train_undisturbed(self) -> None:
        status = self.train(self.undisturbed, ONE, (), ())
        if status != 0:
            raise SystemExit(self.failed(self.undisturbed, f"it ended with {status}"))

    def done(self) -> list[dict[str, Any]]:
        """The legs that have ended as planned."""
        file = self.folder / LEGS
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def train_disturbed(self) -> None:
        """All legs that are not yet done."""
        for leg in legs()[len(self.done()) :]:
            began = time.monotonic()
            row = self.run(leg) | {"seconds": round(time.monotonic() - began, 1)}
            with (self.folder / LEGS).open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(describe(leg, row), flush=True)

    def run(self, leg: Leg) -> dict[str, Any]:
        """Runs one leg; the next one then goes on from step `saved`."""
        how, more = faults(leg.end, self.every)
        status = self.train(self.disturbed, leg.layout, how, more)
        ended = exit_of(self.disturbed)
        if not is_as_planned(leg.end, status, ended):
            said = f"leg {leg.number} ended with status {status}, {ended or 'no exit.json'}"
            raise SystemExit(self.failed(self.disturbed, said))
        reached = read(self.disturbed / "metrics.jsonl")[-1]["step"]
        if leg.end is not None and leg.end.kind == "damage":
            damage(self.disturbed / "checkpoints")
        # A damaged checkpoint is complete to look at: what it cost shows in the next leg.
        saved = complete_steps(self.disturbed / "checkpoints")[-1]
        return {"leg": leg.number, "layout": leg.layout, "reached": reached, "saved": saved}

    def failed(self, output: Path, why: str) -> str:
        log = self.folder / f"{output.name}.log"
        last = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        return f"{output.name}: {why}, which was not planned; {log} ends with:\n{last}"


def is_as_planned(end: Disturbance | None, status: int, ended: str | None) -> bool:
    """Whether a job ended as its disturbance has it. `ended`: what `exit_of` says."""
    if end is None:
        return status == 0 and ended == "done"
    if end.kind == "stop":
        return status in (0, 75) and ended == "stopped"
    return status != 0 and ended not in ("stopped", "done")


def exit_of(run: Path) -> str | None:
    """How the last job of a run ended by itself; None: it was killed."""
    file = run / "exit.json"
    return json.loads(file.read_text())["status"] if file.exists() else None


def damage(checkpoints: Path) -> None:
    """Turns over a bit in the middle of the newest checkpoint's tensors."""
    newest = checkpoints / name_of(complete_steps(checkpoints)[-1])
    file = newest / "rank_00000.safetensors"
    with file.open("r+b") as tensors:
        tensors.seek(file.stat().st_size // 2)
        (byte,) = tensors.read(1)
        tensors.seek(-1, os.SEEK_CUR)
        tensors.write(bytes([byte ^ 1]))


def describe(leg: Leg, row: Mapping[str, Any]) -> str:
    text = "the end" if leg.end is None else leg.end.text
    return f"{leg.layout}, to step {row['reached']} in {row['seconds']:.0f} s: {text}"


# Comparing ----------------------------------------------------------------------------------------


def compare(
    whole: Sequence[Mapping[str, Any]],
    disturbed: Sequence[Mapping[str, Any]],
    changed_after: int,
    tolerance: float,
) -> dict[str, Any]:
    """Compares the rows of both runs.

    Args:
        changed_after: the last step before the first change of the layout.
        tolerance: relative difference of loss and norm in the first NEAR steps after it.

    Returns:
        `problems`: sentences, none if all is well; `bit_equal_until`: the last step before which
        nothing differs; `largest`: the largest relative difference of the loss; `rows`: a `Step`
        each.
    """
    problems = []
    if [row["step"] for row in whole] != [row["step"] for row in disturbed]:
        problems.append("the runs have not the same steps")
    rows: list[Step] = []
    for one, other in zip(whole, disturbed, strict=False):
        if one["samples_digest"] != other["samples_digest"]:
            problems.append(f"step {one['step']} has other samples")
        apart = {name: abs(other[name] - one[name]) / abs(one[name]) for name in COMPARED}
        step = Step(one["step"], one["loss"], other["loss"], apart["loss"], apart["grad_norm"])
        rows.append(step)

    differing = [row.step for row in rows if row.largest > 0]
    bit_equal_until = differing[0] - 1 if differing else len(rows)
    if bit_equal_until < changed_after:
        problems.append(
            f"step {bit_equal_until + 1} has other bits, and the layout first changes after "
            f"step {changed_after}"
        )
    near = [row for row in rows if changed_after < row.step <= changed_after + NEAR]
    largest = max((row.largest for row in near), default=0.0)
    if largest > tolerance:
        problems.append(
            f"{NEAR} steps after the first change of the layout the runs differ by {largest:.1e}: "
            f"more than rounding, {tolerance:g}"
        )
    return {
        "problems": problems,
        "bit_equal_until": bit_equal_until,
        "largest": max((row.loss_apart for row in rows), default=0.0),
        "rows": rows,
    }


def result_of(witness: Witness) -> dict[str, Any]:
    """What both finished runs show."""
    done = witness.done()
    changed_after = done[first_change() - 1]["saved"]
    config = yaml.safe_load((witness.undisturbed / "config.yaml").read_text())
    precision = config["train"]["precision"]
    whole = read(witness.undisturbed / "metrics.jsonl")
    disturbed = read(witness.disturbed / "metrics.jsonl")
    compared = compare(whole, disturbed, changed_after, TOLERANCE[precision])
    planned = [asdict(leg) for leg in legs()]
    return {
        "steps": witness.steps,
        "precision": precision,
        "tokens_per_step": whole[0]["tokens"],
        "changed_after": changed_after,
        "legs": [plan | row for plan, row in zip(planned, done, strict=True)],
        **compared,
    }


def main(arguments: Sequence[str] | None = None, start: Launch = launch) -> int:
    """`start`: how jobs are started; tests fork them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/witness"))
    parser.add_argument("--steps", type=int, default=2000, help="of both runs (%(default)s)")
    parser.add_argument("--picture", type=Path, help="where to draw it (FOLDER/witness.png)")
    options, overrides = parser.parse_known_args(arguments)
    if wrong := [word for word in overrides if "=" not in word or word.startswith("-")]:
        parser.error(f"expected key.path=value, found {wrong[0]}")
    if not overrides and "=" in str(options.folder):
        parser.error(f"expected a folder before key.path=value, found {options.folder}")
    witness = Witness(options.folder.absolute(), options.steps, tuple(overrides), start)
    try:
        save_every(options.steps)
    except ValueError as error:
        parser.error(str(error))

    witness.train_undisturbed()
    witness.train_disturbed()
    result = result_of(witness)
    write_whole(witness.folder / RESULT, json.dumps(result).encode())

    picture = options.picture or witness.folder / "witness.png"
    draw(result).savefig(picture)
    print(
        f"bit-equal until step {result['bit_equal_until']}, where the layout changes after "
        f"{result['changed_after']}; losses differ by at most {result['largest']:.1e}; {picture}"
    )
    for problem in result["problems"]:
        print(f"not as it must be: {problem}", file=sys.stderr)
    return int(bool(result["problems"]))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("stopped; started again, it goes on from here", file=sys.stderr)
        sys.exit(130)
