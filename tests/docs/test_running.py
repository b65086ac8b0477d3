"""Pages are read, run and compared as `website/pages.py` says."""

import pytest

from website import outputs, pages, running, writing

FENCE = "```"


def page_of(text, folder):
    return pages.Page(folder / "page.md", text.replace("'''", FENCE))


def results_of(text, folder):
    return [*running.run(page_of(text, folder))]


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
    text = "'''python\nx = 2\nprint(x)\n'''\n\n'''python\nx + 1\n'''\n"
    results = results_of(text, tmp_path)
    assert [result.output for result in results] == ["2", "3"]


def test_a_wrong_output_and_a_missing_one_are_faults(tmp_path):
    wrong = "'''python\n1 + 1\n'''\n\n'''text title=\"Output\"\n3\n'''\n"
    missing = "'''python\n1 + 1\n'''\n"
    right = wrong.replace("3", "2")
    for text, is_right in (wrong, False), (missing, False), (right, True):
        (result,) = results_of(text, tmp_path)
        assert result.is_as_the_page_says is is_right


def test_a_picture_that_no_block_makes_is_a_fault(tmp_path):
    text = "'''python\nx = 1\n'''\n\n![A curve that falls](curve.png)\n"
    (result,) = results_of(text, tmp_path)
    assert "curve.png" in result.fault


def test_what_needs_a_package_that_is_missing_is_left_out(tmp_path):
    text = "'''python needs=\"no_such_package\"\n1 / 0\n'''\n"
    assert results_of(text, tmp_path) == []


def test_an_error_names_the_line_of_the_page(tmp_path):
    with pytest.raises(ZeroDivisionError) as raised:
        results_of("words\n\n'''python\nx = 1\n1 / 0\n'''\n", tmp_path)
    assert raised.traceback[-1].lineno + 1 == 5


def test_writing_puts_outputs_in_and_leaves_the_right_ones(tmp_path):
    text = (
        "'''python\n0.251\n'''\n\n'''text title=\"Output\"\n0.26\n'''\n"
        "\n    '''python\n    print(\"one\")\n    '''\n\nend\n"
    )
    page = page_of(text, tmp_path)
    results = [*running.run(page)]
    written = writing.with_outputs(page, results, keep_right=True)
    assert "0.26\n" in written
    assert f'    {FENCE}text title="Output"\n    one\n    {FENCE}\n\nend' in written
    again = pages.Page(page.path, written)
    assert all(result.is_as_the_page_says for result in running.run(again))
    assert writing.with_outputs(again, running.run(again), keep_right=True) == written


def test_figures_are_saved_where_the_page_shows_them(tmp_path):
    text = (
        "'''python\nimport matplotlib\nmatplotlib.use('agg')\n"
        "import matplotlib.pyplot as plt\nplt.plot([1, 2])\n'''\n"
        "\n![A line that goes up](pictures/line.png)\n"
    )
    results = results_of(text, tmp_path)
    assert [result.fault for result in results] == [None]
    assert writing.save_pictures(tmp_path, results) == 1
    assert (tmp_path / "pictures" / "line.png").stat().st_size > 1000


def test_a_block_without_an_end_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="line 2 has no end"):
        results_of("a\n'''python\n1\n", tmp_path)
