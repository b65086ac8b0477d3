"""Tracks the bridge Module that runs now, and binds and unbinds its variables.

While a bridge Module is *bound*, it has a `Scope`. While one of its methods runs, it is
on the stack of the thread, and Modules made by the method belong to it.

    bind            a Module gets variables and a scope; its ``setup`` runs
    adopted         a value becomes an attribute of a bound Module, and is bound with it
    place           a Module that a method made becomes an attribute, by name
    by_collection   the variables of a Module and of all in it, as Linen has them

Variables that wait for an object are a `ModuleState` in its place. If an object has
several names, its variables use the one with the smallest priority.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeGuard, cast

import jax
import numpy as np

from graftree import errors
from graftree.core import ownership, paths, walks
from graftree.core.graph import functional
from graftree.core.objects import attributes, bookkeeping
from graftree.core.objects.pytrees import Pytree
from graftree.core.rng.streams import Rngs, RngState
from graftree.core.states import flat_states, states
from graftree.core.variables import kinds
from graftree.core.variables.metadata import VariableMetadata
from graftree.core.variables.variables import Variable
from graftree.interop.bridge import linen_side


class AttrPriority(enum.IntEnum):
    """Priorities of the names of a shared object: the smallest one is its path.

    Among equal priorities, the first name in the alphabet is.

    Example:
        >>> sorted(nnx.bridge.AttrPriority)[0]
        <AttrPriority.HIGH: 0>
    """

    HIGH = 0
    INIT_PARENT = 20  # a name by which a Module was made inside of its parent
    DEFAULT = 50
    LOW = 100


class Scope(Pytree):
    """Surroundings in which a bound bridge Module runs.

    Args:
        rngs: The random streams of the call.
        mutable: Which collections the caller wants back, as Linen writes it.

    Example:
        >>> nnx.bridge.Scope(nnx.Rngs(0), mutable=["cache"]).mutable
        ['cache']
    """

    def __init__(self, rngs: Rngs, mutable: Any):
        self.rngs = rngs
        self.mutable = mutable

    def copy(self) -> Scope:
        """Makes a new scope of the same streams."""
        return Scope(self.rngs, self.mutable)


class ModuleBase:
    """Base of bridge Modules, besides the Modules of this package.

    Attributes:
        scope: The random streams of the call, while the Module is bound; else None.
        attr_priorities: Which names are preferred; see `set_attr_priority`.
    """

    scope: Scope | None
    attr_priorities: dict[str, AttrPriority]

    def set_attr_priority(self, name: str, value: AttrPriority) -> None:
        """Sets how much a name is preferred as the path of an object with several."""
        self.attr_priorities = {**self.attr_priorities, name: value}

    def is_initializing(self) -> bool:
        """Whether the method runs in `init`."""
        return bookkeeping.state_of(self).initializing


@dataclasses.dataclass
class ModuleStackEntry:
    """A bridge Module whose method runs.

    Attributes:
        module: The Module.
        in_compact: Whether the method is `compact`, so that Modules made in it are
            named automatically.
        type_counter: How many have got one so far, by class.
        names: The names that were given so far.
    """

    module: ModuleBase
    in_compact: bool
    type_counter: collections.defaultdict[type, int] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(int)
    )
    names: set[str] = dataclasses.field(default_factory=set, init=False, repr=False)


@dataclasses.dataclass
class ApplyCall:
    """Records what happens in one `apply`.

    Attributes:
        nnx_modules: Modules of this package that `nnx_in_bridge_mdl` made.
        given_variables: By id, the Variables in them whose values were given.
        initialized: Objects that initialize themselves during the call.
    """

    nnx_modules: list[Any] = dataclasses.field(default_factory=list)
    given_variables: dict[int, Any] = dataclasses.field(default_factory=dict)
    initialized: list[Pytree] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class ModuleContext(threading.local):
    """Bridge Modules whose methods run in this thread, the innermost last."""

    module_stack: list[ModuleStackEntry | None] = dataclasses.field(
        default_factory=lambda: [None]
    )
    calls: list[ApplyCall] = dataclasses.field(
        default_factory=list, init=False, repr=False
    )


MODULE_CONTEXT = ModuleContext()


@contextlib.contextmanager
def running(module: ModuleBase, *, in_compact: bool) -> Iterator[ModuleStackEntry]:
    """Notes that a method of ``module`` runs in the block."""
    entry = ModuleStackEntry(module, in_compact)
    MODULE_CONTEXT.module_stack.append(entry)
    try:
        yield entry
    finally:
        MODULE_CONTEXT.module_stack.pop()


@contextlib.contextmanager
def applying() -> Iterator[ApplyCall]:
    """Records one `apply` in the block."""
    call = ApplyCall()
    MODULE_CONTEXT.calls.append(call)
    try:
        yield call
    finally:
        MODULE_CONTEXT.calls.pop()
        for node in call.initialized:
            set_initializing(node, False)


def set_initializing(node: Pytree, value: bool) -> None:
    """Sets whether an object makes its variables when it is called."""
    state = bookkeeping.state_of(node)
    state.initializing = value
    ownership.touch(state)


def current_context() -> ModuleStackEntry | None:
    """Returns the entry of the bridge Module whose method runs now; None outside.

    Example:
        >>> print(nnx.bridge.current_context())
        None
    """
    return MODULE_CONTEXT.module_stack[-1]


def current_module() -> ModuleBase | None:
    """Returns the bridge Module whose method runs now; None outside.

    Example:
        >>> class Name(nnx.bridge.Module):
        ...     def __call__(self):
        ...         return type(nnx.bridge.current_module()).__name__
        >>> Name().apply({})
        'Name'
    """
    context = current_context()
    return context.module if context else None


def auto_name(cls: type) -> str | None:
    """Names the next object of a class in a compact method; returns None elsewhere."""
    context = current_context()
    if context is None or not context.in_compact:
        return None
    index = context.type_counter[cls]
    context.type_counter[cls] += 1
    return f"{cls.__name__}_{index}"


def is_taken(module: ModuleBase, name: str) -> bool:
    """Whether a method that still runs has given this name in the Module."""
    return any(
        entry is not None and entry.module is module and name in entry.names
        for entry in MODULE_CONTEXT.module_stack
    )


# Attributes that hold no variables.
OWN = frozenset({"scope", "attr_priorities", *bookkeeping.NAMES})


class ModuleState(states.State):
    """Variables of an object that does not exist yet.

    Example:
        >>> state = nnx.bridge.module.ModuleState({"bias": nnx.Param(0.0)})
        >>> list(state)
        ['bias']
    """


class HasSetup(Protocol):
    """Something with a method ``setup``."""

    def setup(self) -> None:
        """Makes the attributes that the other methods use."""


def is_bridge_module(x: Any) -> bool:
    """Whether it is a Module in the style of Linen."""
    return isinstance(x, Pytree) and "attr_priorities" in vars(x)


def has_setup(x: Any) -> TypeGuard[HasSetup]:
    """Whether it has a method ``setup``.

    Example:
        >>> nnx.bridge.module.has_setup(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        False
    """
    return hasattr(x, "setup")


def bind(
    module: ModuleBase, scope: Scope, state: Mapping[Any, Any], *, is_initializing: bool
) -> None:
    """Gives an unbound Module its variables and a scope, and runs its ``setup``."""
    for name, value in state.items():
        _put(module, str(name), value)
    bookkeeping.state_of(module).initializing = is_initializing
    module.scope = scope.copy()
    for name, value in bookkeeping.attribute_items(module):
        if name not in OWN:
            _adopt(module, value, state.get(name), set())
    if has_setup(module):
        with running(cast(ModuleBase, module), in_compact=False):
            module.setup()
        bookkeeping.state_of(module).is_setup = True


def _put(module: Any, name: str, value: Any) -> None:
    """Puts a variable, or variables that wait for an object, in an empty place."""
    current = vars(module).get(name)
    if not isinstance(value, Variable):
        if not (current is None or isinstance(current, Variable)):
            return
        value = ModuleState(value)
    # Past its own `__setattr__`, which would adopt it.
    Pytree.__setattr__(module, name, attributes.data(value))


def adopted(parent: ModuleBase, name: str, value: Any) -> Any:
    """Returns the value for an attribute of a bound ModuleBase, bound too.

    It gets the variables that wait under the name: those of a Module that did not
    exist yet, or of one that an earlier call made.
    """
    if isinstance(value, attributes.AttributeField):
        if value.default is attributes.MISSING:
            return value  # an error, when it is set
        mark = attributes.data if value.is_data else attributes.static
        return mark(adopted(parent, name, value.default))
    current = vars(parent).get(name)
    if current is value:
        return value
    if isinstance(value, Variable):
        # Values that `setup` assigns are initial values.
        in_setup = has_setup(parent) and not bookkeeping.state_of(parent).is_setup
        return current if in_setup and type(current) is type(value) else value
    is_for_it = isinstance(current, ModuleState) or type(current) is type(value)
    _adopt(parent, value, _tree(current) if is_for_it else None, set())
    return value


def _adopt(
    parent: ModuleBase, value: Any, new_variables: Any, visited: set[int]
) -> None:
    """Binds all Modules in a value, and gives it and them their variables."""
    state: Mapping[Any, Any] = (
        new_variables if isinstance(new_variables, Mapping) else {}
    )
    assert parent.scope is not None
    if isinstance(value, Variable):
        if isinstance(new_variables, Variable) and new_variables is not value:
            value.update_from_state(new_variables)
            MODULE_CONTEXT.calls[-1].given_variables[id(value)] = value
    elif is_bridge_module(value):
        if value.scope is None:
            is_initializing = parent.is_initializing()
            bind(value, parent.scope, state, is_initializing=is_initializing)
        else:  # it has another name too
            for name, child_state in state.items():
                _put(value, str(name), child_state)
                _adopt(parent, vars(value)[str(name)], child_state, visited)
    elif isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            _adopt(parent, item, state.get(key, state.get(str(key))), visited)
    elif isinstance(value, Pytree) and not isinstance(value, Scope):
        if id(value) not in visited:
            visited.add(id(value))
            _adopt_foreign(parent, value, state, visited)


def _adopt_foreign(
    parent: ModuleBase, node: Pytree, state: Mapping[Any, Any], visited: set[int]
) -> None:
    """Binds bridge Modules in an object of another kind; gives it its variables."""
    if parent.is_initializing():
        set_initializing(node, True)
        MODULE_CONTEXT.calls[-1].initialized.append(node)
    for name, value in bookkeeping.attribute_items(node):
        child_state = state.get(_key_of(node, name), state.get(name))
        _adopt(parent, value, child_state, visited)
    for key, child_state in state.items():
        if str(key) not in vars(node):
            setattr(node, str(key), attributes.data(_tree(child_state)))


def _key_of(node: Pytree, name: str) -> Any:
    return attributes.facts_of(type(node)).naming.key_of(name)


def _tree(x: Any) -> Any:
    """Returns the variables of an object that is or was an attribute, by name."""
    if isinstance(x, Mapping):
        return {key: _tree(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return {index: _tree(value) for index, value in enumerate(x)}
    if isinstance(x, Pytree):
        items = bookkeeping.attribute_items(x)
        return {name: _tree(value) for name, value in items if name not in OWN}
    return x


def place(child: Any, name: str, priority: AttrPriority) -> None:
    """Makes an object an attribute of the Module whose method runs."""
    context = current_context()
    assert context is not None
    parent = context.module
    if parent.scope is None:
        raise unbound_error(parent, "Submodules")
    if is_taken(parent, name):
        raise ValueError(
            f"{type(parent).__name__} has made a submodule named {name!r} already; "
            "give each a name of its own, or call the first one again."
        )
    context.names.add(name)
    if priority is not AttrPriority.DEFAULT:
        parent.set_attr_priority(name, priority)
    setattr(parent, name, child)


# Variables.


def find_variable(
    module: ModuleBase, var_type: type[Variable[Any]], name: str, unbox: bool
) -> Any:
    """Returns the Variable of a name, or None."""
    variable = vars(module).get(name)
    if name not in module.attr_priorities:
        # The name it is asked for by comes before other names that it gets.
        module.set_attr_priority(name, AttrPriority.DEFAULT)
    if variable is None:
        return None
    if type(variable) is not var_type:
        raise ValueError(
            f"{type(module).__name__}.{name} can't be a {var_type.__name__}: the "
            f"name is used for a {type(variable).__name__} already."
        )
    box_type = linen_side.meta.AxisMetadata
    if not unbox and not isinstance(variable.get_raw_value(), box_type):
        box = linen_side.to_linen_var(variable)
        if isinstance(box, box_type):
            variable = var_type(box)
            setattr(module, name, variable)
    return variable


def new_variable(
    module: ModuleBase, col: str, name: str, value: Any, unbox: bool
) -> Any:
    """Makes a Variable of a bound Module."""
    if unbox:
        variable = linen_side.to_nnx_var(col, value)
    else:
        variable = kinds.variable_type_from_name(col, allow_register=True)(value)
    setattr(module, name, variable)
    return variable


def check_shape(
    module: ModuleBase, name: str, variable: Variable[Any], make: Callable[[Any], Any]
) -> None:
    """Raises if a parameter has another shape than its initializer makes."""

    def value_of(key: Any) -> Any:
        value = make(key)
        return value.raw_value if isinstance(value, VariableMetadata) else value

    expected = _shape(jax.eval_shape(value_of, jax.random.key(0)))
    shape = _shape(variable.get_raw_value())
    if shape != expected:
        raise linen_side.linen_errors.ScopeParamShapeError(
            name, path_of(module), shape, expected
        )


def _shape(value: Any) -> Any:
    """Returns the shape of an array, boxed or not; for a tree, those of its leaves."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(value)]
    return shapes[0] if len(shapes) == 1 else shapes


def check_complete(module: ModuleBase, call: ApplyCall) -> None:
    """Raises if a Module in a bridge Module was not given all of its parameters."""
    if module.is_initializing() or may_change(module, "params"):
        return
    for node in call.nnx_modules:
        params = functional.state(node, kinds.Param, graph=True)
        for path, param in states.to_flat_state(params):
            if id(param) not in call.given_variables:
                module_path = _find(module, node) + [*path[:-1]]
                raise linen_side.linen_errors.ScopeParamNotFoundError(
                    path[-1], _joined(module_path)
                )


def may_change(module: ModuleBase, col: str) -> bool:
    """Whether the caller lets a collection change."""
    assert module.scope is not None
    return linen_side.core.scope.in_filter(module.scope.mutable, col)


def by_collection(module: ModuleBase) -> dict[str, Any]:
    """Returns the variables of a Module and of all in it, by collection."""
    return flat_states.unflatten_mapping({
        (linen_side.collection_of(x), *path): linen_side.to_linen_var(x)
        for path, x in _walk(module)
        if isinstance(x, Variable) and not isinstance(x, RngState)
    })  # fmt: skip


def path_of(module: ModuleBase) -> str:
    """Returns the path of a bound Module, for messages."""
    root = MODULE_CONTEXT.module_stack[1]
    return _joined(_find(root.module if root else module, module))


def _find(root: Any, wanted: Any) -> list[Any]:
    return next((list(path) for path, x in _walk(root) if x is wanted), [])


def _joined(path: list[Any]) -> str:
    return "/" + paths.to_string(tuple(path))


def _walk(root: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields all objects with Variables, and these, once, by their best name."""
    is_new = walks.Once()

    def below(x: Any, _: Any) -> list[tuple[Any, Any]] | None:
        is_met = isinstance(x, (Variable, Pytree, Mapping, list, tuple)) and is_new(x)
        return _children(x) if is_met else None

    return walks.walk(root, below)


def _children(x: Any) -> list[tuple[Any, Any]]:
    if isinstance(x, Mapping):
        return [*x.items()]
    if isinstance(x, (list, tuple)):
        return [*enumerate(x)]
    if not isinstance(x, Pytree) or isinstance(x, Scope):
        return []
    items = [item for item in bookkeeping.attribute_items(x) if item[0] not in OWN]
    if is_bridge_module(x):
        return sorted(items, key=lambda item: _rank(x, item[0]))
    items.sort(key=lambda item: item[0])
    return [(_key_of(x, name), value) for name, value in items]


def _rank(module: Any, name: str) -> tuple[int, bool, str]:
    """Sorts the names of a bridge Module; among equals, declared ones come first."""
    priorities = module.attr_priorities
    return priorities.get(name, AttrPriority.DEFAULT), name not in priorities, name


def unbound_error(module: ModuleBase, subject: str) -> ValueError:
    """Makes the error for a Module that is used outside of `init` and `apply`."""
    return ValueError(
        errors.message(
            f"{subject} must be initialized in `setup()` or in a method wrapped in "
            f"`@compact`, of a {type(module).__name__} that is bound.",
            way_out="Call it inside of `init` or `apply`, and make it in `setup()` or "
            "in a compact method of another bridge Module.",
        )
    )
