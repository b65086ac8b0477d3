"""Which bridge Module runs now, and what it runs with.

While a bridge Module is bound, it has a `Scope`. While one of its methods runs, it is
on the stack of the thread, and Modules made by the method belong to it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from graftree.core import stamps
from graftree.core.objects import bookkeeping, pytrees
from graftree.core.rng.streams import Rngs

if TYPE_CHECKING:
    from graftree.interop.bridge.modules import Module


class AttrPriority(enum.IntEnum):
    """Which name of a shared object is its path: the one with the smallest priority.

    Among equal priorities it is the first in the alphabet.

    Example:
        >>> sorted(nnx.bridge.AttrPriority)[0]
        <AttrPriority.HIGH: 0>
    """

    HIGH = 0
    INIT_PARENT = 20  # a name by which a Module was made inside of its parent
    DEFAULT = 50
    LOW = 100


class Scope(pytrees.Pytree):
    """What a bound bridge Module runs with.

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
        """A new scope of the same streams."""
        return Scope(self.rngs, self.mutable)


@dataclasses.dataclass
class ModuleStackEntry:
    """A bridge Module whose method runs.

    Attributes:
        module: The Module.
        in_compact: Whether the method is `compact`, so that Modules made in it get a
            name by themselves.
        type_counter: How many got one so far, by class.
        names: The names that were given so far.
    """

    module: Module
    in_compact: bool
    type_counter: collections.defaultdict[type, int] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(int)
    )
    names: set[str] = dataclasses.field(default_factory=set, init=False, repr=False)


@dataclasses.dataclass
class Call:
    """What happens in one `apply`.

    Attributes:
        made: The Modules of this package that `nnx_in_bridge_mdl` made.
        given: By id, the Variables in them whose values were given.
        initialized: The objects that initialize themselves during the call.
    """

    made: list[Any] = dataclasses.field(default_factory=list)
    given: dict[int, Any] = dataclasses.field(default_factory=dict)
    initialized: list[pytrees.Pytree] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class ModuleContext(threading.local):
    """The bridge Modules whose methods run in this thread, the innermost last."""

    module_stack: list[ModuleStackEntry | None] = dataclasses.field(
        default_factory=lambda: [None]
    )
    calls: list[Call] = dataclasses.field(default_factory=list, init=False, repr=False)


MODULE_CONTEXT = ModuleContext()


@contextlib.contextmanager
def running(module: Module, *, in_compact: bool) -> Iterator[ModuleStackEntry]:
    """The context in which a method of ``module`` runs."""
    entry = ModuleStackEntry(module, in_compact)
    MODULE_CONTEXT.module_stack.append(entry)
    try:
        yield entry
    finally:
        MODULE_CONTEXT.module_stack.pop()


@contextlib.contextmanager
def applying() -> Iterator[Call]:
    """The context of one `apply`."""
    call = Call()
    MODULE_CONTEXT.calls.append(call)
    try:
        yield call
    finally:
        MODULE_CONTEXT.calls.pop()
        for node in call.initialized:
            set_initializing(node, False)


def set_initializing(node: pytrees.Pytree, value: bool) -> None:
    """Says whether an object makes its variables when it is called."""
    state = bookkeeping.state_of(node)
    state.initializing = value
    stamps.touch(state)


def current_context() -> ModuleStackEntry | None:
    """Gives the entry of the bridge Module whose method runs now; None outside.

    Example:
        >>> print(nnx.bridge.current_context())
        None
    """
    return MODULE_CONTEXT.module_stack[-1]


def current_module() -> Module | None:
    """Gives the bridge Module whose method runs now; None outside.

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
    """The name for the next object of a class in a compact method; None elsewhere."""
    context = current_context()
    if context is None or not context.in_compact:
        return None
    number = context.type_counter[cls]
    context.type_counter[cls] += 1
    return f"{cls.__name__}_{number}"


def is_taken(module: Module, name: str) -> bool:
    """Whether a method that still runs has given this name in the Module."""
    return any(
        entry is not None and entry.module is module and name in entry.names
        for entry in MODULE_CONTEXT.module_stack
    )
