"""The tree of exceptions, and the form of messages."""

import pytest

from graftree import errors


def test_all_errors_of_the_library_have_one_base():
    assert errors.FlaxError is errors.GraftreeError
    for error in (errors.TraceContextError, errors.ImmutableVariableError):
        assert error.__mro__[1:3] == (errors.GraftreeError, Exception)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "What."),
        ({"where": "a\nb"}, "What.\n  a\n  b"),
        ({"way_out": "Do."}, "What.\nDo."),
        ({"where": "a", "way_out": "Do\nit."}, "What.\n  a\nDo\nit."),
    ],
)
def test_message_says_what_where_and_the_way_out(parts, text):
    assert errors.message("What.", **parts) == text
