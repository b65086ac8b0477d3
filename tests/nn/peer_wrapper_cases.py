"""The peers grid: layers around other layers."""

import jax.numpy as jnp
from jax.nn import initializers

from tests.nn.peer_cases import (
    DTYPES,
    PARAM_DTYPES,
    Case,
    PerLibrary,
    each,
    from_key,
    over_dtypes,
    real,
    with_call,
    with_inputs,
    with_options,
)

ALL = {"kernel_init": from_key, "bias_init": from_key}
LORA = {"a_initializer": from_key, "b_initializer": from_key}


def inner(name, *args, **options):
    """A layer inside, with the Rngs of the one around it."""

    def make(library, rngs):
        return getattr(library, name)(*args, **ALL, **options, rngs=rngs)

    make.__name__ = f"{name}{args}"
    return PerLibrary(make)


def stack():
    """Two layers, one with a kernel of four axes."""

    def make(library, rngs):
        layers = [inner("Conv", 3, 4, (2, 2)), inner("Linear", 4, 5)]
        return library.Sequential(*(layer.make(library, rngs) for layer in layers))

    return PerLibrary(make)


def lora():
    base = Case("LoRA", (6, 2, 5), LORA, (real(2, 6),))
    yield Case("LoRA", (6, 2, 5), inputs=base.inputs)
    yield from over_dtypes(base, ("float32", "bfloat16", "int32"))
    yield from with_inputs(base, real(6), real(2, 3, 6))
    yield from with_options(base, each(a_metadata=({"note": 1},)))
    yield from with_options(base, each(b_metadata=({"note": 2},)))
    param = PerLibrary(lambda library, rngs: library.Param)
    yield base.but(options={"lora_param_type": param})
    around = base.but(options={"base_module": inner("Linear", 6, 5)})
    yield around
    yield from with_options(around, each(dtype=(jnp.bfloat16,)))
    general = inner("LinearGeneral", 6, 5, axis=-1)
    yield base.but(options={"base_module": general}, call={"out_sharding": None})


def lora_linear():
    base = Case("LoRALinear", (6, 5), {**ALL, **LORA, "lora_rank": 2}, (real(2, 6),))
    half = real(2, 6, dtype="bfloat16")
    yield Case("LoRALinear", (6, 5), {"lora_rank": 2}, base.inputs)
    for dtype in DTYPES:
        both = base.but(options={"dtype": dtype, "lora_dtype": dtype})
        for param_dtype in PARAM_DTYPES:
            options = {"param_dtype": param_dtype, "lora_param_dtype": param_dtype}
            yield from with_inputs(both.but(options=options), real(2, 6), half)
    yield from with_options(base, each(lora_dtype=(jnp.bfloat16,)))
    yield from with_options(
        base.but(why_different="a half dtype does not reach the low-rank part"),
        each(dtype=(jnp.bfloat16, jnp.float16)),
    )
    yield from with_options(base, each(use_bias=(False,), a_metadata=({"note": 1},)))
    yield from with_options(base, each(kernel_metadata=({"note": 2},)))
    yield from with_inputs(base, real(6), real(2, 3, 6))


def spectral_norm():
    base = Case("SpectralNorm", (inner("Linear", 6, 5),), inputs=(real(2, 6),), calls=3)
    yield base
    yield from with_options(
        base,
        each(n_steps=(0, 2, 5), update_stats=(True, False), epsilon=(1e-3,)),
    )
    yield from with_options(base, each(dtype=(jnp.bfloat16,)))
    yield base.but(options={"param_dtype": jnp.bfloat16})
    yield from with_call(base, each(update_stats=(True, False)))
    yield base.but(prepare=lambda layer: layer.eval())
    yield base.but(args=(stack(),), inputs=(real(1, 2, 2, 3),))
    half = inner("Linear", 6, 5, param_dtype=jnp.bfloat16)
    yield base.but(args=(half,))


def weight_norm():
    # In Flax 0.12.8 the scales are no Params, so that nothing trains them.
    base = Case(
        "WeightNorm",
        (inner("Linear", 6, 5),),
        inputs=(real(2, 6),),
        calls=3,
        since="0.12.12",
    )
    yield base
    rounded = base.but(options={"dtype": jnp.bfloat16})
    yield rounded.but(calls=1)
    yield rounded.but(
        why_different="norms of half-precision weights are half precision"
    )
    yield from with_options(
        base,
        each(
            feature_axes=(None, 0, (0, 1)),
            use_scale=(False,),
            epsilon=(1e-3,),
            scale_init=(initializers.constant(2.0),),
        ),
    )
    by_path = PerLibrary(lambda library, rngs: library.PathContains("bias"))
    yield base.but(options={"variable_filter": by_path})
    yield base.but(args=(stack(),), inputs=(real(1, 2, 2, 3),))
    yield base.but(
        options={"scale_init": initializers.normal()},
        why_different="random initializers get a stream for a key",
    )
    yield base.but(
        options={"param_dtype": jnp.bfloat16},
        why_different="scales ignore their dtype",
    )


TABLES = {
    "LoRA": lora,
    "LoRALinear": lora_linear,
    "SpectralNorm": spectral_norm,
    "WeightNorm": weight_norm,
}
