"""Experts of transformers' classes: as the class computes them, and over ranks as in one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshtrain
from meshtrain.huggingface.experts import adopt_experts, plan_without_experts
from meshtrain.job.process import Job
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.loss import Field, GlobalCount, StepTerms, sample_losses, split_fields
from meshtrain.mesh import Mesh
from meshtrain.parallel.expert import dispatched_modules
from meshtrain.parallel.grad_sync import set_is_last_backward
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear.weight_grad import WeightGradQueue, run_weight_grads
from meshtrain.parallel.torch_private import to_local
from tests.comparing import ALONE, CPU, B, S, compare, gradients, same, same_gradients, tokens
from tests.huggingface.families import FAMILIES, Model, causal_lm, tp_plan
from tests.ranks import row

each_family = pytest.mark.parametrize("family", FAMILIES)


def slow(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


@each_family
def test_experts_compute_what_their_class_does(family: str) -> None:
    """Also its gradients."""
    theirs, ours = (causal_lm(family).double() for _ in range(2))
    theirs.set_experts_implementation("eager")
    plan = adopt_experts(ours)
    assert set(plan.values()) == {"ep_dispatch_experts"}
    expected, actual = (model(input_ids=tokens()).logits for model in (theirs, ours))
    # The class sums a token's experts in another order.
    same(actual, expected, tolerance=1e-9)
    for logits in (expected, actual):
        logits.square().sum().backward()
    same_gradients(ours, gradients(theirs), tolerance=1e-9)


LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    "dp_shard, ep 2": ({"dp_shard": 2}, 2),
    "dp_shard": ({"dp_shard": 2}, 1),
    "dp_replicate, ep 2": ({"dp_replicate": 2}, 2),
    "tp, ep 2": ({"tp": 2}, 2),
    "tp": ({"tp": 2}, 1),
}


def options_of(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    plans: dict[str, Any] = {"ep_plan": model.ep_plan}
    if mesh.size("tp") > 1:
        plans |= {"tp_plan": tp_plan(model), "sequence_parallel": False, "verify": False}
    return plans


@pytest.mark.parametrize(
    ("job", "sizes", "ep"),
    [row(2, sizes, ep, name=name.replace(" ", "")) for name, (sizes, ep) in LAYOUTS.items()],
    indirect=["job"],
)
@each_family
def test_a_step_is_that_of_one_process(
    job: Job, sizes: dict[str, int], ep: int, family: str
) -> None:
    mesh = meshtrain.build_mesh(Layout(sizes).with_experts(ep))
    options = options_of(Model(family), mesh)
    model, _ = compare(lambda: Model(family), mesh, steps=2, microbatches=2, **options)
    assert len(dispatched_modules(model)) == (len(model.ep_plan) if ep > 1 else 0)
    for name, parameter in model.named_parameters():
        # An optimizer goes over the memory of both.
        assert to_local(parameter.grad).stride() == to_local(parameter).stride(), name


@pytest.mark.parametrize(
    ("job", "sizes", "ep"),
    [
        row(4, {"dp_shard": 2, "tp": 2}, 4, name="ep4"),
        row(4, {"dp_shard": 2, "tp": 2}, 2, name="ep2"),
        row(4, {"tp": 4}, 2, name="ep2-of-tp4"),
    ],
    indirect=["job"],
)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_ranks_of_tp_with_the_same_tokens_share_the_rows(
    job: Job, sizes: dict[str, int], ep: int, recompute: str
) -> None:
    mesh = meshtrain.build_mesh(Layout(sizes).with_experts(ep))
    options = options_of(Model("gpt_oss"), mesh)
    keys = {"num_key_value_heads": 4, "num_local_experts": 5}
    compare(lambda: Model("gpt_oss", **keys), mesh, microbatches=2, recompute=recompute, **options)


def train_step(model: nn.Module, mesh: Mesh, data_ranks: list[int]) -> float:
    """Two microbatches of each of these data ranks, in which the last sample is padding; gradients
    are left in the model. Returns the balance."""
    count = GlobalCount(len(data_ranks) * 2 * (B - 1) * S, mesh, CPU)
    terms = StepTerms(count)
    calls = [(rank, microbatch) for rank in data_ranks for microbatch in range(2)]
    for rank, microbatch in calls:
        set_is_last_backward(model, (rank, microbatch) == calls[-1])
        inputs = tokens(rank, microbatch)
        with terms.of_microbatch(B, B - 1):
            losses = sample_losses(model(inputs), inputs)[: B - 1]
            count.mean(losses.sum()).backward()
    fields = sorted(terms.sums)
    sums = mesh.sum(terms.stack(fields)) if mesh.size(*DATA_AXES) > 1 else terms.stack(fields)
    totals = split_fields(sums, fields)
    terms.receive(totals, torch.tensor(False))
    return float(count.mean(totals[Field("loss", "balance")]))


@pytest.mark.parametrize(
    ("job", "sizes", "ep"),
    [
        row(2, {"dp_shard": 2}, 2, name="dp_shard"),
        row(2, {"dp_replicate": 2}, 2, name="dp_replicate", slow=True),
        row(2, {"tp": 2}, 2, name="tp"),
    ],
    indirect=["job"],
)
@pytest.mark.parametrize("kind", ["batch", "sequence"])
@pytest.mark.parametrize(
    "family", ["mixtral", "gpt_oss", *(slow(family) for family in ("qwen3_moe", "olmoe"))]
)
def test_the_balance_is_the_same_on_every_layout(
    job: Job, sizes: dict[str, int], ep: int, kind: str, family: str
) -> None:
    mesh = meshtrain.build_mesh(Layout(sizes).with_experts(ep))
    plain = Model(family, kind).double()
    model = Model(family, kind)
    options = options_of(model, mesh)
    meshtrain.parallelize(model, mesh, precision="float64", recompute="full", **options)
    own, every = mesh.index(*DATA_AXES), list(range(mesh.size(*DATA_AXES)))
    for _ in range(2):  # the loads of the first step are those of the second
        plain.zero_grad()
        model.zero_grad()
        expected = train_step(plain, ALONE, every)
        same(torch.tensor(train_step(model, mesh, [own])), torch.tensor(expected), "balance")
        same_gradients(model, gradients(plain))
    for name, loads in plain.named_parameters():
        if name.endswith("loads"):
            assert loads.sum() == len(every) * 2 * (B - 1) * S * 2


def test_the_balance_has_the_scale_of_the_class() -> None:
    """One layer, one sample, its own loads: the class's formula."""
    model = Model("mixtral", "sequence", num_hidden_layers=1).double()
    inputs = tokens()[:1]
    terms = StepTerms(GlobalCount(S, ALONE, CPU))
    with terms.of_microbatch(1, 1):
        model(inputs)
    balance = terms.sums[Field("loss", "balance")]
    output = model.plain(input_ids=inputs, output_router_logits=True, labels=inputs)
    same(balance[0] / S, 2 * output.aux_loss, tolerance=1e-6)  # theirs is in float32


def test_without_the_key_there_is_no_balance() -> None:
    assert not any(name.endswith("loads") for name, _ in Model("mixtral").named_parameters())
    deepseek = Model("deepseek_v3", "batch")  # its class adds no term
    assert not any(name.endswith("loads") for name, _ in deepseek.named_parameters())


def test_a_tp_plan_keeps_its_words_for_other_layers() -> None:
    model = causal_lm("deepseek_v3")
    plan = plan_without_experts(model, adopt_experts(model), model.tp_plan)
    assert not any(".experts" in pattern for pattern in plan)
    assert plan["model.layers.*.mlp.shared_experts.gate_proj"] == "colwise"
    assert plan["model.layers.*.mlp.gate_proj"] == "colwise"  # of the dense layers


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_weight_gradients_may_wait(family: str) -> None:
    at_once, later = (Model(family).double() for _ in range(2))
    queue = WeightGradQueue()
    use_products(later, queue=queue)
    at_once(tokens()).square().sum().backward()
    with queue.record() as deferred:
        later(tokens()).square().sum().backward()
    experts = later.plain.model.layers[0].mlp.experts
    assert experts.gate_up_proj.grad is None
    run_weight_grads(deferred)
    same_gradients(later, gradients(at_once))


def test_padding_counts_for_no_expert_and_gets_no_bias() -> None:
    model = Model("gpt_oss").double()
    outputs: list[Tensor] = []
    counts: list[Tensor] = []
    for layer in model.plain.model.layers:
        layer.mlp.experts.register_forward_hook(lambda *call: outputs.append(call[2]))
        layer.mlp.experts.dispatch = lambda rows, n, products: counts.append(n) or products(rows, n)
    terms = StepTerms(GlobalCount((B - 1) * S, ALONE, CPU))
    with terms.of_microbatch(B, B - 1):
        model(tokens())
    for output, of_experts in zip(outputs, counts, strict=True):
        assert not output.view(B, S, -1)[-1].any()
        assert output.view(B, S, -1)[0].any()
        assert of_experts.sum() == (B - 1) * S * 2
