"""What mkdocs calls while it builds the site: links to sources, names in the search."""

import json
import pathlib
from typing import Any

from website import searching

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


def on_post_build(config: Any) -> None:
    """Material has written the index of the search."""
    file = pathlib.Path(config.site_dir, "search", "search_index.json")
    index = json.loads(file.read_text())
    searching.rank_entries(index["docs"])
    file.write_text(json.dumps(index, separators=(",", ":")))
