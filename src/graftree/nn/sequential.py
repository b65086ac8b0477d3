"""Sequential: layers applied one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from inspect import Parameter
from typing import Any

from graftree.core.modules import containers
from graftree.core.modules.modules import Module


class Sequential(Module, Iterable[Callable[..., Any]]):
    """Applies layers one after the other.

    A tuple that a layer returns becomes the positional arguments of the next one, a
    dict its keyword arguments, anything else its only argument. Each layer also gets
    those keyword arguments of the call that its signature names; so ``rngs=`` and
    ``deterministic=`` reach the layers that take them.

    Args:
        *fns: The layers: Modules or functions.

    Attributes:
        layers: The layers, as a `List`.

    Raises:
        ValueError: If Modules are passed in a list or tuple, not one by one.

    Example:
        >>> model = nnx.Sequential(lambda x: x + 1, lambda x, *, scale: x * scale)
        >>> model(2, scale=10)
        30
    """

    def __init__(self, *fns: Callable[..., Any]) -> None:
        try:
            self.layers = containers.List(fns)
        except ValueError as error:
            raise ValueError(
                "A Sequential takes its layers as separate arguments, not in a list: "
                f"nnx.Sequential(*layers).\n{error}"
            ) from None

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(self.layers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the layers.

        Args:
            *args: The positional arguments of the first layer.
            **kwargs: Offered to every layer.

        Returns:
            The output of the last layer. Without layers: the positional argument, or
            the tuple of several, or else the dict of keyword arguments, or None.

        Raises:
            TypeError: If a layer can't be called, or if it takes a keyword argument
                that the previous layer also supplied.

        Example:
            >>> nnx.Sequential(lambda x: (x, 2), lambda x, y: x - y)(5)
            3
        """
        if not self.layers:
            if args:
                return args[0] if len(args) == 1 else args
            return kwargs or None
        output: Any = args
        for i, layer in enumerate(self.layers):
            if not callable(layer):
                raise TypeError(
                    f"Sequence[{i}] is not callable: {layer}\nThe layers of a "
                    "Sequential are functions and Modules, each a separate argument."
                )
            positional, named = _as_arguments(output)
            offered = _accepted(layer, len(positional), kwargs) if kwargs else {}
            if named.keys() & offered.keys():
                raise TypeError(
                    "Got multiple values for arguments "
                    f"{sorted(named.keys() & offered.keys())} in Sequential[{i}]: from "
                    "the output of the previous layer and from the call."
                )
            output = layer(*positional, **named, **offered)
        return output


def _as_arguments(output: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(output, tuple):
        return output, {}
    return ((), output) if isinstance(output, dict) else ((output,), {})


def _accepted(
    layer: Callable[..., Any], num_positional: int, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Selects the ``kwargs`` that a layer takes after its positional arguments."""
    try:
        parameters = list(inspect.signature(layer).parameters.values())
    except (ValueError, TypeError):
        # Some built-in functions have no signature.
        return {}
    by_position = [p for p in parameters if p.kind in _BY_POSITION]
    filled = {parameter.name for parameter in by_position[:num_positional]}
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
        return {name: value for name, value in kwargs.items() if name not in filled}
    free = {p.name for p in parameters if p.kind in _BY_KEYWORD} - filled
    return {name: value for name, value in kwargs.items() if name in free}


_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def has_keyword_arg(func: Callable[..., Any], name: str) -> bool:
    """Returns whether a function takes an argument of this name by keyword.

    Args:
        func: A function with a signature.
        name: The name of the argument.

    Returns:
        True if it has one that is keyword-only, or positional or keyword.

    Raises:
        ValueError: If ``func`` is a built-in function without a signature.

    Example:
        >>> nnx.helpers.has_keyword_arg(lambda x, *, key: x, "key")
        True
    """
    parameter = inspect.signature(func).parameters.get(name)
    return parameter is not None and parameter.kind in _BY_KEYWORD
