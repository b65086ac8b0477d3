"""Corners of capture, sow and perturb; tests/contract/test_variables has the rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import tables, threads, zoo

quiet = pytest.mark.filterwarnings("ignore:Calling Module")
METHOD_OUTPUTS = pytest.mark.parametrize("method_outputs", [None, nnx.Intermediate])


class Layer(nnx.Module):
    """Sows, perturbs, and has a method of each kind."""

    def __init__(self, scale=2.0):
        self.scale = nnx.Param(jnp.array(scale))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "x", x)
        return self.perturb("y", self.scaled(x))

    def scaled(self, x):
        return self.scale[...] * x

    def helper(self, x):
        return self.offset(x) + self._private(self.double)

    @staticmethod
    def offset(x):
        return x + 1

    @classmethod
    def make(cls):
        return cls()

    @property
    def double(self):
        return 2 * self.scale[...]

    def _private(self, x):
        return x


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


def test_values_sown_on_a_dict_are_no_items_of_it():
    def f(heads):
        heads.sow(nnx.Intermediate, "sown", 2)
        return list(heads), len(heads), "__captures__" in heads

    assert recorded(f, nnx.Dict(a=Layer())) == ((["a"], 1, False), {("sown",): (2,)})


def test_name_of_a_recording_module_is_refused():
    def f(model):
        model.layers.sow(nnx.Intermediate, "x", 1)
        model.sow(nnx.Intermediate, "layers", 1)

    with pytest.raises(ValueError, match="'layers'.*'layers/x'"):
        nnx.capture(f, nnx.Intermediate)(zoo.Box(layers=layers()))


# ------------------------------------------------------------------ what is captured


def test_partials_can_be_captured():
    by_partial = functools.partial(Layer.__call__, Layer())
    assert recorded(by_partial, 1.0) == (2.0, {("x",): (1.0,)})


def test_decorators_take_several_types_and_keep_the_docstring():
    @nnx.capture(nnx.Intermediate, nnx.Perturbation)
    def forward(model, x):
        """Says what it does."""
        return model(x)

    result, seen, zeros = forward(Layer(), 1.0)
    assert (result, list(seen), list(zeros)) == (2.0, ["x"], ["y"])
    assert forward.__doc__ == "Says what it does."
    assert "scale" not in vars(nnx.capture(Layer(), nnx.Intermediate))


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


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_values_come_out_of_nested_transforms(transform, mode):
    inner = transform(lambda model, x: model(x), **mode)
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


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_value_of_a_closure_raises_instead_of_leaking(transform):
    def forward(model, x):
        return transform(lambda a: model(a).sum())(x)

    model, x = Layer(), jnp.array(1.0) if transform is jax.grad else jnp.ones(2)
    with pytest.raises(nnx.errors.TraceContextError):
        nnx.capture(forward, nnx.Intermediate)(model, x)
    with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate 'Layer'"):
        transform(nnx.capture(model, nnx.Intermediate))(x)
    assert not has_traces(model)


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


def test_module_may_capture_itself_again():
    class Recursive(nnx.Module):
        def __call__(self, depth):
            self.sow(nnx.Intermediate, "depth", depth)
            if depth:
                _, inner = recorded(self, depth - 1)
                assert inner["depth",] == (depth - 1, 1 - depth)
            self.sow(nnx.Intermediate, "depth", -depth)

    assert recorded(Recursive(), 2)[1] == {("depth",): (2, -2)}


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


def test_static_private_and_class_methods_and_properties_still_work():
    model = Layer()
    assert outputs_of(model.helper, 1.0) == {}
    assert outputs_of(lambda model: model.make(), model) == {}


def test_containers_do_not_record_their_machinery():
    model = nnx.Dict(layers=layers())
    paths = outputs_of(lambda model: run(model["layers"], 1.0), model)
    assert {path[:2] for path in paths} == {("layers", 0), ("layers", 1)}


def test_method_outputs_need_not_be_returned():
    found = recorded(Layer(), 1.0, method_outputs=nnx.BatchStat)
    assert found == (2.0, {("x",): (1.0,)})


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


@pytest.mark.parametrize("kind", [nnx.Variable, nnx.Perturbation])
def test_sow_outside_refuses_a_variable_of_a_wider_or_narrower_type(kind):
    model = zoo.Box(y=nnx.Intermediate(()))
    with pytest.raises(ValueError, match=f"to be of type '{kind.__name__}', got"):
        model.sow(kind, "y", 1)
    assert model.y.get_value() == ()


@quiet
@pytest.mark.parametrize("attributes", [{}, {"y": nnx.Intermediate(())}])
def test_sow_into_an_outer_trace_raises(attributes):
    model = zoo.Box(**attributes)
    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(lambda x: model.sow(nnx.Intermediate, "y", x))(1)
    assert not attributes or model.y.get_value() == ()


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


@pytest.mark.parametrize("value", [3, nnx.Intermediate(1)])
def test_perturb_outside_refuses_attributes_of_other_types(value):
    with pytest.raises(ValueError, match="'p' to be of type 'Perturbation', got"):
        zoo.Box(p=value).perturb("p", 1.0)


def test_default_reduction_is_public():
    assert nnx.module.tuple_reduce(nnx.module.tuple_init(), 1) == (1,)
