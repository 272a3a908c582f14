"""The commands that run a checkpoint's model: the same text and the same scores on every layout,
and lm-eval's."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

from meshtrain.checkpoint.weights import load_weights
from meshtrain.cli import main as cli
from meshtrain.cli.checkpoint_model import ids_of, tokenizer_of
from meshtrain.cli.eval import windows
from meshtrain.cli.generate import text_of
from meshtrain.config import Config
from meshtrain.data.tokenizer import ByteTokenizer, open_tokenizer
from meshtrain.errors import InputError
from meshtrain.job.locate import model_file
from meshtrain.modeling.build import plain_model
from tests.data.files import tokenizer_folder
from tests.launching import forked

S = 32
TABLES = yaml.safe_load(Path(__file__).with_name("generate.yaml").read_text())
TASKS = TABLES["tasks"]
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
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    data = (
        f"data: {{source: text, path: {folder}/text.txt, tokenizer: {folder}/tokenizer.json, "
        f"seq_len: {S}, workers: 0, "
    )
    data += f"validation: 0, cache: {folder}/cache}}\n"
    train = f"train: {{steps: 2, eval_every: 0, sample_tokens: 0, output: {folder}/runs}}\n"
    (folder / "mine.yaml").write_text(CONFIG + data + train)
    forked(1, "-m", "meshtrain.train", folder / "mine.yaml").check()
    return folder


def command(processes: int, *arguments: str | Path) -> str:
    return forked(processes, "-m", "meshtrain.cli", *arguments).check().out


def test_text_from_the_command_line(run: Path) -> None:
    prompts = ["--prompt", "the mesh", "--prompt", "every"]
    words: list[str | Path] = [
        "generate",
        run / "runs",
        *prompts,
        "--length",
        "8",
        "--temperature",
        "0",
    ]
    done = forked(1, "-m", "meshtrain.cli", *words).check()
    assert done.out.startswith("the mesh")
    assert "\nevery" in done.out
    assert "8/8 tokens" in done.err
    assert command(2, *words, "--layout", "{tp: 2}") == done.out


def test_a_text_ends_where_a_document_would(run: Path) -> None:
    """The token that ends documents is not printed; --ignore-end goes on behind it. A prompt may
    spell it."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(run / "tokenizer.json"))
    model = plain_model(Config.load(str(run / "mine.yaml"))).to_empty(device="cpu").eval()
    load_weights(run / "runs", model)
    prompt = made.encode("the mesh").ids
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    stop = ids[len(prompt) + 3]
    first = ids.index(stop, len(prompt)) - len(prompt)

    config = run / "ended"
    config.mkdir()
    made.save(str(config / "tokenizer.json"))
    (config / "tokenizer_config.json").write_text(json.dumps({"eos_token": made.id_to_token(stop)}))
    words: list[str | Path] = [
        "generate",
        run / "runs",
        "--prompt",
        "the mesh",
        "--length",
        "8",
        "--temperature",
        "0",
    ]
    own: list[str | Path] = [*words, "--tokenizer", config / "tokenizer.json"]
    done = forked(1, "-m", "meshtrain.cli", *own).check()
    assert done.out == made.decode(ids[: len(prompt) + first], skip_special_tokens=False) + "\n"
    assert f"{first + 1} of at most 8 tokens" in done.err
    for whole in ([*own, "--ignore-end"], words):
        assert command(1, *whole) == made.decode(ids, skip_special_tokens=False) + "\n"


def test_a_prompt_begins_as_documents_do(tmp_path: Path) -> None:
    file = tokenizer_folder(tmp_path)
    config: Any = SimpleNamespace(model=SimpleNamespace(keys={}))
    tokenizer = open_tokenizer(str(file), begin_token="auto")
    assert tokenizer.begin is not None
    plain = tokenizer.encode("a<s>", plain=True)
    assert ids_of("a", tokenizer, config) == [tokenizer.begin, *tokenizer.encode("a")]
    assert ids_of("<s>a", tokenizer, config) == [tokenizer.begin, *tokenizer.encode("a")], "once"
    assert ids_of("a<s>", tokenizer, config) == [
        tokenizer.begin,
        *tokenizer.encode("a"),
        tokenizer.begin,
    ]
    assert ids_of("a<s>", tokenizer, config, plain=True) == [tokenizer.begin, *plain]
    assert ids_of("a", open_tokenizer(str(file)), config) == tokenizer.encode("a")


def test_the_tokens_that_begin_and_end_a_text_are_not_printed(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(tokenizer_folder(tmp_path)), begin_token="auto")
    a, b = tokenizer.encode("ab")
    begin, end = tokenizer.begin, tokenizer.end
    assert begin is not None
    assert text_of([begin, a, b, end], 2, tokenizer, tokenizer.stops) == "ab"
    assert text_of([begin, a, b], 2, tokenizer, tokenizer.stops) == "ab"
    assert (
        text_of([begin, a, end], 3, tokenizer, tokenizer.stops) == f"a{tokenizer.decode([end])}"
    ), "of the prompt"
    assert text_of([begin, a, end, b], 2, tokenizer, ()) == f"a{tokenizer.decode([end])}b", (
        "with --ignore-end"
    )
    plain = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert text_of([begin, a], 2, plain, plain.stops) == f"{plain.decode([begin])}a"


def test_a_text_goes_on_as_its_tokenizer_writes_words(run: Path) -> None:
    """A decoder of words leaves out the space before the first: there is one between the prompt and
    what follows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = Tokenizer(
        models.WordLevel({"</s>": 0} | {f"\u2581w{i}": i for i in range(1, 300)}, unk_token="</s>")
    )
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words.save(str(run / "words.json"))
    arguments = [
        "--tokenizer",
        run / "words.json",
        "--prompt",
        "w1 w2",
        "--length",
        "4",
        "--temperature",
        "0",
    ]
    assert re.fullmatch(
        r"w1 w2( (w\d+|</s>)){4}\n", command(1, "generate", run / "runs", *arguments)
    )


def test_perplexity_of_a_file(run: Path) -> None:
    """By a plain model, window by window, and by the command on two layouts."""
    config = Config.load(str(run / "mine.yaml"))
    model = plain_model(config).to_empty(device="cpu").eval()
    load_weights(run / "runs", model)
    tokens = open_tokenizer(str(run / "tokenizer.json")).encode((run / "text.txt").read_text())
    total = 0.0
    with torch.no_grad():
        for before, predicted in windows(tokens, S):
            row = torch.tensor([before + predicted])
            total += float(F.cross_entropy(model(row[:, :-1])[0], row[0, 1:], reduction="sum"))
    for processes, layout in ((1, "{}"), (2, "{pp: 2}")):
        out = command(
            processes,
            "eval",
            run / "runs",
            "--files",
            run / "text.txt",
            "--layout",
            layout,
            "--json",
        )
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


def test_wrong_options_are_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, reason in TABLES["wrong options"]:
        line = words.replace("PROMPT", "generate RUN --prompt").split()
        assert cli.main([word.replace("RUN", str(run / "runs")) for word in line]) == 2
        assert reason in capsys.readouterr().err


def test_a_model_without_a_cp_plan_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its attention would take padding for tokens, and know nothing of a cache."""
    monkeypatch.delattr(model_file("llama"), "cp_plan")
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", str(run / "runs"), "--prompt", "a"])
    assert ended.value.code == 2
    assert "the model llama has no cp_plan" in capsys.readouterr().err


def test_a_tokenizer_that_nobody_has_named() -> None:
    unnamed = {"tokenizer": "bytes", "begin_token": None, "end_token": None, "source": None}
    for data, name, taken in TABLES["tokenizers"]:
        sources = [SimpleNamespace(**source) for source in data.get("sources", ())]
        section = SimpleNamespace(**unnamed | data | {"sources": sources})
        config: Any = SimpleNamespace(data=section)
        if taken:
            assert isinstance(tokenizer_of(config, name), ByteTokenizer)
        else:
            with pytest.raises(InputError, match=r"--tokenizer FILE\.json, or --tokenizer bytes"):
                tokenizer_of(config, name)


def test_what_does_not_fit_the_model(run: Path) -> None:
    from tokenizers import Tokenizer, models

    other = run / "other.json"
    Tokenizer(models.WordLevel({"a": 300, "</s>": 0}, "a")).save(str(other))
    for prompt, options, reason in TABLES["no fit"]:
        words = [word.replace("OTHER", str(other)) for word in shlex.split(options)]
        wrong = forked(
            1, "-m", "meshtrain.cli", "generate", run / "runs", "--prompt", prompt, *words
        )
        assert wrong.status == 2
        assert reason in wrong.err


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
def test_lm_eval_gives_what_it_gives_transformers(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an exported checkpoint in float32: the answer to each request, and the scores; ours over
    tp too.

    Theirs without `logits_cache`: with it, of requests with the same tokens in a batch, cut into
    context and continuation at different places, theirs takes the logits of wrong positions
    (lm_eval 0.4.13).
    """
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    words = [
        "the",
        "mesh",
        "has",
        "ranks",
        "and",
        "every",
        "rank",
        "a",
        "shard",
        "of",
        "each",
        "layer",
    ]
    documents = [
        {
            "question": f"{a} {b}" * (1 + 9 * (i % 2)),  # some are longer than what the model sees
            "choices": [f" {c} {a}", f" {b}", f" {a} {c} {c}"],
            "label": i % 3,
            "text": " ".join(words[(j * j * (i % 4) + j + i) % 12] for j in range(7 + 11 * i)),
        }
        for i, (a, b, c) in enumerate(zip(words, words[3:], words[5:], strict=False))
    ]
    (tmp_path / "documents.json").write_text(
        "".join(json.dumps(document) + "\n" for document in documents)
    )
    files = {"test": f"{tmp_path}/documents.json"}
    for name, task in TASKS.items():
        head = {
            "task": name,
            "dataset_path": "json",
            "test_split": "test",
            "dataset_kwargs": {"data_files": files},
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(head | task))
    assert cli.main(["export", str(run / "runs"), str(tmp_path / "exported")]) == 0
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(run / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    theirs = HFLM(
        pretrained=exported, tokenizer=tokenizer, max_length=S, batch_size=3, logits_cache=False
    )
    settings = {
        "tasks": [*TASKS],
        "task_manager": TaskManager(include_path=str(tmp_path)),
        "bootstrap_iters": 0,
    }
    expected = lm_eval.simple_evaluate(theirs, log_samples=True, **settings)
    requests: dict[str, list[list[Any]]] = {}
    answers: dict[str, list[Any]] = {}
    for name, kind in zip(
        TASKS, ("loglikelihood", "loglikelihood_rolling", "generate_until"), strict=True
    ):
        samples = expected["samples"][name]
        requests[kind] = [list(request) for sample in samples for request in sample["arguments"]]
        answers[kind] = [answer[0] for sample in samples for answer in sample["resps"]]
    requests = json.loads(json.dumps(requests))
    for _, options in requests["generate_until"][::2]:
        options["max_new_tokens"] = options.pop("max_gen_toks")  # another name of it
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    (tmp_path / "ours.py").write_text(OURS)
    for processes, layout in ((1, "{}"), (2, "{tp: 2}")):
        on_layout: list[str | Path] = [
            run / "runs",
            "--requests",
            tmp_path / "requests.json",
            "--layout",
            layout,
        ]
        out = forked(processes, tmp_path / "ours.py", *on_layout).check().out
        ours = json.loads(out.splitlines()[-1])
        assert ours["generate_until"] == answers["generate_until"], layout
        assert ours["loglikelihood_rolling"] == pytest.approx(
            answers["loglikelihood_rolling"], rel=1e-6
        ), layout
        numbers = [[value for value, _ in of["loglikelihood"]] for of in (ours, answers)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-6), layout
        assert [likeliest for _, likeliest in ours["loglikelihood"]] == [
            it for _, it in answers["loglikelihood"]
        ]

    tasks: list[str | Path] = ["--tasks", ",".join(TASKS), "--include-path", tmp_path]
    out = command(2, "eval", run / "runs", *tasks, "--layout", "{tp: 2}", "--json")
    ours_of = json.loads(out.splitlines()[-1])
    for name, of_task in expected["results"].items():
        scores = {
            key: value
            for key, value in of_task.items()
            if isinstance(value, float) and "stderr" not in key
        }
        assert len(scores) in (1, 2)
        assert {key: ours_of[name][key] for key in scores} == pytest.approx(scores, rel=1e-5), name
    assert 0 < ours_of["tiny_choice"]["acc,none"] < 1, "worth comparing"


@pytest.mark.integrations
def test_options_of_generation_mean_what_they_mean_to_lm_eval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from meshtrain.cli import harness

    calls = []

    def generate_batch(
        model: None, prompts: list[list[int]], length: int, **settings: Any
    ) -> list[list[int]]:
        calls.append((len(prompts[0]), length, settings["temperature"], settings["top_p"]))
        return prompts

    monkeypatch.setattr(harness, "generate_batch", generate_batch)
    scorer: Any = SimpleNamespace(seq_len=S, model=None, device=None)
    model = harness.HarnessModel(scorer, ByteTokenizer())
    for options, expected in TABLES["options"]:
        model._generate("a", options)
        assert calls.pop() == (1, *expected), options
    for asked, prompt, length in TABLES["lengths"]:
        model._generate("a" * 50, {"max_gen_toks": asked})
        assert calls.pop()[:2] == (prompt, length), asked
    with pytest.raises(InputError, match="generation_kwargs: num_beams: expected"):
        model._generate("a", {"num_beams": 10, "repetition_penalty": 1.0})
    assert not calls, "it is told before anything runs"


@pytest.mark.integrations
def test_a_begin_token_is_the_prefix_and_begins_prompts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lm_eval.api.instance import Instance

    from meshtrain.cli import harness

    tokenizer = open_tokenizer(
        str(tokenizer_folder(tmp_path, eos_token="<|im_end|>")), "auto", "<|endoftext|>"
    )
    begin, (a, b, c) = tokenizer.begin, tokenizer.encode("abc")
    assert begin is not None
    asked: list[Any] = []

    def score(pairs: list[Any]) -> list[tuple[float, bool]]:
        asked.extend(pairs)
        return [(0.0, True)] * len(pairs)

    def generate_batch(
        model: None, prompts: list[list[int]], length: int, **settings: Any
    ) -> list[list[int]]:
        assert settings["stops"] == {tokenizer.end, tokenizer.encode("<|im_end|>")[0]}
        return [[*prompts[0], c, tokenizer.encode("<|im_end|>")[0]]]

    monkeypatch.setattr(harness, "generate_batch", generate_batch)
    scorer: Any = SimpleNamespace(seq_len=4, model=None, device=None, score=score)
    model = harness.HarnessModel(scorer, tokenizer)
    pairs = [Instance("loglikelihood", {}, request, 0) for request in (("a", "b"), ("", "b"))]
    model.loglikelihood(pairs)
    assert [(list(before), list(predicted)) for before, predicted in asked] == [
        ([begin, a], [b]),
        ([begin], [b]),
    ]
    asked.clear()
    model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("ab",), 0)])
    assert [(list(before), list(predicted)) for before, predicted in asked] == [([begin], [a, b])]
    assert model._generate("ab", {"max_gen_toks": 2}) == "c"
    assert model._generate("abababab", {"max_gen_toks": 2}) == "c"
