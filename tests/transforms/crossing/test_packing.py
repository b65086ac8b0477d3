"""Arguments as signature and groups of leaves."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.config import GRAPH, TREE
from graftree.transforms.crossing import packing


def pack(*args, mode=GRAPH, **kwargs):
    return packing.pack((args, kwargs), mode, "jit")


def test_equal_structures_have_equal_signatures():
    first = pack(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), 1.0)
    second = pack(nnx.Linear(2, 3, rngs=nnx.Rngs(1)), 2.0)
    assert first.signature == second.signature
    assert first.signature != pack(nnx.Linear(2, 4, rngs=nnx.Rngs(0)), 1.0).signature


def test_a_shared_variable_is_one_leaf():
    shared = nnx.Param(jnp.ones(2))
    assert len(pack(shared, [shared]).leaves) == 1
    with pytest.raises(ValueError, match="Duplicate Param"):
        pack(shared, [shared], mode=TREE)


def test_leaves_are_named_as_in_python():
    packed = pack({"x": 1.0}, model=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert [slot.name for slot in packed.signature.slots] == [
        "args[0]['x']",
        "kwargs['model'].bias",
        "kwargs['model'].kernel",
    ]


def test_groups_join_to_what_was_parted():
    packed = pack(1.0, 2.0, 3.0)
    groups = packing.part(packed.values(), packed.signature, [1, 0, 1], 2)
    assert [group.values for group in groups] == [[2.0], [1.0, 3.0]]
    assert packing.join(groups) == (packed.signature, [1.0, 2.0, 3.0], [1, 0, 1])


def test_groups_pass_through_jax_with_their_static_part():
    packed = pack(1.0, [2.0])
    (group,) = packing.part(packed.values(), packed.signature, [0, 0], 1)
    doubled = jax.tree.map(lambda x: 2 * x, group)
    assert doubled.signature is group.signature
    assert list(doubled.values) == [2.0, 4.0]
