"""The examples in the pages of docs/ run as they stand, in order."""

import doctest
import re

import pytest

from tests import sources

GUIDES = [
    path
    for path in sorted((sources.ROOT / "docs").glob("*.md"))
    if ">>>" in path.read_text()
]


# Packages that a page needs besides our own.
NEEDED = {"linen.md": "flax.linen"}


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.name)
def test_examples_print_what_the_page_says(path):
    if path.name in NEEDED:
        pytest.importorskip(NEEDED[path.name])
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    page = doctest.DocTestParser().get_doctest(
        "\n".join(blocks), {}, path.name, str(path), 0
    )
    report = []
    result = doctest.DocTestRunner().run(page, out=report.append)
    assert result.attempted and not result.failed, "".join(report)


def test_there_are_pages_with_examples():
    assert "refs.md" in [path.name for path in GUIDES]


def test_pages_are_short():
    pages = {*sources.ROOT.glob("docs/*.md"), sources.ROOT / "README.md"}
    lengths = {page.name: page.read_text().count("\n") for page in pages}
    lengths.pop("measurements.md")  # written by `python -m benchmarks --markdown`
    assert not [name for name, lines in lengths.items() if lines > 300]
