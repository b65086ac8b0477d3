"""Static and donated arguments, chosen by position or name."""

import pytest

from graftree.transforms.crossing import arguments
from graftree.transforms.crossing.arguments import Chosen


def f(a, b, /, c, *, d=0):
    """A function with arguments of all kinds."""


def g(*args, **kwargs):
    """A function whose signature tells nothing."""


@pytest.mark.parametrize(
    ("argnums", "argnames", "expected"),
    [
        (None, None, Chosen()),
        (0, None, Chosen((0,), ("a",))),
        ((0, -1), None, Chosen((0, -1), ("a", "c"))),
        (None, "c", Chosen((2,), ("c",))),
        (None, ["c", "d"], Chosen((2,), ("c", "d"))),
        (0, "d", Chosen((0,), ("d",))),
    ],
)
def test_positions_and_names_are_found_from_each_other(argnums, argnames, expected):
    assert arguments.choose(f, "static", argnums, argnames) == expected


def test_functions_without_signature_take_what_is_given():
    assert arguments.choose(g, "static", 3, "x") == Chosen((3,), ("x",))
    assert arguments.choose(dict.get, "static", (0,)).argnums == (0,)


@pytest.mark.parametrize("number", [3, -4])
def test_positions_out_of_range_are_refused(number):
    message = rf"f has donate_argnums=\({number},\), but only accepts 3 positional"
    with pytest.raises(ValueError, match=message):
        arguments.choose(f, "donate", number)


def test_unknown_names_are_refused():
    with pytest.raises(
        ValueError, match=r"invalid argnames \['x'\] in static_argnames"
    ):
        arguments.choose(f, "static", None, ("c", "x"))


@pytest.mark.parametrize(
    ("static", "donated", "kind"),
    [
        (Chosen((0, 1)), Chosen((1,)), "argnums"),
        (Chosen((), ("x",)), Chosen((), ("x", "y")), "argnames"),
    ],
)
def test_static_arguments_are_not_donated(static, donated, kind):
    message = f"static_{kind} and donate_{kind} cannot intersect"
    with pytest.raises(ValueError, match=message):
        arguments.check_disjoint(static, donated)
    arguments.check_disjoint(static, Chosen((5,), ("z",)))


def test_positions_count_from_the_end_and_skip_what_a_call_lacks():
    assert Chosen((0, -1, 7)).positions(3) == {0, 2}
    with pytest.raises(ValueError, match="1 positional"):
        Chosen((-2,)).positions(1)


@pytest.mark.parametrize(
    "chosen",
    [Chosen(), Chosen((1,)), Chosen((0, -1)), Chosen((0, 1, 2)), Chosen((1,), ("k",))],
)
def test_what_is_taken_can_be_put_back(chosen):
    args, kwargs = ("a", "b", "c"), {"k": 1, "l": 2}
    rest, named, statics = arguments.take(chosen, args, kwargs, "jit")
    assert len(rest) + len(named) + len(statics) == 5
    assert arguments.put((rest, named), statics) == (args, kwargs)


def test_static_values_must_be_hashable():
    with pytest.raises(ValueError, match=r"(?s)hashable.*nnx\.jit.*argument 0.*list"):
        arguments.take(Chosen((0,)), ([],), {}, "jit")
