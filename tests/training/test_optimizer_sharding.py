"""Where optimizer state is placed, and what is said of what does not fit it."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from tests import tables
from tests.comparisons import raises
from tests.meshes import mesh_of

KINDS = pytest.mark.parametrize("kind", ["Auto", "Explicit"])
SQUARE = np.ones((4, 4), np.float32)
X = np.ones((4, 8), np.float32)


mesh = functools.partial(mesh_of, x=2, y=2)


def annotated(kernel=SQUARE):
    """A Param that is divided as it is annotated, where there is a mesh."""
    return nnx.Param(jnp.asarray(kernel), out_sharding=("x", "y"))


def adam_of(model):
    return nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


def gradients(model):
    return jax.tree.map(jnp.ones_like, nnx.state(model))


@pytest.mark.parametrize("place", ["mesh", "no mesh", "trace"])
def test_moments_are_placed_as_the_param_in_a_mesh_without_one_and_in_a_trace(place):
    with jax.set_mesh(mesh()):
        kernel = annotated()
        if place == "trace":
            optimizer = nnx.jit(lambda: adam_of([annotated()]))()
        elif place == "mesh":
            optimizer = adam_of([kernel])
    if place == "no mesh":
        optimizer = adam_of([kernel])
    mu = optimizer.opt_state[0].mu[0]
    assert mu.get_metadata() == kernel.get_metadata()
    assert mu.out_sharding == ("x", "y") and mu.sharding.spec == jax.P("x", "y")


def test_moments_that_are_made_elsewhere_move_to_the_param():
    placement = jax.NamedSharding(mesh(), jax.P("x", "y"))
    kernel = nnx.Param(jax.device_put(SQUARE, placement))
    moments = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x: jnp.zeros(x.shape), params),
        optax.identity().update,
    )
    optimizer = nnx.Optimizer([kernel], moments, wrt=nnx.Param)
    assert optimizer.opt_state[0].sharding == placement


def test_factored_moments_drop_an_annotation_that_does_not_fit():
    with jax.set_mesh(mesh()):
        model = nnx.Dict(kernel=annotated(np.ones((4, 8), np.float32)))
        tx = optax.adafactor(0.1, min_dim_size_to_factor=2)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        updates = nnx.jit(nnx.Optimizer.update)(optimizer, model, gradients(model))
    factored = optimizer.opt_state[0]
    assert factored.v_row["kernel"].shape == (4,)
    assert not factored.v_row["kernel"].has_metadata("out_sharding")
    assert updates["kernel"].shape == (4, 8)


def test_optimizer_sharding_leaves_the_param_where_it_is():
    with jax.set_mesh(mesh("Explicit")):
        kernel = nnx.Param(jnp.asarray(SQUARE), optimizer_sharding=jax.P("x", "y"))
        model = nnx.Dict(kernel=kernel)
        optimizer = adam_of(model)
        before = jax.typeof(model.kernel[...]).sharding

        @jax.jit
        def step(model, optimizer):
            optimizer.update(model, gradients(model))
            return model, optimizer

        model, optimizer = step(model, optimizer)
        mu = optimizer.opt_state[0].mu["kernel"][...]
        assert jax.typeof(mu).sharding.spec == jax.P("x", "y")
        assert jax.typeof(model.kernel[...]).sharding == before


class Scaled(nnx.Module):
    """A scale that is not annotated, beside a kernel that is divided."""

    def __init__(self, rngs):
        divided = {"out_sharding": (None, "x"), "optimizer_sharding": ("x", "y")}
        self.scale = nnx.Param(jnp.ones((1, 8)))
        self.kernel = nnx.Param(rngs.normal((8, 8)), out_sharding=("x", None))
        self.out = nnx.Param(rngs.normal((8, 8)), **divided)

    def __call__(self, x):
        return (x * self.scale[...]) @ self.kernel[...] @ self.out[...]


def linear(*axes):
    """A layer with known values."""
    init = {"kernel_init": nnx.initializers.constant(0.5)}
    metadata = {"out_sharding": axes} if axes else {}
    return nnx.Linear(8, 8, **init, kernel_metadata=metadata, rngs=nnx.Rngs(0))


def training(on, make=lambda: Scaled(nnx.Rngs(0)), **options):
    """A model and optimizer on a mesh, and a step that notes its traces."""

    def both():
        made = make()
        return made, nnx.Optimizer(made, optax.adamw(0.01), wrt=nnx.Param)

    traces = []

    @nnx.jit(donate_argnums=(0, 1), **options)
    def step(model, optimizer, x):
        traces.append(0)
        loss = lambda model: jnp.mean(model(x) ** 2)  # noqa: E731
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return *nnx.sharding.init(both, on), step, traces


def places(*nodes):
    return [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(nnx.state(nodes))]


@contextlib.contextmanager
def nothing_is_compiled():
    events = []

    def note(event, duration, **_):
        events.append(event) if "backend_compile" in event else None

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert not events


def losses_in_place(model, optimizer, step, x, on):
    """Of three steps, which move nothing; only the first of them is compiled."""
    before = places(model, optimizer)
    with jax.set_mesh(on):
        losses = [float(step(model, optimizer, x))]
        with nothing_is_compiled():
            losses += [float(step(model, optimizer, x)) for _ in range(2)]
    assert places(model, optimizer) == before
    return losses


@KINDS
def test_all_arrays_stay_where_they_are_and_nothing_is_compiled_twice(mode, kind):
    on = mesh(kind)
    model, optimizer, step, traces = training(on, **mode)
    x = jax.device_put(X, jax.NamedSharding(on, jax.P("y")))
    losses = losses_in_place(model, optimizer, step, x, on)
    assert len(traces) == 1 and losses == sorted(losses, reverse=True)
    moments = optimizer.opt_state[0].mu["out"], model.out
    assert [x.sharding.shard_shape((8, 8)) for x in moments] == [(4, 4), (8, 4)]


def test_arrays_that_were_moved_stay_there():
    """Arrays without annotations, which ``jax.device_put`` has divided."""
    on = mesh()
    model, optimizer, step, _ = training(on, linear)
    rows = jax.tree.map(
        lambda x: jax.device_put(x, jax.NamedSharding(on, jax.P(*["x"][: x.ndim]))),
        nnx.state((model, optimizer)),
    )
    nnx.update((model, optimizer), rows)
    assert (4, 8) in places(model, optimizer)
    losses_in_place(model, optimizer, step, X, on)


def test_running_statistics_stay_where_they_are():
    def make():
        norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
        return nnx.Sequential(linear(None, "x"), norm, jnp.square)

    on = mesh()
    model, optimizer, step, _ = training(on, make)
    losses_in_place(model, optimizer, step, X, on)


def test_equal_steps_are_equal_programs_and_can_be_differentiated_and_mapped():
    def f(w, factor):
        model = nnx.Dict(w=nnx.Param(w))
        optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
        optimizer.update(model, nnx.grad(lambda model: factor * model.w.sum())(model))
        return model.w[...].sum()

    with jax.set_mesh(mesh()):
        w = jnp.ones(4)
        texts = [jax.jit(lambda *x: f(*x)).lower(w, 1.0).as_text() for _ in range(2)]
        assert texts[0] == texts[1]
        assert jax.jit(jax.grad(f, (0, 1)))(w, 1.0)[1] == -2.0  # 4 * -0.5
        assert jax.jit(jax.vmap(f, (0, None)))(jnp.ones((3, 4)), 1.0).shape == (3,)
        assert jax.jit(jax.vmap(f, (None, 0)))(w, jnp.ones(3)).shape == (3,)


LOGICAL = [("embed", "x"), ("mlp", "y")]
TRANSFORMATIONS = {
    "adam": optax.adam(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "momentum": optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16),
    "averaged": optax.chain(optax.adamw(0.1), optax.ema(0.9)),
}


@functools.cache
def logical_model(kind):
    """A layer that was made under rules for its axes."""
    return nnx.sharding.init(lambda: linear("embed", "mlp"), mesh(kind), LOGICAL)


@KINDS
@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("is_set", [False, True])
def test_moments_are_where_params_are_after_the_rules_are_gone(kind, name, is_set):
    model = logical_model(kind)
    # JAX 0.10 needs the mesh there for what Optax does to find the factors.
    is_set |= name == "adafactor" and kind == "Explicit"
    with jax.set_mesh(mesh(kind)) if is_set else contextlib.nullcontext():
        optimizer = nnx.Optimizer(model, TRANSFORMATIONS[name], wrt=nnx.Param)
    moments = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.shape == (8, 8)]
    assert moments or name == "adafactor"
    assert all(x.sharding == model.kernel.sharding for x in moments)
    leaves = nnx.to_flat_state(nnx.state(optimizer, nnx.OptVariable))
    of_kernel = [x for _, x in leaves if x.shape == (8, 8)]
    assert all(x.out_sharding == ("embed", "mlp") for x in of_kernel)


@nnx.jit
def gradients_of_loss(model):
    return nnx.grad(lambda model: (model(X) ** 2).mean())(model)


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_eager_updates_move_nothing_as_compiled_ones(name, is_set):
    def make():
        model = linear("embed", "mlp")
        return model, nnx.Optimizer(model, TRANSFORMATIONS[name], wrt=nnx.Param)

    model, optimizer = nnx.sharding.init(make, mesh(), LOGICAL)
    before = [x.sharding for x in jax.tree.leaves(nnx.state((model, optimizer)))]
    with jax.set_mesh(mesh()) if is_set else contextlib.nullcontext():
        for _ in range(2):
            optimizer.update(model, gradients_of_loss(model))
    after = jax.tree.leaves(nnx.state((model, optimizer)))
    for old, new in zip(before, after, strict=True):
        assert new.sharding.is_equivalent_to(old, new.ndim), (old, new.sharding)


def test_logical_names_of_the_moments_themselves_need_their_rules():
    model = nnx.sharding.init(linear, mesh())
    model.kernel.set_metadata(optimizer_sharding=("embed", None))
    with raises(ValueError, "embed", "kernel", "logical_axis_rules"):
        adam_of(model)
    with nnx.logical_axis_rules(LOGICAL):
        optimizer = adam_of(model)
    assert optimizer.opt_state[0].mu["kernel"].sharding.spec == jax.P("x", None)
    assert model.kernel.sharding.is_fully_replicated


# --------------------------------------------------------------------- what doesn't fit


def ones(shape):
    """A Param of ones, for which nothing is compiled."""
    return nnx.Param(jnp.asarray(np.ones(shape, np.float32)))


def model_of(width):
    return nnx.Dict(layers=nnx.List([nnx.Dict(kernel=ones((width, 1)))]))


def started(width=2, tx=None):
    """A model, and an optimizer of its Params."""
    model = model_of(width)
    return model, nnx.Optimizer(model, tx or optax.adam(0.1), wrt=nnx.Param)


@pytest.mark.parametrize("make", [nnx.Optimizer, nnx.ModelAndOptimizer])
@tables.cases(
    "tx, phrases",
    (1e-3, ["`tx`, got 0.001", "Pass e.g. optax.adam(1e-3)"]),
    (optax.adam, ["`tx`, got the function adam", "Call it to make one"]),
)
def test_what_is_no_transformation_is_refused(make, tx, phrases):
    with raises(TypeError, "expects an Optax transformation", *phrases):
        make(model_of(2), tx, wrt=nnx.Param)


def test_an_optimizer_of_nothing_warns_and_works():
    model = model_of(2)
    with pytest.warns(UserWarning, match="wrt=BatchStat selects nothing") as caught:
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.BatchStat)
    assert "usually wrt=nnx.Param" in str(caught[0].message)
    optimizer.update(model, nnx.State({}))
    assert optimizer.step[...] == 1


def test_swapped_arguments_of_update_are_refused():
    model, optimizer = started()
    grads = gradients(model)
    given = "got a State as the model and a Dict as the gradients"
    way = "Call optimizer.update(model, grads)"
    with raises(TypeError, "the model first", given, way):
        optimizer.update(grads, model)
    assert jnp.all(grads["layers"][0]["kernel"][...] == 1) and optimizer.step[...] == 0


def test_a_state_for_another_shape_is_named():
    model, optimizer = started()
    model.layers[0].kernel = ones((7, 1))
    where = "0/mu/layers/0/kernel: shape (2, 1) then, shape (7, 1) for the model"
    told = "made for other parameters", where, "make a new optimizer"
    with raises(ValueError, *told, "add got incompatible shapes"):
        optimizer.update(model, gradients(model))


def test_a_state_without_a_new_parameter_is_named():
    model, optimizer = started()
    model.scale = ones(3)
    with raises(ValueError, "0/mu/scale: nothing then", "make a new optimizer"):
        optimizer.update(model, gradients(model))


def test_gradients_of_another_shape_are_named():
    # The sum of both would have the shape of the gradients.
    model, optimizer = started(1, optax.sgd(0.1))
    where = "the parameter is float32[1,1], its gradient float32[5,1]"
    told = "The gradients don't fit", "selected by wrt=Param", "layers/0/kernel: "
    way = "Differentiate the model as it is now"
    with raises(ValueError, *told, where, way):
        optimizer.update(model, gradients(model_of(5)))
    assert model.layers[0].kernel.shape == (1, 1)


SHAPES = [(), (1,), (3,), (1, 1), (1, 3), (2, 1), (2, 3), (3, 2), (1, 2, 3), (0, 3)]


def leaves(*nodes):
    return jax.tree.leaves(nnx.to_pure_dict(nnx.state(nodes)))


UPDATED = [(optax.sgd, shape) for shape in ((), (1,), (3,), (1, 3), (2, 3))]
# Their own operations, on a shape each, are what takes time here.
UPDATED += [(optax.adam, ()), (optax.adam, (3,)), (optax.adafactor, (1,))]


@pytest.mark.parametrize(("make", "shape"), UPDATED)
def test_gradients_of_any_other_shape_are_refused_before_anything_changes(make, shape):
    model = nnx.Dict(w=ones(shape))
    optimizer = nnx.Optimizer(model, make(0.1), wrt=nnx.Param)
    compiled = nnx.jit(lambda optimizer, *args: optimizer.update(*args))
    before = leaves(model, optimizer)
    for given in SHAPES:
        grads = nnx.State({"w": ones(given)})
        for update in (nnx.Optimizer.update, compiled) if given != shape else ():
            with pytest.raises(ValueError, match="The gradients don't fit"):
                with jax.numpy_rank_promotion("allow"):
                    update(optimizer, model, grads)
    assert [*map(id, leaves(model, optimizer))] == [*map(id, before)]
    compiled(optimizer, model, nnx.State({"w": ones(shape)}))
    assert model.w.shape == shape and optimizer.step[...] == 1


KINDS_OF_MISFITS = {
    "bool": jnp.ones(2, bool),
    "int32": jnp.ones(2, "int32"),
    "uint8": jnp.ones(2, "uint8"),
    "bfloat16": jnp.ones(2, "bfloat16"),
    "float32": jnp.ones(2, "float32"),
    "complex64": jnp.ones(2, "complex64"),
    "key": jax.random.split(jax.random.key(0)),
}


@pytest.mark.parametrize("kind", KINDS_OF_MISFITS)
@pytest.mark.parametrize("param", ["bfloat16", "float32", "complex64"])
def test_gradients_are_numbers_of_the_kind_of_the_parameter(param, kind):
    model = nnx.Dict(w=nnx.Param(jnp.ones(2, param)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    grads = nnx.State({"w": nnx.Param(KINDS_OF_MISFITS[kind])})
    if ("float" in kind and "float" in param) or kind == param:
        optimizer.update(model, grads)
        assert model.w.dtype == param
        return
    with pytest.raises(ValueError, match=f"w: the parameter is {param}"):
        optimizer.update(model, grads)
    assert optimizer.step[...] == 0


def test_numbers_of_python_are_gradients_of_scalars():
    model = nnx.Dict(w=nnx.Param(jnp.array(1.0)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    for grad in (1, 1.0, jnp.array(1), np.float32(1)):
        optimizer.update(model, nnx.State({"w": nnx.Param(grad)}))
    assert model.w[...] == -1.0


def test_gradients_per_example_are_for_those_who_take_them():
    model = model_of(2)
    mean = optax.GradientTransformation(
        lambda params: (),
        lambda x, state, _: (jax.tree.map(lambda x: x.mean(0), x), ()),
    )
    optimizer = nnx.Optimizer(model, optax.chain(mean, optax.adam(0.1)), wrt=nnx.Param)
    grads = jax.tree.map(lambda x: jnp.stack([x, x, x]), gradients(model))
    optimizer.update(model, grads)
    assert model.layers[0].kernel.shape == (2, 1)
    plain = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"update \(3, 2, 1\)"):
        with jax.numpy_rank_promotion("allow"):
            plain.update(model, grads)


def test_the_gradients_of_a_train_state_must_fit():
    graphdef, params = nnx.split(nnx.Dict(w=ones(2)))
    state = nnx.TrainState.create(graphdef, params=params, tx=optax.adam(0.1))
    with pytest.raises(ValueError, match=r"of the TrainState.\n  w.*float32\[1\]"):
        state.apply_gradients(nnx.State({"w": ones(1)}))


def test_averages_take_values_of_their_shape():
    ema = nnx.EMA(nnx.Dict(w=ones(2)), decay=0.5)
    before = leaves(ema)
    with pytest.raises(ValueError, match=r"w: the average has shape \(2,\)"):
        ema.update({"w": ones(1)})
    assert [*map(id, leaves(ema))] == [*map(id, before)]
