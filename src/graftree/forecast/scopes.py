"""Where an operation is from: the path of its module, forward or backward.

JAX names each operation ``jit(step)/transpose(jvp(model))/blocks[0]/up/dot_general``.
What transforms and control flow add to such a name is left out.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from graftree.forecast.hlo import Computation

# Words that JAX and XLA put between the names of scopes.
_WORDS = {
    "while", "body", "cond", "closed_call", "checkpoint", "rematted_computation",
    "remat", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "pjit",
    "shard_map", "core_call", "scan", "body_fun", "run_state", "eval_jaxpr",
}  # fmt: skip
_NO_MODULE = re.compile(r"^branch_\d+_fun$|->")  # branches, and letters of einsum
_NUMBERED = re.compile(r"[\w\-]+\.\d+")  # a name that the compiler makes
_WRAPPER = re.compile(r"(\w+)\((.*)\)$")


class Scope(NamedTuple):
    """Where an operation is from.

    Attributes:
        path: Names from the arguments of the function down to a module, as in
            ``("model", "blocks[0]", "up")``; empty if there are none.
        is_backward: Whether it is part of a gradient.

    Example:
        >>> nnx.forecast.Scope(("model", "head"), is_backward=True).path[-1]
        'head'
    """

    path: tuple[str, ...] = ()
    is_backward: bool = False


def scope_of(op_name: str) -> Scope:
    """Reads the name of an operation.

    Example:
        >>> from graftree.forecast import scopes
        >>> name = "jit(step)/transpose(jvp(model))/blocks[0]/up/dot_general"
        >>> scopes.scope_of(name)
        Scope(path=('model', 'blocks[0]', 'up'), is_backward=True)
    """
    op_name, _, _ = op_name.partition(";")  # the first of operations that JAX joins
    if _NUMBERED.fullmatch(op_name):
        return Scope()
    *parts, _ = _split(op_name) if "/" in op_name else _of_argument(op_name)
    path, is_backward = [], False
    for part in parts:
        while wrapper := _WRAPPER.match(part):
            kind, part = wrapper.groups()
            is_backward |= kind == "transpose"
            if kind in ("jit", "pjit"):
                part = ""
        is_module = part not in _WORDS and not _NO_MODULE.search(part)
        if part and is_module:
            path.append(part)
    return Scope(tuple(path), is_backward)


def scopes_of(computation: Computation) -> dict[str, Scope]:
    """Finds the scope of each instruction of a computation, by its name.

    What the compiler adds, such as a copy or the gathering of a parameter, has the
    scope of the first instruction that reads it.
    """
    scopes: dict[str, Scope] = {}
    of_readers: dict[str, Scope] = {}
    for name, instruction in reversed([*computation.items()]):
        scope = scope_of(instruction.op_name)
        if not scope.path and "/" not in instruction.op_name:
            scope = of_readers.get(name, scope)
        scopes[name] = scope
        if scope.path:
            of_readers.update(dict.fromkeys(instruction.operands, scope))
    return scopes


def _of_argument(name: str) -> list[str]:
    """Splits the name of an argument, such as ``model.blocks[0].up.kernel``.

    Where XLA combines arguments, as in ``(model.up.kernel:model.down.kernel)``, it is
    that of the first.
    """
    name = name.strip("()").partition(":")[0]
    return re.findall(r"[^.\[]+(?:\[[^\]]*\])*", name) or [""]


def _split(name: str) -> list[str]:
    """Splits a name at the slashes that are in no parentheses."""
    parts, depth = [""], 0
    for letter in name:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "/" and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
