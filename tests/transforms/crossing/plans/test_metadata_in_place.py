"""Metadata that changes in place is compared as static attributes are.

A list, dict or object in the metadata of a Variable moves no stamp when it changes. So
whatever is remembered of a Variable remembers what its metadata was like.
"""

import pickle
import zlib

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graftree as nnx
from graftree.core import imprints
from graftree.core.variables import variables
from tests.static_values import Tag


class Config:
    """Compares by its content, and has no hash."""

    def __init__(self, content):
        self.content = content

    def __eq__(self, other):
        return isinstance(other, Config) and self.content == other.content

    def __repr__(self):
        return f"Config({self.content!r})"


atoms = st.none() | st.booleans() | st.integers(0, 9) | st.text("ab", max_size=2)
contents = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2)
        | st.tuples(inner, inner)
        | st.builds(Config, inner)
    ),
    max_leaves=5,
)
# What is certain to change is around it.
metadata_values = st.lists(contents, max_size=2) | st.builds(Config, contents)


def holders_in(value):
    """All that can be changed in a value, itself included."""
    if isinstance(value, (list, tuple)):
        below = [holder for x in value for holder in holders_in(x)]
        return below + ([value] if isinstance(value, list) else [])
    if isinstance(value, dict):
        return [value, *[holder for x in value.values() for holder in holders_in(x)]]
    return [value, *holders_in(value.content)] if isinstance(value, Config) else []


def change(holder, new):
    if isinstance(holder, list):
        holder.append(new)
    elif isinstance(holder, dict):
        holder["c"] = [holder.pop("c", None), new]
    else:
        holder.content = [holder.content, new]


def number(value):
    """A number that a function may make of metadata while it is traced."""
    return zlib.crc32(repr(value).encode()) % 1000


class Model(nnx.Module):
    def __init__(self, value):
        self.kernel = nnx.Param(jnp.ones(2), config=value)
        self.bias = nnx.Param(jnp.zeros(2))

    def __call__(self):
        return (self.kernel[...] * number(self.kernel.config) + self.bias).sum()


def functional(mode):
    @jax.jit
    def call(graphdef, state):
        return nnx.merge(graphdef, state)()

    return lambda model: call(*nnx.split(model, graph=mode["graph"]))


def with_state(mode):
    call = nnx.jit(
        lambda state: state.kernel[...].sum() * number(state.kernel.config), **mode
    )
    return lambda model: call(nnx.state(model))


def bound(mode):
    made = []

    def call(model):
        if not made:
            made.append(nnx.jit_partial(Model.__call__, model, **mode))
        return made[0]()

    return call


# What gives the value of a model, from the mode.
WAYS = {
    "jit": lambda mode: nnx.jit(Model.__call__, **mode),
    "compiled grad": lambda mode: nnx.jit(
        lambda model: nnx.value_and_grad(Model.__call__, **mode)(model)[0], **mode
    ),
    "grad": lambda mode: (lambda calls: lambda model: calls(model)[0])(
        nnx.value_and_grad(Model.__call__, **mode)
    ),
    "vmap": lambda mode: (lambda calls: lambda model: calls(model, jnp.ones(2))[0])(
        nnx.vmap(lambda model, _: model(), in_axes=(None, 0), **mode)
    ),
    "remat": lambda mode: nnx.jit(nnx.remat(Model.__call__, **mode), **mode),
    "functional": functional,
    "state": with_state,
    "clone": lambda mode: lambda model: nnx.clone(model, graph=mode["graph"])(),
    "jax.jit": lambda _: jax.jit(Model.__call__),
}


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=8)
@given(data=st.data())
def test_a_change_between_two_calls_is_seen(way, mode, data):
    model = Model(data.draw(metadata_values))
    call = WAYS[way](mode)
    for new in range(4):
        # A plan is made by the second call, and followed by the third.
        assert [float(call(model)) for _ in range(3)] == [float(model())] * 3
        change(data.draw(st.sampled_from(holders_in(model.kernel.config))), new)
    assert float(call(model)) == float(model())


def test_bound_objects_are_compared_too(value_mode):
    model = Model([1])
    call = bound(value_mode)
    for new in range(3):
        assert [float(call(model)) for _ in range(3)] == [float(model())] * 3
        change(model.kernel.config, new)


def test_memos_of_split_and_state_know_it(graph):
    model = Model({"a": 1})
    before = [nnx.graphdef(model, graph=graph) for _ in range(3)][-1]
    model.kernel.config["a"] = 2
    assert nnx.graphdef(model, graph=graph) != before
    model.kernel.config["a"] = 1
    assert nnx.graphdef(model, graph=graph) == before


def test_a_treedef_keeps_what_it_was_made_of():
    model = Model(Config(1))
    before = jax.tree.structure(model)
    model.kernel.config.content = True
    assert jax.tree.structure(model) != before
    model.kernel.config.content = 1
    assert jax.tree.structure(model) == before


def test_what_returns_has_the_metadata_of_the_caller_not_a_note_of_it(mode):
    model = Model([1])
    entries = variables.metadata_of(model.kernel)
    out = nnx.jit(lambda model: nnx.Param(model.kernel[...], x=[1]), **mode)(model)
    for made in (
        nnx.merge(*nnx.split(model, graph=mode["graph"])).kernel,
        nnx.clone(model).kernel,
        jax.tree.map(lambda x: x, model).kernel,
        jax.jit(lambda model: model)(model).kernel,
    ):
        assert variables.metadata_of(made) is entries
    assert type(variables.metadata_of(out)) is imprints.HashableMapping


def test_a_function_that_changes_it_is_traced_at_each_call(mode):
    def count(model):
        model.kernel.config.append(0)
        return jnp.array(len(model.kernel.config))

    model, counted = Model([]), nnx.jit(count, **mode)
    assert [int(counted(model)) for _ in range(4)] == [1, 2, 3, 4]


def test_the_hash_of_a_skeleton_stays_and_is_that_of_its_content():
    tag = Tag("a")
    graphdef = nnx.graphdef(Model(tag))
    again = pickle.loads(pickle.dumps(graphdef))
    number = hash(graphdef)
    tag.name = "b"
    assert hash(graphdef) == number == hash(again)
    now = nnx.graphdef(Model(tag))
    assert now != graphdef and hash(now) != number


def test_a_skeleton_with_unhashable_metadata_can_be_pickled():
    graphdef = nnx.graphdef(Model([1]))
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef


def test_metadata_that_can_not_change_is_not_copied():
    kernel = nnx.Param(jnp.ones(2), sharding_like=("a", None), rate=0.5)
    entries = variables.metadata_of(kernel)
    assert jax.tree.structure(kernel) == jax.tree.structure(kernel)
    assert entries.noted() is entries and entries.is_fixed
