"""Blocks that run again in backward draw the random numbers that they drew before."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from meshtrain.config.locate import model_file
from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.metrics.logger import read
from meshtrain.parallel import parallelize as apply
from meshtrain.parallel.activation_checkpoint import ATTENTION, _policy
from meshtrain.parallel.parallelize import ParallelOptions, apply_data_parallel, parallelize
from tests.parity.cells import train
from tests.parity.experiments import QUICKSTART, Experiment

MODELS = Path(__file__).parents[1] / "models"


def drawn_steps(recompute: str, compile: bool = False) -> list[Tensor]:
    """Outputs and gradients of a model that drops by torch's generator in three ways, of microbatches two of which are
    under way at once, as in a pipeline."""
    torch.manual_seed(0)
    file = model_file(str(MODELS / "functional_dropout.py"))
    model = parallelize(
        file.Model(file.Config(vocab_size=30)), build_mesh(Layout({})), recompute=recompute, compile=compile
    )
    torch.manual_seed(3)
    tokens = torch.randint(0, 30, (4, 2, 6), generator=torch.Generator().manual_seed(1))
    outputs = [model(tokens[0])]
    for following in tokens[1:]:
        outputs.append(model(following))
        outputs[-2].square().sum().backward()
    outputs[-1].square().sum().backward()
    return [*(output.detach() for output in outputs), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize(("recompute", "compile"), [("full", False), ("selective", False), ("full", True)])
def test_a_block_that_runs_again_draws_the_same(recompute: str, compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """F.dropout, attention's own and nn.Dropout: neither a gradient nor what is drawn afterwards may tell."""
    # The partitioner that decides what runs again, without the seconds of generating code.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    expected = drawn_steps("none", compile)
    assert len({float(x.double().sum()) for x in expected[:4]}) == 4
    rounding = {"rtol": 1e-5, "atol": 1e-6} if compile else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(drawn_steps(recompute, compile), expected, **rounding)


def test_recomputation_in_a_pipeline_draws_the_same(tmp_path: Path) -> None:
    """With microbatches under way whose backwards come in another order than their forwards."""
    keys = (
        f"model={{name: {MODELS / 'functional_dropout.py'}}}",
        "data.seq_len=16",
        "data.workers=0",
        "batch.global_size=6",
        "batch.micro_size=2",
        "train.steps=3",
        "train.eval_every=0",
        "train.sample_tokens=0",
        "pipeline.schedule=zbv",
    )
    drawn = Experiment("drawn", QUICKSTART, keys, 0)
    kinds = ("none", "full", "selective")
    train(tmp_path, 2, [(drawn, kind, "{pp: 2}", (f"parallel.recompute={kind}",)) for kind in kinds])
    none, *others = ([(r["loss"], r["grad_norm"]) for r in read(tmp_path / kind / "metrics.jsonl")] for kind in kinds)
    assert len(set(none)) == 3
    assert others == [none, none]


class WritingBlock(nn.Module):
    """Writes to results of products: where torch notices, through views of which it knows nothing (a GRU), or both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.relu, self.gru = nn.ReLU(inplace=True), nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.relu(self.a(x)))
        y[..., ::2].mul_(2)
        y += x
        return x + self.gru(y.sigmoid_())[0]


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_recomputed_block_may_write_to_its_activations(recompute: str) -> None:
    def gradients(recompute: str) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), WritingBlock())
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        model.blocks = lambda: list(model)
        parallelize(model, build_mesh(Layout({})), precision="float64", recompute=recompute)
        model(torch.randn(2, 3, 4, dtype=torch.float64)).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    torch.testing.assert_close(gradients(recompute), gradients("none"), rtol=0, atol=0)


def test_attention_that_draws_is_run_again() -> None:
    """A GPU's kernel draws inside; were its result kept, the dropouts behind it would draw from another state."""
    for operator, position in ATTENTION.items():
        assert operator._schema.arguments[position].name == "dropout_p"
        before = [None] * position
        runs_again = [_policy(None, operator, *before, 0.1), _policy(None, operator, dropout_p=0.1)]
        is_kept = [_policy(None, operator, *before, 0.0), _policy(None, operator, *[None] * 3)]  # a default is left out
        assert set(runs_again) == {CheckpointPolicy.PREFER_RECOMPUTE}
        assert set(is_kept) == {CheckpointPolicy.MUST_SAVE}


def test_torchs_own_dropout_is_refused_where_ranks_of_tp_have_the_same_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apply, "sum_partial_gradients", lambda *_, **__: None)  # here is no other rank
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    mesh = Mesh(Layout({"tp": 2}), 0, "cpu", None, {})
    with pytest.raises(InputError, match="1 is a Dropout, whose mask each rank of tp would draw for itself"):
        apply_data_parallel(model, mesh, ParallelOptions(sequence_parallel=False))
    apply_data_parallel(model, mesh, ParallelOptions(sequence_parallel=True))
    apply_data_parallel(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), mesh, ParallelOptions(sequence_parallel=False))
