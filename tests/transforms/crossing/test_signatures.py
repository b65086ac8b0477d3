"""What a compiled function knows again: equal skeletons are the same one."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.transforms.crossing import packing, propagation
from graftree.transforms.crossing.packing import Values
from graftree.transforms.crossing.signatures import Skeletons
from tests.static_values import Tag
from tests.threads import run_in_threads


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


@pytest.mark.parametrize("mode", [propagation.TREE, propagation.GRAPH])
@pytest.mark.parametrize("name", ["a", ["a", "b"]])
def test_equal_skeletons_have_one_number_and_others_another(name, mode):
    # JAX must not have to compare what follows the number (issue 12, §7). It hashes no
    # static data, so in tree mode these have equal hashes; a list has none.
    known = Skeletons()
    first, equal, other = (
        known.intern(skeleton_of(tagged(x), mode=mode)) for x in (name, name, ["c"])
    )
    assert first is equal and first.number is not None
    assert other.number != first.number


def test_threads_that_come_at_once_get_one_skeleton():
    known, found = Skeletons(), []  # issue 12, §7
    start = threading.Barrier(4)

    def come():
        skeleton = skeleton_of(tagged("a"))
        start.wait()
        found.append(known.intern(skeleton))

    run_in_threads(*[come] * 4)
    assert len({id(skeleton) for skeleton in found}) == 1


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
