"""``vjp`` and ``jvp``: products of vectors with Jacobians of functions over objects.

The traced function returns the differentiated leaves as its output, and the rest of its
result as the auxiliary one. `cotangents` gives derivatives their form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, Unpack, overload

import jax

from graftree import _jax, config
from graftree.transforms.derivatives import cotangents
from graftree.transforms.lifting import (
    argument_errors,
    debug_info,
    decorators,
    tracer_leaks,
)
from graftree.transforms.lifting.caller import Call
from graftree.transforms.lifting.leaves import Leaves, Result, join
from graftree.transforms.lifting.prefixes import Prefix
from graftree.transforms.lifting.signatures import Labels, Signature
from graftree.transforms.lifting.specs import TransformSpec
from graftree.transforms.lifting.traced import TracedCall

R = TypeVar("R")
X = TypeVar("X")


@overload
def vjp(
    f: Callable[..., tuple[R, X]],
    primal: Any,
    /,
    *primals: Any,
    has_aux: Literal[True],
    **options: Unpack[cotangents.DerivativeOptions],
) -> tuple[R, Callable[..., Any], X]: ...
@overload
def vjp(
    f: Callable[..., R],
    primal: Any,
    /,
    *primals: Any,
    has_aux: Literal[False] = False,
    **options: Unpack[cotangents.DerivativeOptions],
) -> tuple[R, Callable[..., Any]]: ...
@overload
def vjp(
    f: Any = decorators.MISSING,
    *primals: Any,
    has_aux: bool = False,
    **options: Unpack[cotangents.DerivativeOptions],
) -> Any: ...
def vjp(
    f: Any = decorators.MISSING,
    *primals: Any,
    has_aux: bool = False,
    reduce_axes: Sequence[Any] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Gives the output of ``f`` and a function that pulls its cotangents back.

    All leaves of the arguments are differentiated. Writes of ``f`` to Variables are
    kept. Graph updates are not supported: pass ``graph=False`` or
    ``graph_updates=False``.

    Args:
        f: The function. Without it, the result is a decorator.
        *primals: Its arguments. Without them, the result is a function of them.
        has_aux: Whether ``f`` returns a pair; only its first entry is differentiated.
        reduce_axes: No longer supported; leave it empty.
        graph: The mode; ``None`` takes the default.
        graph_updates: Must be false in graph mode.

    Returns:
        ``(output, vjp_fn)`` or ``(output, vjp_fn, aux)``. ``vjp_fn`` takes a cotangent
        in the form of the output, and returns one gradient for each argument, in the
        form of that argument.

    Raises:
        NotImplementedError: With graph updates, or if ``reduce_axes`` is given.
        ValueError: If ``f`` is a method bound to a Module, for aliases that the mode
            doesn't allow, or if a cotangent differs in form from the output.

    Example:
        >>> model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        >>> y, vjp_fn = nnx.vjp(lambda m, x: m(x), model, jnp.ones((1, 1)), graph=False)
        >>> model_grad, x_grad = vjp_fn(5 * jnp.ones_like(y))
        >>> model_grad.bias[...]
        Array([5.], dtype=float32)
    """
    cotangents.refuse_axes(reduce_axes)
    product = _decorate(f, "vjp", _vjp, has_aux, graph, graph_updates)
    return product(*primals) if primals else product


def jvp(
    f: Any = decorators.MISSING,
    primals: Any = decorators.MISSING,
    tangents: Any = decorators.MISSING,
    *,
    has_aux: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Gives the output of ``f`` and its derivative in the direction of ``tangents``.

    Writes of ``f`` to Variables are kept. Graph updates are not supported: pass
    ``graph=False`` or ``graph_updates=False``.

    Args:
        f: The function. Without it, the result is a decorator.
        primals: The tuple of its arguments. Without it, the result is a function of
            ``primals`` and ``tangents``.
        tangents: A tuple of the same form.
        has_aux: Whether ``f`` returns a pair; only its first entry is differentiated.
        graph: The mode; ``None`` takes the default.
        graph_updates: Must be false in graph mode.

    Returns:
        ``(output, tangent)`` or ``(output, tangent, aux)``; the tangent has the form of
        the output.

    Raises:
        NotImplementedError: With graph updates.
        TypeError: If the tangents differ in form from the primals.
        ValueError: If ``f`` is a method bound to a Module, or for aliases that the mode
            doesn't allow.

    Example:
        >>> scale = nnx.Param(jnp.array(3.0))
        >>> direction = nnx.Param(jnp.array(1.0))
        >>> y, dy = nnx.jvp(lambda v: v[...] ** 2, (scale,), (direction,), graph=False)
        >>> float(y), float(dy)
        (9.0, 6.0)
    """
    product = _decorate(f, "jvp", _jvp, has_aux, graph, graph_updates)
    has_f, *has_vectors = [x is not decorators.MISSING for x in (f, primals, tangents)]
    return product(primals, tangents) if has_f and any(has_vectors) else product


def _decorate(
    f: Any,
    name: str,
    product: Callable[..., Any],
    has_aux: bool,
    graph: bool | None,
    graph_updates: bool | None,
) -> Any:
    """Makes ``product`` of a function: a call gives it the function and its spec."""
    mode = config.propagation(graph, graph_updates)
    if mode.structure:
        raise NotImplementedError(
            f"graph-mode with graph_updates is not supported for nnx.{name}: a "
            "derivative has the type of its argument, which may change.\n"
            "Pass graph=False or graph_updates=False."
        )
    inputs = Prefix(True, "primals", name, mode, keywords=True)
    # The groups of the output: the differentiated leaves, and the rest.
    outputs = Prefix((True, False) if has_aux else True, "out", name, mode, binds=False)
    spec = TransformSpec(
        name, mode, inputs, outputs, labels=Labels("primals"), held=False
    )

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        function_spec = spec.holding(function)

        @decorators.wraps(function)
        def multiplied(*args: Any, **kwargs: Any) -> Any:
            with _jax.hidden_frames:
                return product(function, function_spec, has_aux, *args, **kwargs)

        return multiplied

    return decorators.decorate(f, name, make)


def _interior(
    f: Callable[..., Any], spec: TransformSpec, has_aux: bool, others: Sequence[Leaves]
) -> Callable[..., Any]:
    def traced(group: Leaves) -> Any:
        call = TracedCall(spec, *join([group, *others]))
        out = call.run(f)
        result = call.collect(cotangents.pair(out) if has_aux else out)
        *_, returned = result.spec.parts
        # A plain list: a cotangent has the same form.
        values = [
            value
            for value, group in zip(result.parts()[2], returned.groups, strict=True)
            if group == 0
        ]
        return values, result

    return debug_info.named_after(f, traced)


def _commit(
    call: Call, result: Result, has_aux: bool
) -> tuple[Any, tuple[Any, ...], Signature]:
    """Returns the output, any auxiliary output, and the form of the first."""
    out, form = call.commit(result), result.spec.out
    if not has_aux:
        return out, (), form
    treedef = form.treedef.children()[0]
    skeleton = form.skeleton.part(treedef, 0, treedef.num_leaves)
    return out[0], (out[1],), Signature(skeleton)


def _vjp(
    f: Callable[..., Any], spec: TransformSpec, has_aux: bool, *primals: Any
) -> Any:
    call = Call(f, spec, primals, {})
    group, *others = call.groups
    tracer_leaks.refuse([group], "vjp", tracer_leaks.NO_GRADIENT)
    inner = _interior(f, spec, has_aux, others)
    values, pull_back, result = jax.vjp(inner, group, has_aux=True)
    out, aux, form = _commit(call, result, has_aux)
    pulled = _Pullback(call.arguments.signature, form, len(values), spec.mode)
    # A pytree, like that of JAX: it may leave a `jax.jit`.
    return out, jax.tree_util.Partial(pulled, pull_back), *aux


@dataclasses.dataclass(frozen=True)
class _Pullback:
    """Does the work of a ``vjp_fn`` around the function that JAX gives."""

    primals: Signature
    out: Signature
    size: int
    mode: config.Propagation

    def __call__(self, pull_back: Callable[..., Any], cotangent: Any) -> Any:
        with _jax.hidden_frames:
            values = cotangents.leaves(
                self.out, cotangent, self.mode, "the cotangent", range(self.size)
            )
            (gradients,) = pull_back(values)
            leaves = gradients.by_position()
            return cotangents.arguments(self.primals, leaves, self.mode)


def _jvp(
    f: Callable[..., Any],
    spec: TransformSpec,
    has_aux: bool,
    primals: Any,
    tangents: Any,
) -> Any:
    mode = spec.mode
    for argument, value in (("primals", primals), ("tangents", tangents)):
        if not isinstance(value, (tuple, list)):
            raise TypeError(
                f"The {argument} of nnx.jvp must be a tuple or a list, got "
                f"{type(value).__name__}."
            )
    call = Call(f, spec, tuple(primals), {})
    group, *others = call.groups
    if not mode.sharing:
        argument_errors.check_inputs((tangents, {}), "jvp", Labels("tangents"))
    _, signature, positions = group.spec
    arguments, wanted = signature.of_arguments(), [*group.by_position()]
    values = cotangents.leaves(
        arguments, (tuple(tangents), {}), mode, "the tangents", wanted
    )
    directions = Leaves.of(values, signature, positions)
    _check_tangents(group, directions)
    inner = _interior(f, spec, has_aux, others)
    _, derivatives, result = jax.jvp(inner, (group,), (directions,), has_aux=True)
    out, aux, form = _commit(call, result, has_aux)
    tangent = cotangents.tree(form, dict(enumerate(derivatives)), mode)
    return out, tangent, *aux


def _check_tangents(primals: Leaves, tangents: Leaves) -> None:
    """Refuses another tree, and a ref as its own tangent: both would be written."""
    refs = [x for x in primals.values if _jax.is_ref(x)]
    pairs = zip(primals.pairs(), tangents.values, strict=True)
    for (leaf_spec, primal), x in pairs:
        expected, got = jax.tree.structure(primal), jax.tree.structure(x)
        if expected != got:
            raise cotangents.FormError(
                "primal and tangent arguments to nnx.jvp must have the same tree "
                f"structure, but at {leaf_spec.name} they are {expected} and {got}.\n"
                "For a tangent of zeros, pass jax.tree.map(jnp.zeros_like, primal)."
            )
        if any(x is ref for ref in refs):
            raise ValueError(
                "nnx.jvp got one array ref as a primal and as the tangent of "
                f"{leaf_spec.name}.\n"
                "Pass the tangent in its own ref, made by nnx.clone."
            )
