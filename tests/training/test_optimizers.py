"""Optimizer: state in Variables, one step in place; TrainState: steps give new ones."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import graftree as nnx
from tests import tables
from tests.comparisons import raises, unchanged


def affine(**metadata):
    """Two Params with known values."""
    return nnx.Dict(
        kernel=nnx.Param(jnp.array([[1.0, -2.0], [3.0, 0.5]]), **metadata),
        bias=nnx.Param(jnp.array([0.25, -0.75])),
    )


def started(tx, **attributes):
    """A model, that of `affine` unless told what it has, and its optimizer."""
    model = nnx.Dict(**attributes) if attributes else affine()
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def ones_like(model, wrt=nnx.Param):
    return jax.tree.map(jnp.ones_like, nnx.state(model, wrt))


def raw_leaves(*nodes):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nodes)]


# What an optimizer is made of.


def test_opt_state_is_the_base_of_all_optimizer_variables():
    assert issubclass(nnx.OptArray, nnx.OptState)
    assert issubclass(nnx.OptVariable, nnx.OptState)
    for kind in (nnx.OptState, nnx.OptArray, nnx.OptVariable):
        with pytest.raises(ValueError):
            nnx.variable_name_from_type(kind)


def test_state_is_boxed_in_variables_at_the_paths_of_optax():
    _, optimizer = started(optax.adam(1e-3))
    kinds = {path: type(leaf) for path, leaf in nnx.to_flat_state(nnx.state(optimizer))}
    adam = ("opt_state", 0)
    assert kinds == {
        ("step",): nnx.OptState,
        (*adam, "count"): nnx.OptArray,
        (*adam, "mu", "bias"): nnx.OptVariable,
        (*adam, "mu", "kernel"): nnx.OptVariable,
        (*adam, "nu", "bias"): nnx.OptVariable,
        (*adam, "nu", "kernel"): nnx.OptVariable,
    }
    assert isinstance(optimizer.opt_state[0].mu, nnx.State)
    assert optimizer.opt_state[0].mu.kernel is optimizer.opt_state[0].mu["kernel"]


def test_init_sees_variables_and_update_sees_arrays():
    seen = []

    def spy(params):
        seen.append(type(params["kernel"]))
        return jax.tree.map(lambda _: True, params, is_leaf=is_variable)

    model, optimizer = started(optax.masked(optax.sgd(1.0), spy))
    optimizer.update(model, ones_like(model))
    assert seen[0] is nnx.Param and issubclass(seen[-1], jax.Array)


def is_variable(x):
    return isinstance(x, nnx.Variable)


def test_wrt_is_required_by_keyword():
    for arguments in ((), (nnx.Param,)):
        with raises(TypeError, "Missing required argument `wrt`", "ModelAndOptimizer"):
            nnx.Optimizer(affine(), optax.sgd(0.1), *arguments)


def test_an_optimizer_has_no_model():
    _, optimizer = started(optax.sgd(0.1))
    assert not hasattr(optimizer, "model")
    with pytest.raises(AttributeError, match="does not have attribute 'model'"):
        optimizer.model
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        optimizer.nope


def test_skeletons_are_equal_for_the_same_transformation_only():
    tx = optax.sgd(0.1)

    def skeleton(tx, wrt=nnx.Param):
        return nnx.graphdef(nnx.Optimizer(affine(), tx, wrt=wrt))

    assert skeleton(tx) == skeleton(tx) and skeleton(tx) != skeleton(optax.sgd(0.1))
    assert skeleton(tx) != skeleton(tx, (nnx.Param,))


def test_shared_variables_appear_once_in_graph_mode_and_raise_in_tree_mode():
    weight = nnx.Param(jnp.ones(2))
    model = nnx.Dict(a=weight, b=weight)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param, graph=True)
    assert list(optimizer.opt_state[0].mu) == ["a"]
    with pytest.raises(ValueError, match="does not support shared references"):
        nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param, graph=False)


def test_state_shares_no_array_with_the_params():
    model = affine()
    tx = optax.GradientTransformation(lambda params: params, optax.identity().update)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for name in ("kernel", "bias"):
        value, param = optimizer.opt_state[name][...], model[name][...]
        assert value.unsafe_buffer_pointer() != param.unsafe_buffer_pointer()
        np.testing.assert_array_equal(value, param)


@tables.cases(
    "metadata, kept",
    ({"tag": "x"}, {"tag": "x"}),
    ({"optimizer_sharding": None, "out_sharding": ()}, {"out_sharding": None}),
    ids=["as they are", "but for the sharding of optimizers"],
)
def test_state_of_a_param_has_its_value_and_metadata(metadata, kept):
    tx = optax.GradientTransformation(lambda w: [w, 3], optax.identity().update)
    _, optimizer = started(tx, w=nnx.Param(jnp.ones(2), **metadata))
    mirror, number = optimizer.opt_state
    assert type(mirror["w"]) is nnx.OptVariable and type(number) is nnx.OptArray
    assert mirror["w"].get_metadata(exclude_required=True) == kept
    np.testing.assert_array_equal(mirror["w"][...], [1.0, 1.0])
    assert number.get_value() == 3


# One step.


def test_adam_steps_against_numpy():
    model, optimizer = started(
        optax.adam(0.1, b1=0.9, b2=0.99), w=nnx.Param(jnp.array([1.0, -2.0, 3.0]))
    )
    w, mu, nu = np.array([1.0, -2.0, 3.0]), 0.0, 0.0
    for t in range(1, 5):
        grad = 2 * w
        mu, nu = 0.9 * mu + 0.1 * grad, 0.99 * nu + 0.01 * grad**2
        w = w - 0.1 * (mu / (1 - 0.9**t)) / (np.sqrt(nu / (1 - 0.99**t)) + 1e-8)
        optimizer.update(model, jax.tree.map(lambda w: 2 * w, nnx.state(model)))
    np.testing.assert_allclose(model.w[...], w, rtol=1e-5)
    assert optimizer.opt_state[0].count[...] == 4


def test_all_variables_stay_the_same_objects():
    model, optimizer = started(optax.adam(0.1))
    params = nnx.state(model)
    before = [leaf for _, leaf in nnx.to_flat_state(nnx.state((model, optimizer)))]
    optimizer.update(model, ones_like(model))
    after = [leaf for _, leaf in nnx.to_flat_state(nnx.state((model, optimizer)))]
    assert all(old is new for old, new in zip(before, after, strict=True))
    assert params["kernel"] is model.kernel


def test_update_does_not_run_user_accessors():
    class Scaled(nnx.Param):
        def get_value(self, **kwargs):
            return super().get_value(**kwargs) * 100

        def set_value(self, value, **kwargs):
            raise AssertionError("called")

    model, optimizer = started(optax.sgd(0.5), w=Scaled(jnp.array(1.0)))
    optimizer.update(model, nnx.State({"w": nnx.Param(jnp.array(1.0))}))
    assert model.w.get_raw_value() == 0.5


def test_params_keep_their_dtype():
    model, optimizer = started(optax.sgd(0.5), w=nnx.Param(jnp.ones(2, jnp.bfloat16)))
    optimizer.update(model, nnx.State({"w": nnx.Param(jnp.ones(2, jnp.float32))}))
    assert model.w[...].dtype == jnp.bfloat16


def test_grads_may_be_a_module_and_may_hold_more():
    model = affine()
    model.other = nnx.BatchStat(jnp.ones(3))
    optimizer = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, model))
    np.testing.assert_array_equal(model.bias[...], [-0.75, -1.75])
    np.testing.assert_array_equal(model.other[...], jnp.ones(3))


def test_model_may_be_a_state_or_a_list():
    for model in (nnx.state(affine()), [nnx.Param(jnp.ones(2))]):
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        before = raw_leaves(model)
        optimizer.update(model, ones_like(model))
        for old, new in zip(before, raw_leaves(model), strict=True):
            np.testing.assert_allclose(new, old - 0.1, rtol=1e-5)


def test_bare_arrays_are_optimized_if_selected():
    model = nnx.Dict(w=jnp.ones(2), v=nnx.Param(jnp.ones(2)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5, momentum=0.9), wrt=...)
    assert type(optimizer.opt_state[0].trace["w"]) is nnx.OptArray
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))
    np.testing.assert_array_equal(model.w, [0.5, 0.5])
    np.testing.assert_array_equal(model.v[...], [0.5, 0.5])


def test_pytree_values_are_optimized():
    value = nnx.Param({"a": jnp.ones(2), "b": jnp.zeros(())})
    model, optimizer = started(optax.adam(0.1), w=value)
    optimizer.update(model, ones_like(model))
    np.testing.assert_allclose(model.w["a"], [0.9, 0.9], rtol=1e-5)


@pytest.mark.parametrize(
    "wrt",
    [lambda path, _: "kernel" in path, (nnx.OfType(nnx.Param),), "chosen"],
    ids=["callable", "tuple", "tag"],
)
def test_wrt_may_be_any_filter(wrt):
    model = nnx.Dict(kernel=nnx.Param(jnp.ones(2), tag="chosen"), rest=jnp.ones(2))
    nnx.Optimizer(model, optax.sgd(1.0), wrt=wrt).update(model, ones_like(model, ...))
    np.testing.assert_array_equal(model.kernel[...], [0.0, 0.0])
    np.testing.assert_array_equal(model.rest, [1.0, 1.0])


def test_keywords_reach_optax_as_arrays():
    def update(updates, state, params=None, **extra):
        assert isinstance(extra["value"], jax.Array)
        assert isinstance(extra["grad"]["kernel"], jax.Array)
        assert extra["value_fn"] is len
        return updates, state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    model, optimizer = started(tx)
    grads = ones_like(model)
    given = {"value": nnx.Variable(jnp.array(1.0)), "grad": grads, "value_fn": len}
    optimizer.update(model, grads, **given)


def test_line_search_merges_the_pure_params():
    model = nnx.Dict(w=nnx.Param(jnp.array([3.0, -1.0])))
    graphdef, state = nnx.split(model)
    optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)

    def loss(state):
        return jnp.sum((nnx.merge(graphdef, state).w[...] - 2.0) ** 2)

    for _ in range(3):
        value, grads = jax.value_and_grad(loss)(nnx.as_pure(nnx.state(model)))
        grads = nnx.state(nnx.merge(graphdef, grads), nnx.Param)
        optimizer.update(model, grads, grad=grads, value=value, value_fn=loss)
    np.testing.assert_allclose(model.w[...], [2.0, 2.0], atol=1e-5)


def test_hyperparameters_can_be_changed():
    model, optimizer = started(optax.inject_hyperparams(optax.sgd)(learning_rate=1.0))
    rate = optimizer.opt_state.hyperparams["learning_rate"]
    assert type(rate) is nnx.OptArray
    rate[...] = 0.5
    updates = optimizer.update(model, ones_like(model))
    np.testing.assert_array_equal(updates["bias"], [-0.5, -0.5])
    optimizer.opt_state.hyperparams["learning_rate"] = 0.25
    updates = optimizer.update(model, ones_like(model))
    np.testing.assert_array_equal(updates["bias"], [-0.25, -0.25])


# What may go wrong.


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), ValueError("mine")])
def test_errors_of_a_transformation_pass_through_and_nothing_changes(error):
    def update(updates, state, params=None):
        raise error

    tx = optax.GradientTransformation(optax.adam(0.1).init, update)
    model, optimizer = started(tx)
    with unchanged(model, optimizer), pytest.raises(type(error), match="^mine"):
        optimizer.update(model, ones_like(model))


def test_model_of_an_outer_trace_is_refused_before_any_write():
    model, optimizer = started(optax.adam(0.1))

    @jax.jit
    def step(optimizer):
        optimizer.update(model, ones_like(model))
        return optimizer

    with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate"):
        step(optimizer)
    assert not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(model))


def test_missing_gradients_are_named():
    model, optimizer = started(optax.sgd(0.1))
    scale = nnx.Param(jnp.ones(1))
    grads = nnx.State({"kernel": ones_like(model)["kernel"], "scale": scale})
    named = "wrt=Param", "missing: bias", "unexpected: scale"
    with raises(ValueError, "pytree structure", *named):
        optimizer.update(model, grads)


def test_bare_gradients_match_no_type_filter_and_are_explained():
    model, optimizer = started(optax.sgd(0.1))
    for grads in (nnx.to_pure_dict(nnx.state(model)), nnx.as_pure(nnx.state(model))):
        with pytest.raises(ValueError, match="match no Variable type"):
            optimizer.update(model, grads)


@pytest.mark.parametrize("key", ["kernel", "bias"])
def test_bare_gradients_beside_others_are_told_from_missing_ones(key):
    model, optimizer = started(optax.adam(0.1))
    grads = ones_like(model)
    grads[key] = jnp.ones(model[key].shape)
    shape = ",".join(map(str, model[key].shape))
    named = f"not selected: {key}, a bare float32[{shape}]"
    with unchanged(model, optimizer):
        with raises(ValueError, "wrt=Param", named, "grads[name][...] = x"):
            optimizer.update(model, grads)
    del grads[key]
    with raises(ValueError, f"missing: {key}"):
        optimizer.update(model, grads)


PARAMETERS = {
    "state": nnx.state,
    "model": lambda model: model,
    "part": lambda model: nnx.State({**ones_like(model), "bias": model.bias}),
}


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit])
@pytest.mark.parametrize("kind", PARAMETERS)
def test_parameters_are_no_gradients(kind, wrap):
    def step(model, optimizer):
        optimizer.update(model, PARAMETERS[kind](model))

    model, optimizer = started(optax.adam(0.1))
    way_out = "Pass what nnx.grad(loss_fn)(model) returns"
    with unchanged(model, optimizer):
        with raises(ValueError, "expects gradients as its second", "bias", way_out):
            wrap(step)(model, optimizer)


def test_update_without_gradients_points_to_the_old_class():
    model, optimizer = started(optax.sgd(0.1))
    message = "Missing required argument `grads`", "ModelAndOptimizer"
    with raises(TypeError, *message):
        optimizer.update(ones_like(model))
    optimizer.update(model=model, grads=ones_like(model))
    assert optimizer.step[...] == 1


# The optimizer that keeps its model.


def test_model_and_optimizer_keeps_and_updates_its_model():
    model = affine()
    optimizer = nnx.ModelAndOptimizer(model, optax.sgd(1.0))
    assert optimizer.model is model and isinstance(optimizer, nnx.Optimizer)
    updates = optimizer.update(ones_like(model))
    np.testing.assert_array_equal(updates["bias"], [-1.0, -1.0])
    np.testing.assert_array_equal(model.bias[...], [-0.75, -1.75])


def test_model_and_optimizer_takes_no_graph():
    with pytest.raises(TypeError):
        nnx.ModelAndOptimizer(affine(), optax.sgd(1.0), graph=True)


def test_subclass_may_set_attributes_first_and_change_update():
    class Clipped(nnx.ModelAndOptimizer):
        def __init__(self, model, tx):
            self.scale = 0.5
            super().__init__(model, tx)

        def update(self, *, grads):
            return super().update(jax.tree.map(lambda g: g * self.scale, grads))

    model = affine()
    updates = Clipped(model, optax.sgd(1.0)).update(grads=ones_like(model))
    np.testing.assert_array_equal(updates["bias"], [-0.5, -0.5])


# In transforms, in copies, and with refs.


def test_update_in_plain_jit_changes_only_what_is_returned():
    model, optimizer = started(optax.adam(0.1))

    @jax.jit
    def step(model, optimizer):
        optimizer.update(model, ones_like(model))
        return model, optimizer

    new_model, new_optimizer = step(model, optimizer)
    assert (optimizer.step[...], new_optimizer.step[...]) == (0, 1)
    np.testing.assert_allclose(new_model.bias[...], [0.15, -0.85], rtol=1e-5)
    np.testing.assert_array_equal(model.bias[...], [0.25, -0.75])


def test_copies_are_independent_and_share_the_transformation():
    model, optimizer = started(optax.adam(0.1))
    for duplicate in (copy.deepcopy(optimizer), nnx.clone(optimizer)):
        duplicate.update(model, ones_like(model))
        assert (optimizer.step[...], duplicate.step[...]) == (0, 1)
    assert nnx.clone(optimizer).tx is optimizer.tx
    assert nnx.merge(*nnx.split(optimizer)).step is optimizer.step


@pytest.mark.parametrize(
    "make",
    [optax.adam, optax.contrib.schedule_free_sgd],
    ids=["zeros", "copies of the params"],
)
def test_refs_carry_an_update_out_of_plain_jit(make):
    with nnx.var_defaults(ref=True):
        model, optimizer = started(make(0.1))
    assert all(v.ref for _, v in nnx.to_flat_state(nnx.state(optimizer)))

    @jax.jit
    def step(model, optimizer):
        params = nnx.map_state(lambda _, v: v.copy(ref=False), nnx.state(model))
        optimizer.update(model, jax.tree.map(jnp.ones_like, params))

    step(model, optimizer)
    np.testing.assert_allclose(model.bias[...], [0.15, -0.85], rtol=1e-4)
    assert optimizer.step[...] == 1


# --------------------------------------------------------------------------- TrainState


class Scale(nnx.Module):
    """Multiplies by a Param and counts its calls."""

    def __init__(self):
        self.scale = nnx.Param(jnp.array([1.0, 2.0]))
        self.calls = nnx.BatchStat(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.scale[...] * x

    def twice(self, x):
        return 2 * self(x)


class StateWithStats(nnx.TrainState):
    """A TrainState with one more field."""

    stats: nnx.State


def make(tx=None):
    graphdef, params, stats = nnx.split(Scale(), nnx.Param, nnx.BatchStat)
    tx = optax.sgd(1.0) if tx is None else tx
    return StateWithStats.create(graphdef, params=params, tx=tx, stats=stats)


def test_fields_and_their_paths():
    state = make(optax.adam(0.1))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    assert paths == [
        ".params['scale'].value",
        ".opt_state[0].count",
        ".opt_state[0].mu['scale'].value",
        ".opt_state[0].nu['scale'].value",
        ".step",
        ".stats['calls'].value",
    ]


def test_moments_are_variables_of_the_type_of_the_param():
    state = make(optax.adam(0.1))
    assert type(state.opt_state[0].mu["scale"]) is nnx.Param
    assert state.step == 0 and state.step.dtype == jnp.int32


def test_apply_takes_states_and_names_of_fields():
    state = make()
    for arguments in (("params", "stats"), (state.params, "stats")):
        y, (graphdef, new) = state.apply(*arguments)(jnp.ones(2))
        np.testing.assert_array_equal(y, [1.0, 2.0])
        assert graphdef == state.graphdef and sorted(new) == ["calls", "scale"]
    y, _ = state.apply("params", "stats").twice(jnp.ones(2))
    np.testing.assert_array_equal(y, [2.0, 4.0])


def test_apply_refuses_fields_that_are_no_state():
    with pytest.raises(TypeError, match=r"StateWithStats\.step to be a State"):
        make().apply("step")


def test_apply_gradients_gives_a_new_object():
    state = make()
    grads = jax.tree.map(jnp.ones_like, state.params)
    new = state.apply_gradients(grads, stats=nnx.State({}))
    np.testing.assert_array_equal(new.params["scale"][...], [0.0, 1.0])
    np.testing.assert_array_equal(state.params["scale"][...], [1.0, 2.0])
    assert (new.step, state.step) == (1, 0)
    assert type(new) is StateWithStats and dict(new.stats) == {}


def test_training_under_plain_jit():
    state = make(optax.sgd(0.25))

    @jax.jit
    def train_step(state, x):
        def loss(params):
            # Copied, so that the inner trace may write them.
            y, (_, new) = state.apply(params, jax.tree.map(jnp.copy, state.stats))(x)
            return jnp.sum(y**2) / 2, nnx.filter_state(new, nnx.BatchStat)

        grads, stats = jax.grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads, stats=stats)

    for _ in range(2):
        state = train_step(state, jnp.ones(2))
    # d(s^2 / 2) = s: each step scales by 0.75.
    np.testing.assert_allclose(state.params["scale"][...], [0.5625, 1.125])
    assert (state.step, state.stats["calls"][...]) == (2, 2)


def test_subclasses_may_have_static_fields_and_defaults():
    class Named(nnx.TrainState, kw_only=True):
        name: str = dataclasses.field(default="a", metadata={"pytree_node": False})

    graphdef, params = nnx.split(nnx.Dict(w=nnx.Param(jnp.ones(1))))
    state = Named.create(graphdef, params=params, tx=optax.sgd(0.1))
    assert state.name == "a" and len(jax.tree.leaves(state)) == 2
    assert jax.tree.structure(state) != jax.tree.structure(state.replace(name="b"))


def test_class_is_generic():
    assert nnx.TrainState[Scale].create.__func__ is nnx.TrainState.create.__func__


# ----------------------------------------------------------------------------- the peer


def is_kernel(params):
    """A mask, for States of Variables and of arrays alike."""
    return jax.tree.map_with_path(
        lambda path, _: path[-1].key == "kernel", params, is_leaf=has_metadata
    )


def has_metadata(x):
    return hasattr(x, "get_metadata")


def kind_of(params):
    return jax.tree.map(lambda chosen: "a" if chosen else "b", is_kernel(params))


TRANSFORMATIONS = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "sm3": lambda: optax.sm3(0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 10)),
    "masked": lambda: optax.masked(optax.adam(0.1), is_kernel),
    "partition": lambda: optax.partition(
        {"a": optax.adam(0.1), "b": optax.set_to_zero()}, kind_of
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 2),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(0.1),
    "inject_schedule": lambda: optax.inject_hyperparams(optax.sgd)(
        optax.linear_schedule(0.1, 0.0, 10)
    ),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "add_noise_key": lambda: optax.chain(
        optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)
    ),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(0.1),
    "muon": lambda: optax.contrib.muon(0.1),
    "plateau": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)
    ),
    "lbfgs": lambda: optax.lbfgs(linesearch=None),
}


def train(library, tx):
    """Params and optimizer state after a few steps with fixed gradients."""
    kernel, *rest = np.random.default_rng(0).normal(size=(3, 3, 3)).astype(np.float32)
    numbers = kernel, *(x[0] for x in rest)
    kernel, bias, scale = map(library.Param, map(jnp.array, numbers))
    dense = library.Dict(kernel=kernel, bias=bias)
    model = library.Dict(dense=dense, scale=library.Dict(kernel=scale))
    optimizer = library.Optimizer(model, tx, wrt=library.Param)
    for _ in range(3):
        grads = jax.tree.map(lambda w: jnp.sin(3 * w) + w, library.state(model))
        optimizer.update(model, grads, value=jnp.array(1.0))
    return jax.tree.leaves_with_path((model, library.state(optimizer)))


@pytest.mark.filterwarnings("ignore")  # Optax and Flax deprecate parts of themselves
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_training_gives_the_state_of_the_peer(peer, name):
    with jax.numpy_rank_promotion("allow"):
        ours = train(nnx, TRANSFORMATIONS[name]())
        theirs = train(peer, TRANSFORMATIONS[name]())
    for (our_path, our_leaf), (path, leaf) in zip(ours, theirs, strict=True):
        assert jax.tree_util.keystr(our_path) == jax.tree_util.keystr(path)
        assert our_leaf.dtype == leaf.dtype
        np.testing.assert_array_equal(data(our_leaf), data(leaf))


def data(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
