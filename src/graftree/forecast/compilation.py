"""Compiles a traced step for a target: its program and memory, or why there is none."""

from __future__ import annotations

import re
import traceback
from typing import Any, NamedTuple

from graftree import _python
from graftree.forecast import scopes
from graftree.forecast.hlo import Program
from graftree.forecast.targets import Target

_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED.*?\((?P<used>[\d.]+)(?P<unit>[KMGT]?)\).*?available HBM",
    re.DOTALL,
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Compiled(NamedTuple):
    """What a compiler says.

    Attributes:
        program: The program of one device; ``None`` if it needs too much memory for a
            compiler that refuses that.
        outputs: Bytes of results that don't take the place of arguments.
        temporaries: Bytes at the peak of what the program makes for itself.
        total: All bytes that a device holds; ``None`` where `program` says it.
    """

    program: Program | None
    outputs: int
    temporaries: int
    total: int | None = None


def compile(traced: Any, target: Target) -> Compiled:
    """Compiles a traced function for the devices of its arguments.

    Raises:
        Exception: What JAX or the compiler raises, with a note that names the target,
            and the module if it is known.
    """
    try:
        compiled = traced.lower().compile()
    except Exception as error:
        if match := _OUT_OF_MEMORY.search(str(error)):
            total = int(float(match["used"]) * _UNITS[match["unit"]])
            return Compiled(None, 0, 0, total)
        error.add_note(_note(error, target))
        raise
    stats = compiled.memory_analysis()
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Compiled(Program(compiled.as_text()), outputs, stats.temp_size_in_bytes)


def _note(error: BaseException, target: Target) -> str:
    """Says for what a program couldn't be compiled, and where it is at fault."""
    names = _lowered(error) or re.findall(r'op_name="([^"]*)"', str(error))[:1]
    where = "; the compiler doesn't name the operation"
    if names:
        path = ".".join(scopes.scope_of(names[-1]).path)
        where = f", because of {names[-1].rpartition('/')[2]!r}"
        where += f" in {path}" if path else ""
    return f"nnx.forecast.step: this does not compile for {target.name!r}{where}."


def _lowered(error: BaseException) -> list[str]:
    """Finds the operation that JAX was lowering when it raised, in its frames."""
    names, primitive = [], ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        equation: Any = _python.locals_of(frame).get("eqn")
        if hasattr(equation, "primitive"):
            names.append(f"{equation.source_info.name_stack}")
            primitive = equation.primitive.name
    return ["/".join([*filter(None, names), primitive])] if primitive else []
