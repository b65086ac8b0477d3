"""Brings parameters into the form of the trees in an Optax transformation.

A mask, or the labels of a partition, may be a tree that the user has made. Optax pairs
it with the parameters by JAX's rules: their containers must have the same types, and no
tree of parameters suits all masks. So when an optimizer is made, the transformation
itself tells which form it takes, by accepting it, and each update uses the same form:

    (none)     State({"layers": {0: Param}}) to start, then the same with bare arrays;
               fits all functions of the parameters, and Optax without any such tree
    variables  State({"layers": {0: Param}}) always: ``jax.tree.map`` over `nnx.state`
    object     the model itself: ``jax.tree.map`` over the model
    dicts      {"layers": {0: Param}}
    strings    {"layers": {"0": Param}}
    lists      {"layers": [Param]}

In the last three, tuples and other containers of JAX around the models stay. In all of
them a tree may end early: one value then stands for everything below it.

Only the calls of Optax see these forms: `ParameterForm.into` brings States into one,
`ParameterForm.back` turns what Optax returns into States again. So the state of an
optimizer doesn't depend on how its masks are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType
from typing import Any

import jax

from graftree.annotations import Path
from graftree.core import paths
from graftree.core.objects.pytrees import Pytree
from graftree.core.states import flat_states, pure_dicts, states
from graftree.core.states.states import State
from graftree.core.variables import variables

# A path of strings: forms differ in whether an index is a number.
Spelled = tuple[str, ...]

_MARK = "of_optimizer"


def start(tx: Any, model: Any, params: Any) -> tuple[str | None, Any]:
    """Returns the name of the form that a transformation takes, and its first state.

    Args:
        tx: The Optax transformation.
        model: The model, or what else holds the parameters.
        params: Its State of parameters; Variables hold arrays, not refs.

    Returns:
        The name, and the state with States in place of trees of parameters. Leaves
        made from Variables are Variables.

    Raises:
        Exception: What ``tx.init`` raises for the usual form, if it takes none.
    """
    try:
        # A mask of Variables would fit them now, and not the arrays of an update: with
        # metadata that no other Variable has, it fits neither.
        return None, _map_variables(_unmarked, tx.init(_map_variables(_marked, params)))
    except Exception:
        for name in _TEMPLATES if isinstance(params, State) else ():
            try:
                form = ParameterForm(name, model, params)
                return name, form.back(tx.init(form.into(params)))
            except Exception:  # the first one is raised
                continue
        raise


def _map_variables(function: Callable[[Any], Any], tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: function(leaf) if variables.is_variable(leaf) else leaf,
        tree,
        is_leaf=variables.is_variable,
    )


def _marked(variable: Any) -> Any:
    entries = variables.metadata_of(variable).with_entry(_MARK, True)
    return variables.rebuild(type(variable), variable.get_raw_value(), entries)


def _unmarked(variable: Any) -> Any:
    entries = variables.metadata_of(variable).without(_MARK)
    return variables.rebuild(type(variable), variable.get_raw_value(), entries)


class ParameterForm:
    """One of the forms, for the parameters of one model.

    Args:
        name: Key of the form in the table ``_TEMPLATES``.
        model: The model, or what else holds the parameters.
        params: Its State of parameters.
    """

    def __init__(self, name: str, model: Any, params: State) -> None:
        self._params: dict[Spelled, Any] = {}
        self._path_of: dict[
            Spelled, Path
        ] = {}  # also the paths that lead to parameters
        for path, leaf in flat_states.leaves(params.raw_mapping):
            spelled = paths.spelled(path)
            self._params[spelled] = leaf
            for end in range(len(path) + 1):
                self._path_of[spelled[:end]] = path[:end]
        template = _TEMPLATES[name](model, params)
        # A transformation may take gradients of a part: Optax's lookahead does.
        self._templates = [((), template), *_inner_children(template)]

    def into(self, tree: Any, unboxed: type = NoneType) -> Any:
        """Brings each State of parameters in a tree into the form.

        Args:
            tree: Any pytree, of arrays or Variables.
            unboxed: A class of Variables in place of which Optax sees bare arrays.

        Returns:
            A new tree. Where a parameter is a Variable there are Variables of its type
            and metadata; others have become arrays.
        """

        def convert(node: Any) -> Any:
            if isinstance(node, State):
                leaves = flat_states.leaves(node.raw_mapping)
                for start, template in self._templates:
                    items = {(*start, *paths.spelled(path)): x for path, x in leaves}
                    if self._is_covered(start, items):
                        return self._fill(start, template, items, unboxed)
            return pure_dicts.as_pure(node)

        return jax.tree.map(convert, tree, is_leaf=lambda x: _is_end(x, State))

    def _is_covered(self, start: Spelled, ends: Mapping[Spelled, Any]) -> bool:
        """Whether leaves at ``ends`` are, or stand for, all parameters in ``start``."""
        return ends.keys() <= self._path_of.keys() and all(
            any(path[:end] in ends for end in range(len(path) + 1))
            for path in self._params
            if path[: len(start)] == start
        )

    def _fill(
        self, start: Spelled, template: Any, items: Mapping[Spelled, Any], unboxed: type
    ) -> Any:
        def leaf_at(jax_path: tuple, node: Any) -> Any:
            path = (*start, *_spell(jax_path))
            if path not in items:  # not among the parameters
                return _with_value(node, _masked_node())
            leaf, value = items[path], pure_dicts.as_pure(items[path])
            # Optax puts no Variable around what it has masked out entirely.
            is_boxed = variables.is_variable(leaf) or jax.tree.leaves(value)
            if isinstance(leaf, unboxed) or not is_boxed:
                return value
            return _with_value(self._params[path], value)

        return jax.tree.map_with_path(
            leaf_at,
            template,
            is_leaf=lambda path, x: _is_end(x) or (*start, *_spell(path)) in items,
            is_leaf_takes_path=True,
        )

    def back(self, tree: Any) -> Any:
        """Turns each tree of parameters in the form into a State.

        Args:
            tree: Any pytree, e.g. what a transformation returns for arguments that
                `into` has made.

        Returns:
            A new tree; Variables stay.
        """

        def convert(node: Any) -> Any:
            items = None if _is_end(node) else self._items_of(node)
            return node if items is None else states.from_flat_state(items)

        return jax.tree.map(
            convert,
            tree,
            is_leaf=lambda x: _is_end(x) or self._items_of(x) is not None,
        )

    def _items_of(self, node: Any) -> list[tuple[Path, Any]] | None:
        """Returns paths and leaves of a node that has the form; else ``None``."""
        for start, template in self._templates:
            if type(node) is not type(template) or _top(node) != _top(template):
                continue
            pairs = jax.tree.leaves_with_path(node, is_leaf=_is_end)
            items = {(*start, *_spell(path)): leaf for path, leaf in pairs}
            # Variables that are not among the parameters are empty in all results.
            items = {
                path: leaf
                for path, leaf in items.items()
                if path in self._path_of or jax.tree.leaves(leaf)
            }
            if self._is_covered(start, items):
                path_of = self._path_of
                return [
                    (path_of[path][len(start) :], leaf) for path, leaf in items.items()
                ]
        return None


def _inner_children(template: Any) -> list[tuple[Spelled, Any]]:
    """Returns the children of a template that have children, by path."""
    children: list[tuple[Spelled, Any]]
    if isinstance(template, State):
        children = [((str(key),), child) for key, child in template.items()]
    else:
        pairs = jax.tree.leaves_with_path(template, is_leaf=lambda x: x is not template)
        children = [(_spell(path), child) for path, child in pairs]
    return [
        (path, child)
        for path, child in children
        if not _is_end(child) and not jax.tree_util.all_leaves([child])
    ]


def _is_end(node: Any, *kinds: type) -> bool:
    return isinstance(node, (variables.Variable, type(_masked_node()), *kinds))


def _masked_node() -> Any:
    """Makes what Optax writes where it masks something out: a node without leaves."""
    import optax  # takes longer than importing Graftree

    return optax.MaskedNode()


def _top(node: Any) -> Any:
    """Returns the structure of a node without that of its children."""
    return jax.tree.structure(node, is_leaf=lambda x: x is not node)


def _spell(jax_path: tuple) -> Spelled:
    return paths.spelled(paths.from_jax(jax_path))


def _with_value(leaf: Any, value: Any) -> Any:
    """Puts a value into a Variable like ``leaf``, if that is one."""
    if not variables.is_variable(leaf):
        return value
    return variables.rebuild(type(leaf), value, variables.metadata_of(leaf))


# ------------------------------------------------------------------------------ forms


def _nested(
    level: Callable[[Iterator[tuple[Any, Any]]], Any],
) -> Callable[[Any, State], Any]:
    """Makes a template of plain containers; ``level`` makes one of its items."""

    def nest(node: Any) -> Any:
        if not isinstance(node, Mapping):
            return node
        return level((key, nest(x)) for key, x in paths.sorted_items(node))

    def template(model: Any, params: State) -> Any:
        def plain_at(path: tuple, _: Any) -> Any:
            node: Any = params.raw_mapping
            for key in paths.from_jax(path):
                node = node[key] if key in node else _masked_node()
            return nest(node)

        return jax.tree.map_with_path(plain_at, model, is_leaf=_is_ours)

    return template


def _is_ours(node: Any) -> bool:
    return isinstance(node, (Pytree, variables.Variable, State))


def _list_or_dict(items: Iterable[tuple[Any, Any]]) -> Any:
    mapping = dict(items)
    return [*mapping.values()] if [*mapping] == [*range(len(mapping))] else mapping


# For each name, makes a tree of the parameters in that form.
_TEMPLATES: dict[str, Callable[[Any, State], Any]] = {
    "variables": lambda model, params: params,
    "object": lambda model, params: model,
    "dicts": _nested(dict),
    "strings": _nested(lambda items: {str(key): value for key, value in items}),
    "lists": _nested(_list_or_dict),
}
