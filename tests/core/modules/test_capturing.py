"""Corners of capture, sow and perturb; tests/contract/test_variables has the rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import zoo
from tests.threads import run_in_threads

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

    _, first, second = nnx.capture(both, one, two)(zoo.Box())
    assert values(first) == {("x",): (1,)} and values(second) == {("x",): (2,)}


def test_values_sown_on_a_dict_are_no_items_of_it():
    def f(heads):
        heads.sow(nnx.Intermediate, "sown", 2)
        return list(heads), len(heads), "__captures__" in heads

    result, seen = nnx.capture(f, nnx.Intermediate)(nnx.Dict(a=Layer()))
    assert result == (["a"], 1, False) and values(seen) == {("sown",): (2,)}


def test_name_of_a_recording_module_is_refused():
    def f(model):
        model.layers.sow(nnx.Intermediate, "x", 1)
        model.sow(nnx.Intermediate, "layers", 1)

    with pytest.raises(ValueError, match="'layers'.*'layers/x'"):
        nnx.capture(f, nnx.Intermediate)(zoo.Box(layers=layers()))


# ------------------------------------------------------------------ what is captured


def test_partials_can_be_captured():
    by_partial = functools.partial(Layer.__call__, Layer())
    _, seen = nnx.capture(by_partial, nnx.Intermediate)(1.0)
    assert values(seen) == {("x",): (1.0,)}


def test_decorators_take_several_types_and_keep_the_docstring():
    @nnx.capture(nnx.Intermediate, nnx.Perturbation)
    def forward(model, x):
        """Says what it does."""
        return model(x)

    result, seen, zeros = forward(Layer(), 1.0)
    assert (result, list(seen), list(zeros)) == (2.0, ["x"], ["y"])
    assert forward.__doc__ == "Says what it does."
    assert "scale" not in vars(nnx.capture(Layer(), nnx.Intermediate))


def test_missing_subject_is_a_type_error():
    with pytest.raises(TypeError, match="first argument"):
        nnx.capture(lambda model: model, nnx.Intermediate)()


@pytest.mark.parametrize("args", [(3,), (3, nnx.Intermediate), (len, int), (len, "y")])
def test_wrong_arguments_are_refused_at_once(args):
    with pytest.raises(TypeError, match="nnx.capture expects"):
        nnx.capture(*args)


# ------------------------------------------------------------------------------- init


def test_gradients_of_perturbations_by_jax():
    model, x = Layer(3.0), jnp.array(2.0)
    _, zeros = nnx.capture(model, nnx.Perturbation)(x)

    def loss(model, zeros):
        y, seen = nnx.capture(model, nnx.Intermediate, init=zeros)(x)
        return y**2, seen

    (_, grads), seen = jax.grad(loss, argnums=(0, 1), has_aux=True)(model, zeros)
    assert grads["y"][...] == 12 and seen["x"].get_value() == (2,)


def test_init_is_returned_if_its_type_is_asked_for():
    init = {1: {"y": nnx.Perturbation(jnp.array(7.0))}, "y": 3.0, "z": {"y": 1}}
    result, found = nnx.capture(run, nnx.Perturbation, init=init)(layers(), 1.0)
    assert result == 13 and values(found) == {(0, "y"): 0, (1, "y"): 7}


def test_init_at_a_path_without_module_warns():
    init = {"y": nnx.Perturbation(1.0), "other": {"y": nnx.Perturbation(1.0)}}
    with pytest.warns(UserWarning, match=r"\['other'\]"):
        assert nnx.capture(Layer(), init=init)(1.0) == 3.0


# ------------------------------------------------------------------------ transforms


def test_values_come_out_of_nested_transforms(mode):
    loss = nnx.jit(lambda model, x: model(x), **mode)

    def value_and_grads(model, x):
        return nnx.value_and_grad(loss, **mode)(model, x)

    (value, _), seen = nnx.capture(value_and_grads, nnx.Intermediate)(Layer(), 1.0)
    assert value == 2.0 and seen["x"].get_value() == (1.0,)


def test_values_come_out_of_vmap_with_an_axis():
    axes = nnx.StateAxes({nnx.Intermediate: 0, ...: None})
    forward = nnx.vmap(lambda model, x: model(x), in_axes=(axes, 0))
    _, seen = nnx.capture(forward, nnx.Intermediate)(Layer(), jnp.arange(3.0))
    (recorded,) = seen["x"].get_value()
    assert recorded.tolist() == [0, 1, 2]


def test_values_come_out_of_scan_stacked():
    axes = nnx.StateAxes({nnx.Intermediate: 0, ...: nnx.Carry})

    @nnx.scan(in_axes=(axes, nnx.Carry), out_axes=nnx.Carry, length=3)
    def forward(model, x):
        return model(x)

    y, seen = nnx.capture(forward, nnx.Intermediate)(Layer(), jnp.array(1.0))
    (recorded,) = seen["x"].get_value()
    assert y == 8 and recorded.tolist() == [1, 2, 4]


def test_values_come_out_of_scanned_layers_stacked(mode):
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, **mode)
    def forward(model, x):
        return model(x)

    stacked = Layer(jnp.array([2.0, 3.0, 5.0]))
    y, seen = nnx.capture(forward, nnx.Intermediate)(stacked, jnp.array(1.0))
    (recorded,) = seen["x"].get_value()
    assert y == 30 and recorded.tolist() == [1, 2, 6]
    assert not has_traces(stacked)


def test_values_come_out_of_remat(mode):
    forward = nnx.remat(lambda model, x: model(x), **mode)
    gradient = nnx.grad(lambda model, x: forward(model, x), **mode)
    _, seen = nnx.capture(gradient, nnx.Intermediate)(Layer(), 3.0)
    assert seen["x"].get_value() == (3.0,)


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
    (_, [inner]), outer = nnx.capture(Nested(), nnx.Intermediate)(1.0, nnx.Perturbation)
    assert list(inner) == ["y"]
    assert outer["part"]["x"].get_value() == (1.0,)


def test_calls_nest_inside_jit_as_they_do_outside(mode):
    def forward(model, x):
        y, (inner,) = model(x, nnx.Intermediate)
        model.part(y)
        return inner

    for call in (forward, nnx.jit(forward, **mode)):
        inner, outer = nnx.capture(call, nnx.Intermediate)(Nested(), 1.0)
        assert values(inner) == {("x",): (1.0,)}
        expected = {"after": (2.0,), "before": (1.0,), "part": {"x": (2.0,)}}
        assert nnx.to_pure_dict(outer) == expected


def test_module_may_capture_itself_again():
    class Recursive(nnx.Module):
        def __call__(self, depth):
            self.sow(nnx.Intermediate, "depth", depth)
            if depth:
                _, inner = nnx.capture(self, nnx.Intermediate)(depth - 1)
                assert inner["depth"].get_value() == (depth - 1, 1 - depth)
            self.sow(nnx.Intermediate, "depth", -depth)

    _, seen = nnx.capture(Recursive(), nnx.Intermediate)(2)
    assert seen["depth"].get_value() == (2, -2)


# --------------------------------------------------------------------------- threads


def test_threads_that_capture_one_module_do_not_mix():
    model = Layer()

    def record(x):
        for _ in range(20):
            call = nnx.capture(model, nnx.Cache, method_outputs=nnx.Cache)
            assert call(x)[1]["scaled"].get_value() == (2 * x,)

    run_in_threads(*(functools.partial(record, float(i)) for i in range(4)))
    assert not has_traces(model)


def test_thread_that_only_calls_the_module_does_not_see_the_buffers():
    def forward(model):
        def call():
            assert model.sow(nnx.Intermediate, "x", 1, capture_noop=True) is False

        run_in_threads(call)

    _, seen = nnx.capture(forward, nnx.Intermediate)(Layer())
    assert not seen


# --------------------------------------------------------------------- method outputs


def outputs_of(fn, *args):
    call = nnx.capture(fn, nnx.Intermediate, method_outputs=nnx.Intermediate)
    return values(call(*args)[1])


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
    call = nnx.capture(Layer(), nnx.Intermediate, method_outputs=nnx.BatchStat)
    result, seen = call(1.0)
    assert result == 2.0 and list(seen) == ["x"]


def test_method_outputs_go_through_transforms(mode):
    class Jitted(Layer):
        @nnx.jit(**mode)
        def __call__(self, x):
            return self.scaled(x)

    expected = {("__call__",): (2.0,), ("scaled",): (2.0,)}
    assert outputs_of(Jitted(), 1.0) == expected


def test_classes_and_their_other_instances_do_not_record():
    other, before = Layer(), dict(vars(Layer))

    def f(model):
        assert type(model).__name__ == "Layer" and isinstance(model, Layer)
        assert type(other) is Layer and "__captures__" not in vars(other)
        return other.scaled(1.0)

    assert not outputs_of(f, Layer())
    assert dict(vars(Layer)) == before


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
        return nnx.capture(model, nnx.Cache, method_outputs=nnx.Cache)(1.0)

    outer = nnx.capture(inner, nnx.Intermediate, method_outputs=nnx.Intermediate)
    model = Layer()
    (_, cached), seen = outer(model)
    assert cached["scaled"].get_value() == seen["scaled"].get_value() == (2.0,)
    assert not has_traces(model)


# -------------------------------------------------------------------- sow and perturb


def captured(call, *types, **attributes):
    """What `call` gives on a model, the values that it records, and the model."""
    model = zoo.Box(**attributes)
    result, *seen = nnx.capture(call, *types)(model)
    return result, *map(values, seen), model


def test_sow_reduces_with_the_functions_given():
    def largest(model):
        for x in (3, 1):
            model.sow(nnx.Intermediate, "y", x, reduce_fn=max, init_fn=lambda: 2)

    assert captured(largest, nnx.Intermediate)[1] == {("y",): 3}


def test_capture_noop_does_not_matter_in_a_capture():
    def sow(model):
        model.sow(nnx.Intermediate, "y", 1, capture_noop=True)

    assert captured(sow, nnx.Intermediate)[1] == {("y",): (1,)}


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
        model.sow(nnx.Intermediate, "y", jnp.ones(2))
    np.testing.assert_array_equal(model.y.get_value()[0], [1, 1])


@pytest.mark.parametrize(
    "value",
    [
        jnp.ones((2, 3), jnp.bfloat16),
        {"a": jnp.ones(2), "b": (1.0,)},
        nnx.Param(jnp.ones(2)),
    ],
    ids=["array", "tree", "Variable"],
)
def test_perturb_records_zeros_like_the_value_and_adds_them(value):
    def perturb(model):
        return model.perturb("p", value)

    result, zeros, _ = captured(perturb, nnx.Perturbation)
    plain = value[...] if isinstance(value, nnx.Variable) else value
    assert jax.tree.structure(result) == jax.tree.structure(plain)
    for x, y, zero in zip(*map(jax.tree.leaves, (plain, result, zeros)), strict=True):
        assert zero.dtype == y.dtype == jnp.result_type(x)
        assert (zero == 0).all() and (y == x).all() and zero.shape == jnp.shape(x)


def test_perturb_without_a_buffer_of_its_type_returns_the_value():
    value = object()
    result, *_ = captured(lambda model: model.perturb("p", value), nnx.Intermediate)
    assert result is value


def test_perturb_of_another_type_goes_to_its_buffer():
    def perturb(model):
        return model.perturb("p", 1.0, variable_type="params")

    kinds = nnx.Perturbation, nnx.Param
    _, perturbations, params, _ = captured(perturb, *kinds)
    assert perturbations == {} and params == {("p",): 0}


@pytest.mark.parametrize("value", [3, nnx.Intermediate(1)])
def test_perturb_outside_refuses_attributes_of_other_types(value):
    with pytest.raises(ValueError, match="'p' to be of type 'Perturbation', got"):
        zoo.Box(p=value).perturb("p", 1.0)


def test_default_reduction_is_public():
    assert nnx.module.tuple_reduce(nnx.module.tuple_init(), 1) == (1,)


# --------------------------------------------------------------------------- the peer


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_capture_equals_that_of_a_peer():
    peer = pytest.importorskip("flax.nnx")

    def outcome(nnx):
        class Layer(nnx.Module):
            def __init__(self, scale):
                self.scale = nnx.Param(jnp.array(scale))

            def __call__(self, x):
                self.sow(nnx.Intermediate, "x", x)
                return self.perturb("y", self.scaled(x))

            def scaled(self, x):
                return self.scale[...] * x

        # In the other order the peer takes perturbations for intermediates.
        kinds = nnx.Perturbation, nnx.Intermediate
        call = nnx.capture(run, *kinds, method_outputs=nnx.Intermediate)
        states = call(nnx.List([Layer(2.0), Layer(3.0)]), jnp.arange(2.0))[1:]
        return [
            (path, type(leaf).__name__, jax.tree.map(np.asarray, leaf.get_value()))
            for state in states
            for path, leaf in sorted(nnx.to_flat_state(state), key=str)
        ]

    assert str(outcome(nnx)) == str(outcome(peer))
