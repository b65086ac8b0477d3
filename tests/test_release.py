"""The package, the citation and the changelog speak of the same version."""

import re

import graftree as nnx
from tests import sources


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
    assert f"Version {nnx.__version__};" in text("README.md")


def test_unreleased_changes_come_first():
    headings = re.findall(r"^## (.*)$", text("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "Unreleased"
