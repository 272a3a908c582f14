"""Blocks that run again in backward draw the random numbers that they drew before."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.parallel.activation_checkpoint import _policy, checkpoint_block
from meshtrain.parallel.options import ParallelOptions
from meshtrain.parallel.parallelize import parallelize
from meshtrain.parallel.torch_private import ATTENTION_DROPOUT
from meshtrain.parallel.verify import Moment, Subject, check_model
from tests.comparing import ALONE


class Uncalled(nn.Module):
    """Its block is a list, of which it calls the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def blocks(self) -> list[nn.Module]:
        return [self.layers]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


class Dropping(nn.Module):
    """A block with every kind of dropout but meshtrain's: functional, in attention, torch's
    module."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, d) -> (b, s, d)."""
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3)[:, 0]
        x = x + F.dropout(self.out(y), 0.3)
        return x + self.dropout(torch.tanh(x))


def test_without_recomputation_a_block_keeps_its_forward() -> None:
    block = Dropping()
    assert checkpoint_block(block.forward, "none") == block.forward


def drawn_steps(recompute: str, compile: bool) -> list[Tensor]:
    """Outputs and gradients of microbatches three of which are under way at once, as in a pipeline,
    and whose backwards come in another order than their forwards."""
    torch.manual_seed(0)
    model = nn.Sequential(Dropping(), Dropping())
    model.blocks = lambda: list(model)
    parallelize(model, ALONE, recompute=recompute, compile=compile)
    inputs = torch.randn(4, 2, 6, 8)
    outputs = [model(microbatch) for microbatch in inputs[:3]]
    outputs[1].square().sum().backward()
    outputs.append(model(inputs[3]))
    for i in (0, 3, 2):
        outputs[i].square().sum().backward()
    return [
        *(output.detach() for output in outputs),
        *(parameter.grad for parameter in model.parameters()),
    ]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_block_that_runs_again_draws_the_same(
    recompute: str, compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F.dropout, attention's own and nn.Dropout: neither a gradient nor what is drawn afterwards
    may tell."""
    # The partitioner that decides what runs again, without the seconds of generating code.
    monkeypatch.setattr(
        torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition")
    )
    expected = drawn_steps("none", compile)
    assert len({float(x.double().sum()) for x in expected[:4]}) == 4
    rounding = {"rtol": 1e-5, "atol": 1e-6} if compile else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(drawn_steps(recompute, compile), expected, **rounding)


class WritingBlock(nn.Module):
    """Writes to results of products: where torch notices, through views of which it knows nothing
    (a GRU), or both."""

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
        parallelize(model, ALONE, precision="float64", recompute=recompute)
        model(torch.randn(2, 3, 4, dtype=torch.float64)).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    torch.testing.assert_close(gradients(recompute), gradients("none"), rtol=0, atol=0)


def test_attention_that_draws_is_run_again() -> None:
    """A GPU's kernel draws inside; were its result kept, the dropouts behind it would draw from
    another state."""
    for operator, position in ATTENTION_DROPOUT.items():
        assert operator._schema.arguments[position].name == "dropout_p"
        before = [None] * position
        runs_again = [_policy(None, operator, *before, 0.1), _policy(None, operator, dropout_p=0.1)]
        # a default is left out
        is_kept = [
            _policy(None, operator, *before, 0.0),
            _policy(None, operator, *[None] * 3),
        ]
        assert set(runs_again) == {CheckpointPolicy.PREFER_RECOMPUTE}
        assert set(is_kept) == {CheckpointPolicy.MUST_SAVE}


def test_torchs_own_dropout_is_refused_where_ranks_of_tp_have_the_same_activations() -> None:
    mesh = Mesh(Layout({"tp": 2}), 0, "cpu", None, {})
    plan = {"0": "embedding_rowwise_sequence", "1": "colwise_logits"}

    def check(p: float, *, sequence_parallel: bool) -> None:
        model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4), nn.Dropout(p))
        options = ParallelOptions(tp_plan=plan, sequence_parallel=sequence_parallel, verify=False)
        subject = Subject(model=model, layout=mesh.layout, mesh=mesh, options=options)
        check_model(Moment.PLAIN, subject)

    with pytest.raises(
        InputError, match="2 is a Dropout, whose mask each rank of tp would draw for itself"
    ):
        check(0.5, sequence_parallel=False)
    check(0.5, sequence_parallel=True)
    check(0.0, sequence_parallel=False)


def test_a_block_that_is_never_called_is_said_not_to_be_recomputed() -> None:
    with pytest.warns(
        UserWarning, match="names a ModuleList, which has no forward: it is neither recomputed nor"
    ):
        parallelize(Uncalled(), ALONE, recompute="full")
