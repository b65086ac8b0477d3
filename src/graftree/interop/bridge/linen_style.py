"""Modules written in the style of Linen: ``setup`` or ``compact``, ``init``, ``apply``.

A bridge `Module` is a dataclass. `apply` works on a copy of it, so that the object
stays as it is. The copy gets the given variables as attributes and a `Scope`; it is
*bound* then. A value assigned to a bound Module becomes bound too, and a Module made in
a method belongs to the Module that runs it, under a name (see `binding.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast, dataclass_transform

import jax

from graftree.core.graph import functional as graph_functional
from graftree.core.graph.graphdefs import GraphDef
from graftree.core.modules import modules
from graftree.core.objects import attributes
from graftree.core.rng.streams import Rngs
from graftree.core.states.states import State
from graftree.core.variables import kinds
from graftree.core.variables.variables import Variable
from graftree.interop.bridge import binding, linen_side
from graftree.interop.bridge.wrappers import ToNNX

A = TypeVar("A")
F = TypeVar("F", bound=Callable[..., Any])

_RngsLike = int | jax.Array | Mapping[str, Any] | Rngs | None
_MISSING: Any = object()
_OWN = binding.OWN


class LinenStyleMeta(modules.ModuleMeta):
    """Gives Modules that are made in a method of a bridge Module their place in it."""

    def __call__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        context = binding.current_context()
        if context is None:
            return super().__call__(*args, **kwargs)
        name, parent = kwargs.pop("name", None), kwargs.pop("parent", _MISSING)
        if name is not None and not isinstance(name, str):
            raise ValueError(f"'name' must be a 'str', got {type(name).__name__}")
        if parent is not _MISSING and parent is not None:
            raise ValueError(
                f"'parent' can only be set to None, got {type(parent).__name__}"
            )
        if name is not None and "name" in inspect.signature(cls.__init__).parameters:
            kwargs["name"] = name  # a field of the user's
        module = super().__call__(*args, **kwargs)
        name = name or binding.auto_name(cls)
        if parent is _MISSING and name is not None:
            binding.place(module, name, binding.AttrPriority.INIT_PARENT)
        return module


@dataclass_transform(eq_default=True, field_specifiers=(dataclasses.field,))
class Module(
    modules.Module, binding.ModuleBase, pytree=False, metaclass=LinenStyleMeta
):
    """A base class for Modules in the style of Linen; each subclass is a dataclass.

    Submodules and variables are made in ``setup``, which runs as soon as the Module is
    bound, or in methods with `compact`. In a `compact` method a Module that has no
    ``name=`` gets one of its class and a number; with ``parent=None`` it gets no place.
    It is a graph node, not a pytree.

    Attributes:
        scope: The random streams of the call, while the Module is bound; else None.
        attr_priorities: Which names are preferred; see `set_attr_priority`.

    Example:
        >>> class Dense(nnx.bridge.Module):
        ...     features: int
        ...
        ...     @nnx.bridge.compact
        ...     def __call__(self, x):
        ...         shape = x.shape[-1], self.features
        ...         return x @ self.param("kernel", nnx.initializers.ones, shape)
        >>> class Net(nnx.bridge.Module):
        ...     @nnx.bridge.compact
        ...     def __call__(self, x):
        ...         x = Dense(2)(x)
        ...         return Dense(1)(x)
        >>> x = jnp.ones((1, 3))
        >>> variables = Net().init(0, x)
        >>> jax.tree.map(jnp.shape, variables["params"])
        {'Dense_0': {'kernel': (3, 2)}, 'Dense_1': {'kernel': (2, 1)}}
        >>> Net().apply(variables, x)
        Array([[6.]], dtype=float32)
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        has_hash = "__hash__" in vars(cls)
        attributes.dataclass(cls)
        if not has_hash:
            cls.__hash__ = object.__hash__  # pyright: ignore[reportAttributeAccessIssue]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an unbound Module."""
        new = super().__new__
        # That of `object` takes no arguments from a `__new__`.
        obj: Any = new(cls) if new is object.__new__ else new(cls, *args, **kwargs)
        obj.scope, obj.attr_priorities = None, {}
        return obj

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OWN and vars(self).get("scope") is not None:
            value = binding.adopted(self, name, value)
        super().__setattr__(name, value)

    # Used by methods of a bound Module.

    def param(
        self,
        name: str,
        init_fn: Callable[..., A],
        *init_args: Any,
        unbox: bool = True,
        **init_kwargs: Any,
    ) -> kinds.Param[A]:
        """Returns the parameter of a name; makes it while initializing.

        Args:
            name: The name of the attribute.
            init_fn: Called with a key of the stream ``params`` and the arguments.
            *init_args: Arguments for ``init_fn``.
            unbox: Whether to split a box that ``init_fn`` returns into value and
                metadata; else the box is the value.
            **init_kwargs: Keyword arguments for ``init_fn``.

        Raises:
            ValueError: If the Module is not bound, or the name has another use.
            flax.errors.ScopeParamNotFoundError: If `apply` was not given it.
            flax.errors.ScopeParamShapeError: If it has another shape than ``init_fn``
                makes.
        """
        if self.scope is None:
            raise binding.unbound_error(self, "Parameters")

        def make(key: Any) -> Any:
            return init_fn(key, *init_args, **init_kwargs)

        variable = binding.find_variable(self, kinds.Param, name, unbox)
        if variable is not None:
            binding.check_shape(self, name, variable, make)
            return variable
        if not (self.is_initializing() or binding.may_change(self, "params")):
            path = binding.path_of(self)
            raise linen_side.linen_errors.ScopeParamNotFoundError(name, path)
        value = make(self.make_rng("params"))
        return binding.new_variable(self, "params", name, value, unbox)

    def variable(
        self,
        col: str,
        name: str,
        init_fn: Callable[..., A] | None = None,
        *init_args: Any,
        unbox: bool = True,
        **init_kwargs: Any,
    ) -> Variable[A]:
        """Returns the variable of a name; makes it if it does not exist yet.

        Args:
            col: Its collection.
            name: The name of the attribute.
            init_fn: Called with the arguments, without a key; None if there is one.
            *init_args: Arguments for ``init_fn``.
            unbox: As in `param`.
            **init_kwargs: Keyword arguments for ``init_fn``.

        Raises:
            ValueError: If the Module is not bound, if the name has another use, or if
                there is no such variable and no ``init_fn``.
        """
        if self.scope is None:
            raise binding.unbound_error(self, "Variables")
        var_type = kinds.variable_type_from_name(col, allow_register=True)
        variable = binding.find_variable(self, var_type, name, unbox)
        if variable is not None:
            return variable
        if not callable(init_fn):
            raise ValueError(
                f"Expected 'init_fn' to be a callable, got {init_fn!r}: there is no "
                f"variable {name!r} in the collection {col!r} yet."
            )
        value = init_fn(*init_args, **init_kwargs)
        return binding.new_variable(self, col, name, value, unbox)

    def make_rng(self, name: str = "default") -> jax.Array:
        """Draws a key from a random stream of the call.

        Raises:
            ValueError: If the Module is not bound.
            KeyError: If there is neither such a stream nor ``default``.
        """
        if self.scope is None:
            raise ValueError(
                "Can't use RNGs on unbound modules: use `init` or `apply`."
            )
        return self.scope.rngs[name]()

    @property
    def variables(self) -> Mapping[str, Any]:
        """Variables of this Module and of those in it, by collection."""
        return linen_side.core.freeze(binding.by_collection(self))

    # Used by callers.

    def init(
        self,
        rngs: _RngsLike = None,
        *args: Any,
        method: Callable[..., Any] | str = "__call__",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Makes the variables by a call with these arguments.

        Args:
            rngs: A seed, a key, a dict of them by stream, or an `Rngs`.
            *args: Arguments of the method.
            method: The method or its name.
            **kwargs: Keyword arguments of the method.

        Returns:
            Nested dicts by collection, as `apply` takes them.
        """
        return self.init_with_output(rngs, *args, method=method, **kwargs)[1]

    def init_with_output(
        self,
        rngs: _RngsLike = None,
        *args: Any,
        method: Callable[..., Any] | str = "__call__",
        mutable: Any = False,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """Makes the variables, and returns the output of the call too.

        Args:
            rngs: A seed, a key, a dict of them by stream, or an `Rngs`.
            *args: Arguments of the method.
            method: The method or its name.
            mutable: Collections that Linen Modules inside may change; ``False``: all.
            **kwargs: Keyword arguments of the method.

        Returns:
            The output, and the variables of all collections.
        """
        return self.apply(
            {},
            *args,
            rngs=rngs,
            method=method,
            mutable=mutable or True,
            _initialize=True,
            **kwargs,
        )

    def apply(
        self,
        variables: Mapping[str, Any],
        *args: Any,
        rngs: _RngsLike = None,
        method: Callable[..., Any] | str = "__call__",
        mutable: Any = False,
        _initialize: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Calls a method of a copy of the Module that has these variables.

        Args:
            variables: Nested mappings by collection.
            *args: Arguments of the method.
            rngs: A seed, a key, a dict of them by stream, or an `Rngs`, from which the
                call draws.
            method: The method or its name.
            mutable: Which collections may change, as in Linen. Unless it is ``False``,
                the variables are returned.
            **kwargs: Keyword arguments of the method.

        Returns:
            The output; unless ``mutable`` is ``False`` a pair of it and the variables
            of all collections.

        Raises:
            TypeError: If an attribute named by ``method`` is not callable.
            flax.errors.ApplyModuleInvalidMethodError: If ``method`` is not a function.
        """
        function = _function(type(self), method)
        module = graph_functional.clone(self, graph=True)
        state = linen_side.linen_vars_to_nnx_attrs(variables)
        scope = binding.Scope(_as_rngs(rngs), mutable)
        with binding.applying() as call:
            binding.bind(module, scope, state, is_initializing=_initialize)
            with binding.running(module, in_compact=False):
                out = function(module, *args, **kwargs)
            binding.check_complete(module, call)
        return out if mutable is False else (out, binding.by_collection(module))


def _as_rngs(rngs: _RngsLike) -> Rngs:
    if isinstance(rngs, Rngs):
        return rngs
    return Rngs(**rngs) if isinstance(rngs, Mapping) else Rngs(rngs)


def _function(cls: type[Module], method: Any) -> Callable[..., Any]:
    """Finds the function of a class that a method or its name stands for."""
    if isinstance(method, str):
        function = getattr(cls, method)
        if not callable(function):
            name = f"{cls.__name__}.{method}"
            raise TypeError(f"'{name}' must be a callable, got {type(function)}.")
        return function
    function = getattr(method, "__func__", method)
    if not callable(function):
        raise linen_side.linen_errors.ApplyModuleInvalidMethodError(method)
    return function


def compact(f: F) -> F:
    """Marks a method in which submodules and variables of a bridge Module are made.

    Args:
        f: The method.

    Returns:
        The method; Modules that are made in it belong to the Module, by name.

    Example:
        >>> class Scale(nnx.bridge.Module):
        ...     @nnx.bridge.compact
        ...     def __call__(self, x):
        ...         return x * self.param("scale", nnx.initializers.ones, ())
        >>> Scale().init(0, jnp.ones(2))
        {'params': {'scale': Array(1., dtype=float32)}}
    """

    @functools.wraps(f)
    def wrapper(self: Module, *args: Any, **kwargs: Any) -> Any:
        with binding.running(self, in_compact=True):
            return f(self, *args, **kwargs)

    return cast(F, wrapper)


def nnx_in_bridge_mdl(
    factory: Callable[[Rngs], modules.Module], name: str | None = None
) -> modules.Module:
    """Makes a Module inside of a bridge Module, which keeps its variables.

    Args:
        factory: Makes the Module from the random streams of the call.
        name: Its name; the default in a compact method is that of its class, with a
            number.

    Returns:
        The Module, with the variables that ``apply`` was given for it.

    Raises:
        ValueError: Outside of the methods of a bridge Module.
        flax.errors.ScopeParamNotFoundError: If ``apply`` was not given a `Param` of it.

    Example:
        >>> class Net(nnx.bridge.Module):
        ...     @nnx.bridge.compact
        ...     def __call__(self, x):
        ...         make = lambda rngs: nnx.Linear(3, 4, rngs=rngs)
        ...         return nnx.bridge.nnx_in_bridge_mdl(make)(x)
        >>> variables = Net().init(0, jnp.ones((1, 3)))
        >>> jax.tree.map(jnp.shape, variables["params"])
        {'Linear_0': {'bias': (4,), 'kernel': (3, 4)}}
    """
    parent = _parent("nnx_in_bridge_mdl")
    module = factory(_streams(parent))
    name = name or binding.auto_name(type(module))
    if name is None:
        binding.MODULE_CONTEXT.calls[-1].nnx_modules.append(module)
        return module
    current = vars(parent).get(name)
    if isinstance(current, modules.Module):  # made by an earlier call
        return current
    binding.MODULE_CONTEXT.calls[-1].nnx_modules.append(module)
    binding.place(module, name, binding.AttrPriority.DEFAULT)
    return module


def linen_in_bridge_mdl(
    linen_module: linen_side.linen.Module, name: str | None = None
) -> modules.Module:
    """Turns a Linen Module into a Module inside of a bridge Module.

    Args:
        linen_module: The Linen Module.
        name: Its name; the default in a compact method is that of its class, with a
            number.

    Returns:
        A `ToNNX`, initialized together with the bridge Module.

    Raises:
        ValueError: Outside of the methods of a bridge Module.

    Example:
        >>> import flax.linen as nn
        >>> class Net(nnx.bridge.Module):
        ...     @nnx.bridge.compact
        ...     def __call__(self, x):
        ...         return nnx.bridge.linen_in_bridge_mdl(nn.Dense(4))(x)
        >>> variables = Net().init(0, jnp.ones((1, 3)))
        >>> jax.tree.map(jnp.shape, variables["params"])
        {'Dense_0': {'bias': (4,), 'kernel': (3, 4)}}
    """
    parent = _parent("linen_in_bridge_mdl")
    assert parent.scope is not None
    name = name or binding.auto_name(type(linen_module))
    current = vars(parent).get(name) if name else None
    if isinstance(current, modules.Module):
        return current
    module = ToNNX(linen_module, parent.scope.rngs)
    if name is not None:
        binding.place(module, name, binding.AttrPriority.DEFAULT)
    return module


def _parent(function: str) -> binding.ModuleBase:
    parent = binding.current_module()
    if parent is None or parent.scope is None:
        raise ValueError(f"{function}() only needed inside bridge Module")
    return parent


def _streams(parent: binding.ModuleBase) -> Rngs:
    """Returns the call's streams; with a constant one for values that won't be used."""
    assert parent.scope is not None
    rngs = parent.scope.rngs
    if parent.is_initializing() or "default" in rngs:
        return rngs
    completed = Rngs(jax.random.key(0))
    for name, stream in rngs.items():
        setattr(completed, name, stream)
    return completed


M = TypeVar("M", bound=modules.Module)


@dataclasses.dataclass
class Functional(Generic[M]):
    """Two functions of a Module that is yet to be made; see `functional`.

    Attributes:
        module_type: The class of the Module.
        graphdef: Its structure, after `init`.
        args: Arguments of its constructor.
        kwargs: Keyword arguments of its constructor.
    """

    module_type: type[M]
    graphdef: GraphDef[M] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def init(self, *, rngs: Rngs | None = None) -> State:
        """Makes the Module, and remembers its structure.

        Args:
            rngs: Given to the constructor, unless None.

        Returns:
            Its state.
        """
        kwargs = self.kwargs if rngs is None else {**self.kwargs, "rngs": rngs}
        module = self.module_type(*self.args, **kwargs)
        self.graphdef, state = graph_functional.split(module)
        return state

    def apply(self, *states: Any) -> Any:
        """Returns a function that calls the Module with these states.

        Returns:
            A proxy: called, or through an attribute, as ``apply(state).encode(x)``, it
            returns the output and the new ``(graphdef, state)``.

        Raises:
            ValueError: Before `init`.
        """
        if self.graphdef is None:
            raise ValueError(
                f"{self.module_type.__name__} has no structure yet: call `init` first."
            )
        return self.graphdef.apply(*states)


def functional(cls: type[M]) -> Callable[..., Functional[M]]:
    """Returns a constructor whose result makes the Module when `init` is called.

    Args:
        cls: The class of the Module.

    Example:
        >>> linear = nnx.bridge.functional(nnx.Linear)(3, 4)
        >>> state = linear.init(rngs=nnx.Rngs(0))
        >>> y, (graphdef, state) = linear.apply(state)(jnp.ones((1, 3)))
        >>> y.shape
        (1, 4)
    """

    def make(*args: Any, **kwargs: Any) -> Functional[M]:
        return Functional(cls, None, args, kwargs)

    return make
