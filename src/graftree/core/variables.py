"""Variables: typed mutable boxes for values inside objects.

A `Variable` holds a value (an array, an array ref, or any pytree), metadata that is
static, and the trace that owns it. It is the only thing that can change inside a
transform without changing structure. What always holds:

- only the owning trace writes (ref-backed Variables excepted: their writes are effects
  that JAX itself tracks);
- writing the value is no structural change and moves no stamp; replacing metadata is
  and does;
- as a JAX pytree it has one child, the raw value, and its class and metadata are
  static.

The operators that let a Variable stand for its value are in `operators.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax

from graftree import _jax, errors
from graftree.core import metadata as variable_metadata
from graftree.core import operators, ownership, sharding, stamps, text, variable_defaults
from graftree.core.metadata import HashableMapping, VariableMetadata

A = TypeVar("A")
MISSING: Any = object()

# The names of the two slots that hold what a Variable is made of.
_SLOTS = ("_value", "_metadata", "_owner", "stamp", "__weakref__")


def _flatten(variable: Variable[Any]) -> tuple[tuple[Any], HashableMapping]:
    return (variable._value,), variable._metadata


_VALUE_KEY = jax.tree_util.GetAttrKey("value")


def _flatten_with_key(variable: Variable[Any]) -> Any:
    return ((_VALUE_KEY, variable._value),), variable._metadata


def _unflattener(cls: Any) -> Callable[[HashableMapping, Any], Any]:
    def unflatten(entries: HashableMapping, children: Any) -> Any:
        return rebuild(cls, children[0], entries)

    return unflatten


class VariableMeta(type):
    """Gives subclasses no ``__dict__``, and registers each as a JAX pytree."""

    def __new__(
        mcs,  # noqa: N804
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        **options: Any,
    ) -> Any:
        namespace.setdefault("__slots__", ())
        cls = super().__new__(mcs, name, bases, namespace, **options)
        cls.class_hooks = {
            hook: getattr(cls, hook)
            for hook in variable_metadata.HOOKS
            if hasattr(cls, hook)
        }
        jax.tree_util.register_pytree_with_keys(
            cls, _flatten_with_key, _unflattener(cls), _flatten
        )
        return cls


class Variable(
    operators.ValueOperators, text.Representable, Generic[A], metaclass=VariableMeta
):
    """A typed mutable box for a value that belongs to the state of a model.

    Args:
        value: Any value: an array, a NumPy array, a scalar, a pytree, ``None``, or the
            `VariableMetadata` that `with_metadata` makes. It is stored as it is.
        hijax: Accepted for compatibility; such a Variable is ref-backed.
        ref: Whether to store the value in a ``jax.Ref``, so that plain JAX transforms
            change it in place. ``None`` takes the default of `var_defaults`.
        eager_sharding: Whether an ``out_sharding`` annotation places the value now.
            ``None`` takes the default of `use_eager_sharding`.
        **metadata: Further static entries, readable as attributes.

    Raises:
        ValueError: If the value contains a ``jax.Ref``, or an annotation can't be
            placed.

    Example:
        >>> count = nnx.Variable(jnp.array(1), tag="steps")
        >>> count[...] += 1
        >>> count[...]
        Array(2, dtype=int32, weak_type=True)
        >>> count.tag
        'steps'
    """

    __slots__ = _SLOTS
    required_metadata: ClassVar[frozenset[str]] = variable_metadata.REQUIRED
    class_hooks: ClassVar[dict[str, Callable[..., Any]]]

    def __init__(
        self,
        value: A | VariableMetadata,
        *,
        hijax: bool | None = None,
        ref: bool | None = None,
        eager_sharding: bool | None = None,
        **metadata: Any,
    ) -> None:
        flags = {"hijax": hijax, "ref": ref, "eager_sharding": eager_sharding}
        if isinstance(value, VariableMetadata):
            value, flags, metadata = _absorb(value, flags, metadata)
        _fill_defaults(flags)
        if any(_jax.is_ref(leaf) for leaf in _leaves(value)):
            raise ValueError(
                "Cannot pass a Ref directly into Variable constructor.\n"
                "Pass the array and ref=True: Variable(array, ref=True)."
            )
        entries = _complete(type(self), flags, metadata)
        store = object.__setattr__
        store(self, "_owner", ownership.current())
        store(self, "_metadata", entries)
        store(self, "_value", value)
        store(self, "stamp", 0)
        if "on_create_value" in entries:
            value = variable_metadata.run_hooks(entries["on_create_value"], self, value)
        value = self.create_value(value)
        if entries["eager_sharding"] and "out_sharding" in entries:
            value = sharding.place(value, entries)
        if entries["ref"] and not isinstance(value, jax.ShapeDtypeStruct):
            value = jax.new_ref(jax.numpy.asarray(value))
        store(self, "_value", value)

    # Reading and writing the value.

    def create_value(self, value: A) -> A:
        """Called with the value as the Variable is made; override to change it."""
        return value

    def get_value(self, *, index: Any = MISSING) -> Any:
        """The value, its containers copied, refs read.

        Args:
            index: Returns ``value[index]`` only; ``...`` gives a whole array.

        Returns:
            The value; arrays are the stored objects, not copies.

        Raises:
            TypeError: If ``index`` is given and the value has no items.
        """
        raw = self._value
        if _is_array(raw):
            value = raw if index is MISSING or index is Ellipsis else raw[index]
        elif _jax.is_ref(raw):
            value = raw[...] if index is MISSING else raw[index]
        else:
            value = _copy_containers(raw)
            if index is not MISSING and not (
                index is Ellipsis and isinstance(value, jax.ShapeDtypeStruct)
            ):
                value = value[index]
        hooks = self._metadata.get("on_get_value")
        return (
            value if hooks is None else variable_metadata.run_hooks(hooks, self, value)
        )

    def set_value(self, value: Any, *, index: Any = MISSING) -> None:
        """Replaces the value, or the part of it at ``index``.

        Args:
            value: The new value. Without ``index`` it may have any shape, dtype and
                type; with one it is written into the stored array, whose shape, dtype
                and sharding stay.
            index: Where to write, as in ``array.at[index].set(value)``.

        Raises:
            TraceContextError: If another trace owns the Variable.
        """
        self._check_writable()
        value = _copy_containers(value)
        hooks = self._metadata.get("on_set_value")
        if hooks is not None:
            value = variable_metadata.run_hooks(hooks, self, value)
        raw = self._value
        if _jax.is_ref(raw):
            raw[... if index is MISSING else index] = _unwrap(value)
        elif index is MISSING:
            object.__setattr__(self, "_value", value)
        elif _is_array(raw):
            object.__setattr__(self, "_value", _write_at(raw, index, _unwrap(value)))
        else:
            raw[index] = value

    def get_raw_value(self) -> Any:
        """What is stored: no hooks are run, and a ref is returned as a ref."""
        return self._value

    def set_raw_value(self, value: Any, *, _unsafe_bypass_check: bool = False) -> None:
        """Stores ``value`` as it is, without hooks; a ref is replaced.

        Raises:
            TraceContextError: If another trace owns the Variable.
        """
        self._check_writable()
        object.__setattr__(self, "_value", value)

    def __getitem__(self, key: Any) -> Any:
        return self.get_value(index=key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.set_value(value, index=key)

    def __delitem__(self, key: Any) -> None:
        value = self.get_value()
        del value[key]
        self.set_value(value)

    @property
    def value(self) -> Any:
        """The value (deprecated: use ``variable[...]`` or `get_value`)."""
        variable_defaults.warn_deprecated_value("'.value' access", stacklevel=3)
        return self.get_value()

    @value.setter
    def value(self, value: Any) -> None:
        variable_defaults.warn_deprecated_value("'.value' setter", stacklevel=3)
        self.set_value(value)

    @property
    def raw_value(self) -> Any:
        """The raw value (deprecated: use `get_raw_value`)."""
        variable_defaults.warn_deprecated_value("'.raw_value' access", stacklevel=3)
        return self.get_raw_value()

    @raw_value.setter
    def raw_value(self, value: Any) -> None:
        variable_defaults.warn_deprecated_value("'.raw_value' setter", stacklevel=3)
        self.set_raw_value(value)

    def _check_writable(self) -> None:
        if self._owner is not ownership.current() and not _jax.is_ref(self._value):
            raise ownership.variable_error(self)
        if self._metadata.get("mutable", True) is False:
            raise errors.ImmutableVariableError(
                f"Cannot write this {type(self).__name__}: it was made read-only.\n"
                "Use nnx.with_vars(node, mutable=True) to undo that."
            )

    # Types and metadata.

    @property
    def var_type(self) -> type[Variable[A]]:
        """The class of the Variable."""
        return type(self)

    type = var_type

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.get_value().shape

    @property
    def hijax(self) -> bool:
        """Whether the Variable was made with ``hijax=True``."""
        return self._metadata["hijax"]

    @property
    def ref(self) -> bool:
        """Whether the value is stored in a ``jax.Ref``."""
        return self._metadata["ref"]

    def get_metadata(
        self,
        name: str | None = None,
        default: Any = MISSING,
        *,
        exclude_required: bool | None = None,
    ) -> Any:
        """All metadata as a new dict, or the entry ``name``.

        Args:
            name: The entry to return; ``None`` for all.
            default: Returned if there is no entry ``name``.
            exclude_required: Leaves out ``hijax``, ``ref`` and ``eager_sharding``.

        Raises:
            KeyError: If the entry is missing and there is no default.
            TypeError: If ``name`` and ``exclude_required`` are both given, or
                ``default`` without ``name``.
        """
        if name is None:
            if default is not MISSING:
                raise TypeError("get_metadata: `default` needs `name`.")
            hidden = self.required_metadata if exclude_required else ()
            return {k: v for k, v in self._metadata.items() if k not in hidden}
        if exclude_required is not None:
            raise TypeError("get_metadata: give `name` or `exclude_required`, not both.")
        if default is MISSING:
            return self._metadata[name]
        return self._metadata.get(name, default)

    def set_metadata(self, *args: Any, **entries: Any) -> None:
        """Replaces all metadata (one dict), sets one entry (two arguments), or updates.

        Raises:
            TypeError: If the arguments are none of these three forms.
            ValueError: If ``hijax`` or ``ref`` would change.
            TraceContextError: If another trace owns the Variable.
        """
        current = dict(self._metadata)
        if (args and entries) or len(args) > 2 or not (args or entries):
            raise TypeError(
                "set_metadata takes one dict, a name and a value, or keywords; got "
                f"{len(args)} positional and {len(entries)} keyword arguments."
            )
        if len(args) == 1:
            required = {key: current[key] for key in current if key in self.required_metadata}
            fixed: tuple[str, ...] = ("hijax", "ref", "eager_sharding")
            changed = required | variable_metadata.rename_old_keys(dict(args[0]))
        else:
            fixed = ("hijax", "ref")
            given = {args[0]: args[1]} if args else entries
            changed = current | variable_metadata.rename_old_keys(dict(given))
        for key in fixed:
            if changed[key] != current[key]:
                raise ValueError(
                    f"Cannot change `{key}` metadata: expected {current[key]}, got "
                    f"{changed[key]}.\nUse variable.copy({key}={changed[key]})."
                )
        self._replace_metadata(HashableMapping(changed))

    def has_metadata(self, name: str) -> bool:
        """Whether there is a metadata entry ``name``."""
        return name in self._metadata

    def del_metadata(self, name: str) -> None:
        """Removes the metadata entry ``name``.

        Raises:
            ValueError: For ``hijax`` and ``ref``.
            KeyError: If there is no such entry.
        """
        if name in ("hijax", "ref"):
            raise ValueError(f"Cannot delete `{name}` metadata: every Variable has it.")
        entries = dict(self._metadata)
        del entries[name]
        self._replace_metadata(HashableMapping(entries))

    def _replace_metadata(self, entries: HashableMapping) -> None:
        if self._owner is not ownership.current() and not _jax.is_ref(self._value):
            raise ownership.variable_error(self)
        object.__setattr__(self, "_metadata", entries)
        stamps.touch(self)

    @property
    def sharding_names(self) -> Any:
        """The annotation (deprecated: read the metadata ``out_sharding``)."""
        variable_defaults.warn_deprecated_value("'.sharding_names'", stacklevel=3)
        return self._metadata.get("out_sharding")

    def add_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Tells the ``on_add_axis`` hooks that a transform added a dimension."""
        if "on_add_axis" in self._metadata:
            hooks = self._metadata["on_add_axis"]
            variable_metadata.run_hooks(hooks, self, axis_index, axis_name)

    def remove_axis(self, axis_index: int, axis_name: str | None) -> None:
        """Tells the ``on_remove_axis`` hooks that a transform removed a dimension."""
        if "on_remove_axis" in self._metadata:
            hooks = self._metadata["on_remove_axis"]
            variable_metadata.run_hooks(hooks, self, axis_index, axis_name)

    # Copies and updates.

    def copy(
        self, value: Any = MISSING, *, _copy_ref: bool = True, **updates: Any
    ) -> Variable[A]:
        """A new Variable of the same class; arrays are shared, containers copied.

        Args:
            value: The value of the copy; the default is the own value. A ref is read
                into a new ref.
            **updates: Metadata entries that differ; ``ref`` converts the storage.

        Returns:
            The copy, owned by the current trace. No hook and no `create_value` runs.

        Raises:
            TypeError: If ``raw_value`` is given.
        """
        if "raw_value" in updates:
            raise TypeError("copy: give the new value as `value`, not as `raw_value`.")
        entries = HashableMapping({**self._metadata, **updates}) if updates else None
        entries = self._metadata if entries is None else entries
        raw = self._value if value is MISSING else value
        if _jax.is_ref(raw) and (_copy_ref or not entries["ref"]):
            raw = raw[...]
        if entries["ref"] and not _jax.is_ref(raw) and _can_be_ref(raw):
            raw = jax.new_ref(jax.numpy.asarray(raw))
        return rebuild(type(self), _copy_containers(raw), entries)

    replace = copy
    to_state = copy

    @classmethod
    def from_metadata(cls, value: Any, attributes: Mapping[str, Any]) -> Variable[Any]:
        """A Variable with this value and metadata; nothing of ``__init__`` is run.

        Raises:
            KeyError: If ``attributes`` lacks ``hijax``.
        """
        entries = {"hijax": attributes["hijax"], "ref": False, "eager_sharding": True}
        entries.update(attributes)
        if entries["ref"] and not _jax.is_ref(value) and _can_be_ref(value):
            value = jax.new_ref(jax.numpy.asarray(value))
        return rebuild(cls, value, HashableMapping(entries))

    def copy_from(self, other: Variable[A]) -> None:
        """Takes over the raw value and the metadata of a Variable of the same class.

        Raises:
            ValueError: If the classes differ.
        """
        if other is self:
            return
        if type(self) is not type(other):
            raise ValueError(
                f"Cannot copy from an incompatible container: expected "
                f"{type(self).__name__}, got {type(other).__name__}."
            )
        self._check_writable()
        object.__setattr__(self, "_value", other._value)
        self._replace_metadata(other._metadata)

    def update_from_state(self, other: Variable[A]) -> None:
        """Takes over the value and metadata of another Variable, of any type.

        A ref stays the same ref, and ``hijax`` and ``ref`` stay as they are.
        """
        self._check_writable()
        raw, new = self._value, other._value
        if _jax.is_ref(raw):
            if new is not raw:
                raw[...] = new[...] if _jax.is_ref(new) else new
        else:
            object.__setattr__(self, "_value", new[...] if _jax.is_ref(new) else new)
        entries = other._metadata
        if entries is not self._metadata and entries != self._metadata:
            kept = {key: self._metadata[key] for key in ("hijax", "ref")}
            self._replace_metadata(HashableMapping({**entries, **kept}))

    def __copy__(self) -> Variable[A]:
        return rebuild(type(self), self._value, self._metadata)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable[A]:
        return copy_deeply(self, memo)

    def __reduce__(self) -> Any:
        raw = self._value
        ref_backed = _jax.is_ref(raw)
        return (
            _unpickle,
            (type(self), raw[...] if ref_backed else raw, self._metadata, ref_backed),
        )

    # What remains of the object protocol.

    def __getattr__(self, name: str) -> Any:
        # Slots are unset while copy and pickle probe a half-made object.
        if name in _SLOTS:
            raise AttributeError(name)
        if name in self._metadata:
            return self._metadata[name]
        raw = self._value
        if _jax.is_ref(raw) and not hasattr(raw, name):
            raw = raw[...]
        return getattr(raw, name)

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            object.__setattr__(self, name, value)
        except AttributeError as error:
            if hasattr(type(self), name):
                raise
            raise AttributeError(
                f"{type(self).__name__} has no attribute {name!r}. Variables keep such "
                f"entries as metadata: use variable.set_metadata({name}=value)."
            ) from error

    def __delattr__(self, name: str) -> None:
        raise AttributeError(
            f"Cannot delete {name!r} of a {type(self).__name__}: "
            f"use variable.del_metadata({name!r})."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_value()(*args, **kwargs)

    def __jax_array__(self) -> Any:
        return self.get_value()

    def __nnx_repr__(self) -> Iterable[Any]:
        return text.variable_repr(self, self.get_value(), self._metadata)


class Param(Variable[A]):
    """A parameter that training changes by gradients.

    Example:
        >>> kernel = nnx.Param(jnp.ones((2, 3)))
        >>> (jnp.ones((1, 2)) @ kernel).shape
        (1, 3)
    """


class BatchStat(Variable[A]):
    """A running statistic, e.g. the mean of batch normalization.

    Example:
        >>> nnx.BatchStat(jnp.zeros(3)).shape
        (3,)
    """


class Cache(Variable[A]):
    """A cache, e.g. of keys and values while decoding.

    Example:
        >>> nnx.Cache(jnp.zeros((1, 8))).shape
        (1, 8)
    """


class Intermediate(Variable[A]):
    """A value recorded inside a call, e.g. by ``Module.sow``.

    Example:
        >>> nnx.Intermediate((1.0, 2.0)).get_value()
        (1.0, 2.0)
    """


class Perturbation(Intermediate[A]):
    """A zero added to a value inside a call, so that gradients reach that value.

    Example:
        >>> isinstance(nnx.Perturbation(jnp.zeros(3)), nnx.Intermediate)
        True
    """


def rebuild(cls: type[Variable[Any]], raw: Any, entries: HashableMapping) -> Any:
    """A Variable owned by the current trace, made of its parts; nothing is run."""
    variable = object.__new__(cls)
    store = object.__setattr__
    store(variable, "_value", raw)
    store(variable, "_metadata", entries)
    store(variable, "_owner", ownership.current())
    store(variable, "stamp", 0)
    return variable


def metadata_of(variable: Variable[Any]) -> HashableMapping:
    """The metadata as it is stored: immutable, not a copy."""
    return variable._metadata


def is_owned(variable: Variable[Any]) -> bool:
    """Whether the current trace may write the Variable."""
    return variable._owner is ownership.current() or _jax.is_ref(variable._value)


def read_raw(variables: Sequence[Variable[Any]]) -> list[Any]:
    """The raw values of many Variables."""
    return [variable._value for variable in variables]


def write_raw(variables: Sequence[Variable[Any]], values: Sequence[Any]) -> None:
    """Stores raw values in many Variables: all of them, or none.

    Raises:
        TraceContextError: If another trace owns one of them; nothing is written then.
    """
    owner = ownership.current()
    for variable in variables:
        if variable._owner is not owner and not _jax.is_ref(variable._value):
            raise ownership.variable_error(variable)
    store = object.__setattr__
    for variable, value in zip(variables, values, strict=True):
        raw = variable._value
        if _jax.is_ref(raw):
            raw[...] = value
        else:
            store(variable, "_value", value)


def write_metadata(variable: Variable[Any], entries: HashableMapping) -> None:
    """Replaces all metadata of a Variable that the current trace owns."""
    variable._replace_metadata(entries)


def copy_deeply(
    variable: Variable[Any],
    memo: dict[int, Any],
    copy_value: Callable[[Any, dict[int, Any]], Any] | None = None,
) -> Any:
    """A copy that shares nothing mutable; known objects are taken from ``memo``.

    Args:
        variable: What to copy.
        memo: As for ``copy.deepcopy``: what has been copied already, by id.
        copy_value: Copies raw values and metadata; the default is ``copy.deepcopy``.
    """
    copy_value = copy.deepcopy if copy_value is None else copy_value
    if id(variable) in memo:
        return memo[id(variable)]
    copied = rebuild(type(variable), None, variable._metadata)
    memo[id(variable)] = copied
    raw = variable._value
    new = jax.new_ref(raw[...]) if _jax.is_ref(raw) else copy_value(raw, memo)
    entries = {key: copy_value(entry, memo) for key, entry in variable._metadata.items()}
    object.__setattr__(copied, "_value", new)
    object.__setattr__(copied, "_metadata", HashableMapping(entries))
    return copied


def _unpickle(
    cls: type[Variable[Any]], raw: Any, entries: HashableMapping, ref_backed: bool
) -> Any:
    return rebuild(cls, jax.new_ref(raw) if ref_backed else raw, entries)


def _absorb(
    boxed: VariableMetadata, flags: dict[str, Any], metadata: dict[str, Any]
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Takes a VariableMetadata apart; its entries win over the keyword metadata."""
    own = dict(boxed.metadata)
    for key in flags:
        given = own.pop(key, None)
        if given is None:
            continue
        if flags[key] is not None and flags[key] != given:
            raise ValueError(
                f"Conflicting values of `{key}`: {flags[key]} as an argument, {given} "
                "in the metadata of the value."
            )
        flags[key] = given
    hooks = {
        hook: getattr(boxed, hook)
        for hook in variable_metadata.HOOKS
        if getattr(boxed, hook) and hook not in metadata
    }
    return boxed.raw_value, flags, {**metadata, **own, **hooks}


def _fill_defaults(flags: dict[str, Any]) -> None:
    for older in ("hijax", "ref"):
        if flags[older] is None:
            flags[older] = variable_defaults.current(older)
    if flags["eager_sharding"] is None:
        flags["eager_sharding"] = sharding.using_eager_sharding()


# The metadata of Variables without entries of their own, shared by all of them.
_PLAIN = {
    eager: HashableMapping({"hijax": False, "ref": False, "eager_sharding": eager})
    for eager in (True, False)
}


def _complete(
    cls: type[Variable[Any]], flags: dict[str, Any], metadata: dict[str, Any]
) -> HashableMapping:
    if not metadata and not cls.class_hooks and not (flags["hijax"] or flags["ref"]):
        return _PLAIN[flags["eager_sharding"]]
    entries = {**variable_metadata.rename_old_keys(metadata), **flags}
    for hook, function in cls.class_hooks.items():
        entries.setdefault(hook, function)
    if any(hook in entries for hook in variable_metadata.HOOKS):
        variable_metadata.warn_about_hooks(stacklevel=3)
    return HashableMapping(entries)


_is_array_type: dict[type, bool] = {}


def _is_array(value: Any) -> bool:
    kind = type(value)
    known = _is_array_type.get(kind)
    if known is None:
        # A traced ref has the type of a traced array, so tracers are asked one by one.
        if issubclass(kind, jax.core.Tracer):
            return not _jax.is_ref(value)
        known = _is_array_type[kind] = issubclass(kind, jax.Array)
    return known


def _leaves(value: Any) -> Iterable[Any]:
    if _is_array(value):
        return ()
    return jax.tree.leaves(value)


def _copy_containers(value: Any) -> Any:
    """Copies lists, dicts and tuples; what they hold is shared."""
    kind = type(value)
    if kind is dict:
        return {key: _copy_containers(item) for key, item in value.items()}
    if kind is list:
        return [_copy_containers(item) for item in value]
    if kind is tuple:
        return tuple([_copy_containers(item) for item in value])
    return value


def _unwrap(value: Any) -> Any:
    return value.get_value() if isinstance(value, Variable) else value


def _can_be_ref(value: Any) -> bool:
    return not isinstance(value, (jax.ShapeDtypeStruct, jax.sharding.PartitionSpec))


def _write_at(raw: Any, index: Any, value: Any) -> Any:
    if index is Ellipsis and _is_array(value) and _jax.same_type(raw, value):
        return value
    return raw.at[index].set(value)
