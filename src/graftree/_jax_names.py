"""The names of JAX that no documentation promises, and the losses without them.

A JAX may lack one, or it may work differently there. Its purpose is then served another
way or is off; the logger ``graftree`` says so once, and everything else works. Only
`_jax.py` and `_jax_registries.py` use them.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core


class Name(NamedTuple):
    """The purpose of one name.

    Attributes:
        serves: Its use.
        instead: The replacement where it is missing; empty if there is none.
        lost: The loss in that case, in words for users.
    """

    serves: str
    instead: str
    lost: str


NAMES = {
    "jax._src.core:trace_state": Name(
        "the token of the innermost trace",
        "jax.extend.core.get_opaque_trace_state",
        "calls of layers and new Variables take a little longer",
    ),
    "jax.extend.core:get_opaque_trace_state": Name(
        "the same token, should trace_state be missing",
        "trace_state",
        "nothing, unless jax._src.core.trace_state is missing, too",
    ),
    "jax.extend.core:find_top_trace": Name(
        "which traces are around: whether a program is recorded, and how deep",
        "all that is traced counts as a program",
        "control flow outside of jit is compiled again where it is differentiated",
    ),
    "jax._src.config:trace_context": Name(
        "the settings of JAX that a trace depends on",
        "",
        "explain_recompile does not tell settings of JAX",
    ),
    "jax._src.config:trace_context_names": Name(
        "the names of these settings",
        "",
        "explain_recompile does not tell settings of JAX",
    ),
    "jax.extend.core:JaxprEqn.ctx": Name(
        "to know a program that was compiled before: the settings in it",
        "each is compiled",
        "control flow outside of jit is compiled at each call",
    ),
    "jax._src.tree_util:dispatch_registry": Name(
        "to give jax.jit all arrays of a model at once, where it finds its program",
        "each object and Variable is taken apart",
        "calls of plain jax.jit with models take longer",
    ),
    "jax._src.tree_util:_all_registries": Name(
        "the same: the registries beside that one",
        "the same",
        "calls of plain jax.jit with models take longer",
    ),
    "jax._src.tree_util:_registry": Name(
        "the same: what jax.export looks up",
        "the same",
        "calls of plain jax.jit with models take longer",
    ),
    "jax._src.mesh:get_concrete_mesh": Name(
        "the mesh in functions whose axes have names",
        "jax.sharding.get_mesh, elsewhere",
        "inside jax.vmap with an axis name and jax.shard_map, arrays of other devices "
        "are not moved to the mesh",
    ),
    "jax.extend.source_info_util:transform_name_stack": Name(
        "to tell scopes of modules from those of transforms",
        "",
        "tools that read programs tell no paths of modules",
    ),
    "jax.extend.source_info_util:current_name_stack": Name(
        "the same",
        "",
        "tools that read programs tell no paths of modules",
    ),
    "jax.extend.source_info_util:summarize": Name(
        "the line of an operation", "", "find_nans tells no lines of programs"
    ),
    "jax.extend.source_info_util:register_exclusion": Name(
        "to locate operations at the lines of layers and users",
        "",
        "programs and profiles locate operations at lines of Graftree",
    ),
    "jax._src.traceback_util:register_exclusion": Name(
        "to hide our frames in errors under jax.jit and other functions of JAX",
        "",
        "errors under jax.jit show frames of Graftree",
    ),
    "jax._src.tree_util:prefix_errors": Name(
        "to tell where axes, shardings or devices do not fit the arguments",
        "the error of jax.tree.map, without the place",
        "errors tell less of where in_axes and their like do not fit",
    ),
    "jax._src.export._export:serialization_registry": Name(
        "to write our objects into exported functions",
        "",
        "functions that take or return States or Variables can't be exported",
    ),
    "jax._src.export._export:deserialization_registry": Name(
        "to read our objects from exported functions",
        "",
        "exported functions that take or return States or Variables can't be read",
    ),
    **dict.fromkeys(
        (
            "jax.extend.core:Primitive",
            "jax.interpreters.ad:primitive_jvps",
            "jax.interpreters.batching:primitive_batchers",
            "jax.interpreters.mlir:register_lowering",
            "jaxlib.mlir.ir:BlockArgument",
            "jaxlib.mlir.dialects.sdy:ShardingConstraintOp",
        ),
        Name(
            "new values of Variables stay on the devices of the old ones",
            "what the compiler chooses",
            "what a compiled function writes into a Variable over several devices may "
            "be placed as the compiler likes",
        ),
    ),
    **dict.fromkeys(
        (
            "jax.extend.core:set_current_trace",
            "jax.extend.core:take_current_trace",
            "jax.experimental.layout:with_layout_constraint",
            "jax.experimental.layout:Layout",
        ),
        Name(
            "to run an eager call of a layer as one program",
            "",
            "eager calls of layers take longer",
        ),
    ),
    "jax.core:ShapedArray.manual_axis_type": Name(
        "Stack and accumulate inside of jax.shard_map",
        "",
        "nnx.Stack and nnx.memory.accumulate may fail inside jax.shard_map",
    ),
    "jax.experimental.layout:Format": Name(
        "to know memory layouts", "", "memory layouts are not taken for shardings"
    ),
    **dict.fromkeys(
        ("jax.experimental.checkify:checkify", "jax.experimental.checkify:user_checks"),
        Name("nnx.checkify", "", "there is no nnx.checkify"),
    ),
}


_logger = logging.getLogger("graftree")


class ChangedError(Exception):
    """A name of JAX no longer gives what it gave."""


def find(place: str) -> Any:
    """Returns the object that a name of the table stands for.

    Raises:
        AttributeError: If its module lacks it.
        ImportError: If there is no such module.
    """
    return pkgutil.resolve_name(place)


def _is_there(place: str) -> bool:
    try:
        find(place)
    except (AttributeError, ImportError):
        return False
    return True


def tell(*places: str) -> None:
    """Logs one line on what is off, as some of these have moved, or do not work."""
    missing = [place for place in places if not _is_there(place)]
    what, names = ("moved" if missing else "changed"), missing or [*places]
    if _told.issuperset(names):
        return
    _told.update(names)
    lost = "; ".join(dict.fromkeys(NAMES[place].lost for place in names))
    text = ", ".join(names).replace(":", ".")
    _logger.warning("JAX %s has %s %s: %s.", jax.__version__, what, text, lost)


# The names that were logged.
_told: set[str] = set()


def get(place: str) -> Any:
    """The object that a name stands for; ``None``, and a log line, if it is missing."""
    if _is_there(place):
        return find(place)
    tell(place)
    return None


class _Way:
    """A function by names of the table, until one of them fails.

    Args:
        function: It gets the objects found for the names, and then its arguments.
        places: The names.
        prepare: Turns the objects found into those that the function gets; raises if
            that does not work.
    """

    def __init__(
        self, function: Any, places: Sequence[str], prepare: Callable[..., Any]
    ) -> None:
        self._function, self._places, self._prepare = function, places, prepare
        self._otherwise: Callable[..., Any] = lambda *_: None
        self._given: Sequence[Any] | None = None
        self._is_open = True
        self.__doc__ = function.__doc__

    def otherwise(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the function to call without the names; by default nothing is done."""
        self._otherwise = function
        return function

    def __call__(self, *args: Any) -> Any:
        if self._is_open:
            try:
                if self._given is None:
                    self._given = self._look_up()
                return self._function(*self._given, *args)
            except (MemoryError, RecursionError):  # which say nothing of JAX
                raise
            except Exception:
                self._is_open = False
                tell(*self._places)
                _logger.debug("This is why:", exc_info=True)
        return self._otherwise(*args)

    def _look_up(self) -> Sequence[Any]:
        with jax.core.eval_context():  # even if the first use is in a trace
            return self._prepare(*map(find, self._places))


def _as_found(*found: Any) -> Sequence[Any]:
    return found


def by(
    *places: str, prepare: Callable[..., Sequence[Any]] = _as_found
) -> Callable[[Callable[..., Any]], _Way]:
    """Makes a function depend on names of the table.

    It must not call users' code, whose errors are theirs.
    """
    return lambda function: _Way(function, places, prepare)
