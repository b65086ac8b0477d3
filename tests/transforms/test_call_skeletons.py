"""What a compiled function knows again: equal skeletons are the same one."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np

import graftree as nnx
from graftree.transforms import packing, propagation
from graftree.transforms.call_skeletons import Skeletons
from graftree.transforms.packing import Values
from tests.static_values import Tag


def skeleton_of(*args, mode=propagation.GRAPH):
    return packing.pack((args, {}), mode, "jit").skeleton


def tagged(name):
    model = nnx.Module()
    model.tag = Tag(name)
    model.kernel = nnx.Param(jnp.ones(2))
    return model


def test_the_first_of_equal_skeletons_is_kept():
    known = Skeletons()
    first = known.intern(skeleton_of(tagged("a"), 1))
    assert known.intern(skeleton_of(tagged("a"), 2)) is first
    assert known.intern(skeleton_of(tagged("b"), 1)) is not first


def test_static_values_without_a_hash_are_compared_by_jax():
    known = Skeletons()
    skeleton = skeleton_of(tagged(["a", "b"]))
    assert known.intern(skeleton) is skeleton
    assert skeleton.number is None


def test_skeletons_are_not_kept_alive():
    known = Skeletons()
    gone = weakref.ref(known.intern(skeleton_of(tagged("a"))))
    gc.collect()
    assert gone() is None


def test_different_skeletons_are_told_apart_by_their_number():
    known = Skeletons()
    trees = [
        jax.tree.structure(Values([1], known.intern(skeleton_of(tagged(name))), None))
        for name in "aba"
    ]
    assert trees[0] == trees[2]
    assert trees[0] != trees[1]
    # As of a value that was changed in place after JAX compiled for it.
    for tree in trees:
        skeleton = tree.node_data()[1][1]
        vars(skeleton.entries[0].attributes[1][1].value)["name"] = "c"
    assert trees[0] != trees[1]


def test_a_static_value_changed_in_place_is_traced_again():
    @nnx.jit
    def describe(model):
        return {"a": 1.0, "b": 2.0}[model.tag.name] * model.kernel

    for _ in range(2):  # each round has the values of the round before in its cache
        model = tagged("a")
        for name in "aabbab":
            model.tag.name = name
            expected = {"a": 1.0, "b": 2.0}[name]
            np.testing.assert_array_equal(describe(model), [expected, expected])
