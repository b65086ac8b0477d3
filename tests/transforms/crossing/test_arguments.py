"""Arguments by position or name: static and donated ones, and what they are called."""

import functools
import gc
import weakref

import jax.numpy as jnp
import pytest

import graftree as nnx
from tests import tables, zoo


def f(a, b, /, c, *, d=0):
    """A function with arguments of all kinds; gives the names of those that aren't."""
    return [isinstance(x, int) for x in (a, b, c, d)]


def g(*args, **kwargs):
    """A function whose signature tells nothing."""
    return [isinstance(x, int) for x in (*args, *kwargs.values())]


STATIC = {
    "none": (f, {}, ""),
    "position": (f, {"static_argnums": 0}, "a"),
    "name": (f, {"static_argnames": "c"}, "c"),
    "names": (f, {"static_argnames": ["c", "d"]}, "cd"),
    "position of a name": (f, {"static_argnums": 2}, "c"),
    "position and name": (f, {"static_argnums": 0, "static_argnames": "d"}, "ad"),
    "no signature": (g, {"static_argnums": 0, "static_argnames": "d"}, "ad"),
}


@pytest.mark.parametrize("name", STATIC)
def test_static_arguments_are_found_however_they_are_passed(name, mode):
    function, options, expected = STATIC[name]
    static = []

    @functools.wraps(function)
    def note(*args, **kwargs):
        static.append(function(*args, **kwargs))

    step = nnx.jit(note, **options, **mode)
    step(1, 2, 3, d=4)
    step(1, 2, c=3, d=4)
    assert static == [[x in expected for x in "abcd"]] * 2


def test_positions_may_count_from_the_end(mode):
    static = []
    step = nnx.jit(
        lambda a, b, c: static.append(f(a, b, c)), static_argnums=(0, -1), **mode
    )
    step(1, 2, 3)
    assert static == [[True, False, True, True]]


INTERSECT = r"static_arg(nums|names) and donate_arg\1 cannot intersect"
REFUSED = [
    (f, {"donate_argnums": 3}, r"f has donate_argnums=\(3,\), but only accepts 3 posi"),
    (f, {"donate_argnums": -4}, r"f has donate_argnums=\(-4,\), but only accepts 3"),
    (f, {"static_argnums": 3}, r"f has static_argnums=\(3,\), but only accepts 3 posi"),
    (f, {"static_argnames": ("c", "x")}, r"invalid argnames \['x'\] in static_argn"),
    (g, {"static_argnums": (0, 1), "donate_argnums": 1}, INTERSECT),
    (g, {"static_argnames": "x", "donate_argnames": ("x", "y")}, INTERSECT),
    (f, {"static_argnums": 2, "donate_argnames": "c"}, "cannot intersect"),
]


@pytest.mark.parametrize(("function", "options", "message"), REFUSED)
def test_wrong_positions_and_names_are_refused(function, options, message):
    with pytest.raises(ValueError, match=message):
        nnx.jit(function, **options)


def test_positions_beyond_a_call_are_skipped_and_none_is_before_the_first():
    step = nnx.jit(lambda *args: len(args), static_argnums=(0, -1, 7))
    assert step(1, jnp.ones(1), 3) == 3
    with pytest.raises(ValueError, match="1 positional"):
        nnx.jit(lambda *args: None, static_argnums=-2)(1.0)


def test_static_values_must_be_hashable():
    with pytest.raises(ValueError, match=r"(?s)hashable.*nnx\.jit.*argument 0.*list"):
        nnx.jit(lambda x: None, static_argnums=0)([])


# ------------------------------------------------------------------------------ names


def named(net, x, *rest, train=False, **others):
    return 1


@functools.wraps(named)
def wrapper(*args, **kwargs):
    return 1


class Callable:
    def method(self, a, *, b):
        return 1

    def __call__(self, q, /):
        return 1


def names(function, *args, kwargs=(), **options):
    """What JAX calls the inputs of a compiled function."""
    traced = nnx.jit(function, **options).trace(*args, **dict(kwargs))
    return " ".join(traced.jaxpr.jaxpr.debug_info.arg_names)


@tables.cases(
    "function, args, kwargs, expected",
    (named, (1, 2), {}, "net x"),
    (named, (1, 2, 3, {"k": 4}), {}, "net x rest[0] rest[1]['k']"),
    (named, (1,), {"train": True, "x": 2, "z": 3}, "net train x others['z']"),
    (wrapper, (1, 2), {}, "net x"),
    (functools.partial(named, 1), (2,), {}, "x"),
    (Callable.method, (0, 1), {"b": 2}, "self a b"),
    (Callable().method, (1,), {"b": 2}, "a b"),
    (Callable(), (1,), {}, "q"),
    (dict, ({"a": 1},), {"b": [2]}, "args[0]['a'] kwargs['b'][0]"),
    (named, ({"k": nnx.List([zoo.Scale()])},), {"x": 1}, "net['k'][0].w x"),
)
def test_arguments_are_called_as_in_the_function(function, args, kwargs, expected):
    assert names(function, *args, kwargs=kwargs) == expected


def test_static_arguments_have_positions_but_no_names():
    options = {"static_argnums": 0, "static_argnames": "train"}
    kwargs = {"z": 4, "train": True}
    assert names(named, 1, 2, 3, kwargs=kwargs, **options) == "x rest[0] others['z']"


def test_names_do_not_keep_the_function_alive():
    kept = jnp.zeros(3)
    function = functools.partial(lambda a, b: (a, b, kept), 1)
    step = nnx.jit(function)
    step(2)
    alive = weakref.ref(function)
    del function, step
    gc.collect()
    assert alive() is None
