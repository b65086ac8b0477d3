"""Adds to the metadata what depends on where the project is published.

The address of the repository is in the environment variable GRAFTREE_REPOSITORY: none
is public yet. With it, the package names its pages, and the links of its README lead
there; without it, they lead to the files beside the README.
"""

import os
import pathlib
import re
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = {
    "Documentation": "/blob/main/docs/index.md",
    "Source": "",
    "Issues": "/issues",
    "Changelog": "/blob/main/CHANGELOG.md",
}


class Metadata(MetadataHookInterface):
    """Hatch calls `update` for each source distribution and wheel."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fills in the fields that ``pyproject.toml`` calls dynamic."""
        repository = os.environ.get("GRAFTREE_REPOSITORY", "").rstrip("/")
        text = (pathlib.Path(self.root) / "README.md").read_text(encoding="utf-8")
        if repository:
            text = re.sub(r"\]\((?!https?:|#)", f"]({repository}/blob/main/", text)
            metadata["urls"] = {name: repository + page for name, page in PAGES.items()}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
