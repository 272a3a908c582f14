"""Trains a tiny model of every causal language model of transformers on several layouts, and
compares each with one process in float64.

    python -m tools.families                  goes on where it was stopped (`make families`)
    python -m tools.families llama gemma2     these, again
    python -m tools.families --layouts pp cp  these columns of all families, again
    python -m tools.families --check llama    measures, and says what is not as in the table
    python -m tools.families --table          only writes docs/transformers.md

Each family has a file in tools/families/; the table of docs/transformers.md is made from them.
"""

import argparse
import dataclasses
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx  # so that no forked process imports it
import transformers
import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import meshtrain.run.results
import meshtrain.run.step_logger
import meshtrain.train
from meshtrain.config import Config, ConfigErrors
from meshtrain.errors import InputError
from meshtrain.job.environment import read_environment
from meshtrain.job.locate import model_file
from meshtrain.job.process import join
from meshtrain.metrics.logger import read
from meshtrain.parallel import fsdp
from meshtrain.parallel.tp_plan import PLANS
from tests.float64_inside import keep_float64
from tests.launching import ROOT, free_port

RESULTS = ROOT / "tools" / "families"
NEEDS = ROOT / "tools" / "families.yaml"
DOCUMENT = ROOT / "docs" / "transformers.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
# Each family and its class. Two text models have one under the name of all of a family's models.
FAMILIES: dict[str, str] = {
    **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "emu3_text_model": "Emu3ForCausalLM",
    "mllama_text_model": "MllamaForCausalLM",
}
STEPS = 4
COMPARED = ("loss", "grad_norm", "samples")  # of each step
MOST_S = 240  # of one run
LAST_WORDS_S = 20  # of the other ranks, once one has ended
MOST_PARAMETERS = 2**24  # of a tiny model: several are in memory at once
TOLERANCE = 1e-9  # relative, in float64

# Keys of the classes' configs, whichever of them a class has.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), 64),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("decoder_layers",), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("head_dim",), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok",), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 1),
    "pad_token_id": None,
    # latent attention
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 16),
    "qk_rope_head_dim": 8,
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    # state spaces: heads x head = expand x hidden size
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("mamba_d_ssm",), 128),
}

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "dp_shard 2": (2, ("layout={dp_shard: 2}",)),
    "dp_shard 2, recompute": (2, ("layout={dp_shard: 2}", "parallel.recompute=full")),
    "tp 2": (2, ("layout={tp: 2}",)),
    "dp_shard 2 x tp 2": (4, ("layout={dp_shard: 2, tp: 2}",)),
    "pp 2": (2, ("layout={pp: 2}",)),
    "cp 2": (2, ("layout={cp: 2}",)),
    "ep 2": (2, ("layout={dp_shard: 2}", "parallel.expert_parallel=2")),
}
ALONE = "one process"


def tiny(family: str) -> dict[str, Any]:
    """The keys of a tiny model: sizes, no dropout, and what the family needs besides."""
    kind = CONFIG_MAPPING[family]
    fields = {field.name for field in dataclasses.fields(kind)}
    other_names = kind.attribute_map
    keys = {name: size for name, size in SIZES.items() if name in fields}
    for name, meant in other_names.items():
        if name in SIZES and meant not in keys:
            keys[name] = SIZES[name]
    if "kv_lora_rank" in fields:
        keys["num_key_value_heads"] = keys["num_attention_heads"]
    for name in fields:
        if "drop" in name and isinstance(getattr(kind, name, None), float):
            keys[name] = 0.0
    needs = yaml.safe_load(NEEDS.read_text()) or {}
    return keys | needs.get(family, {})


def base(family: str) -> str:
    """The config of a family's run."""
    return json.dumps(  # which is YAML, too
        {
            "model": {"name": "transformers", "model_type": family, "config": tiny(family)},
            "data": {"source": str(ROOT / "tests" / "fuzz" / "answers.py"), "seq_len": 20},
            "batch": {"global_size": 6, "micro_size": 2},
            "optimizer": {"lr": 1e-3, "warmup_steps": 0, "schedule": "constant"},
            "train": {"steps": STEPS, "precision": "float64", "eval_every": 0, "sample_tokens": 0},
            "checkpoint": {"every": 0, "resume": "none"},
        }
    )


# Runs ---------------------------------------------------------------------------------------------


def run(family: str, ranks: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Trains in forked processes. Returns `rows`, or `refused` or `failed` with the reason."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(base(family))
        job = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        children = []
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                if ranks > 1:
                    os.environ.update(job, RANK=str(rank), LOCAL_RANK=str(rank))
                _train(folder, overrides, rank, ranks)
            children.append(pid)
        in_time = _wait(children)
        ends = [file for rank in range(ranks) if (file := folder / f"end{rank}.json").exists()]
        # What came first is the cause: other ranks fail because that one is gone.
        ends.sort(key=lambda file: file.stat().st_mtime_ns)
        said = [json.loads(file.read_text()) for file in ends]
        for end in said:
            if "refused" in end or "failed" in end:
                return end
        if not in_time:
            return {"failed": f"not done within {MOST_S} s"}
        if len(said) < ranks:
            return {"failed": "a rank has ended without a word"}
        rows = read(folder / "run" / "metrics.jsonl")
        return {
            "rows": [{key: row[key] for key in ("loss", "grad_norm", "samples")} for row in rows]
        }


def _train(folder: Path, overrides: Sequence[str], rank: int, ranks: int) -> None:
    """In a forked process, which it ends."""
    end: dict[str, Any] = {"done": True}
    try:
        if "FAMILIES_DEBUG" not in os.environ:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
        keys = [*overrides, f"train.output={folder / 'run'}"]
        job = join(read_environment(os.environ))
        config = Config.load(
            str(folder / "config.yaml"), keys, world_size=job.world_size, for_training=True
        )
        meshtrain.train.run(config, job)
    except ConfigErrors as errors:
        end = {"refused": _sentence(str(errors))}
    except InputError as error:
        end = {"refused": _sentence(str(error))}
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        end = {"failed": f"{type(error).__name__}: {error}"[:300] + f" ({where})"}
        if "FAMILIES_DEBUG" in os.environ:
            traceback.print_exception(error)
    (folder / f"end{rank}.json").write_text(json.dumps(end))
    if rank == 0:
        _wait_for_ends(folder, ranks)
    os._exit(0)


def _wait_for_ends(folder: Path, ranks: int) -> None:
    """Rank 0 has the job's store, with which other ranks may still talk. One that has died writes
    no end."""
    begin = time.monotonic()
    while time.monotonic() - begin < LAST_WORDS_S:
        if all((folder / f"end{rank}.json").exists() for rank in range(ranks)):
            return
        time.sleep(0.01)


def _sentence(text: str) -> str:
    """A refusal without the places in this run's config."""
    lines = [
        line for line in text.splitlines() if line and not line.endswith((" error", " errors"))
    ]
    place = re.compile(r"^(\S*config\.yaml:\d+|command line): (layout=\S+( \S+)*\}: )?")
    return " ".join(place.sub("", line.strip()) for line in lines)


def _wait(children: list[int]) -> bool:
    """Until all have ended; a rank that has failed leaves the others waiting. Returns whether none
    had to be killed for the time."""
    begin = time.monotonic()
    waiting = set(children)
    first_end = None
    while waiting:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid in waiting:
            waiting.remove(pid)
            first_end = first_end or time.monotonic()
            continue
        now = time.monotonic()
        late = now - begin > MOST_S
        if late or (first_end is not None and now - first_end > LAST_WORDS_S):
            for left in waiting:
                os.kill(left, signal.SIGKILL)
                os.waitpid(left, 0)
            return not late
        time.sleep(0.01)
    return True


def _warm_up(family: str) -> int:
    """Builds the model here, so that no forked process imports its class and finds out anew what
    follows from its config. Returns the number of its parameters; 0: it cannot be built."""
    adapter = model_file("transformers")
    parameters = 0
    # What is wrong is said by the runs.
    with suppress(Exception):
        config = adapter.Config(model_type=family, config=tiny(family))
        with torch.device("meta"):
            model = adapter.Model(config)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        for plan in PLANS:
            getattr(adapter, plan, lambda config: None)(config)
    return parameters


def compared(rows: list[dict], expected: list[dict]) -> float:
    """The largest relative difference of loss and gradient norm."""
    if len(rows) != len(expected) or any(
        a["samples"] != b["samples"] for a, b in zip(rows, expected, strict=True)
    ):
        return math.inf
    largest = 0.0
    for row, other in zip(rows, expected, strict=True):
        for key in ("loss", "grad_norm"):
            scale = max(abs(other[key]), 1e-30)
            difference = abs(row[key] - other[key]) / scale
            largest = max(largest, difference if math.isfinite(difference) else math.inf)
    return largest


def measure(family: str, wanted: Sequence[str]) -> dict[str, Any]:
    """What a family does on layouts: layout -> result."""
    parameters = _warm_up(family)
    if parameters > MOST_PARAMETERS:
        sizes = f"{parameters:,} parameters are no tiny model: give its sizes in families.yaml"
        return {ALONE: {"failed": sizes}}
    alone = run(family, 1, ("layout={dp_shard: 1}",))
    if "rows" not in alone:
        return {ALONE: alone}
    results: dict[str, Any] = {ALONE: {"loss": [row["loss"] for row in alone["rows"]]}}
    for name in wanted:
        ranks, overrides = LAYOUTS[name]
        end = run(family, ranks, overrides)
        if "rows" in end:
            difference = compared(end["rows"], alone["rows"])
            word = "exact" if difference <= TOLERANCE else "wrong"
            end = {word: float(f"{difference:.1e}")}
        results[name] = end
    return results


# Files --------------------------------------------------------------------------------------------


def result_file(family: str) -> Path:
    return RESULTS / f"{family}.json"


def stored(family: str) -> dict[str, Any]:
    file = result_file(family)
    return json.loads(file.read_text()) if file.exists() else {}


def store(family: str, results: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(
        {
            "family": family,
            "class": FAMILIES[family],
            "transformers": transformers.__version__,
            "results": results,
        },
        indent=1,
    )
    result_file(family).write_text(text + "\n")


def describe(results: dict[str, Any]) -> str:
    words = []
    for name, end in results.items():
        if name == ALONE and "loss" in end:
            continue
        word, value = next(iter(end.items()))
        words.append(f"{name}: {word}" + ("" if word == "exact" else f" {str(value)[:160]}"))
    return "; ".join(words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("families", nargs="*", help="default: those without a result")
    parser.add_argument("--layouts", nargs="+", help="words of the layouts; default: all")
    parser.add_argument("--check", action="store_true", help="compare with the table, write none")
    parser.add_argument("--table", action="store_true", help="only write the table")
    options = parser.parse_args()
    if options.check:
        return _check(options.families, options.layouts)
    if not options.table:
        _measure_all(options.families, options.layouts)
    write_table()
    return 0


def _check(families: Sequence[str], words: Sequence[str] | None) -> int:
    """Status 1 if a result is another one than that in the family's file."""
    _prepare()
    status = 0
    for family in families:
        before = stored(family)["results"]
        for name, end in measure(family, _wanted(words)).items():
            expected = before[name]
            if end.keys() == expected.keys() and "failed" not in end and "wrong" not in end:
                continue
            status = 1
            print(f"{family}, {name}: {end}, and the table has {expected}", flush=True)
    return status


def _wanted(words: Sequence[str] | None) -> list[str]:
    return [name for name in LAYOUTS if not words or any(word in name.split() for word in words)]


def _prepare() -> None:
    """Of this process, which is forked for each run."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    keep_float64("transformers")
    for module, name, value in (
        # What costs more than the steps of a tiny model, and changes none of them.
        (meshtrain.run.step_logger, "sample_flops", lambda *_: (None, "not counted")),
        (meshtrain.run.step_logger, "peak_flops", lambda *_: (1.0, "a peak of 1 FLOP/s")),
        (meshtrain.run.results, "plot_loss", lambda *_: "no picture"),
        (fsdp, "MIN_UNIT_SIZE", 0),
    ):
        setattr(module, name, value)


def _measure_all(families: Sequence[str], words: Sequence[str] | None) -> None:
    _prepare()
    for family in families or FAMILIES:
        wanted = _wanted(words)
        before = stored(family).get("results", {})
        if not families and not words:
            wanted = [name for name in wanted if name not in before]
            if not wanted or (ALONE in before and "loss" not in before[ALONE]):
                continue
        begin = time.monotonic()
        results = before | measure(family, wanted)
        store(family, results)
        print(f"{family} ({time.monotonic() - begin:.0f} s): {describe(results)}", flush=True)


def write_table() -> None:
    """Writes the table of docs/transformers.md from the families' files."""
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


def table() -> str:
    """A row for each family, a list of the sentences, and how many cells are exact."""
    sentences: dict[str, int] = {}  # sentence -> its number
    rows = []
    exact = dict.fromkeys(LAYOUTS, 0)
    for file in sorted(RESULTS.glob("*.json")):
        described = json.loads(file.read_text())
        results = described["results"]
        cells = []
        for name in LAYOUTS:
            end = results.get(name, results[ALONE])
            exact[name] += "exact" in end
            cells.append(_cell(end, sentences))
        rows.append(f"| {described['family']} | {' | '.join(cells)} |")
    heading = f"| family | {' | '.join(LAYOUTS)} |"
    rule = "| --- " * (len(LAYOUTS) + 1) + "|"
    counts = f"| **exact** | {' | '.join(f'**{count}**' for count in exact.values())} |"
    notes = [f"{number}. {sentence}" for sentence, number in sentences.items()]
    return "\n".join([heading, rule, counts, *rows, "", *notes])


def _cell(end: dict[str, Any], sentences: dict[str, int]) -> str:
    if "exact" in end:
        return "exact"
    kind, sentence = next(iter(end.items()))
    if kind == "wrong":
        return f"**wrong**: {sentence}"
    number = sentences.setdefault(_for_any_family(sentence), len(sentences) + 1)
    return str(number) if kind == "refused" else f"**failed** {number}"


def _for_any_family(sentence: str) -> str:
    """A sentence without what differs between families: names of classes and modules, how much."""
    sentence = re.sub(r"^\S+=\S+: ", "", sentence)
    sentence = re.sub(r"\b(model|transformer|backbone|decoder|gpt_neox)(\.\w+)+", "LAYER", sentence)
    sentence = re.sub(r"\b[A-Z]\w*(ForCausalLM|LMHeadModel)\b", "CLASS", sentence)
    return re.sub(r"\d+\.\d+(e[+-]\d+)?", "N", sentence)


if __name__ == "__main__":
    sys.exit(main())
