"""The peers grid: layers with kernels, tables, statistics or random zeros; pooling.

That new layers are equal, with the default initializers, is a test of `test_layers`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers

from tests.nn.peer_cases import (
    Case,
    PerLibrary,
    booleans,
    from_key,
    integers,
    over_dtypes,
    real,
    with_call,
    with_options,
)

# Not the default, zeros: a bias that is left out would not show.
BIAS = {"bias_init": from_key}
SCALE_AND_BIAS = {**BIAS, "scale_init": from_key}
# For many shapes: each that `lecun_normal` is compiled for costs a quarter of a second.
ALL = {**BIAS, "kernel_init": from_key}
NOTES = {"kernel_metadata": {"note": 1}, "bias_metadata": {"note": 2}}


def unpromoted(arrays, **options):
    return arrays


def with_kernel(base):
    """The cases that all layers with a kernel have."""
    yield base
    yield base.cast("bfloat16").but(options={"param_dtype": jnp.bfloat16})
    yield base.cast("int32").but(options={"dtype": jnp.float16})
    yield from with_options(
        base,
        {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32},
        {"precision": "highest", **NOTES},
        {"promote_dtype": unpromoted},
    )


def linear():
    base = Case("Linear", (6, 5), ALL, (real(2, 7, 6),))
    yield from with_kernel(base)
    yield base.but(options={"use_bias": False, "dtype": jnp.complex64})


def linear_general():
    base = Case("LinearGeneral", (6, 5), ALL, (real(2, 7, 6),))
    yield from with_kernel(base)
    yield base.but((7, 6), (4, 5), options={"axis": (-2, -1)})
    yield base.but(7, 5, options={"axis": 1, "batch_axis": {0: 2}, "use_bias": False})


def einsum():
    base = Case("Einsum", ("...a,ab->...b", (6, 5), (5,)), ALL, (real(2, 7, 6),))
    yield from with_kernel(base)
    yield base.of(einsum_str="n t a, a b -> t n b")
    yield base.but("nta,tab->ntb", (7, 6, 5), (7, 5))


def conv():
    base = Case("Conv", (6, 4, 3), ALL, (real(2, 5, 6),))
    yield from with_kernel(base)
    grouped = {"use_bias": False, "feature_group_count": 2}
    causal = {"padding": "CAUSAL", "strides": 2, "kernel_dilation": 2}
    yield from with_options(base, grouped, causal, {"mask": booleans(3, 6, 4)})
    plane = base.but(3, 4, [3, 2]).of(real(2, 5, 6, 3))
    lower = {"padding": "SAME_LOWER", "strides": (2, 1), "kernel_dilation": (1, 2)}
    yield from with_options(plane, lower, {"padding": [1, (0, 2)]})
    refused = "jax.lax refuses named paddings of dilated inputs"
    yield plane.but(why_different=refused, options={"input_dilation": 2})
    yield plane.but(options={"padding": [[0, 1], 2]}, why_different="a pair is a tuple")
    yield base.but(6, 4, np.int64(3), why_different="a size is a Python int")


def conv_transpose():
    base = Case("ConvTranspose", (6, 4, 3), ALL, (real(2, 5, 6),))
    yield from with_kernel(base)
    yield base.but(options={"use_bias": False, "mask": booleans(3, 6, 4)})
    plane = base.but(3, 4, (3, 2)).of(real(2, 5, 6, 3))
    circular = {"padding": "CIRCULAR", "strides": (2, 1), "kernel_dilation": 2}
    valid = {"padding": "VALID", "strides": 2, "transpose_kernel": True}
    yield from with_options(plane, circular, valid)


def embed():
    base = Case("Embed", (7, 6), inputs=(integers(2, 5),))
    yield from with_options(
        base,
        {},
        {"param_dtype": jnp.bfloat16, "embedding_metadata": {"note": 1}},
        {"dtype": jnp.float16, "embedding_init": initializers.ones},
    )
    outside = np.array([-1, -7, 6, 7, -8, 100])
    yield from map(base.of, (integers(2, 5, dtype="uint8"), integers(), outside))
    yield base.but(1, 6)
    refused = base.but(1, 6, why_different="a single row needs an axis of inputs")
    yield refused.of(integers())
    attend = base.but(method="attend", inputs=(real(2, 3, 6),))
    yield attend
    yield from over_dtypes(attend)


def prelu():
    base = Case("PReLU", inputs=(real(3, 4),))
    yield base.but(options={"negative_slope_metadata": {"note": 1}})
    yield from over_dtypes(base.but(0.3))


# --------------------------------------------------------------------- normalization


def batch_norm():
    base = Case("BatchNorm", (6,), SCALE_AND_BIAS, (real(4, 3, 6),), calls=2)
    yield from _norms(base, booleans(4, 1, 1))
    yield base.but(3, options={"axis": -2, "momentum": 0.5}).of(mask=booleans(4, 1, 6))
    yield base.but(prepare=_train_once_then_evaluate)
    yield from with_call(
        base, {"use_running_average": True}, {"use_running_average": False}
    )


def _train_once_then_evaluate(layer):
    layer(np.linspace(0, 4, 4 * layer.num_features, dtype="f4").reshape(4, -1))
    layer.eval()


def _norms(base, mask):
    """The cases that all norms have, some of which know no bias."""
    has_bias = "bias_init" in base.options
    yield base
    yield from over_dtypes(base)
    no_bias = {"use_bias": False} if has_bias else {}
    noted = {"bias_metadata": {"note": 1}} if has_bias else {}
    slow = {"use_fast_variance": False, "promote_dtype": unpromoted}
    yield base.but(options={"use_scale": False, **no_bias})
    yield base.but(options={"epsilon": 1e-2, "scale_metadata": {"note": 2}, **noted})
    yield base.of(mask=mask)
    yield base.of(mask=mask).but(options=slow)


def layer_norm():
    base = Case("LayerNorm", (6,), SCALE_AND_BIAS, (real(4, 3, 6),))
    yield from _norms(base, booleans(1, 1, 6))
    yield from _over_features(base)


def rms_norm():
    base = Case("RMSNorm", (6,), {"scale_init": from_key}, (real(4, 3, 6),))
    yield from _norms(base, booleans(1, 1, 6))
    yield from _over_features(base)


def _over_features(base):
    yield base.but(18, options={"feature_axes": (-2, -1)})
    if base.name == "RMSNorm":
        yield base.of(real(4, 3, 6), booleans(4, 3, 6))
    else:
        yield _averaged_over_a_mapped_axis(base)


def instance_norm():
    base = Case("InstanceNorm", (6,), SCALE_AND_BIAS, (real(4, 3, 6),))
    yield from _norms(base, booleans(1, 3, 1))
    yield base.but(18, options={"feature_axes": (1, 2)})


def group_norm():
    base = Case("GroupNorm", (6, 3), SCALE_AND_BIAS, (real(4, 3, 6),))
    yield from _norms(base, booleans(4, 1, 6))
    yield base.but(6, None, options={"group_size": 2})
    yield base.but(options={"reduction_axes": (-2, -1)})
    mixed = base.but(why_different="statistics of kept axes go to the wrong groups")
    yield mixed.but(options={"reduction_axes": (-1,)})
    no_batch = base.but(why_different="axis 0 is taken for one that is never reduced")
    yield no_batch.but(options={"reduction_axes": (0, 1, 2)})
    per_position = base.of(mask=booleans(4, 3, 1))
    yield per_position.but(why_different="a mask needs one entry per channel")


def _averaged_over_a_mapped_axis(base):
    def call(layer, x):
        return jax.vmap(layer, axis_name="i")(x)

    return base.but(options={"axis_name": "i"}, inputs=(real(2, 4, 3, 6),), method=call)


def dropout():
    make_rngs = PerLibrary(lambda library, rngs: library.Rngs(dropout=rngs()))
    make_stream = PerLibrary(lambda library, rngs: rngs.fork()["dropout"])
    key = PerLibrary(lambda library, rngs: rngs())
    base = Case("Dropout", (0.5,), inputs=(real(4, 3, 6),), calls=2)
    yield from (base.but(rate).cast("bfloat16") for rate in (0, 0.1, 1.0))
    yield from with_options(
        base,
        {"broadcast_dims": (0,)},
        {"broadcast_dims": (-1, -3), "deterministic": False},
        {"deterministic": True},
    )
    named = base.but(streams=("default", "noise"))
    yield named.but(options={"rng_collection": "noise"})
    yield from with_call(base, {"deterministic": True}, {"rngs": make_rngs})
    yield base.but(options={"deterministic": True}, call={"deterministic": False})
    yield base.but(options={"rngs": make_stream}, streams=("params", "dropout"))
    yield base.but(prepare=lambda layer: layer.eval())
    yield from (base.but(options={"rngs": None}).of(rngs=x) for x in (make_stream, key))
    yield base.of(integers(4, 3)).but(why_different="integers crash in select")


def pooling():
    image, explicit = real(2, 5, 4, 3), ((0, 1), (2, 1))
    for name in ("avg_pool", "max_pool", "min_pool"):
        base = Case(name, inputs=(image,), call={"window_shape": (2, 3)})
        yield base.of(real(2, 1, 5, 4, 3), padding="SAME", strides=(2, 1))
        yield base.of(real(2, 1, 5, 4, 3), padding=explicit).but(
            why_different="explicit padding knows one batch axis only"
        )
    yield Case("max_pool", inputs=base.inputs, call=base.call).cast("int32")
    inside = {"window_shape": (2, 3), "count_include_pad": False}
    average = Case("avg_pool", inputs=(image,), call=inside)
    yield from with_call(average, {"padding": "SAME"}, {"padding": explicit})
    yield average.cast("bfloat16").but(why_different="upcast to float32")


TABLES = {
    "Linear": linear,
    "LinearGeneral": linear_general,
    "Einsum": einsum,
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "Embed": embed,
    "PReLU": prelu,
    "BatchNorm": batch_norm,
    "LayerNorm": layer_norm,
    "RMSNorm": rms_norm,
    "InstanceNorm": instance_norm,
    "GroupNorm": group_norm,
    "Dropout": dropout,
    "pooling": pooling,
}
