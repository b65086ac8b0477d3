"""A Linen Module as a Module, and a Module as a Linen Module.

A `ToNNX` has no variables until it is called once while *initializing*, a flag that
`lazy_init` sets on a whole model. The Linen Module then initializes itself from the
shapes of its inputs, as in Linen, and its variables become attributes by their path.
Each later call gives them to the Linen Module, and takes back those that it may change.
A Variable stays the same object then.

A `ToLinen` makes a new Module in each call, as Linen makes new Modules, gives it
the variables that Linen holds, calls it, and hands back those that Linen may change. A
Variable is in the collection of its type; the state of random streams stays inside.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from graftree import errors
from graftree.core import paths
from graftree.core.graph import functional, traversals, updates
from graftree.core.modules import modules
from graftree.core.modules.modules import Module
from graftree.core.objects import attributes, bookkeeping
from graftree.core.objects.pytrees import Pytree
from graftree.core.rng.streams import Rngs, RngState
from graftree.core.states import flat_states, states
from graftree.core.variables import variables as variables_core
from graftree.core.variables.kinds import Param
from graftree.core.variables.variables import Variable
from graftree.interop.bridge import binding, linen_side

T = TypeVar("T")

# The attributes of a `ToNNX` that are not variables of Linen.
_OWN = ("to_nnx__module", "to_nnx__rngs", *bookkeeping.NAMES)
_RESERVED = frozenset({*_OWN, "module", "rngs"})


class ToNNX(modules.Module):
    """A Linen Module as a Module.

    Collections become types of Variables: ``params`` is `Param`, ``batch_stats`` is
    `BatchStat`, a collection without a type gets a new one of its name. The variables
    of ``Dense_0`` are in a dict, ``model.Dense_0["kernel"]``. Boxes such as
    ``nn.Partitioned`` become metadata of the Variable, and are given to Linen again.

    Args:
        module: The Linen Module.
        rngs: The random streams to draw from, of which it takes a fork, or a key, for
            the stream ``params``. Every call draws one key from every stream.

    Raises:
        ValueError: If variables of two collections have the same path, or one has a
            name that a ToNNX needs for itself.
        flax.errors.ScopeCollectionNotFound: If it is called before `lazy_init`.

    Example:
        >>> import flax.linen as nn
        >>> dense = nnx.bridge.ToNNX(nn.Dense(4), rngs=nnx.Rngs(0))
        >>> dense = dense.lazy_init(jnp.ones((1, 3)))
        >>> dense.kernel.shape, dense(jnp.ones((2, 3))).shape
        ((3, 4), (2, 4))
    """

    to_nnx__module: linen_side.linen.Module
    to_nnx__rngs: Any

    def __init__(
        self,
        module: linen_side.linen.Module,
        rngs: Rngs | jax.Array | None = None,
    ):
        self.to_nnx__module = module
        if isinstance(rngs, Rngs):
            rngs = rngs.fork()
        elif isinstance(rngs, jax.Array):
            rngs = Rngs(params=rngs)
        is_data = bool(attributes.has_data(rngs))
        self.to_nnx__rngs = attributes.data(rngs) if is_data else rngs

    @property
    def module(self) -> linen_side.linen.Module:
        """Linen Module, under its older name."""
        _warn_renamed("module")
        return self.to_nnx__module

    @property
    def rngs(self) -> Any:
        """Random streams, under their older name."""
        _warn_renamed("rngs")
        return self.to_nnx__rngs

    def lazy_init(self, *args: Any, **kwargs: Any) -> ToNNX:
        """Initializes the variables by a call with these arguments.

        Returns:
            The same object.
        """
        return lazy_init(self, *args, **kwargs)

    def __call__(
        self,
        *args: Any,
        rngs: Rngs | jax.Array | None = None,
        method: Callable[..., Any] | str | None = None,
        mutable: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Calls the Linen Module, or one of its methods.

        Args:
            *args: Arguments of the method.
            rngs: Other random streams for this call, or a key for ``params``.
            method: The method or its name; ``None`` for ``__call__``.
            mutable: The collections that the call may change, as in ``Module.apply``.
                The default: those that the Module around this one may change (a
                `ToLinen`, a bridge or Linen Module), else none.
            **kwargs: Keyword arguments of the method.

        Returns:
            The output of the method. Changes are in the attributes.
        """
        keys = _draw(self.to_nnx__rngs if rngs is None else rngs)
        linen_module = self.to_nnx__module
        if bookkeeping.state_of(self).initializing:
            out, initial = linen_module.init_with_output(
                keys, *args, method=method, **kwargs
            )
            self._take(initial)
            return out
        if mutable is None:
            mutable = _current_mutable()
        linen_data = {
            name: x
            for name, x in vars(self).items()
            if name not in _OWN and _is_linen_data(x)
        }
        out = linen_module.apply(
            linen_side.nnx_attrs_to_linen_vars(linen_data),
            *args,
            rngs=keys,
            method=method,
            mutable=mutable,
            **kwargs,
        )
        if mutable is False:
            return out
        out, updates = out
        self._take(updates)
        return out

    def __getattr__(self, name: str) -> Any:
        linen_module = vars(self).get("to_nnx__module")
        # Names with underscores are asked for by Python and JAX.
        if linen_module is not None and not name.startswith("_"):
            attribute = inspect.getattr_static(type(linen_module), name, None)
            if isinstance(attribute, (staticmethod, classmethod)):
                return getattr(type(linen_module), name)
            if isinstance(attribute, types.FunctionType):
                return functools.partial(self.__call__, method=attribute)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
        )

    def _take(self, collections: Mapping[str, Any]) -> None:
        """Writes variables into attributes; adds those that are new."""
        attrs = linen_side.linen_vars_to_nnx_attrs(collections)
        if reserved := _RESERVED & attrs.keys():
            raise ValueError(
                f"{type(self.to_nnx__module).__name__} has variables or submodules "
                f"named {sorted(reserved)}, names that a ToNNX needs for itself. "
                "Rename them in the Linen Module."
            )
        _check_kinds(vars(self), attrs, ())
        new = {name: x for name, x in attrs.items() if vars(self).get(name) is None}
        updates.update(self, {name: x for name, x in attrs.items() if name not in new})
        for name, value in new.items():
            setattr(self, name, attributes.data(value))


def _warn_renamed(name: str) -> None:
    warnings.warn(
        f"`ToNNX.{name}` is deprecated. Please use `to_nnx__{name}` instead.",
        DeprecationWarning,
        stacklevel=3,
    )


def _draw(rngs: Any) -> dict[str, Any]:
    """Draws the keys for Linen: one from each stream."""
    if isinstance(rngs, Rngs):
        keys = {name: stream() for name, stream in rngs.items()}
    elif isinstance(rngs, jax.Array):
        keys = {"params": rngs}
    else:
        keys = dict(rngs) if isinstance(rngs, Mapping) else {}
    if "params" not in keys and "default" in keys:
        keys["params"] = keys.pop("default")
    return keys


def _current_mutable() -> Any:
    """Returns the collections that the innermost running bridge Module may change."""
    bridge_module = binding.current_module()
    if bridge_module is not None and bridge_module.scope is not None:
        return bridge_module.scope.mutable
    linen_module = linen_side.current_linen_module()
    if linen_module is not None and linen_module.scope is not None:
        return linen_module.scope.mutable
    return False


def _is_linen_data(x: Any) -> bool:
    if isinstance(x, Variable):
        return not isinstance(x, RngState)
    return isinstance(x, dict) and all(_is_linen_data(y) for y in x.values())


def _check_kinds(
    current: Mapping[str, Any], attrs: Mapping[str, Any], path: tuple[Any, ...]
) -> None:
    """Raises if a variable has the place of something else."""
    for name, new in attrs.items():
        old, attr_path = current.get(name), (*path, name)
        if isinstance(old, dict) and isinstance(new, dict):
            _check_kinds(old, new, attr_path)
        elif old is not None and type(old) is not type(new):
            raise linen_side.duplicate_error(attr_path, new, old)


def lazy_init(fn: T, *args: Any, **kwargs: Any) -> T:
    """Initializes all `ToNNX` in a Module by calling it once.

    Args:
        fn: The Module, or one of its methods.
        *args: Arguments of the call.
        **kwargs: Keyword arguments of the call.

    Returns:
        ``fn``.

    Raises:
        ValueError: If ``fn`` is neither a Module nor a method of one.

    Example:
        >>> import flax.linen as nn
        >>> class Block(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.dense = nnx.bridge.ToNNX(nn.Dense(4), rngs)
        ...
        ...     def __call__(self, x):
        ...         return nnx.relu(self.dense(x))
        >>> block = nnx.bridge.lazy_init(Block(nnx.Rngs(0)), jnp.ones((1, 3)))
        >>> block.dense.bias.shape
        (4,)
    """
    module = _module_of(fn)
    _set_initializing(module, True)
    try:
        fn(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    finally:
        _set_initializing(module, False)
    return fn


def _module_of(fn: Any) -> modules.Module:
    method = fn
    while isinstance(method, functools.partial):
        method = method.func
    module = getattr(method, "__self__", method)
    if isinstance(module, modules.Module) and callable(fn):
        return module
    raise ValueError(
        errors.message(
            f"lazy_init: fn = {fn!r} needs to be a method of an NNX Module.",
            way_out="Pass the Module itself to initialize it by its __call__, or a "
            "bound method: lazy_init(model.encode, x).",
        )
    )


def _set_initializing(module: modules.Module, value: bool) -> None:
    for _, node in traversals.iter_graph(module, graph=True):
        if isinstance(node, Pytree):
            binding.set_initializing(node, value)


linen = linen_side.linen
FrozenDict = linen_side.core.FrozenDict
MetadataFn = Callable[[Variable[Any]], Any]
_Path = tuple[Any, ...]


class ToLinen(linen.Module):
    """A Module as a Linen Module.

    ``init`` gives its Variables by collection: `Param` in ``params``, `BatchStat` in
    ``batch_stats``, one of an unregistered type in a collection of its class name. One
    with metadata is in a box, an `NNXMeta` or the ``linen_meta_type`` in its metadata,
    so ``nn.get_partition_spec`` works. Methods of the Module are methods of it.

    Args:
        nnx_class: Makes the Module.
        args: Arguments for it.
        kwargs: Keyword arguments for it.
        skip_rng: Whether it takes no ``rngs``, an `Rngs` with all streams of Linen.
        metadata_fn: Makes Linen's entry of a Variable; ``None``: its value only.

    Warns:
        UserWarning: If ``apply`` is given variables that the Module lacks, or not given
            some that it has and may not change; those have their initial values.

    Example:
        >>> linear = nnx.bridge.ToLinen(nnx.Linear, args=(3, 4))
        >>> variables = linear.init(jax.random.key(0), jnp.ones((1, 3)))
        >>> jax.tree.map(jnp.shape, variables)
        {'params': {'bias': (4,), 'kernel': (3, 4)}}
    """

    nnx_class: Callable[..., Module]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = FrozenDict({})
    skip_rng: bool = False
    metadata_fn: MetadataFn | None = linen_side.to_linen_var

    @linen.compact
    def __call__(
        self,
        *args: Any,
        nnx_method: Callable[..., Any] | str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Calls the Module, or one of its methods.

        Args:
            *args: Arguments of the method.
            nnx_method: The method or its name; ``None`` for ``__call__``.
            **kwargs: Keyword arguments of the method.

        Raises:
            TypeError: If ``nnx_method`` is not a method.
            AttributeError: If the Module has none of this name.
        """
        is_initializing = self.is_initializing()
        module = _make(self, add_default=not is_initializing)
        if is_initializing:
            # As of the last call, if there are several: the seeds of Flax do the same.
            _hand_back(self, module)
        _take(self, module)
        out = _method(module, nnx_method)(*args, **kwargs)
        if not is_initializing:
            _hand_back(self, module)
        return out

    def __getattr__(self, name: str) -> Any:
        # Names with underscores are asked for by Python and Linen.
        if not name.startswith("_") and "nnx_class" in vars(self):
            if callable(getattr(self.nnx_class, name, None)):
                return functools.partial(self.__call__, nnx_method=name)
        parent: Any = super()
        return parent.__getattr__(name)


# Functions, because Linen wraps all methods of its Modules.


def _method(module: Module, method: Callable[..., Any] | str | None) -> Any:
    if method is None:
        return module
    function = getattr(module, method) if isinstance(method, str) else method
    if not callable(function):
        raise TypeError(
            f"nnx_method: '{method}' must be a callable, got {type(function)}."
        )
    return function if isinstance(method, str) else functools.partial(function, module)


def _make(linen_module: ToLinen, add_default: bool) -> Module:
    kwargs = dict(linen_module.kwargs)
    if not linen_module.skip_rng:
        keys = linen_side.linen_rngs_dict(linen_module, add_default)
        kwargs["rngs"] = Rngs(**keys)
    return linen_module.nnx_class(*linen_module.args, **kwargs)


def _variables(module: Module) -> list[tuple[str, _Path, Variable[Any]]]:
    """Yields a Module's Variables with collection and path, without random streams."""
    state = functional.state(module, graph=True)
    return [
        (linen_side.collection_of(variable), path, variable)
        for path, variable in states.to_flat_state(state)
        if isinstance(variable, Variable) and not isinstance(variable, RngState)
    ]


def _hand_back(linen_module: ToLinen, module: Module) -> None:
    """Gives Linen the Variables of the collections that it may change."""
    to_linen_var = linen_module.metadata_fn or Variable.get_value
    changed = {
        (col, *path): to_linen_var(variable)
        for col, path, variable in _variables(module)
        if linen_module.is_mutable_collection(col)
    }
    for col, tree in flat_states.unflatten_mapping(changed).items():
        for name, value in tree.items():
            linen_module.put_variable(col, name, value)


def _take(linen_module: ToLinen, module: Module) -> None:
    """Gives a new Module the variables that Linen holds."""
    is_new = linen_module.is_initializing()
    may_change = linen_module.is_mutable_collection
    # While initializing, it may change only variables that it has just made.
    collections = {
        col: tree
        for col, tree in linen_module.variables.items()
        if not (is_new and may_change(col))
    }
    module_paths, missing, values = set(), [], []
    for col, path, variable in _variables(module):
        value = _find(collections.get(col, {}), path)
        module_paths.add((col, _as_strings(path)))
        if value is not _MISSING:
            values.append((variable, _checked(path, variable, value)))
        elif not (is_new or may_change(col)):
            missing.append(f"{col}/{paths.to_string(path)}")
    for variable, raw in values:
        variables_core.store(variable, raw)
    unknown = []
    for col, tree in collections.items():
        for path, x in flat_states.leaves(tree):
            steps = _as_strings(path)
            if not any(
                (col, steps[:n]) in module_paths for n in range(1, len(steps) + 1)
            ):
                unknown.append(paths.to_string(path))
                _add(module, path, linen_side.to_nnx_var(col, x))
    _warn(linen_module, unknown, missing)


_MISSING: Any = object()


def _find(tree: Any, path: _Path) -> Any:
    """Returns the value at a path; checkpoints write numbers in it as strings."""
    for key in path:
        if not isinstance(tree, Mapping):
            return _MISSING
        tree = tree.get(key, tree.get(str(key), _MISSING))
    return tree


def _checked(path: _Path, variable: Variable[Any], value: Any) -> Any:
    """Converts a value for a Variable; raises if it doesn't fit."""
    raw = linen_side.unboxed(value)
    if isinstance(raw, FrozenDict):
        raw = linen_side.core.unfreeze(raw)
    elif isinstance(raw, np.ndarray):
        raw = jnp.asarray(raw)
    current = variable.get_raw_value()
    if isinstance(raw, Mapping) and not isinstance(current, Mapping):
        raise ValueError(
            "The variables given to apply have a mapping at "
            f"{paths.to_string(path)}, with the names {sorted(raw)}; the Module has a "
            f"{type(variable).__name__} there."
        )
    shape, expected = [getattr(x, "shape", None) for x in (raw, current)]
    is_misfit = shape != expected and None not in (shape, expected)
    if isinstance(variable, Param) and is_misfit:
        raise linen_side.linen_errors.ScopeParamShapeError(
            path[-1], "/" + paths.to_string(path[:-1]), shape, expected
        )
    variables_core.check_write(variable, raw, paths.to_string(path))
    return raw


def _as_strings(path: _Path) -> tuple[str, ...]:
    return tuple(map(str, path))


def _add(module: Module, path: _Path, variable: Variable[Any]) -> None:
    """Adds a Variable where the Module has an object for it, but not yet the name."""
    node: Any = module
    for key in path[:-1]:
        entries = node if isinstance(node, dict) else getattr(node, "__dict__", {})
        node = entries.get(key, entries.get(str(key)))
    if isinstance(node, dict):
        node.setdefault(path[-1], variable)
    elif isinstance(node, Module) and not hasattr(node, path[-1]):
        setattr(node, path[-1], attributes.data(variable))


def _warn(module: ToLinen, unknown: Sequence[str], missing: Sequence[str]) -> None:
    if unknown:
        lines = "".join(f"\n  - {path}" for path in sorted(unknown))
        warnings.warn(
            f"Found unknown module paths in incoming state:{lines}", stacklevel=2
        )
    if missing:
        lines = "".join(f"\n  - {path}" for path in sorted(missing))
        class_name = getattr(module.nnx_class, "__name__", repr(module.nnx_class))
        warnings.warn(
            f"{type(module).__name__} of {class_name}: these variables "
            "are not in those given to apply, so they have their initial values:"
            f"{lines}\n"
            "Pass all that `init` gave, or name their collections in `mutable`.",
            stacklevel=2,
        )


def to_linen(
    nnx_class: Callable[..., Module],
    *args: Any,
    metadata_fn: MetadataFn | None = linen_side.to_linen_var,
    name: str | None = None,
    skip_rng: bool = False,
    abstract_init: bool = True,
    **kwargs: Any,
) -> ToLinen:
    """Makes a Linen Module from a class of Modules; see `ToLinen`.

    Args:
        nnx_class: Makes the Module.
        *args: Arguments for it.
        metadata_fn: Makes Linen's entry of a Variable; ``None``: its value only.
        name: The name of the Linen Module.
        skip_rng: Whether ``nnx_class`` takes no ``rngs``.
        abstract_init: Has no effect.
        **kwargs: Keyword arguments for ``nnx_class``.

    Example:
        >>> import flax.linen as nn
        >>> class Net(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, x):
        ...         return nnx.bridge.to_linen(nnx.Linear, 3, 4, name="first")(x)
        >>> variables = Net().init(jax.random.key(0), jnp.ones((1, 3)))
        >>> variables["params"]["first"]["kernel"].shape
        (3, 4)
    """
    return ToLinen(
        nnx_class,
        args=args,
        kwargs=FrozenDict(kwargs),
        metadata_fn=metadata_fn,
        skip_rng=skip_rng,
        name=name,
    )


def to_linen_class(
    base_nnx_class: type[Module],
    base_metadata_fn: MetadataFn | None = linen_side.to_linen_var,
    base_skip_rng: bool = False,
    **partial_kwargs: Any,
) -> type[ToLinen]:
    """Turns a class of Modules into one of Linen Modules, to derive from or call.

    Args:
        base_nnx_class: The class of Modules.
        base_metadata_fn: The default for ``metadata_fn``; see `ToLinen`.
        base_skip_rng: The default for ``skip_rng``.
        **partial_kwargs: Defaults for keyword arguments of ``base_nnx_class``.

    Returns:
        A subclass of `ToLinen`. Its constructor takes keyword arguments of
        ``base_nnx_class``, and ``args``, ``kwargs``, ``skip_rng``, ``metadata_fn``,
        ``name`` and ``parent``.

    Example:
        >>> Dense = nnx.bridge.wrappers.to_linen_class(nnx.Linear, use_bias=False)
        >>> dense = Dense(in_features=3, out_features=4)
        >>> variables = dense.init(jax.random.key(0), jnp.ones((1, 3)))
        >>> jax.tree.map(jnp.shape, variables)
        {'params': {'kernel': (3, 4)}}
    """

    def construct(
        self: Any,
        args: Sequence[Any] | None = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        skip_rng: bool = base_skip_rng,
        metadata_fn: MetadataFn | None = base_metadata_fn,
        name: Any = _MISSING,
        parent: Any = _MISSING,
        nnx_class: Callable[..., Module] = base_nnx_class,
        **options: Any,
    ) -> None:
        linen_fields = {"name": name, "parent": parent}
        ToLinen.__init__(
            self,
            nnx_class,
            args=args or (),
            kwargs=FrozenDict({**partial_kwargs, **(kwargs or {}), **options}),
            skip_rng=skip_rng,
            metadata_fn=metadata_fn,
            **{
                key: value
                for key, value in linen_fields.items()
                if value is not _MISSING
            },
        )

    class ToLinenPartial(ToLinen):
        """A Linen Module of one class of Modules."""

        def __init_subclass__(cls, **options: Any) -> None:
            super().__init_subclass__(**options)
            # Linen makes each class a dataclass, with a constructor of its own.
            cls.__init__ = construct  # pyright: ignore

    ToLinenPartial.__init__ = construct  # pyright: ignore
    return ToLinenPartial
