"""Generation: with a cache of keys and values the same texts as without, on every layout, from the command line too."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshtrain.cli.generate import progress
from meshtrain.config import Config
from meshtrain.data import OpenData
from meshtrain.data.custom import CustomSamples
from meshtrain.data.tokenizer import ByteTokenizer
from meshtrain.errors import InputError, TrainingError, printable
from meshtrain.generate import _draw, generate, generate_batch
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.run.results import sample_text
from tests import generate_cases
from tests.launching import forked
from tests.test_models import make

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", generate_cases.MODELS)
def test_every_model_writes_the_same_with_and_without_a_cache(name: str) -> None:
    """Of prompts of different lengths together."""
    assert generate_cases.compare(name, "{}", 1) == 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [2, 4])
def test_every_layout_writes_the_same_text(processes: int) -> None:
    done = forked(processes, Path(__file__).parent / "generate_cases.py").check()
    rows = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    cells = sum(len(generate_cases.OF_LAYOUT[layout]) for layout in generate_cases.LAYOUTS[processes])
    assert [row["compared"] for row in rows] == [4 * cells]


def test_top_p_draws_from_the_likeliest() -> None:
    """The fewest that have the probability together; one at least."""
    logits, draws = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log(), torch.Generator().manual_seed(0)

    def drawn(top_p: float) -> set[int]:
        return {_draw(logits, 1.0, draws, top_p) for _ in range(200)}

    assert [drawn(p) for p in (0.05, 0.3, 0.6, 0.75, 1.0)] == [{1}, {1}, {1, 3}, {1, 2, 3}, {0, 1, 2, 3}]


def test_logits_that_are_not_finite_are_told() -> None:
    """By torch they are a `probability tensor` that `contains either inf, nan or element < 0`."""
    model = Places()
    torch.nn.init.constant_(model.tokens.weight, float("nan"))
    for temperature in (0.0, 0.8):
        with pytest.raises(TrainingError, match="logits are not finite, so it writes no text"):
            generate(model, [65], 1, seq_len=8, device=CPU, seed=0, temperature=temperature)


def test_what_does_not_fit_is_refused() -> None:
    model = make()
    for prompts in ([[1, 2]], [[1], []]):
        with pytest.raises(InputError, match="at least one token in each, and at most 6 together"):
            generate_batch(model, prompts, 5, seq_len=6, device=CPU, seed=0)
    done: list[int] = []
    assert len(generate_batch(model, [[1]], 5, seq_len=6, device=CPU, seed=0, tick=done.append)[0]) == 6
    assert done == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("terminal", "kind", "writes"), [(True, "xterm", 3), (True, "dumb", 1), (False, "xterm", 1)])
def test_progress_writes_over_itself_where_a_terminal_can(
    terminal: bool, kind: str, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", kind)
    tick = progress(3, 2)
    for done in (1, 2, 3):
        tick(done)
    printed = stream.getvalue()
    assert printed.count("tokens/s") == writes
    assert printed.count("\r") == (writes if writes > 1 else 0)
    assert printed.endswith("tokens/s\n")


def test_a_text_cannot_steer_a_terminal() -> None:
    assert printable("ä\x1b[2J\tb\r\n") == "ä\ufffd[2J\tb\ufffd\n"


class Places(torch.nn.Module):
    """Knows eight positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(256, 4), torch.nn.Embedding(8, 4)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, documents: None) -> torch.Tensor:
        return (self.tokens(tokens) + self.places(positions)) @ self.tokens.weight.T


@pytest.fixture
def sample() -> Callable[..., str]:
    """What a run writes at its end, of samples with these inputs."""

    def of(inputs: tuple[torch.Tensor, ...], tokenizer: Any) -> str:
        data = OpenData(CustomSamples("mine", [(inputs, inputs[0])], None), None, "language", [], "", tokenizer)
        job: Any = SimpleNamespace(device=CPU)
        return sample_text(Config.load("quickstart"), job, build_mesh(Layout({})), data, Places())

    return of


def test_the_sample_at_the_end_is_as_long_as_the_data_and_of_tokens_alone(sample: Callable[..., str]) -> None:
    """Else a run of one's own data fails after its last step, at each start, and is never exported."""
    text = torch.full((8,), 65)
    assert "going on from 'AAAAAAAA'" in sample((text,), ByteTokenizer())
    assert "no sample: " in sample((text, text, text, text), ByteTokenizer())


def test_the_sample_at_the_end_is_one_text(sample: Callable[..., str]) -> None:
    """What a tokenizer writes between two tokens stands between the prompt and what is added, too."""
    words = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    text = sample((torch.full((8,), 65),), words).splitlines()[-1]
    assert len(text.split(" ")) == 8 + Config.load("quickstart").train.sample_tokens
