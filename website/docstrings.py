"""What mkdocstrings does with our docstrings."""

import re
from typing import Any

import griffe


class ExamplesAreCode(griffe.Extension):
    """Shows what is under ``Example:`` as code; griffe only knows ``Examples:``."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames the section of one object."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.M)
