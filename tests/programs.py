"""Calling a layer as one compiled program: eagerly, each of its operations is one."""

import jax
import numpy as np

import graftree as nnx


def in_one_program(function, *args, **options):
    """What a layer or function gives; a layer is written to as by an eager call.

    Arrays are arguments of the program; all other options are part of it.
    """
    arrays = {k: v for k, v in options.items() if isinstance(v, jax.Array | np.ndarray)}
    others = {k: v for k, v in options.items() if k not in arrays}
    if not isinstance(function, nnx.Pytree):
        call = nnx.jit(lambda args, arrays: function(*args, **arrays, **others))
        return call(args, arrays)

    @nnx.jit
    def call(layer, args, arrays):
        return layer(*args, **arrays, **others)

    return call(function, args, arrays)
