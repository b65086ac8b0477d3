"""The code in README.md runs as it stands, and does what it says."""

import re

import pytest

from tests import sources

README = (sources.ROOT / "README.md").read_text()


def python_blocks():
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", python_blocks())
def test_code_in_the_readme_trains_to_the_loss_it_names(code, capsys):
    names = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)
    printed = float(capsys.readouterr().out)
    promised = float(re.search(r"below ([0-9.]+)", code).group(1))
    assert printed == names["loss"] < promised


def test_readme_shows_code_to_run():
    assert len(python_blocks()) == 1


def test_readme_fits_one_screen():
    assert README.count("\n") <= 80


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)]+)\)", README))
def test_links_of_the_readme_lead_somewhere(link):
    assert (sources.ROOT / link).exists()
