"""What a Module records inside a call: `sow`, `perturb`, and the buffers they fill.

For the time of a call, `capturing.capture` gives every Module below its subject a data
attribute, one Variable per recorded type, each holding a dict ``name -> value``:

    vars(module)["__captures__"] = (Intermediate({}), Perturbation({}), ...)

Being state like any other, these buffers go through lifted transforms. `sow` and
`perturb` write to the buffer of exactly their type, under the ownership rule of
Variables: a value of an inner trace that never comes back raises instead of leaking.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from graftree import config
from graftree.core.variables import kinds
from graftree.core.variables.kinds import Perturbation
from graftree.core.variables.variables import Variable

T = TypeVar("T")

# The attribute that holds the buffers.
BUFFERS = "__captures__"

Buffer = Variable[dict[str, Any]]

# Id of a captured Module -> the thread that captures it. The capture keeps it alive.
capturing_threads: dict[int, int] = {}


def tuple_init() -> tuple[()]:
    """Gives the empty tuple, to which `tuple_reduce` appends.

    Example:
        >>> nnx.module.tuple_init()
        ()
    """
    return ()


def tuple_reduce(xs: tuple[Any, ...], x: Any) -> tuple[Any, ...]:
    """Appends one more value.

    Args:
        xs: The values so far.
        x: The next value.

    Returns:
        A new tuple.

    Example:
        >>> nnx.module.tuple_reduce((1, 2), 3)
        (1, 2, 3)
    """
    return (*xs, x)


class Recorder:
    """The part of a Module that records values: `sow` and `perturb`."""

    __slots__ = ()

    def sow(
        self,
        variable_type: type[Variable[Any]] | str,
        name: str,
        value: Any,
        reduce_fn: Callable[[Any, Any], Any] = tuple_reduce,
        init_fn: Callable[[], Any] = tuple_init,
        capture_noop: bool | None = None,
    ) -> bool:
        """Records a value for whoever called this Module through `capture`.

        Args:
            variable_type: The kind of Variable to record it as, or its registered
                name.
            name: The name to record it under; it may be that of an attribute.
            value: The value, any pytree.
            reduce_fn: ``(recorded so far, value) -> recorded``; appends by default, so
                that each call adds one entry.
            init_fn: Makes the first argument of the first call of ``reduce_fn``.
            capture_noop: Whether to do nothing outside a capture, instead of storing
                the value in an attribute, which is deprecated. ``None`` takes the flag
                ``nnx_sow_capture_noop``.

        Returns:
            Whether the value was stored.

        Raises:
            ValueError: Outside a capture, if the attribute is not a Variable of exactly
                this type.
            TraceContextError: If another trace owns this Module or its buffers.

        Example:
            >>> class Doubling(nnx.Module):
            ...     def __call__(self, x):
            ...         self.sow(nnx.Intermediate, "input", x)
            ...         return 2 * x
            >>> y, seen = nnx.capture(Doubling(), nnx.Intermediate)(3)
            >>> y, seen["input"].get_value()
            (6, (3,))
        """
        variable_type = _resolve(variable_type)
        buffers = open_buffers(self)
        if buffers is not None:
            return record(buffers, variable_type, name, value, reduce_fn, init_fn)
        if _does_nothing(capture_noop):
            return False
        _sow_attribute(self, variable_type, name, value, reduce_fn, init_fn)
        return True

    def perturb(
        self,
        name: str,
        value: T,
        variable_type: type[Variable[Any]] | str = Perturbation,
        capture_noop: bool | None = None,
    ) -> T:
        """Adds a recorded zero to a value, so that its gradient can be computed.

        The gradient with respect to the recorded perturbation, fed back through
        ``capture(..., init=perturbations)``, is that of ``value``.

        Args:
            name: The name to record the perturbation under.
            value: The value, an array or a pytree of arrays.
            variable_type: The kind of Variable to record it as, or its registered
                name.
            capture_noop: As in `sow`.

        Returns:
            ``value`` plus the perturbation; ``value`` itself if none is recorded.

        Raises:
            ValueError: Outside a capture, if the attribute is not a Variable of this
                type.
            TraceContextError: If another trace owns this Module or its buffers.

        Example:
            >>> class Square(nnx.Module):
            ...     def __call__(self, x):
            ...         return self.perturb("square", x**2)
            >>> x = jnp.array(3.0)
            >>> _, zeros = nnx.capture(Square(), nnx.Perturbation)(x)
            >>> def loss(perturbations):
            ...     return 5 * nnx.capture(Square(), init=perturbations)(x)
            >>> jax.grad(loss)(zeros)["square"][...].item()
            5.0
        """
        variable_type = _resolve(variable_type)
        buffers = open_buffers(self)
        if buffers is not None:
            buffer = find_buffer(buffers, variable_type)
            if buffer is None:
                return value
            entries = buffer.get_raw_value()
            if name not in entries:
                entries = {**entries, name: _zeros_like(value)}
                buffer.set_raw_value(entries)
            return _add(entries[name], value)
        if _does_nothing(capture_noop):
            return value
        return _perturb_attribute(self, name, value, variable_type)


def _resolve(variable_type: type[Variable[Any]] | str) -> type[Variable[Any]]:
    if isinstance(variable_type, str):
        return kinds.variable_type_from_name(variable_type, allow_register=True)
    return variable_type


def open_buffers(module: Any) -> tuple[Buffer, ...] | None:
    """The buffers to record to; ``None`` outside a capture.

    A Module with buffers but without an entry in `capturing_threads` was rebuilt by a
    transform inside a capture, so only the thread that traces it knows it.
    """
    buffers = vars(module).get(BUFFERS)
    if buffers is None:
        return None
    me = threading.get_ident()
    return buffers if capturing_threads.get(id(module), me) == me else None


def find_buffer(
    buffers: tuple[Buffer, ...], variable_type: type[Variable[Any]]
) -> Buffer | None:
    """The buffer of exactly this type; it does not take in values of subtypes."""
    return next((b for b in buffers if type(b) is variable_type), None)


def record(
    buffers: tuple[Buffer, ...],
    variable_type: type[Variable[Any]],
    name: str,
    value: Any,
    reduce_fn: Callable[[Any, Any], Any] = tuple_reduce,
    init_fn: Callable[[], Any] = tuple_init,
) -> bool:
    """Adds a value to the buffer of its type; returns whether there is one."""
    buffer = find_buffer(buffers, variable_type)
    if buffer is None:
        return False
    entries = buffer.get_raw_value()
    recorded = entries[name] if name in entries else init_fn()
    # A new dict: the old one may be what an outer trace holds.
    buffer.set_raw_value({**entries, name: reduce_fn(recorded, value)})
    return True


def _does_nothing(capture_noop: bool | None) -> bool:
    return config.nnx_sow_capture_noop if capture_noop is None else capture_noop


def _sow_attribute(
    module: Any,
    variable_type: type[Variable[Any]],
    name: str,
    value: Any,
    reduce_fn: Callable[[Any, Any], Any],
    init_fn: Callable[[], Any],
) -> None:
    if not hasattr(module, name):
        _warn_outside_capture("sow")
        new = variable_type(reduce_fn(init_fn(), value), hijax=False, ref=False)
        setattr(module, name, new)
        return
    variable = getattr(module, name)
    if not isinstance(variable, Variable):
        raise ValueError(
            f"Expected {name!r} to be a Variable, got {type(variable).__name__}.\n"
            f"Use another name, or sow inside nnx.capture, where any name is allowed."
        )
    if type(variable) is not variable_type:
        raise _type_error(name, variable_type, variable)
    _warn_outside_capture("sow")
    variable.set_value(reduce_fn(variable.get_value(), value))


def _perturb_attribute(
    module: Any, name: str, value: Any, variable_type: type[Variable[Any]]
) -> Any:
    variable = getattr(module, name, None)
    if variable is not None and not isinstance(variable, variable_type):
        raise _type_error(name, variable_type, variable)
    _warn_outside_capture("perturb")
    if variable is None:
        variable = variable_type(_zeros_like(value), hijax=False, ref=False)
        setattr(module, name, variable)
    return _add(variable.get_value(), value)


def _type_error(name: str, expected: type, found: Any) -> ValueError:
    return ValueError(
        f"Expected {name!r} to be of type {expected.__name__!r}, got "
        f"{type(found).__name__!r}.\nUse another name, or the type it has."
    )


def _warn_outside_capture(method: str) -> None:
    warnings.warn(
        f"Calling Module.{method}() outside of nnx.capture() is deprecated: it stores "
        "an attribute in the Module. Call the Module through nnx.capture(module, "
        f"<Variable type>), or pass capture_noop=True to {method}().",
        DeprecationWarning,
        stacklevel=4,
    )


def _zeros_like(value: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, _plain(value))


def _add(perturbation: Any, value: Any) -> Any:
    return jax.tree.map(operator.add, perturbation, _plain(value))


def _plain(value: Any) -> Any:
    return value.get_value() if isinstance(value, Variable) else value


def make_buffer(var_type: type[Variable[Any]], entries: dict[str, Any]) -> Buffer:
    """A buffer of this type that starts with these entries."""
    # Not the constructor: neither hooks nor the `ref` default are meant for the dict.
    return var_type.from_metadata(
        entries, {"hijax": False, "ref": False, "eager_sharding": True}
    )


# Classes whose methods are not what a user means by the outputs of a method.
machinery: set[type] = set()


def records_no_outputs(cls: type[T]) -> type[T]:
    """Keeps the methods of ``cls`` and its bases out of ``capture(method_outputs=)``.

    Args:
        cls: A class, e.g. of a container; methods that subclasses define are recorded.

    Returns:
        ``cls``, so that this can be used as a decorator.
    """
    machinery.update(cls.__mro__)
    return cls
