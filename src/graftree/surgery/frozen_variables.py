"""Frozen Variables: parameters that training does not change.

A frozen Variable stays the same object at the same paths, with its value, sharing and
metadata. Only its class changes, to `Frozen`, which is not a Param: so gradients and
optimizers with ``wrt=nnx.Param`` leave it out, and so does everything else that selects
Params. Its former class is in its metadata, where updates by the state of another
model don't reach it.
"""

from __future__ import annotations

from typing import Any

import jax

from graftree import _jax, errors
from graftree.annotations import Filter, Path
from graftree.core import filters, paths, patterns
from graftree.core.hashable_mappings import HashableMapping
from graftree.core.rng.streams import RngState
from graftree.core.variables import metadata as variable_metadata, values, variables
from graftree.core.variables.kinds import BatchStat, Cache, Intermediate, Param
from graftree.core.variables.variables import A, Variable
from graftree.surgery import selections
from graftree.surgery.selections import ModelPart
from graftree.training.optimizers import OptState

_TYPE = variable_metadata.FROZEN_TYPE


def _leaf(raw: Any) -> Any:
    """Returns the stored value as a leaf, without the gradient from a transform."""
    # Otherwise the same object, since transforms find changes by identity.
    arrays = [raw] if values.is_array(raw) else jax.tree.leaves(raw)
    return _constant(raw) if any(map(_jax.is_differentiated, arrays)) else raw


class Frozen(Variable[A], leaf=_leaf):
    """A Variable that `freeze` took out of training.

    It is not a Param, so ``wrt=nnx.Param`` does not select it. Its value is a constant
    to differentiation, even as a leaf of a pytree, as in a plain ``jax.grad`` of a
    whole model, where the gradient is zero. (``get_raw_value()`` returns the stored
    value as it is, and so do leaves inside a further ``nnx`` transform there.) You may
    write to it, for example by loading a checkpoint. The metadata entry
    ``frozen_type`` is its former class.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> paths = nnx.surgery.freeze(model)
        >>> isinstance(model.kernel, nnx.Param), model.kernel.frozen_type.__name__
        (False, 'Param')
        >>> gradients = jax.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
        >>> float(abs(gradients.kernel[...]).max())
        0.0
    """

    def get_value(self, *, index: Any = variables.MISSING) -> Any:
        """Returns the value, without a gradient."""
        return _constant(super().get_value(index=index))

    def __getattr__(self, name: str) -> Any:
        # Attributes of the value, such as `kernel.T`, have no gradient either.
        if name == "_raw_value" or name in variables.metadata_of(self):
            return super().__getattr__(name)
        raw = self.get_raw_value()
        is_traced = isinstance(raw, _jax.Tracer) and not _jax.is_ref(raw)
        return getattr(_constant(raw), name) if is_traced else super().__getattr__(name)


def _constant(value: Any) -> Any:
    # Only traced values have a gradient.
    if values.is_array(value):
        is_traced = isinstance(value, _jax.Tracer)
        return jax.lax.stop_gradient(value) if is_traced else value
    leaves, treedef = jax.tree.flatten(value)
    if not any(isinstance(leaf, _jax.Tracer) for leaf in leaves):
        return value
    return treedef.unflatten(
        jax.lax.stop_gradient(x) if isinstance(x, _jax.Tracer) else x for x in leaves
    )


def freeze(model: Any, filter: Filter = Param, *, where: Any = ...) -> list[Path]:
    """Takes Variables out of training, in place: no gradients, no optimizer state.

    Each becomes a `Frozen` Variable, which is not a Param; it keeps its identity,
    value, paths and metadata, so checkpoints stay the same, and shared Variables stay
    shared. Make optimizers after freezing: one made before has state for the frozen
    Variables, and its updates raise.

    Statistics such as those of `BatchNorm` are not parameters. They keep changing;
    ``encoder.eval()`` holds them fixed.

    Args:
        model: A Module, or another object or container of Variables.
        filter: Which Variables, as in ``nnx.state``; a class, for example, or
            ``nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))``.
        where: The parts of the model in which they are: a pattern of paths such as
            ``"encoder.blocks[:6]"`` (see `at`), a class of modules, a function of path
            and object, or a list of these. A part includes everything in it.

    Returns:
        The paths of the Variables that are newly frozen.

    Raises:
        ValueError: If nothing is selected, or a Variable that can't be frozen: state
            that is not a parameter, weights that `SpectralNorm` or `WeightNorm`
            overwrite, and Variables of a class with its own behaviour. Then nothing is
            frozen.
        TypeError: If ``model``, ``filter`` or ``where`` have the wrong type.
        TraceContextError: If another trace owns one of the Variables.

    Example:
        >>> rngs = nnx.Rngs(0)
        >>> model = nnx.Dict(
        ...     encoder=nnx.Linear(4, 8, rngs=rngs), head=nnx.Linear(8, 2, rngs=rngs)
        ... )
        >>> nnx.surgery.freeze(model, where="encoder")
        [('encoder', 'bias'), ('encoder', 'kernel')]
        >>> list(nnx.state(model, nnx.Param))
        ['head']
    """
    selections.check_model(model, "nnx.surgery.freeze")
    predicate = filters.to_predicate(filter)
    candidates = _variables_within(model, where, "nnx.surgery.freeze")
    chosen = [
        item
        for item in candidates
        if not isinstance(item.value, Frozen) and predicate(*item)
    ]
    if not chosen:
        raise _no_match_error("freeze", filter, candidates)
    overwritten = selections.ids_overwritten(model)
    selections.check_all(
        chosen,
        lambda x: reason_against(x, id(x) in overwritten),
        "nnx.surgery.freeze: some of the selected Variables can't be frozen.",
        "Exclude them, for example with nnx.All(nnx.Param, ...) as the filter, or with "
        "`where`; or select what to train with the filter of the optimizer.",
    )
    for path, variable in chosen:
        variables.check_owned(variable, paths.dotted(path))
    for _, variable in chosen:
        take_out(variable, Frozen)
    return [path for path, _ in chosen]


def unfreeze(model: Any, filter: Filter = ..., *, where: Any = ...) -> list[Path]:
    """Gives frozen Variables their classes back, in place: the inverse of `freeze`.

    Args:
        model: A Module, or another object or container of Variables.
        filter: Which Variables, as they were before: ``nnx.LoRAParam`` selects
            frozen LoRAParams.
        where: The parts of the model in which they are, as for `freeze`.

    Returns:
        The paths of the Variables that are no longer frozen.

    Raises:
        ValueError: If nothing frozen is selected.
        TypeError: If ``model``, ``filter`` or ``where`` have the wrong type.
        TraceContextError: If another trace owns one of the Variables.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> paths = nnx.surgery.freeze(model)
        >>> nnx.surgery.unfreeze(model, where="bias")
        [('bias',)]
        >>> type(model.bias).__name__, type(model.kernel).__name__
        ('Param', 'Frozen')
    """
    selections.check_model(model, "nnx.surgery.unfreeze")
    predicate = filters.to_predicate(filter)
    candidates = _variables_within(model, where, "nnx.surgery.unfreeze")
    chosen = [
        item
        for item in candidates
        if type(item.value) is Frozen and predicate(item.path, _thawed(item.value))
    ]
    if not chosen:
        raise _no_match_error("unfreeze", filter, candidates)
    for path, variable in chosen:
        variables.check_owned(variable, paths.dotted(path))
    for _, variable in chosen:
        put_back(variable)
    return [path for path, _ in chosen]


def take_out(variable: Variable[Any], cls: type[Frozen[Any]]) -> None:
    """Gives a Variable a class that is not trained."""
    entries = {_TYPE: type(variable), **variables.metadata_of(variable)}
    _turn_into(variable, cls, entries)


def put_back(variable: Variable[Any]) -> None:
    """Gives a Variable its former class back: the inverse of `take_out`."""
    thawed = _thawed(variable)
    _turn_into(variable, type(thawed), variables.metadata_of(thawed))


def _variables_within(model: Any, selection: Any, call: str) -> list[ModelPart]:
    """Finds the Variables in the selected parts of a model."""
    items = selections.within(model, selection, call)
    return [item for item in items if isinstance(item.value, Variable)]


def _turn_into(variable: Any, cls: Any, entries: Any) -> None:
    # Changes the Variable itself instead of replacing it, so that it is changed
    # everywhere, even in tuples, in views and under other names.
    variable.__class__ = cls
    variables.replace_metadata(variable, HashableMapping(entries))


def _thawed(variable: Variable[Any]) -> Variable[Any]:
    """Makes a Variable like the one that was frozen, with the same value."""
    entries = dict(variables.metadata_of(variable))
    cls = entries.pop(_TYPE)
    return variables.rebuild(cls, variable.get_raw_value(), HashableMapping(entries))


def _no_match_error(
    function: str, filter_: Filter, candidates: list[ModelPart]
) -> ValueError:
    frozen = sum(isinstance(item.value, Frozen) for item in candidates)
    kinds = sorted(
        {type(item.value).__name__ for item in candidates} - {Frozen.__name__}
    )
    counts = f"{len(candidates)} Variables, {frozen} of them frozen"
    return ValueError(
        errors.message(
            f"nnx.surgery.{function}: the filter {patterns.describe(filter_)} matches "
            f"no Variable to {function}.",
            where=counts + (f"; the others: {', '.join(kinds)}" if kinds else ""),
            way_out="In a filter, a string is a tag; pass paths as `where`.",
        )
    )


# Variables that can't be frozen.


_NO_PARAMETERS = (BatchStat, Cache, Intermediate, OptState, RngState)


def reason_against(variable: Variable[Any], is_overwritten: bool) -> str | None:
    """Says why a Variable can't be frozen, if it can't."""
    cls = type(variable)
    if isinstance(variable, _NO_PARAMETERS):
        return f"{cls.__name__} is not a parameter"
    if is_overwritten:
        return "SpectralNorm or WeightNorm overwrites it in each call"
    if _TYPE in variables.metadata_of(variable):
        return f"its metadata has an entry {_TYPE!r}"
    if behaviour := own_behaviour(cls):
        return f"{cls.__name__} has custom behaviour: {', '.join(behaviour)}"
    return None


# Members without effect after construction, or that are in the metadata.
_HARMLESS = frozenset(
    {
        *("__module__", "__qualname__", "__doc__", "__slots__", "__annotations__"),
        *("__annotate__", "__annotate_func__", "__annotations_cache__"),
        *("__orig_bases__", "__parameters__", "__type_params__", "__classcell__"),
        *("__static_attributes__", "__firstlineno__"),
        *("__init__", "__init_subclass__", "create_value"),
        *variable_metadata.HOOKS,
    }
)


def own_behaviour(cls: type[Variable[Any]]) -> list[str]:
    """Lists the members that a class of Variables adds to those of Graftree's."""
    return sorted(
        name
        for base in cls.__mro__
        if base not in Frozen.__mro__
        for name, value in vars(base).items()
        if name not in _HARMLESS or (name == "__slots__" and value)
    )
