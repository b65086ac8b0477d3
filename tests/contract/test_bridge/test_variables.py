"""Variables of Linen as Variables of Modules, and back."""

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from flax.core import meta

import graftree as nnx
from tests.interop.bridge import comparing

variables = nnx.bridge.variables

ONES = jnp.ones((2, 3))


class Box(struct.PyTreeNode, meta.AxisMetadata):
    """A box of a user's own."""

    value: object = struct.field()
    color: str = struct.field(default="red", pytree_node=False)

    def unbox(self):
        return self.value

    def replace_boxed(self, val):
        return self.replace(value=val)

    def add_axis(self, index, params):
        return self

    def remove_axis(self, index, params):
        return self


class NamedBox(Box):
    """One that says what its metadata is."""

    def to_nnx_metadata(self):
        return {"value": self.value, "hue": self.color}

    @classmethod
    def from_nnx_metadata(cls, metadata):
        return cls(metadata["value"], metadata["hue"])


BOXES = [
    Box(ONES, "blue"),
    NamedBox(ONES, "green"),
    nn.Partitioned(ONES, ("a", None)),
    nn.LogicallyPartitioned(ONES, ("a", "b"), rules=(("a", "x"),)),
    nn.LogicallyPartitioned(ONES, ("a", "b")),
]


@pytest.mark.parametrize("box", BOXES, ids=lambda box: type(box).__name__)
def test_boxes_come_back_as_they_were(box):
    variable = variables.to_nnx_var("params", box)
    assert isinstance(variable, nnx.Param)
    assert variable.linen_meta_type is type(box)
    again = variables.to_linen_var(variable)
    assert type(again) is type(box)
    assert not comparing.differences(comparing.plain(again), comparing.plain(box))


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("box", BOXES, ids=lambda box: type(box).__name__)
def test_metadata_of_boxes_is_that_of_the_peer(box):
    peer = pytest.importorskip("flax.nnx")
    with peer.use_eager_sharding(False):
        theirs = comparing.plain(peer.bridge.variables.to_nnx_var("params", box))
    ours = comparing.plain(variables.to_nnx_var("params", box))
    assert not comparing.differences(ours, theirs)


def test_names_without_a_mesh_are_kept_and_not_placed():
    box = nn.Partitioned(ONES, ("a", "b"))
    assert variables.to_nnx_var("params", box).out_sharding == ("a", "b")


def test_names_on_a_mesh_are_placed():
    auto = (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((2,), ("a",), axis_types=auto)):
        box = nn.Partitioned(ONES, ("a", None))
        variable = jax.jit(lambda: variables.to_nnx_var("params", box))()
    assert variable.get_value().sharding.spec == jax.P("a")


def test_variables_with_metadata_are_boxed():
    box = variables.to_linen_var(nnx.BatchStat(1.0, tag="t"))
    assert isinstance(box, nnx.bridge.NNXMeta)
    assert (box.var_type, box.value) == (nnx.BatchStat, 1.0)
    assert box.metadata == {"tag": "t"} and box.to_nnx_variable().tag == "t"
    assert (box.unbox(), box.replace_boxed(2.0).unbox()) == (1.0, 2.0)
    assert box.add_axis(0, {"partition_name": "a"}) is box
    assert box.remove_axis(0, {}) is box


@pytest.mark.parametrize(
    ("names", "rules", "spec"),
    [
        (None, None, jax.P()),
        (("a", None), None, jax.P("a", None)),
        (("a", "b"), (("a", "x"),), jax.P("x", "b")),
    ],
)
def test_boxes_tell_their_partition_spec_without_a_mesh(names, rules, spec):
    given = {"out_sharding": names, "sharding_rules": rules}
    metadata = {name: value for name, value in given.items() if value}
    box = nnx.bridge.NNXMeta(nnx.Param, ONES, metadata)
    abstract = jax.eval_shape(lambda: box)
    assert box.get_partition_spec() == abstract.get_partition_spec() == spec
    assert nn.get_partition_spec({"w": box, "b": ONES}) == {"w": spec, "b": jax.P()}


def test_a_box_in_the_wrong_collection_is_an_error():
    box = nnx.bridge.NNXMeta(nnx.BatchStat, ONES, {"tag": 1})
    with pytest.raises(ValueError, match=r"'params' is for .* Param.* a BatchStat"):
        variables.to_nnx_var("params", box)


def test_unknown_collections_and_types_get_each_others_names():
    class Reading(nnx.Variable):
        pass

    variable = variables.to_nnx_var("measurements", ONES)
    assert type(variable).__name__ == "measurements"
    assert nnx.variable_type_from_name("measurements") is type(variable)
    collections = variables.nnx_attrs_to_linen_vars({"r": Reading(1.0)})
    assert collections == {"Reading": {"r": 1.0}}


@pytest.mark.parametrize("freeze", [False, True])
def test_collections_are_merged_by_path(freeze):
    given = {
        "params": {"a": {"k": ONES}, "b": ONES},
        "batch_stats": {"a": {"m": ONES}},
        "intermediates": {"h": (ONES, ONES)},
        "cache": {"none": None},
    }
    given = flax.core.freeze(given) if freeze else given
    attributes = variables.linen_vars_to_nnx_attrs(given)
    assert type(attributes["a"]["k"]) is nnx.Param
    assert type(attributes["a"]["m"]) is nnx.BatchStat
    assert len(attributes["h"].get_value()) == 2
    again = variables.nnx_attrs_to_linen_vars(attributes)
    assert jax.tree.structure(again) == jax.tree.structure(flax.core.unfreeze(given))


@pytest.mark.parametrize(
    "second", [{"a": ONES}, {"a": {"b": ONES}}], ids=["variable", "mapping"]
)
@pytest.mark.parametrize("flip", [False, True])
def test_two_variables_at_a_path_are_an_error(second, flip):
    given = [("params", {"a": ONES}), ("batch_stats", second)]
    with pytest.raises(ValueError, match="Found duplicate variable path") as caught:
        variables.linen_vars_to_nnx_attrs(dict(given[::-1] if flip else given))
    assert "('a',)" in str(caught.value)
    assert "Rename" in str(caught.value)


def test_states_and_only_variables_have_collections():
    with pytest.raises(ValueError, match="Cannot infer collection name from value: 3"):
        variables.nnx_attrs_to_linen_vars({"a": {"b": 3}})
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    collections = variables.nnx_attrs_to_linen_vars(state)
    shapes = jax.tree.map(np.shape, collections)
    assert shapes == {"params": {"bias": (3,), "kernel": (2, 3)}}


def test_derived_types_are_sorted_before_their_bases():
    class Special(nnx.LoRAParam):
        pass

    types = [nnx.Variable, nnx.Param, nnx.BatchStat, Special, nnx.LoRAParam, nnx.Cache]
    expected = [Special, nnx.LoRAParam, nnx.Param, nnx.BatchStat, nnx.Cache]
    assert variables.sort_variable_types(types) == [*expected, nnx.Variable]


def test_a_path_starts_with_its_collection():
    tree = {"params": {"a": 1}}
    ((path, _),) = jax.tree.leaves_with_path(tree)
    assert variables.get_col_name(path) == "params"


@pytest.mark.parametrize("path", [(), ("params",), (jax.tree_util.SequenceKey(0),)])
def test_other_paths_have_no_collection(path):
    with pytest.raises(ValueError, match="DictKey"):
        variables.get_col_name(path)


def test_variables_without_metadata_are_vanilla():
    given = {}, {"tag": None}, {"out_sharding": None}
    found = [variables.is_vanilla_variable(nnx.Param(1, **x)) for x in given]
    assert found == [True, False, False]


@pytest.mark.parametrize("mesh", [None, "made"])
def test_with_partitioning_makes_boxes_of_linen(mesh):
    if mesh:
        mesh = jax.make_mesh((1, 1), ("a", "b"))
    init = nnx.bridge.with_partitioning(nnx.initializers.ones, ("a", "b"), mesh)
    param = nnx.Param(init(jax.random.key(0), (2, 3)), eager_sharding=False)
    box = variables.to_linen_var(param)
    assert isinstance(box, nn.Partitioned)
    assert (box.names, box.mesh) == (("a", "b"), mesh)
