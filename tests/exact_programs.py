"""What a traced program means: its numbers in float64, and its products.

Programs that should agree in real arithmetic agree here to 1e-7, whatever their dtypes:
only their constants have been rounded.
"""

import jax
import jax.numpy as jnp
import numpy as np


def products(program):
    """The matrix products of a program, also those in loops and functions."""
    for equation in _opened(program).eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jax.tree.leaves([*equation.params.values()]):
            if hasattr(_opened(inner), "eqns"):
                yield from products(inner)


def in_float64(program, arguments):
    """What a program computes if all its floating-point numbers are float64.

    Args:
        program: A jaxpr, as in the attribute ``jaxpr`` of ``jax.jit(f).trace(...)``.
        arguments: Its leaves.

    Returns:
        The leaves of its output.
    """
    with jax.enable_x64(True):
        return _run(program, [_wide(x) for x in arguments])


def _run(program, arguments):
    inner = _opened(program)
    constants = [_wide(x) for x in getattr(program, "consts", ())]
    values = dict(
        zip(inner.constvars + inner.invars, constants + arguments, strict=True)
    )

    def read(x):
        is_literal = hasattr(x, "val")
        return _wide(np.asarray(x.val, x.aval.dtype)) if is_literal else values[x]

    for equation in inner.eqns:
        outputs = _evaluated(equation, [*map(read, equation.invars)])
        values.update(zip(equation.outvars, outputs, strict=True))
    return [*map(read, inner.outvars)]


def _evaluated(equation, arguments):
    params = equation.params
    inner = params.get("jaxpr") or params.get("call_jaxpr")
    if equation.primitive.name == "scan":
        return _looped(equation, _opened(inner), arguments)
    if inner is not None:
        return _run(inner, arguments)
    params = {name: _wide_dtype(x) for name, x in params.items()}
    if "precision" in params:  # which may ask for products of rounded numbers
        params["precision"] = None
    if params.get("update_jaxpr") is not None:
        params["update_jaxpr"] = _wide_update(params["update_jaxpr"])
    output = equation.primitive.bind(*arguments, **params)
    return output if equation.primitive.multiple_results else [output]


_UPDATES = {}


def _wide_update(update):
    """What a scatter does with two numbers: one object each, for JAX's caches."""
    if str(update) not in _UPDATES:
        wide = jax.make_jaxpr(lambda *numbers: _run(update, [*numbers]))(0.0, 0.0)
        _UPDATES[str(update)] = wide.jaxpr
    return _UPDATES[str(update)]


def _looped(equation, body, arguments):
    """A scan: what it scans, or stacks, has one axis more than in its body."""

    def count(outer, inner):  # of those without that axis
        return sum(
            x.aval.ndim == y.aval.ndim for x, y in zip(outer, inner, strict=True)
        )

    carried = count(equation.outvars, body.outvars)
    last = count(equation.invars, body.invars)
    constants, carry = arguments[: last - carried], arguments[last - carried : last]
    steps, outputs = range(equation.params["length"]), {}
    for i in reversed(steps) if equation.params["reverse"] else steps:
        rows = [x[i] for x in arguments[last:]]
        output = _run(body, [*constants, *carry, *rows])
        carry, outputs[i] = output[:carried], output[carried:]
    return [*carry, *map(jnp.stack, zip(*map(outputs.get, steps), strict=True))]


def _opened(program):
    return getattr(program, "jaxpr", program)


def _wide(x):
    x = jnp.asarray(x)
    return x.astype(_wide_dtype(x.dtype))


def _wide_dtype(x):
    is_dtype = isinstance(x, (np.dtype, type))
    return np.dtype(float) if is_dtype and jnp.issubdtype(x, jnp.floating) else x
