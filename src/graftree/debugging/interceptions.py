"""Calls of methods: named by path, as those of ``__call__`` are, seen and replaced."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from graftree.annotations import Filter, Path
from graftree.core import filters
from graftree.core.objects import methods, running
from graftree.core.objects.attributes import DataObject
from graftree.core.objects.running import Frame
from graftree.core.rng.streams import Rngs, RngStream

F = TypeVar("F", bound=Callable[..., Any])


def named(method: F) -> F:
    """Names what a method computes after the path of its object and itself.

    A call ``model(x)`` is known by the path of the object: in the names of operations
    and so in profiles, to `intercept`, and in the policies of `nnx.remat`. With this
    decorator so are the calls of another method, whose name then ends the path, and
    what they call has its whole path, too.

    Args:
        method: A function in the body of a class. It goes below decorators that give
            something else than a function, such as ``nnx.jit`` or ``property``.

    Returns:
        What stands for the function in the class, and has all of its attributes.

    Raises:
        TypeError: If it is no plain function, or a generator or coroutine function.

    Example:
        >>> class Coder(nnx.Module):
        ...     @nnx.debugging.named
        ...     def encode(self, x):
        ...         return jnp.sin(x)
        >>> program = jax.jit(lambda x: Coder().encode(x)).lower(1.0)
        >>> "Coder/encode/sin" in program.compile().as_text()
        True
    """
    return methods.named(method)


@contextlib.contextmanager
def intercept(
    model: Any,
    filter: Filter,
    f: Callable[[Path, Any, tuple[Any, ...], Any], Any],
) -> Iterator[None]:
    """A context in which a function sees what the modules of a model return.

    It is called after each call of a module, or of another public method on an object,
    whose name then ends the path. Under ``nnx.jit`` and other transforms it is called
    while they are traced, with traced values: functions compiled before are traced anew
    in the context, and those traced in it are not used outside. Such values must not be
    kept; ``jax.debug.callback`` brings them out.

    Not seen are copies of the model that plain JAX or `merge` make, methods bound
    before the context, and calls that return before they run, as of coroutines.

    Args:
        model: A Module, or another Pytree that holds modules.
        filter: Which modules, by path and object, such as ``nnx.Linear`` or ``...``.
        f: Called as ``f(path, module, args, output)``: the keys from ``model`` to the
            module, the module, its positional arguments (keywords that have a position
            among them) and what it returned. What it returns takes the place of the
            output, unless that is ``None``.

    Raises:
        TypeError: If ``model`` is no Pytree, or the filter is none.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
        >>> means = {}
        >>> def note(path, module, args, output):
        ...     means[path] = output.mean()
        >>> with nnx.debugging.intercept(model, nnx.Linear, note):
        ...     y = model(jnp.ones((1, 2)))
        >>> list(means)
        [('layers', 0)]
    """
    if not isinstance(model, DataObject):
        raise TypeError(
            f"intercept expects a Module or another Pytree, got {type(model).__name__}."
        )
    is_wanted = filters.to_predicate(filter)

    def observer(frame: Frame, call: Callable[[], Any]) -> Any:
        output = call()
        if isinstance(frame.module, (Rngs, RngStream)):
            return output
        steps = running.steps_below(model, frame.steps)
        if steps is None:
            return output
        path = tuple([step.key for step in steps])
        if not is_wanted(path, frame.module):
            return output
        if frame.method != "__call__":
            path = (*path, frame.method)
        replaced = f(path, frame.module, _positional(frame), output)
        return output if replaced is None else replaced

    with methods.observed(observer, model, shows_methods=True):
        yield


def _positional(frame: Frame) -> tuple[Any, ...]:
    if not frame.kwargs:
        return frame.args
    method = getattr(frame.module, frame.method)
    return inspect.signature(method).bind(*frame.args, **frame.kwargs).args
