"""The code in the pages of docs/ runs, in order, and does what the page says."""

import os
import re

import jax
import pytest

from website import building, pages, running

PAGES = pages.all_pages()

# Written by `python -m benchmarks --markdown`.
GENERATED = {"look_up/measurements.md"}


@pytest.fixture(autouse=True)
def figures_without_a_window(monkeypatch):
    monkeypatch.setitem(os.environ, "MPLBACKEND", "agg")


@pytest.fixture(autouse=True)
def ranks_are_promoted_as_readers_have_it():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.pages
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.blocks], ids=lambda page: page.name
)
def test_code_prints_what_the_page_says(page):
    faults = [
        f"{page.path}:{result.block.line}: {result.fault}"
        for result in running.run(page)
        if result.fault
    ]
    assert not faults, "\n".join(faults)


def test_there_are_pages_with_code():
    assert "guides/refs.md" in [page.name for page in PAGES if page.blocks]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_short(page):
    assert page.name in GENERATED or page.text.count("\n") <= 360


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page):
    words = re.sub(r"^ *```.*?^ *```$", "", page.text, flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", words):
        path = (page.path.parent / target).resolve() if target else page.path
        assert path.exists() or _is_written_by_the_build(path), target
        if anchor and path.suffix == ".md" and path.exists():
            assert anchor in _anchors(path.read_text()), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_picture_has_words_for_those_who_do_not_see_it(page):
    for words in re.findall(r"!\[([^\]]*)\]", page.text):
        assert len(words.split()) >= 4, words


def _is_written_by_the_build(path):
    from_the_root = {pages.DOCS / name for name in building.FROM_THE_ROOT.values()}
    return path.is_relative_to(pages.DOCS / "look_up" / "api") or path in from_the_root


def _anchors(text):
    """The anchors of headings, as mkdocs makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in plain]
    return {re.sub(r"[-\s]+", "-", heading) for heading in words}
