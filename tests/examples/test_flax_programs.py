"""The programs for Flax; ``make test-all`` runs them on both libraries."""

import pytest

from examples.flax_programs import __main__ as command

pytestmark = pytest.mark.peers


@pytest.mark.long
@pytest.mark.parametrize("name", command.NAMES)
def test_a_program_gives_the_losses_of_flax_and_reaches_its_goal(name):
    pytest.importorskip("flax")
    rows = [*command.lines([name])]
    assert len(rows) == 3 and rows[2].startswith(f"| {name} |"), rows


def test_every_program_is_listed():
    files = {path.stem for path in command.FOLDER.glob("*.py")}
    assert files == {*command.NAMES, "__init__", "__main__", "measure"}


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["gru"])
    assert "no program ['gru']; there are vae, " in capsys.readouterr().err


def test_help_lists_the_programs(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert "weight_tying" in capsys.readouterr().out


def test_programs_know_nothing_of_graftree():
    for name in command.NAMES:
        text = (command.FOLDER / f"{name}.py").read_text()
        assert "from flax import nnx\n" in text and "graftree" not in text
