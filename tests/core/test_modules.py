"""Corners of Modules: capture, sow, perturb, attributes of many, views, conversions.

The rules are in tests/contract/test_variables.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables, threads, zoo

quiet = pytest.mark.filterwarnings("ignore:Calling Module")
METHOD_OUTPUTS = pytest.mark.parametrize("method_outputs", [None, nnx.Intermediate])


class Layer(nnx.Module):
    """Sows, perturbs, and has a method beside its call."""

    def __init__(self, scale=2.0):
        self.scale = nnx.Param(jnp.array(scale))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "x", x)
        return self.perturb("y", self.scaled(x))

    def scaled(self, x):
        return self.scale[...] * x


def layers():
    return nnx.List([Layer(2.0), Layer(3.0)])


def recorded(call, *args, kind=nnx.Intermediate, **options):
    """What a call gives, and the values that it records by their path."""
    result, seen = nnx.capture(call, kind, **options)(*args)
    return result, values(seen)


def run(model, x):
    for layer in model:
        x = layer(x)
    return x


def has_traces(*nodes):
    """Whether a capture left a buffer or a class of its own."""
    classes = (Layer, nnx.List, nnx.Dict)
    modules = [x for _, x in nnx.iter_graph(nodes) if isinstance(x, nnx.Module)]
    return any("__captures__" in vars(x) or type(x) not in classes for x in modules)


def values(state):
    return {path: leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


# --------------------------------------------------------------------------- results


def test_types_of_the_same_name_are_kept_apart():
    one, two = (type("Seen", (nnx.Variable,), {}) for _ in range(2))

    def both(model):
        model.sow(one, "x", 1)
        model.sow(two, "x", 2)

    _, *states = nnx.capture(both, one, two)(zoo.Box())
    assert [*map(values, states)] == [{("x",): (1,)}, {("x",): (2,)}]


def test_name_of_a_recording_module_is_refused():
    def f(model):
        model.layers.sow(nnx.Intermediate, "x", 1)
        model.sow(nnx.Intermediate, "layers", 1)

    with pytest.raises(ValueError, match="'layers'.*'layers/x'"):
        nnx.capture(f, nnx.Intermediate)(zoo.Box(layers=layers()))


# ------------------------------------------------------------------ what is captured


@pytest.mark.parametrize("args", [(3,), (3, nnx.Intermediate), (len, int), (len, "y")])
def test_wrong_arguments_are_refused_at_once_and_a_missing_subject_later(args):
    with pytest.raises(TypeError, match="nnx.capture expects"):
        nnx.capture(*args)
    with pytest.raises(TypeError, match="first argument"):
        nnx.capture(lambda model: model, nnx.Intermediate)()


# ------------------------------------------------------------------------------- init


def test_init_is_returned_if_its_type_is_asked_for():
    init = {1: {"y": nnx.Perturbation(jnp.array(7.0))}, "y": 3.0, "z": {"y": 1}}
    found = recorded(run, layers(), 1.0, kind=nnx.Perturbation, init=init)
    assert found == (13, {(0, "y"): 0, (1, "y"): 7})


def test_init_at_a_path_without_module_warns():
    init = {"y": nnx.Perturbation(1.0), "other": {"y": nnx.Perturbation(1.0)}}
    with pytest.warns(UserWarning, match=r"\['other'\]"):
        assert nnx.capture(Layer(), init=init)(1.0) == 3.0


# ------------------------------------------------------------------------ transforms


def test_values_come_out_of_nested_transforms(mode):
    inner = nnx.remat(lambda model, x: model(x), **mode)
    outer = nnx.value_and_grad(lambda model, x: inner(model, x), **mode)
    (value, _), seen = recorded(outer, Layer(), 3.0)
    assert value == 6.0 and seen == {("x",): (3.0,)}


VMAPPED = nnx.StateAxes({nnx.Intermediate: 0, ...: None})
SCANNED = nnx.StateAxes({nnx.Intermediate: 0, ...: nnx.Carry})
CARRIED = nnx.scan(in_axes=(SCANNED, nnx.Carry), out_axes=nnx.Carry, length=3)


@tables.cases(
    "transform, x, y, stacked",
    (nnx.vmap(in_axes=(VMAPPED, 0)), [0.0, 1.0, 2.0], [0, 2, 4], [0, 1, 2]),
    (CARRIED, 1.0, 8, [1, 2, 4]),
    ids=["vmap", "scan"],
)
def test_values_come_out_of_maps_stacked(transform, x, y, stacked):
    result, seen = recorded(transform(lambda model, x: model(x)), Layer(), jnp.array(x))
    assert result.tolist() == y and seen["x",][0].tolist() == stacked


def test_values_come_out_of_scanned_layers_stacked(mode):
    axes = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}
    forward, stacked = nnx.scan(Layer.__call__, **axes, **mode), Layer([2.0, 3.0, 5.0])
    y, seen = recorded(forward, stacked, jnp.array(1.0))
    assert y == 30 and seen["x",][0].tolist() == [1, 2, 6]
    assert not has_traces(stacked)


# -------------------------------------------------------------------- nothing is left


@METHOD_OUTPUTS
def test_nothing_is_left_on_models_or_copies_or_after_an_exception(method_outputs):
    def copy(model):
        model.append(nnx.clone(model[0]))
        return model[0], nnx.clone(model)

    def fail(model):
        run(model, 1.0)
        raise KeyError("inside")

    options = {"method_outputs": method_outputs}
    model = layers()
    structure = nnx.graphdef(model)
    nnx.capture(run, nnx.Intermediate, **options)(model, 1.0)
    assert nnx.graphdef(model) == structure and not has_traces(model)
    with pytest.raises(KeyError, match="inside"):
        nnx.capture(fail, nnx.Intermediate, **options)(model)
    assert nnx.graphdef(model) == structure and not has_traces(model)
    (_, clone), _ = nnx.capture(copy, nnx.Intermediate, **options)(model)
    assert len(model) == len(clone) == 3 and not has_traces(model, clone)


# --------------------------------------------------------------------------- nesting


class Nested(nnx.Module):
    """Captures a part of itself between two values that it sows."""

    def __init__(self):
        self.part = Layer()

    def __call__(self, x, *types):
        self.sow(nnx.Intermediate, "before", x)
        y, *inner = nnx.capture(self.part, *types)(x)
        self.sow(nnx.Intermediate, "after", y)
        return y, inner


def test_inner_call_leaves_other_types_to_the_outer_one():
    (_, [inner]), outer = recorded(Nested(), 1.0, nnx.Perturbation)
    assert list(inner) == ["y"] and outer["part", "x"] == (1.0,)


def test_calls_nest_inside_jit_as_they_do_outside(mode):
    def forward(model, x):
        y, (inner,) = model(x, nnx.Intermediate)
        model.part(y)
        return inner

    expected = {("after",): (2.0,), ("before",): (1.0,), ("part", "x"): (2.0,)}
    for call in (forward, nnx.jit(forward, **mode)):
        inner, outer = recorded(call, Nested(), 1.0)
        assert values(inner) == {("x",): (1.0,)} and outer == expected


# --------------------------------------------------------------------------- threads


def test_threads_that_capture_one_module_do_not_mix():
    model = Layer()

    def record(x):
        for _ in range(20):
            _, seen = recorded(model, x, kind=nnx.Cache, method_outputs=nnx.Cache)
            assert seen["scaled",] == (2 * x,)

    threads.run_in_threads(*(functools.partial(record, float(i)) for i in range(4)))
    assert not has_traces(model)


def test_thread_that_only_calls_the_module_does_not_see_the_buffers():
    def call(model):
        assert model.sow(nnx.Intermediate, "x", 1, capture_noop=True) is False

    def forward(model):
        threads.run_in_threads(functools.partial(call, model))

    assert recorded(forward, Layer()) == (None, {})


# --------------------------------------------------------------------- method outputs


def outputs_of(fn, *args):
    return recorded(fn, *args, method_outputs=nnx.Intermediate)[1]


def test_inherited_and_overridden_methods_are_recorded_once():
    class Override(Layer):
        def scaled(self, x):
            return super().scaled(x) + 1

    expected = {("__call__",): (3.0,), ("scaled",): (3.0,), ("x",): (1.0,)}
    assert outputs_of(Override(), 1.0) == expected


def test_containers_do_not_record_their_machinery():
    model = nnx.Dict(layers=layers())
    paths = outputs_of(lambda model: run(model["layers"], 1.0), model)
    assert {path[:2] for path in paths} == {("layers", 0), ("layers", 1)}


def test_method_outputs_go_through_transforms(mode):
    class Jitted(Layer):
        @nnx.jit(**mode)
        def __call__(self, x):
            return self.scaled(x)

    assert outputs_of(Jitted(), 1.0) == {("__call__",): (2.0,), ("scaled",): (2.0,)}


class Compiled(nnx.Module):
    """Has methods that JAX or we compile."""

    @jax.jit
    def __call__(self, x):
        return x + 1

    @jax.jit
    def by_jax(self, x):
        return x + 2

    @nnx.jit
    def ours(self, x):
        return x + 3

    def encode(self, x):
        return Compiled.__call__(self, x) + self.by_jax(x) + self.ours(x)


def test_compiled_methods_and_calls_through_the_class_are_recorded():
    names = {"__call__": 2.0, "by_jax": 3.0, "ours": 4.0, "encode": 9.0}
    expected = {(name,): (x,) for name, x in names.items()}
    assert outputs_of(lambda model: model.encode(1.0), Compiled()) == expected


@pytest.mark.parametrize("name", ["__call__", "by_jax", "ours", "encode"])
def test_a_captured_method_is_not_recorded_itself(name):
    model = Compiled()
    method = getattr(model, name)
    by_class = functools.partial(getattr(Compiled, name), model)
    for entry in (method, functools.partial(method), by_class):
        assert (name,) not in outputs_of(entry, 1.0)
    # In the call it is recorded as any other.
    assert outputs_of(lambda model: getattr(model, name)(1.0), model)[name,]


def test_methods_of_bases_are_not_recorded_under_a_name_that_is_overridden():
    class Override(Layer):
        def __call__(self, x):
            return x

        def encode(self, x):
            return super().__call__(x)

    seen = outputs_of(lambda model: model.encode(1.0), Override())
    assert seen == {("encode",): (2.0,), ("scaled",): (2.0,), ("x",): (1.0,)}


def test_functions_are_compiled_once_with_outputs_and_once_without(mode):
    traces = []

    @nnx.jit(**mode)
    def forward(model, x):
        traces.append(x)
        return model.scaled(x)

    model, x = Layer(), jnp.array(1.0)
    for _ in range(3):
        assert recorded(forward, model, x)[1] == {}
        assert outputs_of(forward, model, x) == {("scaled",): (2.0,)}
        assert forward(model, x) == 2.0
    assert len(traces) == 3


def test_classes_and_their_other_instances_do_not_record():
    other, before = Layer(), dict(vars(Layer))

    def f(model):
        assert type(model) is type(other) is Layer
        assert "__captures__" not in vars(other)
        return other.scaled(1.0)

    assert not outputs_of(f, Layer()) and dict(vars(Layer)) == before


def test_subclass_hooks_of_the_user_are_not_run():
    class Registered(nnx.Module):
        def __init_subclass__(cls, *, key, **options):
            super().__init_subclass__(**options)
            cls.key = key

    class Entry(Registered, key=1):
        def __call__(self):
            return self.key

    assert outputs_of(Entry()) == {("__call__",): (1,)}


def test_nested_calls_may_record_outputs_as_different_types():
    def inner(model):
        return recorded(model, 1.0, kind=nnx.Cache, method_outputs=nnx.Cache)

    model = Layer()
    (_, cached), seen = recorded(inner, model, method_outputs=nnx.Intermediate)
    assert cached["scaled",] == seen["scaled",] == (2.0,)
    assert not has_traces(model)


# -------------------------------------------------------------------- sow and perturb


def test_sow_reduces_with_the_functions_given_and_needs_no_leave():
    def sow(model):
        for x in (3, 1):
            model.sow(nnx.Intermediate, "y", x, reduce_fn=max, init_fn=lambda: 2)
        model.sow(nnx.Intermediate, "z", 1, capture_noop=True)

    assert recorded(sow, zoo.Box())[1] == {("y",): 3, ("z",): (1,)}


@quiet
def test_sow_outside_stores_plain_variables_also_with_refs_as_default():
    model = zoo.Box()
    with nnx.var_defaults(ref=True):
        model.sow(nnx.Intermediate, "y", np.ones(2))
    assert model.y.get_value()[0].tolist() == [1, 1]


@tables.cases(
    "value",
    jnp.ones((2, 3), jnp.bfloat16),
    {"a": jnp.ones(2), "b": (1.0,)},
    nnx.Param(jnp.ones(2)),
    ids=["array", "tree", "Variable"],
)
def test_perturb_records_zeros_like_the_value_and_adds_them(value):
    def perturb(model):
        return model.perturb("p", value)

    result, zeros = recorded(perturb, zoo.Box(), kind=nnx.Perturbation)
    plain = value[...] if isinstance(value, nnx.Variable) else value
    assert jax.tree.structure(result) == jax.tree.structure(plain)
    for x, y, zero in zip(*map(jax.tree.leaves, (plain, result, zeros)), strict=True):
        assert zero.dtype == y.dtype == jnp.result_type(x)
        assert (zero == 0).all() and (y == x).all() and zero.shape == jnp.shape(x)


def test_perturb_without_a_buffer_of_its_type_returns_the_value():
    value = object()
    assert recorded(lambda model: model.perturb("p", value), zoo.Box()) == (value, {})


def test_perturb_of_another_type_goes_to_its_buffer():
    def perturb(model):
        return model.perturb("p", 1.0, variable_type="params")

    _, *states = nnx.capture(perturb, nnx.Perturbation, nnx.Param)(zoo.Box())
    assert [*map(values, states)] == [{}, {("p",): 0}]


def test_default_reduction_is_public():
    assert nnx.module.tuple_reduce(nnx.module.tuple_init(), 1) == (1,)


# -------------------------------------------- attributes of many, views, conversions


class Leaf(nnx.Module):
    def __init__(self):
        self.rate, self.deterministic = 0.5, False

    def set_view(self, deterministic=None):
        self.deterministic = deterministic


class Settings(nnx.Pytree):
    def set_view(self, **options):
        self.seen = tuple(sorted(options))


def model():
    return zoo.Box(leaf=Leaf(), norm=zoo.Box(size=1), plain=nnx.data([Leaf()]))


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


def test_view_info_lists_each_class_once_by_name():
    lines = nnx.view_info([Settings(), Leaf(), Leaf(), nnx.Rngs(0), 1]).splitlines()
    assert [x for x in lines if not x.startswith(" ")] == ["Leaf:", "Settings:"]
    assert nnx.view_info([Settings(), Leaf()], only=Settings).startswith("Settings:")
    assert nnx.view_info([nnx.Rngs(0), 1]) == ""


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
