"""The reference has each public name once, and the site each page."""

import itertools
import re

import pytest

from website import pages, reference

pytestmark = pytest.mark.peers  # of the bridge to Linen, which imports Flax
pytest.importorskip("flax")


def test_every_public_name_is_on_exactly_one_page():
    texts = [reference.text_of(topic) for topic in reference.TOPICS.values()]
    anchors = re.findall(r'id="nnx\.([\w.]+)"|{ #nnx\.([\w.]+) ', "\n".join(texts))
    assert sorted(map("".join, anchors)) == sorted(reference.public_names())
    assert len(anchors) > 250


def test_every_public_name_is_on_a_page_written_by_hand():
    text = "\n".join(page.text for page in pages.all_pages())
    code = " ".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    named = set()
    for word in re.findall(r"[A-Za-z_][\w.]*", code):
        parts = word.strip(".").split(".")
        ends = itertools.combinations(range(len(parts) + 1), 2)
        named.update(".".join(parts[i:j]) for i, j in ends)
    missing = {*reference.public_names()} - named
    assert not missing, f"name them in a guide, or in docs/look_up/names.md: {missing}"


def test_a_name_whose_file_has_no_page_is_an_error(monkeypatch):
    monkeypatch.delitem(reference.TOPICS, "filters")
    with pytest.raises(LookupError, match=r"no page for nnx.\w+ .core.filters"):
        reference.places()
