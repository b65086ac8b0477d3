"""A state has one place for each of its leaves, whoever asks."""

import collections

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import graftree as nnx
from tests import comparisons, strategies

SOME = strategies.examples(few=30, many=300)


def spelled(state):
    """The keys as checkpoints have them."""
    is_mapping = isinstance(state, dict)
    return {str(k): spelled(x) for k, x in state.items()} if is_mapping else state


def boxed(state):
    """A level below each Variable, as Orbax restores what it knows no types of."""
    flat = nnx.to_flat_state(state)
    leaves = [
        {"value": leaf.get_value()} if isinstance(leaf, nnx.Variable) else leaf
        for leaf in flat.leaves
    ]
    return nnx.to_pure_dict(nnx.from_flat_state(zip(flat.paths, leaves, strict=True)))


FORMS = {
    "state": lambda state: state,
    "pure": nnx.to_pure_dict,
    "spelled": lambda state: spelled(nnx.to_pure_dict(state)),
    "boxed": boxed,
    "spelled boxes": lambda state: spelled(boxed(state)),
}


def raised(leaf):
    """A leaf with other numbers."""
    if isinstance(leaf, nnx.Variable):
        return leaf.copy(jax.tree.map(raised, leaf.get_value()))
    return leaf + 1 if isinstance(leaf, (jax.Array, np.ndarray)) else leaf


def updated(node, state, **options):
    """A copy of an object after an update, or the words of its error."""
    copy = nnx.clone(node)
    try:
        nnx.update(copy, state, **options)
    except ValueError as error:
        comparisons.check_same(copy, nnx.clone(node), comparisons.same_value)
        return str(error)
    return copy


def check_agree(a, b):
    if isinstance(a, str) or isinstance(b, str):
        assert a == b
    else:
        comparisons.check_same(a, b, comparisons.same_value)


@SOME
@hypothesis.given(strategies.graphs(refs=False), st.sampled_from([*FORMS]))
def test_lax_and_strict_updates_agree_on_all_leaves(node, form):
    state = nnx.map_state(lambda _, leaf: raised(leaf), nnx.state(node))
    given = FORMS[form](state)
    check_agree(updated(node, given), updated(node, given, strict=True))
    check_agree(updated(node, state), updated(node, given))


@SOME
@hypothesis.given(strategies.graphs(refs=False), st.sampled_from([*FORMS]), st.data())
def test_what_is_missing_and_unexpected_is_told_and_nothing_else(node, form, data):
    flat = nnx.to_flat_state(nnx.state(node))
    arrays = [path for path, leaf in flat if isinstance(nnx.as_pure(leaf), jax.Array)]
    hypothesis.assume(arrays)
    dropped = data.draw(st.sampled_from(arrays))
    kept = [(path, leaf) for path, leaf in flat if path != dropped]
    given = FORMS[form](nnx.from_flat_state([*kept, (("new",), jnp.ones(1))]))
    with pytest.raises(nnx.errors.StateMismatchError) as caught:
        nnx.update(node, given, strict=True)
    assert caught.value.missing == (dropped,)
    assert caught.value.unexpected == (("new",),)
    assert not caught.value.misfits


@pytest.mark.parametrize("strict", [False, True])
def test_an_update_names_the_first_place_that_cannot_be_set(strict):
    Pair = collections.namedtuple("Pair", "second first")
    node = nnx.Dict(c=nnx.data(Pair(jnp.ones(1), Pair(jnp.ones(1), jnp.ones(1)))))
    with pytest.raises(ValueError, match=r"Cannot set key 'first'.*'c/first/first'"):
        nnx.update(node, nnx.state(nnx.clone(node)), strict=strict)
