"""Models made on a mesh: no device ever holds a whole array that is to be split.

The report says where arrays are, and what a device holds.
"""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import graftree as nnx
from tests import comparisons, tables
from tests.meshes import mesh_of

KINDS = pytest.mark.parametrize("kind", ["Auto", "Explicit"])


def make_model():
    up = {"out_sharding": ("embed", "mlp"), "optimizer_sharding": ("batch", "mlp")}
    rngs = nnx.Rngs(0)
    return nnx.Dict(
        up=nnx.Linear(8, 16, kernel_metadata=up, rngs=rngs),
        down=nnx.Linear(16, 8, rngs=rngs),
        dropout=nnx.Dropout(0.5, rngs=rngs),
    )


RULES = [("embed", None), ("mlp", "model"), ("batch", "data")]


@KINDS
def test_values_are_those_without_a_mesh_and_lie_as_annotated(kind):
    model = nnx.sharding.init(make_model, mesh_of(kind, data=2, model=4), RULES)
    with nnx.use_eager_sharding(False):
        expected = make_model()
    states = [nnx.to_flat_state(nnx.state(x)) for x in (model, expected)]
    for (path, found), (other, leaf) in zip(*states, strict=True):
        assert path == other and isinstance(found[...].sharding, NamedSharding)
        if not isinstance(leaf, nnx.RngKey):
            np.testing.assert_allclose(found[...], leaf[...], rtol=1e-6)
    kernel = model.up.kernel
    assert kernel.out_sharding == ("embed", "mlp")
    assert kernel[...].sharding.shard_shape((8, 16)) == (8, 4)
    assert model.down.kernel[...].sharding.is_fully_replicated


@KINDS
def test_optimizer_state_follows_its_own_annotation(kind):
    mesh = mesh_of(kind, data=2, model=4)

    def make():
        model = make_model()
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    model, optimizer = nnx.sharding.init(make, mesh, RULES)
    mu = optimizer.opt_state[0].mu["up"]["kernel"]
    assert mu[...].sharding.shard_shape((8, 16)) == (4, 4)
    assert optimizer.step[...].sharding.is_fully_replicated

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.sum(model.down(model.up(x))))(model)
        optimizer.update(model, grads)

    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        step(model, optimizer, jnp.ones((4, 8)))
    assert model.up.kernel[...].sharding.shard_shape((8, 16)) == (8, 4)
    assert int(optimizer.step[...]) == 1


def test_no_device_holds_a_whole_array_while_it_is_made(monkeypatch):
    mesh = mesh_of(model=8)
    jit, programs = jax.jit, []

    def make():
        metadata = {"out_sharding": (None, "model")}
        model = nnx.Linear(64, 1024, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def recording(*args, **kwargs):
        programs.append(jit(*args, **kwargs))
        return programs[-1]

    with monkeypatch.context() as patch, jax.set_mesh(mesh):
        patch.setattr(jax, "jit", recording)
        nnx.sharding.init(make, mesh)
        memory = programs[-1].lower().compile().memory_analysis()
    part = 64 * 1024 * 4 // 8
    biases = 3 * 1024 * 4  # on all devices
    assert 3 * part <= memory.output_size_in_bytes < 3 * part + biases + 1024
    assert memory.temp_size_in_bytes < 4 * part


def make_blocks(names, size):
    made = {"kernel_metadata": {"out_sharding": names}, "rngs": nnx.Rngs(0)}
    return nnx.Dict(blocks=nnx.List([nnx.Linear(size, size, **made) for _ in range(2)]))


@tables.cases(
    "names, size, words",
    (("embed", "mlp"), 8, "'mlp' means 'mlp', which is not an axis"),
    (("embed", "wrong"), 8, "'wrong' means 'tensor', which is not an axis"),
    (("embed", None), 6, "axis 0 ('embed') has size 6, which is not"),
    (("embed", "model"), 8, "'embed' and 'model' are both mapped to the axis 'model'"),
    (("embed", None, None), 8, "3 names ('embed', None, None) for the shape (8, 8)"),
)
def test_all_annotations_that_do_not_fit_are_named(names, size, words):
    mesh = mesh_of(data=2, model=4)
    rules = [("embed", "model"), ("wrong", "tensor")]
    known = "axes of the mesh: 'data' of 2, 'model' of 4"
    in_force = "rules in force: 'embed' -> 'model', 'wrong' -> 'tensor'"
    where = f"blocks[0].kernel: {words}", f"blocks[1].kernel: {words}"
    with comparisons.raises(ValueError, *where, known, in_force):
        nnx.sharding.init(lambda: make_blocks(names, size), mesh, rules)


def test_errors_of_the_function_pass_through():
    def make():
        raise ValueError("own")

    with pytest.raises(ValueError, match="^own$"):
        nnx.sharding.init(make, mesh_of(model=8))


@pytest.mark.parametrize("rules", [{"embed": "model"}, ["embed"], [("a", "b", "c")]])
def test_rules_are_pairs(rules):
    with pytest.raises(TypeError, match="pairs of a name and an axis of the mesh"):
        nnx.sharding.init(lambda: None, mesh_of(model=8), rules)


def test_no_device_ever_holds_more_than_its_part_of_a_model_and_its_moments():
    """Live bytes afterwards, and those of the program that makes all of it."""
    mesh = mesh_of(data=2, model=4)
    divided = {"out_sharding": (None, "model"), "optimizer_sharding": ("data", "model")}

    def make():
        made = {"use_bias": False, "rngs": nnx.Rngs(0)}
        model = nnx.Linear(128, 512, kernel_metadata=divided, **made)
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    before = jax.live_arrays()  # kept: what others free meanwhile is not counted
    made = nnx.sharding.init(make, mesh)
    gc.collect()
    whole = 128 * 512 * 4
    # A quarter of the kernel, an eighth of each moment; a few counters.
    for held in new_bytes(before).values():
        assert 0 <= held - (whole // 4 + 2 * whole // 8) < 100
    del made


def new_bytes(before):
    """How many bytes each device holds of arrays that were not there before."""
    known, held = {*map(id, before)}, dict.fromkeys(jax.devices(), 0)
    for array in jax.live_arrays():
        if id(array) not in known:
            for shard in array.addressable_shards:
                held[shard.device] += shard.data.nbytes
    return held


def host_values():
    return {
        "wide": np.array([2**40 + 5]),
        "large": np.float64(1e300),
        "number": 0.1,
        "flag": True,
        "nested": {"x": np.arange(3), "y": np.ones(2, np.float32)},
        "narrow": np.arange(4, dtype=np.int32),
        "complex": np.array([1e300j]),
    }


@KINDS
def test_numbers_that_jax_would_cut_are_those_without_a_mesh(kind):
    def make():
        made = {name: nnx.Variable(x) for name, x in host_values().items()}
        made["attribute"] = np.array([2**40 + 5])
        made["kernel"] = nnx.Param(jnp.ones((8, 8)), out_sharding=("data", None))
        return nnx.Dict(made)

    model = nnx.sharding.init(make, mesh_of(kind, data=2))
    for name, value in host_values().items():
        found, same = jax.tree.leaves(model[name].get_value()), jax.tree.leaves(value)
        for one, two in zip(found, same, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(two), strict=True)
    assert model.attribute.tolist() == [2**40 + 5]
    assert model.kernel.sharding.shard_shape((8, 8)) == (4, 8)
    assert isinstance(model.narrow.get_value(), jax.Array)


# --------------------------------------------------------------------------- the report


def test_bytes_per_device_are_those_of_the_parts():
    mesh = mesh_of(a=2, b=4)
    divided = jax.device_put(jnp.zeros((8, 4)), NamedSharding(mesh, P("b", None)))
    copied = jax.device_put(jnp.zeros(3, jnp.int8), NamedSharding(mesh, P()))
    single = jax.device_put(jnp.zeros(5), jax.devices()[3])
    report = nnx.sharding.report({"x": [divided, copied], "y": nnx.Param(single)})
    rows = {row.path: (row.local_shape, row.local_bytes) for row in report.rows}
    assert rows == {"x[0]": ((2, 4), 32), "x[1]": ((3,), 3), "y": ((5,), 20)}
    assert report.num_bytes == 128 + 3 + 20
    assert report.bytes_per_device == 32 + 3 + 20
    held = dict.fromkeys(jax.devices(), 0)
    for array in (divided, copied, single):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert max(held.values()) == report.bytes_per_device


def test_abstract_models_and_random_keys_are_listed():
    mesh = mesh_of(model=4)

    def make():
        metadata = {"out_sharding": (None, "model")}
        linear = nnx.Linear(2, 8, kernel_metadata=metadata, rngs=nnx.Rngs(0))
        return nnx.Sequential(linear, nnx.Dropout(0.5, rngs=nnx.Rngs(0)))

    _, state = nnx.get_abstract_model(make, mesh)
    abstract = nnx.sharding.report(state)
    made = nnx.sharding.report(nnx.sharding.init(make, mesh))
    assert abstract.bytes_per_device == made.bytes_per_device
    assert "layers[0].kernel" in str(made) and "(None, 'model')" in str(made)
    assert "key<fry>[]" in str(made)


def test_bare_arrays_in_containers_are_made_too():
    def make():
        model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
        model.sizes = nnx.data([jnp.arange(2.0), {"x": (jnp.zeros(3),)}])
        return model

    mesh = mesh_of("Auto", data=2)
    graphdef, state = nnx.get_abstract_model(make, mesh)
    assert graphdef == nnx.graphdef(make())
    assert state["sizes"][1]["x"][0].sharding.is_fully_replicated
    sizes = nnx.sharding.init(make, mesh).sizes
    assert sizes[0].tolist() == [0.0, 1.0] and sizes[1]["x"][0].shape == (3,)


def test_a_shared_array_counts_once():
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert nnx.sharding.report([linear, linear]).num_bytes == 24


def test_a_picture_is_drawn_of_an_array_by_path(capsys):
    report = nnx.sharding.report(nnx.Linear(2, 4, rngs=nnx.Rngs(0)))
    report.draw("kernel")
    assert "CPU 0" in capsys.readouterr().out
    with pytest.raises(KeyError, match="no array at 'weight': bias, kernel"):
        report.draw("weight")


# -------------------------------------------------------------- arrays of all processes


def sharding_of(kind, spec):
    return jax.NamedSharding(mesh_of(kind, data=2, model=4), spec)


@KINDS
def test_rows_are_divided_among_the_devices(kind):
    batch = {"x": np.arange(32.0).reshape(16, 2), "y": [np.arange(8)]}
    placed = nnx.sharding.global_batch(batch, sharding_of(kind, P(("data", "model"))))
    assert placed["x"].sharding.shard_shape((16, 2)) == (2, 2)
    np.testing.assert_array_equal(placed["x"], batch["x"])
    np.testing.assert_array_equal(placed["y"][0], batch["y"][0])


@tables.cases(
    "batch, words",
    ({"x": np.ones((7, 3))}, r"x has 7 rows .* its 2 parts of the axis data"),
    ([np.ones(8), {"y": np.ones(3)}], r"\[1\].y has 3 rows"),
    (np.ones(3), "the batch has 3 rows in this process, not a multiple of its 2"),
    (np.float32(1), r"the batch has the shape \(\), but .* for 1 axes"),
    ({"s": "text", "x": np.ones(3)}, r"s has the dtype <U4.*\n  x has 3 rows"),
    ({"n": [None, object()]}, r"n\[1\] has the dtype object"),
    ({"k": jax.random.split(jax.random.key(0), 3)}, "k has 3 rows"),
    ({"k": jax.random.key(0)}, r"k has the shape \(\)"),
)
def test_rows_that_can_not_be_divided_are_named(batch, words):
    with pytest.raises(ValueError, match=words):
        nnx.sharding.global_batch(batch, sharding_of("Auto", P("data")))


@KINDS
def test_metrics_and_models_are_read_whole(kind):
    batch = nnx.sharding.global_batch(np.arange(8.0), sharding_of(kind, P("model")))
    parts = {"loss": nnx.metrics.Average(), "spread": nnx.metrics.Welford()}
    metric = nnx.metrics.MultiMetric(**parts)
    nnx.jit(lambda metric, x: metric.update(values=x))(metric, batch)
    found = nnx.sharding.fetch(metric.compute())
    assert found["loss"].item() == 3.5 and isinstance(found["loss"], np.ndarray)
    np.testing.assert_allclose(found["spread"].standard_deviation, np.arange(8.0).std())
    np.testing.assert_array_equal(nnx.sharding.fetch(batch), np.arange(8.0))


@pytest.mark.parametrize("shape", [(4, 6), (4, 7, 1), (3, 8), (4,)])
def test_all_axes_of_the_sharding_are_checked(shape):
    sharding = sharding_of("Auto", P("data", "model"))
    with pytest.raises(ValueError, match="x has .*axis 1 |x has 3 rows|for 2 axes"):
        nnx.sharding.global_batch({"x": np.ones(shape)}, sharding)
    placed = nnx.sharding.global_batch({"x": np.ones((4, 8, 3))}, sharding)["x"]
    assert placed.sharding.shard_shape(placed.shape) == (2, 2, 3)


@KINDS
@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_random_keys_are_rows_too(kind, implementation):
    keys = jax.random.split(jax.random.key(0, impl=implementation), 8)
    placed = nnx.sharding.global_batch({"k": keys}, sharding_of(kind, P("model")))["k"]
    assert placed.sharding.shard_shape((8,)) == (2,) and placed.dtype == keys.dtype
    assert (nnx.sharding.fetch(placed) == keys).all()


def test_what_is_no_array_is_fetched_as_it_is():
    thing = object()
    tree = {"loss": jnp.ones(2), "name": "a", "n": 3, "none": None, "thing": thing}
    tree |= {"flag": True, "half": jnp.ones(1, jnp.bfloat16), "key": jax.random.key(0)}
    found = nnx.sharding.fetch(tree)
    assert found["name"] == "a" and found["thing"] is thing and found["none"] is None
    for name in ("loss", "n", "flag", "half"):
        assert isinstance(found[name], np.ndarray), name
    assert found["key"] == tree["key"] and found["half"].dtype == jnp.bfloat16


# ------------------------------------------------------ values placed inside of a model


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ALIKE = pytest.mark.parametrize("kinds", [(AUTO, AUTO), (EXPLICIT, EXPLICIT)], ids=str)
ALL_KINDS = tables.cases("kinds", (AUTO, AUTO), (EXPLICIT, EXPLICIT), (AUTO, EXPLICIT))
X = np.arange(32, dtype=np.float32).reshape(8, 4)


def two_axes(*kinds):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds)


@pytest.mark.parametrize("compile", [lambda f: f, jax.jit, nnx.jit])
@ALL_KINDS
def test_values_are_kept_and_lie_by_rules_and_mesh_axes(compile, kinds):
    def f(x):
        place = nnx.sharding.constrain
        both = place({"a": x, "b": [2 * x]}, ("batch", "mlp"))
        return both, place(x, ("embed", "model")), place(x, (("data", "mlp"),))

    with jax.set_mesh(two_axes(*kinds)), nnx.logical_axis_rules(RULES):
        both, second, third = compile(f)(X)
    assert both["a"].sharding.shard_shape(X.shape) == (4, 1)
    assert both["b"][0].sharding.shard_shape(X.shape) == (4, 1)
    assert second.sharding.shard_shape(X.shape) == (8, 1)
    assert third.sharding.shard_shape(X.shape) == (1, 4)
    for found, factor in ((both["a"], 1), (both["b"][0], 2), (second, 1), (third, 1)):
        np.testing.assert_array_equal(found, factor * X)


@ALIKE
def test_gradients_pass_backwards_and_are_placed_alike(kinds):
    def loss(x):
        return jnp.sum(nnx.sharding.constrain(x, ("batch", "mlp")) ** 2)

    with jax.set_mesh(two_axes(*kinds)), nnx.logical_axis_rules(RULES):
        x = nnx.sharding.constrain(X, ("batch", None))
        gradient = jax.jit(jax.grad(loss))(x)
        text = jax.jit(jax.grad(loss)).lower(x).as_text()
    np.testing.assert_array_equal(gradient, 2 * X)
    assert '[{"data"}, {"model"}]' in text


def test_without_a_mesh_nothing_is_done():
    x = jnp.ones(3)
    assert nnx.sharding.constrain(x, ("anything", "else")) is x


@pytest.mark.parametrize("compile", [jax.jit, nnx.jit])
def test_a_compiled_function_follows_the_rules_in_force(compile):
    f = compile(lambda x: nnx.sharding.constrain(x, ("batch",)))
    traces = []
    counted = compile(lambda x: (traces.append(0), f(x))[1])
    with jax.set_mesh(two_axes(AUTO, AUTO)):
        for axis in ("data", "model", None, "data", "model"):
            with nnx.logical_axis_rules([["batch", axis]]):
                assert counted(X).sharding.is_equivalent_to(
                    jax.NamedSharding(two_axes(AUTO, AUTO), P(axis)), 2
                )
    assert len(traces) == 3


def test_axes_of_a_shard_map_are_left_out():
    @jax.shard_map(
        mesh=two_axes(AUTO, AUTO),
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    def f(x):
        return 2 * nnx.sharding.constrain(x, ("batch", "mlp"))

    with jax.set_mesh(two_axes(AUTO, AUTO)), nnx.logical_axis_rules(RULES):
        found = jax.jit(f)(X)
    np.testing.assert_array_equal(found, 2 * X)
    assert found.sharding.shard_shape(X.shape) == (4, 1)


def test_what_does_not_fit_is_refused_with_its_path():
    """What else can be wrong is in `test_all_annotations_that_do_not_fit_are_named`."""
    told = "axis 0 ('batch') has size 7", "by 2 devices (axis data of the mesh)"
    told += "at x[0]", "array of shape (7, 4)", "axes of the mesh: 'data' of 2, 'model'"
    with jax.set_mesh(two_axes(AUTO, AUTO)), nnx.logical_axis_rules(RULES):
        with comparisons.raises(ValueError, *told, "rules in force: 'embed' -> None"):
            nnx.sharding.constrain({"x": [jnp.ones((7, 4))]}, ("batch",))


def test_a_string_is_refused():
    with jax.set_mesh(two_axes(AUTO, AUTO)), pytest.raises(TypeError, match="'data',"):
        nnx.sharding.constrain(X, "data")
