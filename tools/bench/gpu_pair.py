"""meshtrain's own command against torchtitan on one GPU, in turns: time, memory, model FLOPs
utilization and losses.

    python tools/bench/gpu_pair.py A1 [--against T-none ...] [--pairs 8] [--json [FILE]]
    [key.path=value ...]

Both train the same Llama from the same initial weights on the same tokens in the same order. The
other sides are torchtitan's baselines (gpu_titan.py), a plain loop (`plain`, gpu_plain.py), or
meshtrain itself with another setting, which shows the gain of that setting (`--against
parallel.compile=false`). Sides take turns of about
six seconds in the order A B B A. They stay on the GPU if its memory suffices for all, and otherwise
start anew for each visit. The GPU is synchronized only at the ends of a turn. FLOPs are computed
from the model's sizes, the same for all sides. Exits with 2 without a GPU or torchtitan, with 1 if
losses differ by more than 1 %.
"""

import argparse
import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml

import gpu_titan
from harness import (
    HERE,
    Side,
    Turn,
    measure,
    median_interval,
    model_of,
    positive,
    prepare,
    ratio_of,
    read_losses,
    running,
)
from meshtrain.modeling.flops import table_flops
from side import overridden

OURS = "meshtrain"
COMPARED = 20  # first steps whose losses are compared
TOLERANCE = 0.01  # relative difference of losses in bfloat16
WARM_UP_TURNS = 3
ROOM = 0.92  # share of a GPU's memory that sides may take
ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # unless already set
# Bits of clocks_event_reasons.active, as nvml.h has them.
REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clocks",
}


class Workload(NamedTuple):
    model: Mapping[str, Any]
    seq_len: int
    global_size: int
    micro_size: int
    steps: int  # steps of a turn of about six seconds on an H100


# torchtitan 0.2 does not tie weights
_1B = {
    "name": "llama",
    "preset": "llama-3.2-1b",
    "tie_word_embeddings": False,
}
# 8B's layers, as many as a GPU holds
_8B = {
    "name": "llama",
    "preset": "llama-3.1-8b",
    "num_hidden_layers": 8,
}
# four layers of 1B's with a small vocabulary: little to write and to compile, for gpu_check.py
_SMALL = {**_1B, "num_hidden_layers": 4, "vocab_size": 32768}
PLAIN = "plain"  # a loop in torch alone, gpu_plain.py
WORKLOADS = {
    "S": Workload(_SMALL, 4096, 4, 4, 20),
    "A1": Workload(_1B, 8192, 4, 4, 10),
    "A4": Workload(_1B, 8192, 16, 4, 3),
    "A-4k": Workload(_1B, 4096, 8, 8, 10),
    "B21": Workload(_8B, 8192, 2, 2, 12),
    "B24": Workload(_8B, 8192, 8, 2, 4),
}


def values_of(workload: Workload) -> dict[str, Any]:
    """A workload's YAML, which both sides read. Without weight decay, since torchtitan would apply
    it to norms, too."""
    return {
        "model": dict(workload.model),
        "data": {
            "source": "tokens",
            "path": "tokens",
            "validation": 0,
            "seq_len": workload.seq_len,
            "workers": 2,
        },
        "batch": {"global_size": workload.global_size, "micro_size": workload.micro_size},
        "parallel": {"compile": True, "recompute": "none"},
        "optimizer": {
            "lr": 3e-4,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.0,
            "clip_norm": 1.0,
            "schedule": "constant",
            "warmup_steps": 0,
        },
        "train": {
            "precision": "bfloat16",
            "steps": 1,
            "seed": 0,
            "eval_every": 0,
            "sample_tokens": 0,
        },
        "checkpoint": {"every": 0},
    }


# The model's demands ------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """The sizes that determine the FLOPs and bytes of a Llama."""

    layers: int
    width: int
    heads: int  # features of all query heads together
    kv: int  # features of all key heads together
    hidden: int
    vocabulary: int

    @property
    def products(self) -> int:
        """Number of weights in matrix products: linear layers and the head, not the embedding."""
        d = self.width
        return (
            self.layers * (2 * d * self.heads + 2 * d * self.kv + 3 * d * self.hidden)
            + d * self.vocabulary
        )

    @property
    def parameters(self) -> int:
        """Number of parameters of a model whose head is not tied."""
        return self.products + self.width * (self.vocabulary + 2 * self.layers + 1)

    def flops(self, length: int, causal: bool) -> int:
        """FLOPs of one token's forward and backward; attention in full, or the half that a causal
        mask needs."""
        attention = 12 * self.layers * self.heads * length
        return 6 * self.products + (attention // 2 if causal else attention)

    def activation_bytes(self, tokens: int) -> int:
        """Bytes saved for backward: 16-bit values of compiled blocks, and float32 logits with what
        the loss keeps."""
        saved = 8 * self.width + 4 * self.kv + 4 * self.hidden
        return tokens * (self.layers * saved + 12 * self.vocabulary)


def sizes_of(values: Mapping[str, Any]) -> Sizes:
    _, config = model_of(values)
    e = config.head_width
    heads, kv = config.num_attention_heads * e, config.kv_heads * e
    return Sizes(
        config.num_hidden_layers,
        config.hidden_size,
        heads,
        kv,
        config.intermediate_size,
        config.vocab_size,
    )


def fit_together(values: Mapping[str, Any], sides: int, memory: float, graphs: int = 0) -> bool:
    """Whether weights, gradients and moments (18 bytes per parameter) of all sides fit with the
    activations of one side and of each side whose CUDA graphs keep them."""
    sizes = sizes_of(values)
    activations = sizes.activation_bytes(values["batch"]["micro_size"] * values["data"]["seq_len"])
    return sides * 18 * sizes.parameters + (1 + graphs) * activations < ROOM * memory


# The GPU ------------------------------------------------------------------------------------------


def ask(fields: str) -> list[str]:
    """The values that nvidia-smi reports for the first GPU. Raises OSError or CalledProcessError:
    it failed."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return [value.strip() for value in done.stdout.strip().splitlines()[0].split(",")]


def card() -> dict[str, Any]:
    name, memory, driver, limit = ask("name,memory.total,driver_version,power.limit")
    return {"name": name, "memory": float(memory) * 2**20, "driver": driver, "power_limit_w": limit}


class Sample(NamedTuple):
    time: float  # as time.time()
    sm_mhz: float
    power_w: float
    celsius: float
    reasons: int


@contextmanager
def watching(file: Path) -> Iterator[None]:
    """Logs clocks, power, temperature and clock throttle reasons to a file, twice a second."""
    fields = "timestamp,clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"
    command = [
        "nvidia-smi",
        "--id=0",
        f"--query-gpu={fields}",
        "--format=csv,noheader,nounits",
        "-lms",
        "500",
    ]
    with file.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def read_samples(text: str) -> list[Sample]:
    """The complete lines of nvidia-smi's log. A value that the GPU does not report, [N/A], becomes
    nan."""
    samples = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 5 or not cells[4].startswith("0x"):
            continue
        time = datetime.strptime(cells[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
        mhz, watt, celsius = (
            float(x) if x.replace(".", "").isdigit() else float("nan") for x in cells[1:4]
        )
        samples.append(Sample(time, mhz, watt, celsius, int(cells[4], 16)))
    return samples


def clocks(samples: Sequence[Sample], turns: Sequence[Turn]) -> dict[str, Any]:
    """The GPU's clocks, power, temperature and throttling during a side's turns; empty without
    samples."""
    during = [
        s
        for s in samples
        if any(turn.began <= s.time <= turn.began + turn.wall_s for turn in turns)
    ]
    if not during:
        return {}
    bits = {bit for s in during for bit in REASONS if s.reasons & bit}
    return {
        "sm_mhz": float(np.median([s.sm_mhz for s in during])),
        "power_w": float(np.median([s.power_w for s in during])),
        "celsius": max(s.celsius for s in during),
        "held_down_by": [REASONS[bit] for bit in sorted(bits) if bit > 1],
    }


# Measuring ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """The turns and the loss of each step, by the name of the side."""

    turns: dict[str, list[Turn]]
    losses: dict[str, list[float]]
    together: bool


def make_sides(against: Sequence[str]) -> list[Side]:
    """meshtrain, and the sides to compare it with: torchtitan's baselines, or overrides. Raises
    SystemExit: neither."""
    sides = [Side(OURS, "meshtrain")]
    for name in against:
        if name in gpu_titan.BASELINES:
            sides.append(Side(name, "gpu_titan", overrides=(f"titan.baseline={name}",)))
        elif name == PLAIN:
            sides.append(Side(name, "gpu_plain"))
        elif "=" in name:
            sides.append(Side(f"{OURS} {name}", "meshtrain", overrides=(name,)))
        else:
            raise SystemExit(
                f"--against {name}: expected {', '.join(gpu_titan.BASELINES)}, {PLAIN} or "
                "key.path=value"
            )
    return sides


def run(
    sides: Sequence[Side], values: dict[str, Any], options: argparse.Namespace, folder: Path
) -> Measured:
    """Lets all sides take their turns; writes their inputs into the empty folder `folder`."""
    options.workload = folder / "workload.yaml"
    options.workload.write_text(yaml.safe_dump(values))
    prepare(folder, options.workload)
    if options.together:
        with running(sides, folder, options) as started:
            turns = measure(started, options.pairs)
        losses = read_losses(sides, folder)
        names = [side.name for side in sides]
        return Measured(
            dict(zip(names, turns, strict=True)), dict(zip(names, losses, strict=True)), True
        )
    visit = copy.copy(options)
    visit.pairs = -(-options.pairs // 2)
    measured = Measured({side.name: [] for side in sides}, {}, False)
    for i, side in enumerate([*sides, *reversed(sides)]):
        place = folder / f"visit-{i}"
        place.mkdir()
        for name in ("tokens", "weights.safetensors"):
            (place / name).symlink_to(folder / name)
        with running([side], place, visit) as started:
            measured.turns[side.name] += measure(started, visit.pairs)[0]
        measured.losses.setdefault(side.name, read_losses([side], place)[0])
    return measured


def summary(
    measured: Measured,
    values: Mapping[str, Any],
    steps: int,
    samples: Sequence[Sample] = (),
    peak: float | None = None,
) -> dict[str, Any]:
    """The results to print. `peak`: dense 16-bit FLOP/s of the GPU; None: not known."""
    tokens = values["batch"]["global_size"] * values["data"]["seq_len"]
    sizes, length = sizes_of(values), values["data"]["seq_len"]
    sides = {}
    for name, turns in measured.turns.items():
        seconds = [turn.wall_s / steps for turn in turns]
        rate = tokens / float(np.median(seconds))
        sides[name] = {
            "ms_per_step": 1000 * float(np.median(seconds)),
            "ms_interval": [1000 * end for end in median_interval(seconds)[:2]],
            "tokens_per_s": rate,
            "mfu_causal": None if peak is None else rate * sizes.flops(length, causal=True) / peak,
            "mfu": None if peak is None else rate * sizes.flops(length, causal=False) / peak,
            "allocated": max(turn.allocated for turn in turns),
            "reserved": max(turn.reserved for turn in turns),
            "largest_difference_of_losses": difference(
                measured.losses[name], measured.losses[OURS]
            ),
            "turns": [asdict(turn) for turn in turns],
        } | clocks(samples, turns)
    walls = {name: [turn.wall_s for turn in turns] for name, turns in measured.turns.items()}
    return {
        "tokens_per_step": tokens,
        "flops_per_token": {
            "causal": sizes.flops(length, True),
            "full": sizes.flops(length, False),
        },
        "peak_flops": peak,
        "steps": steps,
        "together": measured.together,
        "sides": sides,
        # Ratios of tokens per second: above 1, meshtrain is faster.
        "ratios": {
            name: ratio_of(times, walls[OURS]) for name, times in walls.items() if name != OURS
        },
        "losses": {name: losses[:COMPARED] for name, losses in measured.losses.items()},
    }


def difference(losses: Sequence[float], to: Sequence[float]) -> float:
    """The largest relative difference among the first steps."""
    return max(abs(x - y) / abs(y) for x, y in list(zip(losses, to, strict=False))[:COMPARED])


def table(result: Mapping[str, Any]) -> str:
    sides, width = result["sides"], max(14, *map(len, result["sides"]))
    lines = [
        f"{'':<{width}} {'ms':>8} {'tokens/s':>9} {'causal':>7} {'full':>7} {'GiB':>6} {'res.':>6} "
        f"{'MHz':>6} {'W':>5}"
    ]
    for name, side in sides.items():
        causal, full = (
            f"{100 * side[key]:.1f} %" if side[key] else "-" for key in ("mfu_causal", "mfu")
        )
        memory = " ".join(f"{side[key] / 2**30:6.1f}" for key in ("allocated", "reserved"))
        clock, power = (f"{side[key]:.0f}" if key in side else "-" for key in ("sm_mhz", "power_w"))
        lines.append(
            f"{name:<{width}} {side['ms_per_step']:8.1f} {side['tokens_per_s']:9.0f} {causal:>7} "
            f"{full:>7} {memory} "
            f"{clock:>6} {power:>5}"
            + "".join(f", {reason}" for reason in side.get("held_down_by", ()))
        )
    lines += ["", f"tokens per second of {OURS} by those of"]
    for name, ratio in result["ratios"].items():
        interval = (
            f"{ratio['low']:.3f} - {ratio['high']:.3f} holds it with {100 * ratio['coverage']:.1f} "
            "%"
        )
        lines.append(f"{name:<{width}} {ratio['median']:8.3f}  {interval}")
    lines += ["", "loss of a step   " + " ".join(f"{name:>10}" for name in sides)]
    for step, losses in enumerate(zip(*result["losses"].values(), strict=False), start=1):
        lines.append(f"{step:>16} " + " ".join(f"{loss:>10.5f}" for loss in losses))
    lines.append(
        "largest difference "
        + " ".join(f"{100 * s['largest_difference_of_losses']:>8.3f} %" for s in sides.values())
    )
    return "\n".join(lines)


# The command --------------------------------------------------------------------------------------


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="meshtrain's own command beside torchtitan on one GPU, in turns."
    )
    parser.add_argument("name", choices=WORKLOADS, metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument(
        "--against",
        action="append",
        metavar="SIDE",
        help=(
            "T-none, T-sac or T-amp of torchtitan, plain (torch alone), or key.path=value of "
            "meshtrain; may be repeated (T-none)"
        ),
    )
    parser.add_argument(
        "--pairs", type=positive, default=8, help="turns of each side that count (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=positive, help="steps of a turn (about six seconds of them on an H100)"
    )
    parser.add_argument(
        "--together",
        choices=("auto", "yes", "no"),
        default="auto",
        help=(
            "whether sides stay on the GPU while others run (%(default)s: if they fit by their "
            "sizes)"
        ),
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="",
        metavar="FILE",
        help="write all of it (tools/bench/results/WORKLOAD-CARD-TIME.json)",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="of the workload, for all sides"
    )
    return parser.parse_args(arguments)


def missing(sides: Sequence[Side]) -> str | None:
    """Why nothing can be measured on this machine, in one line; None if it can."""
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return "gpu_pair.py needs an NVIDIA GPU and nvidia-smi: there is none here"
    baselines = [side.name for side in sides if side.kind == "gpu_titan"]
    return gpu_titan.needed(baselines) if baselines else None


def versions() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "-C", HERE, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "meshtrain": commit.stdout.strip() or None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "torchtitan": gpu_titan.installed(),
        "python": sys.version.split()[0],
    }


def main() -> int:
    options = read_arguments()
    sides = make_sides(options.against or ["T-none"])
    if reason := missing(sides):
        print(reason, file=sys.stderr)
        return 2
    workload, gpu = WORKLOADS[options.name], card()
    values = overridden(values_of(workload), options.overrides)
    options.steps = options.steps or workload.steps
    graphs = (
        0
        if (gpu_titan.installed() or "").startswith("0.2")
        else sum(side.kind == "gpu_titan" for side in sides)
    )
    together = fit_together(values, len(sides), gpu["memory"], graphs)
    options.together = together if options.together == "auto" else options.together == "yes"
    if not fit_together(values, 1, gpu["memory"]):
        print(
            "a side alone may need more memory than there is: halve batch.micro_size",
            file=sys.stderr,
        )
    environment = {key: os.environ.get(key, value) for key, value in ENVIRONMENT.items()}
    shared, options.overrides = options.overrides, []  # already applied to the workload
    vars(options).update(
        warm_up=WARM_UP_TURNS * options.steps, environment=environment, one_by_one=True
    )
    with tempfile.TemporaryDirectory(prefix="meshtrain-gpu-pair-") as name:
        folder = Path(name)
        with watching(folder / "smi.csv"):
            measured = run(sides, values, options, folder)
        samples = read_samples(said := (folder / "smi.csv").read_text())
    if not samples:
        print(f"no clocks, because nvidia-smi said: {said[:200]}", file=sys.stderr)
    result: dict[str, Any] = {
        "workload": options.name,
        "overrides": shared,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": gpu,
        "versions": versions(),
    }
    result |= summary(
        measured, values, options.steps, samples, table_flops(gpu["name"], "bfloat16")
    )
    how = "together" if options.together else "one after the other"
    print(f"{options.name} on {gpu['name']}, {how}\n\n{table(result)}")
    if options.json is not None:
        print(f"\nwritten to {write(result, options.json)}")
    apart = max(side["largest_difference_of_losses"] for side in result["sides"].values())
    if apart > TOLERANCE:
        print(
            f"losses differ by {100 * apart:.1f} %: the sides did not do the same", file=sys.stderr
        )
    return int(apart > TOLERANCE)


def write(result: Mapping[str, Any], name: str) -> Path:
    """Writes the result to this file, or by default into results/; returns the path."""
    stamp = result["time"].replace(":", "").replace("+0000", "")
    card = result["card"]["name"].replace("NVIDIA ", "").replace(" ", "-")
    file = Path(name) if name else HERE / "results" / f"{result['workload']}-{card}-{stamp}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
    return file


if __name__ == "__main__":
    sys.exit(main())
