"""`pmap` assigns axes as `vmap` does, whatever the numbers of leaves and groups are.

``jax.pmap`` takes a tuple of axes for those of the single leaves if their number is
that of its arguments (issue 12, §5).
"""

import hypothesis
import jax
import jax.numpy as jnp
from hypothesis import strategies as st

import graftree as nnx
from tests import strategies, zoo

SHAPE = (2, 2, 2)
AXES = st.sampled_from([0, 1, -1, None])


def model(params, statistics):
    return zoo.Box(
        params=nnx.List([nnx.Param(leaf(i)) for i in range(params)]),
        statistics=nnx.List([nnx.BatchStat(leaf(9 + i)) for i in range(statistics)]),
    )


def leaf(number):
    return jnp.arange(8.0).reshape(SHAPE) + 10 * number


COUNTS = st.tuples(st.integers(0, 2), st.integers(0, 2))
# Each argument: what is in it, the axis of its parameters, that of the rest.
ARGUMENTS = st.lists(st.tuples(COUNTS | st.none(), AXES, AXES), min_size=1, max_size=3)


def in_axes(args, arguments, mode):
    if not mode.get("graph_updates", True) or not mode["graph"]:

        def axis(path, _):
            _, of_params, of_rest = arguments[path[0]]
            return of_params if "params" in path else of_rest

        return nnx.prefix(args, axis, graph=mode["graph"])
    return tuple(
        rest if counts is None else nnx.StateAxes({nnx.Param: params, ...: rest})
        for counts, params, rest in arguments
    )


def scale(*args):
    """Writes what is mapped, and returns all that is given."""
    given = jax.tree.leaves(args)
    for x in jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        if isinstance(x, nnx.Variable) and x.ndim < 3:
            x[...] = x[...] * 2
    return given, nnx.Param(sum(x.sum() for x in given))


def outcome(transform, arguments, out_axis, mode):
    args = tuple(
        leaf(number) if counts is None else model(*counts)
        for number, (counts, _, _) in enumerate(arguments)
    )
    axes = in_axes(args, arguments, mode)
    f = transform(scale, in_axes=axes, out_axes=(out_axis, 0), **mode)
    return [x.tolist() for x in jax.tree.leaves((f(*args), args))]


def is_mapped(argument):
    counts, of_params, of_rest = argument
    params, rest = (0, 1) if counts is None else counts
    return bool((params and of_params is not None) or (rest and of_rest is not None))


@strategies.examples(8, 25)
@hypothesis.given(arguments=ARGUMENTS, out_axis=st.sampled_from([0, 1, -1]))
@hypothesis.example([((2, 0), 0, None)], 0)
@hypothesis.example([((0, 2), None, 0)], 0)
@hypothesis.example([((1, 1), 0, None)], 1)
@hypothesis.example([((3, 0), 0, 1)], -1)
@hypothesis.example([(None, 0, 1), ((1, 0), 1, 0)], -1)
def test_pmap_gives_what_vmap_gives(mode, arguments, out_axis):
    hypothesis.assume(any(map(is_mapped, arguments)))
    expected = outcome(nnx.vmap, arguments, out_axis, mode)
    assert outcome(nnx.pmap, arguments, out_axis, mode) == expected
