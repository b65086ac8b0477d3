"""Status of each attribute of an object: data or static.

The status of an attribute is declared (with `data` or `static`, in the class body or
around the assigned value) or inferred from the first value. This file holds the
declarations, the table of statuses that each object carries, and the checks that keep
arrays out of static attributes; `pytrees.py` calls them when attributes are set.

The facts about a class of Pytrees (`Facts`) are kept here, not on the class, whose
attributes all belong to the user. They are found when first needed, and again after a
change of something they depend on: the bases of a class, a property, ``__setattr__``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import FunctionType, SimpleNamespace
from typing import Annotated, Any, TypeVar, dataclass_transform, get_origin, overload

import jax

from graftree import _jax, _python, config
from graftree.core import ownership
from graftree.core.hashable_mappings import HashableMapping
from graftree.core.text import descriptions
from graftree.core.variables.variables import Variable

T = TypeVar("T")
MISSING: Any = dataclasses.MISSING

# The two statuses of attributes, by whether they are data.
WORDS = {True: "data", False: "static"}

# Exact types whose instances are data wherever they are assigned.
DATA_REGISTRY: set[type] = set()

_data_types: dict[type, bool] = {}

# Exact types of most static values: they are not data, nor do they contain any. Our
# own derive from `Atom`.
ATOMS: set[type] = {int, float, bool, str, bytes, complex, type(None), FunctionType}


class Atom:
    """Base of values that are static attributes wherever they are assigned."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        ATOMS.add(cls)


def register_data_type(type_: type[T], /) -> type[T]:
    """Makes instances of exactly this type data wherever they are assigned.

    Args:
        type_: The type; its subclasses are not registered.

    Returns:
        ``type_``, so that you can use this as a decorator.

    Example:
        >>> @nnx.register_data_type
        ... class Reading:
        ...     pass
        >>> nnx.is_data(Reading())
        True
    """
    DATA_REGISTRY.add(type_)
    ATOMS.discard(type_)
    _data_types.clear()
    return type_


def is_data(value: Any, /) -> bool:
    """Whether a value is data by itself: an array, a ref, a Variable or a Pytree.

    NumPy arrays and instances of registered types are data too. Lists, dicts and tuples
    are not, even if they hold arrays.

    Args:
        value: Any value.

    Returns:
        True for data, which any attribute stores as a child of the pytree.

    Example:
        >>> nnx.is_data(jnp.ones(2)), nnx.is_data(2), nnx.is_data([jnp.ones(2)])
        (True, False, False)
    """
    kind = type(value)
    is_registered = _data_types.get(kind)
    if is_registered is None:
        is_registered = _data_types[kind] = (
            kind in DATA_REGISTRY
            or _jax.is_data_type(kind)
            or issubclass(kind, (Variable, DataObject))
        )
    return is_registered


class DataObject(descriptions.PrintedNode):
    """Base of objects that are data wherever they are assigned."""

    __slots__ = ()


def has_data(value: Any, /) -> list[Any]:
    """Lists the data in a pytree: the leaves and nodes for which `is_data` holds.

    Args:
        value: Any value. Nodes that are data are listed whole.

    Returns:
        A new list in tree order.

    Example:
        >>> nnx.has_data([1, jnp.ones(2), "a"])
        [Array([1., 1.], dtype=float32)]
    """
    return [leaf for leaf in leaves_of(value, is_data) if is_data(leaf)]


def leaves_of(x: Any, is_leaf: Callable[[Any], bool] = is_data) -> list[Any]:
    """Lists leaves as ``jax.tree.leaves`` does, without atoms; of one leaf at once."""
    kind = type(x)
    if kind in ATOMS:
        return []
    # Tuples with names are pytrees though nobody registers them.
    if not _jax.is_pytree_type(kind) and not issubclass(kind, tuple):
        return [x]
    return jax.tree.leaves(x, is_leaf=is_leaf)


class AttributeField(dataclasses.Field):
    """Result of `data` and `static`: a status and, possibly, a value.

    In a class body it is a dataclass field. Assigning it stores the value it holds.
    """

    __slots__ = ()

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        # Reached only if the class is not a dataclass and the attribute was not set.
        if obj is None:
            return self
        if self.default is not MISSING:
            return self.default
        if self.default_factory is not MISSING:
            raise AttributeError(
                f"{type(obj).__name__} is not a dataclass, so the default_factory of "
                "an attribute is never called; decorate the class with nnx.dataclass."
            )
        raise AttributeError(f"An attribute of {type(obj).__name__} was never set.")

    @property
    def is_data(self) -> bool:
        """Whether the attribute is data."""
        return not self.metadata["static"]


def _attribute_field(is_data: bool, value: Any, options: dict[str, Any]) -> Any:
    name = WORDS[is_data]
    if value is not MISSING:
        if options:
            raise TypeError(f"nnx.{name} takes a value or field options, not both.")
        options = {"default": value}
    metadata = dict(options.pop("metadata", None) or {})
    if "static" in metadata:
        raise ValueError(f"nnx.{name} sets the metadata 'static' itself; leave it out.")
    metadata["static"] = not is_data
    if unknown := sorted(options.keys() - _FIELD_DEFAULTS.keys()):
        raise TypeError(f"nnx.{name} got unexpected options {unknown}.")
    return AttributeField(metadata=metadata, **(_FIELD_DEFAULTS | options))


_OPTIONS = inspect.signature(dataclasses.field).parameters.values()
_FIELD_DEFAULTS = {x.name: x.default for x in _OPTIONS if x.name != "metadata"}


@overload  # for a type checker the attribute gets the value itself
def data(value: T, /) -> T: ...
@overload
def data(*, default: T, **options: Any) -> T: ...
@overload
def data(**options: Any) -> Any: ...
def data(value: Any = MISSING, /, **options: Any) -> Any:
    """Marks an attribute as data: part of the state.

    Args:
        value: The value to assign to an attribute: any value or container.
        **options: In a class body: the options of ``dataclasses.field``.

    Returns:
        A dataclass field. Assigning it to an attribute stores ``value`` itself.

    Raises:
        TypeError: If both a value and options are given, or an unknown option.
        ValueError: If the option ``metadata`` contains ``"static"``.

    Example:
        >>> class Stack(nnx.Module):
        ...     def __init__(self):
        ...         self.weights = nnx.data([nnx.Param(jnp.ones(2))])
        >>> len(jax.tree.leaves(Stack()))
        1
    """
    return _attribute_field(True, value, options)


@overload
def static(value: T, /) -> T: ...
@overload
def static(*, default: T, **options: Any) -> T: ...
@overload
def static(**options: Any) -> Any: ...
def static(value: Any = MISSING, /, **options: Any) -> Any:
    """Marks an attribute as static: part of the structure.

    Args:
        value: The value to assign to an attribute. Assignment raises a ``ValueError``
            if it is, or contains, data.
        **options: In a class body: the options of ``dataclasses.field``.

    Returns:
        A dataclass field. Assigning it to an attribute stores ``value`` itself.

    Raises:
        TypeError: If both a value and options are given, or an unknown option.
        ValueError: If the option ``metadata`` contains ``"static"``.

    Example:
        >>> class Scale(nnx.Module):
        ...     def __init__(self):
        ...         self.factor = nnx.static(2)
        >>> jax.tree.leaves(Scale())
        []
    """
    return _attribute_field(False, value, options)


@dataclass_transform(field_specifiers=(dataclasses.field, data, static))
@overload
def dataclass(cls: type[T], /) -> type[T]: ...
@overload
def dataclass(
    *,
    init: bool = True,
    eq: bool = True,
    order: bool = False,
    unsafe_hash: bool = False,
    match_args: bool = True,
    kw_only: bool = False,
) -> Callable[[type[T]], type[T]]: ...
def dataclass(
    cls: type[T] | None = None,
    /,
    *,
    init: bool = True,
    eq: bool = True,
    order: bool = False,
    unsafe_hash: bool = False,
    match_args: bool = True,
    kw_only: bool = False,
    slots: bool = False,
    weakref_slot: bool = False,
) -> Any:
    """Makes a Pytree class a dataclass; it keeps the repr of Pytrees.

    Args:
        cls: The class; leave it out to pass options.
        init: As in ``dataclasses.dataclass``, like all further options.
        eq: See ``init``.
        order: See ``init``.
        unsafe_hash: See ``init``.
        match_args: See ``init``.
        kw_only: See ``init``.
        slots: See ``init``.
        weakref_slot: See ``init``.

    Returns:
        The class, or a decorator.

    Example:
        >>> @nnx.dataclass
        ... class Affine(nnx.Pytree):
        ...     scale: jax.Array = nnx.data()
        ...     name: str = nnx.static(default="affine")
        >>> jax.tree.map(lambda x: 2 * x, Affine(jnp.array(1.5)))
        Affine(
          name='affine',
          scale=Array(3., dtype=float32, weak_type=True)
        )
    """
    decorate = dataclasses.dataclass(
        init=init,
        repr=False,
        eq=eq,
        order=order,
        unsafe_hash=unsafe_hash,
        match_args=match_args,
        kw_only=kw_only,
        slots=slots,
        weakref_slot=weakref_slot,
    )
    return decorate if cls is None else decorate(cls)


Data = Annotated[T, "data"]
Static = Annotated[T, "static"]


# A class rarely has more attributes. A `List` may, but need not share its table.
_LONGEST_CHAIN = 64

_Names = tuple[str, ...]
_Getter = Callable[[Any], tuple[Any, ...]]
_Comparison = Callable[[Any, tuple[Any, ...]], tuple[Any, ...] | None]


@dataclasses.dataclass(frozen=True)
class Naming:
    """Order of the attributes of a class, and the keys for them in paths.

    Attributes:
        sort_key: As for ``sorted``; ``None`` sorts by name.
        key_of: ``name -> key``.
        name_of: ``(class, key) -> name``.
    """

    sort_key: Callable[[str], Any] | None = None
    key_of: Callable[[str], Hashable] = lambda name: name
    name_of: Callable[[type, Any], str] = lambda _, key: key


class AttributeTable(HashableMapping):
    """Statuses of an object's attributes: name -> is it data?

    Immutable: setting an attribute with a new name replaces the table of the object.
    Facts derived from a table are computed once per table. And a table remembers the
    one it was last extended to, so that objects made by the same code share theirs.
    """

    __slots__ = ("_extension", "_layout", "cached_getters", "data_if_same", "size")

    # `values_if_same`, there when `cached_getters` are.
    data_if_same: _Comparison

    def __init__(self, entries: Mapping[str, bool], /) -> None:
        super().__init__(entries)
        # These two are read each time that an object is taken apart.
        self.size = len(entries)
        self._extension: tuple[str, bool, AttributeTable] | None = None
        self.cached_getters: tuple[_Names, _Getter, _Getter, _Getter] | None = None
        self._layout: tuple[tuple[str, Hashable, bool], ...] | None = None

    def with_entry(self, key: str, value: bool) -> AttributeTable:
        """Returns the table in which ``key`` has this status: itself, or another."""
        last = self._extension
        if last is not None and last[0] == key and last[1] is value:
            return last[2]
        if self.get(key) is value:
            return self
        extended = super().with_entry(key, value)
        # Only one, and a longer one: a table keeps only a short chain alive.
        if len(self) < len(extended) <= _LONGEST_CHAIN:
            self._extension = key, value, extended
        return extended

    def getters(self, naming: Naming) -> tuple[_Names, _Getter, _Getter, _Getter]:
        """Returns functions that take ``vars`` apart and put them together, all in C.

        Returns:
            The sorted names of all attributes; two functions of ``vars`` that give the
            values of the data, and of the static attributes; and one that puts the
            tuple ``(*data, *static)`` in the order of the names.
        """
        if self.cached_getters is None:
            names = tuple([name for name, _, _ in self.layout(naming)])
            data = tuple([name for name in names if self[name]])
            static = tuple([name for name in names if not self[name]])
            position = {name: i for i, name in enumerate((*data, *static))}
            in_order = _getter([position[name] for name in names])
            self.data_if_same = values_if_same(data, static)
            self.cached_getters = names, _getter(data), _getter(static), in_order
        return self.cached_getters

    def layout(self, naming: Naming) -> tuple[tuple[str, Hashable, bool], ...]:
        """Lists for each attribute, sorted, name, key in paths, and status."""
        if self._layout is None:
            names, key_of = sorted(self, key=naming.sort_key), naming.key_of
            self._layout = tuple([(name, key_of(name), self[name]) for name in names])
        return self._layout


EMPTY_TABLE = AttributeTable({})


def _getter(keys: Sequence[Any]) -> _Getter:
    """Does as ``operator.itemgetter``, but gives a tuple for any number of keys."""
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    return lambda values: tuple([values[key] for key in keys])


@functools.lru_cache(maxsize=1024)
def values_if_same(names: _Names, fixed: _Names) -> _Comparison:
    """Makes a function that gives values of ``vars`` if the fixed ones are the same.

    It is generated: JAX flattens each object of a model on each call, and this takes a
    third of the time of `all` of a `map` of `operator.is_` (110 ns for nine values).
    """
    all_names = (*names, *fixed)
    if len(all_names) > _LONGEST_CHAIN or not {str}.issuperset(map(type, all_names)):
        values_of, fixed_of = _getter(names), _getter(fixed)

        def compare(entries: Any, objects: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if all(map(operator.is_, fixed_of(entries), objects)):
                return values_of(entries)
            return None

        return compare
    tests = [f"entries[{name!r}] is objects[{i}]" for i, name in enumerate(fixed)]
    values = "".join([f"entries[{name!r}], " for name in names])
    condition = " and ".join(tests) or "True"
    text = f"lambda entries, objects: ({values}) if {condition} else None"
    return _python.evaluate(text)


def check_no_tags(owner: type, name: str, value: Any) -> None:
    """Refuses ``nnx.data(...)`` and ``nnx.static(...)`` inside another structure."""
    leaves = () if is_data(value) else leaves_of(value, is_data)
    if any([type(x) is AttributeField for x in leaves]):
        raise ValueError(
            f"Found unexpected tags in the value of {owner.__name__}.{name}, of type "
            f"{type(value).__name__}: nnx.data and nnx.static mark a whole attribute.\n"
            f"Write self.{name} = nnx.data(<container>), or use nnx.List / nnx.Dict."
        )


_WAYS_OUT = (
    "If it is data, mark the attribute: self.{name} = nnx.data(...), or use nnx.List / "
    "nnx.Dict\nfor lists and dicts of Modules and Variables. If the class is not meant "
    "to be a pytree,\ndeclare it so: class {owner}(..., pytree=False)."
)


def data_error(phrase: str, owner: type, name: str, value: Any) -> ValueError:
    """Builds the error for data in a static attribute; ``phrase`` ends in 'of type'."""
    preposition = "to" if phrase.startswith("Cannot assign") else "in"
    return ValueError(
        f"{phrase} {type(value).__name__!r} {preposition} the static attribute "
        f"{name!r} of {owner.__name__}.\n"
        + _WAYS_OUT.format(name=name, owner=owner.__name__)
    )


F = TypeVar("F", bound=Callable[..., Any])


class Facts:
    """Facts about one class of Pytrees.

    Attributes:
        is_pytree: Whether its instances are JAX pytrees.
        descriptors: The names of its properties and descriptors that take assignments.
        statuses: The statuses that it declares: name -> is it data?
        naming: How attributes are named in paths.
        empty_table: Where the tables of its instances begin. One per class: a table
            remembers one extension, which is that of the class.
        sets_version: Whether setting and deleting attributes always gives a new version
            to the object.
        checks_itself: Whether it has a ``_check_valid_context`` of its own, to call
            before each change of an instance.
    """

    __slots__ = (
        *("is_pytree", "descriptors", "statuses", "naming", "empty_table"),
        *("sets_version", "checks_itself"),
    )

    def __init__(self, cls: type) -> None:
        self.is_pytree = _first(are_pytrees, cls, config.flax_pytree_module)
        self.descriptors = _data_descriptors(cls)
        self.statuses = declared_statuses(cls, warn=False)
        self.naming = _first(_namings, cls, PLAIN)
        self.empty_table = AttributeTable({})
        self.sets_version = _OURS.issuperset((cls.__setattr__, cls.__delattr__))
        check = getattr(cls, "_check_valid_context", None)
        self.checks_itself = check is not None and check not in _OURS


# The option of a class statement, for all classes below it that don't set it.
are_pytrees: dict[type, bool] = {}
_namings: dict[type, Naming] = {}
PLAIN = Naming()

# Our methods that a class may replace by its own.
_OURS: set[Any] = set()

facts_of = functools.cache(Facts)


def _first(entries: dict[type, Any], cls: type, default: Any) -> Any:
    return next((entries[base] for base in cls.__mro__ if base in entries), default)


# Gets a new version when a class changes so that its present instances are affected.
changes: Any = SimpleNamespace(version=0)


def forget() -> None:
    """Forgets the facts when a class changes, and with it those below it."""
    facts_of.cache_clear()
    ownership.touch(changes)


def named_by(naming: Naming) -> Callable[[F], F]:
    """Gives a class, and those below it, names of attributes in paths."""

    def decorate(cls: Any) -> Any:
        _namings[cls] = naming
        facts_of.cache_clear()
        return cls

    return decorate


def of_ours(method: F) -> F:
    """Declares a method to be ours: it sets the version, or checks the trace."""
    _OURS.add(method)
    return method


def name_of(cls: type, key: Any) -> str:
    """Returns the attribute that a key of a path stands for."""
    return facts_of(cls).naming.name_of(cls, key)


def _data_descriptors(cls: type) -> frozenset[str]:
    """Names the properties and descriptors of ``cls`` that take assignments."""
    # Not by getattr: it would run the descriptor, which may want an instance.
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        members |= vars(base)
    names = [name for name, x in members.items() if hasattr(type(x), "__set__")]
    return _shared_set(frozenset(names))


@functools.lru_cache(maxsize=256)
def _shared_set(names: frozenset[str]) -> frozenset[str]:
    """Returns one set for all classes with these names: most define none themselves."""
    return names


def declared_statuses(cls: type, warn: bool) -> dict[str, bool]:
    """Returns the statuses that the bodies of ``cls`` and all its bases declare."""
    statuses: dict[str, bool] = {}
    for base in reversed(cls.__mro__):
        for name, status in _own_statuses(base, warn=warn and base is cls):
            if statuses.setdefault(name, status) != status:
                raise ValueError(
                    f"Conflicting pytree annotation for {cls.__qualname__}.{name}: "
                    f"it is declared {WORDS[not status]} and cannot also be "
                    f"{WORDS[status]}."
                )
    return statuses


def _own_statuses(cls: type, warn: bool) -> list[tuple[str, bool]]:
    annotations = inspect.get_annotations(cls).items()
    annotated = [(name, _annotated_status(x)) for name, x in annotations]
    statuses = [(name, status) for name, status in annotated if status is not None]
    for name, status in statuses if warn else ():
        word = WORDS[status]
        warnings.warn(
            f"{cls.__qualname__}.{name}: the annotation nnx.{word.title()} is "
            f"deprecated, use `{name}: T = nnx.{word}()`.",
            DeprecationWarning,
            stacklevel=6,
        )
    # Before the decorator runs, fields stand in the class body.
    fields = {k: v for k, v in vars(cls).items() if isinstance(v, dataclasses.Field)}
    for name, field in (vars(cls).get("__dataclass_fields__", {}) | fields).items():
        if "static" in field.metadata:
            status = field.metadata["static"]
            if not isinstance(status, bool):
                raise ValueError(
                    f"Invalid 'static' metadata of {cls.__qualname__}.{name}: expected "
                    f"a bool, got {status!r}."
                )
            statuses.append((name, not status))
    return statuses


def _annotated_status(annotation: Any) -> bool | None:
    if isinstance(annotation, str):
        if annotation.startswith("nnx.Data"):
            return True
        return False if annotation.startswith("nnx.Static") else None
    tag = annotation.__metadata__[0] if get_origin(annotation) is Annotated else None
    return {"data": True, "static": False}.get(tag) if isinstance(tag, str) else None
