"""Instruction data: conversations become text through the tokenizer's chat template, as in
transformers.

A template is a Jinja program. It runs in Jinja's sandbox, which gives it access to its variables
and nothing else. What messages spell is text: if a user writes the characters of a control token,
they do not become that token.
"""

import hashlib
import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshtrain.data.template_limits import joined, limit_powers, limits
from meshtrain.errors import InputError

_SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
CONFIG = "tokenizer_config.json"
JINJA = "chat_template.jinja"

LossOn = Literal["all", "last"]
Span = tuple[int, int]  # the first character, and the one behind the last


def tokenizer_config(tokenizer: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tokenizer_config.json beside a tokenizer.json, and the special tokens that it names:
    `bos_token` -> `<s>`. Both are empty if there is none. Raises InputError: it cannot be read as
    such."""
    file = tokenizer.with_name(CONFIG)
    try:
        config = json.loads(file.read_text("utf-8-sig")) if file.is_file() else {}
        tokens = {}
        for name in _SPECIAL:
            token = config.get(name)
            if not token:
                continue
            if isinstance(token, dict):  # with its settings as an added token
                token = token["content"]
            if not isinstance(token, str):
                raise TypeError("a special token is no text")
            tokens[name] = token
        return config, tokens
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise _unreadable(tokenizer, error) from None


def _unreadable(tokenizer: Path, error: Exception) -> InputError:
    return InputError(
        f"{tokenizer.with_name(CONFIG)} or {JINJA} cannot be read as a tokenizer's ({error!r})"
    )


class Conversation(NamedTuple):
    """A conversation as text."""

    text: str
    learned: list[Span]  # the turns whose tokens carry a loss, their end markers included
    plain: list[Span]  # where a message spells a control token, which stays text


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer: how conversations are formatted for its model."""

    text: str
    tokens: dict[str, str]  # the special tokens that the template may name
    origin: str  # the file it came from, for error messages
    control: tuple[str, ...] = ()  # the tokenizer's control tokens, as text would spell them

    @classmethod
    def beside(cls, tokenizer: Path, control: Sequence[str] = ()) -> "ChatTemplate | None":
        """The template in `chat_template.jinja` or `tokenizer_config.json` beside a tokenizer.json,
        or None.

        Raises InputError: one of the files cannot be read as such.
        """
        config, tokens = tokenizer_config(tokenizer)
        jinja = tokenizer.with_name(JINJA)
        template: Any
        try:
            if jinja.is_file():
                origin = jinja
                template = jinja.read_text("utf-8-sig")
            else:
                origin = tokenizer.with_name(CONFIG)
                template = config.get("chat_template")
            if isinstance(template, list):  # several named templates
                by_name = {entry["name"]: entry["template"] for entry in template}
                template = by_name.get("default")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _unreadable(tokenizer, error) from None
        if not isinstance(template, str):
            return None
        return cls(template, tokens, str(origin), tuple(control))

    @property
    def digest(self) -> str:
        content = repr((self.text, sorted(self.tokens.items())))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """{% generation %}, with which transformers marks the assistant's text; here it has no
            effect."""

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
                value,
                ensure_ascii=ensure_ascii,
                indent=indent,
                separators=separators,
                sort_keys=sort_keys,
            )

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = refuse
        limit_powers(environment)
        return environment.from_string(self.text)

    @cached_property
    def _spelling(self) -> "Spelling":
        return Spelling(self.control)

    def render(self, messages: Sequence[Any], tools: Any = None, *, prompt: bool = False) -> str:
        """The text of a conversation; `prompt` adds the header of the assistant's next turn.
        `strftime_now` is not defined: a corpus does not depend on the day. Raises InputError: the
        template refuses the conversation."""
        try:
            with limits():
                pieces = self._compiled.generate(
                    messages=messages,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=prompt,
                    **self.tokens,
                )
                return joined(pieces)
        # A template may raise anything for messages that it does not expect.
        except Exception as error:
            raise InputError(f"the template of {self.origin} refuses it: {error}") from None

    def conversation(
        self, messages: Any, tools: Any = None, loss_on: LossOn = "all"
    ) -> Conversation:
        """The text of a conversation, and which turns of the assistant are learned: all of them, or
        the last, but none with `train: false`. Raises InputError: `messages` is malformed, no turn
        is the assistant's, or the template does not write a learned turn, or what is before it, as
        it does in the whole conversation."""
        learned = _learned_turns(messages, loss_on)
        # Templates know no `train`, and some write every key.
        messages = [dict(turn) for turn in messages]
        for turn in messages:
            turn.pop("train", None)
        try:
            messages, tools, marks = self._marked(messages, tools)
        except RecursionError:
            raise InputError("`messages` or `tools` are nested too deeply") from None
        text, plain = marks.resolve(self.render(messages, tools))

        written = _Written(self, messages, tools, marks)
        spans = []
        for index in learned:
            span = self._turn(written, index, text, loss_on)
            spans.append(span)
            if plain:
                # An answer may begin as the generation prompt ends: there a control token is the
                # prompt's.
                prompt: Span = (len(written(index)), span[0])
                plain = [spelled for spelled in plain if not _lies_in(spelled, prompt)]
        return Conversation(text, spans, plain)

    def _turn(self, written: "_Written", turn: int, text: str, loss_on: LossOn) -> Span:
        """The span of a turn of the assistant: from behind the generation prompt to the end of the
        turn."""
        before = written(turn, prompt=True)
        through = written(turn + 1)
        if not text.startswith(through):
            remedy = (
                "data.loss_on: last learns the last answer only, and `train: false` leaves a "
                "message out of the loss"
            )
            if loss_on == "last":
                remedy = "end the conversation with its last answer"
            raise InputError(
                f"the template of {self.origin} writes message {turn} in another way when others "
                f"follow ({_difference(through, text, 'them')}): {remedy}"
            )
        if through.startswith(before):
            return len(before), len(through)

        begin = _common(before, through)
        history = written(turn)
        if begin < len(history):
            raise InputError(
                f"the template of {self.origin} writes what is before message {turn} in another "
                f"way when it follows ({_difference(before, through, 'it')}), so that what this "
                "answers is undefined"
            )
        if loss_on == "last":
            # As DeepSeek-R1's, whose prompt ends with <think>: the answer begins where the two
            # part. By another answer as well, since this one may begin with the same characters as
            # the rest of the prompt.
            of_another = _common(before, written.with_content(turn, "0"))
            return min(begin, of_another), len(through)
        raise InputError(
            f"the generation prompt of the template of {self.origin} ends with "
            f"{before[begin:]!r:.60}, and message {turn} has {through[begin : begin + 40]!r} "
            "there: data.loss_on: last begins the loss where the two part; or give a "
            f"{JINJA} whose generation prompt is as its answers begin"
        )

    def _marked(self, messages: list[Any], tools: Any) -> tuple[list[Any], Any, "_Marks"]:
        """The messages and tools with a mark in place of each control token that they spell."""
        parts = [*messages, tools]
        marks = _Marks(self._spelling, parts)
        spelled = [marks.spelled(part) for part in parts]
        if not any(spelled):
            return messages, tools, marks
        expected = self.render(messages, tools)

        def is_same(marked: list[Any]) -> bool:
            try:
                text, _ = marks.resolve(self.render(marked[:-1], marked[-1]))
                return text == expected
            except InputError:
                return False

        marked = [marks.put(part, tokens) for part, tokens in zip(parts, spelled, strict=True)]
        if not is_same(marked):
            # The template looks for one of them in a message, as for </think>: there it is a word
            # of its format. Marks that change nothing are put one by one.
            marked = parts
            for i, tokens in enumerate(spelled):
                for token in sorted(tokens):
                    trial = [*marked[:i], marks.put(marked[i], {token}), *marked[i + 1 :]]
                    if is_same(trial):
                        marked = trial
        return marked[:-1], marked[-1], marks


@dataclass(frozen=True)
class _Written:
    """What a template writes for the first messages of a conversation."""

    template: ChatTemplate
    messages: list[Any]
    tools: Any
    marks: "_Marks"

    def __call__(self, count: int, *, prompt: bool = False) -> str:
        return self._text(self.messages[:count], prompt=prompt)

    def with_content(self, turn: int, content: str) -> str:
        """The first messages through `turn`, which says something else."""
        other = {**self.messages[turn], "content": content}
        return self._text([*self.messages[:turn], other])

    def _text(self, messages: list[Any], *, prompt: bool = False) -> str:
        text, _ = self.marks.resolve(self.template.render(messages, self.tools, prompt=prompt))
        return text


class Spelling:
    """Finds the control tokens that a text spells."""

    def __init__(self, control: Sequence[str]) -> None:
        # The longest first, as tokenizers match them.
        self.control = sorted(filter(None, control), key=len, reverse=True)
        self.pattern = re.compile(_any_of(self.control, 4) or "(?!)")


def _any_of(tokens: Sequence[str], depth: int) -> str:
    """A regular expression for any of these tokens, of which a longer one is before a shorter one.
    Their first `depth` characters are looked at one by one: some tokenizers have thousands of
    tokens, most of which begin alike."""
    if depth == 0 or len(tokens) == 1:
        return "|".join(map(re.escape, tokens))
    rests: dict[str, list[str]] = {}  # first character -> what follows it
    for token in tokens:
        rests.setdefault(token[:1], []).append(token[1:])
    ends_here = rests.pop("", None) is not None
    choices = []
    for first, behind in rests.items():
        choices.append(f"{re.escape(first)}(?:{_any_of(behind, depth - 1)})")
    if ends_here:
        choices.append("")  # the shortest, and so the last choice
    return "|".join(choices)


class _Marks:
    """Marks that stand for control tokens while a template formats the messages that spell them.

    A mark is a number, which filters such as `trim`, `upper` and `tojson` leave as it is.
    """

    def __init__(self, spelling: Spelling, parts: Sequence[Any]) -> None:
        self._control = spelling.control
        self._spelling = spelling.pattern
        digest = hashlib.sha256(repr(parts).encode("utf-8", "backslashreplace")).hexdigest()
        self._prefix = f"{int(digest, 16) % 10**24:024d}"  # occurs in no text
        self._mark = re.compile(self._prefix + "([0-9]{6})")

    def spelled(self, value: Any) -> set[str]:
        """The control tokens that a value spells, at any depth."""
        if isinstance(value, str):
            return set(self._spelling.findall(value))
        if isinstance(value, dict):
            value = [*value.keys(), *value.values()]
        found: set[str] = set()
        if isinstance(value, list):
            for inner in value:
                found |= self.spelled(inner)
        return found

    def put(self, value: Any, tokens: Collection[str]) -> Any:
        """The value with a mark in place of each of these tokens that it spells."""

        def mark(match: re.Match[str]) -> str:
            token = match[0]
            if token not in tokens:
                return token
            return f"{self._prefix}{self._control.index(token):06d}"

        if isinstance(value, str):
            return self._spelling.sub(mark, value)
        if isinstance(value, dict):
            return {self.put(key, tokens): self.put(inner, tokens) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.put(inner, tokens) for inner in value]
        return value

    def resolve(self, text: str) -> tuple[str, list[Span]]:
        """The text with the tokens in place of their marks, and where they are."""
        parts = []
        spans = []
        size = 0  # of the parts
        place = 0  # behind the last mark
        for match in self._mark.finditer(text):
            token = self._control[int(match[1])]
            parts += [text[place : match.start()], token]
            first = size + match.start() - place
            size = first + len(token)
            place = match.end()
            spans.append((first, size))
        parts.append(text[place:])
        return "".join(parts), spans


def _learned_turns(messages: Any, loss_on: LossOn) -> list[int]:
    """The assistant's turns that carry a loss. Raises InputError: malformed messages, or none is
    the assistant's."""
    if not isinstance(messages, list) or not all(map(_is_turn, messages)):
        raise InputError("`messages` is no list of objects with `role` and `content`")
    answers = []
    for i, turn in enumerate(messages):
        train = turn.get("train")
        is_answer = turn["role"] == "assistant"
        if train is not None and not isinstance(train, bool):
            raise InputError(f"`train` of message {i} is {train!r:.40}: expected true or false")
        if train and not is_answer:
            raise InputError(
                f"message {i} has `train: true` and the role {turn['role']!r:.40}: only the "
                "assistant's are learned"
            )
        if is_answer:
            answers.append(i)
    if not answers:
        raise InputError("no message has the role `assistant`, whose turns are what is learned")
    chosen = answers[-1:] if loss_on == "last" else answers
    return [i for i in chosen if messages[i].get("train") is not False]


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def _lies_in(inner: Span, outer: Span) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _common(*texts: str) -> int:
    """The number of characters with which all texts begin."""
    return len(os.path.commonprefix(texts))  # noqa: RUF071 (of characters)


def _difference(without: str, followed: str, by: str) -> str:
    """Where two texts part, with the words before: the second is that of more messages, called
    `by`."""
    at = _common(without, followed)
    before = without[max(0, at - 20) : at]
    return (
        f"after {before!r}: {without[at : at + 30]!r} without {by}, and {followed[at : at + 30]!r} "
        f"with {by}"
    )
