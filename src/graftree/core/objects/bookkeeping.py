"""Data of a Pytree besides its attributes, and versions of its ``vars``.

    vars(obj)["_pytree__nodes"]   the table: attribute name -> is it data?
    vars(obj)["_pytree__state"]   the owning trace, the structure version, setup flags

The metaclass puts them there as it makes an object. An object made without it gets them
when they are first needed, and an attribute written without ``Pytree.__setattr__`` gets
its status when the object is next flattened.

A cached skeleton must learn of writes into ``vars(obj)``. So when one is cached,
`version_writes` replaces the object's dict by a `VersionedDict`. Objects without a
cache, as those of a trace, keep a plain dict and pay nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import jax

from graftree import _python, errors
from graftree.core import ownership
from graftree.core.objects import attributes

NODES = "_pytree__nodes"
STATE = "_pytree__state"
NAMES = (NODES, STATE)

# Writes into `vars` without a version, even those of a `VersionedDict`.
put: Callable[[dict[str, Any], str, Any], None] = dict.__setitem__

# Table, fingerprints and static values, and the two flags of the state.
Aux = tuple[attributes.AttributeTable, tuple[Any, Any], tuple[bool, bool]]
# No object has these tables. The second means that a static value may change in place.
NO_AUX: Aux = (attributes.AttributeTable({}), ((), ()), (False, False))
CHANGING: Aux = (attributes.AttributeTable({}), ((), ()), (False, False))


def _flag(index: int, doc: str) -> property:
    """Makes the property for a flag of a state; a change of it is one of structure."""

    def set_(state: PytreeState, value: bool) -> None:
        if value is not state.flags[index]:
            first, second = state.flags
            state.flags = (value, second) if index == 0 else (first, value)
            mark_changed(state)

    return property(lambda state: state.flags[index], set_, doc=doc)


class PytreeState:
    """Bookkeeping of one object; owner and version are not part of its structure.

    Attributes:
        flags: `initializing` and `is_setup`.
        owner: The token of the trace that owns the object.
        built: Whether construction has ended; until then some checks are deferred.
        version: The number of the last structural change (see `ownership.touch`).
        results: The results about the object's structure, by mode (see `kept.py`).
        aux: The static part of the object that JAX got last (see `pytrees.py`).
    """

    __slots__ = ("__weakref__", "aux", "built", "flags", "owner", "results", "version")

    initializing = _flag(0, "Whether a lazy initialization runs (of the Linen bridge).")
    is_setup = _flag(1, "Whether a lazy ``setup`` has run.")
    # Programs that initialize lazily set these under the names of older releases.
    _initializing, _is_setup = initializing, is_setup

    def __init__(self, initializing: bool = False, is_setup: bool = False) -> None:
        self.owner: Any = ownership.current()
        self.flags = initializing, is_setup
        self.built = True
        self.version = 0
        self.results: dict[bool, Any] | None = None
        self.aux = NO_AUX

    @property
    def trace_state(self) -> ownership.TraceState:
        """Trace that owns the object; setting its ``jax_trace`` changes the owner.

        Keras finds it among the ``vars`` of an object, by the name with an underscore.
        """
        return ownership.Owner(
            lambda: ownership.token_of(self.owner),
            lambda token: setattr(self, "owner", token),
        )

    _trace_state = trace_state

    def is_owned(self) -> bool:
        """Whether the current trace may change the object."""
        return ownership.is_current(self.owner)

    def __repr__(self) -> str:
        first, second = self.flags
        return f"PytreeState(initializing={first}, is_setup={second})"

    def __reduce__(self) -> Any:
        return PytreeState, self.flags

    def __setstate__(self, state: Any) -> None:
        """Refuses pickles of Flax NNX; those made here have no such state."""
        raise pickle.UnpicklingError(
            errors.message(
                "This pickle was written by Flax NNX: its objects have the attributes "
                "of Flax's classes.",
                way_out="Load it with Flax, without graftree.dropin, and save only the "
                "State, nnx.state(model).\nThen load that into a model made here: "
                "nnx.update(model, state, strict=True).",
            )
        )


# It is pickled under the name that clients know.
PytreeState.__module__ = "graftree.core.objects.pytrees"


def complete(obj: Any) -> dict[str, Any]:
    """Returns the ``vars`` of an object, which gets any bookkeeping it lacks."""
    entries = obj.__dict__
    if NODES not in entries:
        put(entries, NODES, attributes.facts_of(type(obj)).empty_table)
    if STATE not in entries:
        put(entries, STATE, PytreeState())
    return entries


class Default:
    """Bookkeeping shown by an object that its metaclass did not make.

    Not a data descriptor: an entry in ``vars`` comes first.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, obj: Any, owner: type) -> Any:
        if obj is not None:
            return complete(obj)[self._name]
        if self._name == NODES:
            return attributes.EMPTY_TABLE
        raise AttributeError(f"The class {owner.__name__} has no {self._name}.")


def attribute_items(obj: Any) -> list[tuple[str, Any]]:
    """Lists an object's attributes without its bookkeeping, in insertion order."""
    # A list first: another thread may be attaching the buffers of a capture.
    entries = list(obj.__dict__.items())
    return [item for item in entries if item[0] not in NAMES]


def state_of(obj: Any) -> PytreeState:
    """Returns the bookkeeping of an object."""
    try:
        return obj.__dict__[STATE]
    except KeyError:
        return complete(obj)[STATE]


def table_of(obj: Any) -> attributes.AttributeTable:
    """Returns an object's table of statuses, with those that were put into ``vars``."""
    entries = obj.__dict__
    table = entries.get(NODES)
    # The number of names shows all changes but one name put in place of another. Code
    # that looks up the table's names then gets a KeyError and calls `settle` (below).
    if table is None or len(entries) != table.size + len(NAMES):
        return settle(obj)
    return table


def check_owned(obj: Any, attribute: str | None = None) -> None:
    """Raises if an object must not be changed now; its class may add a check."""
    if attributes.facts_of(type(obj)).checks_itself or not state_of(obj).is_owned():
        obj._check_valid_context(lambda: str(ownership.object_error(obj, attribute)))


def for_copy(entries: Any) -> Any:
    """Returns an object's ``vars`` for a copy, which belongs to the current trace."""
    if not isinstance(entries, dict) or STATE not in entries:
        return entries  # those of a class with a `__getstate__` of its own
    return {**entries, STATE: PytreeState(*entries[STATE].flags)}


def separate(copied: Any, original: Any) -> None:
    """Gives a copy bookkeeping of its own, if it was given that of the original."""
    if copied.__dict__.get(STATE) is original.__dict__.get(STATE, copied):
        put(copied.__dict__, STATE, PytreeState(*original.__dict__[STATE].flags))


def mark_changed(state: PytreeState) -> None:
    """Gives an object a new version, and lets go of the static values that it had."""
    ownership.touch(state)
    state.aux = NO_AUX


def results_of(obj: Any) -> dict[bool, Any]:
    """Returns the results of an object, by mode."""
    state = state_of(obj)
    if state.results is None:
        state.results = {}
    return state.results


def settle(obj: Any) -> attributes.AttributeTable:
    """Brings the table into agreement with the attributes in ``vars``."""
    entries = complete(obj)
    cls, table = type(obj), entries[NODES]
    facts = attributes.facts_of(cls)
    settled = table
    for name in table.keys() - entries.keys():
        settled = settled.without(name)
    for name, value in attribute_items(obj):
        if name not in table:
            status = facts.statuses.get(name, attributes.is_data(value))
            # At the end of construction all static attributes are checked anyway.
            if facts.is_pytree and not status and entries[STATE].built:
                check_static(cls, name, value)
            settled = settled.with_entry(name, status)
    if settled is not table:
        put(entries, NODES, settled)
        mark_changed(entries[STATE])
    return settled


def check_static(cls: type, name: str, value: Any) -> None:
    """Checks that the value of a static attribute contains no data."""
    if attributes.has_data(value):
        phrase = "Found unexpected data on value of type"
        raise attributes.data_error(phrase, cls, name, value)


# Watching.


class VersionedDict(dict[str, Any]):
    """Dict for the ``vars`` of an object, which gets a new version at each write.

    Python itself reads and sets attributes past these methods.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self


def _versioned_method(name: str) -> Callable[..., Any]:
    write = getattr(dict, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.get(STATE)
        try:
            return write(self, *args, **kwargs)
        finally:
            if state is not None:
                mark_changed(state)

    method.__name__ = name
    method.__qualname__ = f"VersionedDict.{name}"
    return method


for _name in "__setitem__ __delitem__ clear pop popitem setdefault update".split():
    setattr(VersionedDict, _name, _versioned_method(_name))


def _as_dict(x: VersionedDict) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    names = tuple(sorted(x))
    return [(jax.tree_util.DictKey(name), x[name]) for name in names], names


# A dict to JAX, as it would be without us.
jax.tree_util.register_pytree_with_keys(
    VersionedDict,
    _as_dict,
    lambda names, values: dict(zip(names, values, strict=True)),  # pyright: ignore
)


def version_writes(obj: Any) -> bool:
    """Makes each write into ``vars(obj)`` a new version; returns whether it can.

    It cannot if other code holds its present dict, or if the class has its own
    ``__setattr__`` or ``__delattr__``, which may call that of `object`.
    """
    if not attributes.facts_of(type(obj)).sets_version:
        return False
    if type(obj.__dict__) is VersionedDict:
        return True
    if _holders(obj) > _ALONE:
        return False
    plain, holders = _exchange(obj)
    # Another thread may have got hold of the dict in between.
    if holders > _ALONE_AFTER:
        object.__setattr__(obj, "__dict__", plain)
        return False
    return True


def _exchange(obj: Any) -> tuple[dict[str, Any], int]:
    """Swaps in a versioned dict; returns the old dict and its reference count."""
    plain = obj.__dict__
    versioned: dict[str, Any] = VersionedDict(plain)
    object.__setattr__(obj, "__dict__", versioned)
    return plain, _python.references(plain)


def _holders(obj: Any) -> int:
    return _python.references(obj.__dict__)


class _Probe:
    """Its ``vars`` are held only by itself."""


# The count for a variable of a function differs between versions of Python, so each
# count is compared with one that was taken in the same way.
_ALONE = _holders(_Probe())
_, _ALONE_AFTER = _exchange(_Probe())
