"""Classes that record what the methods of a Module return.

``capture(method_outputs=)`` needs a call ``module.f(x)`` to record its output, on the
captured Modules only, for the time of one call only, and without any cost otherwise.
So it gives each Module another class for that time: a subclass of its own class, made
here, that overrides each method with one that also records.

The wrappers have to sit on a class, since Python looks up ``__call__`` there, and since
a class, unlike wrappers in an instance, survives the flattening of lifted transforms.
As it becomes the class of the captured objects only, the class of the user stays as it
is for everyone else, also in other threads. Such a subclass is made once for each class
and type of Variable.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from graftree.core.modules import recorders
from graftree.core.objects import pytrees
from graftree.core.variables.variables import Variable


class _OutputRecorder:
    """What all classes that record outputs have in their MRO, before the user's class.

    It is not a base of theirs: an object may change its class only to one whose first
    base is the class it has.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        # In the place of such hooks in the user's classes: they must not learn of this
        # subclass, and may want arguments.
        pytrees.Pytree.__init_subclass__.__func__(cls, **options)


class _OutputRecorderMeta(type):
    """Puts `_OutputRecorder` into the MRO."""

    def mro(cls) -> list[type]:
        rest = [base for base in super().mro()[1:] if base is not _OutputRecorder]
        return [cls, _OutputRecorder, *rest]


@functools.cache
def recording_class(cls: type, output_type: type[Variable[Any]]) -> type:
    """A subclass of ``cls`` whose methods record their outputs as ``output_type``."""
    names = _method_names(cls)
    output_types = getattr(cls, "_output_types", ())
    if not names or output_type in output_types:
        return cls
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_output_types": (*output_types, output_type),
    }
    for name in names:
        namespace[name] = _recording_method(cls, name, output_type)
    return _recording_metaclass(type(cls))(cls.__name__, (cls,), namespace)


@functools.cache
def _recording_metaclass(metaclass: type) -> type:
    if issubclass(metaclass, _OutputRecorderMeta):
        return metaclass
    return type(metaclass.__name__, (_OutputRecorderMeta, metaclass), {})


def user_class(cls: type) -> type:
    """The class that `recording_class` was called with, at first."""
    return next(base for base in cls.__mro__ if not issubclass(base, _OutputRecorder))


def _method_names(cls: type) -> list[str]:
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if base not in recorders.machinery:
            for name, attribute in vars(base).items():
                found.setdefault(name, attribute)
    return [
        name
        for name, attribute in found.items()
        if (name == "__call__" or not name.startswith("_")) and _is_method(attribute)
    ]


def _is_method(attribute: Any) -> bool:
    # Not functions only: a lifted transform may have been applied to the method.
    return (
        callable(attribute)
        and hasattr(attribute, "__get__")
        and not isinstance(attribute, (staticmethod, classmethod, type))
    )


def _recording_method(
    cls: type, name: str, output_type: type[Variable[Any]]
) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = inspect.getattr_static(cls, name).__get__(self, cls)(*args, **kwargs)
        buffers = recorders.open_buffers(self)
        if buffers is not None:
            recorders.record(buffers, output_type, name, output)
        return output

    return functools.update_wrapper(method, getattr(cls, name), updated=())
