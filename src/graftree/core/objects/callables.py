"""Callables that hold objects: taken apart like containers, and put together again.

A method has its object, a partial its arguments, and a transformed function the
function that it was made of. JAX sees each of these as a leaf. Here they are pytrees:

    Opened      a method, partial or transformed function, in its parts
    Constant    a part that isn't data: a function, a number, an option

A transform takes them apart where they are arguments, and its own function, if that
holds objects (`Functions`). What is held is an argument then, and no constant: the
function that is traced gets a callable of the same form with the objects of the trace.
"""

from __future__ import annotations

import collections
import enum
import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from graftree import _jax, _python, errors
from graftree.core import fingerprints, walks
from graftree.core.objects import attributes
from graftree.core.variables.variables import Variable


class Recipe(NamedTuple):
    """How a callable is built of its parts.

    Attributes:
        names: The attributes that have the parts.
        build: ``build(extra, *parts)`` makes it.
        extra: What the parts don't say.
    """

    names: tuple[str, ...]
    build: Callable[..., Any]
    extra: Any


class Opened:
    """A callable in its parts; a pytree.

    Args:
        form: How it is built.
        parts: Trees of objects, arrays, `Constant` and `Opened`.
    """

    __slots__ = ("form", "parts")

    def __init__(self, form: Recipe, parts: Iterable[Any]) -> None:
        self.form, self.parts = form, tuple(parts)


class Constant:
    """A value in a callable that is part of its structure; a pytree without leaves."""

    __slots__ = ("_fingerprint", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._fingerprint = fingerprints.fingerprint(value)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Constant)
            and self._fingerprint == other._fingerprint
            and fingerprints.same_value(self.value, other.value)
        )

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __reduce__(self) -> Any:
        return Constant, (self.value,)


jax.tree_util.register_pytree_with_keys(
    Opened,
    lambda x: (
        [*zip(map(jax.tree_util.GetAttrKey, x.form.names), x.parts, strict=True)],
        x.form,
    ),
    Opened,
    lambda x: (x.parts, x.form),
)
jax.tree_util.register_pytree_node(
    Constant, lambda x: ((), x), lambda constant, _: constant
)


# The record that a transformed function has of what it was made of.
_RECORD = "_made_of"


class _Record(NamedTuple):
    """``make(tree)`` makes the function again.

    `functools.wraps` copies it to wrappers of the function, which wrap another one.
    """

    wrapped: Any
    make: Callable[[Any], Any]
    tree: Any


def remember(function: Any, make: Callable[[Any], Any], tree: Any) -> Any:
    """Notes what a function holds: ``make(tree)`` makes it again. Returns it."""
    entries = vars(function)
    entries[_RECORD] = _Record(entries.get("__wrapped__"), make, tree)
    return function


def _record_of(x: Any) -> _Record | None:
    entries = getattr(x, "__dict__", {})
    record = entries.get(_RECORD)
    if record is None or record.wrapped is not entries.get("__wrapped__"):
        return None
    return record


# Exact types whose instances may hold objects; JAX sees them as leaves. Our own
# derive from `Holder`.
TYPES: set[type] = {types.MethodType, functools.partial, types.FunctionType}


class Holder:
    """Base of transformed functions that are objects: they may hold others."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        TYPES.add(cls)


# Types that users registered as graph nodes, by `nodes.register_graph_node_type`.
NODE_TYPES: set[type] = set()


def is_object(x: Any) -> bool:
    """Whether a value is tracked by identity: an object, a Variable."""
    kind = type(x)
    return issubclass(kind, (attributes.DataObject, Variable)) or kind in NODE_TYPES


def _take_apart(x: Any) -> tuple[Recipe, tuple[Any, ...]] | None:
    """Returns the form and the parts of a callable; ``None`` if it has none."""
    if type(x) is types.MethodType:
        return _METHOD, (x.__func__, x.__self__)
    if isinstance(x, functools.partial):
        return Recipe(_PARTIAL, _partial, type(x)), (x.func, x.args, x.keywords)
    record = _record_of(x) if type(x) in TYPES else None
    return record and (Recipe(("__wrapped__",), _remade, record.make), (record.tree,))


def _partial(kind: Any, function: Any, args: Any, keywords: Any) -> Any:
    if not callable(function):  # the derivative of an object, a State
        return types.SimpleNamespace(func=function, args=args, keywords=keywords)
    return kind(function, *args, **keywords)


def _remade(make: Callable[[Any], Any], tree: Any) -> Any:
    return remember(make(tree), make, tree)


def _method(_: Any, function: Any, obj: Any) -> Any:
    return types.MethodType(function, obj)


_METHOD = Recipe(("__func__", "__self__"), _method, None)
_PARTIAL = ("func", "args", "keywords")


class Opener:
    """Takes callables apart, and notes what is in them.

    Args:
        is_part: Whether a value other than an object is data.
        constant: What stands for all else.

    Attributes:
        types: The types of all containers and values so far.
        parts: The data.
    """

    def __init__(
        self,
        is_part: Callable[[Any], bool],
        constant: Callable[[Any], Any] = Constant,
    ) -> None:
        self._is_part, self._constant = is_part, constant
        self.types: set[type] = set()
        self.parts: list[Any] = []

    def __call__(self, x: Any) -> Any:
        """Takes the callables in a tree apart; what isn't data becomes a constant."""
        return jax.tree.map(self._part, x, is_leaf=self._ends)

    def _ends(self, x: Any) -> bool:
        self.types.add(type(x))
        return is_object(x) or _take_apart(x) is not None

    def _part(self, x: Any) -> Any:
        apart = None if is_object(x) else _take_apart(x)
        if apart is not None:
            form, parts = apart
            if form.names is _PARTIAL:  # its own containers can't be changed
                function, args, keywords = parts
                named = {name: self(value) for name, value in keywords.items()}
                return Opened(form, (self(function), (*map(self, args),), named))
            return Opened(form, [*map(self, parts)])
        if is_object(x) or self._is_part(x):
            self.parts.append(x)
            return x
        return self._constant(x)


def opened(x: Any) -> Any:
    """Takes a callable argument apart; one without data is returned as it is."""
    if type(x) is types.MethodType and is_object(x.__self__):
        if type(x.__func__) not in TYPES or _record_of(x.__func__) is None:
            return Opened(_METHOD, (Constant(x.__func__), x.__self__))  # as below
    if type(x) not in TYPES or _take_apart(x) is None:
        return x
    opener = Opener(attributes.is_data)
    apart = opener(x)
    return apart if opener.parts else x


def opened_in(tree: Any) -> Any:
    """Takes the callables in a tree of arguments apart."""
    return jax.tree.map(opened, tree, is_leaf=is_object)


def closed(tree: Any) -> Any:
    """Puts the callables in a tree together again."""

    def whole(x: Any) -> Any:
        if type(x) is Opened:
            return x.form.build(x.form.extra, *map(closed, x.parts))
        return x.value if type(x) is Constant else x

    return jax.tree.map(
        whole, tree, is_leaf=lambda x: type(x) in (Opened, Constant) or is_object(x)
    )


# Callables as attributes.


class OwnMethod:
    """Stands in a structure for a callable over the object that has it.

    That of another object with this structure is bound to that object.

    Args:
        form: The callable in its parts, with `TheObject` for the object.
    """

    __slots__ = ("_form", "_structure")

    def __init__(self, form: Any) -> None:
        self._form, self._structure = form, jax.tree.structure(form)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnMethod) and self._structure == other._structure

    def __hash__(self) -> int:
        return hash(self._structure)

    def __reduce__(self) -> Any:
        return OwnMethod, (self._form,)

    def __repr__(self) -> str:
        return repr(self.bound_to(TheObject.OBJECT))

    def bound_to(self, obj: Any) -> Any:
        """Returns the callable over this object."""
        return closed(jax.tree.map(lambda _: obj, self._form))


class TheObject(enum.Enum):
    """Stands for the object that has a callable."""

    OBJECT = "itself"


# As a function: it doesn't change, and its type tells it from its equals.
fingerprints.PLAIN.add(OwnMethod)

# Exact types of callables that may be an object's own.
MAY_BE_OWN = frozenset({types.MethodType, functools.partial})


def as_static(value: Any, obj: Any) -> Any:
    """Returns the value of a static attribute of an object as its structure has it."""
    if type(value) not in MAY_BE_OWN:
        return value
    opener = Opener(attributes.is_data)
    apart = opener(value)
    if not opener.parts or any([x is not obj for x in opener.parts]):
        return value
    return OwnMethod(jax.tree.map(lambda _: TheObject.OBJECT, apart, is_leaf=is_object))


def as_statics(values: tuple[Any, ...], obj: Any) -> tuple[Any, ...]:
    """Applies `as_static` to all static attributes of an object."""
    return tuple([as_static(x, obj) for x in values])


def bound(statics: Iterable[Any], obj: Any) -> tuple[Any, ...]:
    """Values of static attributes for a new object: the inverse."""
    return tuple([x.bound_to(obj) if type(x) is OwnMethod else x for x in statics])


def bind_own(obj: Any, original: Any) -> None:
    """Binds what a copy of an object has of the original's own methods to the copy."""
    for name, value in [*vars(obj).items()]:
        static = as_static(value, original)
        if type(static) is OwnMethod:
            dict.__setitem__(vars(obj), name, static.bound_to(obj))


def warn_of_constants(obj: Any, name: str, value: Any) -> None:
    """Warns of callables in a static attribute that hold weights, or other state."""
    leaves = [value] if type(value) in MAY_BE_OWN else attributes.leaves_of(value)
    if MAY_BE_OWN.isdisjoint(map(type, leaves)) or type(as_static(value, obj)) is (
        OwnMethod
    ):
        return
    opener = Opener(attributes.is_data, type)
    opener([x for x in leaves if type(x) in MAY_BE_OWN])
    hidden = next((x for x in opener.parts if x is obj or _has_state(x)), None)
    if hidden is not None:
        owner, kind = type(obj).__name__, type(hidden).__name__
        holding = "its own object" if hidden is obj else f"a {kind}"
        _python.warn_user(
            errors.message(
                f"A static attribute has a callable that holds {holding}: its weights "
                "are constants in transforms and get no gradient.",
                where=f"{owner}.{name}: {type(value).__name__}",
                way_out=f"Store the object, and call its method: self.{name} = obj, "
                f"then self.{name}.method(...).\n"
                f"A method of the object itself can be stored as is: self.{name} = "
                "self.method.\n"
                f"If you want constants: self.{name} = nnx.static(...).",
            ),
            errors.ConstantStateWarning,
        )


def _has_state(x: Any) -> bool:
    """Whether there is a Variable of a kind, as a Param, in an object."""
    is_new, pending = walks.Once(), [x]
    for value in pending:
        if isinstance(value, Variable) and type(value) is not Variable:
            return True
        if is_new(value):
            if isinstance(value, attributes.DataObject):
                pending += vars(value).values()
            elif isinstance(value, (list, tuple, dict)):
                pending += value.values() if isinstance(value, dict) else value
    return False


# The functions of a transform.


class Functions:
    """Functions of a call, of which some hold objects.

    Arrays of NumPy in a partial stay as they are: a function may need their values
    while it is traced.

    Args:
        functions: In order.

    Attributes:
        functions: As given.
        leaves: The objects and arrays in them, if these are always the same.
    """

    def __init__(self, functions: Sequence[Any]) -> None:
        self.functions = tuple(functions)
        self.leaves: tuple[Any, ...] | None = None
        trees, opener = self._opened()
        if _MUTABLE.isdisjoint(opener.types) and not opener.types & _others(
            opener.types
        ):
            self.leaves = tuple(jax.tree.leaves(trees, is_leaf=is_object))
            self._trees = trees

    @staticmethod
    def of(functions: Sequence[Any]) -> Functions | None:
        """Returns the functions, if one holds objects."""
        return Functions(functions) if any(map(holds_objects, functions)) else None

    def now(self) -> tuple[Any, ...]:
        """Takes each of them apart; ``None`` for those that hold no objects."""
        return self._opened()[0] if self.leaves is None else self._trees

    def _opened(self) -> tuple[tuple[Any, ...], Opener]:
        opener = Opener(_is_traced)
        trees = [opener(f) if holds_objects(f) else None for f in self.functions]
        return tuple(trees), opener


def holds_objects(function: Any) -> bool:
    """Whether a function is, or holds, an object or a pytree with arrays."""
    if type(function) is types.FunctionType and _RECORD not in function.__dict__:
        return False
    if is_object(function):
        return True
    is_tree = _jax.is_pytree_type(type(function))
    if not is_tree and _take_apart(function) is None:
        return False
    opener = Opener(_is_traced, type)
    opener(function)
    return bool(opener.parts) and (
        any(map(is_object, opener.parts)) or bool(_others(opener.types))
    )


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.Array) or _jax.is_ref(x)


_MUTABLE = frozenset({list, dict, collections.OrderedDict, collections.defaultdict})
_CONTAINERS = {*_MUTABLE, tuple, type(None), functools.partial}


def _others(kinds: set[type]) -> set[type]:
    """Returns those types that are pytrees of other libraries, or of the user."""
    return {
        kind
        for kind in kinds - _CONTAINERS
        if _jax.is_pytree_type(kind)
        and not issubclass(kind, (attributes.DataObject, Variable, functools.partial))
    }


def objects_in(function: Any) -> list[Any]:
    """Lists the objects that a function is or holds."""
    opener = Opener(lambda x: False, type)
    opener(function)
    return opener.parts
