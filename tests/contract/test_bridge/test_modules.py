"""Modules in the style of Linen, and Variables between both, beyond the peer."""

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from flax.core import meta

import graftree as nnx
from tests import meshes, tables
from tests.interop.bridge import comparing
from tests.interop.bridge.programs_modules import X, dense, mlp

pytestmark = pytest.mark.usefixtures("implicit_ranks")

Dense, MLP = dense(nnx), mlp(nnx)
Module, compact = nnx.bridge.Module, nnx.bridge.compact


def test_a_parameter_may_have_a_second_name():
    class Net(Module):
        def setup(self):
            self.a = self.param("scale", nn.initializers.normal(), (3,))

        def __call__(self, x):
            return x * self.a

    v = Net().init(0, X)
    (name,) = v["params"]
    assert (Net().apply(v, X) == X * v["params"][name]).all()


def test_a_submodule_called_twice_has_its_variables_once():
    class Net(Module):
        @compact
        def __call__(self, x):
            inner = MLP()
            return inner(x), inner(x)

    v = Net().init(0, X)
    (first, second), new = Net().apply(v, X, mutable=True)
    assert list(v["params"]) == ["MLP_0"]
    assert (first == second).all()
    assert new["counts"]["MLP_0"]["n"] == v["counts"]["MLP_0"]["n"] + 2


@pytest.mark.parametrize("method", ["explicit", "nested"])
def test_a_name_given_twice_is_an_error(method):
    class Net(Module):
        @compact
        def explicit(self, x):
            return Dense(3, name="a")(x) + Dense(3, name="a")(x)

        @compact
        def nested(self, x):
            y = Dense(2)(x)
            return y + self.inner(x)

        @compact
        def inner(self, x):
            return Dense(2)(x)

    with pytest.raises(ValueError, match="has made a submodule named"):
        Net().init(0, X, method=method)


def test_a_name_for_two_kinds_of_variables_is_an_error():
    class Net(Module):
        @compact
        def __call__(self, x):
            self.param("a", nn.initializers.ones, (3,))
            self.variable("cache", "a", jnp.zeros, (3,))

    with pytest.raises(ValueError, match="Net.a can't be a Cache: .* a Param already"):
        Net().init(0, X)


@pytest.mark.parametrize("rngs", [None, 0])
@pytest.mark.parametrize("given", [{}, {"params": {"kernel": jnp.ones((3, 2))}}])
def test_missing_parameters_are_errors_of_linen(given, rngs):
    with pytest.raises(flax.errors.ScopeParamNotFoundError):
        Dense(2).apply(given, X, rngs=rngs)


def test_missing_parameters_are_named_with_their_path():
    v = MLP().init(0, X)
    del v["params"]["out"]["bias"]
    with pytest.raises(flax.errors.ScopeParamNotFoundError, match='"bias".*"/out"'):
        MLP().apply(v, X)


def test_missing_parameters_that_may_change_are_made():
    out, v = Dense(2).apply({}, X, rngs=0, mutable=["params"])
    assert (out == Dense(2).apply(v, X)).all()


def test_a_parameter_of_another_shape_is_an_error_of_linen():
    params = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones((1,))}
    with pytest.raises(flax.errors.ScopeParamShapeError, match="bias"):
        Dense(2).apply({"params": params}, X)


def test_variables_assigned_in_setup_take_what_is_given():
    class Net(Module):
        def setup(self):
            self.total = nnx.BatchStat(jnp.ones(2))

        def __call__(self):
            self.total[...] += 1
            return self.total[...]

    given = {"batch_stats": {"total": jnp.full(2, 5.0)}}
    out, v = Net().apply(given, mutable=True)
    assert (out == 6).all()
    assert (v["batch_stats"]["total"] == 6).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_records_accumulate_when_given_back():
    class Net(Module):
        @compact
        def __call__(self, x):
            self.sow(nnx.Intermediate, "h", x)

    _, v = Net().apply(Net().init(0, X), X, mutable=True)
    assert len(v["intermediates"]["h"]) == 2


def test_lists_of_this_library_hold_bridge_modules_too():
    class Net(Module):
        def setup(self):
            self.layers = nnx.List([Dense(2), Dense(2)])
            self.named = nnx.Dict(last=Dense(1))

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.named["last"](x)

    out, v = Net().init_with_output(0, X)
    assert list(v["params"]["layers"]) == [0, 1]
    assert (Net().apply(v, X) == out).all()


def test_variables_in_lists_and_declared_ones_take_what_is_given():
    class Sum(Module):
        terms: list = nnx.data()

        def setup(self):
            self.more = [nnx.Param(jnp.ones(()))]
            self.declared = nnx.data([nnx.Param(jnp.ones(()))])
            self.last = nnx.data(nnx.Param(jnp.ones(())))

        def __call__(self):
            terms = [*self.terms, *self.more, *self.declared, self.last]
            return sum(term[...] for term in terms)

    module = Sum([nnx.Param(jnp.ones(())), nnx.Param(jnp.ones(()))])
    out, v = module.init_with_output(0)
    assert out == 5 and module.apply(jax.tree.map(lambda x: 5 * x, v)) == 25


def test_arrays_in_fields_are_no_variables():
    class Net(Module):
        scale: jax.Array

        @compact
        def __call__(self, x):
            return Dense(2)(x) * self.scale

    model = Net(jnp.array(2.0))
    out, v = model.init_with_output(0, X)
    assert list(v) == ["params"]
    assert (model.apply(v, X) == out).all()


def test_boxes_of_linen_are_taken_apart_from_the_start():
    class Net(Module):
        @compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.ones, (None, "a"))
            return x @ self.param("kernel", init, (3, 2))

    out, v = Net().init_with_output(0, X)
    assert isinstance(v["params"]["kernel"], nn.Partitioned)
    np.testing.assert_allclose(out, Net().apply(v, X))
    np.testing.assert_allclose(out, jnp.tile(X.sum(1, keepdims=True), 2), rtol=1e-5)


@pytest.mark.parametrize("function", ["nnx_in_bridge_mdl", "linen_in_bridge_mdl"])
def test_other_modules_need_a_bridge_module_around_them(function):
    make = getattr(nnx.bridge, function)
    with pytest.raises(ValueError, match="only needed inside bridge Module"):
        make(nn.Dense(2))


def test_missing_parameters_of_other_modules_are_errors():
    class Net(Module):
        @compact
        def __call__(self, x):
            make = lambda rngs: nnx.Linear(3, 2, rngs=rngs)  # noqa: E731
            return nnx.bridge.nnx_in_bridge_mdl(make)(x)

    v = Net().init(0, X)
    del v["params"]["Linear_0"]["bias"]
    error, phrase = flax.errors.ScopeParamNotFoundError, '"bias".*"/Linear_0"'
    for rngs in None, 0:
        with pytest.raises(error, match=phrase):
            Net().apply(v, X, rngs=rngs)


def test_other_modules_are_made_once_for_calls_of_one_module():
    class Inner(Module):
        @compact
        def __call__(self, x):
            make = lambda rngs: nnx.BatchNorm(3, rngs=rngs)  # noqa: E731
            norm = nnx.bridge.nnx_in_bridge_mdl(make)
            return norm(nnx.bridge.linen_in_bridge_mdl(nn.Dense(3))(x))

    class Net(Module):
        @compact
        def __call__(self, x):
            inner = Inner()
            return inner(inner(x))

    out, v = Net().init_with_output(0, X)
    assert sorted(v["params"]["Inner_0"]) == ["BatchNorm_0", "Dense_0"]
    assert v["params"]["Inner_0"]["Dense_0"]["kernel"].shape == (3, 3)
    assert Net().apply(v, X).shape == out.shape


def test_modules_that_refer_to_themselves_are_fine():
    class Loop(nnx.Module):
        def __init__(self, rngs):
            self.lin = nnx.Linear(3, 3, rngs=rngs)
            self.again = self

        def __call__(self, x):
            return self.again.lin(x)

    class Net(Module):
        @compact
        def __call__(self, x):
            return nnx.bridge.nnx_in_bridge_mdl(Loop)(x)

    out, v = Net().init_with_output(0, X)
    assert list(v["params"]) == ["Loop_0"]
    assert (Net().apply(v, X) == out).all()


def test_a_module_from_outside_is_not_initializing_afterwards():
    outside = nnx.bridge.ToNNX(nn.Dense(2), nnx.Rngs(0))

    class Net(Module):
        @compact
        def __call__(self, x):
            return nnx.bridge.nnx_in_bridge_mdl(lambda rngs: outside)(x)

    v = Net().init(0, X)
    assert list(v["params"]) == ["ToNNX_0"]
    kernel = outside.kernel[...]
    outside(X)
    assert (outside.kernel[...] == kernel).all()


def test_modules_of_one_call_do_not_stay_in_the_object():
    model = MLP()
    v = model.init(0, X)
    model.apply(v, X, mutable=True)
    assert not nnx.to_flat_state(nnx.state(model))
    assert model.scope is None


def test_the_stack_is_empty_after_an_exception():
    class Net(Module):
        @compact
        def __call__(self, x):
            raise RuntimeError("in the call")

    with pytest.raises(RuntimeError, match="in the call"):
        Net().init(0, X)
    assert nnx.bridge.current_module() is None


def test_bridge_modules_are_graph_nodes_and_not_pytrees():
    model = Dense(2)
    assert jax.tree.leaves(model) == [model]
    graphdef, state = nnx.split(model, graph=True)
    assert nnx.merge(graphdef, state).features == 2


def test_a_functional_needs_init_first():
    with pytest.raises(ValueError, match="call `init` first"):
        nnx.bridge.functional(nnx.Linear)(3, 4).apply({})


class Named(Module):
    name: str = "default"
    width: int = 2

    @compact
    def __call__(self):
        return self.name, self.param("w", nn.initializers.ones, (self.width,)).sum()


class Inherits(Named):
    depth: int = 1


class Takes(Module):
    def __init__(self, name):
        self.name = name

    def __call__(self):
        return self.name, 0


@pytest.mark.parametrize("cls", [Named, Inherits, Takes])
@pytest.mark.parametrize("how", ["compact", "setup"])
def test_a_field_called_name_is_set_and_names_the_module(cls, how):
    class Compact(Module):
        @compact
        def __call__(self):
            part = cls(name="part")
            return part()[0], self.part is part

    class Setup(Module):
        def setup(self):
            self.part = cls(name="part")

        def __call__(self):
            return self.part()[0], True

    net = {"compact": Compact, "setup": Setup}[how]()
    (name, is_placed), v = net.init_with_output(0)
    assert name == "part" and is_placed
    assert list(v.get("params", {"part": 0})) == ["part"]
    assert cls(name="outside").name == "outside"


def test_a_field_called_name_may_be_left_out_or_given_by_position():
    class Net(Module):
        @compact
        def __call__(self):
            return [Named()()[0], Named("own")()[0], Named(name=None)()[0]]

    names, v = Net().init_with_output(0)
    assert names == ["default", "own", "default"]
    assert list(v["params"]) == ["Named_0", "Named_1", "Named_2"]


def test_a_class_without_such_a_field_is_only_placed():
    class Keeps(Module):
        def __init__(self, **options):
            self.options = options

    class Net(Module):
        @compact
        def __call__(self):
            return Keeps(name="part").options, hasattr(self, "part")

    assert Net().apply({}) == ({}, True)


# ---------------------------------------------------------------------------- Variables

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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("box", BOXES, ids=lambda box: type(box).__name__)
def test_metadata_of_boxes_is_that_of_the_peer(peer, box):
    with peer.use_eager_sharding(False):
        theirs = comparing.plain(peer.bridge.variables.to_nnx_var("params", box))
    ours = comparing.plain(variables.to_nnx_var("params", box))
    assert not comparing.differences(ours, theirs)


def test_names_without_a_mesh_are_kept_and_not_placed():
    box = nn.Partitioned(ONES, ("a", "b"))
    assert variables.to_nnx_var("params", box).out_sharding == ("a", "b")


def test_names_on_a_mesh_are_placed():
    with jax.set_mesh(meshes.mesh_of(a=2)):
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


@tables.cases(
    "names, rules, spec",
    (None, None, jax.P()),
    (("a", None), None, jax.P("a", None)),
    (("a", "b"), (("a", "x"),), jax.P("x", "b")),
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


@tables.cases("second", {"a": ONES}, {"a": {"b": ONES}}, ids=["variable", "mapping"])
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
