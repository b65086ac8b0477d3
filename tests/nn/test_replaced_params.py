"""What follows from the dtype of a Param is asked when it is needed, and not kept.

A layer whose Params are replaced by arrays of another dtype is the layer that was made
in that dtype: its attributes, its results, its products, and what it makes beside.
"""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests import catalog, tables

HALF = jnp.bfloat16
WITH_PARAMS = [
    row
    for row in catalog.LAYERS
    if not row.builds and nnx.state(nnx.eval_shape(row.make), nnx.Param)
]
every_layer = pytest.mark.parametrize("row", WITH_PARAMS, ids=lambda row: row.name)


OTHERS = [nnx.BatchStat, nnx.Variable]


def made_in(row, **dtypes):
    """A layer, and those that it wraps, made with these dtypes where they have them."""
    inner = [made_in(catalog.BY_NAME[name], **dtypes) for name in row.wraps]
    names = row.parameters()
    if row.name == "LoRALinear":
        dtypes |= {f"lora_{name}": dtype for name, dtype in dtypes.items()}
        names |= dict.fromkeys(dtypes)
    if row.name == "SpectralNorm":
        dtypes = {}  # that of its statistics
    options = {name: dtype for name, dtype in dtypes.items() if name in names}
    if row.has_rngs:
        options |= {"rngs": nnx.Rngs(0)}
    return row.cls()(*inner, *row.arguments, **row.keywords | options)


def assigned(layer, dtype):
    for _, param in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        param.set_value(param[...].astype(dtype))
    return layer


def tree_mapped(layer, dtype):
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    return nnx.merge(graphdef, jax.tree.map(lambda x: x.astype(dtype), params), rest)


def loaded(layer, dtype):
    """Loads the layer's own weights in another dtype."""
    model, tensors, table = nnx.Dict(layer=layer), {}, {}
    for path, param in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        name = ".".join(map(str, path))
        tensors[name] = param[...]
        axes = " ".join("abcdef"[: param.ndim])
        table[name] = (f"layer.{name}", f"{axes} -> {axes}")
    return nnx.weights.load(tensors, model, table, dtype=dtype, missing=OTHERS).layer


def without_param_dtype(layer):
    """The structure of a layer, apart from the dtype of Params to be made."""
    for _, x in nnx.iter_graph(layer):
        if "param_dtype" in getattr(x, "__dict__", ()):
            x.param_dtype = None
    return nnx.graphdef(layer)


def products(row, layer, inputs):
    """How many contractions there are of which dtypes."""
    report = nnx.precision.report(lambda layer, *x: row(layer, *x), layer, *inputs)
    return report.counts("dot") | report.counts("conv")


def dtypes_of_results(row, layer, inputs):
    outputs = nnx.eval_shape(lambda layer, *x: row(layer, *x), layer, *inputs)
    return [x.dtype for x in jax.tree.leaves(outputs)]


WAYS = {"assigned": assigned, "mapped": tree_mapped, "loaded": loaded}


@every_layer
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_is_that_of_the_dtype_of_its_params(way, row):
    if way == "loaded" and row.name == "WeightNorm":
        pytest.skip("a table has no words for tuples as keys")
    layer = WAYS[way](made_in(row), HALF)
    other = made_in(row, param_dtype=HALF)
    inputs = row.inputs(dtype=HALF)
    assert dtypes_of_results(row, layer, inputs) == dtypes_of_results(
        row, other, inputs
    )
    assert products(row, layer, inputs) == products(row, other, inputs)
    assert nnx.precision.compute_dtype(layer) == nnx.precision.compute_dtype(other)
    assert without_param_dtype(layer) == without_param_dtype(other)


@every_layer
@tables.cases("params, stored", ("f32", jnp.float32), ("bf16", HALF))
def test_a_policy_sets_the_dtype_of_results(params, stored, row):
    layer, inputs = made_in(row), row.inputs(dtype=HALF)
    nnx.precision.set_policy(layer, f"params={params}, compute=bf16")
    other = made_in(row, dtype=HALF, param_dtype=stored)
    assert dtypes_of_results(row, layer, inputs) == dtypes_of_results(
        row, other, inputs
    )
    assert nnx.precision.compute_dtype(layer) == HALF


@pytest.mark.parametrize("way", WAYS)
def test_an_embedding_is_that_of_its_table(way):
    layer = WAYS[way](nnx.Embed(4, 8, rngs=nnx.Rngs(0)), HALF)
    assert layer.dtype == HALF
    assert layer(jnp.array([1])).dtype == layer.attend(jnp.ones(8)).dtype == HALF
    layer.dtype = jnp.float16
    assert layer(jnp.array([1])).dtype == layer.attend(jnp.ones(8)).dtype == jnp.float16


def test_an_embedding_has_as_many_rows_as_its_table():
    layer = nnx.Embed(1, 2, rngs=nnx.Rngs(0))
    layer.embedding.set_value(jnp.arange(6.0).reshape(3, 2))
    assert layer(jnp.array([2, 0])).tolist() == [[4, 5], [0, 1]]
    layer.embedding.set_value(jnp.ones((1, 3)))
    assert layer(jnp.array([2, 0])).tolist() == [[1, 1, 1], [1, 1, 1]]


CELLS = [row for row in WITH_PARAMS if row.name.endswith("Cell")]


@pytest.mark.parametrize("row", CELLS, ids=lambda row: row.name)
@pytest.mark.parametrize("way", WAYS)
def test_a_first_carry_has_the_dtype_of_the_params(way, row):
    cell = WAYS[way](made_in(row), HALF)
    carry = cell.initialize_carry((2, 3), nnx.Rngs(0))
    assert {x.dtype for x in jax.tree.leaves(carry)} == {jnp.dtype(HALF)}


@tables.cases(
    "make, expected",
    (lambda layer: layer, jnp.float32),
    (lambda layer: assigned(layer, HALF), HALF),
    (lambda layer: made_in(ATTENTION, dtype=jnp.float16), jnp.float16),
    (lambda layer: with_policy(layer, "params=f32, compute=bf16"), HALF),
    (lambda layer: with_policy(layer, "params=bf16, compute=f32"), jnp.float32),
)
def test_a_cache_has_the_compute_dtype_of_its_layer(make, expected):
    layer = make(made_in(ATTENTION))
    layer.init_cache((2, 3, 8))
    assert layer.cached_key.dtype == layer.cached_value.dtype == expected
    layer.init_cache((2, 3, 8), jnp.float32)
    assert layer.cached_key.dtype == jnp.float32


ATTENTION = catalog.BY_NAME["MultiHeadAttention"]


def with_policy(layer, policy):
    nnx.precision.set_policy(layer, policy)
    return layer


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.LayerNorm(2, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
        self.gain = nnx.Param(jnp.ones(2))
        self.count = nnx.Variable(jnp.ones((), jnp.complex64))
        self.table = nnx.Param(jnp.arange(2))

    def __call__(self, x):
        return self.layers[1](self.layers[0](self.norm(x * self.gain)))


def test_the_compute_dtype_of_a_module_is_that_of_its_parts():
    net, compute_dtype = Net(), nnx.precision.compute_dtype
    assert compute_dtype(net) == compute_dtype(net.layers) == jnp.float32
    assigned(net, HALF).layers[1].dtype = jnp.float16
    assert compute_dtype(net) == jnp.promote_types(HALF, jnp.float16)
    assert compute_dtype(net.layers[0]) == HALF
    with_policy(net.norm, "params=f32, compute=bf16")
    assert compute_dtype(net.norm) == HALF  # it computes in float32, and returns this
    net.dtype = "not a dtype"
    assert compute_dtype(net) == jnp.float32  # that of its own `gain`
    abstract = nnx.eval_shape(
        lambda: nnx.Linear(2, 2, param_dtype=HALF, rngs=nnx.Rngs(0))
    )
    assert compute_dtype(abstract) == HALF


def test_a_frozen_param_counts_and_other_variables_do_not():
    layer = nnx.BatchNorm(2, param_dtype=HALF, rngs=nnx.Rngs(0))
    nnx.surgery.freeze(layer)
    assert nnx.precision.compute_dtype(layer) == HALF


def test_without_params_there_is_no_compute_dtype():
    with pytest.raises(ValueError, match="Dropout has neither an attribute `dtype`"):
        nnx.precision.compute_dtype(nnx.Dropout(0.5))
