"""``custom_vjp``: functions over objects with gradients that you define.

Each call makes a ``jax.custom_vjp`` of functions of groups of leaves:

    chosen   leaves with a cotangent
    others   leaves without: substate that is not selected, ``nondiff_argnums``
    fixed    values in these that JAX can't take, such as strings; closed over

Only values that the function changes come back through JAX. So the others get their
gradient from elsewhere, even if the user's rule doesn't pass on its cotangents.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack, overload

import jax

from graftree import _jax, _python, errors
from graftree.config import GRAPH, Propagation, propagation
from graftree.core.graph.flattening import IndexMap
from graftree.core.graph.graphdefs import LEAF
from graftree.core.objects import callables
from graftree.core.pickling import Rebuilt
from graftree.transforms.derivatives import cotangents
from graftree.transforms.lifting import (
    argument_errors,
    argument_trees,
    debug_info,
    decorators,
)
from graftree.transforms.lifting.argument_trees import Arguments
from graftree.transforms.lifting.caller import Call
from graftree.transforms.lifting.decorators import MISSING, P, R
from graftree.transforms.lifting.leaves import Leaves, Result, join
from graftree.transforms.lifting.prefixes import DiffState
from graftree.transforms.lifting.signatures import Labels, Signature
from graftree.transforms.lifting.specs import TransformSpec
from graftree.transforms.lifting.traced import TracedCall

_NAME, _ARGUMENT = "custom_vjp", "nondiff_argnums"
_RESIDUAL = Labels(named={0: "residual"})


class CustomVjpOptions(TypedDict, total=False):
    """Keyword arguments of `custom_vjp`."""

    nondiff_argnums: tuple[int | DiffState, ...]
    graph: bool | None
    graph_updates: bool | None


@overload
def custom_vjp(
    fun: Callable[P, R], **options: Unpack[CustomVjpOptions]
) -> CustomVjp[P, R]: ...
@overload
def custom_vjp(
    **options: Unpack[CustomVjpOptions],
) -> Callable[[Callable[P, R]], CustomVjp[P, R]]: ...
def custom_vjp(
    fun: Any = MISSING,
    *,
    nondiff_argnums: tuple[int | DiffState, ...] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Makes a function whose gradient you define, with ``jax.custom_vjp``.

    Give the rules by ``f.defvjp(fwd, bwd)``. ``fwd`` has the arguments of ``fun`` and
    returns its output and a residual: any pytree, with objects in it. ``bwd`` gets the
    arguments without gradient, the residual and ``g``, and returns a tuple with a
    cotangent, or ``None`` for zero, for each other argument.

    With graph updates, ``g`` is ``(input_updates_g, out_g)``. The first has a State of
    cotangents for each of these arguments: for what ``fun`` wrote, else zeros. The
    tuple that ``bwd`` returns has the same form, without the substate that isn't
    differentiable. Without graph updates, ``g`` is the cotangent of the output, and the
    cotangent of an object is an object. A ``bwd`` with a keyword argument ``updates_g``
    gets the cotangents of what ``fun`` wrote, ``None`` for the rest. Without it, that
    part of the gradient is dropped, with a `LostUpdateWarning`.

    Args:
        fun: The function. Its writes to its arguments, or those of ``fwd``, are kept.
        nondiff_argnums: Positions of arguments without a gradient, which may be any
            values, but not objects with graph updates. With these, a `DiffState`
            selects the part of an argument that *is* differentiable.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        A `CustomVjp`, or a decorator if ``fun`` is not given.

    Raises:
        ValueError: If ``fun`` is a method bound to a Module, an argument is repeated,
            or a `DiffState` is used without graph updates.

    Example:
        >>> @nnx.custom_vjp
        ... def clipped(v):
        ...     return v[...] ** 2
        >>> def fwd(v):
        ...     return clipped(v), v[...]
        >>> def bwd(x, g):
        ...     (v_g,), out_g = g
        ...     v_g[...] = jnp.clip(2 * x * out_g, -1, 1)
        ...     return (v_g,)
        >>> clipped.defvjp(fwd, bwd)
        >>> float(nnx.grad(clipped)(nnx.Param(jnp.array(3.0)))[...])
        1.0
    """
    mode = propagation(graph, graph_updates)
    return decorators.decorate(
        fun, _NAME, lambda function: CustomVjp(function, nondiff_argnums, mode)
    )


class CustomVjp(Rebuilt, callables.Holder, decorators.Method[P, R]):
    """A function with its own gradient; call it like the function.

    Args:
        fun: The function.
        nondiff_argnums: See `custom_vjp`.
        mode: The changes that propagate.

    Attributes:
        fun: The function that was given.
        nondiff_argnums: As given.
        graph: Whether shared references are kept.
        fwd: The rule for the forward pass; ``None`` before `defvjp`.
        bwd: The rule for the backward pass; likewise.
        symbolic_zeros: As given to `defvjp`; likewise.
    """

    def __init__(
        self, fun: Callable[P, R], nondiff_argnums: Sequence[Any], mode: Propagation
    ) -> None:
        decorators.wraps(fun)(self)
        self.fun = fun
        self.graph = mode.sharing
        self._mode = mode
        self.nondiff_argnums = tuple(nondiff_argnums)
        self.fwd: Callable[..., Any] | None = None
        self.bwd: Callable[..., Any] | None = None
        self.symbolic_zeros: bool | None = None
        self._argnums = cotangents.Argnums(
            self.nondiff_argnums, _ARGUMENT, _NAME, mode, named=False, others=True
        )

    def defvjp(
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        symbolic_zeros: bool = False,
    ) -> None:
        """Defines the gradient; see `custom_vjp`.

        Args:
            fwd: The rule for the forward pass.
            bwd: The rule for the backward pass.
            symbolic_zeros: As in ``jax.custom_vjp``; the ``CustomVJPPrimal`` are then
                the values of the Variables in the arguments of ``fwd``.
        """
        self.fwd, self.bwd, self.symbolic_zeros = fwd, bwd, symbolic_zeros
        functions = self.fun, fwd, bwd
        if any(map(callables.holds_objects, functions)):
            callables.remember(self, self._with_functions, functions)

    def _with_functions(self, functions: tuple[Any, ...]) -> CustomVjp[..., Any]:
        """Makes a copy with other functions, which hold the objects of a trace."""
        fun, fwd, bwd = functions
        function = CustomVjp(fun, self.nondiff_argnums, self._mode)
        function.defvjp(fwd, bwd, bool(self.symbolic_zeros))
        return function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with _jax.hidden_frames:
            return self._called(args, kwargs)

    def _called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        name = debug_info.name_of(self.fun)
        if self.is_unseen(args):
            return self.seen(args, kwargs)
        if self.fwd is None or self.bwd is None:
            # JAX raises one, programs with graph updates expect the other.
            error_type = ValueError if self._mode.structure else AttributeError
            raise error_type(
                f"No VJP defined for custom_vjp function {name} using defvjp: call "
                f"{name}.defvjp(fwd, bwd) first."
            )
        # Defaults are arguments with a cotangent, as in JAX.
        positional = decorators.to_positions(self.fun, args, kwargs, sys.maxsize)
        if self._mode == GRAPH:
            argument_errors.check_arguments(positional, _NAME)
        spec = self._argnums.spec(len(positional)).holding(self.fun, self.fwd)
        call = Call(self.fun, spec, positional, {})
        signature, (chosen, *rest) = call.arguments.signature, call.groups
        others = {k: x for group in rest for k, x in group.by_position().items()}
        operands = {k: x for k, x in others.items() if _is_operand(x)}
        groups = [_group(signature, chosen.by_position()), _group(signature, operands)]
        lifted = _Lifted(
            *(self.fun, self.fwd, self.bwd, bool(self.symbolic_zeros), spec, groups),
            nondiff=self._nondiff(signature, len(positional)),
            fixed={k: x for k, x in others.items() if k not in operands},
        )
        return call.commit(lifted.function()(*groups))

    def kept(self) -> dict[str, Any]:
        """Names the arguments of `defvjp`; see `Rebuilt.kept`."""
        return {name: vars(self)[name] for name in ("fwd", "bwd", "symbolic_zeros")}

    def _nondiff(self, signature: Signature, count: int) -> list[int]:
        """Lists the positions of arguments without a cotangent, as given."""
        pairs = zip(self._argnums.positions(count), self.nondiff_argnums, strict=True)
        positions = [i for i, x in pairs if not isinstance(x, DiffState)]
        for argument in positions if self._mode.structure else ():
            for top in signature.of_argument(argument).skeleton.tops():
                if top is not LEAF:
                    raise TypeError(
                        "Passing integers to nondiff_argnums for graph nodes arguments "
                        "in nnx.custom_vjp is not supported: argument "
                        f"{argument} has a {getattr(top, 'type', Any).__name__}.\n"
                        f"Use nnx.DiffState({argument}, False), or return None for it."
                    )
        return positions


def _group(signature: Signature, values: Mapping[int, Any]) -> Leaves:
    return Leaves.of([*values.values()], signature, tuple(values))


def _is_operand(value: Any) -> bool:
    return any(
        isinstance(x, jax.Array) or _jax.is_ref(x) for x in jax.tree.leaves(value)
    )


@dataclasses.dataclass(eq=False)
class _Lifted:
    """Functions that JAX gets for one call, with what they know of the arguments.

    It doesn't hold the operands: JAX keeps the functions for as long as the gradient.

    Attributes:
        nondiff: The positions of arguments without a cotangent.
        fixed: Leaves that are closed over, by position.
    """

    fun: Callable[..., Any]
    fwd: Callable[..., Any]
    bwd: Callable[..., Any]
    symbolic_zeros: bool
    spec: TransformSpec
    groups: dataclasses.InitVar[Sequence[Leaves]]
    nondiff: Sequence[int]
    fixed: dict[int, Any]

    def __post_init__(self, groups: Sequence[Leaves]) -> None:
        self.mode, (chosen, others) = self.spec.mode, groups
        _, self.signature, self.positions = chosen.spec
        count = len(self.signature.treedef.children()[0].children())
        self.diff = [
            argument for argument in range(count) if argument not in self.nondiff
        ]
        # The changes of `fun`, if traced before `fwd`, which must return the same.
        self.changed: frozenset[int] | None = None
        self.shapes = _shapes(groups) if self.mode.structure else {}
        # They can't be residuals.
        self.refs = {k: x for k, x in others.by_position().items() if _has_ref(x)}
        self.takes_updates = not self.mode.structure and _takes_updates(self.bwd)

    def function(self) -> Callable[..., Any]:
        """Makes the function to call with the groups ``chosen`` and ``others``."""
        function = jax.custom_vjp(
            debug_info.named_after(self.fun, lambda *groups: self._fun(*groups))
        )
        function.defvjp(
            debug_info.named_after(
                self.fwd, lambda *groups: self._fwd(*groups), has_own_names=True
            ),
            debug_info.named_after(self.bwd, lambda *operands: self._bwd(*operands)),
            symbolic_zeros=self.symbolic_zeros,
        )
        if self.mode.structure or self.takes_updates:
            return function
        return lambda *groups: self._warning_of_lost_gradients(function(*groups))

    def _traced(self, chosen: Leaves, others: Leaves) -> TracedCall:
        others = _group(self.signature, others.by_position() | self.fixed)
        return TracedCall(self.spec, *join([chosen, others]))

    def _fun(self, chosen: Leaves, others: Leaves) -> Any:
        call = self._traced(chosen, others)
        result = call.collect(call.run(self.fun))
        self.changed = frozenset(result.spec.changed)
        return result

    def _fwd(self, chosen: Leaves, others: Leaves) -> Any:
        if self.symbolic_zeros:
            others = jax.custom_derivatives.custom_vjp_primal_tree_values(others)
        call = self._traced(chosen, others)
        pair = call.run(self.fwd, number=1)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                "Custom VJP fwd rule must produce a pair (output, residual), got "
                f"{type(pair).__name__} from {debug_info.name_of(self.fwd)}."
            )
        out, residual = pair
        nondiff_leaves = others.by_position() if self.nondiff else {}
        nondiff_leaves = {k: v for k, v in nondiff_leaves.items() if k not in self.refs}
        tree = argument_trees.flatten(((residual,), {}), GRAPH, _NAME, of_call=True)
        residual_arguments = Arguments.of(*tree, GRAPH, _NAME, labels=_RESIDUAL)
        stored = Leaves.of(
            residual_arguments.values(), residual_arguments.signature, None
        )
        result = call.collect(out, forced=self.changed or frozenset())
        self._check_changed(result.spec.changed)
        return result.with_spec(kept=()), (nondiff_leaves, stored)

    def _check_changed(self, changed: tuple[int, ...]) -> None:
        extra = () if self.changed is None else {*changed} - self.changed
        if extra:
            leaf_specs = self.signature.leaf_specs
            names = ", ".join(leaf_specs[position].name for position in sorted(extra))
            raise TypeError(
                f"Custom VJP fwd rule {debug_info.name_of(self.fwd)} writes what "
                f"{debug_info.name_of(self.fun)} does not write: {names}.\n"
                "If both are traced, as in a gradient of nnx.jit, they must write "
                "the same Variables."
            )

    def _bwd(self, residuals: tuple[dict[int, Any], Leaves], result: Result) -> Any:
        (nondiff_leaves, stored), signature, mode = residuals, self.signature, self.mode
        (residual,), _ = argument_trees.unpack(
            stored.signature, stored.values, IndexMap()
        )[0]
        residual = callables.closed(residual)
        leaves = self.fixed | nondiff_leaves | self.refs
        nondiff = cotangents.arguments(signature, leaves, mode, self.nondiff)
        returned, (changed, new, out) = result.spec, result.parts()
        updates = dict(zip(returned.changed, changed, strict=True))
        # The cotangents of inputs in the output are among those of the inputs.
        arrived = dict(zip(returned.parts[2].positions, out, strict=True))
        g = cotangents.tree(returned.out, arrived, mode)
        keywords = {}
        if mode.structure:
            g = self._states(returned.structure, updates, new), g
        elif self.takes_updates:
            keywords["updates_g"] = cotangents.arguments(signature, updates, mode)
        return self._read(self.bwd(*nondiff, residual, g, **keywords)), None

    def _states(
        self, structure: Signature | None, updates: dict[int, Any], new: Sequence[Any]
    ) -> Any:
        """Makes States of the arguments as the function left them (graph updates)."""
        zeros = jax.tree.map(jax.custom_derivatives.zero_from_primal, self.shapes)
        derivatives, signature = zeros | updates, structure or self.signature
        if structure is not None:
            values = iter(new)
            by_index = {
                leaf_spec.definition.index: derivatives.get(position)
                for position, leaf_spec in enumerate(self.signature.leaf_specs)
                if leaf_spec.definition is not None
            }
            derivatives = {
                position: next(values)
                if leaf_spec.outer_index is None
                else by_index[leaf_spec.outer_index]
                for position, leaf_spec in enumerate(structure.leaf_specs)
                if not leaf_spec.is_plain
            }
        return cotangents.arguments(signature, derivatives, self.mode, self.diff)

    def _read(self, returned: Any) -> Leaves:
        """Reads the cotangents of ``chosen`` from what the user's rule returns."""
        name = debug_info.name_of(self.bwd)
        if not isinstance(returned, (tuple, list)) or len(returned) != len(self.diff):
            length = (
                f" of length {len(returned)}" if hasattr(returned, "__len__") else ""
            )
            raise cotangents.FormError(
                f"Custom VJP bwd rule {name} must produce a tuple of {len(self.diff)}: "
                "a cotangent for each differentiable argument. Got "
                f"{type(returned).__name__}{length}."
            )
        by_position: dict[int, Any] = dict.fromkeys(self.positions)
        for argument, cotangent in zip(self.diff, returned, strict=True):
            if cotangent is None:
                continue
            start, stop = self.signature.leaves_of(argument)
            wanted = [p for p in self.positions if start <= p < stop]
            leaves = cotangents.leaves(
                self.signature.of_argument(argument),
                cotangent,
                self.mode,
                f"the cotangent that {name} returns for argument {argument}",
                [position - start for position in wanted],
            )
            by_position.update(zip(wanted, leaves, strict=True))
        return _group(self.signature, by_position)

    def _warning_of_lost_gradients(self, result: Result) -> Result:
        """Makes a result that warns if a gradient of written values is lost.

        It is lost if the backward rule doesn't take it.
        """
        changed, *others = result.parts()

        def warning(position: int, value: Any) -> Any:
            return _without_cotangent(
                value,
                "A gradient depends on what a function of nnx.custom_vjp wrote; this "
                f"part of it is dropped: {debug_info.name_of(self.bwd)} does not take "
                "its cotangent.\n"
                f"  written by {debug_info.name_of(self.fun)}: "
                f"{self.signature.leaf_specs[position].name}\n"
                "Return the new value and write it outside, give the bwd rule a "
                "keyword argument\n`updates_g`, or use graph_updates=True.",
            )

        guarded = map(warning, result.spec.changed, changed)
        return Result.of(result.spec, itertools.chain(guarded, *others))


def _takes_updates(bwd: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(bwd).parameters.values()
    except ValueError:  # some functions of C have none
        return False
    return any(p.name == "updates_g" or p.kind == p.VAR_KEYWORD for p in parameters)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _without_cotangent(value: Any, message: str) -> Any:
    """Returns the value; JAX gives the message where it has a cotangent for it."""
    return value


def _drop_cotangent(message: str, _: None, cotangent: Any) -> tuple[None]:
    # The backward pass of a loop has a cotangent for every part of the carry. That of
    # a count or a key is a float0, and nothing depends on it.
    if any(leaf.dtype != jax.dtypes.float0 for leaf in jax.tree.leaves(cotangent)):
        _python.warn_user(message, errors.LostUpdateWarning)
    return (None,)


_without_cotangent.defvjp(lambda value, _: (value, None), _drop_cotangent)


def _shapes(groups: Sequence[Leaves]) -> dict[int, Any]:
    """Lists shapes and dtypes of the leaves in objects, by position."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        aval = jax.typeof(x)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    leaf_specs = groups[0].signature.leaf_specs
    return {
        position: jax.tree.map(shape, value)
        for group in groups
        for position, value in group.by_position().items()
        if not leaf_specs[position].is_plain and not _has_ref(value)
    }


def _has_ref(value: Any) -> bool:
    return any(map(_jax.is_ref, jax.tree.leaves(value)))
