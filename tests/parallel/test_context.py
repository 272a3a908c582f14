"""Attention over sequences that lie in parts on several processes, against one process's attention."""

import os

import pytest
import torch

from meshtrain.data.batch import Batch
from meshtrain.generate import generate
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.parallel.context import ContextParallel, visible_spans
from meshtrain.parallel.context.attention import Exchange
from models import llama
from tests.launching import torchrun
from tests.properties import given, st

GPUS = torch.cuda.device_count()
SHARED = GPUS > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"  # a GPU hosts several ranks: NCCL 2.30


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2 and not SHARED, reason="needs 2 GPUs, or one and NCCL_MULTI_RANK_GPU_ENABLE=1")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [world for world in (2, 4) if world <= max(GPUS, 2) or SHARED])
def test_every_way_computes_the_same_on_gpus(world: int) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS))))
    environment = {"CUDA_VISIBLE_DEVICES": visible}
    torchrun(world, "-m", "tests.parallel.test_context_attention", timeout=800, env=environment).check()


@pytest.mark.parametrize("stages", [[(2, 3, 0)], [(2,), (3,), (0,)]], ids=["gather", "ring"])
def test_gradients_are_added_in_one_order(stages: list[tuple[int, ...]]) -> None:
    """Whether they come together or one after the other: these addends have another sum in another order."""
    like = torch.zeros(1, 1, 2, 1)
    exchange = Exchange(like, like, None, torch.zeros(2, 8, dtype=torch.int64), (), "", "ring", 1.0, None, None)
    exchange.size, exchange.index, exchange.own, exchange.first = 4, 1, (1, 6), [0] * 8
    values = [1.0, 1e20, -1e20, 3.0]

    class Arrived:
        """What the others of a stage have sent."""

        def __init__(self, ranks: tuple[int, ...]) -> None:
            self.ranks = ranks

        def wait(self) -> list[torch.Tensor]:
            counts = [len(range(2)[exchange._halves(j, 1)]) * (j in self.ranks) for j in range(4)]
            return [torch.full((n, 1, 1, 1, 1), values[j], dtype=torch.float64) for j, n in enumerate(counts)]

    exchange.gradient = torch.full((2, 1, 1, 1, 1), values[1], dtype=torch.float64)
    for ranks in stages:
        exchange.going_home = Arrived(ranks)  # type: ignore[assignment]
        exchange._add_arrived()
    first, second = exchange.gradient.flatten().tolist()
    assert first == ((values[1] + values[2]) + values[3]) + values[0] == 4.0
    assert second == values[1] + values[0], "the other ranks' queries do not see it"


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=9), min_size=1, max_size=3), st.integers(1, 5))
def test_spans_say_what_the_queries_of_a_chunk_see(rows: list[list[int]], parts: int) -> None:
    whole = [[n for n, count in enumerate(row) for _ in range(count)] for row in rows]
    m = -(-max(map(len, whole)) // (2 * parts))
    documents = [row + [99] * (2 * parts * m - len(row)) for row in whole]
    first, last = visible_spans(torch.tensor(documents), 2 * parts).tolist()
    for y in range(2 * parts):
        queries = range(y * m, (y + 1) * m)
        assert first[y] == min(k for row in documents for q in queries for k in range(q + 1) if row[k] == row[q])
        all_seen = all(row[k] == row[q] for row in documents for q in queries for k in range(first[y], q + 1))
        assert (last[y] <= first[y]) == all_seen


def test_a_document_that_returns_may_be_seen_from_everywhere() -> None:
    assert visible_spans(torch.tensor([[0, 1, 1, 0], [0, 0, 1, 2]]), 2).tolist() == [[0, 0], [4, 4]]
    assert visible_spans(None, 2).tolist() == [[0, 0], [0, 0]]


def test_without_cp_nothing_changes() -> None:
    cp = ContextParallel(build_mesh(Layout({})))
    tokens = torch.arange(7).view(1, 7)
    batch = Batch.of((tokens, tokens, None), tokens)
    assert cp.shard(batch) is batch
    assert cp.positions(7).tolist() == list(range(7))
    assert cp.owner(5, 7) == (0, 5)


def test_without_cp_a_text_needs_no_group() -> None:
    """A loop of one's own may always make a `ContextParallel`."""
    mesh = build_mesh(Layout({}))
    config = llama.Config(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    arguments = {"seq_len": 8, "device": torch.device("cpu"), "seed": 1, "context": ContextParallel(mesh)}
    assert len(generate(llama.Model(config), [1, 2], 3, **arguments)) == 5
