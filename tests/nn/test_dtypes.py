"""Which dtype a layer gives, and the very values that initializers give its Params."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import catalog

HALF = jnp.bfloat16
NORMS = "BatchNorm", "LayerNorm", "RMSNorm", "InstanceNorm", "GroupNorm"
DENSE = "Linear", "LinearGeneral", "Einsum", "Conv", "ConvTranspose", "LoRA"

# Options of the constructor, the dtype of the inputs, that of the outputs.
COMMON = [
    ({}, jnp.float32, jnp.float32),
    ({}, HALF, jnp.float32),
    ({}, jnp.int32, jnp.float32),
    ({}, jnp.complex64, jnp.complex64),
    ({"param_dtype": HALF}, HALF, HALF),
    ({"param_dtype": HALF}, jnp.int32, HALF),
    ({"param_dtype": HALF}, jnp.float32, jnp.float32),
    ({"dtype": HALF}, jnp.float32, HALF),
    ({"dtype": HALF}, jnp.int32, HALF),
    ({"dtype": "float16"}, jnp.float32, jnp.float16),
    ({"dtype": jnp.complex64}, jnp.float32, jnp.complex64),
]
WIDER = {"dtype": HALF, "preferred_element_type": jnp.float32}
LORA_LINEAR = [
    ({"lora_dtype": HALF}, jnp.float32),
    ({"lora_param_dtype": HALF}, jnp.float32),
    ({"dtype": HALF}, HALF),
    ({"dtype": HALF, "lora_dtype": HALF}, HALF),
    ({"dtype": HALF, "lora_dtype": jnp.float32}, jnp.float32),
    (WIDER, jnp.float32),
    ({"param_dtype": HALF, "lora_param_dtype": HALF}, jnp.float32),
]
ROWS = [
    *(
        # The statistics of a BatchNorm are float32, and take part.
        (name, options, given, jnp.float32)
        if name == "BatchNorm" and options == {"param_dtype": HALF}
        else (name, options, given, expected)
        for name in DENSE + NORMS
        for options, given, expected in COMMON
    ),
    *(("LoRALinear", options, jnp.float32, out) for options, out in LORA_LINEAR),
    *((name, WIDER, jnp.float32, jnp.float32) for name in DENSE[:-1]),
    # The arithmetic of these is in float32 unless they are told otherwise.
    ("SimpleCell", {"param_dtype": HALF}, HALF, jnp.float32),
    ("SimpleCell", {"param_dtype": HALF, "dtype": None}, HALF, HALF),
    ("SimpleCell", {"param_dtype": HALF, "dtype": jnp.float16}, HALF, jnp.float16),
    *(("PReLU", {}, given, given) for given in (jnp.float16, HALF, jnp.float32)),
    ("PReLU", {"dtype": jnp.float16}, jnp.float32, jnp.float16),
    ("Embed", {"param_dtype": HALF}, jnp.int32, HALF),
    ("Embed", {"dtype": jnp.float16}, jnp.int32, jnp.float16),
    (
        "Embed",
        {"param_dtype": jnp.int32, "embedding_init": nnx.initializers.ones},
        jnp.int32,
        jnp.int32,
    ),
    *(("Dropout", {}, x, x) for x in (HALF, jnp.float16, jnp.float32, jnp.complex64)),
    ("Dropout", {}, jnp.int32, jnp.float32),
    ("RoPE", {}, jnp.int32, jnp.float32),
    *(("RoPE", {}, given, given) for given in (HALF, jnp.float16)),
]


@pytest.mark.parametrize(("name", "options", "given", "expected"), ROWS)
def test_output_dtype(name, options, given, expected):
    row = catalog.BY_NAME[name]

    def call(*inputs):
        return row(row.make(**options), *inputs)

    outputs = jax.tree.leaves(jax.eval_shape(call, *row.inputs(dtype=given)))
    assert {y.dtype for y in outputs} == {jnp.dtype(expected)}


@pytest.mark.parametrize(
    "row",
    [r for r in catalog.LAYERS if r.has_dtype and "param_dtype" in r.parameters()],
    ids=lambda row: row.name,
)
def test_params_have_the_dtype_that_was_asked_for(row):
    for options, expected in [({}, jnp.float32), ({"param_dtype": HALF}, HALF)]:
        layer = nnx.eval_shape(lambda options=options: row.make(**options))
        params = jax.tree.leaves(nnx.state(layer, nnx.Param))
        assert {param.dtype for param in params} == {jnp.dtype(expected)}


def test_the_low_rank_part_of_a_linear_has_a_dtype_of_its_own():
    row, dtypes = catalog.BY_NAME["LoRALinear"], {"param_dtype": HALF}
    layer = nnx.eval_shape(lambda: row.make(**dtypes))
    assert (layer.kernel.dtype, layer.lora.lora_a.dtype) == (HALF, jnp.float32)
    layer = nnx.eval_shape(lambda: row.make(lora_param_dtype=HALF))
    assert (layer.kernel.dtype, layer.lora.lora_a.dtype) == (jnp.float32, HALF)


@pytest.mark.parametrize("dtype", [None, HALF, jnp.float16])
@pytest.mark.parametrize("param_dtype", [HALF, jnp.float16, jnp.float32])
def test_statistics_are_float32_whatever_the_other_dtypes(param_dtype, dtype):
    row = catalog.BY_NAME["BatchNorm"]

    def states(x):
        layer = row.make(param_dtype=param_dtype, dtype=dtype)
        before = nnx.clone(layer)
        layer(x)
        return before, layer

    for layer in jax.eval_shape(states, *row.inputs(dtype=HALF)):
        assert layer.scale.dtype == layer.bias.dtype == param_dtype
        assert layer.mean.dtype == layer.var.dtype == jnp.float32


UNPROMOTED = {"promote_dtype": lambda args, **_: args}


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in (*DENSE, *NORMS, "PReLU")]
    + [(name, UNPROMOTED) for name in NORMS],
)
def test_a_dtype_of_integers_is_refused_by_the_call(name, options):
    row = catalog.BY_NAME[name]
    with pytest.raises(ValueError, match="Dtype must be inexact"):
        jax.eval_shape(lambda x: row(row.make(dtype=int, **options), x), *row.inputs())


@pytest.mark.parametrize("dtype", [None, jnp.float32])
def test_a_layer_without_values_says_what_to_do(dtype):
    layer = nnx.eval_shape(lambda: nnx.Linear(2, 3, dtype=dtype, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"(?s)abstract.*float32\[2,3\].*load_state"):
        layer(jnp.ones((1, 2)))


@pytest.mark.parametrize("dtype", [None, HALF, "float16"])
def test_promotion_gives_the_dtypes_of_the_peer(peer, dtype):
    kinds = [jnp.int8, HALF, jnp.float16, jnp.float32, bool]
    for a in kinds:
        for b in kinds:
            args = (jnp.ones(1, a), None, jnp.ones(1, b), 2.0)
            ours, theirs = (
                library.nn.dtypes.promote_dtype(args, dtype=dtype)
                for library in (nnx, peer)
            )
            assert [getattr(x, "dtype", x) for x in ours] == [
                getattr(x, "dtype", x) for x in theirs
            ]


# ------------------------------------------------------------------------- first values


INITIALIZERS = {
    "default": None,
    "zeros": nnx.initializers.zeros,
    "ones": nnx.initializers.ones,
    "lecun_normal": nnx.initializers.lecun_normal(),
    "he_normal": nnx.initializers.he_normal(),
    "glorot_normal": nnx.initializers.glorot_normal(in_axis=1, out_axis=0),
    "lecun_uniform": nnx.initializers.lecun_uniform(),
    "variance_scaling": nnx.initializers.variance_scaling(3.0, "fan_in", "normal"),
    "batched": nnx.initializers.lecun_normal(batch_axis=(0,)),
    "axes": nnx.initializers.lecun_normal(in_axis=[0, 1]),
    "normal": nnx.initializers.normal(0.1),
    "orthogonal": nnx.initializers.orthogonal(),
}
DEFAULT = nnx.initializers.lecun_normal()


def kernel(initializer, shape, dtype=jnp.float32, rngs=None):
    """The kernel of a layer; no initializer: the default one."""
    options = {} if initializer is None else {"kernel_init": initializer}
    rngs = nnx.Rngs(0) if rngs is None else rngs
    return nnx.Einsum(None, shape, param_dtype=dtype, **options, rngs=rngs).kernel[...]


def check(initializer, shape, dtype=jnp.float32):
    for seed in range(4):
        key = jax.random.fold_in(jax.random.key(seed), 0)
        ours = kernel(initializer, shape, dtype, nnx.Rngs(seed))
        theirs = (initializer or DEFAULT)(key, shape, dtype)
        for fact in ("aval", "sharding", "committed"):
            assert getattr(ours, fact) == getattr(theirs, fact)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("name", INITIALIZERS)
def test_values_are_those_of_the_initializer(name):
    check(INITIALIZERS[name], (2, 3, 4))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, "float32"])
@pytest.mark.parametrize("name", ["ones", "default", "he_normal"])
def test_values_have_the_dtype_that_was_asked_for(name, dtype):
    check(INITIALIZERS[name], (3, 5), dtype)


def test_whole_numbers_are_left_to_the_initializer():
    check(INITIALIZERS["ones"], (3, 5), jnp.int8)


@pytest.mark.parametrize("name", ["zeros", "default"])
@pytest.mark.parametrize(("first", "second"), [(14.0, 14), (15, 15.0)])
def test_what_is_known_of_a_size_does_not_hold_for_an_equal_float(name, first, second):
    for size in [first] * 3 + [second] * 3:
        if isinstance(size, int):
            kernel(INITIALIZERS[name], (size, 3))
        else:
            with pytest.raises(TypeError):
                kernel(INITIALIZERS[name], (size, 3))


@pytest.mark.parametrize("shape", [(3,), (0, 3)])
def test_shapes_without_a_scale_are_left_to_the_initializer(shape):
    for _ in range(3):
        try:
            theirs = DEFAULT(jax.random.key(0), shape, jnp.float32).shape
        except (ValueError, ZeroDivisionError) as error:
            with pytest.raises(type(error)):
                kernel(None, shape)
        else:
            assert kernel(None, shape).shape == theirs


def test_traced_values_are_those_of_the_initializer():
    shape = (2, 3)
    check(None, shape)
    keys = jax.random.split(jax.random.key(0), 2)
    ours = jax.vmap(lambda key: kernel(None, shape, rngs=nnx.Rngs(params=key)))(keys)
    folded = jax.vmap(jax.random.fold_in, (0, None))(keys, 0)
    theirs = jax.vmap(lambda key: DEFAULT(key, shape, jnp.float32))(folded)
    np.testing.assert_array_equal(ours, theirs)
    assert nnx.eval_shape(lambda: kernel(None, shape)).dtype == jnp.float32


def test_layers_share_no_array():
    layers = [nnx.Linear(3, 3, rngs=nnx.Rngs(0)) for _ in range(4)]
    assert len({id(layer.bias[...]) for layer in layers}) == 4

    @nnx.jit(donate_argnums=0)
    def grow(layers):
        for layer in layers:
            layer.bias[...] += 1

    grow(layers)
    np.testing.assert_array_equal(layers[3].bias[...], np.ones(3))


def test_patched_functions_are_called(monkeypatch):
    check(None, (4, 4))
    check(nnx.initializers.zeros, (4, 4))
    drawn = []

    def truncated_normal(*args, **kwargs):
        drawn.append(args)
        return jnp.ones(args[3], args[4])

    random = DEFAULT.__globals__["random"]
    monkeypatch.setattr(random, "truncated_normal", truncated_normal)
    check(None, (4, 4))
    assert len(drawn) == 8
    monkeypatch.setattr(jnp, "zeros", lambda shape, *_, **__: jnp.ones(shape))
    check(nnx.initializers.zeros, (4, 4))


class Unhashable:
    """An initializer that is equal to everything, and whose hash fails."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        raise TypeError

    def __call__(self, key, shape, dtype):
        return jnp.full(shape, 7, dtype)


def test_initializers_need_no_hash():
    np.testing.assert_array_equal(kernel(Unhashable(), (2, 3)), jnp.full((2, 3), 7.0))
