"""Arguments of a call have the names that they have in the function."""

import functools
import gc
import weakref

import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree import config
from graftree.core.graph.graphdefs import Static
from graftree.transforms.crossing import packing, parameters


def f(net, x, *rest, train=False, **others):
    raise NotImplementedError


@functools.wraps(f)
def wrapper(*args, **kwargs):
    raise NotImplementedError


class Callable:
    def method(self, a, *, b):
        raise NotImplementedError

    def __call__(self, q, /):
        raise NotImplementedError


def names(function, *args, statics=(), skipped=0, **kwargs):
    packed = packing.pack(
        (args, kwargs),
        config.GRAPH,
        "jit",
        statics,
        packing.Labels(skipped=skipped),
        parameters.source_of(function),
    )
    return packed.signature.names_in_function


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (f, (1, 2), {}, "net x"),
        (f, (1, 2, 3, {"k": 4}), {}, "net x rest[0] rest[1]['k']"),
        (f, (1,), {"train": True, "x": 2, "z": 3}, "net train x others['z']"),
        (wrapper, (1, 2), {}, "net x"),
        (functools.partial(f, 1), (2,), {}, "x"),
        (Callable.method, (0, 1), {"b": 2}, "self a b"),
        (Callable().method, (1,), {"b": 2}, "a b"),
        (Callable(), (1,), {}, "q"),
        (max, (1, [2]), {"key": 3}, "args[0] args[1][0] kwargs['key']"),
    ],
)
def test_arguments_are_called_as_in_the_function(function, args, kwargs, expected):
    assert names(function, *args, **kwargs) == expected.split()


def test_static_arguments_have_positions_but_no_names():
    static = Static(None)
    statics = ((0, static), ("train", static))
    assert names(f, 2, 3, z=4, statics=statics) == ["x", "rest[0]", "others['z']"]


def test_parameters_that_are_no_arguments_of_the_call_are_skipped():
    assert names(f, 2, skipped=1) == ["x"]


def test_leaves_are_called_by_their_path_in_the_argument():
    net = nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0))])
    packed = packing.pack(
        (({"k": net},), {}), config.TREE, "jit", parameters=parameters.source_of(f)
    )
    found = [slot.name_in_function for slot in packed.signature.slots]
    assert found == ["net['k'][0].bias", "net['k'][0].kernel"]


def test_names_do_not_keep_the_function_alive():
    def made():
        kept = jnp.zeros(3)
        function = functools.partial(lambda a, b: (a, b, kept), 1)
        return function, parameters.source_of(function)

    function, source = made()
    assert parameters.read(source).at(0) == "b"
    alive = weakref.ref(function)
    del function
    gc.collect()
    assert alive() is None
