"""Broken configs, and what has to be said about each: every error with its line, what is wrong, and a way out.

`MODEL` stands for the path of the model file below. `plus(...)` puts a text behind the three lines that every config
needs, so the text begins at line 4. A line of 0 is the command line.
"""

from pathlib import Path
from typing import NamedTuple

WHOLE = Path(__file__).parents[1] / "models" / "whole_sequence.py"
MODEL_FILE = """
from dataclasses import dataclass, field
from typing import Any, Literal

@dataclass(frozen=True)
class Config:
    width: int
    heads: int = 4
    scale: float = 1.0
    kind: Literal["dense", "sparse"] = "dense"
    sizes: tuple[int, ...] = (1, 2)
    span: tuple[float, float] = (0.0, 1.0)
    words: list[str] = field(default_factory=list)
    scaling: dict[str, Any] | None = None
    shares: dict[str, float] = field(default_factory=dict)
    tied: bool = False
    head_dim: int | None = None
    vocab_size: int = 256
    max_position_embeddings: int = 1024

    def __post_init__(self):
        if self.scale == 13:
            raise ValueError("scale 13 brings bad luck, use 12")

class Model:
    def __init__(self, config):
        self.config = config

presets = {"small": {"width": 8}, "large": {"width": 64, "heads": 16}, "odd": {"width": 7}, "stale": {"wide": 7}}
passed_over = frozenset({"torch_dtype", "architectures"})
only = {"bias": False, "act": "silu", "dropout": 0.0}

def check(config):
    if config.width % config.heads:
        return [("heads", f"width {config.width} does not divide into {config.heads} heads: use 1 head")]
    return []
"""

# Behind the model file: a model with one layer, and plans for it.
ONE_LAYER = """
class Layer:
    in_features = out_features = 8

class Model(Model):
    def named_modules(self):
        return [("", self), ("first", Layer())]
"""
PLANS = {
    "plan": 'tp_plan = {"first": "columns"}',
    "stale_plan": 'tp_plan = {"first": "colwise", "second": "rowwise"}',
    "cp_plan": 'cp_plan = {"first": "convolution"}',
    "stale_cp_plan": 'cp_plan = {"first": "attention", "second": "attention"}',
    "stale_ep_plan": 'ep_plan = {"*.experts": "ep_dispatch_experts"}',
}


class Error(NamedTuple):
    line: int
    what: str  # a part of the message that says what is wrong
    out: str  # a part of it that says what would work


class Broken(NamedTuple):
    name: str
    text: str
    errors: list[Error]
    overrides: tuple[str, ...] = ()
    world_size: int | None = None
    for_training: bool = False
    device: str | None = None


def plus(
    extra: str = "",
    model: str = "{name: MODEL, width: 8}",
    batch: str = "{global_size: 8, micro_size: 2}",
    train: str = "{steps: 100}",
) -> str:
    return f"model: {model}\nbatch: {batch}\ntrain: {train}\n{extra}"


def one(name: str, text: str, line: int, what: str, out: str, *overrides: str, **given: int | bool | str) -> Broken:
    return Broken(name, text, [Error(line, what, out)], overrides, **given)  # type: ignore[arg-type]


BOMB = "metrics:\n  profile: &a [1, 1]\n  tensorboard: &b [*a, *a]\n  memory_snapshot: *b\n"

YAML = [
    one("empty", "", 1, "the file is empty", "`model:`"),
    one("only comments", "# nothing\n", 1, "the file is empty", "`train:`"),
    one("a list at the top", "- model\n", 1, "expected sections", "found a list"),
    one("a text at the top", "\nmodel\n", 2, "found the text 'model'", "`model:`"),
    one("tab", plus("data:\n\tseq_len: 3\n"), 5, "this is not YAML", "spaces, not with tabs"),
    one("colon in a value", plus("metrics: {}\ndata: a: b\n"), 5, "mapping values are not allowed", "quotes around"),
    one("open brace", plus("data: {seq_len: 3\nmetrics: {}\n"), 5, "this is not YAML", "close the brace"),
    one("open quotes", plus('data: {source: "text}\n'), 5, "this is not YAML", "close the quotes"),
    one("indentation", plus("data:\n  seq_len: 3\n workers: 1\n"), 6, "this is not YAML", "start in the same column"),
    one("at sign", plus("data:\n  path: @here\n"), 5, "'@'", "put quotes around"),
    one("control character", plus("data:\n  path: a\x07b\n"), 5, "U+0007", "take it out"),
    one("two documents", plus("---\ntrain: {steps: 3}\n"), 4, "second document", "take the `---` away"),
    one("section twice", plus("train:\n  seed: 1\n"), 4, "train is given twice, first at ", "take one of them away"),
    one("key twice", plus("data:\n  seq_len: 1\n  workers: 1\n  seq_len: 2\n"), 7, ":5: take one", "take one of them"),
    one("key twice in braces", plus(train="{steps: 1, steps: 2}"), 3, "steps is given twice", "take one of them away"),
    one("tag of Python", plus("data: !!python/object/apply:os.system [ls]\n"), 4, "!!python/object", "leave it out"),
    one("tag of a scalar", plus("data:\n  seq_len: !!int '3'\n"), 5, "tags such as", "leave it out"),
    one("anchor", plus("metrics: &m {tensorboard: true}\n"), 4, "anchors (&name)", "write the value out"),
    one("alias bomb", plus(BOMB), 5, "aliases (*name) are refused", "write the value out"),
    one("alias that is not defined", plus("data: *other\n"), 4, "aliases (*name)", "write the value out"),
    one("merge key", plus("data:\n  <<: {seq_len: 3}\n"), 5, "merge keys", "write the keys out"),
    one("a number as key", plus("data:\n  1: 2\n"), 5, "found the integer 1", "quotes around it"),
    one("a list as key", plus("data:\n  ? [a, b]\n  : 2\n"), 5, "found a list", "take it out"),
    one("deep nesting", plus("data: " + "[" * 5000), 4, "nested more than 32 deep", "no key of a config needs that"),
    one("surrogate", plus('data: {path: "\\ud800"}\n'), 4, "stands for no character", "write the character itself"),
]

KEYS = [
    one("unknown section", plus("optimiser: {lr: 1}\n"), 4, "no section optimiser", "did you mean optimizer?"),
    one("section far from all", plus("zzz: {}\n"), 4, "no section zzz", "the sections are model, data, layout"),
    one("key without its section", plus("lr: 3e-4\n"), 4, "no section lr", "did you mean optimizer.lr?"),
    one("section that is not built", plus("experts: {count: 8}\n"), 4, "no section experts", "the sections are"),
    one(
        "misspelt key", plus("optimizer:\n  warmup_step: 1\n"), 5, "optimizer.warmup_step", "did you mean warmup_steps?"
    ),
    one("key of another framework", plus("optimizer: {learning_rate: 1}\n"), 4, "learning_rate", "did you mean lr?"),
    one(
        "key of another section",
        plus("optimizer: {seq_len: 1}\n"),
        4,
        "optimizer.seq_len",
        "did you mean data.seq_len?",
    ),
    one("key far from all", plus("parallel: {zzz: 1}\n"), 4, "parallel.zzz", "recompute, compile, reshard_after"),
    one("no space after the colon", plus("optimizer: {lr:3}\n"), 4, "a colon needs a space", "`lr: 3`"),
    one("section is a number", plus("data: 3\n"), 4, "data is a section", "expected keys such as `source:`"),
    one("section is a list", plus("metrics: [tensorboard]\n"), 4, "found a list", "expected keys such as"),
    one(
        "no batch", "model: {name: MODEL, width: 8}\ntrain: {steps: 100, seed: -1}\n", 2, "train.seed", "at least 0"
    )._replace(
        errors=[
            Error(1, "batch.global_size is missing", "give an integer of at least 1"),
            Error(1, "batch.micro_size is missing", "give an integer of at least 1"),
            Error(2, "train.seed", "at least 0"),
        ]
    ),
    one("no micro_size", plus(batch="{global_size: 8}"), 2, "batch.micro_size is missing", "give an integer"),
]

TYPES = [
    one("text for an integer", plus(train="{steps: many}"), 3, "found the text 'many'", "an integer of at least 1"),
    one("quoted integer", plus(train="{steps: '50'}"), 3, "found the text '50'", "write 50, without quotes"),
    one("underscores", plus(train="{steps: 1_000}"), 3, "found the text '1_000'", "write 1000"),
    one("float for an integer", plus(train="{steps: 50.0}"), 3, "found the number 50.0", "write 50"),
    one("exponent for an integer", plus(train="{steps: 1e3}"), 3, "found the number 1000.0", "write 1000"),
    one("bool for an integer", plus(train="{steps: true}"), 3, "found true", "an integer of at least 1"),
    one("bool for a number", plus("optimizer:\n  lr: false\n"), 5, "found false", "a number above 0"),
    one("quoted number", plus("optimizer:\n  lr: '1e-3'\n"), 5, "found the text '1e-3'", "write 0.001"),
    one("yes", plus("parallel: {compile: yes}\n"), 4, "found the text 'yes'", "write true"),
    one("off", plus("parallel: {compile: off}\n"), 4, "found the text 'off'", "write false"),
    one("integer for a bool", plus("parallel: {compile: 1}\n"), 4, "found the integer 1", "expected true or false"),
    one("null", plus("data:\n  seq_len:\n"), 5, "found nothing (null)", "the default is 256"),
    one("number for a text", plus("data:\n  path: 5\n"), 5, "expected a text", "found the integer 5"),
    one("list for a number", plus("data:\n  seq_len: [1]\n"), 5, "found a list", "the default is 256"),
    one(
        "mapping for a text",
        plus(train="{steps: 1, output: {a: b}}").replace("}}", "}}\noptimizer: {warmup_steps: 0}"),
        3,
        "found a mapping",
        "the default is runs/{name}",
    ),
    one("misspelt choice", plus("optimizer: {schedule: cosin}\n"), 4, "`linear`", "did you mean cosine?"),
    one("choice far from all", plus("optimizer: {name: zzz}\n"), 4, "found the text 'zzz'", "one of `adamw`"),
    one("integer or a word", plus(train="{steps: 100, eval_every: epcoh}"), 3, "'epcoh'", "did you mean epoch?"),
    one("short list", plus("optimizer: {betas: [0.9]}\n"), 4, "a list of 2 numbers", "found a list of 1"),
    one("number for a list", plus("optimizer: {betas: 0.9}\n"), 4, "a list of 2 numbers", "default is [0.9, 0.95]"),
    one("item of a list", plus("optimizer:\n  betas:\n  - 0.9\n  - x\n"), 7, "betas[1]", "expected a number"),
    one("beta of 1", plus("optimizer: {betas: [0.9, 1.0]}\n"), 4, "optimizer.betas[1]", "below 1"),
    one("infinite", plus("optimizer: {lr: .inf}\n"), 4, "found the number inf", "give a finite number"),
    one(
        "too large for float32", plus("optimizer: {lr: 1e300}\n"), 4, "found the number 1e+300", "that float32 can hold"
    ),
    one("zero in float32", plus("optimizer: {eps: 1e-300}\n"), 4, "found the number 1e-300", "that float32 can hold"),
    one("not a number", plus("optimizer: {lr: .nan}\n"), 4, "found the number nan", "give a finite number"),
    one(
        "too large for a float",
        plus("optimizer: {lr: 1" + "0" * 90 + "e999}\n"),
        4,
        "optimizer.lr",
        "give a finite number",
    ),
    one(
        "integer of many digits",
        plus("data: {seq_len: " + "9" * 5000 + "}\n"),
        4,
        "found the text '999",
        "the default is",
    ),
    one("lr of 0", plus("optimizer: {lr: 0}\n"), 4, "found the integer 0", "a number above 0"),
    one("negative workers", plus("data: {workers: -1}\n"), 4, "found the integer -1", "at least 0"),
    one("seed too large", plus(train="{steps: 100, seed: 9223372036854775808}"), 3, "train.seed", "at most 9223"),
]

MODELS = [
    one(
        "no model",
        "batch: {global_size: 8, micro_size: 2}\ntrain: {steps: 100}\n",
        1,
        "model is missing",
        "name: llama",
    ),
    one("model is a text", plus(model="llama"), 1, "found the text 'llama'", "`model: {name: llama}`"),
    one("unknown model", plus(model="{name: lama}"), 1, "no model called 'lama'", "did you mean llama?"),
    one("model file that is not there", plus(model="{name: gone/my.py}"), 1, "gone/my.py", "mend the path"),
    one("model file with an error", plus(model="{name: MODEL.wrong.py}"), 1, "this is not Python", "wrong.py:2"),
    one("model file without Config", plus(model="{name: MODEL.empty.py}"), 1, "cannot be used", "dataclass `Config`"),
    one("model file that imports", plus(model="{name: MODEL.imports.py}"), 1, "no_such_package", "cannot be used"),
    one(
        "model file with an odd type",
        plus(model="{name: MODEL.type.py}"),
        1,
        "Config.place has the type",
        "use bool, int",
    ),
    one("name is a number", plus(model="{name: 3, width: 8}"), 1, "model.name", "expected a text"),
    one("key of no model", plus(model="{name: MODEL, width: 8, haeds: 2}"), 1, "model.haeds", "did you mean heads?"),
    one("needed key", plus(model="{name: MODEL}"), 1, "the model needs width (an integer)", "a preset: small, large"),
    one("wrong type", plus(model="\n  name: MODEL\n  width: 8.0"), 3, "model.width", "write 8"),
    one("wrong type in a mapping", plus(model="{name: MODEL, width: 8, shares: {a: x}}"), 1, "shares.a", "a number"),
    one("scalar for a list", plus(model="{name: MODEL, width: 8, sizes: 3}"), 1, "a list of integers", "write [3]"),
    one("unknown preset", plus(model="{name: MODEL, preset: smal}"), 1, "no preset smal", "did you mean small?"),
    one("preset far from all", plus(model="{name: MODEL, preset: zzz}"), 1, "no preset zzz", "small, large"),
    one("preset of a model without", plus(model="{name: convnet, preset: a}"), 1, "no preset a", "take the key away"),
    one(
        "preset with a strange key",
        plus(model="{name: MODEL, width: 8, preset: stale}"),
        1,
        "gives wide",
        "mend the file",
    ),
    one(
        "value not built",
        plus(model="\n  name: MODEL\n  width: 8\n  bias: true"),
        4,
        "model.bias: true",
        "only false is",
    ),
    one("another value not built", plus(model="{name: MODEL, width: 8, act: gelu}"), 1, "act: gelu", "only silu is"),
    one(
        "heads", plus(model="\n  name: MODEL\n  width: 10\n  heads: 4"), 4, "does not divide into 4 heads", "use 1 head"
    ),
    one("heads of a preset", plus(model="\n  name: MODEL\n  preset: odd"), 3, "width 7 does not divide", "use 1 head"),
    one("heads from the command line", plus(), 0, "into 3 heads", "use 1 head", "model.heads=3"),
    one("a division by 0", plus(model="{name: MODEL, width: 8, heads: 0}"), 1, "refuses these keys", "by zero"),
    one("Config refuses", plus(model="{name: MODEL, width: 8, scale: 13}"), 1, "refuses these keys", "use 12"),
    one("llama's heads", plus(model="\n  hidden_size: 250\n  num_attention_heads: 8"), 3, "250", "use 5 or 10 heads"),
    one("attention_bias", plus(model="\n  name: llama\n  attention_bias: true"), 3, "not built", "only false is"),
    one(
        "sequence too long",
        plus("data: {seq_len: 2048}\n"),
        4,
        "seq_len 2048 is more than",
        "shorten the sequences to 1024",
    ),
    one(
        "vocabulary below bytes",
        plus(model="{name: MODEL, width: 8, vocab_size: 100}"),
        1,
        "less than the 256",
        "at least 256",
    ),
]

LAYOUTS = [
    one("unknown axis", plus("layout: {dp_shrad: 2}\n"), 4, "no axis 'dp_shrad'", "did you mean dp_shard?"),
    one("dp", plus("layout:\n  dp: 2\n"), 5, "no axis 'dp'", "did you mean dp_replicate or dp_shard?"),
    one("a view", plus("layout: {fsdp: 2}\n"), 4, "no axis 'fsdp'", "did you mean dp_shard?"),
    one("a view of experts", plus("layout: {efsdp: 2}\n"), 4, "no axis 'efsdp'", "the axes are pp"),
    one("experts as an axis", plus("layout: {ep: 2}\n"), 4, "no axis 'ep'", "give parallel.expert_parallel"),
    one("size 0", plus("layout: {tp: 0}\n"), 4, "found 0", "-1 for whatever is left"),
    one("size -2", plus("layout: {dp_shard: -2}\n"), 4, "found -2", "an integer of at least 1"),
    one("size is a float", plus("layout: {dp_shard: 2.0}\n"), 4, "found the number 2.0", "write 2"),
    one("size is a bool", plus("layout: {dp_shard: true}\n"), 4, "found true", "an integer"),
    one(
        "two of -1", plus("layout:\n  dp_replicate: -1\n  dp_shard: -1\n"), 6, "only one axis can be -1", "give one of"
    ),
    one("layout is a number", plus("layout: 4\n"), 4, "found the integer 4", "such as {dp_shard: 4}"),
    one("layout against the world", plus("layout: {dp_shard: 4}\n"), 4, "needs 4", "{dp_shard: 6}", world_size=6),
    one("-1 against the world", plus("layout: {dp_shard: -1, tp: 4}\n"), 4, "does not divide", "use {", world_size=6),
    one(
        "override against the world",
        plus("layout: {dp_shard: 2}\n"),
        0,
        "needs 6",
        "use {",
        "layout.tp=3",
        world_size=4,
    ),
    one(
        "tp of a model without a tp_plan",
        plus("layout: {dp_shard: -1, tp: 2}\n"),
        4,
        "has no tp_plan",
        "use tp: 1",
    ),
    one(
        "tp against the query heads",
        plus("layout:\n  tp: 3\nparallel: {sequence_parallel: false}\n", model="{name: llama}"),
        5,
        "8 query heads do not divide over tp 3",
        "use a tp of 1, 2, 4, 8",
        world_size=3,
    ),
    one(
        "sequence parallelism where nothing splits the sequence",
        plus("layout: {tp: 2}\nparallel:\n  sequence_parallel: true\n", model=f"{{name: {WHOLE}}}"),
        6,
        "the tp_plan has no embedding_rowwise layer",
        "leave it out, or use false",
    ),
    one(
        "tp against the sequence",
        plus("data:\n  seq_len: 33\nlayout: {tp: -1}\n", model="{name: llama}"),
        5,
        "does not divide over layout.tp 2",
        "use 32 or 34",
        world_size=2,
    ),
    one(
        "a tp_plan with an unknown word",
        plus("layout: {tp: 2}\n", model="{name: MODEL.plan.py, width: 8}"),
        4,
        "the tp_plan's 'first' is 'columns'",
        "use one of colwise, rowwise",
    ),
    one(
        "a tp_plan of another model",
        plus("layout:\n  tp: 2\n", model="{name: MODEL.stale_plan.py, width: 8}"),
        5,
        "the tp_plan's 'second' matches no layer",
        "mend the pattern",
    ),
    one(
        "symmetric memory on CPUs",
        plus("parallel:\n  symmetric_memory: true\nlayout: {tp: -1}\n", model="{name: llama}"),
        5,
        "symmetric_memory needs GPUs",
        "use symmetric_memory: false",
        world_size=2,
        device="cpu",
    ),
    one(
        "messages that round in float64",
        plus("parallel:\n  reduce_precision: bfloat16\n").replace("train: {", "train: {precision: float64, "),
        5,
        "reduce_precision bfloat16 rounds",
        "leave it out",
    ),
    one(
        "float8 beside float16",
        plus(model="{name: llama}", train="{steps: 1, linear_precision: float8, precision: float16}"),
        3,
        "train.precision float16 has no room",
        "use precision: bfloat16",
    ),
    one(
        "float8 beside float32 on GPUs",
        plus("layout: {dp_shard: -1}\n", model="{name: llama}", train="{steps: 1, linear_precision: float8}"),
        3,
        "fast beside train.precision bfloat16 alone",
        "use precision: bfloat16, or linear_precision: null",
        device="cuda",
    ),
    one(
        "float8 of small layers",
        plus(model="{name: llama, hidden_size: 64}", train="{steps: 1, linear_precision: float8}"),
        3,
        "Model has no linear layer inside of its blocks() with at least 128 inputs and outputs, multiples of 16",
        "use null",
    ),
    one(
        "blocks of 32 features over tp",
        plus(
            "layout: {tp: 2}\n",
            model="{name: llama, hidden_size: 256, intermediate_size: 160}",
            train="{steps: 1, linear_precision: mxfp8}",
        ),
        3,
        "model.layers.*.mlp.up_proj, model.layers.*.mlp.down_proj, where each rank needs a multiple of 32",
        "cannot be split over tp 2: use a smaller tp, or null",
    ),
    one(
        "tp of sizes that make no model",
        plus("layout: {tp: 2}\n", model="{name: llama, num_attention_heads: 0}"),
        1,
        "num_attention_heads is 0",
        "use at least 1",
    ),
    one(
        "cp of a model without a cp_plan",
        plus("layout:\n  cp: -1\n"),
        5,
        "has no cp_plan, which says where it mixes tokens",
        "use cp: 1",
        world_size=2,
    ),
    one(
        "cp of images",
        plus("layout:\n  cp: 2\ndata: {source: digits}\n", model="{name: llama}"),
        5,
        "data.source digits gives images, not sequences",
        "use cp: 1",
    ),
    one(
        "a cp_plan of another model",
        plus("layout:\n  cp: 2\n", model="{name: MODEL.stale_cp_plan.py, width: 8}"),
        5,
        "the cp_plan's 'second' matches no module",
        "mend the pattern",
    ),
    one(
        "a cp_plan with an unknown word",
        plus("layout: {cp: 2}\n", model="{name: MODEL.cp_plan.py, width: 8}"),
        4,
        "the cp_plan's 'first' is 'convolution'",
        "use attention",
    ),
    one(
        "heads against cp",
        plus("layout: {cp: 4}\nparallel:\n  context_heads: 3\n", model="{name: llama}"),
        6,
        "parallel.context_heads 3 does not divide layout.cp 4",
        "use 1, 2 or 4",
    ),
    one(
        "query heads against tp and context_heads",
        plus("layout: {cp: -1, tp: 2}\nparallel:\n  context_heads: 8\n", model="{name: llama}"),
        6,
        "8 query heads do not divide over tp 2 x context_heads 8",
        "use a context_heads of 1, 2 or 4",
        world_size=16,
    ),
    one(
        "Ulysses as a way",
        plus("parallel:\n  context: ulysses\n"),
        5,
        "expected one of `gather` or `ring`, found the text 'ulysses'",
        "with context_heads: 4 ranks swap heads, which is Ulysses",
    ),
    one("no way", plus("parallel: {context: p2p}\n"), 4, "found the text 'p2p'", "the default is gather"),
    one("Megatron's way", plus("parallel: {cp_comm_type: a2a}\n"), 4, "no key", "did you mean context?"),
    one("DeepSpeed's way", plus("parallel: {ulysses_degree: 4}\n"), 4, "no key", "did you mean context_heads?"),
]

OF_8, OF_16 = "layout: {dp_shard: 8}\n", "layout: {dp_shard: 8, tp: 2}\n"
WITH_EXPERTS = f"{{name: {WHOLE.with_name('moe.py')}, num_experts: 8}}"
EXPERTS = [
    one(
        "experts that do not fold",
        plus(OF_16 + "parallel:\n  expert_parallel: 6\n", model=WITH_EXPERTS),
        6,
        "parallel.expert_parallel 6 does not fold into {dp_shard: 8, tp: 2}, whose inner ranks it takes (tp, cp, ",
        "use 4 or 8",
    ),
    one(
        "experts that do not fold into the layout of this world",
        plus("layout: {dp_shard: -1}\nparallel: {expert_parallel: 4}\n", model=WITH_EXPERTS),
        5,
        "does not fold into {dp_shard: 6}",
        "use 3 or 6",
        world_size=6,
    ),
    one(
        "more ranks than experts",
        plus(OF_16 + "parallel: {expert_parallel: 16}\n", model=WITH_EXPERTS),
        5,
        "parallel.expert_parallel is 16 and a layer has 8 experts",
        "use 8",
    ),
    one(
        "more ranks of tp than experts",
        plus("layout: {tp: 8}\n", model=WITH_EXPERTS.replace("num_experts: 8", "num_experts: 6")),
        4,
        "parallel.expert_parallel is 8 (null: as many as tp) and a layer has 6 experts",
        "use 4",
    ),
    one(
        "experts of a model without",
        plus(OF_8 + "parallel: {expert_parallel: 4}\n"),
        5,
        "plain.py has no ep_plan, which names its experts",
        "take it away",
    ),
    one(
        "experts without sequence parallelism",
        plus(OF_16 + "parallel: {sequence_parallel: false}\n", model=WITH_EXPERTS),
        5,
        "parallel.sequence_parallel false with tp 2: ranks of tp would send experts the same tokens",
        "leave it true, or use expert_parallel: 1",
    ),
    one(
        "an ep_plan of another model",
        plus(OF_8 + "parallel: {expert_parallel: 4}\n", model="{name: MODEL.stale_ep_plan.py, width: 8}"),
        5,
        "the ep_plan's '*.experts' matches no module",
        "mend the pattern",
    ),
    one("torchtitan's degree", plus("parallel: {expert_parallel_degree: 4}\n"), 4, "no key", "mean expert_parallel?"),
    one("ep", plus("parallel: {ep: 4}\n"), 4, "no key parallel.ep", "did you mean expert_parallel?"),
    one("room for less", plus("parallel: {expert_rows: 0.5}\n"), 4, "expert_rows: expected", "at least 1"),
    one(
        "a capacity",
        plus("parallel: {capacity_factor: 1.25}\n"),
        4,
        "which tokens a capacity drops depends on which others compete, so on the layout",
        "take it away",
    ),
    one(
        "a capacity of the model",
        plus(model="{name: MODEL, width: 8, moe_expert_capacity_factor: 1}"),
        1,
        "so on the",
        "take it",
    ),
]

SIX_BLOCKS = "{name: llama, num_hidden_layers: 3}"
STAGES = [
    one(
        "unknown schedule",
        plus("layout: {pp: 2}\npipeline:\n  schedule: 1f1bb\n", model=SIX_BLOCKS),
        6,
        "found the text '1f1bb'",
        "did you mean 1f1b?",
    ),
    one(
        "a schedule's file that is not there",
        plus("layout: {pp: 2}\npipeline:\n  schedule: gone.csv\n", model=SIX_BLOCKS),
        6,
        "cannot read the schedule gone.csv",
        "No such file",
    ),
    one(
        "stages of a V",
        plus("layout: {pp: 2}\npipeline:\n  schedule: zbv\n  stages_per_rank: 3\n", model=SIX_BLOCKS),
        6,
        "found 3",
        "zbv has 2 stages per rank",
    ),
    one(
        "one stage of a schedule that interleaves",
        plus("layout: {pp: 2}\n", model=SIX_BLOCKS),
        0,
        "2 stages per rank or more; found 1",
        "one is 1f1b",
        "pipeline.schedule=interleaved-1f1b",
        "pipeline.stages_per_rank=1",
    ),
    one(
        "more stages than blocks",
        plus("layout:\n  pp: 4\npipeline: {schedule: zbv}\n", model=SIX_BLOCKS),
        5,
        "6 blocks cannot form 8 stages",
        "at most 3 ranks with 2 stages each",
    ),
    one(
        "more stages than blocks on a world of some size",
        plus("layout:\n  dp_shard: 2\n  pp: -1\n", model=SIX_BLOCKS),
        6,
        "6 blocks cannot form 7 stages",
        "at most 6 ranks with 1 stage each",
        world_size=14,
    ),
    one(
        "a split for other stages",
        plus("layout: {pp: 2}\npipeline:\n  split: [2, 2, 2]\n", model=SIX_BLOCKS),
        6,
        "has 3 numbers, and there are 2 stages",
        "give the number of blocks of each stage",
    ),
    one(
        "a split of other blocks",
        plus("layout: {pp: 2}\npipeline:\n  split: [3, 1]\n", model=SIX_BLOCKS),
        6,
        "is for 4 blocks, and the model has 6",
        "make the numbers add up to 6",
    ),
    one(
        "a split with an empty stage",
        plus("layout: {pp: 2}\npipeline:\n  split: [6, 0]\n", model=SIX_BLOCKS),
        6,
        "found the integer 0",
        "at least 1",
    ),
    one(
        "compile where backwards are split",
        plus("layout: {pp: 2}\npipeline: {schedule: zb-h1}\nparallel:\n  compile: true\n", model=SIX_BLOCKS),
        7,
        "a compiled block computes its gradients at once",
        "use compile: auto or false, or a schedule such as 1f1b",
    ),
    one(
        "misspelt key of the pipeline",
        plus("layout: {pp: 2}\npipeline:\n  pp_schedule: gpipe\n", model=SIX_BLOCKS),
        6,
        "no key pipeline.pp_schedule",
        "did you mean schedule?",
    ),
]

TOGETHER = [
    one(
        "no length", plus(train="{seed: 1}"), 3, "the length of the run is missing", "give train.steps or train.epochs"
    ),
    one("two lengths", plus(train="{steps: 100, epochs: 2}"), 3, "a run has one length", "train.steps=null"),
    one("length twice", plus(), 0, "steps is 100 and train.epochs is 2", "train.steps=null", "train.epochs=2"),
    one("micro above global", plus(batch="{global_size: 4, micro_size: 8}"), 2, "micro_size 8", "at most 4"),
    one("min_lr above lr", plus("optimizer: {lr: 1e-4, min_lr: 1e-3}\n"), 4, "min_lr 0.001 is above", "lower min_lr"),
    one(
        "decay without wsd", plus("optimizer: {decay_steps: 5}\n"), 4, "the schedule is cosine", "or use schedule: wsd"
    ),
    one("decay too long", plus("optimizer: {schedule: wsd, decay_steps: 90}\n"), 4, "together", "at most 80"),
    one("profile backwards", plus("metrics: {profile: [9, 3]}\n"), 4, "from step 9 to step 3", "[3, 9]"),
    one("profile behind the end", plus("metrics: {profile: [9, 300]}\n"), 4, "the run at step 100", "end it at 100"),
    one("profile of 3", plus("metrics: {profile: [1, 2, 3]}\n"), 4, "a list of 2 integers", "found a list of 3"),
    one("validation of 1", plus("data: {validation: 1}\n"), 4, "found the integer 1", "below 1"),
    one("negative validation", plus("data: {validation: -0.1}\n"), 4, "found the number -0.1", "at least 0"),
    one(
        "digits have no files", plus("data: {source: digits, validation: x}\n"), 4, "the path x", "a share, such as 0.2"
    ),
    one("images without a size", plus("data: {source: images, path: x}\n"), 4, "data.image_size", "such as 224"),
    one("unknown source", plus("data: {source: texts}\n"), 4, "found the text 'texts'", "did you mean text?"),
    one("tokenizer by name", plus("data: {tokenizer: gpt2}\n"), 4, "found the text 'gpt2'", "ends in .json"),
    one("field without source", plus("data: {text_field: body}\n"), 4, "no fields", "take it away"),
    one("source without path", plus("data: {source: jsonl}\n"), 4, "jsonl needs data.path", "a .jsonl file"),
    one("source with path", plus("data: {path: x}\n"), 4, "python-stdlib takes no data.path", "take it away"),
    one(
        "path that is not there",
        plus("data:\n  source: text\n  path: /gone/x.txt\n"),
        6,
        "no /gone/x.txt",
        "the folder / is there",
        for_training=True,
    ),
    one(
        "one of a pair", plus("data: {source: megatron, path: MODEL}\n"), 4, ".bin", "mend the path", for_training=True
    ),
    one(
        "validation that is not there",
        plus("data: {source: text, path: MODEL, validation: /gone}\n"),
        4,
        "no /gone",
        "mend the path",
        for_training=True,
    ),
    one(
        "tokenizer that is not there",
        plus("data: {tokenizer: /gone.json}\n"),
        4,
        "no /gone.json",
        "mend",
        for_training=True,
    ),
    one(
        "source file that is not there", plus("data: {source: /gone.py}\n"), 4, "no /gone.py", "mend", for_training=True
    ),
]

CHECKPOINTS = [
    one("checkpoints of a word", plus("checkpoint: {every: epcoh}\n"), 4, "'epcoh'", "did you mean epoch?"),
    one("keep none", plus("checkpoint: {keep_last: 0}\n"), 4, "checkpoint.keep_last", "at least 1"),
    one("checkpoints by another name", plus("checkpoint: {save_steps: 5}\n"), 4, "save_steps", "did you mean every?"),
    one(
        "resume by another name", plus(train="{steps: 9, resume_from_checkpoint: x}"), 3, "no key", "checkpoint.resume"
    ),
    one(
        "kept and not saved",
        plus("checkpoint:\n  every: 100\n  keep_every: 250\n"),
        6,
        "keep_every 250 is no multiple",
        "use 200",
    ),
    one("kept of epochs", plus("checkpoint: {every: epoch, keep_every: 5}\n"), 4, "the ends of epochs", "a number of"),
    one("kept of none", plus("checkpoint: {every: 0, keep_every: 5}\n"), 4, "only at the end", "take keep_every away"),
    one(
        "best without evaluations",
        plus("checkpoint: {keep_best: true}\n", train="{steps: 100, eval_every: 0}"),
        4,
        "train.eval_every is 0",
        "take keep_best away",
    ),
    one(
        "best without held-out data",
        plus("checkpoint: {keep_best: true}\ndata: {validation: 0}\n"),
        4,
        "data.validation is 0",
        "set it",
    ),
    one("best of one", plus("checkpoint: {keep_best: true, every: 0}\n"), 4, "several checkpoints", "such as to 100"),
    one(
        "best between evaluations",
        plus("checkpoint: {keep_best: true, every: 120}\n"),
        4,
        "train.eval_every 50 does not evaluate",
        "checkpoint.every=50 or 100",
    ),
    one(
        "best of epochs",
        plus("checkpoint: {keep_best: true}\n", train="{steps: 100, eval_every: epoch}"),
        4,
        "train.eval_every epoch",
        "checkpoint.every=epoch",
    ),
    one("resume from nothing", plus("checkpoint:\n  resume:\n"), 5, "found nothing (null)", "the default is latest"),
    one(
        "resume from a folder that is not there",
        plus("checkpoint:\n  resume: /gone/run\n"),
        5,
        "there is no /gone/run",
        "mend the path",
        for_training=True,
    ),
    one(
        "misspelt latest",
        plus("checkpoint: {resume: lastest}\n"),
        4,
        "there is no",
        "did you mean latest?",
        for_training=True,
    ),
    one("a limit without a unit", plus(train="{steps: 9, time_limit: 3h50}"), 3, "'3h50' is no length", "3h50m, 90s"),
    one("a limit of nothing", plus(train="{steps: 9, time_limit: 0s}"), 3, "no time at all", "3h50m, 90s"),
    one("a limit of less", plus(train="{steps: 9, time_limit: -5}"), 3, "train.time_limit", "a number above 0"),
]

OVERRIDES = [
    one(
        "override with a text", plus(), 0, "train.steps=abc: train.steps: expected", "an integer of", "train.steps=abc"
    ),
    one("override of no key", plus(), 0, "train.stepz=5: there is no key", "did you mean steps?", "train.stepz=5"),
    one("override of no section", plus(), 0, "no section steps", "did you mean train.steps?", "steps=5"),
    one("override without =", plus(), 0, "an override reads section.key=value", "train.steps=50", "train.steps"),
    one("override with dashes", plus(), 0, "without dashes", "train.steps=50", "--train.steps=5"),
    one("override without a name", plus(), 0, "an override reads", "train.steps=50", "train.=5"),
    one("override that is not YAML", plus(), 0, "this is not YAML", "close the brace", "layout={tp: 2"),
    one("override with an alias", plus(), 0, "aliases (*name)", "write the value out", "train.output=*a"),
    one(
        "override of a value's key",
        plus(),
        0,
        "steps is the integer 100 at",
        "override train.steps itself",
        "train.steps.x=1",
    ),
    one("override without a space", plus(), 0, "no axis 'tp:2'", "a colon needs a space", "layout={tp:2}"),
    one("override of a section", plus(), 0, "train is a section", "expected keys such as", "train=5"),
]

MANY = Broken(
    "many at once",
    "model: {name: MODEL, width: 8, heads: x}\n"
    "data:\n  seq_len: '3'\n  sequence_length: 3\n"
    "layout: {dp: 2, tp: 0}\n"
    "batch: {global_size: 4, micro_size: 8}\n"
    "train:\n  seed: &s 1\n  precision: fp16\n  steps: 50\n  steps: 60\n"
    "trian: {}\n",
    [
        Error(1, "model.heads", "expected an integer"),
        Error(3, "data.seq_len", "write 3"),
        Error(4, "data.sequence_length", "did you mean seq_len?"),
        Error(5, "no axis 'dp'", "dp_shard"),
        Error(5, "layout.tp", "at least 1"),
        Error(6, "micro_size 8", "at most 4"),
        Error(8, "anchors", "write the value out"),
        Error(9, "train.precision", "`float16`"),
        Error(11, "steps is given twice", "take one of them away"),
        Error(12, "no section trian", "did you mean train?"),
        Error(0, "optimizer.lr", "above 0"),
    ],
    ("optimizer.lr=-1",),
)

LONG, ZEROS = "x" * 256, "1" + "0" * 50
LLAMA = "{name: llama, rope_scaling: {rope_type: llama3, factor: 2, %s}}"
# Each of these was a traceback, a hang, a folder called ~, or another experiment.
HOSTILE = [
    one(
        "a key twice in rope_scaling",
        plus(model="\n  name: llama\n  rope_scaling:\n    factor: 2\n    factor: 3"),
        5,
        "factor is given twice",
        "take one of them away",
    ),
    one("an anchor in rope_scaling", plus(model=LLAMA % "low: &x 1"), 1, "anchors (&name)", "write the value out"),
    one(
        "a tag in rope_parameters",
        plus(model="{name: llama, rope_parameters: {rope_type: !!str llama3}}"),
        1,
        "tags such as",
        "leave it out",
    ),
    one(
        "no number as theta",
        plus(model="{name: llama, rope_parameters: {rope_theta: x}}"),
        1,
        "rope_theta is 'x'",
        "a number above 0",
    ),
    one("a theta of 0", plus(model="{name: llama, rope_theta: 0}"), 1, "rope_theta is 0", "a number above 0"),
    one(
        "a factor of nan",
        plus(
            model="{name: llama, rope_scaling: {rope_type: llama3, factor: .nan, low_freq_factor: 1, "
            "high_freq_factor: 4, original_max_position_embeddings: 99}}"
        ),
        1,
        "missing: factor",
        "numbers factor, low_freq_factor",
    ),
    *(
        one(f"{where}: {what}", plus(), 0, said, out, f"{where}={value}")
        for where in (
            "train.output",
            "train.export",
            "model.name",
            "model.weights",
            "checkpoint.resume",
            "checkpoint.path",
            "data.path",
            "data.validation",
            "data.cache",
            "data.source",
            "data.tokenizer",
            "pipeline.schedule",
        )
        for what, value, said, out in (
            ("a home of nobody", "~nouser/x", "no home folder ~nouser", "write the path out"),
            ("a name above 255 bytes", f"/tmp/{LONG}", "too long for a path", "name another one"),
            ("a path above 4095 bytes", "/xx" * 1400, "too long for a path", "name another one"),
            ("nothing", '""', "found an empty text", "write . for"),
            ("U+0000", '"a\\0b"', "U+0000", "take the escape out"),
        )
    ),
    one("U+0000 in a key", plus(model='{name: MODEL, width: 8, shares: {"a\\0": 1}}'), 1, "U+0000", "take the escape"),
    one("a model that raises", plus(model="{name: MODEL.raises.py}"), 1, "it raises ValueError: no", "cannot be used"),
    one("a model that exits", plus(model="{name: MODEL.exits.py}"), 1, "it raises SystemExit: 0", "cannot be used"),
    one("a model that asserts", plus(model="{name: MODEL.asserts.py}"), 1, "AssertionError: why", "cannot be used"),
    one(
        "a model that cannot be built",
        plus("layout: {tp: 2}\n", model="{name: MODEL.unbuilt.py, width: 8}"),
        1,
        "refuses these keys: RuntimeError: too wide",
        "the model",
    ),
    one(
        "10^7 samples through a pipeline",
        plus("layout: {pp: 2}\n", model=SIX_BLOCKS, batch="{global_size: 10000000, micro_size: 2}"),
        1,
        "10,000,000 passes",
        "fewer microbatches",
    ),
    one(
        "10^5 stages", plus("layout: {pp: 100000}\n", model=SIX_BLOCKS), 4, "cannot form 100,000 stages", "at most 6 ra"
    ),
    one(
        f"{ZEROS} stages",
        plus(f"layout: {{pp: {ZEROS}}}\n", model=SIX_BLOCKS),
        4,
        "cannot form 100,000,",
        "at most 6 ra",
    ),
    *(
        one(
            f"{key} of {value[:9]}", plus("layout: {tp: 2}\n", f"{{{key}: {value}}}"), 1, f"{key} is 10000", f"most {m}"
        )
        for key, value, m in (
            ("num_hidden_layers", "1000000", "4,096"),
            ("num_attention_heads", ZEROS, "65,536"),
            ("num_key_value_heads", ZEROS, "65,536"),
            ("hidden_size", ZEROS, "4,194,304"),
            ("intermediate_size", ZEROS, "4,194,304"),
            ("head_dim", ZEROS, "4,194,304"),
            ("vocab_size", ZEROS, "16,777,216"),
        )
    ),
]

BROKEN = [
    *HOSTILE,
    *YAML,
    *KEYS,
    *TYPES,
    *MODELS,
    *LAYOUTS,
    *EXPERTS,
    *STAGES,
    *TOGETHER,
    *CHECKPOINTS,
    *OVERRIDES,
    MANY,
]
