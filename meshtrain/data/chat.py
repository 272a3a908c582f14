"""Instruction data: conversations become text through the tokenizer's chat template, as in transformers.

A template is a Jinja program. It runs in Jinja's sandbox, which gives it access to its variables and nothing else.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meshtrain.data.template_limits import joined, limit_powers, limits
from meshtrain.errors import InputError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer: how conversations are formatted for its model."""

    text: str
    tokens: dict[str, str]  # the special tokens that the template may name
    origin: str  # the file it came from, for error messages

    @classmethod
    def beside(cls, tokenizer: Path) -> "ChatTemplate | None":
        """The template in `chat_template.jinja` or `tokenizer_config.json` beside a tokenizer.json, or None.

        Raises InputError: one of the files cannot be read as such.
        """
        file, jinja = tokenizer.parent / "tokenizer_config.json", tokenizer.parent / "chat_template.jinja"
        try:
            config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
            template = jinja.read_text("utf-8") if jinja.is_file() else config.get("chat_template")
            if isinstance(template, list):  # several named templates
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
            values = ((name, config.get(name)) for name in _SPECIAL)
            tokens = {name: value["content"] if isinstance(value, dict) else value for name, value in values if value}
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise InputError(f"{file} or {jinja.name} cannot be read as a tokenizer's ({error!r})") from None
        if not isinstance(template, str):
            return None
        return cls(template, tokens, str(jinja if jinja.is_file() else file))

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr((self.text, sorted(self.tokens.items()))).encode()).hexdigest()[:16]

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """{% generation %}, with which transformers marks the assistant's text; here it has no effect."""

            tags = {"generation"}  # noqa: RUF012 (as the base class has it)

            def parse(self, parser: Any) -> list[nodes.Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def refuse(message: str) -> None:
            raise TemplateError(message)

        def tojson(
            value: Any,
            ensure_ascii: bool = False,
            indent: int | str | None = None,
            separators: tuple[str, str] | None = None,
            sort_keys: bool = False,
        ) -> str:
            return json.dumps(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"], environment.globals["raise_exception"] = tojson, refuse
        limit_powers(environment)
        return environment.from_string(self.text)

    def render(self, messages: Sequence[Any], tools: Any = None, *, prompt: bool = False) -> str:
        """The text of a conversation; `prompt` adds the header of the assistant's next turn. `strftime_now` is not
        defined: a corpus does not depend on the day. Raises InputError: the template refuses the conversation."""
        try:
            with limits():
                pieces = self._compiled.generate(
                    messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self.tokens
                )
                return joined(pieces)
        except Exception as error:  # a template may raise anything for messages that it does not expect
            raise InputError(f"the template of {self.origin} refuses it: {error}") from None

    def conversation(self, messages: Any, tools: Any = None) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the character span of each of the assistant's turns, its end marker included.
        Raises InputError: `messages` is malformed, no turn is the assistant's, or the template formats a turn in
        another way when others follow, so that its span is undefined."""
        if not isinstance(messages, list) or not all(
            isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in messages
        ):
            raise InputError("`messages` is no list of objects with `role` and `content`")
        text, spans = self.render(messages, tools), []
        for i, turn in enumerate(messages):
            if turn["role"] != "assistant":
                continue
            before, through = self.render(messages[:i], tools, prompt=True), self.render(messages[: i + 1], tools)
            if not (text.startswith(through) and through.startswith(before)):
                otherwise = f"the template of {self.origin} writes message {i} in another way when others follow"
                raise InputError(f"{otherwise}: split the conversation so that each part ends with an answer")
            spans.append((len(before), len(through)))
        if not spans:
            raise InputError("no message has the role `assistant`, whose turns are what is learned")
        return text, spans
