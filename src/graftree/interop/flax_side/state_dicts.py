"""Objects as nested dicts of leaves, and back: half of ``flax.serialization``.

A state dict has string keys only: lists and tuples become dicts of indices, and named
tuples and pytree dataclasses dicts of fields. What has no handler is a leaf. A leaf
takes any value on the way back: neither its shape nor its dtype is compared.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping
from typing import Any

import jax

from graftree import errors
from graftree.core.states.states import State
from graftree.core.variables.variables import Variable

ToStateDict = Callable[[Any], Any]
FromStateDict = Callable[[Any, Any], Any]

_handlers: dict[type, tuple[ToStateDict, FromStateDict]] = {}


class _Restoring(threading.local):
    def __init__(self) -> None:
        self.path: list[str] = []


_restoring = _Restoring()


def register_serialization_state(
    ty: type,
    ty_to_state_dict: ToStateDict,
    ty_from_state_dict: FromStateDict,
    override: bool = False,
) -> None:
    """Says how objects of a type become state dicts, and come back.

    Args:
        ty: The type; its subclasses need handlers of their own.
        ty_to_state_dict: A function from an object to its state dict.
        ty_from_state_dict: A function of a target object and a state dict, which
            returns a new object.
        override: Whether to replace the handler that the type has.

    Raises:
        ValueError: If the type has a handler and ``override`` is False.

    Example:
        >>> from graftree.interop.flax_side import state_dicts
        >>> class Scale:
        ...     def __init__(self, factor):
        ...         self.factor = factor
        >>> state_dicts.register_serialization_state(
        ...     Scale, lambda one: {"factor": one.factor}, lambda _, d: Scale(**d)
        ... )
        >>> state_dicts.to_state_dict({"scale": Scale(2.0)})
        {'scale': {'factor': 2.0}}
    """
    if ty in _handlers and not override:
        raise ValueError(
            f'A serialization handler for "{ty.__name__}" is already registered; '
            "pass override=True to replace it."
        )
    _handlers[ty] = ty_to_state_dict, ty_from_state_dict


def is_serializable(target: Any) -> bool:
    """Whether a type, or the type of an object, has a handler.

    Example:
        >>> from graftree.interop.flax_side import state_dicts
        >>> state_dicts.is_serializable([1]), state_dicts.is_serializable(object)
        (True, False)
    """
    return (target if isinstance(target, type) else type(target)) in _handlers


def to_state_dict(target: Any) -> Any:
    """Turns an object into nested dicts with string keys.

    Args:
        target: A pytree of dicts, lists, tuples, dataclasses, States and leaves.

    Returns:
        New dicts that hold the leaves themselves; a leaf is returned as it is.

    Raises:
        ValueError: If two keys of a dict are the same as strings.

    Example:
        >>> from graftree.interop.flax_side import state_dicts
        >>> state_dicts.to_state_dict({"layers": [1, 2], "empty": None})
        {'layers': {'0': 1, '1': 2}, 'empty': None}
    """
    handler = _handler(target)
    return target if handler is None else handler[0](target)


def from_state_dict(target: Any, state: Any, name: str = ".") -> Any:
    """Gives a new object like ``target`` with the leaves of a state dict.

    Args:
        target: An object of the wanted structure; it stays as it is. A leaf, or None,
            takes whatever the state dict has.
        state: What `to_state_dict` returned for such an object. Entries of dicts that
            ``target`` lacks are ignored.
        name: What error messages call the root.

    Returns:
        The new object.

    Raises:
        ValueError: If ``target`` has an entry that the state dict lacks, or they differ
            in length or in the fields of a dataclass; names the path.

    Example:
        >>> from graftree.interop.flax_side import state_dicts
        >>> state_dicts.from_state_dict({"a": (0, 0)}, {"a": {"0": 1, "1": 2}})
        {'a': (1, 2)}
    """
    handler = _handler(target)
    if handler is None:
        return state
    with _at(name):
        return handler[1](target, state)


def current_path() -> str:
    """The path of what is being restored, for messages of handlers.

    Example:
        >>> from graftree.interop.flax_side import state_dicts
        >>> state_dicts.current_path()
        ''
    """
    return "/".join(_restoring.path)


@contextlib.contextmanager
def _at(name: str) -> Iterator[None]:
    _restoring.path.append(name)
    try:
        yield
    finally:
        _restoring.path.pop()


def _handler(target: Any) -> tuple[ToStateDict, FromStateDict] | None:
    if handler := _handlers.get(type(target)):
        return handler
    if isinstance(target, tuple) and hasattr(target, "_fields"):
        return _named_tuple_to, _named_tuple_from
    if isinstance(target, Variable):
        return _variable_to, _variable_from
    return None


# Handlers of Python's containers.


def _dict_to(xs: Mapping[Any, Any]) -> dict[str, Any]:
    state = {str(key): to_state_dict(value) for key, value in xs.items()}
    if len(state) != len(xs):
        raise ValueError(
            f"Keys of a state dict are strings, and some of {list(xs)} are the same as "
            "strings; rename them."
        )
    return state


def restore_dict(xs: Mapping[Any, Any], state: Mapping[str, Any]) -> dict[Any, Any]:
    """The entries of ``xs`` with the leaves of a state dict; for handlers.

    Args:
        xs: A mapping of the wanted structure.
        state: Its state dict.

    Returns:
        A new dict.

    Raises:
        ValueError: If the state dict lacks an entry; names the path.

    Example:
        >>> from graftree.interop.flax_side import state_dicts
        >>> state_dicts.restore_dict({1: 0}, {"1": 5})
        {1: 5}
    """
    missing = {str(key) for key in xs}.difference(_keys(state))
    if missing:
        raise ValueError(
            "The target dict keys and state dict keys do not match, target dict "
            f"contains keys {missing} which are not present in state dict at path "
            f"{current_path()}"
        )
    return {
        key: from_state_dict(value, state[str(key)], name=str(key))
        for key, value in xs.items()
    }


def _keys(state: Any) -> KeysView[str]:
    if not isinstance(state, Mapping):
        raise ValueError(
            errors.message(
                f"Expected a dict at path {current_path()} of the state dict, got "
                f"{type(state).__name__}.",
                way_out="Give the state dict of an object with this structure.",
            )
        )
    return state.keys()


def _sequence_to(xs: Iterable[Any]) -> dict[str, Any]:
    return {str(index): to_state_dict(value) for index, value in enumerate(xs)}


def _list_from(xs: list[Any], state: Mapping[str, Any]) -> list[Any]:
    if len(_keys(state)) != len(xs):
        raise ValueError(
            "The size of the list and the state dict do not match, got "
            f"{len(xs)} and {len(state)} at path {current_path()}"
        )
    return list(restore_dict(dict(enumerate(xs)), state).values())


def _named_tuple_to(xs: Any) -> dict[str, Any]:
    return {name: to_state_dict(getattr(xs, name)) for name in xs._fields}


def _named_tuple_from(xs: Any, state: Mapping[str, Any]) -> Any:
    if set(_keys(state)) == {"name", "fields", "values"}:  # as old checkpoints have it
        names = state["fields"].values()
        state = dict(zip(names, state["values"].values(), strict=True))
    if set(state) != set(xs._fields):
        raise ValueError(
            "The field names of the state dict and the named tuple do not match, got "
            f"{set(state)} and {set(xs._fields)} at path {current_path()}"
        )
    return type(xs)(**restore_dict(xs._asdict(), state))


def _partial_to(xs: jax.tree_util.Partial) -> dict[str, Any]:
    return {"args": to_state_dict(xs.args), "keywords": to_state_dict(xs.keywords)}


def _partial_from(xs: jax.tree_util.Partial, state: Mapping[str, Any]) -> Any:
    args = from_state_dict(xs.args, state["args"], name="args")
    keywords = from_state_dict(xs.keywords, state["keywords"], name="keywords")
    return jax.tree_util.Partial(xs.func, *args, **keywords)


# Handlers of this library's objects, which Flax does not have.


def _variable_to(variable: Variable[Any]) -> Any:
    return to_state_dict(variable.get_value())


def _variable_from(variable: Variable[Any], state: Any) -> Variable[Any]:
    return variable.replace(from_state_dict(variable.get_value(), state, name="value"))


def _state_from(xs: State, state: Mapping[str, Any]) -> State:
    return State(restore_dict(dict(xs.items()), state))


register_serialization_state(dict, _dict_to, restore_dict)
register_serialization_state(list, _sequence_to, _list_from)
register_serialization_state(
    tuple, _sequence_to, lambda xs, state: tuple(_list_from(list(xs), state))
)
register_serialization_state(jax.tree_util.Partial, _partial_to, _partial_from)
register_serialization_state(State, lambda xs: _dict_to(dict(xs.items())), _state_from)
