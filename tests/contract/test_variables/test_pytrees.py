"""Dataclasses, ``pytree=False``, flattening, copies, `__new__` (contract, 12).

At the end Variables as pytrees, and the names of their types.
"""

import copy
import dataclasses
import inspect
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests.zoo import Node

KEY = jax.tree_util.GetAttrKey


class Leafy(Node, pytree=False):
    pass


class Plain(nnx.Object):
    __init__ = Node.__init__


# ----------------------------------------------------------------------- dataclasses


@nnx.dataclass
class Affine(nnx.Pytree):
    scale: jax.Array = nnx.data()
    bias: jax.Array
    name: str = nnx.static(default="affine")
    extra: object = None

    def __call__(self, x):
        return self.scale * x + self.bias


def test_dataclass_has_fields_init_and_the_repr_of_the_library():
    affine = Affine(jnp.array(2.0), jnp.array(1.0))
    assert affine(3.0) == 7.0 and affine.name == "affine" and affine.extra is None
    names = [field.name for field in dataclasses.fields(Affine)]
    assert names == ["scale", "bias", "name", "extra"]
    assert "dtype" in repr(affine) and repr(affine).startswith("Affine(")


def test_unmarked_fields_get_automatic_status():
    nodes = vars(Affine(jnp.array(2.0), jnp.array(1.0)))["_pytree__nodes"]
    assert dict(nodes) == {"scale": True, "bias": True, "name": False, "extra": False}


def test_signature_of_nnx_dataclass():
    parameters = inspect.signature(nnx.dataclass).parameters
    defaults = {name: p.default for name, p in list(parameters.items())[1:]}
    off = dict.fromkeys("order unsafe_hash kw_only slots weakref_slot".split(), False)
    assert defaults == {"init": True, "eq": True, "match_args": True, **off}
    with pytest.raises(TypeError):
        nnx.dataclass(frozen=True)


def test_plain_dataclass_works_with_a_repr_of_its_own():
    @dataclasses.dataclass
    class Own(nnx.Pytree):
        x: jax.Array
        n: int = 3

        def __post_init__(self):
            self.doubled = self.n * 2

    plain = Own(jnp.ones(2))
    assert plain.doubled == 6 and len(jax.tree.leaves(plain)) == 1
    assert ".Own(x=Array" in repr(plain)


def test_dataclass_modules_are_accepted_though_unhashable():
    affine = Affine(nnx.Param(jnp.array(2.0)), nnx.Param(jnp.array(1.0)))
    with pytest.raises(TypeError):
        hash(affine)
    model = nnx.Dict(a=affine, b=affine)
    cloned = nnx.clone(model)
    assert cloned.a is cloned.b
    nnx.jit(lambda m: m.a.scale.set_value(jnp.array(5.0)))(model)
    assert affine.scale[...] == 5.0


# ---------------------------------------------------------------------- pytree=False


@pytest.mark.parametrize("cls", [Leafy, Plain])
def test_instances_are_leaves_for_jax(cls):
    obj = cls(x=[jnp.ones(2)], y=nnx.data(1), z=nnx.static(jnp.ones(2)))
    assert jax.tree.leaves([obj]) == [obj] and obj.y == 1


@pytest.mark.parametrize("cls", [Leafy, Plain])
def test_graph_functions_take_them(cls):
    obj = cls(x=nnx.Param(jnp.array(1.0)))
    cloned = nnx.clone(obj)
    assert type(cloned) is cls and cloned.x[...] == 1.0 and cloned.x is not obj.x
    nnx.jit(lambda o: o.x.set_value(o.x[...] + 1))(obj)
    assert obj.x[...] == 2.0


def test_flag_is_inherited_unless_given():
    class Child(Leafy):
        pass

    class Again(Leafy, pytree=True):
        pass

    assert len(jax.tree.leaves([Child(x=1)])) == 1
    assert jax.tree.leaves([Again(x=1)]) == []


def test_object_can_not_become_a_pytree():
    class Child(Plain):
        pass

    assert len(jax.tree.leaves([Child()])) == 1
    with pytest.raises(ValueError, match="(?s)Wrong.*pytree=True"):

        class Wrong(nnx.Object, pytree=True):
            pass


# ------------------------------------------------------------------------ flattening


def test_children_are_the_data_attributes_sorted_by_name():
    box = Node(b=jnp.array(2.0), c="static", a=nnx.Param(1.0))
    flat, _ = jax.tree_util.tree_flatten_with_path(box)
    assert flat == [((KEY("a"), KEY("value")), 1.0), ((KEY("b"),), 2.0)]


def test_order_of_assignment_does_not_matter():
    a, b = Node(x=1, y=jnp.ones(2)), Node(y=jnp.ones(2), x=1)
    assert jax.tree.structure(a) == jax.tree.structure(b)


@pytest.mark.parametrize(
    "other", [Node(x=2, y=1), Node(x=nnx.data(1), y=1), Node(x=1), Node(x=1, y=1, z=1)]
)
def test_static_values_and_statuses_are_part_of_the_structure(other):
    assert jax.tree.structure(Node(x=1, y=1)) != jax.tree.structure(other)


def test_unhashable_static_values_are_compared_by_value():
    def f(box):
        traces.append(None)
        return box.y + box.x[0]

    for jit in (jax.jit, nnx.jit):
        traces = []
        jitted = jit(f)
        for x, y, count in ((1, 1.0, 1), (1, 3.0, 1), (2, 1.0, 2)):
            assert jitted(Node(x=[x], y=jnp.array(y))) == x + y
            assert len(traces) == count


def test_unflattening_runs_neither_init_nor_setattr():
    class Loud(nnx.Pytree):
        def __init__(self):
            calls.append("init")
            self.x = jnp.ones(2)

        def __setattr__(self, name, value):
            calls.append("setattr")
            super().__setattr__(name, value)

    calls = []
    copied = jax.tree.map(lambda x: x + 1, Loud())
    assert calls == ["init", "setattr"] and copied.x.tolist() == [2.0, 2.0]
    copied.y = 1


def test_attributes_are_sorted_after_flattening():
    box = jax.tree.map(lambda x: x, Node(b=1, a=jnp.ones(2)))
    assert [n for n in vars(box) if not n.startswith("_pytree")] == ["a", "b"]
    merged = nnx.merge(*nnx.split(nnx.Dict(b=1, a=jnp.ones(2))))
    assert list(merged) == ["a", "b"]


# ------------------------------------------------------------------- copies, pickling


def tangled(cls):
    shared = nnx.Param(jnp.ones(2), tag=["x"])
    obj = cls(a=shared, b=nnx.data([shared]), array=np.ones(2), static=[1])
    obj.me = obj
    return obj


def check_copied(obj, new):
    assert type(new) is type(obj) and new is not obj and new.me is new
    assert new.a is new.b[0] and new.a is not obj.a and new.a.tag == ["x"]
    new.a[...] = 5.0
    new.array[0] = 5.0
    assert obj.a[...].tolist() == [1.0, 1.0] and obj.array.tolist() == [1.0, 1.0]
    assert new.static == [1] and new.static is not obj.static
    new.extra = 1


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "cloudpickle": lambda x: cloudpickle.loads(cloudpickle.dumps(x)),
}


@pytest.mark.parametrize("cls", [Node, Plain, Leafy])
@pytest.mark.parametrize("way", WAYS)
def test_copies_keep_sharing_cycles_and_classes(cls, way):
    obj = tangled(cls)
    check_copied(obj, WAYS[way](obj))


@pytest.mark.parametrize("cls", [Node, Plain])
def test_shallow_copy_shares_everything(cls):
    obj = tangled(cls)
    new = copy.copy(obj)
    assert type(new) is cls and new.a is obj.a and new.b is obj.b
    new.extra = 1
    assert not hasattr(obj, "extra")


def test_deep_copy_shares_its_memo_with_enclosing_containers():
    box = Node(a=nnx.Param(jnp.ones(2)))
    first, second, variable = copy.deepcopy([box, {"k": box}, box.a])
    assert first is second["k"] and first.a is variable


# ---------------------------------------------------------------------- descriptors


class Described(nnx.Pytree):
    @property
    def scale(self):
        return self._scale

    @scale.setter
    def scale(self, value):
        self._scale = value

    @property
    def fixed(self):
        return 1


def test_property_stores_under_its_own_name_and_gets_marked_values_unwrapped():
    obj = Described()
    obj.scale = jnp.ones(2)
    assert vars(obj)["_pytree__nodes"]["_scale"] is True and "scale" not in vars(obj)
    marked = Described()
    marked.scale = nnx.data(3)
    assert marked.scale == 3
    with pytest.raises(AttributeError):
        obj.fixed = 2


# ---------------------------------------------- `__new__` of classes beside Module


class Recorded:
    def __new__(cls, *args, **kwargs):
        obj = super().__new__(cls)
        vars(obj)["given"] = args, kwargs
        return obj


class Single:
    one = None

    def __new__(cls, *args, **kwargs):
        if cls.one is None:
            cls.one = super().__new__(cls)
        return cls.one


class Strict:
    def __new__(cls, a):
        obj = super().__new__(cls)
        obj.doubled = 2 * a
        return obj


class Passing:
    def __new__(cls, *args, **kwargs):
        return super().__new__(cls, *args, **kwargs)


class Bare:
    pass


def init(self, a=0):
    self.a = a


PARTS = [Recorded, Single, Strict, Passing, Bare]
CALLS = [((), {}), ((1,), {}), ((), {"a": 1}), ((1, 2), {})]


def made(bases, body, args, kwargs):
    """What comes of making two objects of a class with these bases."""
    cls = type("Made", bases, body)
    try:
        one, two = (cls(*args, **kwargs) for _ in range(2))
    except TypeError as error:
        # Python's own words differ in the name that they begin with.
        return str(error).partition("(")[2] or str(error)
    items = {k: v for k, v in vars(one).items() if not k.startswith("_pytree")}
    return items, one is two


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("ready", [True, False], ids=["init", "no init"])
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
@pytest.mark.parametrize("comes_first", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("base", [nnx.Module, nnx.Object, nnx.Pytree])
def test_objects_are_made_as_without_module(base, comes_first, part, ready, call):
    body = {"__init__": init} if ready else {}
    expected = made((part,), dict(body), *call)
    part.one = None
    bases = (part, base) if comes_first else (base, part)
    assert made(bases, dict(body), *call) == expected


def test_what_new_sets_is_checked_and_told_apart():
    class Layer(nnx.Module, Recorded):
        def __init__(self, units):
            self.units = units

    layer = Layer(units=3)
    assert layer.given == ((), {"units": 3})
    graphdef, state = nnx.split(layer)
    assert nnx.merge(graphdef, state).given == layer.given
    with pytest.raises(ValueError, match="static attribute 'given'"):
        Layer(units=nnx.Param(1.0))


def test_bridge_modules_have_cooperative_new_too():
    pytest.importorskip("flax")

    class Layer(nnx.bridge.Module, Recorded):
        units: int

    assert Layer(units=3).given == ((), {"units": 3})


# ------------------------------------------------------------------------------ filling


def test_abstract_models_are_filled():
    abstract = jax.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    pure = nnx.to_pure_dict(nnx.state(model))
    graphdef, state = nnx.split(abstract)
    nnx.replace_by_pure_dict(state, pure)
    merged = nnx.merge(graphdef, state)
    assert merged.kernel[...] is model.kernel[...]
    nnx.update(abstract, pure)
    assert abstract.kernel[...] is model.kernel[...]


# ------------------------------------------------------------------------- the protocol


def tagged(value=1.0, **entries):
    return nnx.Param(jnp.array(value), **entries)


# -------------------------------------------------------------------------- pytree


def test_only_child_is_the_raw_value_under_value():
    flat, _ = jax.tree_util.tree_flatten_with_path(tagged())
    assert flat == [((jax.tree_util.GetAttrKey("value"),), 1.0)]
    node = nnx.Dict(kernel=tagged())
    path = jax.tree_util.tree_flatten_with_path(node)[0][0][0]
    assert jax.tree_util.keystr(path) == ".kernel.value"


def test_none_has_no_leaves_and_containers_have_theirs():
    assert jax.tree.leaves(nnx.Param(None)) == []
    assert jax.tree.leaves(nnx.Param({"b": 1, "a": 2})) == [2, 1]


def test_mapping_keeps_class_and_metadata():
    mapped = jax.tree.map(lambda x: x + 1, tagged(tag="x"))
    assert type(mapped) is nnx.Param and mapped[...] == 2.0 and mapped.tag == "x"


def test_order_of_metadata_does_not_matter():
    a, b = tagged(a=1, b=2), tagged(b=2, a=1)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert hash(jax.tree.structure(a)) == hash(jax.tree.structure(b))


@pytest.mark.parametrize("other", [tagged(a=2), tagged(), nnx.Cache(1.0, a=1)])
def test_other_metadata_or_class_is_another_structure(other):
    variable = tagged(a=1)
    assert jax.tree.structure(variable) != jax.tree.structure(other)
    with pytest.raises(ValueError):
        jax.tree.map(lambda x, y: x, variable, other)


def test_unflattening_runs_nothing():
    class Loud(nnx.Variable):
        def __init__(self, value):
            calls.append("init")
            super().__init__(value)

        def create_value(self, value):
            calls.append("create")
            return value

    calls = []
    jax.tree.map(lambda x: x, Loud(1))
    assert calls == ["init", "create"]


def test_jitted_function_takes_and_returns_variables():
    @jax.jit
    def f(variable):
        traces.append(None)
        variable[...] += 1
        return variable

    traces = []
    variable = tagged(tag="x")
    out = f(f(variable))
    assert out[...] == 3.0 and out.tag == "x" and variable[...] == 1.0
    assert len(traces) == 1
    f(tagged(tag="y"))
    assert len(traces) == 2


def test_gradient_is_a_variable():
    grads = jax.grad(lambda v: v[...] ** 2)(tagged(3.0, tag="x"))
    assert type(grads) is nnx.Param and grads[...] == 6.0 and grads.tag == "x"


@pytest.mark.parametrize("make", [np.array, jnp.array], ids=["numpy", "jax"])
def test_array_metadata_compares_by_content(make):
    a, b, c = (tagged(scale=make(x)) for x in ([1.0, 2.0], [1.0, 2.0], [1.0, 3.0]))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert jax.tree.structure(a) != jax.tree.structure(c)
    assert jax.tree.map(jnp.add, a, b)[...] == 2.0


# -------------------------------------------------------------------------- types


def test_filters_match_subclasses():
    for kind in (nnx.Param, nnx.BatchStat, nnx.Cache, nnx.Intermediate):
        assert kind.__bases__[0].__name__ == "Variable"
    assert issubclass(nnx.Perturbation, nnx.Intermediate)
    kinds = {"a": nnx.Perturbation, "b": nnx.Intermediate, "c": nnx.Param}
    node = nnx.Dict({name: kind(1.0) for name, kind in kinds.items()})
    assert list(nnx.state(node, nnx.Intermediate)) == ["a", "b"]


# ------------------------------------------------------------------------ registry

NAMES = {
    "params": nnx.Param,
    "batch_stats": nnx.BatchStat,
    "cache": nnx.Cache,
    "intermediates": nnx.Intermediate,
    "perturbations": nnx.Perturbation,
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_library(name):
    assert nnx.variable_type_from_name(name) is NAMES[name]
    assert nnx.variable_name_from_type(NAMES[name]) == name


def test_unknown_name_says_how_to_register_and_can_be_registered_on_the_way():
    with pytest.raises(ValueError, match="register"):
        nnx.variable_type_from_name("unheard_of")
    made = nnx.variable_type_from_name("made_up", base=nnx.Param, allow_register=True)
    assert made.__name__ == "made_up" and made.__bases__ == (nnx.Param,)
    assert nnx.variable_type_from_name("made_up") is made
    assert jax.tree.leaves(made(1)) == [1]


def test_name_is_that_of_exactly_this_type():
    class Own(nnx.Param):
        pass

    with pytest.raises(ValueError, match="Own"):
        nnx.variable_name_from_type(Own)
    assert nnx.variable_name_from_type(Own, allow_register=True) == "Own"
    assert nnx.variable_type_from_name("Own") is Own


def test_class_name_that_is_taken_names_both_types():
    first, second = (type("Twice", (nnx.Variable,), {"n": n}) for n in (1, 2))
    nnx.variable_name_from_type(first, allow_register=True)
    with pytest.raises(ValueError, match=r"Twice(.|\n)*Twice"):
        nnx.variable_name_from_type(second, allow_register=True)


def test_registering_returns_the_type():
    class Kind(nnx.Variable):
        pass

    assert nnx.register_variable_name("kind_one", Kind) is Kind
    assert nnx.register_variable_name("kind_two")(Kind) is Kind
    assert nnx.variable_type_from_name("kind_two") is Kind
    assert nnx.variable_name_from_type(Kind) == "kind_one"


def test_taken_name_needs_overwrite():
    class Other(nnx.Variable):
        pass

    with pytest.raises(ValueError, match=r"Param(.|\n)*overwrite=True"):
        nnx.register_variable_name("params", Other)
    nnx.register_variable_name("scratch", Other)
    nnx.register_variable_name("scratch", nnx.Cache, overwrite=True)
    assert nnx.variable_type_from_name("scratch") is nnx.Cache
