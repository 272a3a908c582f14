"""Where documents share a row, a model may compute nothing for one of them from another."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.attention import AttentionContext, attention, document_mask
from meshtrain.dropout import Dropout
from meshtrain.errors import AgreedError
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.loss import attach, seen_terms
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.parallel.options import ParallelOptions
from meshtrain.parallel.verify import Moment, Subject, check_model, needs_sample
from tests.comparing import ALONE, D, V, small_llama
from tests.launching import Finished, forked
from tests.parity.experiments import MODELS, QUICKSTART, SMALL

pytestmark = pytest.mark.usefixtures("float64")

HEADS = 2
Layer = Callable[["Mixer", Tensor, Tensor, Any], Tensor]


class Mixer(nn.Module):
    """A block in which tokens see each other in some way."""

    def __init__(self, way: Layer) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.conv = nn.Conv1d(D, D, 3, groups=D, padding=2)
        self.dropout, self.way = Dropout(0.5), way

    def heads(self, x: Tensor) -> list[Tensor]:
        """q, k and v, each (b, h, s, e)."""
        return [y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1)]

    def forward(self, x: Tensor, positions: Tensor, documents: Any, table: Tensor) -> Tensor:
        return x + self.o(self.way(self, x, positions, documents))


class Model(nn.Module):
    """Two blocks that are alike, between an embedding and a head. `positions`: what the embedding
    adds to a token for its place."""

    def __init__(
        self, way: Layer, positions: Callable[[Tensor], Tensor | float] = lambda places: 0.0
    ) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.layers, self.positions = nn.ModuleList(Mixer(way) for _ in range(2)), positions

    def blocks(self) -> list[nn.Module]:
        return [self.words, *self.layers, self.head]

    def forward(self, tokens: Tensor, positions: Tensor, documents: Any) -> Tensor:
        x = self.words(tokens) + self.positions(positions)
        # Goes into blocks and begins with the row, whatever the documents.
        table = torch.arange(tokens.shape[1], dtype=x.dtype)[:, None].expand(-1, D)
        for layer in self.layers:
            x = layer(x, positions, documents, table)
        return self.head(x)


def joined(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


# Ways that keep to documents ---------------------------------------------------------------------


def ours(layer: Mixer, x: Tensor, _: Tensor, documents: Any) -> Tensor:
    return joined(attention(*layer.heads(x), AttentionContext.of(documents)))


def own_mask(layer: Mixer, x: Tensor, _: Tensor, documents: Tensor) -> Tensor:
    mask = document_mask(documents)
    return joined(F.scaled_dot_product_attention(*layer.heads(x), attn_mask=mask))


def state_that_resets(layer: Mixer, x: Tensor, positions: Tensor, _: Any) -> Tensor:
    return recurrent(layer, x, positions, None, keeps=(positions > 0).to(x.dtype))


def each_token(layer: Mixer, x: Tensor, _: Tensor, __: Any) -> Tensor:
    return torch.tanh(x)


def dropped(layer: Mixer, x: Tensor, positions: Tensor, documents: Any) -> Tensor:
    """With our dropout, and with torch's function."""
    return F.dropout(layer.dropout(ours(layer, x, positions, documents)), 0.5, layer.training)


def statistics_of_the_row(layer: Mixer, x: Tensor, _: Tensor, __: Any) -> Tensor:
    """Terms of the loss may be, as that which balances experts."""
    row = x.mean((1, 2), keepdim=True)
    return attach(torch.tanh(x), "balance", (x - row).square().mean(-1))


def of_half_lengths_alone(layer: Mixer, x: Tensor, _: Tensor, __: Any) -> Tensor:
    """Takes no other length, so that nothing can be compared."""
    return x + x.mean(1, keepdim=True) * torch.ones(8, 1)


# Ways that do not --------------------------------------------------------------------------------


def convolution(layer: Mixer, x: Tensor, _: Tensor, __: Any) -> Tensor:
    return layer.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


def recurrent(
    layer: Mixer, x: Tensor, positions: Tensor, _: Any, keeps: Tensor | None = None
) -> Tensor:
    keeps = torch.ones_like(positions, dtype=x.dtype) if keeps is None else keeps
    state, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.tanh(0.5 * state * keeps[:, t, None] + x[:, t])
        states.append(state)
    return torch.stack(states, 1)


def plain_attention(layer: Mixer, x: Tensor, _: Tensor, __: Any) -> Tensor:
    return joined(F.scaled_dot_product_attention(*layer.heads(x), is_causal=True))


def ours_without_documents(layer: Mixer, x: Tensor, _: Tensor, __: Any) -> Tensor:
    return joined(attention(*layer.heads(x)))


def dropped_plain(layer: Mixer, x: Tensor, positions: Tensor, documents: Any) -> Tensor:
    return F.dropout(plain_attention(layer, x, positions, documents), 0.5, layer.training)


CLEAN = [ours, own_mask, state_that_resets, each_token, dropped, statistics_of_the_row]
LEAKS = [convolution, recurrent, plain_attention, ours_without_documents, dropped_plain]


def check(model: nn.Module, mesh: Mesh = ALONE, *, packs: bool = True, **options: Any) -> str:
    """Why the model is refused, or nothing."""
    tokens = torch.randint(V, (2, 8), generator=torch.Generator().manual_seed(0))
    sample = (tokens, torch.arange(8).expand(2, 8), torch.zeros_like(tokens))
    settings = ParallelOptions(**{"precision": "float64", "sample": sample} | options)
    subject = Subject(
        model=model,
        layout=mesh.layout,
        mesh=mesh,
        options=settings,
        packs_documents=packs,
        terms=seen_terms,
    )
    state = torch.get_rng_state()
    problem = ""
    try:
        check_model(Moment.PLAIN, subject)
    except AgreedError as error:
        problem = str(error)
    assert torch.equal(torch.get_rng_state(), state)
    assert needs_sample(replace(subject, layout=Layout({}))) == (packs and subject.compares)
    return problem


@pytest.mark.parametrize("way", CLEAN)
def test_documents_that_do_not_see_each_other_are_accepted(way: Layer) -> None:
    assert check(Model(way)) == ""
    assert check(Model(way, lambda places: places[..., None])) == ""


@pytest.mark.parametrize("way", LEAKS)
def test_a_document_that_sees_another_is_refused(way: Layer) -> None:
    problem = check(Model(way))
    for words in (
        "data.mask_documents: the model computes something else for a document if another is "
        "before it in its row: layers.0: output 0 differs by",
        "use data.mask_documents: false, or leave this check out by parallel.verify: false",
    ):
        assert words in problem
    assert check(Model(way), packs=False) == ""
    assert check(Model(way), verify=False) == ""


def test_what_lies_between_blocks_counts() -> None:
    def of_the_row(places: Tensor) -> Tensor:
        return torch.arange(places.shape[1], dtype=torch.float64)[:, None]

    assert "layers.0: input 0 differs" in check(Model(each_token, of_the_row))


def test_what_cannot_be_compared_is_left_alone() -> None:
    assert check(Model(of_half_lengths_alone)) == ""
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    places = torch.arange(8).expand(2, 8)
    leaks = Model(convolution)
    for sample in (None, (tokens, places, None)):
        assert check(leaks, sample=sample) == "", "no documents"
    single = tokens[:, :1]
    assert check(leaks, sample=(single, single, single)) == ""
    odd = tokens[:, :3]
    assert "layers.0: output 0" in check(leaks, sample=(odd, places[:, :3], odd))


def test_frozen_models_and_models_of_ours() -> None:
    frozen = Model(recurrent).requires_grad_(False)
    assert "layers.0: output 0 differs" in check(frozen)
    assert check(small_llama()) == "", "is not compared"
    assert check(small_llama(), verify=True) == ""


def test_a_model_gets_documents_as_in_training() -> None:
    """As an AttentionContext if it has a cp_plan; numbers from 0, and positions from 0 in each."""
    seen = []

    def look(layer: Mixer, x: Tensor, positions: Tensor, documents: Any) -> Tensor:
        seen.append((positions.tolist(), documents))
        return x

    check(Model(look))
    (packed, documents), (alone, one) = seen[:2]
    assert packed == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert alone == [[0, 1, 2, 3]]
    assert documents.tolist() == [[0] * 4 + [1] * 4]
    assert len(set(one.flatten().tolist())) == 1

    seen.clear()
    check(Model(look), cp_plan={"layers.*": "attention"})
    assert [type(given) for _, given in seen] == [AttentionContext] * 2
    assert seen[0][1].lengths.tolist()[:3] == [0, 4, 8]


@pytest.mark.ranks(2)
def test_ranks_agree(job: Job) -> None:
    mesh = build_mesh(Layout({"dp_replicate": job.world_size}))
    assert "layers.0: output 0 differs" in check(Model(recurrent), mesh)
    assert check(Model(ours), mesh) == ""


# Whole runs --------------------------------------------------------------------------------------


def start(folder: Path, config: str | Path, *keys: str) -> Finished:
    """A run of one step, in one process."""
    shared = ("data.mask_documents=true", "train.steps=1", f"data.cache={folder / 'cache'}")
    output = f"train.output={folder / 'run'}"
    return forked(1, "-m", "meshtrain.train", config, *shared, output, *keys)


def test_a_run_of_one_process_is_refused_before_its_first_step(tmp_path: Path) -> None:
    keys = (*SMALL, "train.steps=1", f"model.name={MODELS / 'mixing.py'}")
    refused = start(tmp_path, QUICKSTART, *keys)
    assert refused.status == 2
    assert refused.err.count("if another is before it in its row: blocks_.0: input 0 differs") == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    for number, way_out in enumerate(("data.mask_documents=false", "parallel.verify=false")):
        output = f"train.output={tmp_path / str(number)}"
        start(tmp_path, QUICKSTART, *keys, output, way_out).check()


TINY = {
    "mamba": "{hidden_size: 32, num_hidden_layers: 2, state_size: 4, vocab_size: 256}",
    "llama": "{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 256}",
}


@pytest.mark.parametrize("family", TINY)
def test_classes_of_transformers(family: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{name: transformers, model_type: {family}, config: {TINY[family]}}}\n"
        "data: {source: python-stdlib, tokenizer: bytes, seq_len: 64, workers: 0}\n"
        "batch: {global_size: 2, micro_size: 2}\n"
        "train: {sample_tokens: 0, eval_every: 0}\n"
    )
    done = start(tmp_path, config)
    if family == "llama":
        done.check()
    else:
        assert done.status == 2
        assert "before it in its row: backbone.layers.0: output 0 differs by" in done.err
