"""The static part that JAX gets of a Pytree is kept, and never a stale one."""

import copy
import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graftree as nnx

# `split` watches objects too, and remembers their static values beside.
from graftree.core.objects import bookkeeping
from tests import zoo


def made(**attributes):
    return zoo.Node(kernel=nnx.Param(jnp.ones(1)), **attributes)


def watched(box):
    assert bookkeeping.watch(box)
    return vars(box)


WRITES = {
    "setattr": setattr,
    "vars": lambda box, name, value: vars(box).update({name: value}),
    "watched vars": lambda box, name, value: watched(box).update({name: value}),
    "object": object.__setattr__,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize(
    "values",
    [(1, True), (1, 1.0), (0.0, -0.0), ("a", "b"), (None, ()), ((1,), (True,))],
    ids=str,
)
def test_another_static_value_is_another_structure(write, values):
    box = made(mode=values[0])
    before = [jax.tree.structure(box) for _ in range(2)]
    write(box, "mode", values[1])
    after = [jax.tree.structure(box) for _ in range(2)]
    assert before[0] == before[1] != after[0] == after[1]
    assert after[0] == jax.tree.structure(made(mode=values[1]))


@pytest.mark.parametrize("name", ["it's", 'a "b"', "\\", "{x}", "None", "ü"])
def test_names_need_not_be_identifiers(name):
    box = made(**{name: 1})
    leaves, treedef = jax.tree.flatten(box)
    assert vars(jax.tree.unflatten(treedef, leaves))[name] == 1
    object.__setattr__(box, name, 2)
    assert treedef != jax.tree.structure(box)


CHANGES = {
    "contents": lambda box: box.sizes.append(2),
    "flags": lambda box: setattr(box._pytree__state, "is_setup", True),
    "one of many": lambda box: object.__setattr__(box, "a99", True),
    "name": lambda box: vars(box).update(other=vars(box).pop("a50")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_all_that_is_static_belongs_to_the_structure(name):
    box = made(sizes=[1], **{f"a{i}": i for i in range(100)})
    before = [jax.tree.structure(box) for _ in range(2)]
    CHANGES[name](box)
    assert before[0] == before[1] != jax.tree.structure(box)
    assert jax.tree.structure(box) == jax.tree.structure(copy.copy(box))


def test_unchanged_objects_give_the_very_same_static_part():
    box = made(mode="a", rate=0.5)
    first, second = (jax.tree.structure(box).node_data()[1] for _ in range(2))
    assert first is second


@pytest.mark.parametrize("write", ["setattr", "watched vars"])
def test_static_values_that_were_replaced_are_let_go(write):
    box = made(function=lambda: None)
    kept = weakref.ref(box.function)
    jax.tree.leaves(box)
    WRITES[write](box, "function", None)
    gc.collect()
    assert kept() is None


def test_structures_keep_no_object():
    box = made(mode="a")
    kept, treedef = weakref.ref(box), [jax.tree.structure(box) for _ in range(2)]
    del box
    gc.collect()
    assert kept() is None and treedef[0] == treedef[1]


values = st.sampled_from([0, False, 0.0, -0.0, "a", None, (), (0,), [0], jnp.ones(1)])
names = st.sampled_from("abc")
writes = st.tuples(st.sampled_from([*WRITES]), names, values)


@settings(max_examples=60, deadline=None)
@given(st.lists(writes, max_size=8))
def test_structure_is_that_of_a_copy_whatever_is_written(steps):
    box = made(a=1, b=nnx.data([1]), c="c")
    for write, name, value in steps:
        try:
            WRITES[write](box, name, copy.copy(value))
            structure = jax.tree.structure(copy.copy(box))
        except ValueError:  # data in a static attribute
            box = made(a=1, b=nnx.data([1]), c="c")
            continue
        assert jax.tree.structure(box) == structure == jax.tree.structure(box)
