"""Modules: Pytrees that can be configured as a whole and can record what they compute.

`Module` adds three things to `Pytree`: setting attributes on all nested Modules
(`set_attributes`, `train`, `eval`), recording values inside a call (`sow`, `perturb`:
see `recorders.py`), and being what `iter_modules` looks for. It holds no
state of its own, so a Module without these needs may as well be a Pytree.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from graftree.annotations import Filter, Key, Path
from graftree.core import filters
from graftree.core.graph import traversals
from graftree.core.modules import recorders
from graftree.core.objects import pytrees

A = TypeVar("A")
M = TypeVar("M", bound="Module")


class ModuleMeta(pytrees.PytreeMeta):
    """The metaclass of Modules: the base for metaclasses of your own."""


@recorders.records_no_outputs
class Module(recorders.Recorder, pytrees.Pytree, metaclass=ModuleMeta):
    """A base class for layers and models.

    Attributes are data (Variables, arrays, other Modules) or static (sizes, names,
    functions), as in any `Pytree`.

    Args of the class statement:
        pytree: Whether instances are JAX pytrees; ``False`` makes them leaves, which
            only graph mode accepts. The default is inherited.

    Example:
        >>> class Affine(nnx.Module):
        ...     def __init__(self, features):
        ...         self.features = features
        ...         self.scale = nnx.Param(jnp.ones(features))
        ...
        ...     def __call__(self, x):
        ...         return x * self.scale
        >>> Affine(2)(jnp.array([1.0, 2.0]))
        Array([1., 2.], dtype=float32)
    """

    def set_attributes(
        self,
        *filters: Filter,
        raise_if_not_found: bool = True,
        graph: bool | None = None,
        **attributes: Any,
    ) -> None:
        """Sets attributes, in place, on all nested Modules that already have them.

        Args:
            *filters: Set them only on Modules that match one of these; without
                filters, on all.
            raise_if_not_found: Whether an attribute that no Module has is an error.
            graph: Whether shared references are allowed (graph mode) or an error (tree
                mode); ``None`` takes the default.
            **attributes: Names and values.

        Raises:
            ValueError: If no Module has one of the attributes; then nothing is set.

        Example:
            >>> block = nnx.List([nnx.Dropout(0.1), nnx.Dropout(0.2)])
            >>> block.set_attributes(deterministic=True)
            >>> block[1].deterministic
            True
        """
        assign_attributes(
            self,
            attributes,
            only=filters or ...,
            raise_if_not_found=raise_if_not_found,
            graph=graph,
        )

    def train(self, **attributes: Any) -> None:
        """Switches to training: dropout is on, normalization uses the batch.

        Sets ``deterministic=False`` and ``use_running_average=False`` on all nested
        Modules that have these attributes.

        Args:
            **attributes: Further attributes to set.

        Raises:
            TypeError: If one of the two attributes is given again.

        Example:
            >>> dropout = nnx.Dropout(0.5, deterministic=True)
            >>> dropout.train()
            >>> dropout.deterministic
            False
        """
        self.set_attributes(
            deterministic=False,
            use_running_average=False,
            **attributes,
            raise_if_not_found=False,
        )

    def eval(self, **attributes: Any) -> None:
        """Switches to evaluation: dropout is off, normalization uses its averages.

        Sets ``deterministic=True`` and ``use_running_average=True`` on all nested
        Modules that have these attributes.

        Args:
            **attributes: Further attributes to set.

        Raises:
            TypeError: If one of the two attributes is given again.

        Example:
            >>> dropout = nnx.Dropout(0.5)
            >>> dropout.eval()
            >>> dropout.deterministic
            True
        """
        self.set_attributes(
            deterministic=True,
            use_running_average=True,
            **attributes,
            raise_if_not_found=False,
        )

    def iter_modules(self) -> Iterator[tuple[Path, Module]]:
        """Yields all nested Modules (deprecated: use ``nnx.iter_modules(module)``).

        Returns:
            The ``(path, module)`` pairs, children before parents, this Module last.
        """
        _warn_method("iter_modules")
        yield from iter_modules(self)

    def iter_children(self) -> Iterator[tuple[Key, Any]]:
        """Yields the direct children (deprecated: use ``nnx.iter_children(module)``).

        Returns:
            The ``(key, child)`` pairs of the graph nodes and Variables among them.
        """
        _warn_method("iter_children")
        yield from traversals.iter_children(self)


def iter_modules(
    module: Any, /, *, graph: bool | None = None
) -> Iterator[tuple[Path, Any]]:
    """Lists the nested Modules, children before parents.

    Args:
        module: A Module or any node that contains Modules.
        graph: The mode; ``None`` takes the default.

    Yields:
        Pairs of a path and a Module; the root comes last, with ``()``.

    Raises:
        ValueError: In tree mode, for shared references and cycles.

    Example:
        >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> [path for path, _ in nnx.iter_modules(model)]
        [('layers', 0), ('layers',), ()]
    """
    for path, value in traversals.iter_nodes(module, graph=graph):
        if isinstance(value, Module):
            yield path, value


def _warn_method(name: str) -> None:
    warnings.warn(
        f"The method Module.{name}() is deprecated: use the function "
        f"nnx.{name}(module).",
        DeprecationWarning,
        stacklevel=3,
    )


def assign_attributes(
    node: Any,
    attributes: Mapping[str, Any],
    *,
    only: Filter = ...,
    raise_if_not_found: bool = True,
    graph: bool | None = None,
) -> None:
    """Sets attributes, in place, on the Modules in ``node`` that already have them."""
    predicate = filters.to_predicate(only)
    targets = [
        (module, name)
        for path, module in iter_modules(node, graph=graph)
        if predicate(path, module)
        for name in attributes
        if hasattr(module, name)
    ]
    missing = sorted(attributes.keys() - {name for _, name in targets})
    if missing and raise_if_not_found:
        raise ValueError(
            "Could not find at least one instance of the following attributes: "
            f"{missing}\nNo Module among those selected has them; correct the names or "
            "pass raise_if_not_found=False."
        )
    for module, name in targets:
        setattr(module, name, attributes[name])


def first_from(*args: A | None, error_msg: str) -> A:
    """Returns the first argument that is not None.

    Args:
        *args: Candidates, the most specific first.
        error_msg: The message if all are None.

    Returns:
        That argument.

    Raises:
        ValueError: If all are None.

    Example:
        >>> from graftree.core.modules import modules
        >>> modules.first_from(None, False, True, error_msg="No mode was given.")
        False
    """
    for arg in args:
        if arg is not None:
            return arg
    raise ValueError(error_msg)
