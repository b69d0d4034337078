"""Errors of other libraries on one line, whatever their text is."""

from plasmid.errors import one_line


def test_an_error_whose_text_cannot_be_made_is_named_by_its_kind():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    assert one_line(KeyError(nested)) == "KeyError"


def test_a_multiline_error_is_joined_into_one_line():
    assert one_line(ValueError("first\n  second")) == "ValueError: first second"
    assert one_line(ValueError()) == "ValueError"
