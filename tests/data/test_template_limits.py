"""A chat template that would compute for ever, or take all memory, ends with the line of its
conversation."""

import resource
import signal
from pathlib import Path

import pytest

from meshtrain.data import template_limits
from meshtrain.data.chat import ChatTemplate
from meshtrain.data.template_limits import joined
from meshtrain.errors import InputError
from tests.data import files
from tests.data.conftest import Opener

ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a filter": "{{ ('a ' * 5000000) | wordwrap(1) }}",
    "a function": "{{ lipsum(n=5000000) }}",
}
HUGE = {
    "doubled": (
        "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor "
        "%}{{ n.s }}"
    ),
    "a width": "{{ '%100000000000d' | format(1) }}",
    "another width": "{{ '{:>100000000000}'.format(1) }}",
}


@pytest.mark.parametrize("case", ENDLESS)
def test_a_template_that_does_not_end_is_refused(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "MOST_SECONDS", 0.2)
    handler = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(InputError, match=r"it computes for more than 0\.2 s for one conversation"):
        ChatTemplate(ENDLESS[case], {}, "here").render(files.TALK)
    assert signal.getsignal(signal.SIGVTALRM) is handler
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0


@pytest.mark.parametrize("case", HUGE)
def test_a_template_that_takes_all_memory_is_refused(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "MOST_MEMORY", 256 << 20)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(InputError, match="it takes more than 256 MiB for one conversation"):
        ChatTemplate(HUGE[case], {}, "here").render(files.TALK)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_template_that_writes_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MOST_CHARACTERS", 1000)
    assert joined(["a" * 500, "b" * 500]) == "a" * 500 + "b" * 500
    with pytest.raises(
        InputError, match="it writes more than 1,000 characters for one conversation"
    ):
        ChatTemplate("{% for i in range(99999) %}abc{% endfor %}", {}, "here").render(files.TALK)


def test_a_power_of_thousands_of_digits_is_refused() -> None:
    assert ChatTemplate("{{ 2 ** 10 }}", {}, "here").render([]) == "1024"
    with pytest.raises(InputError, match="a power of thousands of digits"):
        ChatTemplate("{{ 9 ** 999999999 }}", {}, "here").render([])


def test_options_of_tojson_are_those_of_transformers() -> None:
    render = ChatTemplate("{{ messages | tojson(indent=1, sort_keys=true) }}", {}, "here").render
    assert render([{"b": 1, "a": "ü"}]) == '[\n {\n  "a": "ü",\n  "b": 1\n }\n]'
    with pytest.raises(InputError, match="unexpected keyword argument 'cls'"):
        ChatTemplate("{{ messages | tojson(cls=1) }}", {}, "here").render([])


def test_the_line_is_named(opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(template_limits, "MOST_SECONDS", 0.2)
    tokenizer = files.tokenizer_folder(tmp_path / "tokenizer", template=ENDLESS["loops"])
    lines = files.write_lines(tmp_path / "x.jsonl", [{"text": "good"}, {"messages": files.TALK}])
    with pytest.raises(
        InputError, match=r"x\.jsonl:2: the template of .* it computes for more than"
    ):
        opened(source="jsonl", path=lines, tokenizer=str(tokenizer))
