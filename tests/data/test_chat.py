"""Conversations become text and a loss mask by the tokenizer's own template."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtrain.data.chat import ChatTemplate
from meshtrain.data.tokenizer import FileTokenizer
from meshtrain.errors import InputError
from tests.data.conftest import Opener
from tests.data.files import write_lines

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{- bos_token }}{%- if tools is not none %}{{ tools | tojson(indent=2) }}{%- endif %}"
    "{%- for message in messages %}\n    {%- if message.role == 'tool' %}{%- continue %}{%- endif %}\n"
    "    {{- '<|start|>' + message.role + '<|end|>' + message.content | trim + '<|eot_id|>' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>' }}{%- endif %}\n"
)
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Grüße! 1 + 1?"},
    {"role": "assistant", "content": "Two, 二."},
    {"role": "user", "content": "And then"},
    {"role": "assistant", "content": "three"},
]


def tokenizer_folder(folder: Path, template: str | None = CHATML, **config: Any) -> Path:
    """A byte-level tokenizer without merges, with special tokens, and its config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot_id|>", "<s>"]
    )
    folder.mkdir(exist_ok=True)
    plain.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", **config}
    config |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def spoken(file: Path, messages: Any, tools: Any = None) -> tuple[np.ndarray, np.ndarray]:
    tokenizer = FileTokenizer(file)
    return tokenizer.encode_spans(*tokenizer.chat.conversation(messages, tools))


def test_the_turns_of_the_assistant_have_a_loss(tmp_path: Path) -> None:
    file = tokenizer_folder(tmp_path)
    ids, loss = spoken(file, TALK)
    decode = FileTokenizer(file).decode
    assert decode(ids[loss == 1].tolist()) == "Two, 二.<|im_end|>\nthree<|im_end|>\n"
    assert decode(ids.tolist()).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nGrüße!")


@pytest.mark.integrations
@pytest.mark.parametrize("template", [CHATML, LLAMA])
@pytest.mark.parametrize("tools", [None, [{"name": "add", "what": "ü"}]])
def test_the_ids_are_those_of_transformers(template: str, tools: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = tokenizer_folder(tmp_path / "tokenizer", template)
    theirs = AutoTokenizer.from_pretrained(file.parent)
    masked = "endgeneration" in template
    talks = [TALK, TALK[:3], [*TALK, {"role": "tool", "content": "x"}]]
    for talk in talks:
        made = theirs.apply_chat_template(
            talk, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=masked
        )
        ids, loss = spoken(file, talk, tools)
        assert ids.tolist() == made["input_ids"]
        if masked:  # what ends a turn is outside of their block, and ours has the line's end, too
            mask = np.array(made["assistant_masks"])
            assert (loss >= mask).all()
            assert loss.sum() == mask.sum() + sum(turn["role"] == "assistant" for turn in talk)


def test_lines_with_messages_are_documents(opened: Opener, tmp_path: Path) -> None:
    file = tokenizer_folder(tmp_path / "tokenizer")
    lines = [{"messages": TALK, "id": 7}, {"prompt": "a", "completion": "b"}, {"messages": TALK[1:3]}]
    path = write_lines(tmp_path / "talk.jsonl", lines)
    corpus = opened(source="jsonl", path=path, tokenizer=str(file), validation=0, seq_len=8).train.stream.corpus
    tokens, loss, piece = corpus.tokens.array, corpus.loss.array, corpus.piece(0, corpus.documents)
    for document, talk in ((0, TALK), (2, TALK[1:3])):
        ids, own = spoken(file, talk)
        part = slice(piece.starts[document], piece.starts[document] + piece.lengths[document])
        assert tokens[part].tolist() == [*ids, FileTokenizer(file).end]
        assert loss[part].tolist() == [*own, 1]
    assert corpus.text_bytes.array[0] == len("Two, 二.<|im_end|>\nthree<|im_end|>\n".encode())


def test_a_changed_template_makes_another_corpus(tmp_path: Path) -> None:
    first, other = (ChatTemplate.beside(tokenizer_folder(tmp_path, template)) for template in (CHATML, LLAMA))
    assert first.digest != other.digest
    assert ChatTemplate.beside(tokenizer_folder(tmp_path, None)) is None
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert ChatTemplate.beside(tmp_path / "tokenizer.json").text == CHATML


FORGETS = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (CHATML, [{"role": "user", "content": "x"}], "no message has the role `assistant`"),
        (CHATML, [{"content": "x"}], "no list of objects with `role` and `content`"),
        (CHATML, "x", "no list of objects with `role` and `content`"),
        (CHATML, [{"role": "assistant"}], "refuses it"),
        ("{{ raise_exception('roles must alternate') }}", TALK, "refuses it: roles must alternate"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", TALK, "refuses it: .*unsafe"),
        ("{% set x = messages.append(1) %}", TALK, "refuses it: .*(unsafe|not safely)"),
        ("{{ strftime_now('%Y') }}", TALK, "refuses it: 'strftime_now' is undefined"),
        ("{% for %}", TALK, "refuses it"),
        (FORGETS, TALK, "writes message 2 in another way when others follow"),
    ],
)
def test_what_is_wrong_is_refused(template: str, messages: Any, message: str, tmp_path: Path) -> None:
    file = tokenizer_folder(tmp_path, template)
    with pytest.raises(InputError, match=message):
        spoken(file, messages)


@pytest.mark.parametrize(
    "config", [{"chat_template": [{"nme": "default"}]}, {"chat_template": ["x"]}, {"bos_token": {"c": 1}}, [], "x"]
)
def test_a_config_that_is_none_is_refused(config: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"tokenizer_config\.json or .* cannot be read as a tokenizer's"):
        ChatTemplate.beside(tmp_path / "tokenizer.json")
