"""Conversations become text and a loss mask by the tokenizer's own template; what is refused is in refusals.yaml."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshtrain.data.chat import ChatTemplate
from meshtrain.data.tokenizer import FileTokenizer
from tests.data.conftest import Opener
from tests.data.files import CHATML, TALK, tokenizer_folder, write_lines

LLAMA = (
    "{{- bos_token }}{%- if tools is not none %}{{ tools | tojson(indent=2) }}{%- endif %}"
    "{%- for message in messages %}\n    {%- if message.role == 'tool' %}{%- continue %}{%- endif %}\n"
    "    {{- '<|start|>' + message.role + '<|end|>' + message.content | trim + '<|eot_id|>' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>' }}{%- endif %}\n"
)


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
