"""Names of JAX that no documentation promises, and what is lost without them.

A JAX may lack one, or it may work differently there. Its purpose is then served another
way or is off; the logger ``graftree`` says so once, and everything else works. Only
`_jax.py` and the files beside it use them.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core

# The loss without some names, in words for users: the names. Above each, their purpose,
# and what serves it instead; ``python -m benchmarks.names`` shows the gains.
_LOSSES = {
    # The token of the innermost trace; else get_opaque_trace_state gives it.
    "calls of layers and new Variables take a little longer": (
        "jax._src.core:trace_state"
    ),
    # The same token, where trace_state is missing.
    "nothing, unless jax._src.core.trace_state is missing, too": (
        "jax.extend.core:get_opaque_trace_state"
    ),
    # Which traces are around: is a program recorded, and how deep? Else all that is
    # traced counts as a program.
    "control flow outside of jit is compiled again where it is differentiated": (
        "jax.extend.core:find_top_trace"
    ),
    # The settings of JAX that a trace depends on, and their names.
    "explain_recompile does not report settings of JAX": (
        "jax._src.config:trace_context jax._src.config:trace_context_names"
    ),
    # The settings in a program, to know it again. Else each is compiled.
    "control flow outside of jit is compiled at each call": (
        "jax.extend.core:JaxprEqn.ctx"
    ),
    # The registries in which jax.jit, not jax.tree, finds how to take a model apart:
    # all arrays at once. Else each object and Variable is taken apart.
    "calls of plain jax.jit with models take longer": (
        "jax._src.tree_util:dispatch_registry jax._src.tree_util:_all_registries "
        "jax._src.tree_util:_registry"
    ),
    # The mesh in functions whose axes have names; elsewhere jax.sharding.get_mesh.
    "inside jax.vmap with an axis name and jax.shard_map, arrays of other devices "
    "are not moved to the mesh": "jax._src.mesh:get_concrete_mesh",
    # To distinguish scopes of modules from those of transforms.
    "tools that read programs report no paths of modules": (
        "jax.extend.source_info_util:transform_name_stack "
        "jax.extend.source_info_util:current_name_stack"
    ),
    # The line of an operation.
    "find_nans reports no lines of programs": "jax.extend.source_info_util:summarize",
    # To locate operations at the lines of layers and users.
    "programs and profiles locate operations at lines of Graftree": (
        "jax._src.source_info_util:register_exclusion"
    ),
    # To hide our frames in errors under jax.jit and the like.
    "errors under jax.jit show frames of Graftree": (
        "jax._src.traceback_util:register_exclusion"
    ),
    # Where axes, shardings or devices do not fit; else the error of jax.tree.map.
    "errors about in_axes and similar arguments will be less specific": (
        "jax._src.tree_util:prefix_errors"
    ),
    # To write our objects into exported functions.
    "functions that take or return States or Variables can't be exported": (
        "jax._src.export._export:serialization_registry"
    ),
    # To read them from there.
    "exported functions that take or return States or Variables can't be read": (
        "jax._src.export._export:deserialization_registry"
    ),
    # New values of Variables stay on the devices of the old; else the compiler chooses.
    "the compiler chooses where a compiled function puts new values of Variables over "
    "several devices": (
        "jax.extend.core:Primitive jax.interpreters.ad:primitive_jvps "
        "jax.interpreters.batching:primitive_batchers "
        "jax.interpreters.mlir:register_lowering jaxlib.mlir.ir:BlockArgument "
        "jaxlib.mlir.dialects.sdy:ShardingConstraintOp"
    ),
    # To run an eager call of a layer as one program.
    "eager calls of layers take longer": (
        "jax.extend.core:set_current_trace jax.extend.core:take_current_trace "
        "jax.experimental.layout:with_layout_constraint "
        "jax.experimental.layout:Layout"
    ),
    # The varying axes of a value, for loops inside jax.shard_map.
    "nnx.Stack and nnx.memory.value_and_grad may fail inside jax.shard_map": (
        "jax.core:ShapedArray.manual_axis_type"
    ),
    # To recognize memory layouts.
    "memory layouts are not accepted as shardings": "jax.experimental.layout:Format",
    # The store by which processes agree before they act together; else they do so by a
    # computation on their devices.
    "processes wait without a limit for one that does not arrive": (
        "jax._src.distributed:global_state"
    ),
    # CPUs with more devices than JAX was started with.
    "nnx.forecast has no targets 'cpu:N'": "jaxlib.xla_client:make_cpu_client",
    # nnx.checkify.
    "there is no nnx.checkify": (
        "jax.experimental.checkify:checkify jax.experimental.checkify:user_checks"
    ),
}
NAMES = {name: lost for lost, names in _LOSSES.items() for name in names.split()}


_logger = logging.getLogger("graftree")


class ChangedError(Exception):
    """A name of JAX no longer gives what it gave."""


# Returns the object that a name of the table stands for. It raises an AttributeError if
# its module lacks it, and an ImportError if there is no such module.
find: Callable[[str], Any] = pkgutil.resolve_name


def _is_there(name: str) -> bool:
    try:
        find(name)
    except (AttributeError, ImportError):
        return False
    return True


def tell(*names: str) -> None:
    """Logs one line on what is off, as some of these have moved, or do not work."""
    missing = [name for name in names if not _is_there(name)]
    verb, changed = (
        ("no longer provides" if missing else "has changed"),
        missing or [*names],
    )
    if _reported.issuperset(changed):
        return
    _reported.update(changed)
    lost = "; ".join(dict.fromkeys(NAMES[name] for name in changed))
    text = ", ".join(changed).replace(":", ".")
    _logger.warning("JAX %s %s %s, so %s.", jax.__version__, verb, text, lost)


# The names that were logged.
_reported: set[str] = set()


class _Way:
    """A function by names of the table, until one of them fails.

    Args:
        function: It gets the objects found for the names, and then its arguments.
        places: The names.
        prepare: Turns the objects found into those that the function gets; raises if
            that does not work. Without it, the function gets the objects.
    """

    def __init__(
        self,
        function: Any,
        names: Sequence[str],
        prepare: Callable[..., Sequence[Any]] | None,
    ) -> None:
        self._function, self._names, self._prepare = function, names, prepare
        self._otherwise: Callable[..., Any] = lambda *_: None
        self._prepared: Any = None
        self._is_open = True
        self.__doc__ = function.__doc__

    def otherwise(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the function to call without the names; by default nothing is done."""
        self._otherwise = function
        return function

    def __call__(self, *args: Any) -> Any:
        if self._is_open:
            try:
                if self._prepared is None:
                    with jax.core.eval_context():  # even if it is first used in a trace
                        objects = [find(name) for name in self._names]
                        prepare = self._prepare
                        self._prepared = prepare(*objects) if prepare else objects
                return self._function(*self._prepared, *args)
            except (MemoryError, RecursionError):  # which say nothing of JAX
                raise
            except Exception:
                self._is_open = False
                tell(*self._names)
                _logger.debug("This is why:", exc_info=True)
        return self._otherwise(*args)


def by(
    *names: str, prepare: Callable[..., Sequence[Any]] | None = None
) -> Callable[[Callable[..., Any]], _Way]:
    """Makes a function depend on names of the table.

    It must not call users' code, whose errors are theirs.
    """
    return lambda function: _Way(function, names, prepare)
