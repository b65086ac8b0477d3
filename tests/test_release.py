"""What the package says of itself: its version, its README, and `help`."""

import operator
import re

import pytest

import graftree as nnx
from tests import sources

README = (sources.ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SUBMODULES = (
    "checkpoints debugging decoding memory precision sharding surgery weights".split()
)


def text(name):
    return (sources.ROOT / name).read_text()


def released():
    """The newest version in the changelog, and its date."""
    heading = re.compile(r"^## (\d+\.\d+\.\d+), (\S+)$", re.MULTILINE)
    return heading.search(text("CHANGELOG.md")).groups()


def test_the_citation_is_that_of_the_newest_release():
    version, date = released()
    cited = dict(
        re.findall(r'^(\S+): "?([^"\n]+)"?$', text("CITATION.cff"), re.MULTILINE)
    )
    assert (cited["version"], cited["date-released"]) == (version, date)


def test_the_package_has_the_version_of_the_newest_release():
    assert nnx.__version__ == released()[0]
    assert f"Version {nnx.__version__};" in README
    assert f"copyright: Graftree {nnx.__version__} " in text("mkdocs.yml")


def test_unreleased_changes_come_first():
    assert re.search(r"^## (.*)$", text("CHANGELOG.md"), re.M)[1] == "Unreleased"


@pytest.mark.parametrize("code", BLOCKS)
def test_code_in_the_readme_trains_to_the_loss_it_names(code, capsys):
    names = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)
    printed = float(capsys.readouterr().out)
    promised = float(re.search(r"below ([0-9.]+)", code).group(1))
    assert printed == names["loss"] < promised


def test_readme_fits_one_screen_and_shows_code_to_run():
    assert README.count("\n") <= 80 and len(BLOCKS) == 1


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert [x for x in links if not (sources.ROOT / x).exists()] == [] != links


def test_help_begins_with_a_program():
    beginning = nnx.__doc__.splitlines()[:12]
    for word in "import graftree as nnx", "nnx.Optimizer", "@nnx.jit", "nnx.grad":
        assert any(word in line for line in beginning), word


@pytest.mark.parametrize("name", SUBMODULES)
def test_help_of_a_submodule_begins_with_its_use_and_names_what_is_there(name):
    text = getattr(nnx, name).__doc__
    _, program, *_ = text.split("\n\n")
    assert program.startswith("    ") and f"nnx.{name}." in program
    of_package = re.findall(r"\bnnx\.([\w.]*\w)", text)
    own = [f"{name}.{word}" for word in re.findall(r"`(\w+)[(`]", text)]
    for path in of_package + own:
        operator.attrgetter(path)(nnx)
