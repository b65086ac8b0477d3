"""What holds for every layer: one table, one short test per rule; activations.

Attributes, signatures and initializers are a layer's own. The other laws are those of a
family: `make test` runs them for one layer of each, `make test-all` for all.
"""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import catalog
from tests.catalog import every_family, every_layer

every_layer_of_the_peer = pytest.mark.parametrize(
    "row", [row for row in catalog.LAYERS if not row.is_ours], ids=lambda row: row.name
)


@pytest.fixture
def same_peer(peer, row):
    """The peer, if its layer of this row is the one that we follow."""
    pytest.importorskip("flax", minversion=row.since)
    return peer


def attributes(layer):
    return [name for name in vars(layer) if not name.startswith("_pytree__")]


def check_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@every_layer
def test_attributes_are_set_in_the_order_of_the_contract_and_rngs_not_kept(row):
    rngs = nnx.Rngs(0)
    layer = row.make(rngs=rngs) if row.has_rngs else row.make()
    assert attributes(layer) == row.attributes.split()
    assert all(node is not rngs for _, node in nnx.iter_graph(layer))


LISTS = [
    row
    for row in catalog.LAYERS
    if len(row.shapes) == 1 and row.name not in ("SpectralNorm", "WeightNorm")
]


@catalog.of_families(LISTS)
def test_what_jax_makes_an_array_of_is_an_input(row):
    (x,) = row.inputs()
    expected = row(row.make(), x)
    for given in (np.asarray(x), np.asarray(x).tolist(), nnx.Param(x)):
        check_same(row(row.make(), given), expected)


@every_layer
def test_layers_that_differ_in_initializers_have_equal_graphdefs(row):
    kept = "negative_slope_init", "carry_init"  # are no initializers, or attributes
    kept += ("scale_init",) * (row.name == "WeightNorm")
    names = {key for key in row.parameters() if key.endswith("_init")} - {*kept}
    options = dict.fromkeys(names, nnx.initializers.ones)
    layers = [nnx.eval_shape(lambda o=o: row.make(**o)) for o in ({}, options)]
    assert nnx.graphdef(layers[0]) == nnx.graphdef(layers[1])


@every_family
def test_abstract_layers_become_callable_by_writing_arrays(row):
    abstract = jax.eval_shape(row.make)
    concrete = row.make()
    for (path, variable), (_, value) in zip(
        nnx.to_flat_state(nnx.state(abstract)),
        nnx.to_flat_state(nnx.state(concrete)),
        strict=True,
    ):
        assert variable.shape == value.shape, path
        variable.set_value(value[...])
    x = row.inputs()
    check_same(row(abstract, *x), row(concrete, *x))


@every_family
def test_construction_works_inside_jit_and_vmap(row):
    expected = jax.tree.leaves(nnx.state(row.make(), nnx.Param))
    jitted = jax.tree.leaves(nnx.state(nnx.jit(row.make)(), nnx.Param))
    for a, b in zip(expected, jitted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    if row.has_rngs:
        keys = jax.random.split(jax.random.key(0), 3)
        layers = jax.eval_shape(jax.vmap(lambda key: row.make(seed=key)), keys)
        stacked = jax.tree.leaves(nnx.state(layers, nnx.Param))
        assert [x.shape for x in stacked] == [(3, *x.shape) for x in expected]


@every_family
def test_layers_can_be_pickled(row):
    layer, x = row.make(), row.inputs()
    check_same(row(pickle.loads(pickle.dumps(layer)), *x), row(layer, *x))


# A layer, and the attribute that says its mode.
VIEWS = [
    ("Dropout", "deterministic"),
    ("BatchNorm", "use_running_average"),
    ("MultiHeadAttention", "deterministic"),
]


@pytest.mark.parametrize(("name", "flag"), VIEWS)
def test_modes_are_set_by_views_and_methods(name, flag):
    layer = catalog.BY_NAME[name].make(**{flag: False})
    view = nnx.view(layer, **{flag: True})
    assert (getattr(view, flag), getattr(layer, flag)) == (True, False)
    states = (jax.tree.leaves(nnx.state(m)) for m in (view, layer))
    assert all(a is b for a, b in zip(*states, strict=True))
    layer.eval()
    assert getattr(layer, flag) is True
    layer.train()
    assert getattr(layer, flag) is False
    assert nnx.view_info(layer).startswith(f"{name}:\n  {flag}: bool | None = None\n")


@pytest.mark.parametrize("name", ["Dropout", "MultiHeadAttention"])
def test_a_closed_over_layer_can_not_draw(name):
    row = catalog.BY_NAME[name]
    layer = row.make()
    with pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate RngCount"):
        jax.jit(lambda *x: row(layer, *x))(*row.inputs())


@pytest.mark.peers
@every_layer_of_the_peer
def test_attributes_and_state_are_those_of_the_peer(same_peer, row):
    ours, theirs = row.make(), row.make(same_peer)
    assert attributes(ours) == attributes(theirs)
    a = dict(nnx.to_flat_state(nnx.state(ours)))
    b = dict(same_peer.to_flat_state(same_peer.state(theirs)))
    assert list(a) == list(b)
    for path in a:
        assert type(a[path]).__name__ == type(b[path]).__name__
        np.testing.assert_array_equal(*map(catalog.raw, (a[path][...], b[path][...])))


@pytest.mark.peers
@every_layer_of_the_peer
def test_signatures_are_those_of_the_peer(same_peer, row):
    ours, theirs = row.parameters(), row.parameters(same_peer)
    assert list(ours) == list(theirs)
    for key in ours:
        a, b = ours[key], theirs[key]
        assert a.kind == b.kind
        is_plain = isinstance(a.default, int | float | str | tuple | None)
        assert not is_plain or a.default == b.default


# -------------------------------------------------------------------------- activations


INITIALIZERS = {n for n in dir(jax.nn.initializers) if not n.startswith("_")}


@pytest.mark.parametrize(
    "name", sorted(set(nnx.nn.activations.__all__) - {"PReLU", "tanh"})
)
def test_activations_are_those_of_jax(name):
    assert getattr(nnx, name) is getattr(jax.nn, name)


@pytest.mark.parametrize("name", sorted(INITIALIZERS - {"Initializer"}))
def test_initializers_are_those_of_jax(name):
    assert getattr(nnx.initializers, name) is getattr(jax.nn.initializers, name)
    assert name in nnx.initializers.__all__


def test_tanh_is_that_of_jax_numpy_and_synonyms_are_one_object():
    assert nnx.tanh is jnp.tanh and nnx.swish is nnx.silu
    assert nnx.hard_swish is nnx.hard_silu


def test_prelu_scales_what_is_negative():
    y = nnx.PReLU(0.25)(jnp.array([-8.0, -0.0, 3.0]))
    np.testing.assert_array_equal(y, [-2.0, 0.0, 3.0])


def test_prelu_slope_is_a_scalar_param_of_param_dtype():
    metadata = {"negative_slope_metadata": {"tag": "slope"}}
    slope = nnx.PReLU(0.5, param_dtype=jnp.bfloat16, **metadata).negative_slope
    assert (slope.shape, slope[...].dtype, slope.tag) == ((), jnp.bfloat16, "slope")


def test_prelu_takes_no_rngs_and_no_text():
    with pytest.raises(TypeError, match="rngs"):
        nnx.PReLU(rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="not a valid JAX array type"):
        nnx.PReLU()("x")


def test_a_hook_of_prelu_decides_the_dtype():
    layer = nnx.PReLU(dtype=jnp.float16, promote_dtype=lambda args, *, dtype: args)
    assert layer(jnp.ones(2, jnp.float16)).dtype == jnp.float32


def test_prelu_is_a_pytree_for_jax_grad():
    layer = nnx.PReLU(0.25)
    x = jnp.array([-3.0, 2.0, -1.0])
    value, grads = jax.jit(jax.value_and_grad(lambda m: m(x).sum()))(layer)
    assert value == 1.0 and grads.negative_slope[...] == -4.0
