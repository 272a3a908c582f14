"""The commands that run a checkpoint's model: the same text and the same scores on every layout, and lm-eval's."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshtrain.checkpoint.weights import load_weights
from meshtrain.cli import main as cli
from meshtrain.cli.checkpoint_model import ids_of, tokenizer_of
from meshtrain.cli.eval import windows
from meshtrain.config import Config
from meshtrain.config.locate import model_file
from meshtrain.data.tokenizer import ByteTokenizer
from meshtrain.errors import InputError
from meshtrain.modeling.build import plain_model
from tests.launching import forked

S = 32
CONFIG = """
model: {preset: llama-3.2-1b, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4,
        num_key_value_heads: 2, head_dim: 8, vocab_size: 300, initializer_range: 0.3, max_position_embeddings: 48,
        tie_word_embeddings: false}
batch: {global_size: 4, micro_size: 4}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two steps, `runs`, its `tokenizer.json`, and a `text.txt`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("run")
    text = "the mesh has ranks, and every rank has a shard of each layer\n" * 12
    (folder / "text.txt").write_text(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    data = (
        f"data: {{source: text, path: {folder}/text.txt, tokenizer: {folder}/tokenizer.json, seq_len: {S}, workers: 0, "
    )
    data += f"validation: 0, cache: {folder}/cache}}\n"
    train = f"train: {{steps: 2, eval_every: 0, sample_tokens: 0, output: {folder}/runs}}\n"
    (folder / "mine.yaml").write_text(CONFIG + data + train)
    forked(1, "-m", "meshtrain.train", folder / "mine.yaml").check()
    return folder


def command(processes: int, *arguments: str | Path) -> str:
    return forked(processes, "-m", "meshtrain.cli", *arguments).check().out


def test_text_from_the_command_line(run: Path) -> None:
    common: list[str | Path] = [
        "generate",
        run / "runs",
        "--prompt",
        "the mesh",
        "--prompt",
        "every",
        "--length",
        "8",
        "--temperature",
        "0",
    ]
    done = forked(1, "-m", "meshtrain.cli", *common).check()
    assert done.out.startswith("the mesh")
    assert "\nevery" in done.out
    assert "8/8 tokens" in done.err
    assert command(2, *common, "--layout", "{tp: 2}") == done.out


def test_a_text_goes_on_as_its_tokenizer_writes_words(run: Path) -> None:
    """A decoder of words leaves out the space before the first: there is one between the prompt and what follows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"</s>": 0} | {f"\u2581w{i}": i for i in range(1, 300)}, unk_token="</s>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words.save(str(run / "words.json"))
    arguments = ["--tokenizer", run / "words.json", "--prompt", "w1 w2", "--length", "4", "--temperature", "0"]
    assert re.fullmatch(r"w1 w2( (w\d+|</s>)){4}\n", command(1, "generate", run / "runs", *arguments))


def test_perplexity_of_a_file(run: Path) -> None:
    """By a plain model, window by window, and by the command on two layouts."""
    config = Config.load(str(run / "mine.yaml"))
    model = plain_model(config).to_empty(device="cpu").eval()
    load_weights(run / "runs", model)
    from meshtrain.data.tokenizer import open_tokenizer

    tokens = open_tokenizer(str(run / "tokenizer.json")).encode((run / "text.txt").read_text())
    total = 0.0
    with torch.no_grad():
        for before, predicted in windows(tokens, S):
            row = torch.tensor([before + predicted])
            total += float(F.cross_entropy(model(row[:, :-1])[0], row[0, 1:], reduction="sum"))
    for processes, layout in ((1, "{}"), (2, "{pp: 2}")):
        out = command(processes, "eval", run / "runs", "--files", run / "text.txt", "--layout", layout, "--json")
        (scores,) = json.loads(out.splitlines()[-1]).values()
        assert scores["tokens"] == len(tokens) - 1
        assert scores["loss"] == pytest.approx(total / (len(tokens) - 1), rel=1e-5)
        assert scores["bits_per_byte"] < scores["loss"] / 0.69


def test_a_prompt_that_is_no_text_is_told() -> None:
    """As Python gives bytes of a command line that are not UTF-8."""
    with pytest.raises(InputError, match=r"'a\\udcff' is not text in UTF-8"):
        ids_of("a\udcff", ByteTokenizer(), SimpleNamespace())  # type: ignore[arg-type]


def test_every_token_but_the_first_is_predicted_once() -> None:
    for length in range(2, 12):
        pairs = list(windows(range(length), 4))
        assert [token for _, predicted in pairs for token in predicted] == list(range(1, length))
        assert all(before == [predicted[0] - 1] for before, predicted in pairs)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "{run}", "--prompt", "a", "--top-p", "0"], "--top-p above 0"),
        (["generate", "{run}", "--prompt", "a", "--temperature", "nan"], "--temperature of at least 0"),
        (["eval", "{run}"], "name what to measure"),
        (["eval", "{run}", "--files", "/nowhere.txt"], "/nowhere.txt cannot be read"),
    ],
)
def test_wrong_options_are_told(run: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([part.replace("{run}", str(run / "runs")) for part in arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_model_without_a_cp_plan_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its attention would take padding for tokens, and know nothing of a cache."""
    monkeypatch.delattr(model_file("llama"), "cp_plan")
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", str(run / "runs"), "--prompt", "a"])
    assert ended.value.code == 2
    assert "the model llama has no cp_plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "name", "refused"),
    [
        ({"source": "text", "path": "x"}, None, False),
        ({"source": "tokens", "path": "x"}, None, True),
        ({"source": "tokens", "path": "x"}, "bytes", False),
        ({"sources": ({"source": "text", "path": "x"}, {"source": "megatron", "path": "y"})}, None, True),
    ],
)
def test_a_tokenizer_that_nobody_has_named(data: dict[str, Any], name: str | None, refused: bool) -> None:
    data = {"tokenizer": "bytes", "source": None, **data}
    data["sources"] = [SimpleNamespace(**source) for source in data.get("sources", ())]
    config: Any = SimpleNamespace(data=SimpleNamespace(**data))
    if refused:
        with pytest.raises(InputError, match=r"--tokenizer FILE\.json, or --tokenizer bytes"):
            tokenizer_of(config, name)
    else:
        assert isinstance(tokenizer_of(config, name), ByteTokenizer)


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ("", ["--length", "3"], "at least one token"),
        ("a", ["--layout", "{tp: 3}"], "tp"),
        ("a", ["--length", "48"], "49 tokens together, and model.max_position_embeddings is 48"),
        ("a", ["--tokenizer", "{run}/other.json"], "the text 'a' has the token id 300 by other.json"),
    ],
)
def test_what_does_not_fit_the_model(run: Path, prompt: str, options: list[str], says: str) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 300, "</s>": 0}, "a")).save(str(run / "other.json"))
    options = [option.replace("{run}", str(run)) for option in options]
    wrong = forked(1, "-m", "meshtrain.cli", "generate", run / "runs", "--prompt", prompt, *options)
    assert wrong.status == 2
    assert says in wrong.err


TASKS = {
    "tiny_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "tiny_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "tiny_write": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
""",
}


OURS = """
import argparse, json, sys
from meshtrain.cli.checkpoint_model import add_model_arguments, opened_model
from meshtrain.cli.harness import HarnessModel
from meshtrain.data.tokenizer import open_tokenizer
from meshtrain.run.scoring import Scorer
from lm_eval.api.instance import Instance
parser = argparse.ArgumentParser()
add_model_arguments(parser)
parser.add_argument("--requests")
options = parser.parse_args()
requests = json.load(open(options.requests))
with opened_model(options) as (model, config, job, _):
    scorer = Scorer(model, job.device, config.data.seq_len, 8)
    ours = HarnessModel(scorer, open_tokenizer(config.data.tokenizer))
    made = {kind: [Instance(kind, {}, tuple(one), i) for i, one in enumerate(of)] for kind, of in requests.items()}
    answers = {kind: getattr(ours, kind)(of) for kind, of in made.items()}
    if job.rank == 0:
        print(json.dumps(answers))
"""


@pytest.mark.integrations
@pytest.mark.timeout(600)
def test_lm_eval_gives_what_it_gives_transformers(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an exported checkpoint in float32: the answer to each request, and the scores; ours over tp too.

    Theirs without `logits_cache`: with it, of requests with the same tokens in a batch, cut into context and
    continuation at different places, theirs takes the logits of wrong positions (lm_eval 0.4.13).
    """
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    words = ["the", "mesh", "has", "ranks", "and", "every", "rank", "a", "shard", "of", "each", "layer"]
    documents = [
        {
            "question": f"{a} {b}" * (1 + 9 * (i % 2)),  # some are longer than what the model sees
            "choices": [f" {c} {a}", f" {b}", f" {a} {c} {c}"],
            "label": i % 3,
            "text": " ".join(words[(j * j * (i % 4) + j + i) % 12] for j in range(7 + 11 * i)),
        }
        for i, (a, b, c) in enumerate(zip(words, words[3:], words[5:], strict=False))
    ]
    (tmp_path / "documents.json").write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, task in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: {{test: "
        (tmp_path / f"{name}.yaml").write_text(f"{head}{tmp_path}/documents.json}}}}{task}")
    assert cli.main(["export", str(run / "runs"), str(tmp_path / "exported")]) == 0
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(run / "tokenizer.json"), eos_token="<|endoftext|>")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    theirs = HFLM(pretrained=exported, tokenizer=tokenizer, max_length=S, batch_size=3, logits_cache=False)
    settings = {"tasks": [*TASKS], "task_manager": TaskManager(include_path=str(tmp_path)), "bootstrap_iters": 0}
    expected = lm_eval.simple_evaluate(theirs, log_samples=True, **settings)
    requests: dict[str, list[list[Any]]] = {}
    answers: dict[str, list[Any]] = {}
    for name, kind in zip(TASKS, ("loglikelihood", "loglikelihood_rolling", "generate_until"), strict=True):
        samples = expected["samples"][name]
        requests[kind] = [list(one) for sample in samples for one in sample["arguments"]]
        answers[kind] = [one[0] for sample in samples for one in sample["resps"]]
    requests = json.loads(json.dumps(requests))
    for _, options in requests["generate_until"][::2]:
        options["max_new_tokens"] = options.pop("max_gen_toks")  # another name of it
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    (tmp_path / "ours.py").write_text(OURS)
    for processes, layout in ((1, "{}"), (2, "{tp: 2}")):
        on_layout: list[str | Path] = [run / "runs", "--requests", tmp_path / "requests.json", "--layout", layout]
        out = forked(processes, tmp_path / "ours.py", *on_layout).check().out
        ours = json.loads(out.splitlines()[-1])
        assert ours["generate_until"] == answers["generate_until"], layout
        assert ours["loglikelihood_rolling"] == pytest.approx(answers["loglikelihood_rolling"], rel=1e-6), layout
        numbers = [[value for value, _ in of["loglikelihood"]] for of in (ours, answers)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-6), layout
        assert [likeliest for _, likeliest in ours["loglikelihood"]] == [it for _, it in answers["loglikelihood"]]

    arguments: list[str | Path] = [
        "--tasks",
        ",".join(TASKS),
        "--include-path",
        tmp_path,
        "--layout",
        "{tp: 2}",
        "--json",
    ]
    found = json.loads(command(2, "eval", run / "runs", *arguments).splitlines()[-1])
    for name, of_task in expected["results"].items():
        scores = {key: value for key, value in of_task.items() if isinstance(value, float) and "stderr" not in key}
        assert len(scores) in (1, 2)
        assert {key: found[name][key] for key in scores} == pytest.approx(scores, rel=1e-5), name
    assert 0 < found["tiny_choice"]["acc,none"] < 1, "worth comparing"


@pytest.mark.integrations
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (S - 1, 0.0, 1.0)),
        ({"max_new_tokens": 5, "temperature": 0.7, "top_p": 0.9}, (5, 0.7, 0.9)),
        ({"max_gen_toks": 4, "max_tokens": 9, "do_sample": True, "temperature": 0.2}, (4, 0.2, 1.0)),
        ({"do_sample": False, "temperature": 1, "num_beams": 1}, (S - 1, 0.0, 1.0)),
        ({"do_sample": True}, (S - 1, 1.0, 1.0)),
        ({"do_sample": True, "temperature": 1.0, "top_k": 1}, (S - 1, 0.0, 1.0)),
    ],
)
def test_options_of_generation_mean_what_they_mean_to_lm_eval(
    options: dict[str, Any], expected: tuple[int, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshtrain.cli import harness

    seen = []

    def generate_batch(model: None, prompts: list[list[int]], length: int, **settings: Any) -> list[list[int]]:
        seen.append((length, settings["temperature"], settings["top_p"]))
        return prompts

    monkeypatch.setattr(harness, "generate_batch", generate_batch)
    scorer: Any = SimpleNamespace(seq_len=S, model=None, device=None)
    harness.HarnessModel(scorer, ByteTokenizer())._generate("a", options)
    assert seen == [expected]


@pytest.mark.integrations
@pytest.mark.parametrize(("asked", "prompt", "length"), [(256, 16, 16), (S, 16, 16), (4, S - 4, 4), (20, 16, 16)])
def test_a_long_prompt_keeps_half_of_what_the_model_sees(
    asked: int, prompt: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshtrain.cli import harness

    seen = []
    monkeypatch.setattr(harness, "generate_batch", lambda model, rows, n, **_: seen.append((len(rows[0]), n)) or rows)
    scorer: Any = SimpleNamespace(seq_len=S, model=None, device=None)
    harness.HarnessModel(scorer, ByteTokenizer())._generate("a" * 50, {"max_gen_toks": asked})
    assert seen == [(prompt, length)]


@pytest.mark.integrations
def test_an_option_of_generation_that_is_not_followed_is_told() -> None:
    from meshtrain.cli.harness import HarnessModel

    nothing: Any = None  # it is told before anything runs
    with pytest.raises(InputError, match="generation_kwargs: num_beams: expected"):
        HarnessModel(nothing, nothing)._generate("a", {"num_beams": 10, "repetition_penalty": 1.0})
