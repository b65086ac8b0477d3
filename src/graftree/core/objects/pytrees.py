"""Pytrees: objects whose attributes are data or static.

Every subclass of `Pytree` is a registered JAX pytree (unless declared otherwise): its
data attributes are the children, in the order of their names; the static ones and the
table of statuses are the treedef. `bookkeeping.py` has the data of an object besides
its attributes and the facts about its class.

Invariants: a static attribute contains no array; only the owning trace sets or
deletes attributes; every structural change sets a new version (see `ownership.touch`).
"""

from __future__ import annotations

import abc
import copy
import inspect
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax
import numpy as np

from graftree import _jax_registries, _python, config, errors
from graftree.core import fingerprints, hooks, ownership, pickling
from graftree.core.objects import (
    attributes,
    bookkeeping,
    callables,
    methods,
    running,
)
from graftree.core.objects.attributes import AttributeField, AttributeTable
from graftree.core.objects.bookkeeping import PytreeState
from graftree.core.text import representations
from graftree.core.variables import values, variables

T = TypeVar("T")
_NODES, _STATE = bookkeeping.NAMES
_put = bookkeeping.put
_facts_of = attributes.facts_of


class PytreeMeta(type(Protocol)):
    """Creates instances with their bookkeeping, and checks them once they are built.

    A subclass of the metaclass of protocols, itself one of ``abc.ABCMeta``, so that a
    class may implement a protocol by deriving from it.
    """

    # The metaclass of protocols has slower ones, which only protocols need.
    __instancecheck__ = abc.ABCMeta.__instancecheck__
    __subclasscheck__ = abc.ABCMeta.__subclasscheck__

    def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T:
        maker = running.stack.maker
        if maker is None:
            return _make(cls, args, kwargs)
        return maker(cls, lambda: _make(cls, args, kwargs), args, kwargs)

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, methods.as_attribute(cls, name, value))
        if (
            name in _CLASS_FACTS
            or hasattr(type(value), "__set__")
            or name in attributes.facts_of(cls).descriptors
        ):
            attributes.forget()

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        attributes.forget()

    __dir__ = representations.names_of_class

    @property
    def __signature__(cls) -> inspect.Signature:
        # Else inspect shows the (*args, **kwargs) of __call__ above.
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def _keyword_only(kind: type, args: tuple[Any, ...]) -> list[str]:
    """Keyword-only parameters for which objects of that name came by position."""
    by_name = {type(x).__name__.lower() for x in args}
    parameters = inspect.signature(kind.__init__).parameters.values()
    return [
        p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in by_name
    ]


def _by_position(kind: type) -> list[str]:
    """Lists the parameters of a constructor that have a position."""
    parameters = [*inspect.signature(kind.__init__).parameters.values()][1:]
    return [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]


def _by_keyword(kind: type, args: tuple[Any, ...], names: Sequence[str]) -> str:
    texts = [
        f"{name}={name}" if name in names else running.describe(x)
        for x in args
        for name in [type(x).__name__.lower()]
    ]
    return errors.message(
        f"{kind.__name__} takes {' and '.join(names)} by keyword only, but got "
        f"{len(args)} arguments by position.",
        where=f"by position: {', '.join(_by_position(kind))}",
        way_out=f"Write {kind.__name__}({', '.join(texts)}).",
    )


def _make(cls: type[T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    obj: Any = cls.__new__(cls, *args, **kwargs)
    kind = type(obj)  # a subclass, if `__new__` chose one
    if cls not in kind.__mro__:
        return obj
    state = bookkeeping.complete(obj)[_STATE]
    state.built = False
    try:
        kind.__init__(obj, *args, **kwargs)
    except TypeError as error:
        is_of_call = error.__traceback__ is None or error.__traceback__.tb_next is None
        if is_of_call and (names := _keyword_only(kind, args)):
            raise TypeError(_by_keyword(kind, args, names)) from error
        raise
    state.built = True
    bookkeeping.table_of(obj)
    if attributes.facts_of(kind).is_pytree:
        _check_static_attributes(obj)
    return obj


def _check_storage(cls: type) -> None:
    """Refuses bases whose objects hold data that neither paths nor copies reach."""
    for base in cls.__mro__[:-1]:
        slots = [k for k, x in vars(base).items() if inspect.ismemberdescriptor(x)]
        if isinstance(vars(base).get("__new__"), BuiltinFunctionType):
            storage = f"derives from {base.__name__}, whose objects hold other data"
        elif slots:
            storage = f"has non-empty __slots__ {(*slots,)}, of {base.__name__}"
        else:
            continue
        raise TypeError(
            f"The Pytree class {cls.__name__} {storage}.\n"
            "Transforms and copies keep only what is in __dict__, and would lose the "
            "rest.\nRemove __slots__, or keep such an object in an attribute instead "
            "of deriving from its class."
        )


ObjectMeta = PytreeMeta

# The names of a class on which instances depend, besides its properties.
_CLASS_FACTS = {
    *("__bases__", "__setattr__", "__delattr__"),
    *("__dataclass_fields__", "_check_valid_context"),
}


def _older_name(older: str, name: str) -> Any:
    """Makes a property under the name of an older release, which warns."""

    def get(self: Any) -> Any:
        message = f"{older} is deprecated, use {name}."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(self, name)

    return property(get)


class Pytree(
    attributes.DataObject, representations.Representable, metaclass=PytreeMeta
):
    """A base class for objects that are pytrees and graph nodes.

    Attributes are data (arrays, Variables, other Pytrees: the children of the pytree)
    or static (everything else: part of its structure). Declare the status with `data`
    or `static`; otherwise it is inferred from the first value assigned.

    Args of the class statement:
        pytree: Whether instances are JAX pytrees; ``False`` makes them leaves, which
            only graph mode accepts. Subclasses inherit the choice.

    Raises:
        ValueError: If an array, or a container of arrays, is assigned to a static
            attribute.
        TraceContextError: If an attribute is set or deleted while another trace owns
            the object.

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

    def __init_subclass__(cls, *, pytree: bool | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        _check_storage(cls)
        if pytree is not None:
            attributes.are_pytrees[cls] = pytree
        attributes.declared_statuses(cls, warn=True)
        if "__call__" in vars(cls):
            call = methods.as_attribute(cls, "__call__", vars(cls)["__call__"])
            type.__setattr__(cls, "__call__", call)
        if attributes.facts_of(cls).is_pytree:
            _register(cls)

    _pytree__nodes = bookkeeping.Default(_NODES)
    _pytree__state = bookkeeping.Default(_STATE)

    if not TYPE_CHECKING:  # to a type checker it would allow misspelt names

        @attributes.of_ours
        def __setattr__(self, name: str, value: Any) -> None:
            cls, entries = type(self), self.__dict__
            facts = _facts_of(cls)
            if name in facts.descriptors:
                if type(value) is AttributeField:
                    value = value.default
                _use_descriptor(self, object.__setattr__, name, value)
                return
            if _STATE not in entries or _NODES not in entries:
                bookkeeping.complete(self)
            if facts.checks_itself or (
                entries[_STATE].owner is not ownership.current()
            ):
                bookkeeping.check_owned(self, name)
                _note_write(self, name, value)
            status = None
            if type(value) is AttributeField:
                status, value = _take_apart(cls, name, value)
            elif name in entries and _is_array(value):
                _warn_of_replaced(obj=self, name=name, array=value)
            if facts.is_pytree:
                status = _checked_status(self, facts, name, value, status)
            elif status is None:
                status = entries[_NODES].get(name, attributes.is_data(value))
            store_attribute(self, name, value, status)

    @attributes.of_ours
    def __delattr__(self, name: str) -> None:
        if name in attributes.facts_of(type(self)).descriptors:
            _use_descriptor(self, object.__delattr__, name)
            return
        bookkeeping.check_owned(self, name)
        object.__delattr__(self, name)
        entries = bookkeeping.complete(self)
        if name in entries[_NODES]:
            _put(entries, _NODES, entries[_NODES].without(name))
        bookkeeping.mark_changed(entries[_STATE])

    @attributes.of_ours
    def _check_valid_context(self, error_msg: Callable[[], str]) -> None:
        """Raises if the current trace must not change the object; called each time."""
        if not bookkeeping.state_of(self).is_owned():
            raise errors.TraceContextError(error_msg())

    _object__nodes = _older_name("_object__nodes", _NODES)
    _object__state = _older_name("_object__state", _STATE)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return pickling.with_names(super().__reduce_ex__(protocol))

    def __getstate__(self) -> Any:
        """Returns the attributes, for a copy; bases behind this one may add to them."""
        bookkeeping.complete(self)
        return bookkeeping.for_copy(super().__getstate__())

    def __setstate__(self, state: Any) -> None:
        """Takes over the result of `__getstate__`."""
        above = getattr(super(), "__setstate__", None)
        if above is None:
            pickling.set_attributes(self, state)
        else:
            above(state)

    def __copy__(self) -> Any:
        copied = pickling.copied(self)
        if copied is not self and isinstance(copied, Pytree):
            bookkeeping.separate(copied, self)
            callables.bind_own(copied, self)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        table, state = bookkeeping.table_of(self), bookkeeping.state_of(self)
        copied: Any = object.__new__(type(self))
        copied.__dict__.update({_NODES: table, _STATE: PytreeState(*state.flags)})
        # In `memo` before its attributes are copied: they may refer back to it.
        memo[id(self)] = copied
        for name, value in bookkeeping.attribute_items(self):
            reference = pickling.by_name(value)
            vars(copied)[name] = (
                copy.deepcopy(value, memo) if reference is value else value
            )
        return copied

    def __nnx_repr__(self) -> Iterable[Any]:
        items, table = bookkeeping.attribute_items(self), bookkeeping.table_of(self)
        return representations.pytree_repr(self, items, table)

    __dir__ = representations.names_of_object


attributes.forget()


class Object(Pytree, pytree=False):
    """A `Pytree` that is only a graph node: JAX sees it as a leaf.

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
                f"{cls.__name__} derives from nnx.Object, which is not a pytree; "
                "derive from nnx.Pytree instead of passing pytree=True."
            )
        super().__init_subclass__(pytree=pytree, **options)


def check_pytree(pytree: Any) -> None:
    """Checks that no static attribute of a Pytree contains data.

    Args:
        pytree: A `Pytree`.

    Raises:
        TypeError: If ``pytree`` is not a Pytree.
        ValueError: If there is data in a static attribute, e.g. appended to a list.

    Example:
        >>> model = nnx.Dict(sizes=[1])
        >>> model.sizes.append(jnp.ones(2))
        >>> nnx.check_pytree(model)
        Traceback (most recent call last):
        ValueError: Found unexpected data on value of type 'list' in the static...
    """
    if not isinstance(pytree, Pytree):
        raise TypeError(f"check_pytree: {type(pytree).__name__} is not a Pytree.")
    _check_static_attributes(pytree)


def touch(obj: Any) -> None:
    """Marks an object as changed, after a change that bypassed its ``__setattr__``.

    `jit` and other functions remember the structure of an object until it changes. They
    notice attributes that are set and deleted, also through ``vars(obj)`` and in
    classes with their own ``__setattr__``. They miss only a direct
    ``object.__setattr__(obj, ...)``.

    Args:
        obj: The Pytree or Variable that changed. Touch changed objects in it one by
            one.

    Raises:
        TypeError: If ``obj`` is neither a Pytree nor a Variable.

    Example:
        >>> model = nnx.Dict(scale=2)
        >>> double = nnx.jit(lambda model, x: model["scale"] * x)
        >>> [int(double(model, 3)) for _ in range(3)]
        [6, 6, 6]
        >>> object.__setattr__(model, "scale", 5)
        >>> nnx.touch(model)
        >>> int(double(model, 3))
        15
    """
    if isinstance(obj, variables.Variable):
        variables.touch(obj)
    elif isinstance(obj, Pytree):
        bookkeeping.mark_changed(bookkeeping.state_of(obj))
    else:
        raise TypeError(
            f"touch expects a Pytree or a Variable, got {type(obj).__name__}."
        )


# Functions for the rest of core, which bypass __setattr__. Where they write into
# `obj.__dict__`, `obj` is `Any`: pyright confuses the `__dict__` of an instance of a
# class that has a metaclass with the read-only one of the class.


def store_attribute(obj: Any, name: str, value: Any, status: bool) -> None:
    """Sets an attribute whose status is known; the object gets a new version."""
    entries = obj.__dict__
    old = entries.get(name, attributes.MISSING)
    _put(entries, name, value)
    table = entries[_NODES]
    extended = table.with_entry(name, status)
    if extended is not table:
        _put(entries, _NODES, extended)
    elif _is_array(old) and _is_array(value):
        # Another array in place of an array is state, not structure.
        return
    bookkeeping.mark_changed(entries[_STATE])


def check_assignment(obj: Pytree, name: str, value: Any) -> None:
    """Raises the error of ``setattr`` for the status of the attribute."""
    facts = attributes.facts_of(type(obj))
    if facts.is_pytree and name not in facts.descriptors:
        _checked_status(obj, facts, name, value, None)


def replace_attributes(
    obj: Pytree, table: AttributeTable, values: Iterable[tuple[str, Any]]
) -> None:
    """Gives an object exactly these attributes, in the order of the table.

    Like a single assignment, it leaves the version if arrays replace only arrays.
    """
    state, entries = bookkeeping.state_of(obj), bookkeeping.complete(obj)
    old, new = dict(entries), dict(values)
    ordered = {name: new[name] for name in table if name in new} | new
    exact = {_NODES: table, _STATE: state, **ordered}
    # In one step, so that neither another thread nor an interrupt (Ctrl-C) finds the
    # object without attributes that it keeps.
    dict.update(entries, exact)
    for name in old.keys() - exact.keys():
        dict.__delitem__(entries, name)
    if [*entries] != [*exact]:
        # Only an empty dict takes another order.
        dict.clear(entries)
        dict.update(entries, exact)
    if table != old[_NODES] or not all(
        value is old.get(name, attributes.MISSING)
        or (_is_array(value) and _is_array(old.get(name)))
        for name, value in bookkeeping.attribute_items(obj)
    ):
        bookkeeping.mark_changed(state)


def _note_write(obj: Any, name: str, value: Any) -> None:
    owner = bookkeeping.state_of(obj).owner
    if type(owner) is ownership.RebuiltArguments and _is_array(value):
        owner.note_write(obj, name)


def _warn_of_replaced(obj: Any, name: str, array: Any) -> None:
    """Warns where an array takes the place of a Variable of a finished object."""
    variable, entries = obj.__dict__.get(name), obj.__dict__
    if not isinstance(variable, variables.Variable) or not entries[_STATE].built:
        return
    kind = type(variable).__name__
    text = errors.message(
        f"{type(obj).__name__}.{name} was a {kind} and is now an array.\n"
        f"Optimizers and filters for {kind} no longer find it.",
        way_out=f"To set the value, write .{name}[...] = x. To share weights, assign "
        "the Variable itself, or call\nembed.attend(x) for those of an Embed, "
        f"transposed. If you want an array, write .{name} = nnx.data(x).",
    )
    _python.warn_user(text, errors.ReplacedVariableWarning)


def note_read(obj: Any) -> None:
    """Tells the owner that an object is taken apart."""
    owner = bookkeeping.state_of(obj).owner
    if type(owner) is ownership.RebuiltArguments:
        owner.note_read(obj)


def _is_array(x: Any) -> bool:
    return values.is_array(x) or isinstance(x, np.ndarray)


def _use_descriptor(obj: Pytree, act: Callable[..., None], *args: Any) -> None:
    """Sets or deletes through a descriptor, whose code may write into ``vars``."""
    # Read first: the descriptor may replace the `__dict__`.
    state = bookkeeping.state_of(obj)
    try:
        act(obj, *args)
    finally:
        bookkeeping.mark_changed(state)


def _take_apart(cls: type, name: str, field: AttributeField) -> tuple[bool, Any]:
    if field.default is attributes.MISSING:
        word = attributes.WORDS[field.is_data]
        raise ValueError(
            f"nnx.{word}() without a value was assigned to {cls.__name__}.{name}; "
            f"write nnx.{word}(value)."
        )
    return field.is_data, field.default


def _checked_status(
    obj: Pytree, facts: attributes.Facts, name: str, value: Any, status: bool | None
) -> bool:
    """Returns the attribute's new status; raises if the value doesn't fit it."""
    cls = type(obj)
    if status is not None:
        if not status and attributes.has_data(value):
            raise attributes.data_error("Found data in value of type", cls, name, value)
        attributes.check_no_tags(cls, name, value)
        return status
    entries = obj.__dict__
    current = entries[_NODES].get(name) if name in entries else None
    declared = facts.statuses.get(name) if current is None else current
    if type(value) in attributes.ATOMS:
        return bool(declared)
    if attributes.is_data(value):
        if declared is False:
            _refuse_data(obj, name, value, current)
            return False
        return True
    attributes.check_no_tags(cls, name, value)
    if declared:
        return True
    if attributes.has_data(value):
        raise attributes.data_error("Found data on value of type", cls, name, value)
    callables.warn_of_constants(obj, name, value)
    return False


def _refuse_data(obj: Pytree, name: str, value: Any, current: bool | None) -> None:
    if current is not None:
        phrase = "Cannot assign data value of type"
        error = attributes.data_error(phrase, type(obj), name, value)
        if obj.__dict__.get(name, attributes.MISSING) is None:
            hint = f"Its first value was None; write self.{name} = nnx.data(None)."
            error = ValueError(f"{error}\n{hint}")
        raise error
    if bookkeeping.state_of(obj).built:
        phrase = "Found data on value of type"
        raise attributes.data_error(phrase, type(obj), name, value)
    # During construction: the check at its end finds it.


def _check_static_attributes(obj: Any) -> None:
    naming = attributes.facts_of(type(obj)).naming
    entries = obj.__dict__
    for name, _, is_data in bookkeeping.table_of(obj).layout(naming):
        if not is_data and type(entries[name]) not in attributes.ATOMS:
            bookkeeping.check_static(type(obj), name, entries[name])


class FingerprintedStatics(tuple[tuple[Any, ...], tuple[Any, ...]]):
    """Fingerprints of static values, and the values, as a treedef keeps them."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        # Without fingerprints: some are types that no pickle can name, as `function`.
        return FingerprintedStatics.of, (tuple(map(pickling.by_name, self[1])),)

    @staticmethod
    def of(values: tuple[Any, ...]) -> FingerprintedStatics:
        """Makes those of some values."""
        kinds = tuple(map(type, values))
        if fingerprints.PLAIN.issuperset(kinds):  # almost always
            return FingerprintedStatics((kinds, values))
        may_change = fingerprints.any_may_change(values)
        kind = ChangingStatics if may_change else FingerprintedStatics
        return kind(fingerprints.fingerprinted(values))


class ChangingStatics(FingerprintedStatics):
    """`FingerprintedStatics` of values that may change, so are compared by content."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not ChangingStatics:
            return NotImplemented
        mine, theirs = zip(*self, strict=True), zip(*other, strict=True)
        is_same = map(fingerprints.are_same, mine, theirs)
        return len(self[0]) == len(other[0]) and all(is_same)


# JAX keeps each class, and what it is registered with, for good. So these functions
# belong to all classes: a class made per call costs little more than itself.


def _register(cls: type[Pytree]) -> None:
    unflatten = types.MethodType(_unflatten_either, cls)
    _jax_registries.register_pytree(
        cls, _flatten_with_keys, unflatten, _flatten_again, _flatten_at_once
    )
    hooks.class_defined.call(cls)


def _flatten(obj: Any) -> Any:
    if ownership.unread and ownership.current() is not ownership.no_trace:
        note_read(obj)
    entries = obj.__dict__
    try:
        table, state = entries[_NODES], entries[_STATE]
        _, data_of, statics_of, _ = table.cached_getters or table.getters(
            _facts_of(type(obj)).naming
        )
        if len(entries) == table.size + 2:
            values = statics_of(entries)
            if not callables.MAY_BE_OWN.isdisjoint(map(type, values)):
                values = callables.as_statics(values, obj)
            statics = FingerprintedStatics.of(values)
            return data_of(entries), (table, statics, state.flags)
    except KeyError:
        pass  # something was written past `__setattr__`
    bookkeeping.settle(obj)
    return _flatten(obj)


_caches = config.caches  # this runs for each object


def _flatten_again(obj: Any) -> Any:
    """Does as `_flatten`, with the former aux if that is still true.

    Then JAX need not compare it.
    """
    if not _caches.are_used or (
        ownership.unread and ownership.current() is not ownership.no_trace
    ):
        return _flatten(obj)
    entries = obj.__dict__
    try:
        table, aux = entries[_NODES], entries[_STATE].aux
        former_table, (_, statics), _ = aux
        if table is former_table and len(entries) == table.size + 2:
            children = table.data_if_same(entries, statics)
            if children is not None:
                return children, aux
    except KeyError:
        pass  # as above
    children, aux = _flatten(obj)
    changing = type(aux[1]) is ChangingStatics
    obj.__dict__[_STATE].aux = bookkeeping.CHANGING if changing else aux
    return children, aux


def _flatten_with_keys(obj: Any) -> Any:
    children, aux = _flatten_again(obj)
    layout = aux[0].layout(_facts_of(type(obj)).naming)
    keys = [_key_entry(key) for _, key, is_data in layout if is_data]
    return list(zip(keys, children, strict=True)), aux


def _unflatten(cls: type, aux: Any, children: Any) -> Any:
    table, (kinds, statics), flags = aux
    getters = table.cached_getters or table.getters(_facts_of(cls).naming)
    names, _, _, in_order = getters
    obj: Any = object.__new__(cls)
    entries = obj.__dict__
    entries[_NODES] = table
    entries[_STATE] = state = PytreeState(*flags)
    state.owner = hooks.owner_when_unflattened.call()
    if callables.OwnMethod in kinds:
        statics = callables.bound(statics, obj)
    entries.update(zip(names, in_order((*children, *statics)), strict=True))
    return obj


def _flatten_at_once(obj: Any) -> Any:
    flattened = hooks.flatten_at_once.call(obj) if config.caches.are_used else None
    return flattened or _flatten_again(obj)


def _unflatten_either(cls: type, aux: Any, children: Any) -> Any:
    if type(aux[0]) is int:
        return hooks.unflatten_at_once.call(aux, children)
    return _unflatten(cls, aux, children)


def _key_entry(key: Any) -> Any:
    if isinstance(key, int):
        return jax.tree_util.SequenceKey(key)
    return jax.tree_util.GetAttrKey(key)
