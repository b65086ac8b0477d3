"""EMA: averages in Variables of their own, models that hold them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx


def dense():
    return nnx.Dict(
        kernel=nnx.Param(jnp.array([1.0, 2.0]), tag="kernel"),
        mean=nnx.BatchStat(jnp.array([5.0])),
    )


def test_attributes_stand_in_reading_order():
    ema = nnx.EMA(dense(), 0.5, only=nnx.Param)
    names = [name for name in vars(ema) if not name.startswith("_")]
    assert names == ["graph", "decay", "filter", "params"]
    assert ema.filter is nnx.Param and ema.decay == 0.5


def test_averages_are_copies_of_the_same_type_and_metadata():
    model = dense()
    ema = nnx.EMA(model, 0.9)
    assert isinstance(ema.params, nnx.State)
    for name, kind in (("kernel", nnx.Param), ("mean", nnx.BatchStat)):
        average = ema.params[name]
        assert type(average) is kind and average is not model[name]
        assert average.get_metadata() == model[name].get_metadata()
        pointers = [v[...].unsafe_buffer_pointer() for v in (average, model[name])]
        assert pointers[0] != pointers[1]


def test_updates_against_numpy():
    model, decay = dense(), 0.75
    ema = nnx.EMA(model, decay, only=nnx.Param)
    expected = np.array([1.0, 2.0])
    for step in range(1, 5):
        model.kernel[...] = jnp.array([step, -step], jnp.float32)
        expected = decay * expected + (1 - decay) * np.array([step, -step])
        assert ema.update(model) is None
    np.testing.assert_allclose(ema.params["kernel"][...], expected, rtol=1e-6)


def test_updates_may_be_states_and_pure_dicts():
    model = dense()
    for updates in (
        nnx.state(model),
        nnx.to_pure_dict(nnx.state(model)),
        nnx.as_pure(nnx.state(model)),
    ):
        ema = nnx.EMA(jax.tree.map(jnp.zeros_like, model), 0.5)
        average = ema.params["kernel"]
        ema.update(updates)
        assert ema.params["kernel"] is average
        np.testing.assert_array_equal(average[...], [0.5, 1.0])


def test_bare_arrays_are_refused():
    model = nnx.Dict(a=nnx.Dict(raw=jnp.ones(2)))
    with pytest.raises(TypeError, match="EMA only supports Variable leaves") as caught:
        nnx.EMA(model, 0.9)
    message = str(caught.value)
    assert "ArrayImpl" in message and "['a']['raw']" in message and "`only`" in message


def test_other_paths_are_refused_and_nothing_changes():
    ema = nnx.EMA(dense(), 0.5)
    with pytest.raises(ValueError, match="mean"):
        ema.update({"kernel": jnp.zeros(2)})
    np.testing.assert_array_equal(ema.params["kernel"][...], [1.0, 2.0])


def test_integers_and_random_keys_take_the_newest_value():
    model = nnx.Dict(
        count=nnx.Variable(jnp.array(3)), key=nnx.Variable(jax.random.key(0))
    )
    ema = nnx.EMA(model, 0.9)
    model.count[...], model.key[...] = jnp.array(4), jax.random.key(1)
    ema.update(model)
    assert ema.params["count"][...] == 4
    assert ema.params["key"][...] == jax.random.key(1)


def test_models_with_random_streams_can_be_followed():
    model = nnx.Dict(rngs=nnx.Rngs(0), kernel=nnx.Param(jnp.ones(2)))
    ema = nnx.EMA(model, 0.9)
    model.rngs()
    ema.update(model)
    assert ema.apply_to(model).rngs() == model.rngs()


def test_half_precision_averages_are_computed_in_float32():
    ema = nnx.EMA([nnx.Param(jnp.array(256.0, jnp.bfloat16))], 0.999)
    ema.update([nnx.Param(jnp.array(256.0, jnp.bfloat16))])
    # 0.999 in bfloat16 is 1: the average would grow by itself.
    assert ema.params[0][...] == 256.0 and ema.params[0][...].dtype == jnp.bfloat16


def test_pytree_values_are_averaged():
    ema = nnx.EMA([nnx.Param({"a": jnp.zeros(2)})], 0.5)
    ema.update([nnx.Param({"a": jnp.ones(2)})])
    np.testing.assert_array_equal(ema.params[0].get_value()["a"], [0.5, 0.5])


def test_apply_to_shares_averages_and_what_is_not_followed():
    model = nnx.Dict(block=dense())
    ema = nnx.EMA(model, 0.5, only=nnx.Param)
    averaged = ema.apply_to(model)
    assert type(averaged) is type(model) and averaged.block is not model.block
    assert averaged.block.kernel is ema.params["block"]["kernel"]
    assert averaged.block.kernel is ema.params.block.kernel
    assert averaged.block.mean is model.block.mean
    ema.update({"block": {"kernel": nnx.Param(jnp.array([3.0, 4.0]))}})
    np.testing.assert_array_equal(averaged.block.kernel[...], [2.0, 3.0])


def test_apply_to_another_structure_is_refused():
    ema = nnx.EMA(dense(), 0.5)
    with pytest.raises(ValueError, match="lacks Variables") as caught:
        ema.apply_to(nnx.Dict(kernel=nnx.Param(jnp.ones(2))))
    assert "mean" in str(caught.value)


def test_sharing_is_kept_in_graph_mode_and_refused_in_tree_mode():
    weight = nnx.Param(jnp.ones(2))
    model = nnx.Dict(a=weight, b=weight)
    averaged = nnx.EMA(model, 0.5, graph=True).apply_to(model)
    assert averaged.a is averaged.b
    with pytest.raises(ValueError, match="found at paths"):
        nnx.EMA(model, 0.5, graph=False)


def test_update_inside_jit_changes_the_callers_averages():
    model = dense()
    ema = nnx.EMA(model, 0.5)
    nnx.jit(lambda model, ema: ema.update(jax.tree.map(jnp.zeros_like, model)))(
        model, ema
    )
    np.testing.assert_array_equal(ema.params["kernel"][...], [0.5, 1.0])


def test_copies_have_the_sharding_of_the_model():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        kernel = nnx.Param(jnp.ones(4), out_sharding=("x",))
    ema = nnx.EMA([kernel], 0.5)
    ema.update([kernel])
    assert ema.params[0].sharding == kernel.sharding


@pytest.mark.peers
def test_averages_are_those_of_the_peer():
    flax_nnx = pytest.importorskip("flax.nnx")

    def follow(library):
        kernel = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
        model = library.Dict(kernel=library.Param(jnp.array(kernel)))
        ema = library.EMA(model, 0.9)
        for _ in range(3):
            model.kernel[...] = jnp.sin(model.kernel[...] * 7)
            ema.update(library.as_pure(library.state(model)))
        return ema.apply_to(model).kernel[...]

    np.testing.assert_allclose(follow(nnx), follow(flax_nnx), rtol=1e-6)
