"""The model files of docs/foreign-models.md train on a mesh as in one process; what the page says
is refused is."""

import shutil
from pathlib import Path

import pytest

from meshtrain.metrics.logger import read
from tests.documents import REPO, blocks
from tests.launching import Finished, forked

PAGE = REPO / "docs" / "foreign-models.md"
SHOWN = list(blocks(PAGE))
FILES = {block.file: block.text for block in SHOWN if block.file is not None}
NANO_GPT = (REPO / "tests" / "models" / "nano_gpt.py").read_text()
LAYOUTS = "{dp_shard: 2}", "{pp: 2}", "{tp: 2}"
GPT = "model={name: gpt.py, vocab_size: 256, block_size: 64, n_layer: 2, n_head: 4, n_embd: 32}"
SHORT = (
    "data.seq_len=32",
    "batch.global_size=8",
    "batch.micro_size=2",
    "optimizer.lr=1e-2",
    "optimizer.warmup_steps=0",
    "train.steps=4",
    "train.precision=float64",
    "train.eval_every=0",
    "train.sample_tokens=0",
    "checkpoint.every=0",
)
TEXT = ("data.source=text", f"data.path={PAGE}")
IMAGES = ("data={source: digits}",)
# What a library rounds to float32 inside keeps its float64 here, as a bug has to stand out.
WHOLE_DIGITS = "\n\nfrom tests.float64_inside import keep_float64\n\nkeep_float64({!r})\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the page's files, and nanoGPT's."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "model.py").write_text(NANO_GPT)
    return tmp_path


def run(folder: Path, processes: int, *overrides: str) -> Finished:
    return forked(processes, "-m", "meshtrain.train", "gpt.yaml", *SHORT, *overrides, cwd=folder)


def numbers(folder: Path, layout: str, *overrides: str) -> list[float]:
    """Loss and gradient norm of each step."""
    output = folder / "run"
    shutil.rmtree(output, ignore_errors=True)
    processes = 1 if layout == "{dp_shard: 1}" else 2
    run(folder, processes, *overrides, f"layout={layout}", f"train.output={output}").check()
    return [row[name] for row in read(output / "metrics.jsonl") for name in ("loss", "grad_norm")]


def same_on_all_layouts(folder: Path, *overrides: str, layouts: tuple[str, ...] = LAYOUTS) -> None:
    alone = numbers(folder, "{dp_shard: 1}", *overrides)
    assert len(alone) == 8
    assert alone[0] != alone[2], "a model that does not move would agree with anything"
    for layout in layouts:
        assert numbers(folder, layout, *overrides) == pytest.approx(alone, rel=1e-9), layout


def apply_diffs(folder: Path) -> None:
    """Makes the changes that the page shows, each in the file that has those lines."""
    for block in SHOWN:
        if block.language != "diff":
            continue
        changes: list[tuple[list[str], list[str]]] = []
        for line in block.text.splitlines():
            if line.startswith("-") and (not changes or changes[-1][1]):
                changes.append(([], []))
            changes[-1][line.startswith("+")].append(line[1:])
        for old, new in changes:
            before, after = ("".join(f"{line}\n" for line in lines) for lines in (old, new))
            (file,) = [
                name for name in ("model.py", "gpt.py") if before in (folder / name).read_text()
            ]
            text = (folder / file).read_text()
            assert text.count(before) == 1
            (folder / file).write_text(text.replace(before, after))


def test_nano_gpt_trains_as_in_one_process(folder: Path) -> None:
    same_on_all_layouts(folder, GPT, *TEXT)


def test_its_heads_are_split_with_the_lines_that_the_page_changes(folder: Path) -> None:
    plain = numbers(folder, "{dp_shard: 1}", GPT, *TEXT)
    apply_diffs(folder)
    assert "packed_colwise" in (folder / "gpt.py").read_text()
    assert numbers(folder, "{tp: 2}", GPT, *TEXT) == pytest.approx(plain, rel=1e-9)


@pytest.mark.slow
def test_its_dropout_is_the_same_on_every_layout_by_the_lines_of_the_page(folder: Path) -> None:
    (loop,) = [block.text for block in SHOWN if block.text.startswith("for module in list")]
    constructor = ["    def __init__(self, config):", "        super().__init__(config)"]
    constructor += [f"        {line}" for line in loop.splitlines()]
    head = "from torch import nn\n\nfrom meshtrain.dropout import Dropout\n"
    text = FILES["gpt.py"].replace(
        "class Model(GPT):\n", "class Model(GPT):\n" + "\n".join(constructor) + "\n\n"
    )
    (folder / "gpt.py").write_text(head + text)
    dropped = GPT.replace("}", ", dropout: 0.2}")
    assert numbers(folder, "{dp_shard: 1}", dropped, *TEXT) != numbers(
        folder, "{dp_shard: 1}", GPT, *TEXT
    )
    same_on_all_layouts(folder, dropped, *TEXT)


@pytest.mark.slow
def test_the_vit_of_transformers_trains_as_in_one_process(folder: Path) -> None:
    with (folder / "vit.py").open("a") as file:
        file.write(WHOLE_DIGITS.format("transformers"))
    same_on_all_layouts(folder, "model={name: vit.py, layers: 2, width: 32}", *IMAGES)


@pytest.mark.integrations
def test_x_transformers_trains_as_in_one_process(folder: Path) -> None:
    with (folder / "x_decoder.py").open("a") as file:
        file.write(WHOLE_DIGITS.format("x_transformers"))
    model = "model={name: x_decoder.py, layers: 2, width: 64}"
    same_on_all_layouts(folder, model, "data.mask_documents=true", *TEXT)


@pytest.mark.integrations
def test_the_wrapper_of_x_transformers_trains_as_one_block(folder: Path) -> None:
    (folder / "whole.py").write_text(WRAPPER + WHOLE_DIGITS.format("x_transformers"))
    same_on_all_layouts(folder, "model={name: whole.py}", *TEXT, layouts=("{dp_shard: 2}",))


WRAPPER = """
from dataclasses import dataclass
from x_transformers import Decoder, TransformerWrapper

@dataclass
class Config:
    vocab_size: int = 256

class Model(TransformerWrapper):
    def __init__(self, config):
        layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, rotary_pos_emb=True)
        super().__init__(num_tokens=config.vocab_size, max_seq_len=64, attn_layers=layers)

    def forward(self, tokens, positions, documents):
        return super().forward(tokens, pos=positions)
"""


@pytest.mark.integrations
def test_the_vit_of_timm_trains_as_in_one_process(folder: Path) -> None:
    # timm imports torchvision. Where torch is another build than that of torchvision's operators,
    # neither loads, nor then does transformers: so no extra installs them.
    pytest.importorskip("timm", reason="timm is not installed", exc_type=ImportError)
    same_on_all_layouts(folder, "model={name: timm_vit.py, layers: 2, width: 32}", *IMAGES)


FORWARD = (
    "    def forward(self, tokens, positions, documents):  # (b, s) each -> logits (b, s, v)\n"
)


@pytest.mark.parametrize(
    ("change", "overrides", "said"),
    [
        pytest.param(
            ('c_attn": "colwise_gather_output', 'c_attn": "packed_colwise'),
            ("layout={tp: 2}",),
            "transformer.h.0 fails where the plain model does not: ValueError: not enough values "
            "to unpack (expected 3, got 2)",
            id="heads that the class counts",
        ),
        pytest.param(
            (FORWARD, "    def unused(self, tokens, positions, documents):\n"),
            (),
            "the forward of Model takes (idx, targets=None), and is called with tokens, positions "
            "and documents: too many positional arguments",
            id="the class's own arguments",
        ),
        pytest.param(
            (FORWARD, f"{FORWARD}        return super().forward(tokens, tokens)\n"),
            (),
            "the model's output is a tuple: its forward has to return a tensor of logits",
            id="logits and loss",
        ),
        pytest.param(
            (FORWARD, f"{FORWARD}        return super().forward(tokens)[0]\n"),
            (),
            "the model's output is a tensor (2, 1, 256): its forward has to return",
            id="the last token",
        ),
        pytest.param(
            ("", ""),
            ("layout={tp: 2}", "model.dropout=0.1"),
            "transformer.drop is a Dropout, whose mask each rank of tp would draw for itself",
            id="dropout over tp",
        ),
        pytest.param(
            ("", ""),
            ("data.mask_documents=true",),
            "the model computes something else for a document if another is before it in its row: "
            "transformer.h.0",
            id="documents",
        ),
        pytest.param(("", ""), ("layout={cp: 2}",), "the model gpt.py has no cp_plan", id="cp"),
    ],
)
def test_what_is_refused(
    change: tuple[str, str], overrides: tuple[str, ...], said: str, folder: Path
) -> None:
    file = folder / "gpt.py"
    text = file.read_text()
    assert change[0] in text
    file.write_text(text.replace(*change) if change[0] else text)
    ended = run(folder, 2 if "layout" in "".join(overrides) else 1, GPT, *TEXT, *overrides)
    assert ended.status == 2, ended
    assert said in " ".join(ended.err.split()), ended.err


@pytest.mark.parametrize(
    ("change", "layout", "said"),
    [
        (("", ""), "{pp: 8}", "4 blocks cannot form 8 stages"),
        (('lm_head"', 'head"'), "{tp: 2}", "the tp_plan's 'head' matches no layer"),
        (
            ("self.transformer.ln_f(x)", "x + first"),
            "{pp: 2}",
            "what the model returns is computed from the parameter transformer.wte.weight",
        ),
    ],
)
def test_a_plan_says_what_is_refused(
    change: tuple[str, str], layout: str, said: str, folder: Path
) -> None:
    file = folder / "gpt.py"
    text = file.read_text().replace(
        "        for block in", "        first = x\n        for block in"
    )
    file.write_text(text.replace(*change) if change[0] else text)
    ended = forked(1, "-m", "meshtrain.cli", "plan", "gpt.yaml", f"layout={layout}", cwd=folder)
    assert ended.status == 2
    assert said in " ".join(ended.err.split())
