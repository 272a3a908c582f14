"""torchrun on several hosts that are namespaces of this machine, and a small run to train."""

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from meshtrain.metrics.logger import read
from tests.launching import ROOT, TORCHRUN, environment
from tests.nethosts import Network, why_not

REASON = why_not()
# Marks of every test here; starting torch on 3 hosts takes a while on 2 cores, and longer on busy
# ones.
needs_hosts = [
    pytest.mark.cluster,
    pytest.mark.timeout(420),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

MODEL = """
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


@dataclass(frozen=True)
class Config:
    vocab_size: int = 256
    width: int = 8
    pace: str = ""


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.pace = config.pace
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.mix = nn.Linear(config.width, config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, tokens, positions, documents):
        start = time.monotonic()
        while self.pace and time.monotonic() - start < float(Path(self.pace).read_text()):
            time.sleep(0.02)
        return self.head(torch.tanh(self.mix(self.embed(tokens))))
"""


def small_run(folder: Path) -> Path:
    """A config in a folder, with a model and a text of its own; a step takes milliseconds, or as
    `model.pace` says."""
    (folder / "model.py").write_text(MODEL)
    (folder / "text.txt").write_text(
        "".join(f"{i * i} and {i**3 % 1009} make {i * 7919 % 10007}.\n" for i in range(400))
    )
    config = folder / "small.yaml"
    config.write_text(
        f"model: {{name: {folder}/model.py}}\n"
        f"data: {{source: text, path: {folder}/text.txt, cache: {folder}/cache, validation: 0, "
        "seq_len: 32,"
        " workers: 0}\n"
        "batch: {global_size: 12, micro_size: 6}\n"
        "optimizer: {lr: 1e-2, warmup_steps: 2}\n"
        f"train: {{steps: 40, eval_every: 0, sample_tokens: 0, precision: float64, output: "
        f"{folder}/run}}\n"
        "checkpoint: {every: 5}\n"
    )
    return config


class Agent:
    """One torchrun, on one host."""

    def __init__(
        self,
        network: Network,
        host: int,
        log: Path,
        command: list[str],
        variables: Mapping[str, str],
    ) -> None:
        self.host, self._log = host, log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                network.on(host, *command),
                cwd=ROOT,
                env=environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def printed(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def torchrun(self) -> int:
        """The pid of torchrun itself; its parent is nsenter, which started it in the host's
        namespaces."""
        return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text())

    def ends(self, seconds: float = 180) -> int:
        """Waits up to `seconds` for its exit status."""
        return self.process.wait(seconds)


class Agents:
    """The agents of one job. Leaving the network's context ends them all."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.pace = Pace(folder)
        self.agents: list[Agent] = []

    def start(
        self, host: int, launch: str, *run: str, variables: Mapping[str, str] | None = None
    ) -> Agent:
        """Starts torchrun with the options `launch` on a host, to train with the arguments `run`
        into `self.run`."""
        log = self.folder / f"agent_{len(self.agents)}_on_node{host}.log"
        command = [
            *TORCHRUN,
            *launch.split(),
            "-m",
            "meshtrain.train",
            *run,
            f"train.output={self.run}",
        ]
        self.agents.append(Agent(self.network, host, log, command, variables or {}))
        return self.agents[-1]

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def printed(self) -> str:
        """The output of all agents, also for messages of tests."""
        return "\n".join(f"--- node{agent.host}\n{agent.printed}" for agent in self.agents)

    def wait(self, what: Callable[[], bool], seconds: float = 180) -> None:
        """Waits until `what()` is true."""
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"did not happen within {seconds} s\n{self.printed}"
            time.sleep(0.05)

    def end(self, *agents: Agent, seconds: float = 240) -> None:
        """Asserts that all these agents exit with status 0."""
        deadline = time.monotonic() + seconds
        for agent in agents:
            try:
                status = agent.ends(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = -1
            assert status == 0, f"node{agent.host}: {status}\n{self.printed}"


class Pace:
    """A file that says how many seconds a forward of the model takes, also for one in progress."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "pace"
        self.set(0.0)

    @property
    def override(self) -> str:
        return f"model.pace={self._file}"

    def set(self, seconds: float) -> None:
        other = self._file.with_suffix(".new")
        other.write_text(str(seconds))
        other.replace(self._file)


def rows(run: Path) -> list[dict]:
    """A run's metrics so far."""
    file = run / "metrics.jsonl"
    return read(file) if file.exists() else []


def same_as(run: Path, reference: Path, tolerance: float = 1e-9) -> None:
    """Asserts the same losses, gradient norms and samples in the same steps."""
    many, one = rows(run), rows(reference)
    assert [row["step"] for row in many] == [row["step"] for row in one]
    assert [row["samples_digest"] for row in many] == [row["samples_digest"] for row in one]
    for name in ("loss", "grad_norm", "tokens"):
        assert [row[name] for row in many] == pytest.approx(
            [row[name] for row in one], rel=tolerance
        ), name
