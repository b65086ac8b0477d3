"""Filling an object with a state from elsewhere: all of it, or an error.

`load_state` compares first (`core/graph/matching.py`), then makes the arrays as the
object has them (dtype, sharding, NumPy or JAX), and writes last, with `nnx.update`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax
from graftree.annotations import Path
from graftree.core import paths, patterns
from graftree.core.graph import flattening, matching, updates
from graftree.core.graph.matching import Fit, Misfit, Pair
from graftree.core.text import descriptions
from graftree.core.variables import partitioning, variables
from graftree.core.variables.variables import Variable


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Result of `load_state`.

    Attributes:
        loaded: How many leaves of the object were written.
        kept: The paths of those that kept their values.
        dropped: The paths in the state that were not used.
        cast: The paths of those whose dtype became that of the object.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> state = {"kernel": jnp.ones((2, 3))}
        >>> nnx.checkpoints.load_state(model, state, missing="bias")
        Loaded(loaded=1, kept=(('bias',),), dropped=(), cast=())
    """

    loaded: int
    kept: tuple[Path, ...]
    dropped: tuple[Path, ...]
    cast: tuple[Path, ...]


def load_state(
    obj: Any,
    state: Any,
    *,
    missing: Any = None,
    unexpected: Any = None,
    cast: bool = False,
) -> Loaded:
    """Fills an object with a state, in place: all of it, or nothing and an error.

    The state must hold every leaf of the object, with its shape and dtype, and nothing
    else; the options allow differences. Only values are taken: Variables keep their
    identity, type and metadata. Each array gets the sharding of the value that it
    replaces, and is NumPy's where that is. Python scalars become arrays where the
    object has arrays. A JAX array that is already in place is not copied.

    Args:
        obj: A Module, an optimizer, a container of them or any other object; concrete,
            or abstract as made by `nnx.eval_shape` and `nnx.get_abstract_model`.
        state: A State, nested dicts as made by `nnx.to_pure_dict` or restored by Orbax
            without a target (with a level ``value`` and strings for integers), a
            FlatState, or an object like ``obj``.
        missing: Which leaves of ``obj`` may be missing in the state; they keep their
            values. A pattern of paths such as ``"head.**"``, a class such as
            `nnx.LoRAParam`, a function of path and leaf, ``...`` for all, or a list of
            these. ``None`` for none.
        unexpected: Which leaves of the state may be left out because ``obj`` lacks
            them; in the same forms. Spell paths as ``obj`` would: without the level
            ``value``, and with integers.
        cast: Whether dtypes may differ: a floating dtype becomes the one that ``obj``
            has, and so do complex and integer ones. Precision may be lost; a number
            out of the range of the new dtype is an error. Kinds never mix: no integers
            for floats.

    Returns:
        The leaves kept, dropped and cast. Shapes are never adapted; a leaf that differs
        is kept and dropped if both ``missing`` and ``unexpected`` select it.

    Raises:
        StateMismatchError: If anything differs that the options don't permit. It lists
            all differences by path, and nothing has been written. Also if a leaf that
            may be missing is abstract: it has no value to keep.
        TypeError: If ``state`` has none of these forms.
        ValueError: If ``obj`` is abstract and its shardings belong to no mesh in force.

    Example:
        >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        >>> state = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3), "mask": 1.0}
        >>> nnx.checkpoints.load_state(model, state, unexpected="mask").dropped
        (('mask',),)
        >>> model.bias[...]
        Array([1., 1., 1.], dtype=float32)
    """
    if not isinstance(obj, Variable):
        updates.check_arguments(obj, [state], "nnx.checkpoints.load_state")
    choice = Choice(missing, unexpected, cast)
    fit = matching.compare(obj, state)
    for pair in fit.pairs:
        choice.decide(pair)
    for path, leaf in fit.unexpected:
        choice.drop(path, leaf)
    choice.check(
        "nnx.checkpoints.load_state: the state does not fit the "
        f"{type(obj).__name__}. Nothing has changed."
    )
    new = [
        pair.entry._replace(value=_value_for(pair))
        for pair in choice.accepted
        if pair.entry is not None
    ]
    updates.write(new)
    return Loaded(
        len(new), tuple(choice.kept), tuple(choice.dropped), tuple(choice.cast)
    )


class Choice:
    """Decides what to do with each leaf; ``wrong`` and ``extra`` are not permitted.

    Args:
        missing: As for `load_state`, like the next two.
        unexpected: Which leaves of the state may be left out.
        cast: Whether dtypes may differ.
        has_values: Whether the state has values; if not, they are read later, and it
            has a shape and a dtype for each.
    """

    def __init__(
        self,
        missing: Any = None,
        unexpected: Any = None,
        cast: bool = False,
        *,
        has_values: bool = True,
    ) -> None:
        self.may_miss, self.may_drop = (
            patterns.to_predicate([] if selection is None else selection)
            for selection in (missing, unexpected)
        )
        self.may_cast = cast
        self.has_values = has_values
        self.accepted: list[Pair] = []
        self.kept: list[Path] = []
        self.dropped: list[Path] = []
        self.cast: list[Path] = []
        self.wrong: list[Pair] = []
        self.extra: list[tuple[Path, Any]] = []

    def decide(self, pair: Pair) -> bool:
        """Takes a leaf from the state, or keeps the present one, if that is allowed.

        Returns:
            Whether it is taken.
        """
        num_accepted = len(self.accepted)
        path, leaf = pair.path, pair.leaf
        if not pair.differences:
            if pair.has_value:
                self._take(pair)
        elif not pair.has_value and self.may_miss(path, leaf):
            self._keep(pair)
        elif self.may_cast and _is_castable(pair):
            self.cast.append(path)
            self._take(pair)
        elif self.may_miss(path, leaf) and self.may_drop(path, pair.value):
            self._keep(pair)
            self.dropped.append(path)
        else:
            self.wrong.append(pair)
        return len(self.accepted) > num_accepted

    def drop(self, path: Path, leaf: Any) -> None:
        """Leaves out a leaf of the state, if that is allowed."""
        if self.may_drop(path, leaf):
            self.dropped.append(path)
        else:
            self.extra.append((path, leaf))

    def _take(self, pair: Pair) -> None:
        source = pair.value if self.has_values else None
        self._accept(pair, source, self.accepted, pair)

    def _keep(self, pair: Pair) -> None:
        self._accept(pair, pair.leaf, self.kept, pair.path)

    def _accept(self, pair: Pair, source: Any, accepted: list[Any], entry: Any) -> None:
        misfits = _without_value(pair.path, pair.leaf, flattening.raw_of(source))
        if misfits:
            self.wrong.append(pair._replace(differences=misfits))
        else:
            accepted.append(entry)

    def check(self, message: str, way_out: str = "") -> None:
        """Raises if there is anything that is not allowed.

        Args:
            message: The first line of the message.
            way_out: Its last line; if empty, it explains the arguments.
        """
        way_out = way_out or "\n".join(self._ways_out())
        error = Fit(self.wrong, self.extra).error(message, way_out)
        if error is not None:
            raise error

    def _ways_out(self) -> list[str]:
        differences = [x for pair in self.wrong for x in pair.differences]
        kinds = {x.what if isinstance(x, Misfit) else "missing" for x in differences}
        kinds |= {"unexpected"} if self.extra else set()
        return [text for kind, text in _WAYS_OUT.items() if kind in kinds]


_WAYS_OUT = {
    "missing": "Use missing= to select the leaves that may keep their values.",
    "unexpected": "Use unexpected= to select leaves of the state that may be dropped.",
    "shape": "Shapes are never adapted: a leaf that both missing= and unexpected= "
    "select keeps its value.",
    "dtype": "cast=True converts between floating dtypes, and between integer dtypes "
    "if the values stay in range; jax.random.wrap_key_data turns key data into keys.",
    "value": "An abstract or deleted leaf has no value to keep or to load. Make its "
    "value first, e.g. random keys with nnx.reseed, or use an object that has values.",
}


def _without_value(path: Path, leaf: Any, raw: Any) -> tuple[Misfit, ...]:
    """Lists values that a leaf would hold, but that are abstract or were donated."""
    text = descriptions.describe_leaf(flattening.raw_of(leaf))
    return tuple(
        Misfit((*path, *paths.from_jax(keys)), "value", text, why)
        for keys, x in jax.tree.leaves_with_path(raw)
        if (why := _lack(x))
    )


def _lack(x: Any) -> str:
    if isinstance(x, jax.ShapeDtypeStruct):
        return "none that fits"
    is_deleted = descriptions.is_deleted(x)
    return "one that was donated or deleted" if is_deleted else ""


# Casts.


def _is_castable(pair: Pair) -> bool:
    """Whether a leaf differs only in dtypes of the same kind."""
    if any(not isinstance(x, Misfit) or x.what != "dtype" for x in pair.differences):
        return False
    current, new = (
        jax.tree.leaves(flattening.raw_of(x)) for x in (pair.leaf, pair.value)
    )
    return all(map(_can_become, new, current))


def _can_become(new: Any, target: Any) -> bool:
    dtype, target_dtype = getattr(new, "dtype", None), getattr(target, "dtype", None)
    if dtype is None or target_dtype is None:
        return False
    for kind in (jnp.floating, jnp.complexfloating, jnp.integer):
        if jnp.issubdtype(target_dtype, kind):
            return jnp.issubdtype(dtype, kind) and is_in_range(new, target_dtype)
    return dtype == target_dtype


def is_in_range(array: Any, dtype: Any) -> bool:
    """Whether a dtype holds all numbers of an array: none infinite, no integer changed.

    Both are dtypes of one kind. For tracers and abstract arrays it is unknown.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    limits, kind = (jnp.iinfo, int) if is_integer else (jnp.finfo, float)
    low, high = kind(limits(dtype).min), kind(limits(dtype).max)
    array_limits = limits(array.dtype)
    is_wider = low <= kind(array_limits.min) and kind(array_limits.max) <= high
    if is_wider or isinstance(array, (_jax.Tracer, jax.ShapeDtypeStruct)):
        return True
    numbers = jnp if isinstance(array, jax.Array) else np
    components = [array.real, array.imag] if numbers.iscomplexobj(array) else [array]
    finite = [numbers.where(numbers.isfinite(x), x, 0) for x in components]
    return all(
        low <= kind(numbers.min(x, initial=0))
        and kind(numbers.max(x, initial=0)) <= high
        for x in finite
    )


# Values in the form that the object has.


def _value_for(pair: Pair) -> Any:
    """Makes the value that the leaf of the object will hold."""
    current, new = flattening.raw_of(pair.leaf), flattening.raw_of(pair.value)
    entries = (
        variables.metadata_of(pair.leaf) if isinstance(pair.leaf, Variable) else {}
    )
    if isinstance(current, jax.ShapeDtypeStruct):
        current = partitioning.place_abstract(current, entries)
    if not jax.tree.leaves(current):
        return new
    return jax.tree.map(lambda x, y: array_like(x, y, pair.path), current, new)


def array_like(current: Any, new: Any, path: Path = ()) -> Any:
    """Converts an array to be like another: dtype, sharding, NumPy's or JAX's."""
    if _jax.is_ref(new):
        new = new[...]
    dtype = getattr(current, "dtype", None)
    if dtype is None or not hasattr(new, "dtype"):
        return new
    if isinstance(current, (np.ndarray, np.generic)):
        converted = np.array(new, dtype)
        return converted if isinstance(current, np.ndarray) else converted[()]
    if new.dtype != dtype:
        new = new.astype(dtype)
    if isinstance(new, _jax.Tracer) or isinstance(current, _jax.Tracer):
        return new
    sharding = partitioning.on_concrete_mesh(
        getattr(current, "sharding", None), path, "nnx.checkpoints.load_state"
    )
    if not isinstance(new, jax.Array):
        # A copy: the buffer belongs to the caller, who may write to it.
        is_anywhere = sharding is None or not getattr(current, "committed", True)
        if is_anywhere:
            return jnp.array(new)
        return jax.device_put(np.array(new), sharding)
    if sharding is None or new.sharding == sharding:
        return new
    return jax.device_put(new, sharding)
