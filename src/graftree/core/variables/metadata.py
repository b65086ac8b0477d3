"""Data of a Variable besides its value: how it is handed over; its defaults.

Metadata is an immutable `HashableMapping`, replaced as a whole when it changes. So it
can be shared between Variables and skeletons without copies, and "did the metadata
change?" is a comparison by identity in the usual case. A list or dict in it may change
in place: skeletons and treedefs have the metadata as a `snapshot`.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, overload

from graftree import config
from graftree.core.hashable_mappings import HashableMapping
from graftree.core.variables import sharding

HOOKS = (
    "on_get_value",
    "on_set_value",
    "on_create_value",
    "on_add_axis",
    "on_remove_axis",
)

REQUIRED = frozenset({"hijax", "ref", "eager_sharding"})

# The hooks of a Variable get it first, then the value, or an index and a name.
GetValueHook = SetValueHook = CreateValueHook = Callable[[Any, Any], Any]
AddAxisHook = RemoveAxisHook = Callable[[Any, int, str | None], None]

# Older metadata keys and the key that took their place.
_RENAMED = {"sharding": "out_sharding", "sharding_names": "out_sharding"}

# Older flags and those they set. Programs that write ``is_hijax=True`` expect writes
# in plain JAX transforms to propagate, as those of a ref do.
_OLDER_FLAGS = {"use_ref": ("ref",), "has_ref": ("ref",), "is_hijax": ("hijax", "ref")}

# The class that a Variable had before `nnx.surgery.freeze`.
FROZEN_TYPE = "frozen_type"

# The entries that a Variable keeps when it takes over the metadata of another one, and
# does not take over if it has none of its own.
_OWN = ("hijax", "ref", "mutable", FROZEN_TYPE)
_KEPT_BY_UPDATES = ("mutable", FROZEN_TYPE)


class Entries(MutableMapping[str, Any]):
    """Metadata of a Variable as a dict; writes to it are writes to the Variable."""

    __slots__ = ("_read", "_write")

    def __init__(
        self,
        read: Callable[[], HashableMapping],
        write: Callable[[HashableMapping], None],
    ) -> None:
        self._read, self._write = read, write

    def __getitem__(self, key: str) -> Any:
        return self._read()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._write(self._read().with_entry(key, value))

    def __delitem__(self, key: str) -> None:
        self[key]  # a KeyError if it is missing
        self._write(self._read().without(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return repr(dict(self))

    # Other uses of it in programs, which know it as a dict.

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**other, **self}

    def copy(self) -> dict[str, Any]:
        """Returns a plain dict of the present entries."""
        return dict(self)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def rename_old_keys(metadata: dict[str, Any]) -> dict[str, Any]:
    """Gives entries under older names their current name, with a warning."""
    for old, new in _RENAMED.items():
        if old in metadata:
            warnings.warn(
                f"The metadata {old!r} is deprecated, use {new!r} instead.",
                DeprecationWarning,
                # This line: see `states`. The documented spelling is still the old one.
                stacklevel=1,
            )
            metadata[new] = metadata.pop(old)
    return metadata


def take_older_flags(entries: dict[str, Any], flags: dict[str, Any]) -> None:
    """Moves flags under older names out of ``entries``; a current flag wins."""
    for older in _OLDER_FLAGS.keys() & entries.keys():
        value = entries.pop(older)
        for flag in _OLDER_FLAGS[older]:
            if flags.get(flag) is None:
                flags[flag] = value


def run_hooks(hooks: Any, variable: Any, *args: Any) -> Any:
    """Applies one hook or several, left to right, each to the result of the last."""
    value = args[0] if args else None
    for hook in hooks if isinstance(hooks, (tuple, list)) else (hooks,):
        value = hook(variable, *args)
        if len(args) == 1:
            args = (value,)
    return value


@dataclasses.dataclass
class VariableMetadata:
    """A value together with the metadata for its Variable.

    Initializers wrapped by `with_metadata` return it; a Variable takes it apart.

    Attributes:
        raw_value: The value.
        on_set_value: Hooks, like the next four.
        metadata: Further metadata entries.

    Example:
        >>> boxed = nnx.VariableMetadata(jnp.ones(2), metadata={"tag": "x"})
        >>> nnx.Param(boxed).tag
        'x'
    """

    raw_value: Any
    on_set_value: tuple[Callable[..., Any], ...] = ()
    on_get_value: tuple[Callable[..., Any], ...] = ()
    on_create_value: tuple[Callable[..., Any], ...] = ()
    on_add_axis: tuple[Callable[..., Any], ...] = ()
    on_remove_axis: tuple[Callable[..., Any], ...] = ()
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def with_metadata(
    initializer: Callable[..., Any],
    on_set_value: Any = (),
    on_get_value: Any = (),
    on_create_value: Any = (),
    on_add_axis: Any = (),
    on_remove_axis: Any = (),
    **metadata: Any,
) -> Callable[..., VariableMetadata]:
    """Wraps an initializer so that the Variable made from its result has metadata.

    Args:
        initializer: Called with the arguments of the wrapper.
        on_set_value: One hook or a sequence of hooks (deprecated), like the next four.
        on_get_value: See ``on_set_value``.
        on_create_value: See ``on_set_value``.
        on_add_axis: See ``on_set_value``.
        on_remove_axis: See ``on_set_value``.
        **metadata: Entries of the Variable's metadata, e.g. ``out_sharding``.

    Returns:
        A function with the arguments of ``initializer`` that returns a
        `VariableMetadata`.

    Example:
        >>> init = nnx.with_metadata(nnx.initializers.ones, tag="x")
        >>> nnx.Param(init(jax.random.key(0), (2,))).get_metadata("tag")
        'x'
    """
    hook_groups = (
        on_set_value,
        on_get_value,
        on_create_value,
        on_add_axis,
        on_remove_axis,
    )
    hooks = [(hook,) if callable(hook) else tuple(hook) for hook in hook_groups]
    if any(hooks):
        warn_about_hooks(stacklevel=3)

    @functools.wraps(initializer)
    def boxed(*args: Any, **kwargs: Any) -> VariableMetadata:
        value = initializer(*args, **kwargs)
        return VariableMetadata(value, *hooks, metadata=dict(metadata))

    return boxed


def warn_about_hooks(stacklevel: int) -> None:
    """Warns that value and axis hooks are deprecated."""
    warnings.warn(
        "Hooks on Variables are deprecated: override get_value/set_value in a "
        "subclass of Variable instead.",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


# The defaults of new Variables.


class use_hijax(config.ScopedDefault):
    """Sets the default of ``Variable(..., hijax=)``; `var_defaults` of older releases.

    Example:
        >>> with nnx.use_hijax(True):
        ...     nnx.Variable(jnp.ones(2)).hijax
        True
    """

    flag = "flax_hijax_variable"


class use_refs(config.ScopedDefault):
    """Sets the default of ``Variable(..., ref=)``; `var_defaults` of older releases.

    Example:
        >>> with nnx.use_refs(True):
        ...     nnx.Variable(jnp.ones(2)).ref
        True
    """

    flag = "flax_array_ref"


_SCOPES: dict[str, type[config.ScopedDefault]] = {"hijax": use_hijax, "ref": use_refs}


def using_hijax() -> bool:
    """Whether new Variables are made with ``hijax=True`` in this thread."""
    return use_hijax.current_value()


def using_refs() -> bool:
    """Whether new Variables are made with ``ref=True`` in this thread."""
    return use_refs.current_value()


@dataclasses.dataclass(frozen=True)
class VarDefaults(Mapping[str, bool]):
    """Defaults in force: a mapping with the keys ``hijax`` and ``ref``.

    Example:
        >>> dict(nnx.var_defaults())
        {'hijax': False, 'ref': False}
    """

    hijax: bool
    ref: bool

    def __getitem__(self, key: str) -> bool:
        return vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))


class VarDefaultsContext:
    """Sets defaults of new Variables; made by `var_defaults`."""

    def __init__(self, values: Mapping[str, bool]) -> None:
        self._scopes = [_SCOPES[name](value) for name, value in values.items()]

    def __enter__(self) -> None:
        for scope in self._scopes:
            scope.__enter__()

    def __exit__(self, *exception: object) -> None:
        for scope in reversed(self._scopes):
            scope.__exit__(*exception)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates a function to run under the defaults; the ambient ones are kept."""
        for scope in self._scopes:
            function = scope(function)
        return function


@overload
def var_defaults() -> VarDefaults: ...
@overload
def var_defaults(*, hijax: bool = ..., ref: bool = ...) -> VarDefaultsContext: ...
def var_defaults(
    *, hijax: bool | None = None, ref: bool | None = None
) -> VarDefaults | VarDefaultsContext:
    """Returns the defaults of new Variables; with arguments, sets them.

    They take effect immediately, for this thread. The result is a context manager and a
    decorator that restores the previous defaults.

    Args:
        hijax: The default of ``Variable(..., hijax=)``; ``None`` leaves it.
        ref: The default of ``Variable(..., ref=)``; ``None`` leaves it.

    Returns:
        Without arguments a `VarDefaults`, otherwise a context.

    Example:
        >>> with nnx.var_defaults(ref=True):
        ...     count = nnx.Variable(jnp.array(0))
        >>> count.ref, nnx.var_defaults().ref
        (True, False)
    """
    arguments = {"hijax": hijax, "ref": ref}
    values = {name: value for name, value in arguments.items() if value is not None}
    if not values:
        return VarDefaults(using_hijax(), using_refs())
    return VarDefaultsContext(values)


# The metadata made from the arguments of a Variable.


def absorb(
    boxed: VariableMetadata, flags: dict[str, Any], metadata: dict[str, Any]
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Takes a VariableMetadata apart; its entries win over the keyword metadata."""
    entries = dict(boxed.metadata)
    for key in flags:
        flag = entries.pop(key, None)
        if flag is None:
            continue
        if flags[key] is not None and flags[key] != flag:
            raise ValueError(
                f"Conflicting values of `{key}`: {flags[key]} as an argument, {flag} "
                "in the metadata of the value."
            )
        flags[key] = flag
    hooks = {
        hook: getattr(boxed, hook)
        for hook in HOOKS
        if getattr(boxed, hook) and hook not in metadata
    }
    return boxed.raw_value, flags, {**metadata, **entries, **hooks}


_FLAGS = {**_SCOPES, "eager_sharding": sharding.use_eager_sharding}


# The metadata of Variables without entries of their own, shared by all of them.
_PLAIN = {
    eager: HashableMapping({"hijax": False, "ref": False, "eager_sharding": eager})
    for eager in (True, False)
}


@functools.cache
def hooks_of(cls: type) -> dict[str, Callable[..., Any]]:
    """Returns the hooks that a class of Variables defines; new ones of it get them."""
    return {hook: getattr(cls, hook) for hook in HOOKS if hasattr(cls, hook)}


def complete(
    cls: Any, flags: dict[str, Any], metadata: dict[str, Any]
) -> HashableMapping:
    """Returns all metadata of a new Variable: user's, flags, hooks of its class.

    Missing flags get the defaults now in force.
    """
    if metadata:
        take_older_flags(metadata, flags)
    for flag, scope in _FLAGS.items():
        if flags[flag] is None:
            flags[flag] = scope.current_value()
    hooks = hooks_of(cls)
    if not metadata and not hooks and not (flags["hijax"] or flags["ref"]):
        return _PLAIN[flags["eager_sharding"]]
    entries = {**rename_old_keys(metadata), **flags}
    for hook, function in hooks.items():
        entries.setdefault(hook, function)
    if not entries.keys().isdisjoint(HOOKS):
        warn_about_hooks(stacklevel=3)
    return HashableMapping(entries)


def updated(current: HashableMapping, updates: dict[str, Any]) -> HashableMapping:
    """Returns metadata with other entries; ``mutable=True`` undoes ``False``."""
    if not updates:
        return current
    take_older_flags(updates, updates)
    entries = {**current, **updates}
    if updates.get("mutable"):
        del entries["mutable"]
    return HashableMapping(entries)


def taken_over(current: HashableMapping, other: HashableMapping) -> HashableMapping:
    """Returns a Variable's metadata after an update by the state of another."""
    entries = {
        key: value for key, value in other.items() if key not in _KEPT_BY_UPDATES
    }
    entries |= {key: current[key] for key in _OWN if key in current}
    return HashableMapping(entries)


def changed(
    current: Mapping[str, Any], args: tuple[Any, ...], entries: Mapping[str, Any]
) -> HashableMapping:
    """Returns the metadata after ``Variable.set_metadata(*args, **entries)``."""
    if (args and entries) or len(args) > 2 or not (args or entries):
        raise TypeError(
            "set_metadata takes one dict, a name and a value, or keywords; got "
            f"{len(args)} positional and {len(entries)} keyword arguments."
        )
    if len(args) == 1 and not isinstance(args[0], Mapping):
        raise TypeError(
            "set_metadata takes a dict if it takes one argument; got "
            f"{type(args[0]).__name__}."
        )
    fixed = ["hijax", "ref"]
    remaining = dict(current)
    if len(args) == 1:
        fixed.append("eager_sharding")
        remaining = {
            key: current[key] for key in (*fixed, FROZEN_TYPE) if key in current
        }
        (entries,) = args
    elif args:
        entries = dict([args])
    updated = remaining | rename_old_keys(dict(entries))
    for key in fixed:
        if updated[key] != current[key]:
            raise ValueError(
                f"Cannot change `{key}` metadata: expected {current[key]}, got "
                f"{updated[key]}.\nUse variable.copy({key}={updated[key]})."
            )
    return HashableMapping(updated)
