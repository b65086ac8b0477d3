"""Errors for an optimizer, a model and gradients that do not match each other.

Optax sees trees of arrays: it knows neither which parameter a shape belongs to, nor
the arguments of the call. These functions do, and they report paths and arguments.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _python, errors
from graftree.annotations import Filter, Path
from graftree.core import paths
from graftree.core.graph import differences
from graftree.core.text import descriptions
from graftree.core.variables.variables import is_variable


def check_transformation(tx: Any) -> None:
    """Raises a TypeError if ``tx`` is not an Optax transformation."""
    if callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None)):
        return
    is_function = callable(tx)
    got = f"the function {tx.__name__}" if hasattr(tx, "__name__") else repr(tx)
    raise TypeError(
        errors.message(
            "nnx.Optimizer expects an Optax transformation as its second argument, "
            f"`tx`, got {got}.",
            way_out="Call it to make one, e.g. optax.adam(1e-3)."
            if is_function
            else "Pass e.g. optax.adam(1e-3): Optax takes the learning rate.",
        )
    )


def warn_of_nothing(params: Any, wrt: Filter) -> None:
    """Warns if there is nothing to optimize."""
    # Not an error: a program may have one optimizer for each group of parameters, and a
    # model in which one group is empty.
    if jax.tree.leaves(params):
        return
    warnings.warn(
        f"wrt={getattr(wrt, '__name__', repr(wrt))} selects nothing of the model given "
        "to nnx.Optimizer: its updates will change nothing.\n"
        "Pass a filter that matches its parameters, usually wrt=nnx.Param.",
        UserWarning,
        stacklevel=5,  # past the constructor and both functions of the metaclass
    )


def order_error(grads: Any) -> TypeError:
    """Returns the error for swapped arguments of ``update``."""
    return TypeError(
        errors.message(
            "Optimizer.update expects the model first and the gradients second, got a "
            f"State as the model and a {type(grads).__name__} as the gradients.",
            way_out="Call optimizer.update(model, grads). To update a State, pass "
            "gradients in that form: nnx.state(grads).",
        )
    )


def selected_by(wrt: Filter) -> str:
    """Says which parameters a message is about."""
    return f"selected by wrt={getattr(wrt, '__name__', repr(wrt))}"


def check_not_params(params: Any, grads: Any) -> None:
    """Raises a ValueError if parameters are passed for gradients.

    Args:
        params: A tree of Variables.
        grads: Another one.
    """
    param_ids = {id(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_variable)}
    pairs = jax.tree.leaves_with_path(grads, is_leaf=is_variable)
    wrong = [path for path, x in pairs if is_variable(x) and id(x) in param_ids]
    if wrong:
        raise ValueError(
            errors.message(
                "Optimizer.update expects gradients as its second argument, got "
                "parameters of the model itself.",
                where="\n".join(
                    differences.bounded(
                        [paths.to_string(paths.from_jax(path)) for path in wrong]
                    )
                ),
                way_out="Pass what nnx.grad(loss_fn)(model) returns.",
            )
        )


def check_same_paths(params: Any, grads: Any, node: Any, selected: str) -> None:
    """Raises a ValueError if gradients and parameters have different paths.

    Args:
        params: The values of the parameters.
        grads: Those of the gradients.
        node: The gradients as they were passed, with what was not selected.
        selected: Which parameters these are, in words; see `selected_by`.
    """
    # Comparing structures is cheap; the paths are listed only for the message.
    if jax.tree.structure(params) == jax.tree.structure(grads):
        return
    expected, actual = leaves_of(params).keys(), leaves_of(grads).keys()
    if expected == actual:
        return
    others = leaves_of(node)
    missing = [path for path in expected if path not in actual]
    unselected = {path: others[path] for path in missing if path in others}
    unselected_lines = [
        f"  not selected: {paths.to_string(path, '<root>')}, a bare "
        f"{descriptions.describe_leaf(leaf, is_plain=True)}"
        for path, leaf in unselected.items()
    ]
    lines = differences.missing_and_unexpected(
        [path for path in missing if path not in unselected],
        [path for path in actual if path not in expected],
    ) + differences.bounded(unselected_lines)
    way_out = "Differentiate the same model, with respect to the same filter."
    if unselected or not actual:
        way_out = (
            "Gradients of bare arrays match no Variable type: pass the State or "
            "Module that nnx.grad returns, or select them by path.\nTo change one of "
            "them, write into it, grads[name][...] = x, or use jax.tree.map."
        )
    raise ValueError(
        errors.message(
            "pytree structure error: the gradients differ from the parameters "
            f"{selected}.",
            where="\n".join(lines),
            way_out=way_out,
        )
    )


def leaves_of(tree: Any) -> dict[Path, Any]:
    """Returns the leaves of a tree by their paths."""
    return {paths.from_jax(path): x for path, x in jax.tree.leaves_with_path(tree)}


def check_gradients(params: Any, grads: Any, selected: str) -> None:
    """Raises a ValueError if a gradient can't be that of its parameter.

    Optax would broadcast it, or cast it.

    Args:
        params: The values of the parameters.
        grads: Those of the gradients, at the same paths.
        selected: Which parameters these are, in words; see `selected_by`.
    """
    _check_pairs(
        params,
        grads,
        _is_gradient,
        problem=f"The gradients don't fit the parameters {selected}.",
        words=("the parameter is", "its gradient"),
        describe=functools.partial(descriptions.describe_leaf, is_plain=True),
    )


def check_updates(params: Any, updates: Any) -> None:
    """Raises a ValueError if an update would change the shape of its parameter."""
    _check_pairs(
        params,
        updates,
        _keeps_shape,
        problem="The gradients don't fit the parameters: the updates computed from "
        "them have different shapes.",
        words=("the parameter has shape", "its update"),
    )


def check_shapes(averages: Any, new_values: Any) -> None:
    """Raises a ValueError if a new value has another shape than its average."""
    _check_pairs(
        averages,
        new_values,
        lambda x, y: np.shape(x) == np.shape(y),
        problem="EMA.update: the values don't fit the averages.",
        words=("the average has shape", "the new value"),
        way_out="Update the averages of a model with that model; make a new EMA if "
        "the model has changed.",
    )


def _check_pairs(
    tree: Any,
    other: Any,
    fit: Callable[[Any, Any], bool],
    *,
    problem: str,
    words: tuple[str, str],
    describe: Callable[[Any], Any] = np.shape,
    way_out: str = "Differentiate the model as it is now.",
) -> None:
    """Raises a ValueError if leaves at the same path of two trees don't fit.

    In its message, ``words`` come before the descriptions of the two leaves.
    """
    if jax.tree.structure(tree) == jax.tree.structure(other):
        # The paths are listed only for the message.
        pairs = zip(*map(jax.tree.leaves, (tree, other)), strict=True)
        if all([fit(x, y) for x, y in pairs]):
            return
    other_leaves, (one, another) = leaves_of(other), words
    wrong = [
        f"{paths.to_string(path, '<root>')}: {one} {describe(x)}, "
        f"{another} {describe(other_leaves[path])}"
        for path, x in leaves_of(tree).items()
        if path in other_leaves and not fit(x, other_leaves[path])
    ]
    if wrong:
        raise ValueError(
            errors.message(problem, where="\n".join(wrong), way_out=way_out)
        )


def _is_gradient(param: Any, grad: Any) -> bool:
    """Whether JAX could have made it; a Python number stands for any."""
    shape, other = np.shape(param), np.shape(grad)
    # With one more axis they are gradients per example, which some transformations
    # take; their results must fit.
    if shape not in (other, other[1:]):
        return False
    dtypes = [getattr(x, "dtype", np.dtype(type(x))) for x in (param, grad)]
    if dtypes[0] == dtypes[1]:
        return True
    if dtypes[1] == jax.dtypes.float0:
        return not jnp.issubdtype(dtypes[0], jnp.inexact)
    kinds = [next((k for k in _KINDS if jnp.issubdtype(x, k)), x) for x in dtypes]
    is_number = kinds[1] is jnp.integer and getattr(grad, "weak_type", True)
    return kinds[0] is kinds[1] or (is_number and kinds[0] in _KINDS[:2])


_KINDS = (jnp.floating, jnp.complexfloating, jnp.integer, jnp.bool_)


def _keeps_shape(param: Any, update: Any) -> bool:
    """Whether the sum of both has the shape of the first."""
    shape, other = np.shape(param), np.shape(update)
    if shape == other:
        return True
    try:
        return np.broadcast_shapes(shape, other) == shape
    except ValueError:
        return False


def explain_failure(
    first_state: Callable[[], Any], opt_state: Any, error: Exception
) -> None:
    """Raises a ValueError if ``tx.update`` failed on the state of another model."""
    try:
        expected = _shapes(jax.eval_shape(first_state))
    except Exception:  # There is nothing to compare with.
        return
    differing = differences.between(_shapes(opt_state), expected)
    if differing:
        raise ValueError(
            errors.message(
                "The state of the optimizer was made for other parameters than the "
                "model has now.",
                where="\n".join(
                    differences.in_words(
                        differing, "then", "for the model as it is now"
                    )
                ),
                way_out="After changing or freezing parts of a model, make a "
                "new optimizer: nnx.Optimizer(model, tx, wrt=...).\n"
                f"The update failed with: {error}",
            )
        ) from error


def note_missing_part(error: AttributeError, params: Any) -> None:
    """Notes what to do if ``tx.update`` reads an attribute that params lack."""
    if f"in {type(params).__name__}" in str(error):
        error.add_note(
            "Optax reads a part of the parameters that they don't have. Make the "
            "optimizer for all parts, e.g. for optax.lookahead\n"
            "optax.LookaheadParams(fast=model, slow=nnx.clone(model))."
        )


def explain_tree(params: Any, error: Exception, wrt: Filter) -> None:
    """Raises a ValueError if ``tx.init`` failed on a tree that doesn't fit ``params``.

    Args:
        params: The State of the parameters.
        error: What ``tx.init`` raised.
        wrt: The filter that selected them.
    """
    tree = _failing_tree(error)
    if tree is None:
        return
    expected, actual = _spelled_paths(params), _spelled_paths(tree)
    prefixes = {path[:end] for path in expected for end in range(len(path) + 1)}
    missing = [
        path
        for spelled, path in expected.items()
        if not any(spelled[:end] in actual for end in range(len(spelled) + 1))
    ]
    unexpected = [path for spelled, path in actual.items() if spelled not in prefixes]
    lines = differences.missing_and_unexpected(missing, unexpected)
    if not lines and isinstance(tree, type(params)):
        return
    raise ValueError(
        errors.message(
            "nnx.Optimizer: a tree in `tx`, such as a mask or labels, doesn't fit the "
            f"parameters {selected_by(wrt)}.",
            where="\n".join(lines) or f"its containers differ: {type(tree).__name__}",
            way_out="Give each parameter, or a mapping above it, its value in nested "
            "dicts, or in a State: nnx.map_state(lambda path, param: ..., "
            "nnx.state(model, wrt)). All trees in one `tx` need the same form.",
        )
    ) from error


def _failing_tree(error: Exception) -> Any:
    """Returns the first tree of the ``jax.tree.map`` that raised an error, if any."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    # Only for a message: JAX says which containers differ, not which paths.
    if traceback is None or traceback.tb_frame.f_code is not _TREE_MAP.__code__:
        return None
    return _python.locals_of(traceback.tb_frame).get("tree")


_TREE_MAP = inspect.unwrap(jax.tree_util.tree_map)


def _spelled_paths(tree: Any) -> dict[tuple[str, ...], Path]:
    """Returns the paths of Variables and other leaves, by their keys as strings."""
    pairs = jax.tree.leaves_with_path(tree, is_leaf=is_variable)
    tree_paths = [paths.from_jax(path) for path, _ in pairs]
    return {paths.spelled(path): path for path in tree_paths}


def _shapes(tree: Any) -> dict[Path, str]:
    """Says the shape of each leaf, by its path."""
    return {path: f"shape {np.shape(leaf)}" for path, leaf in leaves_of(tree).items()}
