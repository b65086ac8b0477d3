"""Stages of compilation: `Traced`, `Lowered`, `Compiled`, as in ``jax.stages``.

JAX's stages know groups of leaves and a result (`traced`). The stages here describe the
arguments and the output of the user's function: each leaf is replaced by JAX's data on
it, and the objects that contain it are new ones of the same structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import jax

from graftree import _jax, errors
from graftree.core.graph import differences, flattening
from graftree.core.objects import callables
from graftree.transforms.lifting import argument_trees, caller, signatures
from graftree.transforms.lifting.argument_trees import Arguments
from graftree.transforms.lifting.leaves import join
from graftree.transforms.lifting.signatures import Signature

R = TypeVar("R")


class Stage(Generic[R]):
    """Describes arguments and output at any stage; without static ones, as in JAX.

    Args:
        stage: The stage of JAX.
        jit_wrapped: The function that `jit` returned.

    Attributes:
        jit_wrapped: The function that `jit` returned.
    """

    def __init__(self, stage: Any, jit_wrapped: Any) -> None:
        self._stage = stage
        self.jit_wrapped = jit_wrapped

    @property
    def args_info(self) -> Any:
        """``(args, kwargs)`` with shape, dtype and donation of each array."""
        return _arguments(self._stage.args_info)

    @property
    def in_avals(self) -> Any:
        """``(args, kwargs)`` with the abstract value of each array."""
        return _arguments(self._stage.in_avals)

    @property
    def in_tree(self) -> Any:
        """Structure of ``(args, kwargs)``."""
        return jax.tree.structure(self.in_avals)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Positions of the donated arrays, counted over all arguments."""
        _, packed = _unpack(self._stage.args_info)
        infos = jax.tree.leaves(packed.leaves)
        return tuple(i for i, info in enumerate(infos) if info.donated)

    @property
    def out_info(self) -> Any:
        """Output with shape and dtype of each array."""
        avals = jax.tree.map(_describe, self._stage.in_avals)
        return _output(self._stage.out_info, avals)

    @property
    def out_tree(self) -> Any:
        """Structure of the output."""
        return jax.tree.structure(self.out_info)


class Traced(Stage[R]):
    """A function that was traced for some arguments; see `jit`.

    Args:
        stage: See `Stage`.
        jit_wrapped: See `Stage`.
        bound: How many of its arguments are bound to the function.
    """

    def __init__(self, stage: Any, jit_wrapped: Any, bound: int) -> None:
        super().__init__(stage, jit_wrapped)
        self._bound = bound
        self._exported: Any = None

    @property
    def traced(self) -> Any:
        """Stage of JAX: a function of groups of leaves."""
        return self._stage

    @property
    def jaxpr(self) -> Any:
        """Traced program: a function of the arrays in the arguments."""
        return (self._exported or self._stage).jaxpr

    @property
    def fun_name(self) -> str:
        """Name of the function."""
        return self._stage.fun_name

    def lower(
        self, *, lowering_platforms: tuple[str, ...] | None = None, **options: Any
    ) -> Lowered[R]:
        """Lowers the function to the language of the compiler.

        Args:
            lowering_platforms: For which platforms; ``None`` for the one in use.
            **options: Those that ``jax.export`` gives. It gets the same stage of a
                function made by ``jax.jit``: its arguments and output are pytrees.

        Raises:
            TypeError: If the function is exported, and takes array refs.
            ValueError: If it is exported, and changes its arguments.
        """
        with _jax.hidden_frames:
            if options:
                self._exported = self._trace_for_export()
                options["lowering_platforms"] = lowering_platforms
                return self._exported.lower(**options)
            lowered = self._stage.lower(lowering_platforms=lowering_platforms)
            return Lowered(lowered, self.jit_wrapped)

    def _trace_for_export(self) -> Any:
        """Traces a function of pytrees that computes the same."""
        name, wrapped, avals = self.fun_name, self.jit_wrapped, self._stage.in_avals
        signature = _unpack(avals)[1].signature
        _check_arrays(name, signature)

        def function(*args: Any, **kwargs: Any) -> Any:
            call = wrapped.prepare(args, kwargs, signature.statics)
            result = wrapped.jitted_fn(*call.groups)
            _check_unchanged(name, call.arguments, result)
            return call.commit(result)

        function.__name__ = function.__qualname__ = name
        args, kwargs = _arguments(jax.tree.map(_describe, avals))
        return jax.jit(function).trace(*args[self._bound :], **kwargs)


class Lowered(Stage[R]):
    """A function in the language of the compiler."""

    @property
    def lowered(self) -> Any:
        """Stage of JAX: a function of groups of leaves."""
        return self._stage

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compiled[R]:
        """Compiles the function.

        Args:
            compiler_options: Options of XLA.
        """
        with _jax.hidden_frames:
            return Compiled(self._stage.compile(compiler_options), self.jit_wrapped)

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """Returns a text for people, in no stable form.

        Args:
            dialect: As in ``jax.stages.Lowered``.
            debug_info: Whether to show where operations come from.
        """
        return self._stage.as_text(dialect, debug_info=debug_info)

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """Returns the program as an object, in no stable form.

        Args:
            dialect: As in ``jax.stages.Lowered``.
        """
        return self._stage.compiler_ir(dialect)

    def cost_analysis(self) -> Any:
        """Returns the compiler's estimates: operations, bytes."""
        return self._stage.cost_analysis()


class Compiled(Stage[R]):
    """A compiled function for arguments of one structure, shapes and dtypes.

    Call it like the function, without its static arguments. Changes reach the objects
    that you pass, which need not be those it was compiled for.
    """

    def __init__(self, stage: Any, jit_wrapped: Any) -> None:
        super().__init__(stage, jit_wrapped)
        # Not of `in_avals`: those of JAX have the array refs in closures, too.
        tree = stage.in_tree
        ((group, *_), _) = jax.tree.unflatten(tree, range(tree.num_leaves))
        self._signature = group.signature

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        with _jax.hidden_frames:
            call = self.jit_wrapped.prepare(args, kwargs, self._signature.statics)
            if call.arguments.signature != self._signature:
                raise _mismatch_error(self._signature, call.arguments.signature)
            try:
                result = self._stage(*call.groups)
            except (ValueError, RuntimeError) as error:
                if caller.is_of_donation(error):
                    call.explain(error)
                raise
            except TypeError as error:
                if not (self.donate_argnums and _jax.is_tracing()):
                    raise
                raise _donation_error(self.jit_wrapped.__name__) from error
            return call.commit(result)

    @property
    def compiled(self) -> Any:
        """Stage of JAX: a function of groups of leaves."""
        return self._stage

    def as_text(self) -> str:
        """Returns a text for people, in no stable form."""
        return self._stage.as_text()

    def cost_analysis(self) -> Any:
        """Returns the compiler's estimates: operations, bytes."""
        return self._stage.cost_analysis()

    def memory_analysis(self) -> Any:
        """Returns the compiler's estimates: bytes of arguments, output, temporaries."""
        return self._stage.memory_analysis()

    def runtime_executable(self) -> Any:
        """Returns the executable, in no stable form."""
        return self._stage.runtime_executable()

    @property
    def input_shardings(self) -> Any:
        """``(args, kwargs)`` with the sharding of each array."""
        return _arguments(self._stage.input_shardings)

    @property
    def input_formats(self) -> Any:
        """``(args, kwargs)`` with the memory layout and sharding of each array."""
        return _arguments(self._stage.input_formats)

    @property
    def input_layouts(self) -> Any:
        """Older name of `input_formats`."""
        return self.input_formats

    @property
    def output_shardings(self) -> Any:
        """Output with the sharding of each array."""
        stage = self._stage
        return _output(stage.output_shardings, stage.input_shardings)

    @property
    def output_formats(self) -> Any:
        """Output with the memory layout and sharding of each array."""
        return _output(self._stage.output_formats, self._stage.input_formats)


def _mismatch_error(compiled: Signature, called: Signature) -> TypeError:
    """Explains that a call has arguments of another structure."""
    changes = differences.between(compiled.facts(), called.facts())
    lines = differences.in_words(changes, "when compiled", "now", signatures.name_of)
    return TypeError(
        "Function compiled with input pytree does not match the input pytree it was "
        "called with.\n  "
        + "\n  ".join(lines or ["other containers, or other static arguments"])
        + "\nPass arguments that are built like those it was compiled for, without "
        "the static ones."
    )


def _donation_error(name: str) -> TypeError:
    return TypeError(
        f"The compiled {name} donates arrays, so it can't be called within another "
        "transform, which may still use them.\n"
        f"Call {name} itself there, which donates no model, or compile it "
        "without donation."
    )


def _unpack(inputs: Any) -> tuple[Any, Arguments]:
    """Builds ``(args, kwargs)``, and `Arguments`, with JAX's data on a call."""
    signature, values, _ = join(inputs[0])
    objects = flattening.IndexMap()
    tree, _ = argument_trees.unpack(signature, values, objects)
    leaves = argument_trees.leaves_of(signature, values, objects)
    return callables.closed(tree[:2]), Arguments(signature, leaves, objects)


def _arguments(inputs: Any) -> Any:
    """Builds ``(args, kwargs)`` with JAX's data on the groups of a call."""
    return _unpack(inputs)[0]


def _output(result: Any, inputs: Any) -> Any:
    """Builds the output of the function with JAX's data on a result."""
    return caller.commit(_unpack(inputs)[1], result)


def _describe(aval: Any) -> Any:
    """Gives an abstract value's shape, dtype and sharding; of a ref, its array's."""
    aval = getattr(aval, "inner_aval", aval)
    is_typed = jax.sharding.AxisType.Explicit in aval.sharding.mesh.axis_types
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        weak_type=aval.weak_type,
        sharding=aval.sharding if is_typed else None,
    )


def _check_arrays(name: str, signature: Signature) -> None:
    """Refuses arguments that are array refs, or have some."""
    names = [leaf_spec.name for leaf_spec in signature.leaf_specs if leaf_spec.is_ref]
    if names:
        raise TypeError(
            errors.message(
                f"{name} takes array refs, which exported functions can't take.",
                where="\n".join(names),
                way_out="Export it for arrays: for nnx.to_arrays(model).",
            )
        )


def _check_unchanged(name: str, call: Arguments, result: Any) -> None:
    """Refuses results that an exported function would lose."""
    returned, leaf_specs = result.ungrouped().spec, call.signature.leaf_specs
    changed = {p for p in returned.changed if p not in returned.kept}
    changed |= {position for position, _ in returned.metadata}
    lines = [f"{leaf_specs[position].name} changes" for position in sorted(changed)]
    if returned.structure is not None and not returned.keeps_structure:
        lines.append("attributes of the arguments change")
    if lines:
        raise ValueError(
            errors.message(
                f"{name} changes its arguments, which an exported function can't do: "
                "it only returns its output.",
                where="\n".join(lines),
                way_out="If this is Dropout or BatchNorm in training mode, call "
                "model.eval() first. To draw noise on purpose,\nmake the streams in "
                "the function, from a key argument: nnx.Rngs(key). Else return what "
                "changes:\nexport jax.jit of a function that merges the model from its "
                "state, and also returns nnx.state(model).",
            )
        )
