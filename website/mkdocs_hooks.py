"""What mkdocs calls while it builds the site: links to the source of a page."""

import pathlib
from typing import Any

DOCS = pathlib.Path(__file__).parent.parent / "docs"


def on_config(config: Any) -> Any:
    """Pages can be edited where the repository has an address."""
    config.edit_uri = "edit/main/docs/" if config.repo_url else None
    return config


def on_page_context(context: Any, page: Any, **_: Any) -> Any:
    """Those of the reference, and those from the root, are not in ``docs/``."""
    if not (DOCS / page.file.src_uri).exists():
        page.edit_url = None
    return context
