"""Control flow outside of a compiled function: traced each time, compiled once.

What a function reaches besides its arguments may have changed since the last call:
globals, closures, classes, whatever Python allows. So it is traced on every call, and
nothing is remembered of what it reached. Arrays that it captured become operands of the
program, and a program that equals an earlier one is replaced by that, which JAX has
compiled. The key of a program is its content:

    equations      primitive, parameters, context, scope, what they read
    types          of its inputs, and of the arrays that it captured
    parameters     plain values, and what JAX and NumPy define, by value; programs by
                   their content; functions and all else by identity
    numbers in it  by their bytes: 0.0 is not -0.0

What can't be compared is compiled again: slow, and right.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from graftree import _jax
from graftree.core.graph.differences import Exactly
from graftree.transforms.crossing import debug_info, jaxprs

# How many programs are kept, those that were used last. A small one takes 0.5 MB.
MOST = 1_024


def run(
    function: Callable[..., Any],
    traced: Callable[..., Any],
    *operands: Any,
    leading: Sequence[str] = (),
    name: str | None = None,
) -> Any:
    """The output of what JAX traces, for some operands.

    In a function that JAX compiles it becomes part of the program there.

    Args:
        function: That of the user.
        traced: What JAX traces; it is called once.
        *operands: Arrays, and groups of leaves.
        leading: The names of the operands in front of the groups.
        name: What it is called in programs and errors; as ``function`` by default.
    """
    if not _jax.runs_eagerly():
        return traced(*operands)

    # Another function each time, or JAX would know it again.
    def inner(*operands: Any) -> Any:
        return traced(*operands)

    named = debug_info.named_after(function, inner, leading, name=name)
    program, shapes = jax.make_jaxpr(named, return_shape=True)(*operands)
    _, captured = jaxprs.opened(program)
    compiled = _compiled(program, named.__name__)
    outputs = compiled(captured, jax.tree.leaves(operands))
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def _compiled(program: Any, name: str) -> Callable[..., list[Any]]:
    """What computes a program, of its constants and inputs; an earlier one if known."""
    try:
        order = _jax.order_of_derivative()
        key = name, order, _Key(order).of(program)
        hash(key)
    except TypeError:  # something has no hash
        return _compile(program, name)
    with _lock:
        known = _known.pop(key, None)
        _known[key] = compiled = known or _compile(program, name)
        if len(_known) > MOST:
            del _known[next(iter(_known))]
    return compiled


def _compile(program: Any, name: str) -> Callable[..., list[Any]]:
    evaluate = jaxprs.evaluator(program)
    evaluate.__name__ = name
    return jax.jit(evaluate)


_known: dict[Hashable, Callable[..., list[Any]]] = {}
_lock = threading.RLock()


# Keys.

# The parameters that only derivatives read: rules, which are new ones in each trace.
_RULES: Mapping[str, tuple[str, ...]] = {
    "custom_jvp_call": ("jvp_jaxpr_fun",),
    "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd", "out_trees"),
}
_PLAIN = frozenset({bool, int, str, bytes, type(None)})
# What these define equals what means the same, as JAX's own caches rely on.
_TRUSTED = frozenset({"graftree", "jax", "jaxlib", "ml_dtypes", "numpy"})


class _Key:
    """Makes the key of one program.

    Args:
        order: How many times the program may be differentiated.
    """

    def __init__(self, order: int) -> None:
        self._order = order
        self._contexts: dict[int, Any] = {}

    def of(self, program: Any) -> Hashable:
        """The key of a program, without the constants of the outermost one."""
        jaxpr, _ = jaxprs.opened(program)
        numbers = {x: i for i, x in enumerate([*jaxpr.constvars, *jaxpr.invars])}
        types = [x.aval for x in numbers]
        equations = [self._of_equation(x, numbers) for x in jaxpr.eqns]
        outputs = [self._of_atom(x, numbers) for x in jaxpr.outvars]
        return len(jaxpr.invars), *types, *equations, *outputs

    def _of_equation(self, equation: Any, numbers: dict[Any, int]) -> Hashable:
        inputs = [self._of_atom(x, numbers) for x in equation.invars]
        for x in equation.outvars:
            numbers[x] = len(numbers)
        rules = _RULES.get(equation.primitive.name, ())
        parameters: list[Hashable] = [
            (key, self._of_value(x))
            for key, x in equation.params.items()
            if key not in rules
        ]
        if rules and self._order:
            parameters.append(self._of_rules(equation, rules))
        return (
            equation.primitive,
            len(equation.outvars),
            self._of_context(_jax.context_of(equation)),
            *_jax.scopes_of(equation),
            *inputs,
            *parameters,
        )

    def _of_rules(self, equation: Any, names: Iterable[str]) -> Hashable:
        """That of the rules for a derivative: of the program that they are now."""
        found = jaxprs.rule_of_derivative(equation)
        if found is None:
            return tuple([_same(equation.params.get(name)) for name in names])
        program, constants = found
        return _Key(self._order - 1).of(program), *map(_same, constants)

    def _of_atom(self, x: Any, numbers: dict[Any, int]) -> Hashable:
        if isinstance(x, jaxprs.Literal):
            return x.aval, self._of_value(x.val)
        return numbers[x]

    def _of_context(self, context: Any) -> Hashable:
        """That of a context, which many equations share."""
        known = self._contexts.get(id(context))
        if known is None:
            slots = getattr(type(context), "__slots__", ())
            names = [x for x in slots if x != "__weakref__"]
            found = tuple([self._of_value(getattr(context, x, None)) for x in names])
            # Of one whose parts are not known only identity could tell.
            known = self._contexts[id(context)] = found or _same(context)
        return known

    def _of_value(self, x: Any) -> Hashable:
        kind = type(x)
        if kind in _PLAIN:
            return kind, x
        if isinstance(x, _NUMBERS):
            x = np.asarray(x)
            return kind, x.dtype, x.shape, x.tobytes()
        if jaxprs.is_program(x):
            return kind, self.of(x), *map(_same, jaxprs.opened(x)[1])
        if isinstance(x, (tuple, list)):
            return kind, *map(self._of_value, x)
        if isinstance(x, (dict, frozenset)):
            members = x.items() if isinstance(x, dict) else x
            return kind, frozenset(map(self._of_value, members))
        if kind.__module__.partition(".")[0] not in _TRUSTED:
            return _same(x)
        if dataclasses.is_dataclass(x):
            fields = dataclasses.fields(x)
            return kind, *[self._of_value(getattr(x, f.name)) for f in fields]
        # A function may reach what it likes; so may one in the clothes of JAX.
        is_function = callable(x) or hasattr(x, "call_wrapped")
        return _same(x) if is_function or isinstance(x, jax.Array) else (kind, x)


def _same(x: Any) -> Exactly:
    """What is compared by identity; it lives as long as the key."""
    if isinstance(x, _jax.Tracer):
        raise TypeError("The program holds values of a trace: it is used once.")
    return Exactly(x)


_NUMBERS = (float, complex, np.ndarray, np.generic)
