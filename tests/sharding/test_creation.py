"""Models made on a mesh: no device ever holds a whole array that is to be split.

The report says where arrays are, and what a device holds.
"""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import graftree as nnx

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def mesh_of(kind, **sizes):
    return jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=(kind,) * len(sizes))


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
        assert path == other
        assert isinstance(found[...].sharding, NamedSharding)
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
    mesh = mesh_of(AxisType.Auto, model=8)
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


@KINDS
@pytest.mark.parametrize(
    ("names", "size", "words"),
    [
        (("embed", "mlp"), 8, "'mlp' means 'mlp', no axis of the mesh"),
        (("embed", "wrong"), 8, "'wrong' means 'tensor', no axis of the mesh"),
        (("embed", None), 6, r"axis 0 \('embed'\) has the size 6, which 4 devices"),
        (("embed", "model"), 8, "'embed' and 'model' both stand for the axis 'model'"),
        (("embed", None, None), 8, r"3 names .* for the shape \(8, 8\)"),
    ],
)
def test_all_annotations_that_do_not_fit_are_named(kind, names, size, words):
    mesh = mesh_of(kind, data=2, model=4)
    rules = [("embed", "model"), ("wrong", "tensor")]
    with pytest.raises(ValueError, match=words) as caught:
        nnx.sharding.init(lambda: make_blocks(names, size), mesh, rules)
    text = str(caught.value)
    assert "blocks[0].kernel: " in text and "blocks[1].kernel: " in text
    assert "axes of the mesh: 'data' of 2, 'model' of 4" in text
    assert "rules in force: 'embed' -> 'model', 'wrong' -> 'tensor'" in text


def test_errors_of_the_function_pass_through():
    def make():
        raise ValueError("own")

    with pytest.raises(ValueError, match="^own$"):
        nnx.sharding.init(make, mesh_of(AxisType.Auto, model=8))


@pytest.mark.parametrize("rules", [{"embed": "model"}, ["embed"], [("a", "b", "c")]])
def test_rules_are_pairs(rules):
    with pytest.raises(TypeError, match="pairs of a name and an axis of the mesh"):
        nnx.sharding.init(lambda: None, mesh_of(AxisType.Auto, model=8), rules)


def test_no_device_ever_holds_more_than_its_part_of_a_model_and_its_moments():
    """Live bytes afterwards, and those of the program that makes all of it."""
    mesh = mesh_of(AxisType.Auto, data=2, model=4)
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
    mesh = mesh_of(AxisType.Auto, a=2, b=4)
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
    mesh = mesh_of(AxisType.Auto, model=4)

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


def test_a_shared_array_counts_once():
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert nnx.sharding.report([linear, linear]).num_bytes == 24


def test_a_picture_is_drawn_of_an_array_by_path(capsys):
    report = nnx.sharding.report(nnx.Linear(2, 4, rngs=nnx.Rngs(0)))
    report.draw("kernel")
    assert "CPU 0" in capsys.readouterr().out
    with pytest.raises(KeyError, match="no array at 'weight': bias, kernel"):
        report.draw("weight")
