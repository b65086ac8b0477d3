"""Each layer trains with a batch that is spread over devices, as it does on one.

The table is layer x {Auto, Explicit} axes x {replicated, FSDP} parameters: a step of
training equals the one on a single device. On a mesh with Explicit axes the shardings
are part of the types, so what a layer brings along must be placed like its inputs.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import graftree as nnx
from tests import catalog, comparisons, meshes

DEVICES = 8
WIDE = {3: 8, 4: 16, 6: 32}  # sizes that eight devices can divide


def wide(x):
    """The same arguments with sizes that the devices can divide."""
    if isinstance(x, dict):
        return {key: wide(value) for key, value in x.items()}
    if isinstance(x, tuple):
        return tuple(map(wide, x))
    return WIDE.get(x, x) if type(x) is int else x


def with_batch(shape):
    """The shape with one sequence, image or vector for each device."""
    if isinstance(shape[0], tuple):
        return tuple(map(with_batch, shape))
    return (DEVICES, *shape[1:])


class WideLayer:
    """A row of the catalog, with sizes that the devices can divide."""

    def __init__(self, row):
        changes = {name: wide(getattr(row, name)) for name in ("arguments", "keywords")}
        shapes = tuple(map(with_batch, wide(row.shapes)))
        self.row = dataclasses.replace(
            row, shapes=shapes, bound=wide(row.bound), **changes
        )
        self.id = row.name

    def make(self):
        row = self.row
        inner = [WideLayer(catalog.BY_NAME[name]).make() for name in row.wraps]
        rngs = {"rngs": nnx.Rngs(0)} if row.has_rngs else {}
        return row.cls()(*inner, *row.arguments, **row.keywords, **rngs)

    def inputs(self):
        return self.row.inputs()

    def __call__(self, layer, *inputs):
        return self.row(layer, *inputs)


@dataclasses.dataclass
class Program:
    """A program of several layers, or of a layer with state."""

    id: str
    make_model: object
    call: object
    shapes: tuple
    bound: int | None = None

    def make(self):
        return self.make_model(nnx.Rngs(0))

    def inputs(self):
        return catalog.Layer("", (), self.shapes, bound=self.bound).inputs()

    def __call__(self, model, *inputs):
        return self.call(model, *inputs)


def stacked(rngs):
    return nnx.StackedRNN(
        nnx.LSTMCell,
        8,
        16,
        num_layers=2,
        bidirectional=True,
        dropout_rate=0.5,
        rngs=rngs,
    )


def with_lengths(model, x):
    lengths = jnp.arange(len(x)) % 3
    return model(x, seq_lengths=lengths, return_carry=True)


def decoding(model, x):
    for t in range(x.shape[1]):
        y = model(x[:, t : t + 1], decode=True)
    # JAX 0.12 has no gradient of `dynamic_update_slice` with Explicit axes.
    return jax.lax.stop_gradient(y)


def attention_with_cache(rngs):
    model = nnx.MultiHeadAttention(2, 8, normalize_qk=True, rngs=rngs)
    model.init_cache((DEVICES, 2, 8))
    return model


def cached(window):
    def make(rngs):
        cache = nnx.decoding.KeyValueCache(
            DEVICES, 8, kv_heads=2, head_dim=4, window=window
        )
        return nnx.Dict(qkv=nnx.LinearGeneral(8, (3, 2, 4), rngs=rngs), cache=cache)

    def call(model, x):
        outputs = []
        for steps in (slice(0, 3), slice(3, 4)):
            q, k, v = jnp.moveaxis(model.qkv(x[:, steps]), 2, 0)
            positions = jnp.broadcast_to(jnp.arange(4)[steps], q.shape[:2])
            outputs.append(
                nnx.decoding.attend(
                    q, k, v, positions, model.cache, sliding_window=window
                )
            )
        return outputs

    return Program(f"attend window={window}", make, call, ((DEVICES, 4, 8),))


def plain(model, *inputs):
    return model(*inputs)


PROGRAMS = [
    Program("StackedRNN of two directions", stacked, plain, ((8, 3, 8),)),
    Program(
        "RNN seq_lengths",
        lambda rngs: nnx.RNN(nnx.SimpleCell(8, 16, rngs=rngs), reverse=True),
        with_lengths,
        ((8, 3, 8),),
    ),
    Program("MultiHeadAttention decode", attention_with_cache, decoding, ((8, 2, 8),)),
    cached(None),
    cached(2),
    Program(
        "Embed.attend",
        lambda rngs: nnx.Embed(32, 8, rngs=rngs),
        lambda model, t: model.attend(model(t)),
        ((8, 4),),
        32,
    ),
    Program(
        "Dropout of whole channels",
        lambda rngs: nnx.Dropout(0.5, broadcast_dims=(1, 2), rngs=rngs),
        plain,
        ((8, 3, 3, 8),),
    ),
]
ROWS = [*map(WideLayer, catalog.LAYERS), *PROGRAMS]


class Model(nnx.Module):
    """A layer behind a parameter, so that the gradients of its inputs count."""

    def __init__(self, row):
        self.layer = row.make()
        self.gain = nnx.Param(jnp.ones(()))


def trained(row, place):
    """The loss, and the state after a step; each array placed by a function."""
    model = Model(row)
    for _, variable in nnx.to_flat_state(nnx.state(model)):
        variable.set_value(place(variable.get_value(), type(variable)))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    inputs = jax.tree.map(lambda x: place(x, None), row.inputs())

    @nnx.jit
    def step(model, optimizer, inputs):
        def loss_of(model):
            scaled = [
                x * model.gain if jnp.issubdtype(x.dtype, jnp.inexact) else x
                for x in jax.tree.leaves(inputs)
            ]
            scaled = jax.tree.unflatten(jax.tree.structure(inputs), scaled)
            outputs = row(model.layer, *scaled)
            return sum(jnp.mean(jnp.square(y)) for y in jax.tree.leaves(outputs))

        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    return [step(model, optimizer, inputs) for _ in range(2)], model


@functools.lru_cache(maxsize=4)  # the tests of a row follow each other
def on_one_device(name):
    """The losses and the state after the steps."""
    (row,) = [row for row in ROWS if row.id == name]
    losses, model = trained(row, lambda x, kind: x)
    return losses, catalog.state_of(model)


def placement(mesh, is_fsdp):
    """Puts the batch on the devices; parameters on all of them, or in parts."""

    def place(x, kind):
        spec = P()
        if kind is None:
            spec = P("data")
        elif is_fsdp and issubclass(kind, nnx.Param):
            size = max([n for n in x.shape if n % DEVICES == 0], default=None)
            if size is not None:
                axis = x.shape.index(size)
                spec = P(*(None,) * axis, "data")
        return jax.device_put(x, NamedSharding(mesh, spec))

    return place


WAYS = [
    pytest.param("Auto", False, id="Auto"),
    pytest.param("Explicit", False, id="Explicit"),
    pytest.param("Explicit", True, id="Explicit in set_mesh", marks=pytest.mark.long),
]


@pytest.mark.parametrize("is_fsdp", [False, True], ids=["replicated", "fsdp"])
@pytest.mark.parametrize(("kind", "is_set"), WAYS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_step_on_a_divided_batch_is_that_of_one_device(row, kind, is_set, is_fsdp):
    mesh = meshes.mesh_of(kind, data=DEVICES)
    context = jax.set_mesh(mesh) if is_set else contextlib.nullcontext()
    with context:
        losses, model = trained(row, placement(mesh, is_fsdp))
    expected_losses, expected = on_one_device(row.id)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    state = catalog.state_of(model)
    assert state.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(state[path], value, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------- single layers


def explicit(*spec):
    mesh = meshes.mesh_of("Explicit", data=4, model=2)
    return NamedSharding(mesh, P(*spec))


def spec_of(x):
    return jax.typeof(x).sharding.spec


@pytest.mark.parametrize("is_set", [False, True])
def test_what_is_divided_by_other_axes_of_the_mesh_stays_so(is_set):
    """Columns on one axis; for FSDP, rows on that of the batch, which are gathered."""
    layer = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    x = jnp.ones((8, 8))
    expected = layer(x)
    layer.kernel.set_value(jax.device_put(layer.kernel[...], explicit("data", "model")))
    layer.bias.set_value(jax.device_put(layer.bias[...], explicit("model")))
    x = jax.device_put(x, explicit("data"))
    context = jax.set_mesh(explicit().mesh) if is_set else contextlib.nullcontext()
    with context:
        y = nnx.jit(lambda layer, x: layer(x))(layer, x)
    assert spec_of(y) == P("data", "model")
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_gradients_lie_like_their_params():
    layer = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    layer.kernel.set_value(jax.device_put(layer.kernel[...], explicit(None, "data")))
    layer.bias.set_value(jax.device_put(layer.bias[...], explicit("data")))
    x = jax.device_put(jnp.ones((8, 8)), explicit("data"))
    grads = nnx.jit(nnx.grad(lambda layer, x: layer(x).sum()))(layer, x)
    assert spec_of(grads["kernel"][...]) == P(None, "data")
    assert spec_of(grads["bias"][...]) == P("data")


@pytest.mark.parametrize("table", [(), ("data",), (None, "data"), (None, "model")])
@pytest.mark.parametrize("rows", [1, 16])
def test_a_look_up_lies_like_its_indices(table, rows):
    layer = nnx.Embed(rows, 8, rngs=nnx.Rngs(0))
    indices = jnp.arange(32).reshape(8, 4) % 16
    expected = layer(indices)
    spec = table if rows > 1 else ()
    layer.embedding.set_value(jax.device_put(layer.embedding[...], explicit(*spec)))
    indices = jax.device_put(indices, explicit("data"))
    y = nnx.jit(lambda layer, x: layer(x))(layer, indices)
    last = "model" if "model" in spec else None
    assert spec_of(y) == P("data", None, last)
    np.testing.assert_array_equal(y, expected)


def test_a_look_up_in_rows_on_another_axis_needs_to_be_told():
    layer = nnx.Embed(16, 8, rngs=nnx.Rngs(0))
    value = jax.device_put(layer.embedding[...], explicit("model"))
    layer.embedding.set_value(value)
    indices = jax.device_put(jnp.arange(8), explicit("data"))
    call = nnx.jit(lambda layer, x, s: layer(x, out_sharding=s), static_argnums=2)
    with jax.set_mesh(explicit().mesh):
        with pytest.raises(Exception, match="out_sharding"):
            call(layer, indices, None)
        assert spec_of(call(layer, indices, P("data"))) == P("data", None)


def test_a_cache_keeps_its_place():
    """Else a compiled loop would refuse it, and each call would be another program."""
    layer = attention_with_cache(nnx.Rngs(0))
    x = jax.device_put(jnp.ones((8, 1, 8)), explicit("data"))
    cache = nnx.decoding.KeyValueCache(8, 4, kv_heads=2, head_dim=4)

    @nnx.jit
    def step(layer, cache, x):
        layer(x, decode=True)
        heads = x.reshape(8, 1, 2, 4)
        positions = jnp.zeros((8, 1), int)
        return nnx.decoding.attend(heads, heads, heads, positions, cache)

    with jax.set_mesh(explicit().mesh):
        y = step(layer, cache, x)
    assert spec_of(y)[0] == "data"
    for variable in (layer.cached_key, layer.cached_value, cache.key, cache.value):
        assert not any(spec_of(variable[...]))


def test_a_first_carry_that_is_given_is_divided_like_the_batch():
    rnn = nnx.RNN(nnx.GRUCell(8, 16, rngs=nnx.Rngs(0)), time_major=True)
    x = jax.device_put(jnp.ones((3, 8, 8)), explicit(None, "data"))

    @nnx.jit
    def run(rnn, carry, x):
        return rnn(x, initial_carry=carry, return_carry=True)

    carry, outputs = run(rnn, jnp.ones((8, 16)), x)
    assert spec_of(carry) == P("data", None)
    assert spec_of(outputs) == P(None, "data", None)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_that_a_mesh_must_be_set_is_told(is_jitted):
    """JAX 0.12 makes a zero without a mesh for the gradient of a gather."""
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    x = jax.device_put(jnp.ones((8, 8)), explicit("data"))
    labels = jax.device_put(jnp.arange(8) % 16, explicit("data"))

    def loss_of(model, x, labels):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(x), labels)
        return losses.mean()

    gradient = nnx.value_and_grad(loss_of)
    gradient = nnx.jit(gradient) if is_jitted else gradient
    if not (is_jitted and jax.__version_info__ < (0, 12)):  # which can do it
        with comparisons.raises(Exception, "with jax.set_mesh(mesh): ..."):
            gradient(model, x, labels)
    with jax.set_mesh(explicit().mesh):
        loss, _ = gradient(model, x, labels)
    expected = loss_of(model, jnp.ones((8, 8)), jnp.arange(8) % 16)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_errors_with_a_mesh_in_force_have_no_such_note():
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    x = jax.device_put(jnp.ones((8, 8)), explicit(None, "data"))
    model.kernel.set_value(jax.device_put(model.kernel[...], explicit("data")))
    with jax.set_mesh(explicit().mesh):
        with pytest.raises(Exception, match="out_sharding") as caught:
            nnx.jit(lambda model, x: model(x))(model, x)
    assert "set_mesh" not in "".join(caught.value.__notes__)


def test_one_device_has_no_operation_more():
    """As for hand-written functions of arrays."""
    layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    jaxpr = jax.make_jaxpr(lambda layer, x: layer(x))(layer, jnp.ones((2, 3)))
    names = [equation.primitive.name for equation in jaxpr.eqns]
    assert names == ["dot_general", "reshape", "add"]
    layer = nnx.Embed(4, 3, rngs=nnx.Rngs(0))
    ours = jax.make_jaxpr(lambda layer, x: layer(x))(layer, jnp.arange(2))
    plain = jax.make_jaxpr(lambda t, x: jnp.take(t, x, axis=0))
    assert str(ours) == str(plain(layer.embedding[...], jnp.arange(2)))
