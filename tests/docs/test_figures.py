"""Figures in pages are those that were recorded, or that a block of the page prints."""

import dataclasses
import json
import re

import pytest

from benchmarks import groups, recorded
from tests import sources, tables
from website import figures, pages, printed, sessions

PAGES = [sources.ROOT / "README.md", *pages.DOCS.rglob("*.md")]


def name_of(path):
    return path.relative_to(sources.ROOT).as_posix()


def words(path):
    """A page with its line ends as spaces, for sentences that go over them."""
    return re.sub(r"\s+", " ", (sources.ROOT / path).read_text())


def test_figures_are_those_measured():
    faults = [x for p in PAGES for x in figures.faults(name_of(p), p.read_text())]
    assert not faults, "\n".join(["python -m website figures mends:", *faults])


def test_each_measured_figure_was_recorded():
    found = [x for p in PAGES for x in figures.unquoted(name_of(p), p.read_text())]
    assert not found, (
        "add them to website/quotations.py or benchmarks/printed/, or leave them out:"
        f" {found}"
    )


PRINTED = '```python\nx\n```\n\n```text title="Output"\n3.25 MiB\n```\n'


@tables.cases(
    "text, unquoted",
    (
        "It takes 3 µs, 2 s, 20 %: 1,024 tokens/s",
        "3 µs|2 s|20 %|1,024 tokens/s".split("|"),
    ),
    ("1.5 GiB of 16 GiB, in 2.5 hours; every 30 seconds", ["1.5 GiB", "2.5 hours"]),
    ("`1.5 GiB`, JAX 0.12, 3.4e-5, 90s, 1.5 times", []),
    (f"{PRINTED}\nIt needs 3.25 MiB, and 3.2 MiB.\n", ["3.2 MiB"]),
    ("| a | step, ms |\n|---|---|\n| b | 3 |\n", ["| b | 3 |"]),
    ("| a | steps |\n|---|---|\n| b | 3 |\n", []),
)
def test_measured_are_times_rates_shares_and_fractions_of_bytes(text, unquoted):
    found = [x.split(": ", 1)[1] for x in figures.unquoted("docs/index.md", text)]
    assert found == unquoted


def test_an_output_that_was_recorded_is_on_a_page_as_it_was_printed():
    texts = [path.read_text() for path in PAGES]
    for name, output in printed.outputs().items():
        has = [text for text in texts if "\n".join(output) in text]
        assert has, f"benchmarks/printed/{name}.txt: no page begins like it"
        wrong = has[0].replace(output[-1], "something else")
        assert printed.corrected(wrong) == has[0]


def test_a_figure_that_is_wrong_and_one_from_nowhere_are_found():
    page, text = "docs/index.md", (pages.DOCS / "index.md").read_text()
    (right,) = re.findall(r"layers takes ([\d.]+) ms", text)
    wrong = text.replace(f"takes {right} ms", "takes 0.07 ms")
    assert any("takes 0.07 ms" in fault for fault in figures.faults(page, wrong))
    assert figures.corrected(page, wrong) == text
    assert [*figures.unquoted(page, "It takes 3 µs.")] == ["docs/index.md:1: 3 µs"]
    with pytest.raises(LookupError, match="no words like '50 small layers takes"):
        figures.corrected(page, "Nothing.")


def test_the_picture_is_of_these_figures():
    said = json.dumps(figures.ratios()).encode()
    assert said in figures.PICTURE.read_bytes(), "run python -m website figures"


def test_the_page_of_measurements_has_all_tables():
    text = (pages.DOCS / "look_up" / "measurements.md").read_text()
    shown = figures.with_tables(text)
    for run in recorded.read():
        assert f"## {run.end}\n" in shown and run.machine in shown and run.date in shown
        for name in run.measured:
            assert f"| {name} |" in shown
    assert len(text.splitlines()) < 40 and len(shown) > 40_000


def test_a_group_measured_again_takes_the_place_of_its_figures(tmp_path):
    file = tmp_path / "measured.json"
    file.write_text("[]")
    row = groups.Row("Graftree", "default", None)
    both = [
        recorded.Measured(groups.Group(name, groups.MICROSECONDS, (row,)), (1.5,))
        for name in ("call", "step")
    ]
    newer = dataclasses.replace(both[0], figures=(2.5,))
    recorded.record("Python 3.13.0, JAX 0.12.0.1", both, file)
    recorded.record("Python 3.11.7, JAX 0.10.2", both, file)
    recorded.record("Python 3.13.1, JAX 0.12.3", [newer], file)
    runs = recorded.read(file)
    assert [[*run.measured] for run in runs] == [["step"], ["call", "step"], ["call"]]
    assert runs[2].measured["call"].figure("Graftree, default") == 2.5
    assert runs[0].end == runs[2].end == "Python 3.13, JAX 0.12"
    with pytest.raises(LookupError, match="'call' has no row 'Flax NNX'"):
        runs[1].measured["call"].figure("Flax NNX")


def test_losses_of_flax_programs_differ_by_less_than_the_pages_say():
    rows = re.findall(r"^\| (\w+) \|.*$", programs := table_of_programs(), re.MULTILINE)
    numbers = [float(x) for x in re.findall(r"\| (\d[\d.]*e-\d+) \|", programs)]
    assert len(rows) == 11 and numbers  # with the heading
    for page in ("README.md", "docs/index.md"):
        most = float(
            re.search(r"differ by less than (\S+) of the loss", words(page))[1]
        )
        assert max(numbers) < most, page


def table_of_programs():
    text = (sources.ROOT / "docs" / "coming_from" / "dropin.md").read_text()
    return next(part for part in text.split("\n\n") if part.startswith("| program"))


def test_the_session_is_that_of_its_picture():
    old = "python -m website session draws it again"
    assert sessions.PICTURE.read_text().endswith(f"{sessions.program()}\n"), old
