"""The colors of text on a terminal."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple


class Color(NamedTuple):
    """The escape code that starts each kind of text, and the one that ends them all."""

    TYPE: str = ""
    ATTRIBUTE: str = ""
    SEP: str = ""
    PAREN: str = ""
    COMMENT: str = ""
    INT: str = ""
    STRING: str = ""
    FLOAT: str = ""
    BOOL: str = ""
    NONE: str = ""
    END: str = ""


NO_COLOR = Color()
# Of the sixteen basic colors, which every terminal shows in its own scheme.
COLOR = Color(
    TYPE="\033[36m",
    ATTRIBUTE="\033[94m",
    SEP="\033[37m",
    PAREN="\033[33m",
    COMMENT="\033[90m",
    INT="\033[32m",
    STRING="\033[91m",
    FLOAT="\033[32m",
    BOOL="\033[34m",
    NONE="\033[34m",
    END="\033[0m",
)


def supports_color() -> bool:
    """Whether ``str`` is colored: in a terminal or IPython, unless NO_COLOR is set."""
    if os.environ.get("NO_COLOR"):
        return False
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return True
    return bool(getattr(sys.stdout, "isatty", bool)())


def default() -> Color:
    """The colors for output to the user: none where they would not be shown."""
    return COLOR if supports_color() else NO_COLOR
