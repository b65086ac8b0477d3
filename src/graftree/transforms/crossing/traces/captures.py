"""What functions reach besides their arguments; traces used again while that stays.

A trace of a function holds what the function captured as constants. So it may be used
again only if all that the function can reach besides its arguments is known, and is as
it was. `record` follows the names in its code (closure, globals, defaults), and through
other functions and classes in turn, and lists what it finds:

    found                                      recorded as
    number, string, tuple of such, dtype, ...  type and value
    array                                      itself
    function                                   its code, and what it names in turn
    class                                      itself, and its methods in turn
    module, function or class of JAX, NumPy    itself: trusted to stay as it is, unless
      and the like                             JAX's functions have been replaced
    another module                             what of it the code names, as in ``m.f``
    anything else                              not at all: there is no record then

The last is a rule, not an exception: an object with attributes, a list, a NumPy array,
a callable object may lead to a model, or be changed in place. Methods of the arguments
reach as far as the function, so the classes of the arguments are followed, too.

`PerFunction` remembers traces of control flow by that. JAX knows a body or a branch
again by the identity of the function that it gets, which is a wrapper here. So the
whole of a control-flow call is one function under `jax.jit`, inlined into what is
around it, and it is remembered for as long as the user's functions live. Under
`jax.jit` the wrappers inside may be made afresh: they are traced only when it is. So
they may close over what doesn't change in the loop, and note what the user's function
did; the note leaves as static data of the output.
"""

from __future__ import annotations

import builtins
import collections
import dis
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import jax
import numpy as np

from graftree import _jax, config
from graftree.config import Propagation
from graftree.core.graph.differences import Exactly
from graftree.core.graph.graphdefs import Static
from graftree.core.objects import methods, running
from graftree.core.pickling import Rebuilt
from graftree.core.variables import sharding
from graftree.transforms.crossing import guises
from graftree.transforms.crossing.signatures import Signature

# What these packages hold stays as it is, or is compared by JAX itself.
_TRUSTED = frozenset({"builtins", "graftree", "jax", "jaxlib", "math", "numpy"})
_UNTRUSTED = frozenset(
    {"__import__", "breakpoint", "eval", "exec", "globals", "input", "open", "print"}
)
_CONSTANTS = (
    *(int, float, complex, str, bytes, type(None), type(Ellipsis), range),
    *(np.generic, np.dtype, jax.sharding.Sharding, jax.sharding.PartitionSpec),
)
# Attributes of classes that say what a class is; methods don't ask for them.
_DESCRIBING = frozenset(
    """
    __module__ __qualname__ __doc__ __annotations__ __dict__ __weakref__ __slots__
    __dataclass_fields__ __dataclass_params__ __match_args__ __abstractmethods__
    __orig_bases__ __parameters__ __type_params__ __static_attributes__
    __firstlineno__ _abc_impl
    """.split()
)
_PLAIN = (int, bool, str, bytes, type(None))
_TRUSTED_KINDS = (np.ufunc, GetSetDescriptorType, MemberDescriptorType)
_JITTED = type(jax.jit(lambda: None))

Record = list[Any]


def record(
    functions: Iterable[Callable[..., Any]], arguments: Signature, *, strict: bool
) -> Record | None:
    """All that functions reach besides their arguments; equal as long as that stays.

    It is ``None`` if there is something that could change unseen. If it is ``strict``,
    classes of the arguments are followed, and lists, dicts, sets and names that a
    function assigns itself are a reason to give up. Else these are left out if there is
    no object in them, so that a function that counts its own traces is traced once.
    """
    if not _jax.is_as_imported():
        return None
    walk = _Walk(strict)
    try:
        for function in functions:
            walk.visit(function)
        if strict:
            walk.visit_arguments(arguments)
    except _OpenError:
        return None
    return [*walk.found, config.in_force(), sharding.get_logical_axis_rules()]


class _OpenError(Exception):
    """Something was reached that could change unseen."""


class _Walk:
    """One walk over all that some functions reach."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.found: Record = []
        self.met: set[int] = set()

    def visit(self, x: Any) -> None:
        """Records a value and what it leads to, or raises."""
        kind = type(x)
        if kind in _PLAIN:
            self.found += [kind, x]
        elif id(x) in self.met:
            return
        elif kind is tuple or kind is frozenset:
            self.found += [kind, len(x)]
            self._visit_all(x)
        elif _is_trusted(x, kind) or self._is_left_out(x):
            self.found.append(Exactly(x))
        elif kind is FunctionType:
            self.met.add(id(x))
            self._visit_function(x)
        elif isinstance(x, type):
            self.met.add(id(x))
            self._visit_class(x)
        elif (parts := _parts_of(x)) is not None:
            self._visit_all(parts)
        elif isinstance(x, _CONSTANTS) and _is_known(kind):
            self.found.append(Static(x))
        elif isinstance(x, jax.Array) and not isinstance(x, _jax.Tracer):
            self.found.append(Exactly(x))
        else:
            raise _OpenError

    def _visit_all(self, members: Iterable[Any]) -> None:
        for member in members:
            self.visit(member)

    def _is_left_out(self, x: Any) -> bool:
        if self.strict or type(x) not in (list, dict, set):
            return False
        members = [*x, *x.values()] if isinstance(x, dict) else x
        return all(isinstance(member, _CONSTANTS) for member in members)

    def _visit_function(self, function: FunctionType) -> None:
        names = _names_in(function.__code__)
        if names.is_open or (self.strict and names.assigned):
            raise _OpenError
        if vars(function).keys() - {"__wrapped__"}:
            raise _OpenError  # whoever names it can read its attributes
        self.found.append(function.__code__)
        self.visit(function.__defaults__)
        self._visit_all((function.__kwdefaults__ or {}).items())
        self._visit_all(vars(function).values())
        for name, value in _named_values(function, names):
            if type(value) is ModuleType:
                self._visit_module(value, names.followed.get(name, [()]))
            elif name not in names.assigned or not isinstance(value, _CONSTANTS):
                self.visit(value)

    def _visit_module(
        self, module: ModuleType, named: Iterable[tuple[str, ...]]
    ) -> None:
        """Records what code names of a module, as in ``m.f`` or ``m.below.f``."""
        for attributes in named:
            x: Any = module
            for name in attributes:
                # What a trusted module holds is trusted, but for modules below it.
                below = vars(x).get(name)
                if _is_trusted_module(x) and type(below) is not ModuleType:
                    break
                if name not in vars(x):
                    raise _OpenError
                x = below
                if type(x) is not ModuleType:
                    break
            else:
                if _draws(x):
                    raise _OpenError  # as a whole it may be asked for anything
            if type(x) is ModuleType and _is_trusted_module(x):
                self.found.append(Exactly(x))
            else:
                self.visit(x)

    def _visit_class(self, cls: type) -> None:
        self.found.append(Exactly(cls))
        self._visit_all(cls.__bases__)
        for name, value in vars(cls).items():
            if name not in _DESCRIBING:
                self.visit(value)

    def visit_arguments(self, arguments: Signature) -> None:
        """Follows the classes and the static values of the arguments, or raises."""
        self._visit_all(arguments.led_to)


def _is_trusted(x: Any, kind: type) -> bool:
    """Whether ``x`` is of a known package, and holds nothing of the user's."""
    if kind is FunctionType:
        return x.__closure__ is None and _is_known(x)
    if kind is ModuleType:
        return _is_trusted_module(x) and not _draws(x)
    if kind is BuiltinFunctionType:
        is_free = x.__self__ is None or isinstance(x.__self__, ModuleType)
        return is_free and _is_known(x)
    return kind in _TRUSTED_KINDS or (
        issubclass(kind, (type, _JITTED, jax.custom_jvp, jax.custom_vjp))
        and _is_known(x)
    )


def _is_trusted_module(x: ModuleType) -> bool:
    """Whether what a module holds stays as it is: not the generator of NumPy."""
    name = x.__name__
    return name.partition(".")[0] in _TRUSTED and not name.startswith("numpy.random")


def _draws(x: ModuleType) -> bool:
    """Whether NumPy's generator, which is global, can be reached through a module."""
    return x.__name__ == "numpy" or x.__name__.startswith("numpy.random")


def _is_known(x: Any) -> bool:
    """Whether a function or class is of a package that is trusted."""
    return str(x.__module__).partition(".")[0] in _TRUSTED


def _parts_of(x: Any) -> Iterable[Any] | None:
    """What something consists of that is a function in other clothes."""
    kind = type(x)
    if kind is functools.partial and not vars(x):
        return (x.func, x.args, *x.keywords.items())
    if kind is MethodType:
        return x.__func__, x.__self__
    if kind in (staticmethod, classmethod):
        return (x.__func__,)
    if kind is methods.Known:
        return (methods.function_of(x),)
    if kind is property:
        return x.fget, x.fset, x.fdel
    return (x.__wrapped__,) if kind is _JITTED else None


# The code of functions.


class _Names(NamedTuple):
    """What the code of a function, with that of functions inside, names from outside.

    Attributes:
        globals: The names of globals and built-ins that it reads.
        followed: The attributes that it asks next of what has this name from outside.
        assigned: The names outside of it that it assigns or deletes.
        is_open: Whether it does what can't be followed.
    """

    globals: tuple[str, ...]
    followed: Mapping[str, frozenset[tuple[str, ...]]]
    assigned: frozenset[str]
    is_open: bool


def _names_in(code: CodeType) -> _Names:
    known = _known_names.get(code)
    if known is None:
        known = _known_names[code] = _find_names(code)
    return known


_known_names: weakref.WeakKeyDictionary[CodeType, _Names]
_known_names = weakref.WeakKeyDictionary()


def _find_names(code: CodeType) -> _Names:
    read: dict[str, None] = {}
    followed: dict[str, set[tuple[str, ...]]] = collections.defaultdict(set)
    assigned: set[str] = set()
    is_open = False
    loaded: tuple[str, ...] = ()
    for name, value in _instructions(code):
        if loaded and name in _ATTRIBUTES:
            loaded = (*loaded, value)
        elif loaded:
            followed[loaded[0]].add(loaded[1:])
            loaded = ()
        if name in _LOADING:
            loaded = (value,)
        if name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            read[value] = None
        elif name == "IMPORT_NAME":
            # As a local name, NumPy's generator is not seen below.
            package = value.partition(".")[0]
            is_open |= package not in _TRUSTED or package == "numpy"
        elif name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            assigned.add(value)
        elif name in ("STORE_DEREF", "DELETE_DEREF") and value in code.co_freevars:
            assigned.add(value)
    # Code ends with a return, so that nothing is loaded any more.
    found = {name: frozenset(x) for name, x in followed.items()}
    return _Names((*read,), found, frozenset(assigned), is_open)


_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
# What puts the value of a name from outside on the stack.
_LOADING = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"}
    | {"LOAD_FROM_DICT_OR_GLOBALS", "LOAD_FROM_DICT_OR_DEREF"}
)


def _instructions(code: CodeType) -> Iterator[tuple[str, Any]]:
    for instruction in dis.get_instructions(code):
        yield instruction.opname, instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


def _named_values(function: FunctionType, names: _Names) -> Iterator[tuple[str, Any]]:
    """The names outside of a function that it reads, and what they stand for."""
    for name in names.globals:
        yield name, _global_value(function, name)
    closure = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, closure, strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a variable that is not set yet
            raise _OpenError from None


def _global_value(function: FunctionType, name: str) -> Any:
    if name in function.__globals__:
        return function.__globals__[name]
    if name in _UNTRUSTED or not hasattr(builtins, name):
        raise _OpenError
    return getattr(builtins, name)


# Traces that are used again.

# How many traces of the same functions are remembered, for other things captured.
_LIMIT = 8


class PerFunction(Rebuilt):
    """Compiled functions, remembered weakly by the user's functions in them.

    What to compile is made by ``make(*getters, mode, *key)``. A getter returns one of
    the functions: what is remembered must not keep them alive.

    Args:
        name: What is compiled, in the words of JAX: ``scan`` for example.
        make: See above.
        leading: The names of its arguments in front of the groups.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Callable[..., Any]],
        leading: Sequence[str] = (),
    ) -> None:
        self._name, self._make, self._leading = name, make, leading
        # By the key, then by one function after the other: an entry goes with each.
        self._known: dict[Any, weakref.WeakKeyDictionary[Any, Any]] = {}

    def get(
        self,
        functions: tuple[Callable[..., Any], ...],
        arguments: Signature,
        mode: Propagation,
        *key: Any,
    ) -> Any:
        """The compiled function for these functions of the user.

        With graph updates, the default, a call sees all that its functions can reach as
        it is now. Without, as in the peer, it may go on with what a list or dict of
        constants held before.
        """
        reached = record(functions, arguments, strict=mode.structure)
        is_watched = running.stack.apart is not None
        is_known = not (reached is None or is_watched)
        traces = self._traces(functions, (mode, *key)) if is_known else None
        if traces is None:
            return self._compile([lambda f=f: f for f in functions], mode, key)
        for before, compiled in traces:
            if before == reached:
                return compiled
        compiled = self._compile([*map(weakref.ref, functions)], mode, key)
        traces[:] = [(reached, compiled), *traces[: _LIMIT - 1]]
        return compiled

    def _traces(self, functions: Any, key: Any) -> list[Any] | None:
        """What is known of functions; ``None`` if they can't be referred to weakly."""
        *others, last = functions
        known = self._known.setdefault(
            (len(functions), key), weakref.WeakKeyDictionary()
        )
        try:
            for function in others:
                known = known.setdefault(function, weakref.WeakKeyDictionary())
            return known.setdefault(last, [])
        except TypeError:
            return None

    def _compile(self, getters: Any, mode: Propagation, key: tuple[Any, ...]) -> Any:
        made = self._make(*getters, mode, *key)
        function = getters[-1]()
        named = guises.named_after(function, made, self._leading, name=self._name)
        return jax.jit(named, inline=_jax.inlined)
