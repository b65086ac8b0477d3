"""Modules: Pytrees that can be configured as a whole and can record what they compute.

`Module` adds three things to `Pytree`: setting attributes on all nested Modules
(`set_attributes`, `train`, `eval`), recording values inside a call (`sow`, `perturb`:
see `capturing.py`), and being found by `iter_modules`. It holds no state itself,
so a Module that needs none of these may as well be a Pytree.

A view is a second object over the same Variables, configured differently: `view` calls
every ``set_view`` in it, `with_attributes` sets attributes by name. Its nodes and
containers are new; its Variables, arrays and static values are those of the input. So
the input never changes, and training either one trains both.
"""

from __future__ import annotations

import inspect
import itertools
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax

from graftree.annotations import Filter, Key, Path
from graftree.core import filters
from graftree.core.graph import functional, traversals
from graftree.core.modules import capturing
from graftree.core.objects import pytrees
from graftree.core.states import pure_dicts

A = TypeVar("A")
M = TypeVar("M", bound="Module")
N = TypeVar("N")


class ModuleMeta(pytrees.PytreeMeta):
    """Metaclass of Modules: the base for metaclasses of your own."""


class Module(capturing.Sower, pytrees.Pytree, metaclass=ModuleMeta):
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
        _assign(self, attributes, filters or ..., raise_if_not_found, graph)

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
        flags = {"deterministic": False, "use_running_average": False}
        self.set_attributes(**flags, **attributes, raise_if_not_found=False)

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
        flags = {"deterministic": True, "use_running_average": True}
        self.set_attributes(**flags, **attributes, raise_if_not_found=False)

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


def _assign(
    node: Any,
    attributes: Mapping[str, Any],
    only: Filter,
    raise_if_not_found: bool,
    graph: bool | None,
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


# Views.


def view(
    node: N,
    /,
    *,
    only: Filter = ...,
    raise_if_not_found: bool = True,
    graph: bool | None = None,
    **kwargs: Any,
) -> N:
    """Copies ``node`` and configures the copy through its ``set_view`` methods.

    Each ``set_view`` gets the options that its signature names; children come before
    parents.

    Args:
        node: A Module, or any node that contains Modules.
        only: A filter for the nodes to configure.
        raise_if_not_found: Whether an option that no ``set_view`` takes is an error.
        graph: Whether sharing inside ``node`` is kept (graph mode) or an error (tree
            mode); ``None`` takes the default.
        **kwargs: The options.

    Returns:
        A new node, never the input, with the Variables of the input.

    Raises:
        ValueError: If no ``set_view`` takes one of the options, or if ``node`` contains
            itself.

    Example:
        >>> model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        >>> inference = nnx.view(model, deterministic=True)
        >>> inference.deterministic, model.deterministic
        (True, False)
    """
    predicate = filters.to_predicate(only)
    parts: dict[Path, Any] = {}
    # Children before parents.
    copy = traversals.recursive_map(
        lambda path, x: parts.setdefault(path, x), node, graph=graph
    )
    accepted = {
        path: _accepted(x.set_view, kwargs)
        for path, x in parts.items()
        if _is_configurable(x) and predicate(path, x)
    }
    unused = sorted(set(kwargs).difference(*accepted.values()))
    if unused and raise_if_not_found:
        raise ValueError(
            f"Unused keys found in nnx.view: {unused}\n"
            "No set_view method takes them: see nnx.view_info(node) for the options "
            "it takes, or pass raise_if_not_found=False."
        )
    _configure(parts, accepted)
    return copy


def _configure(
    parts: Mapping[Path, Any], options: Mapping[Path, Mapping[str, Any]]
) -> None:
    """Calls ``set_view`` of parts, by path; of parts of stacked layers for each."""
    stacked: dict[Path, dict[Path, Mapping[str, Any]]] = {}
    plain = {}
    for path, path_options in options.items():
        # Where the path leads to layers that are stored as one.
        ends = [
            n
            for n, key in enumerate(path)
            if key == "layers" and isinstance(parts[path[:n]], EqualLayers)
        ]
        if ends:
            stacked.setdefault(path[: ends[0]], {})[path[ends[0] + 1 :]] = path_options
        else:
            plain[path] = path_options
    for path, inner in stacked.items():

        def configure(layer: Any, inner: Any = inner) -> None:
            _configure(dict(traversals.iter_graph(layer, graph=True)), inner)

        _call_each(parts[path], configure)
    for path, path_options in plain.items():
        parts[path].set_view(**path_options)


class EqualLayers(Module):
    """A Module that keeps equal layers as one, which has the values of all: a `Stack`.

    Attributes:
        layers: That layer; or several, if they differ by a pattern.
    """

    layers: Any

    def each_step(self, function: Callable[[Any], Any]) -> Any:
        """Calls a function with every entry of ``layers``, and keeps its changes."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


def _call_each(stack: EqualLayers, function: Callable[[Any], Any]) -> None:
    """Calls a function with the layers, including abstract ones."""
    leaves = jax.tree.leaves(pure_dicts.as_pure(functional.state(stack.layers)))
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        function(stack.layers)
        len(stack)  # raises if that made Variables
    else:
        stack.each_step(function)


def _is_configurable(value: Any) -> bool:
    # The class decides: an `Rngs` makes up any attribute on request.
    return isinstance(value, pytrees.Pytree) and hasattr(type(value), "set_view")


def _accepted(method: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {x.name: x.kind for x in inspect.signature(method).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds.values():
        return dict(options)
    return {k: v for k, v in options.items() if kinds.get(k) in _BY_KEYWORD}


_BY_KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def with_attributes(
    node: N,
    /,
    *,
    only: Filter = ...,
    raise_if_not_found: bool = True,
    graph: bool | None = None,
    **attributes: Any,
) -> N:
    """Copies ``node`` and sets attributes of the Modules in the copy.

    An attribute is set on each Module that already has it.

    Args:
        node: A Module, or any node that contains Modules.
        only: A filter for the Modules whose attributes are set.
        raise_if_not_found: Whether an attribute that no Module has is an error.
        graph: Whether sharing inside ``node`` is kept (graph mode) or an error (tree
            mode); ``None`` takes the default.
        **attributes: Names and values.

    Returns:
        A new node, never the input, with the Variables of the input.

    Raises:
        ValueError: If no Module has one of the attributes, or if ``node`` contains
            itself.

    Example:
        >>> model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        >>> inference = nnx.with_attributes(model, deterministic=True)
        >>> inference.deterministic, model.deterministic
        (True, False)
    """
    copy = traversals.recursive_map(lambda path, value: value, node, graph=graph)
    _assign(copy, attributes, only, raise_if_not_found, graph)
    return copy


def view_info(node: Any, /, *, only: Filter = ..., graph: bool | None = None) -> str:
    """Describes the options that `view` takes for ``node``.

    Args:
        node: A Module, or any node that contains Modules.
        only: A filter for the nodes to describe.
        graph: The mode; ``None`` takes the default.

    Returns:
        For each class that defines ``set_view``: its name, then the parameters with
        annotation, default and description from the docstring; ``""`` if there is no
        such class.

    Example:
        >>> print(nnx.view_info(nnx.Dropout(0.5)))
        Dropout:
          deterministic: bool | None = None
        ...
    """
    predicate = filters.to_predicate(only)
    classes = {
        type(value)
        for path, value in traversals.iter_graph(node, graph=graph)
        if _is_configurable(value) and predicate(path, value)
    }
    ordered = sorted(classes, key=lambda cls: (cls.__qualname__, cls.__module__))
    return "\n".join(line for cls in ordered for line in _describe(cls))


def _describe(cls: type) -> list[str]:
    signature = inspect.signature(cls.set_view)
    docstring = inspect.getdoc(cls.set_view)
    lines = [f"{cls.__qualname__}:"]
    if docstring is None:
        return [*lines, f"  set_view{signature}"]
    descriptions = _argument_descriptions(docstring)
    for name, parameter in signature.parameters.items():
        if name in ("self", "args", "kwargs"):
            continue
        required = parameter.default is inspect.Parameter.empty
        default = "" if required else f" = {parameter.default}"
        lines.append(f"  {name}: {parameter.annotation}{default}")
        lines += [f"    {line}".rstrip() for line in descriptions.get(name, [])]
    return lines


def _argument_descriptions(docstring: str) -> dict[str, list[str]]:
    """Takes apart the ``Args:`` section of a Google-style docstring, without indent."""
    lines = iter(docstring.splitlines())
    any(line.strip() in ("Args:", "Arguments:") for line in lines)  # up to there
    section = itertools.takewhile(lambda line: line[:1] in ("", " "), lines)
    text = textwrap.dedent("\n".join(section))
    _, *parts = re.split(r"^\*{0,2}(\w+)(?: *\([^)]*\))?:", text, flags=re.MULTILINE)
    return {
        name: [x for x in inspect.cleandoc(words).splitlines() if x.strip()]
        for name, words in zip(parts[::2], parts[1::2], strict=True)
    }


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
