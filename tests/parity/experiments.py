"""What the parity tests train, and on which layouts: an experiment is a whole config except its layout."""

import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from meshtrain.pipeline.schedule import NAMES
from tests.parity.covering import AXES, size
from tests.ranks import made_once

QUICKSTART = "configs/quickstart.yaml"

# Steps of an experiment in float64, and of those that learn slowly.
STEPS, SLOW_STEPS = 4, 8
SLOW = ("mixing", "frozen layers", "a frozen tied embedding", "a norm beside both layers")

# A small quickstart, with a batch size that 3, 4 and 6 ranks do not divide, and shares that micro_size does not divide.
SMALL = (
    "model.hidden_size=48",
    "model.intermediate_size=112",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "data.seq_len=48",
    "data.workers=0",
    "batch.global_size=14",
    "batch.micro_size=2",
    "train.steps=20",
    "optimizer.warmup_steps=5",
    "train.eval_every=0",
    "train.sample_tokens=0",
)

# Users' models, with the overrides that each needs.
MODELS = Path(__file__).parents[1] / "models"
OWN_MODELS: dict[str, tuple[str, ...]] = {
    "mixing": ("parallel.sequence_parallel=false",),
    "whole_sequence": (),
}
TP_MODELS = ("attached", *OWN_MODELS)

# Blocks of different sizes for 8 stages, and microbatches that cost next to nothing, since there are many.
STAGED = (
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.num_hidden_layers=6",
    "data.seq_len=32",
    "batch.global_size=15",
)

ATTACHED_EVEN = "attached, even"
ATTACHED = ("model.name=tests/models/attached.py",)  # the first layer adds a term to the loss, and statistics

# A small model with experts, and sequences of a length that nothing divides.
EXPERTS = {
    "experts": ("parallel.recompute=full",),
    "experts, sigmoid": (
        "data.seq_len=48",
        "model.score=sigmoid",
        "model.router_balance=sequence",
        "parallel.recompute=selective",
    ),
}
# The latent of queries is as wide as that of keys and values; the two must not be confused.
_LATENT = (
    *("model.num_key_value_heads=null", "model.q_lora_rank=16", "model.kv_lora_rank=16", "model.v_head_dim=8"),
    *("model.qk_nope_head_dim=10", "model.qk_rope_head_dim=6"),
)
# Without experts, which `tp` without sequence parallelism does not support.
LATENT = (
    *("model.name=tests/models/latent.py", *_LATENT, "model.first_k_dense_replace=2", "model.rope_interleave=false"),
    "model.rope_scaling={rope_type: yarn, factor: 4.0, mscale_all_dim: 1.5, original_max_position_embeddings: 12}",
    "parallel.recompute=selective",
)
# The project's models. Both ranks of tp hold the same key/value head with a bias.
EXPERT_MODELS = {
    "qwen3_moe": (
        *("model.name=qwen3_moe", "model.num_experts=6", "model.moe_intermediate_size=24", "data.seq_len=48"),
        *("model.norm_topk_prob=true", "model.mlp_only_layers=[1]", "model.router_aux_loss_coef=0.1"),
    ),
    "mixtral": (
        *("model.name=mixtral", "model.num_local_experts=5", "model.router_aux_loss_coef=0.1"),
        *("model.router_z_loss_coef=0.01", "model.sliding_window=20", "data.seq_len=48"),
    ),
    "glm": (
        *("model.name=glm4_moe", "model.attention_bias=true", "model.use_qk_norm=true", "data.seq_len=48"),
        *("model.num_key_value_heads=1", "model.moe_intermediate_size=24", "model.n_shared_experts=2"),
        *("model.n_routed_experts=6", "model.n_group=3", "model.topk_group=2", "model.routed_scaling_factor=1.5"),
        *("model.router_aux_loss_coef=0.1", "model.router_bias_speed=0.01", "parallel.recompute=full"),
    ),
    "latent attention": (
        *("model.name=deepseek_v3", *_LATENT, "model.n_routed_experts=6", "model.n_group=3", "model.topk_group=2"),
        *("model.moe_intermediate_size=24", "model.router_aux_loss_coef=0.1", "model.router_bias_speed=0.05"),
        *("parallel.recompute=full", "data.seq_len=48"),
    ),
}
EXPERTS |= EXPERT_MODELS
EMA = "averaged weights"
BORROWED = "the embedding as head"
MUON, MUON_EXPERTS = "muon", "muon, experts"
EXPERTS[MUON_EXPERTS] = (*EXPERT_MODELS["qwen3_moe"], "optimizer.name=muon")

# Sequences longer than the trained length. The length of a rank's part, or a padded one (50 over cp), is another.
ROPE = {
    "dynamic rope": (
        "data.seq_len=50",
        "model.max_position_embeddings=20",
        "model.rope_scaling={rope_type: dynamic, factor: 2.0}",
    ),
    "yarn rope": ("model.rope_scaling={rope_type: yarn, factor: 4.0, original_max_position_embeddings: 12}",),
}

# Layers wide enough for 8-bit products, except those of keys and values, which are whole on each rank if there are many
# ranks. The parts of 208 features on three ranks have different sizes.
_WIDE = (
    *("model.hidden_size=128", "model.num_attention_heads=12", "model.head_dim=16", "data.seq_len=24"),
    "parallel.recompute=selective",
)
FLOAT8 = {"float8": (*_WIDE, "model.intermediate_size=208"), "mxfp8": (*_WIDE, "model.intermediate_size=192")}

# Users' models over pp, with features that llama lacks.
_UNUSUAL = "model.name=tests/models/unusual_layers.py"
STAGED_MODELS = {
    "scaled and capped in blocks": (
        "model.name=tests/models/between_blocks.py",
        "model.tweak=inside",
        "optimizer.lr=0.01",
    ),
    "gradients that stop": (_UNUSUAL, "model.kind=stopped"),
    "layers with the same parameters": (_UNUSUAL, "model.kind=shared parameters"),
    "frozen layers": ('train.freeze=["*.up_proj.weight", "*.k_proj.weight", "*.1.*.o_proj.weight"]',),
    "a frozen tied embedding": (
        'train.freeze=["*embed*"]',
        "model.tie_word_embeddings=true",
        "optimizer.lr=0.05",  # at 0.1 the loss is so curved that rounding grows to 1e-9 within a step
    ),
    "a frozen stage": ('train.freeze=["*embed*", "*layers*"]', "optimizer.lr=0.03"),
}
# Adapters on frozen layers: with dropout before them, also of features split over tp; layers of every kind in attention
# and experts; and a model with other parts frozen.
_ADAPTERS = ("optimizer.lr=0.02", "optimizer.eps=1e-3", "train.lora={rank: 4, alpha: 32, dropout: 0.1}")
TUNED = {
    "lora": _ADAPTERS,
    "lora, few heads": (
        *("model.num_attention_heads=12", "model.num_key_value_heads=3", "optimizer.lr=0.05"),
        'train.lora={rank: 3, match: ["*.[qkv]_proj", "*.layers.1.*"]}',
    ),
    "lora, experts": (*EXPERTS["experts, sigmoid"], *_ADAPTERS),
    "lora, latent attention": (*EXPERTS["latent attention"], *_ADAPTERS),
    "frozen by name": ('train.freeze=["*embed*", "*.layers.0.*", "*.norm.weight"]', "optimizer.lr=0.01"),
}

# Users' models over pp and tp.
CROSSED_MODELS = {"a norm beside both layers": (_UNUSUAL, "model.kind=own norm")}


@dataclass(frozen=True)
class Experiment:
    """A run except its layout.

    Attributes:
        tolerance: the largest relative difference from one process that the precision allows.
        falls_to: the share of the first loss that the last one is below.
    """

    name: str
    config: str
    overrides: tuple[str, ...]
    tolerance: float
    falls_to: float = 1.0


def experiments(folder: Path) -> dict[str, Experiment]:
    """All experiments; writes the data that they need into `folder`."""
    cache = f"data.cache={folder / 'cache'}"
    # An error of a layout shows in the first steps at this tolerance; rounding accumulates over more steps, which
    # "float32" shows in 20.
    precise = (cache, "train.precision=float64", "optimizer.warmup_steps=2")
    exact, slow = ((*precise, f"train.steps={steps}") for steps in (STEPS, SLOW_STEPS))
    digits = ("train.epochs=null", *exact, "data.workers=0", f"train.eval_every={STEPS}", "batch.global_size=21")
    every = [
        Experiment("float32", QUICKSTART, (*SMALL, cache), 1e-5, falls_to=0.8),
        *(
            Experiment(name, QUICKSTART, (*SMALL, *(slow if name in SLOW else exact), *keys), 1e-9, falls_to(name))
            for name, keys in texts(folder).items()
        ),
        Experiment("digits", "configs/digits.yaml", digits, 1e-9, falls_to("digits")),
    ]
    return {experiment.name: experiment for experiment in every}


def falls_to(name: str) -> float:
    """Of the first loss, in float64: the head, or everything before the stop, may keep its initial values."""
    if name in ("a frozen tied embedding", "gradients that stop") or name.startswith("lora"):
        return 0.985
    return 0.95 if name in SLOW else 0.97


def texts(folder: Path) -> dict[str, tuple[str, ...]]:
    """The experiments on text in float64: the plain model, other data, other models."""
    held_out = made_once(folder / "held_out", write_held_out) / "held_out.txt"
    ragged = (
        "data.source=jsonl",
        f"data.path={write_ragged(folder / 'ragged.jsonl')}",
        "data.validation=0.03",
        f"train.eval_every={STEPS}",
        "train.eval_samples=9",  # fewer than there are, the same ones on all layouts
        "batch.global_size=7",
    )
    tied = (*ragged, "model.tie_word_embeddings=true", "data.mask_documents=true", "parallel.recompute=full")
    two_layers = (*STAGED, "model.num_hidden_layers=2")
    unevaluated = (*ragged, "train.eval_every=0")
    moe = (*unevaluated, "model.name=tests/models/moe.py", "model.num_hidden_layers=3", "data.seq_len=47")
    # Nothing divides: 259 tokens, 109 features, and 2 key/value heads where tp is 3.
    uneven = ("model.vocab_size=259", "model.intermediate_size=109", "model.num_attention_heads=6")
    return {
        "float64": (),
        "ragged": ragged,
        "tied, masked, recomputed": tied,
        "dropout": ("model.hidden_dropout=0.1",),
        "uneven": (*uneven, f"data.validation={held_out}", f"train.eval_every={STEPS}"),
        # Sequences that nothing divides, so over `cp` some tokens are padding, which must add nothing to a term either.
        "padded": (
            *(*ATTACHED, *uneven, "data.seq_len=47", "data.mask_documents=true"),
            *(f"data.validation={held_out}", f"train.eval_every={STEPS}"),
        ),
        # 3 key/value heads on 4 ranks: the three query heads of a rank use one or two of them.
        "few heads": ("model.num_attention_heads=12", "model.num_key_value_heads=3"),
        # Few steps for the many schedules: they differ in the order of a step's work, which shows at once or never.
        "staged": (*STAGED, "train.steps=4", "optimizer.warmup_steps=0"),
        "staged, tied": (*STAGED, *tied, "model.hidden_dropout=0.1"),
        **{name: (*two_layers, *keys) for name, keys in {**STAGED_MODELS, **CROSSED_MODELS}.items()},
        **{name: (*unevaluated, "data.mask_documents=true", *keys) for name, keys in ROPE.items()},
        "selective": ("parallel.recompute=selective",),
        **{name: (f"model.name={MODELS / name}.py", *keys) for name, keys in OWN_MODELS.items()},
        "attached": (*ragged, *ATTACHED),
        "attached, recomputed": (*unevaluated, *ATTACHED, "parallel.recompute=full"),
        ATTACHED_EVEN: ATTACHED,
        **{name: (*moe, *keys) for name, keys in EXPERTS.items()},
        **{name: (*(moe if "experts" in name or "latent" in name else ()), *keys) for name, keys in TUNED.items()},
        **{name: (f"train.linear_precision={name}", *keys) for name, keys in FLOAT8.items()},
        # Each rank of tp normalizes its own heads; over tp 4, two ranks have the same key/value head.
        "qwen3": ("model.name=qwen3",),
        BORROWED: ("model.name=tests/models/borrowed_head.py",),
        EMA: (*ragged, "optimizer.ema_decay=0.8", "train.use_ema=true", "train.eval_every=2"),
        MUON: (*uneven, "data.validation=0", "optimizer.name=muon"),
        "latent, no experts": LATENT,
    }


def write_held_out(folder: Path) -> None:
    """A small text: a longer evaluation would cost more than the training."""
    (folder / "held_out.txt").write_text("A text that no sample of the training has in it. " * 50)


def write_ragged(path: Path) -> Path:
    """Prompts without and completions with a loss, of very different lengths: many samples have no valid target."""
    rng = random.Random(0)
    words = ["mesh", "rank", "loss", "shard", "step", "group", "axis", "host", "norm", "batch"]

    def text(least: int, most: int) -> str:
        return " ".join(rng.choice(words) for _ in range(rng.randint(least, most))) + " "

    lines = [{"prompt": text(1, 60), "completion": text(1, 8)} for _ in range(160)]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines))
    unfinished.rename(path)  # several ranks may write the same at once
    return path


# World size -> layouts, each with its experiments.
LAYOUTS: dict[int, list[tuple[str, tuple[str, ...]]]] = {
    2: [
        ("{dp_replicate: 2}", ("float32", "float64", "ragged", "frozen by name", MUON)),
        (
            "{dp_shard: 2}",
            (
                "float32",
                "float64",
                "selective",
                "attached, recomputed",
                ATTACHED_EVEN,
                "float8",
                "lora",
                *EXPERT_MODELS,
                MUON_EXPERTS,
                EMA,
                BORROWED,
            ),
        ),
        (
            "{tp: 2}",
            (
                *("float32", "float64", "ragged", "tied, masked, recomputed", "selective", "uneven", "dropout"),
                *("qwen3", "latent, no experts", ATTACHED_EVEN, MUON, *TP_MODELS, *ROPE, *EXPERT_MODELS, *FLOAT8),
                *("lora", "lora, few heads"),
            ),
        ),
        (
            "{pp: 2}",
            (
                *("float32", "staged", "staged, tied", "digits", "attached, recomputed", ATTACHED_EVEN, *STAGED_MODELS),
                *(*ROPE, *EXPERT_MODELS, "float8", "lora, latent attention", "frozen by name", MUON_EXPERTS),
            ),
        ),
        (
            "{cp: 2}",
            (
                *("float32", "float64", "ragged", "tied, masked, recomputed", "selective", "dropout", "padded"),
                *("latent, no experts", "lora", *ROPE, *EXPERT_MODELS, MUON),
            ),
        ),
    ],
    3: [
        ("{dp_replicate: 3}", ("float64", "dropout")),
        ("{dp_shard: 3}", ("float64", "tied, masked, recomputed")),
        ("{tp: 3}", ("uneven", "float8")),
        ("{cp: 3}", ("padded", "few heads")),
    ],
    4: [
        ("{dp_replicate: 4}", ("float64", "ragged", "tied, masked, recomputed", "experts")),
        (
            "{dp_shard: 4}",
            ("float64", "ragged", "digits", "dropout", "experts", "experts, sigmoid", MUON_EXPERTS),
        ),
        (
            "{dp_replicate: 2, dp_shard: 2}",
            (
                *("float32", "float64", "ragged", "dropout"),
                *("experts", "experts, sigmoid", MUON, MUON_EXPERTS),
            ),
        ),
        ("{dp_shard: 2, dp_replicate: 2}", ("float64",)),
        ("{tp: 4}", ("float64", "tied, masked, recomputed", "few heads", "qwen3", "float8")),
        ("{dp_replicate: 2, tp: 2}", ("float64", "tied, masked, recomputed", "uneven")),
        (
            "{dp_shard: 2, tp: 2}",
            (
                *("float32", "float64", "tied, masked, recomputed", "uneven", "dropout"),
                *("experts, sigmoid", "lora, experts", MUON),
            ),
        ),
        ("{tp: 2, dp_shard: 2}", ("float64",)),
        ("{cp: 4}", ("float64", "tied, masked, recomputed", "few heads", "padded")),
        ("{dp_shard: 2, cp: 2}", ("float64", "ragged")),
        ("{dp_replicate: 2, cp: 2}", ("dropout", "padded")),
        ("{cp: 2, tp: 2}", ("float64", "dropout", "padded", "experts, sigmoid", "latent attention", "mxfp8")),
        ("{pp: 4}", ("float32", "staged", "staged, tied")),
        ("{pp: 2, cp: 2}", ("staged", "staged, tied", "dynamic rope")),
        ("{cp: 2, pp: 2}", ("staged",)),
        ("{pp: 2, dp_replicate: 2}", ("staged", "staged, tied")),
        ("{pp: 2, dp_shard: 2}", ("staged", "staged, tied", "experts", MUON_EXPERTS)),
        ("{dp_shard: 2, pp: 2}", ("staged",)),
        (
            "{pp: 2, tp: 2}",
            ("float64", "staged", "staged, tied", ATTACHED_EVEN, "dynamic rope", *CROSSED_MODELS),
        ),
    ],
    6: [
        ("{dp_replicate: 2, dp_shard: 3}", ("float64", "ragged")),
        ("{dp_replicate: 6}", ("float64",)),
        ("{dp_shard: -1}", ("float64",)),
        ("{dp_shard: 2, tp: 3}", ("uneven",)),
        ("{pp: 3, dp_shard: 2}", ("staged",)),
    ],
    8: [
        ("{dp_replicate: 2, dp_shard: 2, tp: 2}", ("float64", "ragged")),
        ("{dp_replicate: 2, tp: 4}", ("few heads",)),
        ("{dp_shard: 2, tp: 4}", ("few heads",)),
        ("{pp: 2, dp_replicate: 2, dp_shard: 2}", ("staged, tied",)),
        ("{pp: 2, dp_replicate: 2, tp: 2}", ("staged",)),
        ("{pp: 2, dp_shard: 2, tp: 2}", ("staged, tied",)),
        ("{pp: 4, tp: 2}", ("staged",)),
    ],
}


SHARED = "parallel.shard_optimizer=true"
EP = "parallel.expert_parallel={}".format
# Expert parallelism: layout -> experiment -> its size, and other overrides.
EXPERT_PARALLEL: dict[str, dict[str, list[tuple[str, ...]]]] = {
    "{dp_replicate: 4}": {
        "experts": [(EP(4),), (EP(2), SHARED)]
    },  # over replicas of the other parameters; one rank has none of the six experts
    "{dp_shard: 4}": {
        "experts": [()],
        "experts, sigmoid": [(EP(2),)],
        MUON_EXPERTS: [(EP(2),)],
    },  # three experts over two shards
    "{dp_replicate: 2, dp_shard: 2}": {
        "experts": [(EP(2),)],
        "experts, sigmoid": [()],
        MUON_EXPERTS: [(EP(4),)],
    },
    "{dp_shard: 2, tp: 2}": {
        name: [("batch.micro_size=2",)] for name in ("experts, sigmoid", "lora, experts")
    },  # as many as tp
    "{cp: 2, tp: 2}": {
        "experts, sigmoid": [(EP(4), "batch.micro_size=4")],
        "latent attention": [("batch.micro_size=4",)],
    },
    "{pp: 2, dp_shard: 2}": {
        "experts": [("pipeline.schedule=1f1b", EP(2)), ("pipeline.schedule=zbv", EP(2))],
        MUON_EXPERTS: [("pipeline.schedule=1f1b", EP(2))],
    },
}


def variants(world: int, layout: str, name: str) -> list[tuple[str, ...]]:
    """Sets of further overrides with which a cell is trained, since they exercise code of their own."""
    sizes = yaml.safe_load(layout)
    if (name in EXPERTS or name == "lora, experts") and layout in EXPERT_PARALLEL:
        return EXPERT_PARALLEL[layout][name]
    if name == ATTACHED_EVEN:
        return attached(sizes)
    if "cp" in sizes:
        return contexts(layout, name)
    if "pp" in sizes:
        return [(f"pipeline.schedule={schedule}", *more) for schedule, *more in pipelines(sizes, name)]
    if "tp" not in sizes:
        # FSDP that keeps its parameters reduces gradients at another time.
        if list(sizes) == ["dp_replicate"] and name in ("float64", MUON):
            return [(SHARED,)] if name == MUON else [(), (SHARED,)]
        kept = name == "float64" and layout in ("{dp_shard: 2}", "{dp_replicate: 2, dp_shard: 2}")
        return [(), ("parallel.reshard_after_forward=false",)] if kept else [()]
    # Two microbatches per step: one process has more of them, and here each costs many exchanges.
    samples = 7 if name in ("ragged", "tied, masked, recomputed", "attached", *ROPE, *EXPERTS) else 14
    share = -(-samples * sizes["tp"] // world)
    own = f"batch.micro_size={-(-share // 2)}"
    if layout.startswith("{tp: 2, "):  # the other order of the axes
        return [(own,)]
    found: list[tuple[str, ...]] = [(own,)]
    tried = name == "float64" and layout in ("{tp: 2}", "{dp_shard: 2, tp: 2}")
    names = ("uneven", "few heads", "attached", "latent, no experts", "mxfp8", "lora")
    if tried or (len(sizes) == 1 and name in (names if world < 4 else ("few heads",))):
        found.append((own, "parallel.sequence_parallel=false"))
    if "dp_replicate" in sizes and name == "uneven":
        found.append((own, SHARED, "optimizer.ema_decay=0.8"))
    if tried:
        found.append((own, "parallel.regather=true"))
        if "dp_shard" in sizes:
            found.append((own, "parallel.reshard_after_forward=false"))
    return found


def attached(sizes: dict[str, int]) -> list[tuple[str, ...]]:
    """Variants for terms of the loss: compiled blocks, deferred weight gradients, and activations that are whole on all
    ranks of tp."""
    compiled, whole = "parallel.compile=true", "parallel.sequence_parallel=false"
    if "pp" not in sizes:
        return [("batch.micro_size=7", compiled, whole)] if "tp" in sizes else [(compiled,)]
    cut = "batch.micro_size=4"
    if "tp" in sizes:
        return [("pipeline.schedule=zb-h1", cut, whole)]
    return [("pipeline.schedule=zb-h1", cut), ("pipeline.schedule=1f1b", cut, compiled)]


RING, TWO = "parallel.context=ring", "parallel.context_heads=2"
# With `cp`: layout -> experiment -> methods and other overrides. Few cells, since each costs many exchanges.
CONTEXTS: dict[str, dict[str, list[tuple[str, ...]]]] = {
    "{cp: 2}": {
        "float64": [(), (RING,), (TWO,)],
        "ragged": [(TWO,)],
        "tied, masked, recomputed": [(RING,)],
        "dropout": [(TWO,)],
        "padded": [(), (RING,)],
        "latent attention": [(RING,)],
        "latent, no experts": [(), (TWO,)],
    },
    "{cp: 3}": {"padded": [(RING,)], "few heads": [("parallel.context_heads=3",)]},
    "{cp: 4}": {
        "float64": [(RING, TWO)],
        "tied, masked, recomputed": [(TWO,)],
        "few heads": [("parallel.context_heads=4",)],
        "padded": [(RING,)],
    },
    "{dp_shard: 2, cp: 2}": {
        "float64": [("parallel.reshard_after_forward=false",)],
        "ragged": [(RING, "parallel.verify=false")],
    },
    "{dp_replicate: 2, cp: 2}": {"dropout": [(RING,)], "padded": [(TWO,)]},
    "{cp: 2, tp: 2}": {
        "float64": [(RING,), (TWO, "parallel.sequence_parallel=false")],
    },
    "{pp: 2, cp: 2}": {
        "staged": [("pipeline.schedule=zbv", RING), ("pipeline.schedule=interleaved-1f1b", TWO)],
        "staged, tied": [("pipeline.schedule=1f1b",)],
    },
    "{cp: 2, pp: 2}": {"staged": [("pipeline.schedule=zb-h1", TWO)]},
}


def contexts(layout: str, name: str) -> list[tuple[str, ...]]:
    """`variants` for a layout with `cp`: two microbatches per step, and with `pp` three."""
    sizes = yaml.safe_load(layout)
    samples = {"staged": 15}.get(name, 14)
    samples = 7 if name in ("ragged", "tied, masked, recomputed", "staged, tied", *ROPE) else samples
    share = -(-samples // (sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)))
    own = f"batch.micro_size={-(-share // (3 if 'pp' in sizes else 2))}"
    return [(own, *more) for more in CONTEXTS[layout].get(name, [()])]


def pipelines(sizes: dict[str, int], name: str) -> list[tuple[str, ...]]:
    """The variants of a layout with `pp`: (schedule, more overrides ...)."""
    p, data = sizes["pp"], sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    samples = {"float32": 14, "float64": 14, "digits": 21}.get(name, 15)
    samples = 7 if name in ("staged, tied", "attached, recomputed", *ROPE, *EXPERTS) or "latent" in name else samples

    def cut(microbatches: int) -> str:
        """A `micro_size` that gives this many microbatches, or fewer if there are fewer samples."""
        return f"batch.micro_size={-(-samples // (data * microbatches))}"

    if name == "digits":  # three blocks
        return [("1f1b", cut(3)), ("zb-h2", cut(4))]
    if name in ROPE:
        return [("1f1b", cut(2 * p))]
    if name in EXPERTS:
        return [("zbv", cut(3)) if name in ("qwen3_moe", "glm", MUON_EXPERTS) else ("1f1b", cut(4))]
    if name in TUNED:
        return [("zbv", cut(3))]
    if name in STAGED_MODELS:
        return [("zb-h1", cut(3), "pipeline.split=[3, 2]") if name == "a frozen stage" else ("zbv", cut(3))]
    if "dp_replicate" in sizes or "dp_shard" in sizes or "tp" in sizes:
        return crossed(sizes, name, cut(2 * p), cut(2 * p - 1))
    if name != "staged":
        # The five blocks of float32 suffice for stages of four ranks, but not for the 8 stages of a V over them.
        return [("1f1b", cut(2 * p)), ("zb-h2" if name == "float32" and p > 2 else "zbv", cut(2 * p - 1))]
    counts = (2 * p, p + 1) if p == 2 else (p + 1,)
    found = [(schedule, cut(microbatches)) for schedule in NAMES for microbatches in counts]
    if p == 2:  # more stages per rank, a user's split, and recomputation with split backwards
        four = "pipeline.stages_per_rank=4"
        found += [("interleaved-1f1b", cut(3), four), ("interleaved-zb", cut(3), four)]
        found += [("1f1b", cut(3), "pipeline.split=[2, 7]"), ("zbv", cut(3), "parallel.recompute=selective")]
    return found


def crossed(sizes: dict[str, int], name: str, even: str, odd: str) -> list[tuple[str, ...]]:
    """`pipelines` for a layout with other axes. Few cells, since many processes on few cores are expensive."""
    if len(sizes) > 2 or sizes["pp"] > 2:
        return [("1f1b", odd)] if name == "staged, tied" else [("zbv", even)]
    if name == "float64":  # a stage per block: one of them has only the last norm
        return [("interleaved-1f1b", even, "pipeline.split=[2, 1, 1, 1]")]
    if name in CROSSED_MODELS:  # several stages per rank
        return [("interleaved-1f1b", even, "parallel.sequence_parallel=false")]
    if name != "staged":
        shared = [("1f1b", even, SHARED)] if "dp_replicate" in sizes else []
        return [("zbv", odd), *shared] if name == "staged, tied" else [("1f1b", even)]
    found: list[tuple[str, ...]] = [("1f1b", even), ("zbv", odd)]
    if "tp" in sizes:
        found += [("1f1b", odd, "parallel.sequence_parallel=false"), ("zb-h1", odd, "parallel.regather=true")]
    if "dp_shard" in sizes:
        found.append(("looped-bfs", odd))
    return found[:1] if next(iter(sizes)) != "pp" else found


# -------------------------------------------------------------------------------------------- the cells of covering.py

_RAGGED_STEPS = f"train.eval_every={STEPS}"
_OPTIMIZERS = {
    "adamw": (),
    "muon": ("optimizer.name=muon",),
    "sgd": ("optimizer.name=sgd", "optimizer.lr=0.1"),
    "adamw, sharded": (),
    "adamw, averaged": ("optimizer.ema_decay=0.8", "train.use_ema=true", "train.eval_every=2", "train.eval_samples=9"),
}
_AXES = {
    "2, ring": (RING,),
    "2, heads": (TWO,),
    "2, whole sequence": ("parallel.sequence_parallel=false",),
}
_SIZES = {"convnet": 21, **dict.fromkeys(EXPERT_MODELS, 7)}  # samples per step; others have 14


def experiment_of(cell: Mapping[str, str], folder: Path) -> Experiment:
    """What a cell trains, but for what the layout may not change: its layout, schedule, recomputation."""
    keys: tuple[str, ...] = (f"data.cache={folder / 'cache'}", "optimizer.warmup_steps=2", f"train.steps={STEPS}")
    model, precision = cell["model"], cell["precision"]
    keys += (f"train.precision={'float32' if precision == 'float32' else 'float64'}",)
    if model == "convnet":
        config = "configs/digits.yaml"
        keys += ("train.epochs=null", "data.workers=0", _RAGGED_STEPS)
    else:
        config = QUICKSTART
        ragged = write_ragged(folder / "ragged.jsonl")
        data = ("data.source=jsonl", f"data.path={ragged}", "data.validation=0.03", "data.mask_documents=true")
        keys = (*SMALL, *data, *keys)
    keys += {
        "llama": ("model.tie_word_embeddings=true",),
        "qwen3": ("model.name=qwen3", _RAGGED_STEPS, "train.eval_samples=9"),
        "with terms": ATTACHED,
        "lora": TUNED["lora"],
        "convnet": (),
        **{name: ("model.num_hidden_layers=3", *keys) for name, keys in EXPERT_MODELS.items()},
    }[{"glm4_moe": "glm", "deepseek_v3": "latent attention"}.get(model, model)]
    if precision in FLOAT8:
        wide: tuple[str, ...] = ("model.hidden_size=128",)
        if model in ("llama", "qwen3", "with terms"):
            wide = FLOAT8[precision]
        if model == "deepseek_v3":
            wide += ("model.q_lora_rank=128",)
        keys += (f"train.linear_precision={precision}", *wide)
    keys += (*_OPTIMIZERS[cell["optimizer"]], f"batch.global_size={_SIZES.get(model, 14)}", "parallel.recompute=none")
    tolerance = 1e-5 if precision == "float32" else 1e-9
    name = f"{model}, {cell['optimizer']}, {precision}"
    return Experiment(name, config, keys, tolerance)


def layout_of(cell: Mapping[str, str]) -> list[str]:
    """The overrides that split the experiment of a cell over its ranks."""
    sizes = {axis: size(cell, axis) for axis in AXES}
    layout = ", ".join(f"{axis}: {ranks}" for axis, ranks in sizes.items() if ranks > 1)
    microbatches = 3 if sizes["pp"] > 1 else 2
    data_ranks = sizes["dp_replicate"] * sizes["dp_shard"]
    micro_size = -(-_SIZES.get(cell["model"], 14) // (data_ranks * microbatches))
    keys = [f"layout={{{layout}}}", f"batch.micro_size={micro_size}", f"parallel.recompute={cell['recompute']}"]
    for axis in AXES:
        keys += _AXES.get(cell[axis], ())
    if sizes["pp"] > 1:
        keys.append(f"pipeline.schedule={cell['schedule']}")
    if cell["optimizer"] == "adamw, sharded":
        keys.append(SHARED)
    return keys
