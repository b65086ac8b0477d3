"""Corners of attributes, views and conversions of Modules."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables, zoo

# ------------------------------------------------------- attributes, views, conversions


class Leaf(nnx.Module):
    def __init__(self):
        self.rate = 0.5
        self.deterministic = self.decode = False
        self.weight = nnx.Param(jnp.ones(2))
        self.array = jnp.zeros(2)

    def set_view(
        self, deterministic: bool | None = None, *, decode: bool | None = None
    ):
        """Configures the leaf.

        Args:
            deterministic: whether dropout is off,
                also in the attention.
            decode (bool): whether to use the cache
        """
        self.deterministic = deterministic
        self.decode = decode


class Settings(nnx.Pytree):
    def set_view(self, **options):
        self.seen = tuple(sorted(options))


def model():
    return zoo.Box(leaf=Leaf(), norm=zoo.Box(size=1), plain=nnx.data([Leaf()]))


def test_modules_have_a_metaclass_and_take_no_arguments():
    assert type(nnx.Module) is nnx.module.ModuleMeta
    assert issubclass(nnx.module.ModuleMeta, nnx.pytreelib.PytreeMeta)
    with pytest.raises(TypeError):
        nnx.Module(1)


# ------------------------------------------------------------------- set_attributes


def test_set_attributes_matches_any_of_the_filters():
    node = nnx.Dict(a=Leaf(), b=Leaf(), c=zoo.Box(rate=0.5))
    node.set_attributes(nnx.PathContains("b"), zoo.Box, rate=0.1)
    assert (node.a.rate, node.b.rate, node.c.rate) == (0.5, 0.1, 0.1)


@pytest.mark.parametrize(
    ("filters", "attributes", "missing"),
    [((zoo.Box,), {"rate": 0.1}, "rate"), ((), {"rate": 0.1, "unknown": 1}, "unknown")],
    ids=["among the matching modules only", "nothing is set"],
)
def test_failed_set_attributes_changes_nothing(filters, attributes, missing):
    node = model()
    with pytest.raises(ValueError, match=rf"Could not find.*\['{missing}'\]"):
        node.set_attributes(*filters, **attributes)
    assert node.leaf.rate == 0.5


def test_set_attributes_refuses_modules_of_other_traces():
    leaf = Leaf()
    with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate 'Leaf'"):
        jax.jit(lambda: leaf.set_attributes(rate=0.1))()
    assert leaf.rate == 0.5


# ----------------------------------------------------------------------------- views


@pytest.mark.parametrize("options", [{}, {"decode": True}])
def test_views_are_copies_that_share_variables_and_arrays(options):
    node = model()
    view = nnx.view(node, **options)
    assert view is not node and view.leaf is not node.leaf
    assert view.leaf.weight is node.leaf.weight and view.leaf.array is node.leaf.array


def test_views_pass_each_node_the_options_it_names():
    view = nnx.view([Leaf(), Settings()], decode=True, other=1)
    assert view[0].decode and view[1].seen == ("decode", "other")
    with pytest.raises(ValueError, match=r"Unused keys .*\['deterministic'\]"):
        nnx.view(nnx.Rngs(0), deterministic=True)


def test_views_and_attributes_are_made_in_both_modes(graph):
    view = nnx.view({"m": [Leaf()]}, decode=True, graph=graph)
    changed = nnx.with_attributes([model()], decode=True, graph=graph)
    assert view["m"][0].decode and changed[0].leaf.decode


def test_view_info_lists_each_class_once_by_name_with_its_parameters():
    expected = """\
Leaf:
  deterministic: bool | None = None
    whether dropout is off,
    also in the attention.
  decode: bool | None = None
    whether to use the cache"""
    assert nnx.view_info([model(), nnx.Rngs(0)]) == expected
    lines = nnx.view_info([Settings(), Leaf(), Leaf()]).splitlines()
    assert [x for x in lines if not x.startswith(" ")] == ["Leaf:", "Settings:"]
    assert nnx.view_info([Settings(), Leaf()], only=Settings).startswith("Settings:")
    assert nnx.view_info([nnx.Rngs(0), 1]) == ""


def test_view_info_does_without_descriptions():
    class Undescribed(nnx.Module):
        def set_view(self, a: int, b: str = "x", *args: int, **kwargs: int):
            """Says nothing of the first.

            Args:
                b: the second

            Returns:
                nothing
            """

    lines = nnx.view_info(Undescribed()).splitlines()[1:]
    assert lines == ["  a: <class 'int'>", "  b: <class 'str'> = x", "    the second"]


# ----------------------------------------------------------------- conversion to refs


def test_hijax_variables_are_a_filter():
    matches = nnx.filterlib.to_predicate(nnx.variablelib.HijaxVariable)
    variables = nnx.Param(1, hijax=True), nnx.Param(1)
    assert [matches((), v) for v in variables] == [True, False]


def test_cyclic_objects_and_shared_refs_are_converted():
    node = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    node.self = node
    converted = nnx.with_vars(node, ref=True)
    assert converted.self is converted and converted.w.ref
    converted.bare = ref = converted.w.get_raw_value()
    arrays = nnx.to_arrays(converted)
    assert not arrays.w.ref and isinstance(arrays.bare, jax.Array)
    arrays = nnx.to_arrays({"a": ref, "b": ref}, allow_duplicates=True)
    assert arrays["a"] is arrays["b"]


def test_what_is_no_array_of_jax_stays_or_is_refused():
    state = {"a": np.ones(2)}
    assert nnx.to_refs(state)["a"] is state["a"]
    with pytest.raises(TypeError):
        nnx.to_refs(nnx.Dict(a=nnx.Param((1.0, 2.0))))
    converted = nnx.to_refs(nnx.Dict(a=nnx.Cache((1.0,))), only=nnx.Param)
    assert converted.a.get_value() == (1.0,)
    v = nnx.Param(jnp.ones(2))
    with pytest.raises(ValueError, match="allow_duplicates=True"):
        nnx.with_vars([v, v], ref=True)


# --------------------------------------------------------------- changes of structure


@nnx.remat
def drop_count(model):
    del model.count


@tables.cases(
    "change",
    drop_count,
    lambda model: model.layers.insert(0, jnp.full(1, 2.0)),
    lambda model: model.layers.__delitem__(2),
    ids=["remat", "insert", "delete"],
)
def test_what_stays_is_there_at_every_line(change):
    """Where another thread may look, and Ctrl-C interrupt."""
    layers = nnx.List([jnp.zeros(1), jnp.ones(1), jnp.ones(1)])
    model = nnx.Dict(layers=layers, count=0)

    def look(frame, event, arg):
        assert model.layers is layers and layers[0].shape == (1,) and len(layers) >= 2
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        change(model)
    finally:
        sys.settrace(before)
    assert "count" not in model or len(layers) != 3
