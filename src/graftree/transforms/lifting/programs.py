"""Control flow outside of a compiled function: traced each time, compiled once.

Values that a function reaches besides its arguments may have changed since the last
call: globals, closures, classes, anything that Python allows. So it is traced on every
call, and nothing is remembered of these values. Captured arrays become operands of the
program, and a program that equals an earlier one is replaced by that one, which JAX has
compiled. The key of a program is its content:

    equations      primitive, parameters, context, scope, the values they read
    types          of its inputs, and of the arrays that it captured
    parameters     plain values, and those defined by JAX and NumPy, by value; programs
                   by their content; functions and all else by identity
    numbers in it  by their bytes: 0.0 is not -0.0

A program that can't be compared is compiled again: slow, but right. So is each one
while ``graftree_caches`` is off.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np

from graftree import _jax, config
from graftree.core.graph.differences import ByIdentity
from graftree.transforms.lifting import debug_info, jaxprs

# How many programs are kept, those that were used last. A small one takes 0.5 MB.
MOST = 1_024


def run(
    function: Callable[..., Any],
    traced: Callable[..., Any],
    *operands: Any,
    leading: Sequence[str] = (),
    name: str | None = None,
) -> Any:
    """Runs a traced function for some operands.

    In a function that JAX compiles it becomes part of that program.

    Args:
        function: The user's.
        traced: The function that JAX traces; it is called once.
        *operands: Arrays, and groups of leaves.
        leading: The names of the operands in front of the groups.
        name: Its name in programs and errors; that of ``function`` by default.
    """
    if not _jax.runs_eagerly():
        return traced(*operands)

    # A new function each time, or JAX would recognize it.
    def inner(*operands: Any) -> Any:
        return traced(*operands)

    named = debug_info.named_after(function, inner, leading, name=name)
    program, shapes = jax.make_jaxpr(named, return_shape=True)(*operands)
    find = kept.find if config.caches.are_used else _compile
    compiled = find(program, named.__name__)
    outputs = compiled(program.consts, jax.tree.leaves(operands))
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


def are_equal(first: Any, second: Any) -> bool:
    """Whether two programs are the same; when in doubt they are not."""
    order = _jax.order_of_derivative()
    try:
        is_equal = _key_of(first, order) == _key_of(second, order)
    except TypeError:
        return False
    constants = jaxprs.opened(first)[1], jaxprs.opened(second)[1]
    return is_equal and all(map(_is_same_constant, *constants))


def _is_same_constant(x: Any, y: Any) -> bool:
    have_numbers = all(
        isinstance(z, np.ndarray) or _jax.is_concrete(type(z)) for z in (x, y)
    )
    return x is y or (have_numbers and x.dtype == y.dtype and np.array_equal(x, y))


def _compile(program: Any, name: str) -> Callable[..., list[Any]]:
    """Computes a program from its constants and inputs, without keeping the constants.

    Nor does it keep the user's numbers. JAX reads a NumPy array when it first meets it,
    and goes on with the values read as long as any program holds the array, even after
    it was changed in place. So numbers within the program are copied.
    """
    jaxpr = _copied(program.jaxpr)
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    without_constants = jaxpr.replace(constvars=[], invars=inputs)

    def evaluate(constants: list[Any], values: list[Any]) -> list[Any]:
        return jax.core.eval_jaxpr(without_constants, (), *constants, *values)

    evaluate.__name__ = name
    return jax.jit(evaluate)


def _copied(x: Any) -> Any:
    """Copies the user's numbers in a program, or in a part of one."""
    if isinstance(x, jaxprs.Literal) and isinstance(x.val, np.ndarray):
        return jaxprs.Literal(x.val.copy(), x.aval)
    if type(x) is tuple:
        return tuple(map(_copied, x))
    if not isinstance(x, jaxprs.PROGRAMS):
        return x
    jaxpr, constants = jaxprs.opened(x)
    equations = [
        equation.replace(
            invars=[*map(_copied, equation.invars)],
            params={name: _copied(value) for name, value in equation.params.items()},
        )
        for equation in jaxpr.eqns
    ]
    copied = jaxpr.replace(eqns=equations, outvars=[*map(_copied, jaxpr.outvars)])
    return copied if x is jaxpr else x.replace(jaxpr=copied, consts=constants)


class KeptPrograms:
    """Compiled programs by their content; those used last."""

    def __init__(self) -> None:
        self._compiled: dict[Hashable, Callable[..., list[Any]]] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._compiled)

    def find(self, program: Any, name: str) -> Callable[..., list[Any]]:
        """Finds the function that runs a program, or makes it."""
        try:
            order = _jax.order_of_derivative()
            key = name, order, _key_of(program, order)
            hash(key)
        except TypeError:  # something has no hash
            return _compile(program, name)
        with self._lock:
            compiled = self._compiled.pop(key, None) or _compile(program, name)
            self._compiled[key] = compiled
            if len(self._compiled) > MOST:
                del self._compiled[next(iter(self._compiled))]
        return compiled

    def clear(self) -> None:
        """Forgets all of them."""
        with self._lock:
            self._compiled.clear()


kept = KeptPrograms()
config.caches.add(kept)


# Keys.

# The parameters that only derivatives read: rules, which are new ones in each trace.
_RULES: Mapping[str, tuple[str, ...]] = {
    "custom_jvp_call": ("jvp_jaxpr_fun",),
    "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd", "out_trees"),
}
_PLAIN = frozenset({bool, int, str, bytes, type(None)})
# Values of these packages are equal if they mean the same; JAX's own caches rely on it.
_TRUSTED = frozenset({"graftree", "jax", "jaxlib", "ml_dtypes", "numpy"})


def _key_of(program: Any, order: int) -> Hashable:
    """Makes the key of a program, without the constants of the outermost one.

    Args:
        program: The program.
        order: How many times it may be differentiated.
    """
    jaxpr, _ = jaxprs.opened(program)
    numbers = {x: i for i, x in enumerate([*jaxpr.constvars, *jaxpr.invars])}
    key: list[Hashable] = [len(jaxpr.invars), *[x.aval for x in numbers]]

    def of_atom(x: Any) -> Hashable:
        if isinstance(x, jaxprs.Literal):
            return x.aval, _key_of_value(x.val, order)
        return numbers[x]

    for equation in jaxpr.eqns:
        inputs = [*map(of_atom, equation.invars)]
        for x in equation.outvars:
            numbers[x] = len(numbers)
        rules = _RULES.get(equation.primitive.name, ())
        parameters: list[Hashable] = [
            (name, _key_of_value(x, order))
            for name, x in equation.params.items()
            if name not in rules
        ]
        if rules and order:
            parameters.append(_key_of_rules(equation, rules, order))
        key.append(
            (
                equation.primitive,
                len(equation.outvars),
                _jax.context_of(equation),  # JAX has one object for equal ones
                *_jax.scopes_of(equation),
                *inputs,
                *parameters,
            )
        )
    return *key, *map(of_atom, jaxpr.outvars)


def _key_of_rules(equation: Any, names: Iterable[str], order: int) -> Hashable:
    """Makes the key of the rules for a derivative: of their present program."""
    rule = jaxprs.rule_of_derivative(equation)
    if rule is None:
        return tuple([_same(equation.params.get(name)) for name in names])
    program, constants = rule
    return _key_of(program, order - 1), *map(_same, constants)


def _key_of_value(x: Any, order: int) -> Hashable:
    """Makes the key of a parameter or a number, or of a part of one."""
    kind = type(x)
    if kind in _PLAIN:
        return kind, x
    if isinstance(x, _NUMBERS):
        x = np.asarray(x)
        return kind, x.dtype, x.shape, x.tobytes()
    if isinstance(x, jaxprs.PROGRAMS):
        return kind, _key_of(x, order), *map(_same, jaxprs.opened(x)[1])
    if isinstance(x, (tuple, list)):
        return kind, *[_key_of_value(member, order) for member in x]
    if isinstance(x, (dict, frozenset)):
        members = x.items() if isinstance(x, dict) else x
        return kind, frozenset([_key_of_value(member, order) for member in members])
    if kind.__module__.partition(".")[0] not in _TRUSTED:
        return _same(x)
    if dataclasses.is_dataclass(x):
        values = [getattr(x, field.name) for field in dataclasses.fields(x)]
        return kind, *[_key_of_value(value, order) for value in values]
    # A function may reach anything; so may one that JAX has wrapped.
    is_function = callable(x) or hasattr(x, "call_wrapped")
    return _same(x) if is_function or isinstance(x, jax.Array) else (kind, x)


def _same(x: Any) -> ByIdentity:
    """A value compared by identity; it lives as long as the key."""
    if isinstance(x, _jax.Tracer):
        raise TypeError("The program holds values of a trace: it is used once.")
    return ByIdentity(x)


_NUMBERS = (float, complex, np.ndarray, np.generic)


class Compilations:
    """Counts the programs that JAX compiles, so that a call can ask if it was for it.

    A call reads the count before and after, which costs nothing else.

    Attributes:
        count: The number of the latest program.
    """

    def __init__(self) -> None:
        self.count = 0
        self._numbers = itertools.count(1)
        self._own = threading.local()

    def heed(self, event: str, duration_secs: float, **facts: Any) -> None:
        """Counts a program, if the event is that JAX has compiled one."""
        if event == _COMPILED:
            self.count = self._own.latest = next(self._numbers)

    def are_there_since(self, count: int) -> bool:
        """Whether JAX compiled in this thread since the count was read."""
        return getattr(self._own, "latest", 0) > count


_COMPILED = "/jax/core/compile/backend_compile_duration"
compilations = Compilations()


@functools.cache
def count_compilations() -> None:
    """Has `compilations` count from now on."""
    jax.monitoring.register_event_duration_secs_listener(compilations.heed)
