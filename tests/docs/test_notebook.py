"""The cells of examples/notebook.ipynb run in order, and print what is stored there."""

import dataclasses
import json
import re

import jax

from tests import sources
from website import pages, running

NOTEBOOK = sources.ROOT / "examples" / "notebook.ipynb"
COLORS = re.compile(r"\x1b\[[\d;]*m")
ADDRESS = re.compile(r"\b0x[0-9a-f]+")


def cells(kind):
    content = json.loads(NOTEBOOK.read_text())
    return [cell for cell in content["cells"] if cell["cell_type"] == kind]


def as_page(cell):
    """A cell and what is stored of its outputs, as they would be in a page."""
    text, picture = "", ""
    for output in cell["outputs"]:
        shown = output.get("data", {})
        if "image/png" in shown:
            picture = "\n![the figure of a cell](picture.png)\n"
        else:
            text += "".join(output.get("text", shown.get("text/plain"))) + "\n"
    # Jupyter colors objects; functions have other addresses in each run.
    text = ADDRESS.sub("...", COLORS.sub("", text)).strip("\n")
    said = f"\n```{pages.OUTPUT}\n{text}\n```\n" if text else ""
    return f"```python\n{''.join(cell['source'])}\n```\n{said}{picture}"


def test_cells_print_what_is_stored(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    text = "\n".join(map(as_page, cells("code")))
    with jax.numpy_rank_promotion("allow"):
        results = [
            dataclasses.replace(result, output=COLORS.sub("", result.output))
            for result in running.run(pages.Page(NOTEBOOK, text))
        ]
    faults = [result.fault for result in results if result.fault]
    assert len(results) == len(cells("code")) and not faults, "\n".join(faults)


def test_the_stored_run_is_whole_and_in_order():
    counts = [cell["execution_count"] for cell in cells("code")]
    assert counts == [*range(1, len(counts) + 1)]


def test_what_it_leads_to_is_there():
    named = re.findall(r"`(docs/[\w/.]+)`", NOTEBOOK.read_text())
    assert [x for x in named if not (sources.ROOT / x).exists()] == [] != named
