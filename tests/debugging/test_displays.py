"""What treescope draws of objects, in notebooks and HTML files."""

import sys
import types

import jax.numpy as jnp
import pytest

import graftree as nnx
from tests import tables


@pytest.fixture
def treescope():
    return pytest.importorskip("treescope")


@pytest.fixture
def notebook(monkeypatch):
    """Pretends that IPython is running."""
    fake = types.ModuleType("IPython")
    fake.get_ipython = object
    monkeypatch.setitem(sys.modules, "IPython", fake)


class Block(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((2, 3)), tag="x")
        self.width = 3


def test_outside_notebooks_each_argument_is_printed(capsys):
    assert nnx.display(1, Block()) is None
    assert capsys.readouterr().out == f"1\n{Block()}\n"


def test_notebooks_show_trees(treescope, notebook, monkeypatch):
    shown = []
    monkeypatch.setattr(treescope, "display", lambda x, **options: shown.append(x))
    assert nnx.display(1, 2) is None and shown == [1, 2]


def test_notebooks_without_treescope_show_text(notebook, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "treescope", None)  # makes its import fail
    nnx.display(7)
    assert capsys.readouterr().out == "7\n"


def test_trees_show_attributes_and_sizes(treescope):
    text = treescope.render_to_text(Block(), ignore_exceptions=False)
    assert text.startswith("Block( # Param: 6 (24 B)")
    assert "kernel=Param( # 6 (24 B)" in text
    assert "tag='x'" in text and "width=3" in text
    assert "_pytree" not in text


def test_states_are_drawn_like_dicts(treescope):
    state = nnx.state({"a": [nnx.Param(1)]})
    text = treescope.render_to_text(state, ignore_exceptions=False)
    assert text == "State({'a': {0: Param(value=1)}})"


@tables.cases(
    "x, text",
    (nnx.List([1, 2]), "List([1, 2])"),
    (nnx.Dict(a=1), "Dict({'a': 1})"),
    (nnx.Module(), "Module()"),
)
def test_short_objects_take_one_line(x, text, treescope):
    assert treescope.render_to_text(x, ignore_exceptions=False) == text


def test_cycles_end(treescope):
    model = Block()
    model.me = model
    text = treescope.render_to_text(model, ignore_exceptions=False)
    assert "me=<cyclic reference to Block" in text


def test_paths_lead_to_the_parts(treescope):
    paths = []

    def subtree_renderer(value, path=None):
        paths.append(path)
        return treescope.rendering_parts.text("")

    nnx.state(Block()).__treescope_repr__("s", subtree_renderer)
    nnx.List([7]).__treescope_repr__("l", subtree_renderer)
    nnx.Param(1).__treescope_repr__("", subtree_renderer)
    Block().__treescope_repr__(None, subtree_renderer)
    assert paths == ["s['kernel']", "l[0]", ".value", None, None]


def test_raw_text_of_a_foreign_class_is_shown_as_it_is(treescope):
    class Note(nnx.reprlib.Representable):
        def __nnx_repr__(self):
            yield nnx.reprlib.Object("Note")
            yield nnx.reprlib.Attr("text", "<as it is>", use_raw_value=True)

    assert treescope.render_to_text(Note()) == "Note(text=<as it is>)"


def test_constructors_of_python_are_drawn_without_brackets(treescope):
    class Point:
        def __treescope_repr__(self, path, subtree_renderer):
            return nnx.visualization.render_object_constructor(
                Point, {"x": 1}, path, subtree_renderer, roundtrippable=True
            )

    text = treescope.render_to_text(Point(), roundtrip_mode=True)
    assert text.endswith("Point(x=1)")  # after the module


def test_html_files_show_all_objects(treescope, tmp_path):
    path = tmp_path / "model.html"
    nnx.debugging.display_to_html(path, Block(), nnx.List([3]))
    page = path.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and page.rstrip().endswith("</html>")
    assert "<title>Block, List</title>" in page
    assert page.count("<hr>") == 1 and "http" not in page.split("<body>")[0]


def test_html_files_name_the_extra_that_they_need(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "treescope", None)
    with pytest.raises(ImportError, match="pip install treescope"):
        nnx.debugging.display_to_html(tmp_path / "model.html", Block())
    assert not list(tmp_path.iterdir())
