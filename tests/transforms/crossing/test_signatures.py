"""What a compiled function knows again: equal signatures are the same one."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree import config
from graftree.transforms.crossing import packing
from graftree.transforms.crossing.packing import Values
from graftree.transforms.crossing.signatures import Signatures
from tests.static_values import Tag
from tests.threads import run_in_threads


def signature_of(*args, mode=config.GRAPH):
    return packing.pack((args, {}), mode, "jit").signature


def tagged(name):
    model = nnx.Module()
    model.tag = Tag(name)
    model.kernel = nnx.Param(jnp.ones(2))
    return model


def test_the_first_of_equal_signatures_is_kept():
    known = Signatures()
    first = known.intern(signature_of(tagged("a"), 1))
    assert known.intern(signature_of(tagged("a"), 2)) is first
    assert known.intern(signature_of(tagged("b"), 1)) is not first


@pytest.mark.parametrize("mode", [config.TREE, config.GRAPH])
@pytest.mark.parametrize("name", ["a", ["a", "b"]])
def test_equal_signatures_have_one_number_and_others_another(name, mode):
    # JAX must not have to compare what follows the number (issue 12, §7). It hashes no
    # static data, so in tree mode these have equal hashes; a list has none.
    known = Signatures()
    first, equal, other = (
        known.intern(signature_of(tagged(x), mode=mode)) for x in (name, name, ["c"])
    )
    assert first is equal and first.number is not None
    assert other.number != first.number


def test_threads_that_come_at_once_get_one_signature():
    known, found = Signatures(), []  # issue 12, §7
    start = threading.Barrier(4)

    def come():
        signature = signature_of(tagged("a"))
        start.wait()
        found.append(known.intern(signature))

    run_in_threads(*[come] * 4)
    assert len({id(signature) for signature in found}) == 1


def test_signatures_are_not_kept_alive():
    known = Signatures()
    gone = weakref.ref(known.intern(signature_of(tagged("a"))))
    gc.collect()
    assert gone() is None


def test_different_signatures_are_told_apart_by_their_number():
    known = Signatures()
    trees = [
        jax.tree.structure(
            Values.of([1], known.intern(signature_of(tagged(name))), None)
        )
        for name in "aba"
    ]
    assert trees[0] == trees[2]
    assert trees[0] != trees[1]
    # As of a value that was changed in place after JAX compiled for it.
    for tree in trees:
        signature = tree.node_data()[1][1]
        vars(signature.entries[0].attributes[1][1].value)["name"] = "c"
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
