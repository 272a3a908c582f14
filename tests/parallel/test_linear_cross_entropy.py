"""The loss without logits, against plain cross entropy in float64; which models have it; what
memory it takes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshtrain.config import Config
from meshtrain.data.batch import IGNORE, Batch
from meshtrain.evaluate import evaluate
from meshtrain.loss import sample_losses
from meshtrain.modeling import build
from meshtrain.parallel import linear_cross_entropy
from meshtrain.parallel.cross_entropy import CROSS_ENTROPY, LossOptions, losses_and_gradient
from meshtrain.parallel.linear import use_products
from meshtrain.parallel.linear.weight_grad import WeightGradQueue
from meshtrain.parallel.linear_cross_entropy import (
    LossHead,
    LossRequest,
    WeightGradSum,
    can_fuse,
    fuse_loss,
    request_loss,
)
from meshtrain.parallel.options import ParallelOptions
from meshtrain.parallel.verify import checks
from meshtrain.pipeline.engine import Pipeline
from meshtrain.pipeline.schedule import build as schedule
from meshtrain.trainer import StepResult
from tests.comparing import ALONE, CPU, Peak, trainer_of
from tests.parity.experiments import EXPERT_MODELS, QUICKSTART

B, S, D, V = 3, 8, 6, 11
MODELS = Path(__file__).parents[1] / "models"


@pytest.fixture(autouse=True)
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens of a chunk: 7, unless a test says how many."""
    size = getattr(request, "param", 7)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_TOKENS", size)
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_LOGITS", 0)
    return size


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, nn.Linear, Tensor]:
    """Inputs (b, s, d), a head, and targets: some are ignored, among them the whole second chunk of
    7."""
    torch.manual_seed(0)
    x, layer, targets = torch.randn(B, S, D), nn.Linear(D, V, bias=False), torch.randint(V, (B, S))
    layer.weight.data.mul_(5)
    targets.view(-1)[7:14] = IGNORE
    targets[0, 2] = IGNORE
    return x.to(dtype).requires_grad_(), layer.to(dtype), targets


def request(
    targets: Tensor,
    factor: float | None = 1.0,
    total: WeightGradSum | None = None,
    options: LossOptions = CROSS_ENTROPY,
) -> LossRequest:
    wide = None if factor is None else partial(torch.tensor, factor, dtype=torch.float64)
    return LossRequest(lambda: targets, wide, total, options)


def fused(
    x: Tensor,
    layer: nn.Linear,
    targets: Tensor,
    factor: float = 1.0,
    options: LossOptions = CROSS_ENTROPY,
) -> LossRequest:
    """Forward and backward of the loss without logits."""
    fuse_loss(layer, compiled=False)
    with request_loss(request(targets, factor, options=options)) as answered:
        output = layer(input=x)
    output.backward()
    assert answered.losses_of(output) is not None
    return answered


def with_logits(
    x: Tensor,
    layer: nn.Linear,
    targets: Tensor,
    factor: float = 1.0,
    options: LossOptions = CROSS_ENTROPY,
) -> tuple[Tensor, list[Any]]:
    """Losses, and gradients of the input and the weight, which are taken away."""
    losses = sample_losses(layer(x), targets, options.label_smoothing, options.z_loss)
    (losses.sum() * factor).backward()
    return losses.detach(), gradients(x, layer.weight)


def gradients(*tensors: Tensor) -> list[Any]:
    """Which are taken away."""
    grads = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return grads


assert_close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 7, B * S, 100], indirect=True)
@pytest.mark.parametrize("ignored", [False, True], ids=["some", "all ignored"])
@pytest.mark.parametrize("frozen", ["nothing", "x", "weight"])
@pytest.mark.parametrize("options", [CROSS_ENTROPY, LossOptions(0.1, 0.01)], ids=str)
def test_losses_and_gradients_are_those_of_logits(
    chunk: int, ignored: bool, frozen: str, options: LossOptions
) -> None:
    """In float64, with a factor as float16's, for every size of a chunk."""
    x, layer, targets = tensors()
    factor = 65536 / 17
    x.requires_grad_(frozen != "x")
    layer.weight.requires_grad_(frozen != "weight")
    if ignored:
        targets[:] = IGNORE
    losses, expected = with_logits(x, layer, targets, factor, options)
    answered = fused(x, layer, targets, factor, options)
    assert_close(answered.losses, losses)
    assert_close(answered.output, losses.sum() * factor)
    assert_close(gradients(x, layer.weight), expected)
    with torch.no_grad(), request_loss(request(targets, None, options=options)) as answered:
        layer(x)
    assert_close(answered.losses, losses)
    assert_close(layer(x), F.linear(x, layer.weight))  # without a request


def test_logits_whose_exponentials_no_number_holds_and_a_sample_that_is_no_number() -> None:
    x, layer, targets = tensors()
    layer.weight.data.mul_(10_000)
    losses, _ = with_logits(x, layer, targets)
    assert_close(fused(x, layer, targets).losses, losses)
    x.data[1, -1, 0] = torch.nan
    assert fused(x, layer, targets).losses.isfinite().tolist() == [True, False, True]  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [CROSS_ENTROPY, LossOptions(0.1, 0.01)], ids=str)
def test_sixteen_bits_are_no_further_from_the_truth_than_with_logits(
    dtype: torch.dtype, options: LossOptions
) -> None:
    """Logits in 16 bits, losses in float32; a weight gradient over many chunks is summed in
    float32."""
    x, layer, targets = tensors(dtype)
    losses, grads = with_logits(x, layer, targets, 100.0, options)
    answered = fused(x, layer, targets, 100.0, options)
    assert answered.losses is not None
    assert answered.losses.dtype == torch.float32
    narrow = answered.losses, *gradients(x, layer.weight)
    wide_layer = nn.Linear(D, V, bias=False, dtype=torch.float64)
    wide_layer.weight.data.copy_(layer.weight)
    wide_x = x.detach().double().requires_grad_()
    wide, wide_grads = with_logits(wide_x, wide_layer, targets, 100.0, options)
    for ours, plain, exact in zip(narrow, (losses, *grads), (wide, *wide_grads), strict=True):
        error, known = ((found.double() - exact).norm() / exact.norm() for found in (ours, plain))
        assert error <= 1.5 * known + 1e-6


def test_a_layer_whose_gradients_may_be_put_off_has_them_at_once() -> None:
    x, layer, targets = tensors()
    _, expected = with_logits(x, layer, targets)
    queue = WeightGradQueue()
    use_products(layer, queue=queue)
    assert can_fuse(layer)
    with queue.record() as deferred:
        fused(x, layer, targets)
    assert not deferred
    assert_close(gradients(x, layer.weight), expected)


def test_a_backward_of_something_else_is_refused() -> None:
    x, layer, targets = tensors()
    fuse_loss(layer, False)
    with request_loss(request(targets)):
        output = layer(x)
    with pytest.raises(RuntimeError, match="made in the forward"):
        (2 * output).backward()
    with request_loss(request(targets)):
        output = layer(x)
    output.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        output.backward()


@pytest.mark.parametrize(
    "around", [None, False, True], ids=["plain", "checkpoint", "reentrant checkpoint"]
)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)], ids=str)
def test_forwards_that_run_before_backwards_have_one_gradient_of_the_weight(
    order: tuple[int, ...], around: bool | None
) -> None:
    x, layer, targets = tensors()
    inputs = [(x * (i + 1)).detach().requires_grad_() for i in range(3)]
    for each in inputs:
        sample_losses(layer(each), targets).sum().backward()
    expected = gradients(layer.weight, *inputs)
    fuse_loss(layer, False)
    call = layer if around is None else partial(checkpoint, layer, use_reentrant=around)
    total, outputs = WeightGradSum(), []
    for each in inputs:
        with request_loss(request(targets, total=total)) as answered:
            outputs.append((call(each), answered))
    for i in order:
        output, answered = outputs[i]
        with request_loss(answered):
            output.backward()
    assert_close(gradients(layer.weight, *inputs), expected)


def test_a_hook_on_the_weight_sees_the_gradient_of_each_forward() -> None:
    x, layer, targets = tensors()
    fuse_loss(layer, False)
    grads: list[Tensor] = []
    layer.weight.register_hook(grads.append)
    total, outputs = WeightGradSum(), []
    for factor in (1.0, 2.0):
        with request_loss(request(targets, factor, total)):
            outputs.append(layer(x))
    for output in outputs:
        output.backward()
    torch.testing.assert_close(2 * grads[0], grads[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.01)])
def test_the_pass_over_a_chunk_is_one_graph(
    dtype: torch.dtype, label_smoothing: float, z_loss: float
) -> None:
    """As the compiler is given it, by its own tracing of the backward, which needs no GPU."""
    x, layer, targets = tensors(dtype)
    logits, arguments = (
        layer(x).detach().flatten(0, 1),
        (targets.flatten(), torch.tensor(0.5), 0, None),
    )
    compiled = torch.compile(
        losses_and_gradient, dynamic=False, backend="aot_eager", fullgraph=True
    )
    options = {"vocabulary": V, "label_smoothing": label_smoothing, "z_loss": z_loss}
    results = compiled(logits.clone(), *arguments, **options)
    torch.testing.assert_close(results, losses_and_gradient(logits.clone(), *arguments, **options))


# Which models -------------------------------------------------------------------------------------

SMALL = (
    *(
        "model.hidden_size=16",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=2",
        "data.seq_len=12",
    ),
    *("model.num_key_value_heads=2", "model.intermediate_size=24", "model.vocab_size=300"),
)
CHANGES = (  # of tests/models/between_blocks.py
    *(
        "inside",
        "cap",
        "eval",
        "bias",
        "loss",
        "twice",
        "in place of logits",
        "other loss",
        "loss of training",
    ),
    *("gradient", "gradient of outputs", "forward", "hook", "hook in place", "fails"),
)


def load(*overrides: str) -> Config:
    return Config.load(QUICKSTART, [*SMALL, *overrides], world_size=1, for_training=True)


def has_loss_head(config: Config) -> bool:
    """Whether a run finds that its last layer may give the loss."""
    options = ParallelOptions(precision=config.train.precision)
    return build.judge(config, ALONE, options, build.plain_model(config)).fuse_loss


@pytest.mark.parametrize("name", ["llama", "qwen3", *EXPERT_MODELS])
def test_every_language_model_of_the_project_has_it(name: str) -> None:
    config = load(*EXPERT_MODELS.get(name, (f"model.name={name}",)))
    classifier = Config.load("configs/digits.yaml", [], world_size=1, for_training=True)
    assert has_loss_head(config)
    assert not has_loss_head(classifier)


@pytest.mark.parametrize(
    ("tweak", "precision", "has"),
    [
        ("none", "bfloat16", True),
        ("scale", "float32", True),  # of the embedding
        ("input by a hook", "float32", True),
        ("float", "float32", True),  # nothing happens
        ("float", "bfloat16", False),
        *((tweak, "float32", False) for tweak in CHANGES),
    ],
)
def test_a_model_that_does_more_with_its_logits_gives_them(
    tweak: str, precision: str, has: bool
) -> None:
    config = load(
        f"model.name={MODELS}/between_blocks.py",
        f"model.tweak={tweak}",
        f"train.precision={precision}",
    )
    assert has_loss_head(config) is has


def change_logits(head: nn.Module) -> None:
    head.register_forward_hook(lambda head, inputs, output: output.add_(1) and None)


def test_logits_that_something_unseen_takes_are_refused() -> None:
    """A block that calls the head would get a loss; a hook that comes later changes logits in
    place."""
    in_a_block, later = (
        Run(f"model.name={MODELS}/between_blocks.py", "model.tweak=in a block"),
        Run(),
    )
    later.step(1)
    change_logits(later.trainer.model.get_submodule("lm_head"))
    for run in (in_a_block, later):
        for action in (partial(run.step, 2), run.evaluate):
            with pytest.raises(RuntimeError, match="outside of blocks"):
                action()


# Steps and evaluations ----------------------------------------------------------------------------


class Run:
    """A small Llama in a world of one, as the command trains it."""

    def __init__(self, *overrides: str) -> None:
        self.trainer = trainer_of(
            load("batch.global_size=4", "batch.micro_size=2", *overrides), ALONE
        )

    def pipelined(self, microbatches: int) -> "Run":
        """With all forwards before all backwards."""
        plan = schedule("gpipe", ranks=1, microbatches=microbatches)
        self.trainer.model = Pipeline(
            {0: self.trainer.model}, plan, ALONE, CPU, parameter_stages={}
        )
        return self

    def batches(self, count: int = 2) -> list[Batch]:
        torch.manual_seed(1)
        batches = []
        for _ in range(count):
            tokens = torch.randint(300, (2, 12))
            targets = tokens.roll(-1, 1)
            targets[0, :5] = IGNORE
            positions = torch.arange(12).expand(2, 12)
            batches.append(Batch.of((tokens, positions, None), targets))
        batches[1].targets[1] = IGNORE
        return batches

    def step(self, number: int) -> StepResult:
        self.trainer.forward_backward(number, self.batches())
        return self.trainer.optimizer_step(number)()

    def watched(self, action: Callable[[], Any]) -> Peak:
        """The memory of what it makes."""
        with Peak(besides=self.trainer.model.parameters()) as peak:
            action()
        return peak

    def watched_step(self, microbatches: int = 2) -> Peak:
        batches = self.batches(microbatches)
        return self.watched(lambda: self.trainer.forward_backward(2, batches))

    def evaluate(self) -> float:
        return evaluate(self.trainer.model, self.batches(), ALONE, CPU, self.trainer.dtype).loss


@pytest.mark.parametrize("forwards_first", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["float64", "float16"])
@pytest.mark.parametrize("options", [(), ("train.label_smoothing=0.1", "train.z_loss=0.01")])
def test_steps_are_those_with_logits(
    tied: bool,
    precision: str,
    forwards_first: bool,
    options: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = (
        f"model.tie_word_embeddings={str(tied).lower()}",
        f"train.precision={precision}",
        *options,
    )
    run = Run(*keys)
    # wrapped by casts
    assert isinstance(run.trainer.model.lm_head.forward, LossHead) or precision == "float16"
    if forwards_first:  # after a step that was given up between a forward and its backward
        run.pipelined(2)
        batches = run.batches()
        batches[1].tensors["tokens"][0, 0] = 300  # type: ignore[index]  # there is no such word
        with pytest.raises(IndexError):
            run.trainer.forward_backward(1, batches)
    monkeypatch.setattr(checks, "gives_logits", lambda *_: False)
    known = Run(*keys)
    close = partial(pytest.approx, rel=1e-12 if precision == "float64" else 3e-3)
    for number in (1, 2, 3):
        step, expected = run.step(number), known.step(number)
        assert (step.loss, step.grad_norm) == (close(expected.loss), close(expected.grad_norm))
        assert (step.finite, step.correct) == (True, None)
    assert run.evaluate() == close(known.evaluate())


def test_evaluations_leave_smoothing_and_z_loss_out() -> None:
    plain, changed = Run(), Run("train.label_smoothing=0.1", "train.z_loss=0.01")
    assert changed.evaluate() == plain.evaluate()
    assert changed.step(1).loss > plain.step(1).loss, "what is trained and logged has them"


def test_a_sample_whose_loss_is_not_finite_is_named() -> None:
    run = Run()
    batches = run.batches()
    weight = run.trainer.model.model.embed_tokens.weight  # type: ignore[union-attr]
    weight.data[int(batches[1].inputs[0][0, -1])] = torch.nan  # type: ignore[operator]
    batches[0].tensors["tokens"].clamp_(0, 3)  # type: ignore[union-attr]
    batches[0].targets.clamp_(max=3)
    run.trainer.forward_backward(1, batches)
    result = run.trainer.optimizer_step(1)()
    assert (result.finite, 2 in result.bad_samples, 0 in result.bad_samples) == (False, True, False)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_tensor_of_tokens_times_vocabulary_exists(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in a step nor in an evaluation, which takes no more memory than a step."""
    keys = (
        f"train.precision={precision}",
        "model.vocab_size=20000",
        "model.hidden_size=8",
        "model.intermediate_size=8",
    )
    run = Run(*keys)
    logits = 2 * 12 * 20000  # of a microbatch
    run.step(1)  # the optimizer's state
    run.trainer.optimizer.zero_grad()
    step, evaluation = run.watched_step(), run.watched(run.evaluate)
    # At most a chunk in float32, or the weight's gradient.
    assert max(step.largest, evaluation.largest) <= 4 * 20000 * max(7, 8) < 2 * logits
    assert evaluation.bytes <= step.bytes
    few, many = (Run(*keys).pipelined(count).watched_step(count) for count in (2, 4))
    assert many.bytes - few.bytes < 4 * 20000 * 8, (
        "microbatches under way share the gradient of the weight"
    )
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_TOKENS", 24)
    assert run.watched(run.evaluate).largest >= 2 * logits, "the watch sees what it is to see"
