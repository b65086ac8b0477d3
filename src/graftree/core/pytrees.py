"""Pytrees: objects whose attributes are data or static.

Every subclass of `Pytree` is a registered JAX pytree (unless declared otherwise): its
data attributes are the children, in the order of their names; the static ones and the
table of statuses are the treedef. An object holds, besides its attributes,

    vars(obj)["_pytree__nodes"]   the table: attribute name -> is it data?
    vars(obj)["_pytree__state"]   the owning trace, the structure stamp, setup flags

What always holds: a static attribute contains no array; only the owning trace sets or
deletes attributes; every structural change is stamped (see `stamps.py`).
"""

from __future__ import annotations

import abc
import copy
import inspect
import warnings
from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar, Self, TypeVar

import jax
import numpy as np

from graftree import config
from graftree.core import attributes, imprints, ownership, stamps, text, values
from graftree.core.attributes import AttributeField, AttributeTable

T = TypeVar("T")
_NODES = "_pytree__nodes"
_STATE = "_pytree__state"
BOOKKEEPING = (_NODES, _STATE)


class PytreeState:
    """The bookkeeping of one object; owner and stamp are not part of its structure.

    Attributes:
        initializing: Whether a lazy initialization runs (used by the Linen bridge).
        is_setup: Whether a lazy ``setup`` has run.
        built: Whether construction has ended; until then checks may be put off.
        stamp: The number of the last structural change (see `stamps.py`).
        memos: What is known of the object's structure, by mode (see `memos.py`).
    """

    __slots__ = (
        "__weakref__",
        "_owner",
        "built",
        "initializing",
        "is_setup",
        "memos",
        "stamp",
    )

    def __init__(self, initializing: bool = False, is_setup: bool = False) -> None:
        self._owner = ownership.current()
        self.initializing = initializing
        self.is_setup = is_setup
        self.built = True
        self.stamp = 0
        self.memos: dict[bool, Any] | None = None

    @property
    def trace_state(self) -> ownership.TraceState:
        """The trace that owns the object."""
        state = ownership.TraceState()
        state.jax_trace = self._owner
        return state

    def is_owned(self) -> bool:
        """Whether the current trace may change the object."""
        return self._owner is ownership.current()

    def __repr__(self) -> str:
        return (
            f"PytreeState(initializing={self.initializing}, is_setup={self.is_setup})"
        )

    def __reduce__(self) -> Any:
        return PytreeState, (self.initializing, self.is_setup)

    def __deepcopy__(self, memo: dict[int, Any]) -> PytreeState:
        return PytreeState(self.initializing, self.is_setup)


class PytreeMeta(abc.ABCMeta):
    """Makes instances with their bookkeeping, and checks them once they are built."""

    def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T:
        obj = cls.__new__(cls, *args, **kwargs)
        if not isinstance(obj, cls):
            return obj
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__name__}() takes no arguments")
        cls.__init__(obj, *args, **kwargs)
        obj.__dict__[_STATE].built = True
        _adopt_untracked(obj)
        if cls.is_pytree_class:
            _check_static_attributes(obj)
        return obj

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if hasattr(type(value), "__set__"):
            cls.find_data_descriptors()

    def find_data_descriptors(cls) -> None:
        """Notes for the class, and those below, which attributes are descriptors."""
        cls.data_descriptors = attributes.data_descriptors(cls)
        for subclass in cls.__subclasses__():
            subclass.find_data_descriptors()

    @property
    def __signature__(cls) -> inspect.Signature:
        # Else inspect shows the (*args, **kwargs) of __call__ above.
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


ObjectMeta = PytreeMeta


class Pytree(attributes.DataObject, text.Representable, metaclass=PytreeMeta):
    """A base class for objects that are pytrees and graph nodes.

    Attributes are data (arrays, Variables, other Pytrees: the children of the pytree)
    or static (everything else: part of its structure). The status is declared with
    `data` and `static`, or found from the value first assigned.

    Args of the class statement:
        pytree: Whether instances are JAX pytrees; ``False`` makes them leaves, which
            only graph mode accepts. The default is inherited.

    Raises:
        ValueError: If an array, or a container with arrays, is assigned to a static
            attribute.
        TraceContextError: If another trace owns the object that is changed.

    Example:
        >>> class Point(nnx.Pytree):
        ...     def __init__(self, x, y):
        ...         self.x = x
        ...         self.y = y
        >>> jax.tree.map(lambda leaf: leaf + 1, Point(jnp.array(1.0), "north"))
        Point(
          x=Array(2., dtype=float32, weak_type=True),
          y='north'
        )
    """

    is_pytree_class: ClassVar[bool] = config.flax_pytree_module
    # Set by `modules.Module`, which is defined above the traversals that look for it.
    is_module_class: ClassVar[bool] = False
    declared_statuses: ClassVar[dict[str, bool]] = {}
    data_descriptors: ClassVar[frozenset[str]] = frozenset()
    empty_table: ClassVar[AttributeTable] = attributes.EMPTY_TABLE

    def __init_subclass__(cls, *, pytree: bool | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        slots = cls.__dict__.get("__slots__", ())
        if slots:
            raise TypeError(
                f"The Pytree class {cls.__name__} has non-empty __slots__ {slots!r}; "
                "attributes of Pytrees are kept in __dict__. Remove __slots__."
            )
        if pytree is not None:
            cls.is_pytree_class = pytree
        cls.declared_statuses = attributes.declared_statuses(cls)
        cls.find_data_descriptors()
        # One per class: a table remembers one extension, which is that of the class.
        cls.empty_table = AttributeTable({})
        if cls.is_pytree_class:
            _register(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        obj = object.__new__(cls)
        entries = obj.__dict__
        entries[_NODES] = cls.empty_table
        entries[_STATE] = state = PytreeState()
        state.built = False
        return obj

    # Attribute names and path keys; a subclass with integer items overrides the three.

    attribute_sort_key: ClassVar[Callable[[str], Any] | None] = None

    @classmethod
    def attribute_key(cls, name: str) -> Hashable:
        """The key that stands for an attribute in paths."""
        return name

    @classmethod
    def attribute_name(cls, key: Any) -> str:
        """The attribute that a key of a path stands for."""
        return key

    def __setattr__(self, name: str, value: Any) -> None:
        cls = type(self)
        if name in cls.data_descriptors:
            if type(value) is AttributeField:
                value = value.default
            _use_descriptor(self, object.__setattr__, name, value)
            return
        if self.__dict__[_STATE]._owner is not ownership.current():
            raise ownership.object_error(self, name)
        status = None
        if type(value) is AttributeField:
            status, value = _take_apart(cls, name, value)
        if cls.is_pytree_class:
            status = _checked_status(self, name, value, status)
        elif status is None:
            status = self.__dict__[_NODES].get(name, attributes.is_data(value))
        store_attribute(self, name, value, status)

    def __delattr__(self, name: str) -> None:
        if name in type(self).data_descriptors:
            _use_descriptor(self, object.__delattr__, name)
            return
        if not self.__dict__[_STATE].is_owned():
            raise ownership.object_error(self, name)
        object.__delattr__(self, name)
        table = self.__dict__[_NODES]
        if name in table:
            self.__dict__[_NODES] = table.without(name)
        stamps.touch(self.__dict__[_STATE])

    @property
    def _object__nodes(self) -> AttributeTable:
        warnings.warn(
            "_object__nodes is deprecated, use _pytree__nodes.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.__dict__[_NODES]

    @property
    def _object__state(self) -> PytreeState:
        warnings.warn(
            "_object__state is deprecated, use _pytree__state.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.__dict__[_STATE]

    def __copy__(self) -> Any:
        return rebuild(type(self), dict(self.__dict__), self.__dict__[_STATE])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = rebuild(type(self), {}, self.__dict__[_STATE])
        # Known before its attributes are copied: they may refer back to it.
        memo[id(self)] = copied
        copied.__dict__[_NODES] = self.__dict__[_NODES]
        for name, value in attribute_items(self):
            copied.__dict__[name] = copy.deepcopy(value, memo)
        return copied

    def __nnx_repr__(self) -> Iterable[Any]:
        return text.pytree_repr(self, attribute_items(self), table_of(self))


Pytree.find_data_descriptors()


class Object(Pytree, pytree=False):
    """A `Pytree` that is no JAX pytree: a graph node only.

    Raises:
        ValueError: If a subclass is declared with ``pytree=True``.

    Example:
        >>> class Node(nnx.Object):
        ...     pass
        >>> len(jax.tree.leaves([Node()]))
        1
    """

    def __init_subclass__(cls, *, pytree: bool | None = None, **options: Any) -> None:
        if pytree:
            raise ValueError(
                f"{cls.__name__} derives from nnx.Object, which is no pytree; derive "
                "from nnx.Pytree instead of passing pytree=True."
            )
        super().__init_subclass__(pytree=pytree, **options)


def check_pytree(pytree: Any) -> None:
    """Checks that no static attribute of a Pytree contains data.

    Args:
        pytree: A `Pytree`.

    Raises:
        TypeError: If ``pytree`` is no Pytree.
        ValueError: If there is data in a static attribute, e.g. appended to a list.

    Example:
        >>> nnx.check_pytree(nnx.Rngs(0))
    """
    if not isinstance(pytree, Pytree):
        raise TypeError(f"check_pytree: {type(pytree).__name__} is no Pytree.")
    _check_static_attributes(pytree)


# What the rest of core does with objects without going through __setattr__.


def attribute_items(obj: Pytree) -> list[tuple[str, Any]]:
    """The attributes of an object without its bookkeeping, in insertion order."""
    # A list first: another thread may be attaching the buffers of a capture.
    entries = list(obj.__dict__.items())
    return [item for item in entries if item[0] not in BOOKKEEPING]


def table_of(obj: Pytree) -> AttributeTable:
    """The table of statuses of an object."""
    return obj.__dict__[_NODES]


def state_of(obj: Pytree) -> PytreeState:
    """The bookkeeping of an object."""
    return obj.__dict__[_STATE]


def memos_of(obj: Pytree) -> dict[bool, Any]:
    """The memos of an object, by mode."""
    state = obj.__dict__[_STATE]
    if state.memos is None:
        state.memos = {}
    return state.memos


def rebuild(cls: type, entries: dict[str, Any], like: PytreeState) -> Any:
    """An object of the current trace from its ``vars``; no ``__init__`` is run."""
    obj = object.__new__(cls)
    obj.__dict__.update(entries)
    obj.__dict__[_STATE] = PytreeState(like.initializing, like.is_setup)
    return obj


def store_attribute(obj: Pytree, name: str, value: Any, status: bool) -> None:
    """Sets an attribute whose status is known, and stamps the object."""
    entries = obj.__dict__
    old = entries.get(name, attributes.MISSING)
    entries[name] = value
    table = entries[_NODES]
    extended = table.with_entry(name, status)
    if extended is not table:
        entries[_NODES] = extended
    elif _is_array(old) and _is_array(value):
        # Another array in the place of an array is state, not structure.
        return
    stamps.touch(entries[_STATE])


def check_assignment(obj: Pytree, name: str, value: Any) -> None:
    """Raises what ``setattr`` would raise for the status of the attribute."""
    if type(obj).is_pytree_class and name not in type(obj).data_descriptors:
        _checked_status(obj, name, value, None)


def replace_attributes(
    obj: Pytree, table: AttributeTable, values: Iterable[tuple[str, Any]]
) -> None:
    """Gives an object exactly these attributes, and stamps it.

    Like a single assignment, it leaves the stamp if only arrays are replaced by arrays.
    """
    entries = obj.__dict__
    old, state = dict(entries), entries[_STATE]
    entries.clear()
    entries[_NODES] = table
    entries[_STATE] = state
    entries.update(values)
    if table != old[_NODES] or not all(
        value is old.get(name, attributes.MISSING)
        or (_is_array(value) and _is_array(old.get(name)))
        for name, value in attribute_items(obj)
    ):
        stamps.touch(state)


def _is_array(x: Any) -> bool:
    return values.is_array(x) or isinstance(x, np.ndarray)


def _use_descriptor(obj: Pytree, act: Callable[..., None], *args: Any) -> None:
    """Sets or deletes by code of the user, which may write into ``vars`` itself."""
    try:
        act(obj, *args)
    finally:
        stamps.touch(obj.__dict__[_STATE])


def _take_apart(cls: type, name: str, field: AttributeField) -> tuple[bool, Any]:
    if field.default is attributes.MISSING:
        word = "data" if field.is_data else "static"
        raise ValueError(
            f"nnx.{word}() without a value was assigned to {cls.__name__}.{name}; "
            f"write nnx.{word}(value)."
        )
    return field.is_data, field.default


def _checked_status(obj: Pytree, name: str, value: Any, status: bool | None) -> bool:
    """The status the attribute will have; raises if the value doesn't fit it."""
    cls = type(obj)
    if status is not None:
        if not status and attributes.has_data(value):
            raise attributes.data_error("Found data in value of type", cls, name, value)
        attributes.check_no_tags(cls, name, value)
        return status
    entries = obj.__dict__
    known = entries[_NODES].get(name) if name in entries else None
    declared = cls.declared_statuses.get(name) if known is None else known
    if type(value) in attributes.ATOMS:
        return bool(declared)
    if attributes.is_data(value):
        if declared is False:
            _refuse_data(obj, name, value, known)
            return False
        return True
    attributes.check_no_tags(cls, name, value)
    if declared:
        return True
    if attributes.has_data(value):
        raise attributes.data_error("Found data on value of type", cls, name, value)
    return False


def _refuse_data(obj: Pytree, name: str, value: Any, known: bool | None) -> None:
    if known is not None:
        phrase = "Cannot assign data value of type"
        error = attributes.data_error(phrase, type(obj), name, value)
        if obj.__dict__.get(name, attributes.MISSING) is None:
            hint = f"It was None first; begin with self.{name} = nnx.data(None)."
            error = ValueError(f"{error}\n{hint}")
        raise error
    if obj.__dict__[_STATE].built:
        phrase = "Found data on value of type"
        raise attributes.data_error(phrase, type(obj), name, value)
    # Under construction: the check at its end reports it with all others.


def _adopt_untracked(obj: Pytree) -> None:
    """Gives attributes that were put into ``vars`` directly their status."""
    table = obj.__dict__[_NODES]
    if len(table) + len(BOOKKEEPING) == len(obj.__dict__):
        return
    for name, value in attribute_items(obj):
        if name not in table:
            status = type(obj).declared_statuses.get(name, attributes.is_data(value))
            table = table.with_entry(name, status)
    obj.__dict__[_NODES] = table


def _check_static_attributes(obj: Pytree) -> None:
    entries = obj.__dict__
    _, _, static_names = entries[_NODES].names(type(obj).attribute_sort_key)
    for name in static_names:
        value = entries[name]
        if type(value) not in attributes.ATOMS and attributes.has_data(value):
            phrase = "Found unexpected data on value of type"
            raise attributes.data_error(phrase, type(obj), name, value)


def _register(cls: type[Pytree]) -> None:
    sort_key = cls.attribute_sort_key

    def flatten(obj: Any) -> Any:
        entries = obj.__dict__
        table, state = entries[_NODES], entries[_STATE]
        _, data_of, statics_of, _ = table.getters(sort_key)
        statics = imprints.told_apart(statics_of(entries))
        return data_of(entries), (table, statics, state.initializing, state.is_setup)

    def flatten_with_keys(obj: Any) -> Any:
        children, aux = flatten(obj)
        _, data_names, _ = aux[0].names(sort_key)
        keys = [_key_entry(cls.attribute_key(name)) for name in data_names]
        return list(zip(keys, children, strict=True)), aux

    def unflatten(aux: Any, children: Any) -> Any:
        table, (_, statics), initializing, is_setup = aux
        names, _, _, in_order = table.getters(sort_key)
        obj = object.__new__(cls)
        entries = obj.__dict__
        entries[_NODES] = table
        entries[_STATE] = PytreeState(initializing, is_setup)
        entries.update(zip(names, in_order((*children, *statics)), strict=True))
        return obj

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


def _key_entry(key: Any) -> Any:
    if isinstance(key, int):
        return jax.tree_util.SequenceKey(key)
    return jax.tree_util.GetAttrKey(key)
