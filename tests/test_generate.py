"""Generation: with a cache of keys and values the same texts as without, on every layout, from the
command line too."""

import io
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshtrain
from meshtrain.cli.generate import progress
from meshtrain.config import Config
from meshtrain.data import OpenData
from meshtrain.data.custom import CustomSamples
from meshtrain.data.tokenizer import ByteTokenizer
from meshtrain.errors import InputError, TrainingError, printable
from meshtrain.generate import _draw, generate, generate_batch
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.modeling.build import build_model
from meshtrain.run.results import sample_text
from tests.comparing import ALONE, CPU, small_llama
from tests.parity.experiments import EXPERT_MODELS, QUICKSTART, SMALL, overrides_of

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12]]
LENGTH, S = 9, 24
MODELS = {
    "llama": ("model.num_key_value_heads=1",),
    "qwen3": ("model.name=qwen3", "train.lora={rank: 2}"),
    "dynamic rope": overrides_of("dynamic"),
    **EXPERT_MODELS,
}
CELLS = {  # few on several ranks, since each costs many exchanges
    (1, "{dp_shard: 1}"): tuple(MODELS),
    (2, "{tp: 2}"): ("llama", "dynamic rope", "latent attention"),
    (2, "{pp: 2}"): ("llama", "qwen3"),
    (2, "{cp: 2}"): ("llama", "dynamic rope"),
    (2, "{dp_shard: 2}"): ("qwen3",),
    (4, "{dp_shard: 2, tp: 2}"): ("qwen3_moe",),
    (4, "{pp: 2, tp: 2}"): ("llama",),
    (4, "{cp: 2, tp: 2}"): ("glm",),
}


def config_of(name: str, layout: str, world: int) -> Config:
    keys = [
        *SMALL,
        *MODELS[name],
        "train.precision=float64",
        f"data.seq_len={S}",
        f"layout={layout}",
    ]
    keys += ["model.initializer_range=0.3", "parallel.verify=false", "model.num_hidden_layers=3"]
    return Config.load(QUICKSTART, keys, world_size=world)


@cache
def expected_texts(name: str) -> tuple[list[list[int]], list[int]]:
    """By one process without a cache: the text of each prompt, and the first again at a
    temperature."""
    model = build_model(config_of(name, "{}", 1), ALONE, CPU)

    def text(prompt: list[int], temperature: float) -> list[int]:
        return generate(
            model, prompt, LENGTH, temperature=temperature, seq_len=S, device=CPU, seed=3
        )

    greedy = [text(prompt, 0) for prompt in PROMPTS]
    assert all(len(set(text)) > 4 for text in greedy), "the texts are worth comparing"
    return greedy, text(PROMPTS[0], 1.5)


@pytest.mark.parametrize(
    ("job", "layout", "name"),
    [
        pytest.param(world, layout, name, id=f"{world}-ranks-{layout}-{name}")
        for (world, layout), names in CELLS.items()
        for name in names
    ],
    indirect=["job"],
)
def test_texts_with_a_cache_on_any_layout_are_those_without(
    job: Job, layout: str, name: str
) -> None:
    """Of prompts of different lengths together, of which the others change nothing."""
    greedy, drawn = expected_texts(name)
    config = config_of(name, layout, job.world_size)
    assert config.resolved is not None
    model = build_model(config, meshtrain.build_mesh(config.resolved), CPU)

    def texts(prompts: list[list[int]], temperature: float) -> list[list[int]]:
        return generate_batch(
            model, prompts, LENGTH, temperature=temperature, seq_len=S, device=CPU, seed=3
        )

    assert texts(PROMPTS, 0) == greedy
    assert texts(PROMPTS[:1], 0) == greedy[:1]
    assert texts(PROMPTS, 1.5)[0] == drawn
    assert texts(PROMPTS[:1], 1.5) == [drawn]


def test_a_text_is_over_after_a_token_that_stops_it() -> None:
    """The others go on as if it did, and nothing is computed when all are over."""
    greedy, _ = expected_texts("llama")
    model = build_model(config_of("llama", "{}", 1), ALONE, CPU)
    added = [text[len(prompt) :] for text, prompt in zip(greedy, PROMPTS, strict=True)]
    for stops in (
        {added[0][2]},
        {added[0][1], added[1][3], added[2][2]},
        {added[1][0]},
        set(range(200)),
    ):
        done: list[int] = []
        texts = generate_batch(
            model,
            PROMPTS,
            LENGTH,
            temperature=0,
            seq_len=S,
            device=CPU,
            seed=3,
            stops=stops,
            tick=done.append,
        )
        lengths = [
            next((i + 1 for i, token in enumerate(own) if token in stops), LENGTH) for own in added
        ]
        assert texts == [
            prompt + own[:n] for prompt, own, n in zip(PROMPTS, added, lengths, strict=True)
        ]
        assert done == list(range(1, max(lengths) + 1))


def test_top_p_draws_from_the_likeliest() -> None:
    """The fewest that have the probability together; one at least."""
    logits, draws = (
        torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log(),
        torch.Generator().manual_seed(0),
    )

    def drawn(top_p: float) -> set[int]:
        return {_draw(logits, 1.0, draws, top_p) for _ in range(200)}

    assert [drawn(p) for p in (0.05, 0.3, 0.6, 0.75, 1.0)] == [
        {1},
        {1},
        {1, 3},
        {1, 2, 3},
        {0, 1, 2, 3},
    ]


def test_logits_that_are_not_finite_are_told() -> None:
    """By torch they are a `probability tensor` that `contains either inf, nan or element < 0`."""
    model = Places()
    torch.nn.init.constant_(model.tokens.weight, float("nan"))
    for temperature in (0.0, 0.8):
        with pytest.raises(TrainingError, match="logits are not finite, so it writes no text"):
            generate(model, [65], 1, seq_len=8, device=CPU, seed=0, temperature=temperature)


def test_what_does_not_fit_is_refused() -> None:
    model = small_llama()
    for prompts in ([[1, 2]], [[1], []]):
        with pytest.raises(InputError, match="at least one token in each, and at most 6 together"):
            generate_batch(model, prompts, 5, seq_len=6, device=CPU, seed=0)
    done: list[int] = []
    assert (
        len(generate_batch(model, [[1]], 5, seq_len=6, device=CPU, seed=0, tick=done.append)[0])
        == 6
    )
    assert done == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("terminal", "kind", "writes"), [(True, "xterm", 3), (True, "dumb", 1), (False, "xterm", 1)]
)
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

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, documents: None
    ) -> torch.Tensor:
        return (self.tokens(tokens) + self.places(positions)) @ self.tokens.weight.T


@pytest.fixture
def sample() -> Callable[..., str]:
    """What a run writes at its end, of samples with these inputs."""

    def of(inputs: tuple[torch.Tensor, ...], tokenizer: Any) -> str:
        data = OpenData(
            CustomSamples("mine", [(inputs, inputs[0])], None), None, "language", [], "", tokenizer
        )
        job: Any = SimpleNamespace(device=CPU)
        return sample_text(Config.load("quickstart"), job, build_mesh(Layout({})), data, Places())

    return of


def test_the_sample_at_the_end_is_as_long_as_the_data_and_of_tokens_alone(
    sample: Callable[..., str],
) -> None:
    """Else a run of one's own data fails after its last step, at each start, and is never
    exported."""
    text = torch.full((8,), 65)
    assert "going on from 'AAAAAAAA'" in sample((text,), ByteTokenizer())
    assert "no sample: " in sample((text, text, text, text), ByteTokenizer())


def test_the_sample_at_the_end_is_one_text(sample: Callable[..., str]) -> None:
    """What a tokenizer writes between two tokens stands between the prompt and what is added,
    too."""
    words = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    text = sample((torch.full((8,), 65),), words).splitlines()[-1]
    assert len(text.split(" ")) == 8 + Config.load("quickstart").train.sample_tokens
