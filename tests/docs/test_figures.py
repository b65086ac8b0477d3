"""Figures in pages are those of docs/look_up/measurements.md, their one source."""

import re

from tests import sources, tables

NEWEST = "## Python 3.13"  # the end whose figures pages give

TRAIN_STEP = "train step, 50 layers, plain"
PATHS = "paths of modules: a warm call"
PATHS_EAGER = "paths of modules: Linear, eager"
PATHS_TRACED = "paths of modules: trace the train step of a GPT, 12 layers"


def measured():
    """``{(end, table, row): {column: number}}`` of measurements.md."""
    found, end, columns = {}, None, []
    path = sources.ROOT / "docs" / "look_up" / "measurements.md"
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if line.startswith("## "):
            end = line
        elif not line.startswith("|"):
            columns = []
        elif not columns:
            title, *columns = cells
        elif not line.startswith("| :"):
            numbers = map(number, cells[1:])
            found[end, title, cells[0]] = dict(zip(columns, numbers, strict=False))
    return found


def number(cell):
    plain = cell.replace(",", "")
    return float(plain) if re.fullmatch(r"[\d.]+", plain) else None  # "1.10 raw"


MEASURED = measured()


def words(path):
    """A page with its line ends as spaces, for sentences that go over them."""
    return re.sub(r"\s+", " ", (sources.ROOT / path).read_text())


def value_of(table, row):
    """The first number of a row, that of the newest end."""
    for (end, *place), values in MEASURED.items():
        if end.startswith(NEWEST) and place == [table, row]:
            return next(iter(values.values()))
    raise LookupError(f"measurements.md has no row {row!r} in a table {table!r}")


STEP_ROWS = [
    (TRAIN_STEP, "Graftree, default"),
    (TRAIN_STEP, "raw JAX, flat list"),
    (TRAIN_STEP, "Equinox"),
    (TRAIN_STEP, "Flax NNX, default"),
]
STEP = (
    r"50 small layers takes ([\d.]+) ms; `jax.jit` on a flat list of the same arrays"
    r" takes ([\d.]+), Equinox ([\d.]+) and Flax NNX (\d+\.\d+)"
)


def of_paths(table, raw):
    return [(table, raw), (table, "Graftree, paths off"), (table, "Graftree, paths on")]


THREE = r"[^|]*\| ([\d.]+) {0} \| ([\d.]+) {0} \| ([\d.]+) {0} \|"
IN_PROFILING = "docs/guides/profiling.md"


@tables.cases(
    "page, sentence, unit, rows",
    ("README.md", STEP, 1e-3, STEP_ROWS),
    ("docs/index.md", STEP, 1e-3, STEP_ROWS),
    (
        "docs/start/compared.md",
        r"takes ([\d.]+) ms \([^|]*\| ([\d.]+) ms \| ([\d.]+) ms \| ([\d.]+) ms \|",
        1e-3,
        [STEP_ROWS[i] for i in (1, 0, 3, 2)],
    ),
    (
        IN_PROFILING,
        r"\| a compiled call, warm" + THREE.format("µs"),
        1,
        of_paths(PATHS, "raw JAX, flat list"),
    ),
    (
        IN_PROFILING,
        r"\| `Linear`, eager" + THREE.format("µs"),
        1,
        of_paths(PATHS_EAGER, "raw JAX, by hand"),
    ),
    (
        IN_PROFILING,
        r"\| trace the train step" + THREE.format("s"),
        1e-3,
        of_paths(PATHS_TRACED, "raw JAX, functions of dicts"),
    ),
)
def test_figures_are_those_measured(page, sentence, unit, rows):
    said = re.search(sentence, words(page))
    assert said, f"{page} has no sentence of the form {sentence}"
    for figure, (table, row) in zip(said.groups(), rows, strict=True):
        digits = len(figure.partition(".")[2])
        right = f"{unit * value_of(table, row):.{digits}f}"
        assert figure == right, f"{page} says {figure} for {row!r} of {table!r}"


FOUR, FIFTY = "forward call, 4 layers", "forward call, 50 layers"
RANGE = r"([\d.]+) to ([\d.]+)"


@tables.cases(
    "sentence, table, column",
    (rf"the forward call of 50 layers, {RANGE} times raw", FIFTY, "/ raw"),
    (rf"4 layers plain {RANGE}", "train step, 4 layers, plain", "/ raw"),
    (rf"4 layers plain .*? donated {RANGE}", "train step, 4 layers, donated", "/ raw"),
    (rf"50 layers plain {RANGE}", TRAIN_STEP, "/ raw"),
    (
        rf"50 layers plain .*? donated {RANGE}",
        "train step, 50 layers, donated",
        "/ raw",
    ),
    (
        rf"a State of 50 layers .*?, {RANGE} times a dict",
        "forward call with a State, 50 layers",
        "/ raw",
    ),
    (rf"of 4 layers {RANGE};", "forward call with a State, 4 layers", "/ raw"),
    (
        rf"eager `vmap`, {RANGE} times raw",
        "eager vmap, 4 layers, the same objects again",
        "/ raw",
    ),
    (
        rf"`jax.tree.flatten` of it, {RANGE} of Equinox",
        "jax.tree.flatten, 50 layers",
        "/ Equinox",
    ),
    (rf"A forward call of four layers\*\* takes {RANGE}", FOUR, "/ raw"),
)
def test_ranges_cover_what_was_measured(sentence, table, column):
    said = re.search(sentence, words("docs/look_up/performance.md"))
    assert said, f"performance.md has no sentence of the form {sentence}"
    low, high = map(float, said.groups())
    rows = {
        (end, row): values[column]
        for (end, title, row), values in MEASURED.items()
        if title == table and row.startswith("Graftree")
    }
    assert len({end for end, _ in rows}) == 2, f"no table {table!r} for both ends"
    for place, ratio in rows.items():
        assert low <= ratio <= high, f"{low} to {high}, but {ratio} in {place}"


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
