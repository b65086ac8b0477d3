"""Programs as JAX records them: their parts, read and put together again.

A program is a jaxpr, with its constants or without; an equation is one of its steps.
Only their public parts are read.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import numpy as np

# JAX's classes of programs, with their constants and without, and of their parts, as
# they are in this one.
_ONE = jax.make_jaxpr(lambda x: jax.lax.add(x, np.float32(1)))(np.float32(0))
PROGRAMS: Any = (type(_ONE), type(_ONE.jaxpr))
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
    """Names the operation of an equation."""
    made_of = equation.params.get("_prim")
    return equation.primitive.name if made_of is None else type(made_of).__name__


def parameters(equation: Any) -> dict[str, Any]:
    """Lists the parameters of an equation, even one made from an object."""
    return getattr(equation.params.get("_prim"), "params", equation.params)


def programs_in(equation: Any) -> list[Any]:
    """All programs in the parameters of an equation, without their constants."""
    if equation.primitive.name in _KERNELS:
        return []
    return _programs([*parameters(equation).values()])


def _programs(values: Any) -> list[Any]:
    programs = list[Any]()
    for x in values:
        if isinstance(x, PROGRAMS):
            programs.append(opened(x)[0])
        elif isinstance(x, (tuple, list)):
            programs += _programs(x)
    return programs


def called_program(equation: Any) -> Any:
    """Finds the program that an equation calls with its inputs, if there is one."""
    return equation.params.get(_CALLS.get(equation.primitive.name))


def opened(program: Any) -> tuple[Any, list[Any]]:
    """A program without its constants, and these."""
    return getattr(program, "jaxpr", program), [*getattr(program, "consts", ())]


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Counts the inputs of a ``scan`` that are constants, and that are the carry."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    structure = params["ft_in"].update([*params["jaxpr"].in_avals]).unpack()
    consts, carry, _ = [len([*part]) for part in structure]
    return consts, carry


def part(inputs: list[Any], equations: list[Any], outputs: list[Any]) -> Any:
    """A program of equations of another one, from some of its variables to others."""
    return _ONE.jaxpr.replace(invars=inputs, eqns=equations, outvars=outputs)


def evaluate(equation: Any, values: list[Any]) -> list[Any]:
    """Evaluates one equation for the values of its inputs."""
    operands = [
        (x, value)
        for x, value in zip(equation.invars, values, strict=True)
        if isinstance(x, Var)
    ]
    alone = part([x for x, _ in operands], [equation], [*equation.outvars])
    return jax.core.eval_jaxpr(alone, (), *[value for _, value in operands])


def needed_in(program: Any) -> list[Any]:
    """Lists the equations of a program that its outputs need."""
    needed, equations = {x for x in program.outvars if isinstance(x, Var)}, []
    for equation in reversed(program.eqns):
        if equation.effects or needed & {*equation.outvars}:
            needed |= {x for x in equation.invars if isinstance(x, Var)}
            equations.append(equation)
    return equations[::-1]


def rule_of_derivative(equation: Any) -> tuple[Any, list[Any]] | None:
    """Finds the program of a rule that the user gave for a derivative.

    It is for the derivative by all inputs. ``None`` if it is unknown.
    """
    rule = equation.params.get("jvp_jaxpr_fun")
    if rule is None or equation.params.get("symbolic_zeros", True):
        return None
    try:
        count = len(equation.invars) - equation.params["num_consts"]
        program, constants, _ = rule.call_wrapped(*[False] * count)
    except Exception:  # the rule may never be needed
        return None
    return program, [*constants]
