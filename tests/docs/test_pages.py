"""Pages and the notebook run, and do what they say; how a page is read and run."""

import dataclasses
import json
import re
import textwrap
import types

import jax
import pytest

import graftree as nnx
from tests import sources, tables
from website import building, mkdocs_hooks, outputs, pages, running, searching, writing

PAGES = pages.all_pages()


WITH_CODE = [page for page in PAGES if page.blocks]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.mark.pages
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_code_prints_what_the_page_says(page, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    with jax.numpy_rank_promotion("allow"):  # as readers have it
        faults = running.faults(page, running.run(page))
    assert not faults, "\n".join(faults)


def test_there_are_pages_with_code():
    assert "guides/refs.md" in [page.name for page in WITH_CODE]


@each_page
def test_pages_are_short_and_their_pictures_have_words(page):
    """For those who do not see them."""
    assert page.text.count("\n") <= 360
    for words in re.findall(r"!\[([^\]]*)\]", page.text):
        assert len(words.split()) >= 4, words


@each_page
def test_every_link_leads_to_a_file_and_a_heading(page):
    words = re.sub(r"^ *```.*?^ *```$", "", page.text, flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", words):
        path = (page.path.parent / target).resolve() if target else page.path
        assert path.exists(), target  # so that it works in a clone, too
        if anchor and path.suffix == ".md" and path.exists():
            assert anchor in _anchors(path.read_text()), f"{target}#{anchor}"


def test_links_to_what_the_site_shows_lead_there():
    text = (
        "[api](../../src/graftree/__init__.py) [log](../../CHANGELOG.md) [x](../../src)"
    )
    guides = pages.DOCS / "guides"
    made = building.with_links_of_the_site(text, guides, guides)
    assert made == "[api](../look_up/api/index.md) [log](../look_up/changelog.md) x"
    text = (
        "[why](docs/look_up/design.md#aim) [log](CHANGELOG.md) [x](src) [y](https://y)"
    )
    made = building.with_links_of_the_site(text, pages.ROOT, guides)
    log = "[log](../look_up/changelog.md)"
    assert made == f"[why](../look_up/design.md#aim) {log} x [y](https://y)"


def test_a_search_finds_pages_by_the_words_of_other_libraries(tmp_path):
    for name in (*searching.WORDS, "look_up/design.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# Title\n")
        assert (pages.DOCS / name).exists(), name
    searching.write_front_matter(tmp_path)
    _, head, text = (tmp_path / "guides/metrics.md").read_text().split("---\n")
    assert "\ntags: [AUC, ROC" in head and "boost: 2" in head and text == "\n# Title\n"
    assert (tmp_path / "look_up/design.md").read_text() == "# Title\n"


@pytest.mark.parametrize("address", [None, "https://example.org/graftree"])
def test_pages_have_a_link_to_their_source_where_the_repository_has_an_address(address):
    config = types.SimpleNamespace(repo_url=address, edit_uri=None)
    edited = mkdocs_hooks.on_config(config).edit_uri
    assert edited == ("edit/main/docs/" if address else None)
    links = []
    for source in ("index.md", "look_up/api/index.md", "look_up/changelog.md"):
        file = types.SimpleNamespace(src_uri=source)
        page = types.SimpleNamespace(file=file, edit_url="there")
        mkdocs_hooks.on_page_context({}, page)
        links.append(page.edit_url)
    assert links == ["there", None, None]


def _anchors(text):
    """The anchors of headings, as mkdocs makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in plain]
    return {re.sub(r"[-\s]+", "-", heading) for heading in words}


ABOUT_THE_CODE = ["look_up/design.md", "look_up/glossary.md", "../CONTRIBUTING.md"]


@pytest.mark.parametrize("name", ABOUT_THE_CODE)
def test_what_a_page_names_of_our_code_is_there(name):
    """`folder/file.py`, `folder/`, `nnx.name`, and `file.name` of a file of ours."""
    text = (pages.DOCS / name).read_text()
    words = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    files = {source.path: source for source in sources.repository()}
    places = {f"/{path}" for path in files}
    places |= {f"/{folder}/" for path in files for folder in path.parents}
    named = re.findall(r"`((?:\w+/)*(?:\w+\.py|\w+/))`", words)
    gone = {x for x in named if not any(place.endswith(f"/{x}") for place in places)}
    for file, defined in re.findall(r"`(\w+)\.(?!py`)(\w+)`", words):
        texts = [x.text for path, x in files.items() if path.stem == file]
        is_there = any(re.search(rf"\b{defined}\b", text) for text in texts)
        if texts and not is_there and file != "flax":
            gone.add(f"{file}.{defined}")
        if file == "nnx" and not hasattr(nnx, defined):
            gone.add(f"nnx.{defined}")
    assert not gone


# ------------------------------------------------------------------------- the notebook


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


# -------------------------------------------------------------------- how pages are run


OUTPUT = '\n```text title="Output"\n{}\n```\n'


def page_of(text, folder):
    return pages.Page(folder / "page.md", text)


def results_of(text, folder):
    return [*running.run(page_of(text, folder))]


def block(code, said=None):
    """A block of a page, with what the page says that it prints."""
    return f"```python\n{code}\n```\n" + ("" if said is None else OUTPUT.format(said))


@tables.cases(
    "said, printed, agrees",
    ("a b", "a b", True),
    ("a b", "a c", False),
    ("a b", "a  b", True),
    ("a b", "ab", False),
    ("(3, 4)", "(3, 5)", False),
    ("0.25", "0.2659", True),
    ("0.25", "0.2759", False),
    ("-0.00", "0.01", True),
    ("1.5e-06", "1.6e-06", True),
    ("1.5e-06", "1.5e-05", False),
    ("took ... s\nend", "took 3 or\nfour s\nend", True),
    ("... end", "no", False),
    ("[1.0, 2.0]", "[ 1.0, 2.0]", True),
    ("1.0", "nan", False),
    ("a\nb", "a b", False),
    ("Linear(3)", "Linear(3) and more", False),
)
def test_an_output_agrees_up_to_spaces_and_last_digits(said, printed, agrees):
    assert outputs.agree(said, printed) is agrees


def test_blocks_run_in_order_and_show_their_last_value(tmp_path):
    results = results_of(block("x = 2\nprint(x)") + block("x + 1"), tmp_path)
    assert [result.output for result in results] == ["2", "3"]


@pytest.mark.parametrize(("said", "right"), [("3", False), (None, False), ("2", True)])
def test_a_wrong_output_and_a_missing_one_are_faults(tmp_path, said, right):
    (result,) = results_of(block("1 + 1", said), tmp_path)
    assert result.is_as_the_page_says is right


def commands(code, said=None):
    return block(code, said).replace("```python", "```sh")


def test_shell_commands_run_if_the_page_says_what_they_print(tmp_path):
    see = "python -c 'import graftree as g, sys; print(g.__name__)' # this Python\n"
    made = block("import pathlib\npathlib.Path('x.txt').write_text('two');") + commands(
        "cat x.txt", "two"
    )
    page = page_of(made + commands(see, "graftree") + commands("exit 1"), tmp_path)
    assert [result.fault for result in running.run(page)] == [None] * 3
    assert len(page.blocks) == 3 and page.commands == 1


def test_a_command_that_fails_is_an_error_with_its_line_and_what_it_said(tmp_path):
    text = "words\n\n" + commands("ls no-such-file", "it is there")
    with pytest.raises(RuntimeError, match=r"page.md:4: ls no-such-file\n.*No such"):
        results_of(text, tmp_path)


def test_a_picture_that_no_block_makes_is_a_fault(tmp_path):
    text = block("x = 1") + "\n![A curve that falls](curve.png)\n"
    (result,) = results_of(text, tmp_path)
    assert "curve.png" in result.fault


def test_what_needs_a_package_that_is_missing_is_left_out(tmp_path):
    text = block("1 / 0").replace("python", 'python needs="no_such_package"')
    assert results_of(text, tmp_path) == []


def test_an_error_names_the_line_of_the_page(tmp_path):
    with pytest.raises(ZeroDivisionError) as raised:
        results_of("words\n\n" + block("x = 1\n1 / 0"), tmp_path)
    assert raised.traceback[-1].lineno + 1 == 5


def test_writing_puts_outputs_in_and_leaves_the_right_ones(tmp_path):
    inner = textwrap.indent(block('print("one")'), "    ")
    page = page_of(f"{block('0.251', '0.26')}\n{inner}\nend\n", tmp_path)
    written = writing.with_outputs(page, [*running.run(page)], keep_right=True)
    assert "0.26\n" in written
    assert '    ```text title="Output"\n    one\n    ```\n\nend' in written
    again = pages.Page(page.path, written)
    assert all(result.is_as_the_page_says for result in running.run(again))
    assert writing.with_outputs(again, running.run(again), keep_right=True) == written


OPEN = "import matplotlib\nmatplotlib.use('agg')\nimport matplotlib.pyplot as plt\n"
VALUE = "from matplotlib.figure import Figure\n"


@tables.cases(
    "code",
    OPEN + "plt.plot([1, 2])",
    VALUE + "figure = Figure()\nfigure.subplots().plot([1, 2])\nfigure",
)
def test_figures_are_saved_where_the_page_shows_them(code, tmp_path):
    text = block(code) + "\n![A line that goes up](a/line.png)\n"
    results = results_of(text, tmp_path)
    assert [result.fault for result in results] == [None]
    assert writing.save_pictures(tmp_path, results) == 1
    assert (tmp_path / "a" / "line.png").stat().st_size > 1000


def test_a_block_without_an_end_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="line 2 has no end"):
        results_of("a\n```python\n1\n", tmp_path)
