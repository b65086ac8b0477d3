"""Where optimizer state is placed, and that an update leaves params where they are."""

import contextlib

import jax
import jax.numpy as jnp
import optax
import pytest

import graftree as nnx

KINDS = pytest.mark.parametrize(
    "kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str
)


def mesh(*sizes, kind=jax.sharding.AxisType.Auto):
    names = ("x", "y")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


def gradients(model):
    return jax.tree.map(jnp.ones_like, nnx.state(model))


def test_moments_follow_the_annotation_of_the_param():
    with jax.set_mesh(mesh(2, 2)):
        model = nnx.Dict(kernel=nnx.Param(jnp.ones((4, 4)), out_sharding=("x", "y")))
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    mu = optimizer.opt_state[0].mu["kernel"]
    assert mu.out_sharding == ("x", "y")
    assert mu.sharding.spec == jax.P("x", "y")


def test_factored_moments_drop_an_annotation_that_does_not_fit():
    with jax.set_mesh(mesh(2, 2)):
        model = nnx.Dict(
            kernel=nnx.Param(jnp.ones((128, 256)), out_sharding=("x", "y"))
        )
        optimizer = nnx.Optimizer(model, optax.adafactor(0.1), wrt=nnx.Param)
        updates = optimizer.update(model, gradients(model))
    factored = optimizer.opt_state[0]
    assert factored.v_row["kernel"].shape == (128,)
    assert not factored.v_row["kernel"].has_metadata("out_sharding")
    assert updates["kernel"].shape == (128, 256)


def test_without_a_mesh_moments_follow_the_placement_of_the_param():
    with jax.set_mesh(mesh(2, 2)):
        kernel = nnx.Param(jnp.ones((4, 4)), out_sharding=("x", "y"))
    optimizer = nnx.Optimizer([kernel], optax.adam(0.1), wrt=nnx.Param)
    mu = optimizer.opt_state[0].mu[0]
    assert mu.sharding.spec == jax.P("x", "y")
    assert mu.get_metadata() == kernel.get_metadata()


def test_moments_that_are_made_elsewhere_move_to_the_param():
    placement = jax.NamedSharding(mesh(2, 2), jax.P("x", "y"))
    kernel = nnx.Param(jax.device_put(jnp.ones((4, 4)), placement))
    moments = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x: jnp.zeros(x.shape), params),
        lambda updates, state, params=None: (updates, state),
    )
    optimizer = nnx.Optimizer([kernel], moments, wrt=nnx.Param)
    assert optimizer.opt_state[0].sharding == placement


def test_moments_made_in_a_trace_follow_the_annotation_of_the_param():
    @nnx.jit
    def make():
        kernel = nnx.Param(jnp.ones((4, 4)), out_sharding=("x", "y"))
        return nnx.Optimizer([kernel], optax.adam(0.1), wrt=nnx.Param)

    with jax.set_mesh(mesh(2, 2)):
        mu = make().opt_state[0].mu[0]
    assert mu.sharding.spec == jax.P("x", "y")


def test_optimizer_sharding_leaves_the_param_where_it_is():
    explicit = mesh(2, 2, kind=jax.sharding.AxisType.Explicit)
    with jax.set_mesh(explicit):
        kernel = nnx.Param(jnp.ones((4, 4)), optimizer_sharding=jax.P("x", "y"))
        model = nnx.Dict(kernel=kernel)
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
        before = jax.typeof(model.kernel[...]).sharding

        @jax.jit
        def step(model, optimizer):
            optimizer.update(model, gradients(model))
            return model, optimizer

        model, optimizer = step(model, optimizer)
        assert jax.typeof(
            optimizer.opt_state[0].mu["kernel"][...]
        ).sharding.spec == jax.P("x", "y")
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


@KINDS
def test_all_arrays_stay_where_they_are_and_nothing_is_compiled_twice(mode, kind):
    on = mesh(2, 2, kind=kind)
    model, optimizer, step, traces = training(on, **mode)
    before = places(model, optimizer)
    x = jax.device_put(jnp.ones((4, 8)), jax.NamedSharding(on, jax.P("y")))
    with jax.set_mesh(on):
        losses = [float(step(model, optimizer, x))]
        with nothing_is_compiled():
            losses += [float(step(model, optimizer, x)) for _ in range(3)]
    assert places(model, optimizer) == before
    assert len(traces) == 1
    assert losses == sorted(losses, reverse=True)
    mu = optimizer.opt_state[0].mu
    assert mu["out"].sharding.shard_shape((8, 8)) == (4, 4)
    assert model.out.sharding.shard_shape((8, 8)) == (8, 4)


def test_arrays_that_were_moved_stay_there():
    """Arrays without annotations, which ``jax.device_put`` has divided."""
    on = mesh(2, 2)
    plain = lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))  # noqa: E731
    model, optimizer, step, _ = training(on, plain)
    rows = jax.tree.map(
        lambda x: jax.device_put(x, jax.NamedSharding(on, jax.P(*["x"][: x.ndim]))),
        nnx.state((model, optimizer)),
    )
    nnx.update((model, optimizer), rows)
    before = places(model, optimizer)
    assert (4, 8) in before
    with jax.set_mesh(on):
        step(model, optimizer, jnp.ones((4, 8)))
        with nothing_is_compiled():
            step(model, optimizer, jnp.ones((4, 8)))
    assert places(model, optimizer) == before


def test_running_statistics_stay_where_they_are():
    on = mesh(2, 2)

    def make():
        divided = {"kernel_metadata": {"out_sharding": (None, "x")}}
        rngs = nnx.Rngs(0)
        linear = nnx.Linear(8, 8, **divided, rngs=rngs)
        return nnx.Sequential(linear, nnx.BatchNorm(8, rngs=rngs), jnp.square)

    model, optimizer, step, _ = training(on, make)
    before = places(model, optimizer)
    with jax.set_mesh(on):
        step(model, optimizer, jnp.ones((4, 8)))
        with nothing_is_compiled():
            step(model, optimizer, jnp.ones((4, 8)))
    assert places(model, optimizer) == before


def test_equal_steps_are_equal_programs_and_can_be_differentiated_and_mapped():
    def f(w, factor):
        model = nnx.Dict(w=nnx.Param(w))
        optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
        optimizer.update(model, nnx.grad(lambda model: factor * model.w.sum())(model))
        return model.w[...].sum()

    with jax.set_mesh(mesh(2, 2)):
        w = jnp.ones(4)
        texts = [jax.jit(lambda *x: f(*x)).lower(w, 1.0).as_text() for _ in range(2)]
        assert texts[0] == texts[1]
        assert jax.jit(jax.grad(f, (0, 1)))(w, 1.0)[1] == -2.0  # 4 * -0.5
        assert jax.jit(jax.vmap(f, (0, None)))(jnp.ones((3, 4)), 1.0).shape == (3,)
        assert jax.jit(jax.vmap(f, (None, 0)))(w, jnp.ones(3)).shape == (3,)


LOGICAL = [("embed", "x"), ("mlp", "y")]
TRANSFORMATIONS = {
    "adam": optax.adam(0.1),
    "adafactor": optax.adafactor(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16),
    "averaged": optax.chain(optax.adamw(0.1), optax.ema(0.9)),
}


def logical_model():
    kernel = {"out_sharding": ("embed", "mlp")}
    return nnx.Linear(128, 256, kernel_metadata=kernel, rngs=nnx.Rngs(0))


@KINDS
@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("is_set", [False, True])
def test_moments_are_where_their_params_are_after_the_rules_are_gone(
    kind, name, is_set
):
    on = mesh(2, 2, kind=kind)
    model = nnx.sharding.init(logical_model, on, LOGICAL)
    # JAX 0.10 needs the mesh there for what Optax does to find the factors.
    is_set |= name == "adafactor" and kind is jax.sharding.AxisType.Explicit
    with jax.set_mesh(on) if is_set else contextlib.nullcontext():
        optimizer = nnx.Optimizer(model, TRANSFORMATIONS[name], wrt=nnx.Param)
    moments = [
        x for x in jax.tree.leaves(nnx.state(optimizer)) if x.shape == (128, 256)
    ]
    assert moments or name == "adafactor"
    assert all(x.sharding == model.kernel.sharding for x in moments)
    leaves = nnx.to_flat_state(nnx.state(optimizer, nnx.OptVariable))
    of_kernel = [x for _, x in leaves if x.shape == (128, 256)]
    assert all(x.out_sharding == ("embed", "mlp") for x in of_kernel)


def test_logical_names_of_the_moments_themselves_need_their_rules():
    on = mesh(2, 2)
    model = nnx.sharding.init(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), on)
    model.kernel.set_metadata(optimizer_sharding=("embed", None))
    with pytest.raises(ValueError, match="embed") as caught:
        nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    assert "logical_axis_rules" in str(caught.value.__notes__)
    assert "kernel" in str(caught.value.__notes__)
    with nnx.logical_axis_rules(LOGICAL):
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    assert optimizer.opt_state[0].mu["kernel"].sharding.spec == jax.P("x", None)
    assert model.kernel.sharding.is_fully_replicated


@pytest.mark.parametrize("is_set", [False, True])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_eager_updates_move_nothing_as_compiled_ones(name, is_set):
    on = mesh(2, 2)

    def make():
        model = logical_model()
        return model, nnx.Optimizer(model, TRANSFORMATIONS[name], wrt=nnx.Param)

    both = nnx.sharding.init(make, on, LOGICAL)
    before = [x.sharding for x in jax.tree.leaves(nnx.state(both))]
    x = jax.device_put(jnp.ones((2, 128)), jax.NamedSharding(on, jax.P("x")))
    with jax.set_mesh(on) if is_set else contextlib.nullcontext():
        for _ in range(2):
            grads = nnx.grad(lambda model: (model(x) ** 2).mean())(both[0])
            both[1].update(both[0], grads)
    after = jax.tree.leaves(nnx.state(both))
    for old, new in zip(before, after, strict=True):
        assert new.sharding.is_equivalent_to(old, new.ndim), (old, new.sharding)
