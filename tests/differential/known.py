"""The table of programs that the peer runs otherwise; see docs/look_up/differences.md.

Graftree itself has no entry: it must do what plain Python does.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from tests.differential.running import GRAPH_UPDATES, TREE


class ByDesign(NamedTuple):
    """A reason why the peer differs from plain Python, and we don't.

    Attributes:
        reason: What the peer does.
        mode: The mode in which it does; ``None`` for all.
        pattern: What the text of such a program holds, a regular expression.
        detail: What the text of the difference holds.
    """

    reason: str
    mode: str | None
    pattern: str
    detail: str = ""

    def holds(self, program: Any, mode: str, found: Any) -> bool:
        """Whether this is why a run of a program in a mode differs."""
        text = "\n".join(program.statements[: found[0] + 1])
        is_mode = self.mode in (None, mode)
        is_detail = re.search(self.detail, found[2])
        return bool(is_mode and is_detail and re.search(self.pattern, text, re.DOTALL))


BY_DESIGN = [
    ByDesign(
        "scan goes on with what its function named at the first call",
        *(None, r"scanned = nnx\.scan"),
    ),
    ByDesign(
        "a new array attribute is static if it was made in a trace, and leaks",
        *(GRAPH_UPDATES, r"@nnx\.jit.*\n    .* = .*jnp\.array", r"tracer|Error"),
    ),
    ByDesign(
        "jit drops changes of metadata",
        *(GRAPH_UPDATES, r"@nnx\.jit.*\n    .*(set|del)_metadata"),
    ),
    ByDesign(
        "a rule of custom_vjp that answers for all Variables replaces their gradients",
        *(GRAPH_UPDATES, r"constant_rule", r"expected array"),
    ),
    ByDesign(
        "static values are the same if they are equal",
        TREE,
        r"nnx\.(scan|cond|switch|while_loop|fori_loop|jit)|constant_rule|functional",
        r"expected array",
    ),
    ByDesign("a static NaN differs from itself", None, "(?i)nan", "TypeError"),
]


def reason(program: Any, mode: str, found: Any) -> str | None:
    """Why the peer differs, if the table has it."""
    return next(
        (known.reason for known in BY_DESIGN if known.holds(program, mode, found)), None
    )


def kind(program: Any, mode: str, found: Any) -> str:
    """What the peer did otherwise, in a few words, if the table doesn't have it."""
    number, what, text = found
    called = re.findall(r"show\(\w*?([a-z_]+)\d*\(", program.statements[number])
    calls = [trait for trait in sorted(program.traits) if trait.startswith("call")]
    error = re.sub(r".*expected '(.*)', got '(.*)'", r"\1/\2", text)
    words = [mode, *(calls or called or ["a change"]), what]
    return " ".join([*words, error if what == "error" else ""]).strip()
