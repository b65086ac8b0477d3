"""What holds for every layer: one table, one short test per rule."""

import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

# Name, arguments, shape of the inputs, and the attributes in their order.
TABLE = {
    "Linear": (
        (3, 4),
        (2, 3),
        "kernel bias in_features out_features use_bias dtype param_dtype precision "
        "dot_general promote_dtype preferred_element_type",
    ),
    "Conv": (
        (3, 4, (3,)),
        (2, 5, 3),
        "kernel_shape kernel bias in_features out_features kernel_size strides padding "
        "input_dilation kernel_dilation feature_group_count use_bias mask dtype "
        "param_dtype precision conv_general_dilated promote_dtype "
        "preferred_element_type",
    ),
    "LinearGeneral": (
        ((2, 3), (4, 5)),
        (7, 2, 3),
        "in_features out_features axis batch_axis use_bias dtype param_dtype precision "
        "dot_general dot_general_cls promote_dtype preferred_element_type kernel bias",
    ),
    "Einsum": (
        ("...a,ab->...b", (3, 4), (4,)),
        (2, 3),
        "kernel bias einsum_str kernel_shape bias_shape dtype param_dtype precision "
        "promote_dtype einsum_op preferred_element_type",
    ),
    "ConvTranspose": (
        (3, 4, (3,), 2),
        (2, 5, 3),
        "kernel_size in_features out_features strides padding kernel_dilation use_bias "
        "mask dtype param_dtype precision transpose_kernel promote_dtype "
        "preferred_element_type kernel_shape kernel bias",
    ),
    "Embed": (
        (6, 3),
        (2, 4),
        "embedding num_embeddings features dtype param_dtype promote_dtype",
    ),
    "PReLU": ((), (2, 3), "negative_slope dtype param_dtype promote_dtype"),
    "BatchNorm": (
        (3,),
        (4, 3),
        "mean var scale bias num_features use_running_average axis momentum epsilon "
        "dtype param_dtype use_bias use_scale axis_name axis_index_groups "
        "use_fast_variance promote_dtype",
    ),
    "LayerNorm": (
        (3,),
        (4, 3),
        "scale bias num_features epsilon dtype param_dtype use_bias use_scale "
        "reduction_axes feature_axes axis_name axis_index_groups use_fast_variance "
        "promote_dtype",
    ),
    "RMSNorm": (
        (3,),
        (4, 3),
        "scale num_features epsilon dtype param_dtype use_scale reduction_axes "
        "feature_axes axis_name axis_index_groups use_fast_variance promote_dtype",
    ),
    "GroupNorm": (
        (4, 2),
        (2, 5, 4),
        "feature_axis num_groups group_size scale bias epsilon dtype param_dtype "
        "use_bias use_scale reduction_axes axis_name axis_index_groups "
        "use_fast_variance promote_dtype",
    ),
    "InstanceNorm": (
        (3,),
        (2, 5, 3),
        "scale bias num_features epsilon dtype param_dtype use_bias use_scale "
        "feature_axes axis_name axis_index_groups use_fast_variance promote_dtype",
    ),
    "Dropout": (
        (0.5,),
        (2, 3),
        "rate broadcast_dims deterministic rng_collection rngs",
    ),
}


def make(name, library=nnx, seed=0, **options):
    """Makes the layer of a row."""
    if name != "PReLU":
        options["rngs"] = library.Rngs(seed)
    if name == "LinearGeneral":
        options["axis"] = (-2, -1)
    return getattr(library, name)(*TABLE[name][0], **options)


def inputs_of(name):
    """Inputs for the layer of a row."""
    shape = TABLE[name][1]
    if name == "Embed":
        return jnp.arange(np.prod(shape)).reshape(shape) % 6
    return jax.random.normal(jax.random.key(1), shape)


def attributes(layer):
    return [name for name in vars(layer) if not name.startswith("_pytree__")]


def raw(x):
    """The numbers of an array, also of random keys."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


every_layer = pytest.mark.parametrize("name", TABLE)


@every_layer
def test_attributes_are_set_in_the_order_of_the_contract(name):
    assert attributes(make(name)) == TABLE[name][2].split()


@every_layer
def test_signature_shows_the_arguments(name):
    parameters = inspect.signature(getattr(nnx, name)).parameters
    assert set(parameters) & set(attributes(make(name)))
    if name not in ("PReLU", "Dropout"):
        assert parameters["rngs"].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters["rngs"].default is inspect.Parameter.empty


@every_layer
def test_rngs_are_not_kept(name):
    rngs = nnx.Rngs(0)
    layer = make(name)
    assert all(value is not rngs for value in vars(layer).values())


@every_layer
def test_jit_equals_eager(name):
    x = inputs_of(name)
    eager = make(name)(x)
    layer = make(name)
    np.testing.assert_allclose(jax.jit(lambda m, x: m(x))(layer, x), eager, rtol=1e-5)
    np.testing.assert_allclose(
        nnx.jit(lambda m, x: m(x))(layer, x), eager, rtol=1e-5, atol=1e-6
    )


@every_layer
def test_second_call_does_not_trace_again(name):
    traces = []

    @nnx.jit
    def call(layer, x):
        traces.append(1)
        return layer(x)

    layer, x = make(name), inputs_of(name)
    for _ in range(3):
        call(layer, x)
    assert len(traces) == 1


@every_layer
def test_layers_that_differ_in_initializers_have_equal_graphdefs(name):
    options = {
        key: nnx.initializers.ones
        for key in inspect.signature(getattr(nnx, name)).parameters
        if key.endswith("_init") and key != "negative_slope_init"
    }
    assert nnx.graphdef(make(name)) == nnx.graphdef(make(name, **options))


@every_layer
def test_abstract_layers_become_callable_by_writing_arrays(name):
    abstract = jax.eval_shape(lambda: make(name))
    concrete = make(name)
    for (path, variable), (_, value) in zip(
        nnx.to_flat_state(nnx.state(abstract)),
        nnx.to_flat_state(nnx.state(concrete)),
        strict=True,
    ):
        assert variable.shape == value.shape, path
        variable.set_value(value[...])
    x = inputs_of(name)
    np.testing.assert_array_equal(abstract(x), concrete(x))


@every_layer
def test_construction_works_inside_jit_and_vmap(name):
    expected = jax.tree.leaves(nnx.state(make(name), nnx.Param))
    jitted = jax.tree.leaves(nnx.state(nnx.jit(lambda: make(name))(), nnx.Param))
    for a, b in zip(expected, jitted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    if name == "PReLU":
        return

    def make_with(key):
        return make(name, seed=key)

    layers = jax.vmap(make_with)(jax.random.split(jax.random.key(0), 3))
    stacked = jax.tree.leaves(nnx.state(layers, nnx.Param))
    for a, b in zip(expected, stacked, strict=True):
        assert b.shape == (3, *a.shape)


@every_layer
def test_layers_can_be_pickled(name):
    layer, x = make(name), inputs_of(name)
    copy = pickle.loads(pickle.dumps(layer))
    np.testing.assert_array_equal(copy(x), layer(x))


@every_layer
def test_gradients_reach_every_param(name):
    x = inputs_of(name)
    if name == "PReLU":
        x = -jnp.abs(x)
    grads = nnx.grad(lambda m: (m(x) ** 3).sum())(make(name))
    for leaf in jax.tree.leaves(grads):
        assert jnp.isfinite(leaf).all()
        assert (leaf != 0).any()


@every_layer
def test_ref_backed_layers_update_inside_plain_jit(name):
    layer = jax.tree.map(
        lambda variable: variable.copy(ref=True),
        make(name),
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
    plain, x = make(name), inputs_of(name)
    for _ in range(2):
        y = jax.jit(lambda m, x: m(x))(layer, x)
        np.testing.assert_allclose(y, plain(x), rtol=1e-5, atol=1e-6)
    after, expected = (dict(nnx.to_flat_state(nnx.state(m))) for m in (layer, plain))
    for path, variable in expected.items():
        a, b = raw(after[path][...]), raw(variable[...])
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.peers
@every_layer
def test_attributes_and_state_are_those_of_the_peer(peer, name):
    ours, theirs = make(name), make(name, peer)
    assert attributes(ours) == attributes(theirs)
    a = dict(nnx.to_flat_state(nnx.state(ours)))
    b = dict(peer.to_flat_state(peer.state(theirs)))
    assert list(a) == list(b)
    for path in a:
        assert type(a[path]).__name__ == type(b[path]).__name__
        np.testing.assert_array_equal(*map(raw, (a[path][...], b[path][...])))


@pytest.mark.peers
@every_layer
def test_signatures_are_those_of_the_peer(peer, name):
    ours = inspect.signature(getattr(nnx, name).__init__).parameters
    theirs = inspect.signature(getattr(peer, name).__init__).parameters
    assert list(ours) == list(theirs)
    for key in ours:
        a, b = ours[key], theirs[key]
        assert a.kind == b.kind
        is_plain = isinstance(a.default, int | float | str | tuple | None)
        assert not is_plain or a.default == b.default
