"""Objects to skeleton and leaves, and back; objects that exist are reused."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core import stamps
from graftree.core.graph import flattening, freshness, merging
from graftree.core.graph.flattening import IndexMap, RefMap
from graftree.core.graph.merging import KEEP, Builder


class Box(nnx.Pytree):
    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


def test_objects_are_numbered_in_the_order_of_the_visit():
    shared = nnx.Param(1)
    box = Box(b=shared, a=Box(x=shared))
    refs = RefMap()
    _, leaves = flattening.flatten_graph(box, refs)
    assert [id(x) for x in refs] == [id(box), id(box.a), id(shared)]
    assert len(leaves) == 1 and leaves[0] is shared


def test_maps_are_inverse_to_each_other():
    keys = [[1], [1]]
    refs = RefMap([(keys[0], 0), (keys[1], 1)])
    assert len(refs) == 2 and refs.get([1]) is None
    objects = IndexMap.from_refmap(refs)
    assert objects[1] is keys[1] and RefMap.from_indexmap(objects)[keys[0]] == 0
    del refs[keys[0]]
    assert keys[0] not in refs and next(iter(refs)) is keys[1]


def test_objects_known_before_are_only_referred_to():
    refs = RefMap()
    box = Box(a=nnx.Param(1))
    flattening.flatten_graph(box, refs)
    graphdef, leaves = flattening.flatten_graph(box, refs)
    assert leaves == [] and len(graphdef.nodes) == 1 and graphdef.num_leaves == 0


def reused(box, change):
    """The pair of skeleton and leaves of a changed copy that refers to `box`."""
    refs = RefMap()
    graphdef, leaves = flattening.flatten_graph(box, refs)
    objects = IndexMap()
    inner = merging.unflatten(
        graphdef, [leaf.copy() for leaf in leaves], index_ref=objects
    )
    change(inner)
    outer = RefMap.from_indexmap(objects)
    return (
        flattening.flatten_graph(inner, RefMap(), outer),
        IndexMap.from_refmap(refs),
    )


def test_existing_objects_are_updated_in_place():
    def change(inner):
        inner.a.set_value(jnp.array(5.0))
        inner.b, inner.c = inner.a, 3

    box = Box(a=nnx.Param(jnp.array(1.0)))
    variable = box.a
    (graphdef, leaves), existing = reused(box, change)
    out = merging.unflatten(graphdef, leaves, outer_index_outer_ref=existing)
    assert out is box and box.a is box.b is variable
    assert variable[...] == 5.0 and box.c == 3


def test_failed_reuse_changes_nothing():
    box = Box(a=nnx.Param(jnp.array(1.0)))
    (graphdef, leaves), existing = reused(box, lambda inner: setattr(inner, "c", 1))

    def inside():
        merging.unflatten(graphdef, leaves, outer_index_outer_ref=existing)

    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(inside)()
    assert not hasattr(box, "c")
    wrong = {index: nnx.Dict() for index in existing}
    with pytest.raises(ValueError, match="Box(.|\n)*Dict|Param(.|\n)*Dict"):
        merging.unflatten(graphdef, leaves, outer_index_outer_ref=wrong)


def test_kept_leaves_leave_a_variable_as_it_is():
    box = Box(a=nnx.Param(jnp.array(1.0)))
    (graphdef, _), existing = reused(box, lambda inner: None)
    value = box.a[...]
    builder = Builder(IndexMap(), existing)
    out = builder.build(graphdef, [KEEP])
    builder.check()
    builder.commit()
    assert out is box and box.a[...] is value


def test_nothing_is_written_before_commit():
    box = Box(a=nnx.Param(jnp.array(1.0)))
    (graphdef, leaves), existing = reused(
        box, lambda inner: (setattr(inner, "c", 1), inner.a.set_value(jnp.array(2.0)))
    )
    builder = Builder(IndexMap(), existing)
    builder.build(graphdef, leaves)
    builder.check()
    assert not hasattr(box, "c") and box.a[...] == 1.0
    builder.commit()
    assert box.c == 1 and box.a[...] == 2.0


def test_building_new_objects_is_no_structural_change():
    graphdef, leaves = flattening.flatten_graph(Box(a=Box(x=nnx.Param(1)), b=[2]))
    before = stamps.clock.now
    merging.unflatten(graphdef, leaves)
    assert stamps.clock.now == before


def test_objects_refer_back_to_those_above_and_aside():
    box = Box(a=nnx.data([nnx.Param(1)]), b=Box())
    box.b.up, box.b.aside, box.c = box, box.a[0], box.b
    graphdef, leaves = flattening.flatten_graph(box)
    out = merging.unflatten(graphdef, leaves)
    assert out is not box and out.b.up is out and out.c is out.b
    assert out.b.aside is out.a[0] is box.a[0]


def test_containers_are_rebuilt_around_objects_that_are_whole():
    seen = []

    @jax.tree_util.register_pytree_node_class
    class Watcher:
        def __init__(self, *items):
            self.items = items
            seen.append([vars(item).get("x") for item in items])

        def tree_flatten(self):
            return self.items, None

        @classmethod
        def tree_unflatten(cls, _, items):
            return cls(*items)

    graphdef, leaves = flattening.flatten_graph(Watcher(Box(x=1), Box(x=2)))
    seen.clear()
    merging.unflatten(graphdef, leaves)
    assert seen == [[1, 2]]


def test_ref_metadata_follows_what_is_stored():
    graphdef, state = nnx.split(Box(a=nnx.Param(jnp.array(1.0), ref=True)))
    frozen = nnx.merge(graphdef, {"a": jnp.array(2.0)})
    assert frozen.a.ref is False and frozen.a[...] == 2.0


def test_leaf_that_is_no_node_is_its_own_state(graph):
    graphdef, leaves = freshness.flatten_node(jnp.ones(2), graph, "split")
    assert graphdef.num_leaves == 1
    assert merging.unflatten(graphdef, leaves) is leaves[0]
