"""Functions seen through the programs that JAX records of them.

`eval_shape` gives their shapes, `make_jaxpr` shows the program, `checkify` runs it with
its checks. Objects whose Variables hold ``jax.ShapeDtypeStruct`` are *abstract*: they
have all of a model but its numbers. `eval_shape` makes them, and under a mesh finds
where each array would be (`sharding/placement.py` has the rest).

`both_sides` is for tools that read programs: it takes any function and any arguments,
and writes nothing. Arguments that are neither arrays nor objects are constants there;
of the output, arrays and objects count. A `NameStack` says where in a program an
operation is: the names of modules are the scopes in which their methods are traced
(`core/objects/running.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, overload

import jax

from graftree import _jax, config
from graftree.core.graph import graphdefs, nodes
from graftree.core.objects import methods, pytrees
from graftree.core.variables import partitioning
from graftree.transforms.lifting import argument_errors, debug_info, decorators
from graftree.transforms.lifting.caller import Call, lift, returning_arrays
from graftree.transforms.lifting.decorators import P, R
from graftree.transforms.lifting.leaves import Leaves, Result
from graftree.transforms.lifting.signatures import LeafSpec, Signature
from graftree.transforms.lifting.specs import Keywords, TransformSpec
from graftree.transforms.lifting.traced import interior

A = TypeVar("A")


def eval_shape(
    f: Callable[..., A],
    *args: Any,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    **kwargs: Any,
) -> A:
    """Gives the output of a function, with shapes for arrays; computes nothing.

    Nothing that the function writes to its arguments reaches the caller's objects.

    Args:
        f: The function, or a Module to call.
        *args: Its arguments. Arrays in them may be ``jax.ShapeDtypeStruct``, also those
            in Variables.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether arguments may be returned, as new objects.
        **kwargs: Its keyword arguments.

    Returns:
        New objects with a ``jax.ShapeDtypeStruct`` for each array. Under a mesh, those
        in Variables have shardings: as annotated, otherwise replicated.

    Raises:
        ValueError: If ``f`` is a method bound to a Module or, without graph updates, if
            two arguments share a Variable or one is returned.

    Example:
        >>> model = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> model.kernel[...]
        ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """
    mode = config.propagation(graph, graph_updates)
    decorators.check_not_bound(f, "eval_shape")
    spec = TransformSpec.uniform(
        "eval_shape",
        mode,
        keywords=(Keywords.STAY, Keywords.STAY),
        returns_captured=True,
        is_detached=True,
    ).holding(f)
    call = Call(f, spec, args, kwargs)
    if not mode.structure and _is_shared(call.arguments.signature):
        argument_errors.check_inputs((args, kwargs), "eval_shape")
    inner = interior(f, spec)

    def traced(group: Leaves) -> Any:
        result = inner(_with_refs(group))
        return jax.tree.map(lambda x: x[...] if _jax.is_ref(x) else x, result)

    with _jax.hidden_frames:
        (group,) = call.groups
        named = debug_info.named_after(f, traced)
        result = jax.eval_shape(named, jax.tree.map(_abstract, group))
        return call.commit(_placed(result))


def _is_shared(signature: Signature) -> bool:
    """Whether two values in the arguments have an object in common."""
    owners: dict[int, int] = {}
    for path, spec in signature.skeleton.located_fields():
        index = getattr(spec, "index", None)
        if (
            isinstance(spec, graphdefs.NodeRef)
            and owners.get(spec.index, path[0]) != path[0]
        ):
            return True
        if index is not None:
            owners.setdefault(index, path[0])
    return False


# JAX returns no refs. So they are made in the trace, and read before it ends.


def _abstract(raw: Any) -> Any:
    return jax.ShapeDtypeStruct(raw.shape, raw.dtype) if _jax.is_ref(raw) else raw


def _with_refs(group: Leaves) -> Leaves:
    values = [
        jax.new_ref(raw) if _is_of_ref(leaf_spec) else raw
        for leaf_spec, raw in group.pairs()
    ]
    return Leaves((values, group.spec))


def _is_of_ref(leaf_spec: LeafSpec) -> bool:
    # A Variable may lack its ref: abstract ones do.
    return (
        leaf_spec.variable.metadata["ref"] if leaf_spec.variable else leaf_spec.is_ref
    )


def _placed(result: Result) -> Result:
    """Adds shardings to the Variables in the output."""
    *others, out = result.parts()
    placed = [
        partitioning.place_abstract(
            value, leaf_spec.variable.metadata, is_replicated=True
        )
        if leaf_spec.variable
        else value
        for leaf_spec, value in zip(result.spec.out.leaf_specs, out, strict=True)
    ]
    return Result.of(result.spec, [*others[0], *others[1], *placed])


class JaxprOptions(TypedDict, total=False):
    """Keyword arguments of `make_jaxpr`."""

    graph: bool | None
    graph_updates: bool | None
    static_argnums: int | Sequence[int]


@overload
def make_jaxpr(
    f: Callable[P, Any], **options: Unpack[JaxprOptions]
) -> Callable[P, Any]: ...
@overload
def make_jaxpr(
    **options: Unpack[JaxprOptions],
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...
def make_jaxpr(
    f: Any = decorators.MISSING,
    *,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    static_argnums: int | Sequence[int] = (),
) -> Any:
    """Shows the program that JAX records of a function, with ``jax.make_jaxpr``.

    Its inputs are the arrays in the arguments, its outputs those in the output. Nothing
    that the function writes to its arguments reaches the caller's objects.

    Args:
        f: The function.
        graph: The mode; ``None`` takes the default.
        graph_updates: Must be ``False`` here or by default, except in tree mode.
        static_argnums: Positions of arguments that are compile-time constants.

    Returns:
        A function with the arguments of ``f`` that returns a ``ClosedJaxpr``, or a
        decorator if ``f`` is not given.

    Raises:
        ValueError: With graph updates; if ``f`` is a method bound to a Module; at a
            call, if an argument is returned or aliases are not allowed.

    Example:
        >>> scale = nnx.Param(jnp.array(2.0))
        >>> nnx.make_jaxpr(lambda v, x: v * x, graph=False)(scale, 3.0)
        { lambda ; a:f32[] b:f32[]. let c:f32[] = mul a b in (c,) }
    """

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        mode = config.propagation(graph, graph_updates)
        if mode.structure:
            raise ValueError(
                "nnx.make_jaxpr does not support graph_updates=True.\n"
                "Pass graph_updates=False, or graph=False."
            )
        statics = decorators.choose(function, "static", static_argnums)
        spec = TransformSpec.uniform(
            "make_jaxpr", mode, statics=statics or None, is_detached=True
        )
        spec = spec.holding(function)

        def run(trace: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return trace(*Call(function, spec, args, kwargs).groups)

        return lift(function, lambda f, *_: jax.make_jaxpr(f), spec, run)

    return decorators.decorate(f, "make_jaxpr", make)


def checkify(
    f: Callable[P, R],
    errors: Any = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Callable[P, tuple[Any, R]]:
    """Makes a function return its failed checks, with ``jax.experimental.checkify``.

    Updates of the arguments reach the caller's objects whether or not a check failed.

    Args:
        f: The function. With graph updates it also takes keyword arguments.
        errors: The checks to make, such as ``jax.experimental.checkify.float_checks``;
            ``None`` for the calls of ``jax.experimental.checkify.check``.
        graph: The mode; ``None`` takes the default.
        graph_updates: Whether structural changes reach the caller's objects.

    Returns:
        A function that returns ``(error, output)``. ``error.throw()`` raises if a check
        failed; ``error.get()`` is the message, or ``None``.

    Raises:
        ValueError: If ``f`` is a method bound to a Module; at a call, for aliases that
            the mode doesn't allow.
        TypeError: At a call without graph updates, for keyword arguments.
        NotImplementedError: If JAX lacks its function, or it works differently.

    Example:
        >>> from jax.experimental import checkify
        >>> def invert(v):
        ...     checkify.check(jnp.all(v[...] != 0), "zero in the input")
        ...     v[...] = 1 / v[...]
        >>> error, _ = nnx.checkify(invert)(nnx.Variable(jnp.array([1.0, 0.0])))
        >>> print(error.get())
        zero in the input (`check` failed)
    """
    mode = config.propagation(graph, graph_updates)
    checks = _jax.checkify()
    if checks is None:
        raise NotImplementedError(
            "nnx.checkify calls jax.experimental.checkify.checkify, which JAX "
            f"{jax.__version__} lacks or has changed.\n"
            "Install a newer graftree, or an older JAX."
        )
    jax_checkify, user_checks = checks
    spec = TransformSpec.uniform(
        "checkify",
        mode,
        keywords=(Keywords.REFUSED, Keywords.STAY),
        returns_captured=True,
    )

    def transform(inner: Callable[..., Any], _ins: Any, _outs: Any) -> Any:
        chosen = user_checks if errors is None else errors
        return returning_arrays(jax_checkify(inner, errors=chosen))

    def make(function: Any) -> Any:
        function_spec = spec.holding(function)

        def run(checked: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = Call(function, function_spec, args, kwargs)
            error, result = checked(*call.groups)
            return error, call.commit(result)

        return lift(function, transform, function_spec, run)

    return decorators.decorate(f, "checkify", make)


def opened(
    f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Opens a callable, so that its objects are passed, not closed over.

    A method is one whose calls are tracked, so that its operations have its name.
    """
    while True:
        if isinstance(f, functools.partial):
            f, args, kwargs = f.func, (*f.args, *args), f.keywords | kwargs
        elif inspect.ismethod(f) and isinstance(f.__self__, pytrees.Pytree):
            f, args = methods.tracked(f.__func__), (f.__self__, *args)
        elif isinstance(f, pytrees.Pytree):
            f, args = type(f).__call__, (f, *args)
        else:
            return f, args, kwargs


def both_sides(
    name: str, f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Call, Callable[..., Any]]:
    """Makes the call of a function, and the function that JAX traces, for a tool."""

    @decorators.wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _map(
            lambda x: x.value if isinstance(x, _HiddenArgument) else x, args, kwargs
        )
        leaves = jax.tree.leaves(f(*args, **kwargs), is_leaf=nodes.is_graph_node)
        return [x for x in leaves if _is_data(x)]

    spec = TransformSpec.uniform(
        name,
        config.GRAPH_UPDATES,
        keywords=(Keywords.STAY, Keywords.STAY),
        returns_captured=True,
    )
    args, kwargs = _map(
        lambda x: x if _is_data(x) else _HiddenArgument(x), args, kwargs
    )
    return Call(run, spec, args, kwargs), interior(run, spec)


class _HiddenArgument:
    """An argument that JAX doesn't see."""

    def __init__(self, value: Any) -> None:
        self.value = value


jax.tree_util.register_static(_HiddenArgument)


def _map(change: Callable[[Any], Any], *trees: Any) -> Any:
    return jax.tree.map(
        change,
        trees,
        is_leaf=lambda x: nodes.is_graph_node(x) or isinstance(x, _HiddenArgument),
    )


def _is_data(x: Any) -> bool:
    is_abstract = isinstance(x, jax.ShapeDtypeStruct)
    return nodes.is_graph_node(x) or is_abstract or _jax.is_data_type(type(x))


# JAX's name for a forward pass that is computed again.
_RECOMPUTED = "rematted_computation"
# Names that JAX gives; products go by the formulas of einsum.
_OF_JAX = re.compile(r"checkpoint|p?jit(\(.*\))?|closed_call|.*->.*")


@dataclasses.dataclass(frozen=True)
class NameStack:
    """Where in a program an operation is: enclosing modules and transforms, by name."""

    names: tuple[str, ...] = ()
    transforms: frozenset[str] = frozenset()

    def of(self, equation: Any) -> NameStack:
        """Returns the name stack of an equation, and of the programs in it."""
        return self.within(_jax.scopes_of(equation))

    def within(self, scopes: Iterable[tuple[str, bool]]) -> NameStack:
        """Adds inner names, each with whether it is that of a transform."""
        names, transforms = self.names, {*self.transforms}
        for is_transform, run in itertools.groupby(scopes, lambda scope: scope[1]):
            inner = [word for name, _ in run for word in name.split("/")]
            if is_transform:
                transforms |= {*inner}
                continue
            transforms |= {_RECOMPUTED} & {*inner}
            modules = tuple([word for word in inner if word != _RECOMPUTED])
            # A transform may begin by repeating the path that leads to it.
            names = modules if modules[: len(names)] == names else names + modules
        return NameStack(names, frozenset(transforms))

    @property
    def direction(self) -> str:
        """Pass that it belongs to: forward, backward or recomputed."""
        if _RECOMPUTED in self.transforms:
            return "recomputed"
        return "backward" if self.is_backward else "forward"

    @property
    def is_backward(self) -> bool:
        """Whether it is of a backward pass, or recomputed for one."""
        return "transpose" in self.transforms

    def path(self, owner: str) -> str:
        """Returns the path of the module, as in ``net.blocks[3].mlp``; empty in none.

        Args:
            owner: The name of the object whose method was traced.
        """
        names = [name for name in self.names if not _OF_JAX.fullmatch(name)]
        first, *others = names or [""]
        return ".".join([owner if first == "self" else first, *others])
