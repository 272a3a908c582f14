"""YAML of somebody else's: whatever it is, a plain value or one kind of error."""

import pytest

from meshtrain.config.yaml_reader import MAX_BYTES, parse_yaml
from meshtrain.errors import InputError

WRONG = {
    "deep": (3_000 * "[", "nested more than 32 deep"),
    "an escape beyond Unicode": (r'a: "\UFFFFFFFF"', "this is not YAML"),
    "a version of thousands of digits": (
        "%YAML " + 5_000 * "9" + ".1\n---\na: 1",
        "this is not YAML",
    ),
    "a tag": ("a: !!python/object/apply:os.system [x]", "tags such as"),
    "an alias": ("a: &a [1]\nb: *a", "anchors"),
    "a control character": ("a: \0", r"U\+0000"),
    "no YAML": ("a: [", "this is not YAML"),
    "no UTF-8": (b"a: \xff", "invalid start byte"),
    "too long": ("a: " + MAX_BYTES * "b", "bytes, and at most 1,048,576 are read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_yaml_is_one_kind_of_error(case: str) -> None:
    text, says = WRONG[case]
    with pytest.raises(InputError, match=says):
        parse_yaml(text)


def test_values_that_yaml_1_1_cannot_read() -> None:
    """PyYAML's own loader raises for the first two, and computes for a minute for the last."""
    assert parse_yaml("model: 2001-99-99") == {"model": "2001-99-99"}
    assert parse_yaml("n: " + 5_000 * "1") == {"n": 5_000 * "1"}
    assert parse_yaml("a: 1" + 20_000 * ":59") == {"a": "1" + 20_000 * ":59"}
    assert parse_yaml(b"\xef\xbb\xbfa: [1, 2.5, null]") == {"a": [1, 2.5, None]}
    assert parse_yaml("") is None
