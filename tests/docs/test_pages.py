"""The code in the pages of docs/ runs, in order, and does what the page says."""

import re

import jax
import pytest

from website import building, pages, running

PAGES = pages.all_pages()

# Written by `python -m benchmarks --markdown`.
GENERATED = {"look_up/measurements.md"}


WITH_CODE = [page for page in PAGES if page.blocks]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.mark.pages
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_code_prints_what_the_page_says(page, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    with jax.numpy_rank_promotion("allow"):  # as readers have it
        wrong = [result for result in running.run(page) if result.fault]
    faults = [f"{page.path}:{x.block.line}: {x.fault}" for x in wrong]
    assert not faults, "\n".join(faults)


def test_there_are_pages_with_code():
    assert "guides/refs.md" in [page.name for page in WITH_CODE]


@each_page
def test_pages_are_short_and_their_pictures_have_words(page):
    """For those who do not see them."""
    assert page.name in GENERATED or page.text.count("\n") <= 360
    for words in re.findall(r"!\[([^\]]*)\]", page.text):
        assert len(words.split()) >= 4, words


@each_page
def test_every_link_leads_to_a_file_and_a_heading(page):
    words = re.sub(r"^ *```.*?^ *```$", "", page.text, flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", words):
        path = (page.path.parent / target).resolve() if target else page.path
        assert path.exists() or _is_written_by_the_build(path), target
        if anchor and path.suffix == ".md" and path.exists():
            assert anchor in _anchors(path.read_text()), f"{target}#{anchor}"


def _is_written_by_the_build(path):
    from_the_root = {pages.DOCS / name for name in building.FROM_THE_ROOT.values()}
    return path.is_relative_to(pages.DOCS / "look_up" / "api") or path in from_the_root


def _anchors(text):
    """The anchors of headings, as mkdocs makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in plain]
    return {re.sub(r"[-\s]+", "-", heading) for heading in words}
