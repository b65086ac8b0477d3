"""What `help` shows of the package and its sub-modules is for those who use them."""

import operator
import re

import pytest

import graftree as nnx

SUBMODULES = (
    "checkpoints debugging decoding memory precision sharding surgery weights".split()
)


def test_help_begins_with_a_program():
    beginning = nnx.__doc__.splitlines()[:12]
    for word in "import graftree as nnx", "nnx.Optimizer", "@nnx.jit", "nnx.grad":
        assert any(word in line for line in beginning), word


@pytest.mark.parametrize("name", SUBMODULES)
def test_help_of_a_submodule_begins_with_its_use(name):
    _, program, *_ = getattr(nnx, name).__doc__.split("\n\n")
    assert program.startswith("    ") and f"nnx.{name}." in program


@pytest.mark.parametrize("name", SUBMODULES)
def test_what_help_names_is_there(name):
    text = getattr(nnx, name).__doc__
    of_package = re.findall(r"\bnnx\.([\w.]*\w)", text)
    own = [f"{name}.{word}" for word in re.findall(r"`(\w+)[(`]", text)]
    for path in of_package + own:
        operator.attrgetter(path)(nnx)
