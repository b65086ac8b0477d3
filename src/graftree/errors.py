"""Exceptions of the package, and the one place where messages get their form.

Also what isolates observers: their exceptions must not reach the program.

    Exception
    ├── GraftreeError
    │   ├── TraceContextError        an object of another trace would be changed
    │   ├── ImmutableVariableError   a Variable made read-only would be changed
    │   ├── StateMismatchError       a state does not have the leaves of an object
    │   ├── CheckpointError          a checkpoint can't be written or read
    │   ├── WeightsError             a file of weights can't be written or read
    │   ├── ProcessError             another process of the program can't go on
    │   └── StaticArgumentError      a static argument is not a constant
    └── UserWarning
        ├── LostUpdateWarning        a change that doesn't reach the caller
        ├── OrderWarning             a Dict in another order than outside of a trace
        ├── ReplacedVariableWarning  an array assigned where a Variable was
        ├── ConstantStateWarning     weights that transforms take for constants
        ├── OneAxisWarning           an image given to a convolution over one axis
        └── UnknownLayerWarning      layers that a policy of precision doesn't know

Misuse of an argument raises the built-in type that fits (``ValueError``,
``TypeError``, ``AttributeError``); the classes here are for errors that only this
library can detect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any


class GraftreeError(Exception):
    """Base class of the errors that only this library raises.

    Example:
        >>> issubclass(nnx.errors.TraceContextError, nnx.errors.GraftreeError)
        True
    """


# The name under which existing programs catch it.
FlaxError = GraftreeError


class TraceContextError(GraftreeError):
    """A trace was about to change an object that it does not own.

    Raised before anything is written. Storing a tracer in an object that outlives
    the trace would leak it; pass the object as an argument of the transform instead.

    Example:
        >>> count = nnx.Variable(jnp.array(0))
        >>> @jax.jit
        ... def increment():
        ...     count[...] += 1
        >>> try:
        ...     increment()
        ... except nnx.errors.TraceContextError as error:
        ...     print(str(error).splitlines()[0])
        Cannot mutate Variable from a different trace level.
    """


class ImmutableVariableError(GraftreeError):
    """A read-only Variable was about to be written.

    Example:
        >>> issubclass(nnx.errors.ImmutableVariableError, nnx.errors.GraftreeError)
        True
    """


class StateMismatchError(GraftreeError, ValueError):
    """A state does not have the leaves of the object that it should fill.

    Raised before anything is written.

    Attributes:
        missing: The paths that the object has and the state lacks.
        unexpected: The paths that the state has and the object lacks.
        misfits: The leaves that differ in shape or dtype, each with its ``path``, what
            differs (``what``), what the object has (``expected``) and what the state
            has (``given``).

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> try:
        ...     nnx.update(model, {"kernel": jnp.ones((4, 3))}, strict=True)
        ... except nnx.errors.StateMismatchError as error:
        ...     print(error.missing, error.misfits[0].given)
        (('bias',),) float32[4,3]
    """

    def __init__(
        self,
        text: str,
        missing: Sequence[tuple[Any, ...]] = (),
        unexpected: Sequence[tuple[Any, ...]] = (),
        misfits: Sequence[Any] = (),
    ) -> None:
        super().__init__(text)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.misfits = tuple(misfits)


class StaticArgumentError(GraftreeError, TypeError, ValueError):
    """A static argument of a transform contains data, or is not hashable.

    Data in it, such as a Module, would be a constant of the compiled function.

    Example:
        >>> forward = nnx.jit(lambda model, x: model(x), static_argnums=0)
        >>> try:
        ...     forward(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 2)))
        ... except nnx.errors.StaticArgumentError as error:
        ...     print(str(error).splitlines()[1].strip())
        argument 0: Linear
    """


class CheckpointError(GraftreeError, OSError, ValueError):
    """A checkpoint can't be written or read.

    It does not exist, is incomplete, is something else, or the disk refuses. If the
    operating system refused, ``errno`` has the reason.

    Example:
        >>> try:
        ...     nnx.checkpoints.restore("/no/such/folder", nnx.Rngs(0))
        ... except nnx.errors.CheckpointError as error:
        ...     print(error)
        There is no checkpoint at /no/such/folder: the path does not exist.
        Its parent is not a folder: /no/such.
    """


class WeightsError(GraftreeError, OSError, ValueError):
    """A file of weights can't be written or read.

    It is damaged or claims the impossible; or the disk refuses, and ``errno`` says why.

    Example:
        >>> issubclass(nnx.errors.WeightsError, nnx.errors.GraftreeError)
        True
    """


class ProcessError(GraftreeError, RuntimeError):
    """Processes of one program can't go on together.

    One of them has ended, makes another call, or does not come. If one of them fails in
    a call, the others raise an error of the same type, and this one where they can't.

    Example:
        >>> issubclass(nnx.errors.ProcessError, nnx.errors.GraftreeError)
        True
    """


class LostUpdateWarning(UserWarning):
    """A change made in a transform does not reach the caller.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", nnx.errors.LostUpdateWarning)
        >>> @nnx.jit(graph=False)
        ... def rename(model):
        ...     model.name = "new"
        >>> try:
        ...     rename(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        ... except nnx.errors.LostUpdateWarning as warning:
        ...     print(str(warning).splitlines()[1])
          name: nothing before, 'new' now
    """


class OrderWarning(UserWarning):
    """A function iterates over an `nnx.Dict` in another order than outside a trace.

    Example:
        >>> issubclass(nnx.errors.OrderWarning, UserWarning)
        True
    """


class ReplacedVariableWarning(UserWarning):
    """An array was assigned to an attribute that held a Variable.

    Optimizers, filters and checkpoints find parameters by the type of their Variable,
    so that the array is no longer one. It appears once for each line.

    Example:
        >>> import warnings
        >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     layer.kernel[...] = jnp.ones((2, 3))
        ...     layer.bias = jnp.ones(3)
        >>> [str(x.message).splitlines()[0] for x in caught]
        ['Linear.bias was a Param and is now an array.']
    """


class ConstantStateWarning(UserWarning):
    """An attribute hides an object, which transforms take for a constant.

    It is a method of another object, or a partial, that holds Variables.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", nnx.errors.ConstantStateWarning)
        >>> class Net(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.apply = nnx.Linear(2, 3, rngs=rngs).__call__
        >>> try:
        ...     Net(nnx.Rngs(0))
        ... except nnx.errors.ConstantStateWarning as warning:
        ...     print(str(warning).splitlines()[1])
          Net.apply: method
    """


class OneAxisWarning(UserWarning):
    """A convolution over one axis got something like an image.

    In PyTorch and Keras, ``kernel_size=3`` means all axes of an image. Here it means
    one axis, and the others are batch axes. The warning appears if the layer was made
    with an int and its inputs have at least four axes, once for each line that calls
    it.

    Example:
        >>> import warnings
        >>> layer = nnx.Conv(1, 8, 3, rngs=nnx.Rngs(0))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     y = layer(jnp.ones((2, 28, 28, 1)))
        >>> print(str(caught[0].message).splitlines()[2])
        To convolve all axes of an image, write kernel_size=(3, 3).
    """


class UnknownLayerWarning(UserWarning):
    """A model has Params in containers that a precision policy can't set.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", nnx.errors.UnknownLayerWarning)
        >>> class Scale(nnx.Module):
        ...     def __init__(self):
        ...         self.factors = nnx.List([nnx.Param(jnp.ones(2))])
        >>> try:
        ...     nnx.precision.set_policy(Scale(), "params=f32, compute=bf16")
        ... except nnx.errors.UnknownLayerWarning as warning:
        ...     print(str(warning).splitlines()[1])
          <root>  Scale  factors[0] float32[2]
    """


def message(problem: str, *, where: str = "", way_out: str = "") -> str:
    """Joins the parts of an error message: what is wrong, where, and the way out.

    Args:
        problem: One sentence: the call and what is wrong with it.
        where: Lines that give paths, types, shapes or values; may be empty.
        way_out: The code to write instead; may be empty.

    Returns:
        The parts, each on its own lines, ``where`` indented by two spaces.

    Example:
        >>> print(nnx.errors.message("Wrong.", where="args[0]", way_out="Fix it."))
        Wrong.
          args[0]
        Fix it.
    """
    lines = [problem]
    lines += ["  " + line for line in where.splitlines()]
    lines += way_out.splitlines()
    return "\n".join(lines)


def fenced(observe: Callable[..., Any], *args: Any) -> Any:
    """Returns what an observer of the program does; if it fails, ``None``.

    The failure is logged once, and the program goes on. A warning that the user has
    made an error is raised.
    """
    try:
        return observe(*args)
    except Warning:
        raise
    except Exception as error:
        name = getattr(observe, "__qualname__", type(observe).__name__)
        if (name, type(error)) not in _logged:
            _logged.add((name, type(error)))
            logging.getLogger("graftree").warning(
                "%s, which only watches the program, raised an error. The program goes "
                "on without it. Please report this.",
                name,
                exc_info=True,
            )
        return None


_logged = set[tuple[str, type]]()
