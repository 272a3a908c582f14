"""torch.compile of blocks: where it is chosen, how many graphs it makes, and what it runs again in
backward."""

import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from functorch.compile import (
    aot_module_simplified,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from meshtrain.config import Config
from meshtrain.data.batch import Batch
from meshtrain.job.locate import model_file
from meshtrain.modeling.build import compile_choice
from meshtrain.parallel import compile as compiling
from meshtrain.parallel import mixed_precision
from meshtrain.parallel import parallelize as parallelizing
from meshtrain.parallel.activation_checkpoint import _policy
from meshtrain.parallel.compile import CACHE, choose_compile, keep_compiled_code, missing_tools
from meshtrain.parallel.grad_sync import set_is_last_backward
from meshtrain.parallel.linear import Linear
from meshtrain.parallel.parallelize import parallelize
from meshtrain.parallel.torch_private import ATTENTION_DROPOUT
from tests.comparing import ALONE, CPU, small_llama, tokens

CUDA = torch.device("cuda", 0)
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"head_dim": 8, "moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
PRODUCTS = {"mm", "addmm", "bmm"}
pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Graphs:
    """A backend of torch.compile that runs what it is given as it is, and keeps it: forward and
    backward."""

    def __init__(self) -> None:
        self.forward: list[list[str]] = []  # the names of each graph's operators
        self.backward: list[list[str]] = []

    def __call__(self, module: GraphModule, inputs: list[torch.Tensor]) -> Callable:
        return aot_module_simplified(
            module,
            inputs,
            fw_compiler=partial(self.compile_graph, self.forward),
            bw_compiler=partial(self.compile_graph, self.backward),
            # what decides in earnest what runs again
            partition_fn=min_cut_rematerialization_partition,
        )

    @staticmethod
    def compile_graph(
        graphs: list[list[str]], graph: GraphModule, inputs: list[torch.Tensor]
    ) -> Callable:
        targets = (node.target for node in graph.graph.nodes if node.op == "call_function")
        graphs.append(
            [getattr(target, "__name__", str(target)).split(".")[0] for target in targets]
        )
        return make_boxed_func(graph.forward)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    backend = Graphs()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    return backend


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler finds graphs, and generates no code."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def train_and_evaluate(name: str, sizes: dict[str, Any], **options: Any) -> list[int]:
    """The graphs that there are after each of two steps, with other documents, and an evaluation
    each."""
    file = model_file(name)
    model = parallelize(file.Model(file.Config(**sizes)), ALONE, compile=True, **options)
    counts = []
    for _ in range(2):
        tokens = torch.randint(50, (2, 12))
        inputs = (
            Batch.of((tokens, torch.arange(12).expand(2, 12), None), tokens).with_context().inputs
        )
        model(*inputs).square().sum().backward()
        with torch.no_grad():
            model.eval()(*inputs)
        model.train()
        counts.append(counters["stats"]["unique_graphs"])
    return counts


@pytest.mark.parametrize(
    ("name", "recompute", "precision", "merges"),
    [
        pytest.param("llama", "none", "bfloat16", False, marks=pytest.mark.slow),
        ("llama", "selective", "float32", False),
        pytest.param("llama", "full", "float32", False, marks=pytest.mark.slow),
        ("qwen3", "selective", "bfloat16", False),
        ("llama", "none", "bfloat16", True),
        pytest.param("llama", "full", "bfloat16", True, marks=pytest.mark.slow),
        ("qwen3", "selective", "bfloat16", True),
    ],
)
def test_all_layers_share_a_graph_and_an_evaluation_has_one(
    name: str,
    recompute: str,
    precision: str,
    merges: bool,
    graphs: Graphs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`merges`: as on GPUs, where in 16 bits q, k and v are one product, and gate and up."""
    monkeypatch.setattr(parallelizing, "MERGED_ON", ("cpu",) * merges)
    assert train_and_evaluate(name, SIZES, recompute=recompute, precision=precision) == [2, 2]
    assert not counters["graph_break"]
    (forward,), (backward,) = (graphs.forward[:1], graphs.backward)
    products = sum(name in PRODUCTS for name in forward)
    assert products == (4 if merges else 7)
    # Two products for each one, for its input and its weight; `full` has all but the last again,
    # which nobody needs.
    again = products - 1 if recompute == "full" else 0
    assert sum(name in PRODUCTS for name in backward) == 2 * products + again
    # in which attention stands inside of an operator that gives it its random state
    if recompute != "full":
        attention = {operator._schema.name.split("::")[1] for operator in ATTENTION_DROPOUT}
        assert len(attention.intersection(forward)) == 1
        assert not attention.intersection(backward)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_layers_that_read_the_same_input_compute_one_product(
    recompute: str, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same gradients under the same names: computed in float64, added up in float32, of some
    weights not."""
    for module in (parallelizing, mixed_precision):
        monkeypatch.setattr(module, "master_dtype", lambda precision: torch.float32)
    monkeypatch.setattr(mixed_precision, "ADDED_ON", ("cpu",))
    results = []
    for merges in (False, True):
        monkeypatch.setattr(parallelizing, "MERGED_ON", ("cpu",) * merges)
        model = small_llama()
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias = nn.Parameter(torch.linspace(-1, 1, 24))
            layer.self_attn.k_proj.weight.requires_grad_(False)
        names = [name for name, _ in model.named_parameters()]
        parallelize(model, ALONE, compile=merges, precision="float64", recompute=recompute)
        outputs = []
        for i in range(3):
            set_is_last_backward(model, i == 2)
            outputs.append(model(tokens(0, i)))
            outputs[-1].square().sum().backward()
        with torch.no_grad():
            outputs.append(model(tokens()))
        assert names == [name for name, _ in model.named_parameters()]
        results.append(
            [
                *outputs,
                *(parameter.grad for parameter in model.parameters() if parameter.requires_grad),
            ]
        )
    assert sum(name in PRODUCTS for name in graphs.forward[0]) == 4
    assert len(graphs.forward) == 2
    for plain, merged in zip(*results, strict=True):
        torch.testing.assert_close(
            merged, plain, rtol=1e-6 if plain.dtype == torch.float32 else 1e-12, atol=1e-7
        )


def test_what_a_layer_gives_is_its_own() -> None:
    """Also where layers compute together, a model may view it and change it in place."""
    layers = [Linear(3, 4, bias=False), Linear(3, 2, bias=False)]
    weight, x = torch.cat([layer.weight for layer in layers]), torch.randn(5, 3)
    expected = [layer(x) for layer in layers]
    for y, plain in zip(Linear.outputs(layers, x, weight), expected, strict=True):
        y *= 2
        torch.testing.assert_close(y.view(-1), 2 * plain.flatten())


@pytest.mark.usefixtures("eager")
def test_experts_run_between_graphs() -> None:
    """Five pieces for training and five for evaluation, which all layers share; nothing else breaks
    a graph."""
    assert train_and_evaluate("qwen3_moe", SIZES | EXPERTS) == [10, 10]
    breaks = {
        str(name)
        for reason in counters["graph_break"]
        for name in re.findall(r"function `([\w.]+)`", reason)
    }
    assert breaks == {"choose", "Balance._count", "attach", "Experts.forward"}


class Branching(nn.Module):
    """A block whose way depends on values, so that it is no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return x + (y.sin() if y.sum() > 0 else y.cos())


def warns(message: str | None) -> Any:
    return nullcontext() if message is None else pytest.warns(UserWarning, match=message)


def hooked() -> nn.Module:
    """A model of one block, in which a layer has a hook."""
    block = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    block[1].register_full_backward_hook(lambda layer, inputs, outputs: (inputs[0] / 2,))
    return nn.Sequential(block)


NO_GRAPH = "Branching is recomputed and not compiled"
HAS_HOOKS = "Sequential is not compiled: a graph leaves hooks"


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("make", "recompute", "message"),
    [
        (Branching, "full", NO_GRAPH),
        (Branching, "selective", NO_GRAPH),
        (hooked, "none", HAS_HOOKS),
        (hooked, "full", HAS_HOOKS),
    ],
)
def test_what_cannot_be_compiled_runs_as_it_is(
    make: Callable[[], nn.Module], recompute: str, message: str
) -> None:
    """In 16 bits, where a block that runs again needs its casts again."""
    grads = []
    for compiled in (False, True):
        torch.manual_seed(0)
        with warns(message if compiled else None):
            model = parallelize(
                make(), ALONE, precision="bfloat16", recompute=recompute, compile=compiled
            )
            model(torch.ones(2, 8)).float().square().sum().backward()
        grads.append(next(model.parameters()).grad)
    assert torch.equal(*grads)


class Varied(Branching):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if torch.is_grad_enabled() else super().forward(x)


@pytest.mark.usefixtures("eager")
def test_a_graph_that_evaluation_has_not_leaves_training_compiled() -> None:
    """As where evaluations have more shapes than the compiler makes graphs for."""
    plain = Varied()
    model = parallelize(deepcopy(plain), ALONE, recompute="selective", compile=True)
    for message, graphs in (("not compiled without", 1), (None, 0)):
        counters.clear()
        with torch.no_grad(), warns(message):
            assert torch.equal(model(torch.ones(2, 8)), plain(torch.ones(2, 8)))
        model(torch.ones(2, 8)).square().sum().backward()
        assert counters["stats"]["unique_graphs"] == graphs


def test_selective_keeps_whatever_multiplies_matrices() -> None:
    """All operators whose FLOPs torch counts; those that only other operators call are no business
    of the policy."""
    inner = {
        "_convolution",
        "cudnn_convolution",
        "convolution_overrideable",
        "_slow_conv2d_forward",
    }
    inner |= {"_flash_attention_forward", "_efficient_attention_forward"}
    aten = torch.ops.aten
    flex_attention = torch.ops.higher_order.flex_attention
    operators = [flex_attention, aten._grouped_mm.default]
    for packet in flop_registry:
        name = packet.__name__
        if (
            packet is flex_attention
            or "backward" in name
            or name in inner
            or not str(packet).startswith("aten.")
        ):
            continue
        overloads = (
            overload
            for overload in packet.overloads()
            if "out" not in overload and overload != "quantized"
        )
        operators += [getattr(packet, overload) for overload in overloads]
    assert {aten.mm.dtype, aten._scaled_mm.default, aten.baddbmm.default} <= set(operators)
    for operator in operators:
        assert _policy(None, operator) is CheckpointPolicy.MUST_SAVE, operator
    assert _policy(None, aten.silu.default) is CheckpointPolicy.PREFER_RECOMPUTE


def test_auto_is_true_where_kernels_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "missing_tools", lambda capability: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_compile("auto", CPU, False) == (False, None)
    assert choose_compile(True, CPU, False) == (True, None)
    assert choose_compile(False, CUDA, False) == (False, None)
    assert str(choose_compile("auto", CUDA, False)) == "blocks are compiled"
    assert "blocks are not compiled: the schedule computes gradients" in str(
        choose_compile("auto", CUDA, True)
    )
    monkeypatch.setattr(compiling, "missing_tools", lambda capability: "Triton is not installed")
    assert choose_compile("auto", CUDA, False) == (False, "Triton is not installed")


@pytest.mark.parametrize(("schedule", "compiles"), [("1f1b", True), ("zb-h1", False)])
def test_auto_falls_back_where_the_schedule_splits_backwards(
    schedule: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "missing_tools", lambda capability: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = Config.load(
        "configs/quickstart.yaml", ["layout={pp: 2}", f"pipeline.schedule={schedule}"], world_size=2
    )
    assert config.resolved is not None
    assert compile_choice(config, config.resolved, CUDA).compiles == compiles


def test_what_triton_needs_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tools: dict[str, str] = {}
    monkeypatch.setattr(compiling, "find_spec", tools.get)
    monkeypatch.setattr(compiling.shutil, "which", tools.get)
    monkeypatch.setattr(compiling, "sysconfig", SimpleNamespace(get_path=lambda name: tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "has 6.1" in str(missing_tools((6, 1)))
    assert "not installed" in str(missing_tools((9, 0)))
    tools["triton"] = "triton"
    assert "no C compiler" in str(missing_tools((9, 0)))
    tools["gcc"] = "/usr/bin/gcc"
    assert "Python.h" in str(missing_tools((9, 0)))
    (tmp_path / "Python.h").touch()
    assert missing_tools((9, 0)) is None
    monkeypatch.setenv("CC", "icc")
    assert "no C compiler" in str(missing_tools((9, 0))), "Triton takes what CC names"


def test_code_that_others_could_have_written_is_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A `data.cache` that a group shares holds data, and no code: that lies in the user's own cache
    folder."""
    shared, own = tmp_path / "shared", tmp_path / "home" / "meshtrain"
    shared.mkdir()
    shared.chmod(0o2775)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(CACHE, raising=False)
    keep_compiled_code(shared)
    kept = Path(os.environ[CACHE])
    assert (kept.parent, kept.stat().st_mode & 0o777) == (own, 0o700)
    assert list(shared.iterdir()) == []
    kept.chmod(0o777)
    monkeypatch.delenv(CACHE)
    keep_compiled_code(shared)
    assert CACHE not in os.environ, "anybody may have put something there"


def test_compiled_code_is_kept_where_a_restart_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(CACHE, "there")
    keep_compiled_code(tmp_path)
    assert os.environ[CACHE] == "there", "the user's choice"
    monkeypatch.delenv(CACHE)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compiled_code(tmp_path / "file")
    assert CACHE not in os.environ, "nothing can be written there, as in a container without a home"
    keep_compiled_code(tmp_path)
    assert Path(os.environ[CACHE]).parent == tmp_path
    monkeypatch.setenv(CACHE, f"{gettempdir()}/torchinductor_me")  # torch's own choice
    keep_compiled_code(tmp_path)
    assert Path(os.environ[CACHE]).parent == tmp_path

    def square(x: torch.Tensor) -> torch.Tensor:
        return x @ x  # a library's kernel: no code is generated for it

    for hits in (0, 1):  # each time as a new process would
        torch.compiler.reset()
        counters.clear()
        torch.compile(square)(torch.ones(3, 3))
        found = (
            counters["aot_autograd"]["autograd_cache_hit"]
            + counters["inductor"]["fxgraph_cache_hit"]
        )
        assert min(found, 1) == hits
