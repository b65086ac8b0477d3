"""Pages are read, run and compared as `website/pages.py` says."""

import textwrap

import pytest

from website import outputs, pages, running, writing

OUTPUT = '\n```text title="Output"\n{}\n```\n'


def page_of(text, folder):
    return pages.Page(folder / "page.md", text)


def results_of(text, folder):
    return [*running.run(page_of(text, folder))]


def block(code, said=None):
    """A block of a page, with what the page says that it prints."""
    return f"```python\n{code}\n```\n" + ("" if said is None else OUTPUT.format(said))


@pytest.mark.parametrize(
    ("said", "printed", "agrees"),
    [
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
    ],
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


def test_figures_are_saved_where_the_page_shows_them(tmp_path):
    code = "import matplotlib\nmatplotlib.use('agg')\nimport matplotlib.pyplot as plt\n"
    text = block(f"{code}plt.plot([1, 2])") + "\n![A line that goes up](a/line.png)\n"
    results = results_of(text, tmp_path)
    assert [result.fault for result in results] == [None]
    assert writing.save_pictures(tmp_path, results) == 1
    assert (tmp_path / "a" / "line.png").stat().st_size > 1000


def test_a_block_without_an_end_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="line 2 has no end"):
        results_of("a\n```python\n1\n", tmp_path)
