"""capture: what it returns, and that it leaves nothing behind."""

import functools

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests.threads import run_in_threads


class Block(nnx.Module):
    def __init__(self, scale=2.0):
        self.scale = nnx.Param(jnp.array(scale))

    def __call__(self, x):
        self.sow(nnx.Intermediate, "x", x)
        return self.perturb("y", self.scaled(x))

    def scaled(self, x):
        return self.scale[...] * x


class Model(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([Block(2.0), Block(3.0)])
        self.heads = nnx.Dict(a=Block(5.0))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return {name: head(x) for name, head in self.heads.items()}


def modules_with_buffers(node):
    return [
        path
        for path, module in nnx.iter_graph(node, graph=True)
        if isinstance(module, nnx.Module)
        and ("__captures__" in vars(module) or type(module) not in CLASSES)
    ]


CLASSES = (Block, Model, nnx.List, nnx.Dict)


# --------------------------------------------------------------------------- results


def test_result_comes_alone_without_types():
    assert nnx.capture(Block())(1.0) == 2.0


def test_states_come_in_the_order_of_the_types():
    result, first, second = nnx.capture(Block(), nnx.Perturbation, nnx.Intermediate)(
        1.0
    )
    assert result == 2.0
    assert list(first) == ["y"] and list(second) == ["x"]
    assert type(first) is nnx.State


def test_states_are_nested_by_module_path():
    _, seen = nnx.capture(Model(), nnx.Intermediate)(1.0)
    flat = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(seen)}
    assert flat == {
        ("heads", "a", "x"): (6.0,),
        ("layers", 0, "x"): (1.0,),
        ("layers", 1, "x"): (2.0,),
    }


def test_state_is_empty_if_nothing_was_recorded():
    _, seen = nnx.capture(Block(), nnx.BatchStat)(1.0)
    assert type(seen) is nnx.State and not seen


def test_shared_module_records_all_its_calls_at_its_first_path():
    block = Block()

    def twice(blocks):
        return blocks["b"](blocks["a"](1.0))

    _, seen = nnx.capture(twice, nnx.Intermediate)({"a": block, "b": block})
    assert list(seen) == ["a"]
    assert seen["a"]["x"].get_value() == (1.0, 2.0)


def test_base_type_does_not_take_in_its_subtypes():
    _, base, sub = nnx.capture(Block(), nnx.Intermediate, nnx.Perturbation)(1.0)
    assert list(base) == ["x"] and list(sub) == ["y"]


def test_types_of_the_same_name_are_kept_apart():
    one, two = (type("Seen", (nnx.Variable,), {}) for _ in range(2))

    class Both(nnx.Module):
        def __call__(self):
            self.sow(one, "x", 1)
            self.sow(two, "x", 2)

    _, first, second = nnx.capture(Both(), one, two)()
    assert first["x"].get_value() == (1,) and second["x"].get_value() == (2,)


def test_values_sown_on_containers_are_recorded():
    def f(model):
        model.layers.sow(nnx.Intermediate, "list", 1)
        model.heads.sow(nnx.Intermediate, "dict", 2)

    _, seen = nnx.capture(f, nnx.Intermediate)(Model())
    assert seen["layers"]["list"].get_value() == (1,)
    assert seen["heads"]["dict"].get_value() == (2,)


def test_name_of_a_recording_module_is_refused():
    def f(model):
        model.layers.sow(nnx.Intermediate, "x", 1)
        model.sow(nnx.Intermediate, "layers", 1)

    with pytest.raises(ValueError, match="'layers'.*'layers/x'"):
        nnx.capture(f, nnx.Intermediate)(Model())


# ------------------------------------------------------------------ what is captured


def test_functions_methods_partials_and_modules_can_be_captured():
    block = Block()
    calls = [
        nnx.capture(block, nnx.Intermediate),
        nnx.capture(block.__call__, nnx.Intermediate),
        nnx.capture(functools.partial(Block.__call__, block), nnx.Intermediate),
        functools.partial(nnx.capture(Block.__call__, nnx.Intermediate), block),
    ]
    for call in calls:
        _, seen = call(1.0)
        assert seen["x"].get_value() == (1.0,)


def test_subject_may_be_passed_by_keyword():
    def f(model, x):
        return model(x)

    _, seen = nnx.capture(f, nnx.Intermediate)(x=1.0, model=Block())
    assert seen["x"].get_value() == (1.0,)


def test_missing_subject_is_a_type_error():
    with pytest.raises(TypeError, match="first argument"):
        nnx.capture(lambda model: model, nnx.Intermediate)()


def test_type_in_the_place_of_a_function_makes_a_decorator():
    @nnx.capture(nnx.Intermediate, nnx.Perturbation)
    def forward(model, x):
        return model(x)

    result, seen, zeros = forward(Block(), 1.0)
    assert (result, list(seen), list(zeros)) == (2.0, ["x"], ["y"])


def test_wrapper_keeps_name_and_docstring():
    def forward(model):
        """Says what it does."""

    wrapped = nnx.capture(forward, nnx.Intermediate)
    assert (wrapped.__name__, wrapped.__doc__) == ("forward", "Says what it does.")
    assert "scale" not in vars(nnx.capture(Block(), nnx.Intermediate))


@pytest.mark.parametrize("args", [(3,), (3, nnx.Intermediate), (len, int), (len, "y")])
def test_wrong_arguments_are_refused_at_once(args):
    with pytest.raises(TypeError, match="nnx.capture expects"):
        nnx.capture(*args)


# ---------------------------------------------------------------------- perturbations


def test_gradients_of_perturbations_are_those_of_the_values():
    model, x = Block(3.0), jnp.array(2.0)
    _, zeros = nnx.capture(model, nnx.Perturbation)(x)

    def loss(model, zeros):
        y, seen = nnx.capture(model, nnx.Intermediate, init=zeros)(x)
        return y**2, seen

    for grad in (nnx.grad, jax.grad):
        (_, grads), seen = grad(loss, argnums=(0, 1), has_aux=True)(model, zeros)
        assert grads["y"][...] == 12
        assert nnx.merge_state(grads, seen)["x"][0] == 2


def test_init_is_returned_if_its_type_is_asked_for():
    init = {"layers": {1: {"y": nnx.Perturbation(jnp.array(7.0))}}}
    _, perturbations = nnx.capture(Model(), nnx.Perturbation, init=init)(1.0)
    assert perturbations["layers"][1]["y"][...] == 7
    assert perturbations["layers"][0]["y"][...] == 0


def test_init_ignores_what_is_no_variable():
    assert nnx.capture(Block(), init={"y": 3.0, "z": {"y": 1}})(1.0) == 2.0


def test_init_at_a_path_without_module_warns():
    init = {"y": nnx.Perturbation(1.0), "other": {"y": nnx.Perturbation(1.0)}}
    with pytest.warns(UserWarning, match=r"\['other'\]"):
        assert nnx.capture(Block(), init=init)(1.0) == 3.0


# ------------------------------------------------------------------------ transforms


def test_values_come_out_of_jit(mode):
    @nnx.jit(**mode)
    def forward(model, x):
        return model(x)

    _, seen = nnx.capture(forward, nnx.Intermediate)(Model(), 1.0)
    assert [seen["layers"][i]["x"].get_value() for i in (0, 1)] == [(1.0,), (2.0,)]


def test_capture_works_inside_jit(mode):
    @nnx.jit(**mode)
    def forward(model, x):
        return nnx.capture(model, nnx.Intermediate)(x)

    model = Model()
    _, seen = forward(model, 1.0)
    assert seen["layers"][1]["x"].get_value() == (2.0,)
    assert not modules_with_buffers(model)


def test_values_come_out_of_nested_transforms(mode):
    @nnx.jit(**mode)
    def loss(model, x):
        return model(x)

    def value_and_grads(model, x):
        return nnx.value_and_grad(loss, **mode)(model, x)

    (value, _), seen = nnx.capture(value_and_grads, nnx.Intermediate)(Block(), 1.0)
    assert value == 2.0 and seen["x"].get_value() == (1.0,)


def test_values_come_out_of_vmap_with_an_axis():
    axes = nnx.StateAxes({nnx.Intermediate: 0, ...: None})

    @nnx.vmap(in_axes=(axes, 0))
    def forward(model, x):
        return model(x)

    _, seen = nnx.capture(forward, nnx.Intermediate)(Block(), jnp.arange(3.0))
    (recorded,) = seen["x"].get_value()
    assert recorded.tolist() == [0, 1, 2]


def test_values_come_out_of_scan_stacked():
    axes = nnx.StateAxes({nnx.Intermediate: 0, ...: nnx.Carry})

    @nnx.scan(in_axes=(axes, nnx.Carry), out_axes=nnx.Carry, length=3)
    def forward(model, x):
        return model(x)

    y, seen = nnx.capture(forward, nnx.Intermediate)(Block(), jnp.array(1.0))
    (recorded,) = seen["x"].get_value()
    assert y == 8 and recorded.tolist() == [1, 2, 4]


def test_values_come_out_of_scanned_layers_stacked(mode):
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, **mode)
    def forward(model, x):
        return model(x)

    layers = Block(jnp.array([2.0, 3.0, 5.0]))
    y, seen = nnx.capture(forward, nnx.Intermediate)(layers, jnp.array(1.0))
    (recorded,) = seen["x"].get_value()
    assert y == 30 and recorded.tolist() == [1, 2, 6]
    assert not modules_with_buffers(layers)


def test_values_come_out_of_remat(mode):
    forward = nnx.remat(lambda model, x: model(x), **mode)
    gradient = nnx.grad(lambda model, x: forward(model, x), **mode)
    _, seen = nnx.capture(gradient, nnx.Intermediate)(Block(), 3.0)
    assert seen["x"].get_value() == (3.0,)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_value_of_a_closure_raises_instead_of_leaking(transform):
    model = Block()

    def forward(model, x):
        return transform(lambda a: model(a).sum())(x)

    x = jnp.array(1.0) if transform is jax.grad else jnp.ones(2)
    with pytest.raises(nnx.errors.TraceContextError):
        nnx.capture(forward, nnx.Intermediate)(model, x)
    assert not modules_with_buffers(model)


def test_capture_of_an_outer_trace_raises():
    model = Block()
    with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate 'Block'"):
        jax.jit(nnx.capture(model, nnx.Intermediate))(1.0)
    assert not modules_with_buffers(model)


def test_plain_jit_loses_the_values_only():
    def forward(model, x):
        return jax.jit(lambda m, x: m(x))(model, x)

    result, seen = nnx.capture(forward, nnx.Intermediate)(Block(), 1.0)
    assert result == 2.0 and not seen


# -------------------------------------------------------------------- nothing is left


@pytest.mark.parametrize("method_outputs", [None, nnx.Intermediate])
def test_no_buffers_are_left(method_outputs):
    model = Model()
    structure = nnx.graphdef(model)
    nnx.capture(model, nnx.Intermediate, method_outputs=method_outputs)(1.0)
    assert nnx.graphdef(model) == structure
    assert not modules_with_buffers(model)


@pytest.mark.parametrize("method_outputs", [None, nnx.Intermediate])
def test_no_buffers_are_left_after_an_exception(method_outputs):
    def fail(model, x):
        model(x)
        raise KeyError("inside")

    model = Model()
    with pytest.raises(KeyError, match="inside"):
        nnx.capture(fail, nnx.Intermediate, method_outputs=method_outputs)(model, 1.0)
    assert not modules_with_buffers(model)


@pytest.mark.parametrize("method_outputs", [None, nnx.Intermediate])
def test_no_buffers_are_left_on_copies(method_outputs):
    def copy(model):
        model.heads["b"] = nnx.clone(model.heads["a"])
        return model.heads["a"], nnx.clone(model)

    model = Model()
    call = nnx.capture(copy, nnx.Intermediate, method_outputs=method_outputs)
    (_, clone), _ = call(model)
    assert not modules_with_buffers([model, clone])


def test_iteration_over_a_dict_does_not_see_the_buffers():
    def listed(heads):
        return list(heads), len(heads), "__captures__" in heads

    result, _ = nnx.capture(listed, nnx.Intermediate)(Model().heads)
    assert result == (["a"], 1, False)


def test_structural_changes_in_the_call_are_kept():
    def extend(model):
        model.layers.append(Block(7.0))
        model.name = "changed"

    model = Model()
    nnx.capture(extend, nnx.Intermediate)(model)
    assert len(model.layers) == 3 and model.name == "changed"


# --------------------------------------------------------------------------- nesting


class Nested(nnx.Module):
    def __init__(self):
        self.block = Block()

    def __call__(self, x, *types):
        self.sow(nnx.Intermediate, "before", x)
        y, *inner = nnx.capture(self.block, *types)(x)
        self.sow(nnx.Intermediate, "after", y)
        return y, inner


def test_inner_call_does_not_disturb_the_outer_one():
    (y, [inner]), outer = nnx.capture(Nested(), nnx.Intermediate)(1.0, nnx.Intermediate)
    assert inner["x"].get_value() == (1.0,)
    assert outer["before"].get_value() == (1.0,) and outer["after"].get_value() == (
        2.0,
    )
    assert list(outer) == ["after", "before"]


def test_inner_call_leaves_other_types_to_the_outer_one():
    (_, [inner]), outer = nnx.capture(Nested(), nnx.Intermediate)(1.0, nnx.Perturbation)
    assert list(inner) == ["y"]
    assert outer["block"]["x"].get_value() == (1.0,)


def test_calls_nest_inside_jit_as_they_do_outside(mode):
    @nnx.jit(**mode)
    def forward(model, x):
        y, (inner,) = model(x, nnx.Intermediate)
        model.block(y)
        return inner

    inner, outer = nnx.capture(forward, nnx.Intermediate)(Nested(), 1.0)
    assert inner["x"].get_value() == (1.0,)
    assert outer["before"].get_value() == (1.0,) and outer["after"].get_value() == (
        2.0,
    )
    assert outer["block"]["x"].get_value() == (2.0,)


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
    block = Block()

    def record(x):
        for _ in range(20):
            call = nnx.capture(block, nnx.Cache, method_outputs=nnx.Cache)
            assert call(x)[1]["scaled"].get_value() == (2 * x,)

    run_in_threads(*(functools.partial(record, float(i)) for i in range(4)))
    assert not modules_with_buffers(block)


def test_thread_that_only_calls_the_module_does_not_see_the_buffers():
    block = Block()

    def forward(block):
        def call():
            assert block.sow(nnx.Intermediate, "x", 1, capture_noop=True) is False

        run_in_threads(call)

    _, seen = nnx.capture(forward, nnx.Intermediate)(block)
    assert not seen
