"""Programs as JAX records them, by what is public of them.

A program is a jaxpr, with its constants or without; an equation is one of its steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.core
import numpy as np

# JAX's classes of programs, and of what is in them, as they are in this one.
_ONE = jax.make_jaxpr(lambda x: jax.lax.add(x, np.float32(1)))(np.float32(0))
ClosedJaxpr: Any = type(_ONE)
Jaxpr: Any = type(_ONE.jaxpr)
Var: Any
Literal: Any
Var, Literal = map(type, _ONE.jaxpr.eqns[0].invars)

# The equations that call a program with their inputs, and the parameter that has it.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "composite": "jaxpr",
}


# Programs that count as one operation of a model.
_KERNELS = ("pallas_call", "core_map", "run_state")


def kind(equation: Any) -> str:
    """What an equation does, by the name of its operation."""
    made_of = equation.params.get("_prim")
    return equation.primitive.name if made_of is None else type(made_of).__name__


def parameters(equation: Any) -> dict[str, Any]:
    """The parameters of an equation, also of one that JAX makes of an object."""
    return getattr(equation.params.get("_prim"), "params", equation.params)


def programs_in(equation: Any) -> list[Any]:
    """All programs in the parameters of an equation, without their constants."""
    if equation.primitive.name in _KERNELS:
        return []
    return _programs([*parameters(equation).values()])


def _programs(values: Any) -> list[Any]:
    found = list[Any]()
    for x in values:
        if is_program(x):
            found.append(opened(x)[0])
        elif isinstance(x, (tuple, list)):
            found += _programs(x)
    return found


def called_program(equation: Any) -> Any:
    """The program that an equation calls with its inputs, ``None`` if it calls none."""
    return equation.params.get(_CALLS.get(equation.primitive.name))


def is_program(x: Any) -> bool:
    """Whether ``x`` is a program, with its constants or without."""
    return isinstance(x, (Jaxpr, ClosedJaxpr))


def opened(program: Any) -> tuple[Any, list[Any]]:
    """A program without its constants, and these."""
    return getattr(program, "jaxpr", program), [*getattr(program, "consts", ())]


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many inputs of a ``scan`` are constants, and how many are the carry."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    parts = params["ft_in"].update([*params["jaxpr"].in_avals]).unpack()
    consts, carry, _ = [len([*part]) for part in parts]
    return consts, carry


def part(inputs: list[Any], equations: list[Any], outputs: list[Any]) -> Any:
    """A program of equations of another one, from some of its variables to others."""
    return _empty().replace(invars=inputs, eqns=equations, outvars=outputs)


@functools.cache
def _empty() -> Any:
    return opened(jax.make_jaxpr(lambda: ())())[0]


def evaluate(equation: Any, values: list[Any]) -> list[Any]:
    """The outputs of one equation for the values of its inputs."""
    given = [
        (x, value)
        for x, value in zip(equation.invars, values, strict=True)
        if isinstance(x, Var)
    ]
    alone = part([x for x, _ in given], [equation], [*equation.outvars])
    return jax.core.eval_jaxpr(alone, (), *[value for _, value in given])


def needed_in(program: Any) -> list[Any]:
    """The equations of a program that its outputs need."""
    needed, equations = {x for x in program.outvars if isinstance(x, Var)}, []
    for equation in reversed(program.eqns):
        if equation.effects or needed & {*equation.outvars}:
            needed |= {x for x in equation.invars if isinstance(x, Var)}
            equations.append(equation)
    return equations[::-1]


def rule_of_derivative(equation: Any) -> tuple[Any, list[Any]] | None:
    """The program of a rule that the user gave for a derivative, and its constants.

    It is that for the derivative by all inputs. ``None`` if nothing can be said.
    """
    rule = equation.params.get("jvp_jaxpr_fun")
    if rule is None or equation.params.get("symbolic_zeros", True):
        return None
    try:
        count = len(equation.invars) - equation.params["num_consts"]
        program, constants, _ = rule.call_wrapped(*[False] * count)
    except Exception:  # it may never be asked
        return None
    return program, [*constants]


def evaluator(program: Any) -> Callable[[list[Any], list[Any]], list[Any]]:
    """Computes a program of its constants and inputs, without keeping the constants.

    Nor does it keep numbers of the user's. JAX reads a NumPy array when it first meets
    it, and goes on with what it read as long as any program holds that, also after the
    array was changed in place. So numbers within the program are copied.
    """
    jaxpr, _ = opened(program)
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    equations, outputs = _with_own_numbers(jaxpr)
    free = part(inputs, equations, outputs)

    def evaluate(constants: list[Any], values: list[Any]) -> list[Any]:
        return jax.core.eval_jaxpr(free, (), *constants, *values)

    return evaluate


def _with_own_numbers(jaxpr: Any) -> tuple[list[Any], list[Any]]:
    """The equations and outputs of a program, with copies of the numbers in them."""
    equations = [
        equation.replace(
            invars=[*map(_own_number, equation.invars)],
            params={key: _own_parts(x) for key, x in equation.params.items()},
        )
        for equation in jaxpr.eqns
    ]
    return equations, [*map(_own_number, jaxpr.outvars)]


def _own_number(x: Any) -> Any:
    if isinstance(x, Literal) and isinstance(x.val, np.ndarray):
        return Literal(x.val.copy(), x.aval)
    return x


def _own_parts(x: Any) -> Any:
    if type(x) is tuple:
        return tuple(map(_own_parts, x))
    if not is_program(x):
        return x
    jaxpr, constants = opened(x)
    equations, outputs = _with_own_numbers(jaxpr)
    own = jaxpr.replace(eqns=equations, outvars=outputs)
    return own if x is jaxpr else x.replace(jaxpr=own, consts=constants)
