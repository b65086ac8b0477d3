"""A new layer touches five files, an option six: the walks of CONTRIBUTING.

Each is made in a copy of the tree. What is left out is an error that names the file
and what it lacks; with all of it the laws of all layers run.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests import sources

CLASS = '''

class ScaleNorm(Module):
    """Divides by the length of the features, and multiplies by a learned one.

    Args:
        dtype: The dtype of the computation; ``None``: the common one.
        param_dtype: The dtype in which the scale is stored.

    Example:
        >>> nnx.ScaleNorm()(jnp.array([3.0, 4.0]))
        Array([0.6, 0.8], dtype=float32)

    References:
        Nguyen and Salazar, 2019, "Transformers without Tears", eq. 5.
    """

    def __init__(self, *, dtype: Any = None, param_dtype: Any = jnp.float32):
        self.scale = Param(jnp.ones((), param_dtype))
        self.dtype = dtype
        self.param_dtype = param_dtype

    def __call__(self, inputs: Any) -> Array:
        """Computes ``scale * inputs / norm(inputs)``, over the last axis."""
        inputs, scale = jnp.asarray(inputs), self.scale[...]
        x, scale = arguments.promote_dtype((inputs, scale), dtype=self.dtype)
        length = jnp.sqrt(jnp.sum(x * jnp.conj(x), axis=-1, keepdims=True))
        return scale * x / length
'''
ROW = """    *of_family(
        "normalization",
        Layer(
            "ScaleNorm",
            (),
            ((2, 3),),
            lambda p, x: p.scale * x / np.linalg.norm(x, axis=-1, keepdims=True),
            has_rngs=False,
            is_ours=True,
        ),
    ),
"""
# File: what stands there, and what comes in front of it.
WALK = {
    "src/graftree/nn/activations.py": ("\n\nclass PReLU(", CLASS),
    "src/graftree/__init__.py": (
        "from graftree.nn.activations import PReLU",
        "from graftree.nn.activations import ScaleNorm as ScaleNorm\n",
    ),
    "tests/catalog.py": ('    *of_family(\n        "pooling",', ROW),
    "docs/guides/layers.md": ("`nnx.WeightNorm` |", "`nnx.ScaleNorm`, "),
    "CHANGELOG.md": ("You must change:", "- `nnx.ScaleNorm`: a new layer.\n\n"),
}
THE_GUIDE_AGAIN = ("`nnx.StackedRNN` and `nnx.Stack`.", "`nnx.ScaleNorm`, ")

RULES = ["tests/test_house_rules.py", "tests/interop/test_names.py"]
LAWS = ["tests/nn/test_layers_under_transforms.py", "tests/nn/test_replaced_params.py"]
LAWS += ["tests/nn/test_strict_settings.py", "tests/nn/test_data_parallel.py"]
LAWS += ["src/graftree/nn/activations.py"]  # the example
FOLDERS = ("src", "tests", "docs", "website", "benchmarks", "examples")
FILES = ("conftest.py", "pyproject.toml", "CHANGELOG.md")


@pytest.fixture
def tree(tmp_path):
    """A copy of the repository, with its compiled programs."""
    ignored = shutil.ignore_patterns("__pycache__", "pictures")
    for name in FOLDERS:
        shutil.copytree(sources.ROOT / name, tmp_path / name, ignore=ignored)
    for name in FILES:
        shutil.copy(sources.ROOT / name, tmp_path / name)
    (tmp_path / "out").symlink_to(sources.ROOT / "out")
    return tmp_path


def insert(tree, file, before, text):
    path = tree / file
    old = path.read_text()
    assert before in old, f"{file} no longer has {before!r}"
    path.write_text(old.replace(before, text + before, 1))


def said_of(tree, *arguments):
    """What pytest says of the tree."""
    options = ["-q", "--assert=plain", "-p", "no:cacheprovider", "--tb=short"]
    paths = {"PYTHONPATH": f"{tree / 'src'}:{tree}"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=tree,
        env=os.environ | paths,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_new_layer_touches_five_files_and_what_is_missing_is_named(tree):
    files = {**WALK}
    for file in ("src/graftree/nn/activations.py", "src/graftree/__init__.py"):
        insert(tree, file, *files.pop(file))
    said = said_of(tree, RULES[0], "-k", "row")
    assert "tests/catalog.py: add a row to LAYERS, in its family" in said
    assert "Layer('ScaleNorm', ...)" in said and "1 failed" in said

    insert(tree, "tests/catalog.py", *files.pop("tests/catalog.py"))
    said = said_of(tree, RULES[0], "-k", "row or guides or numbers")
    assert "docs/guides/layers.md: name `nnx.ScaleNorm` in the row" in said
    assert "1 failed" in said

    for file, (before, text) in files.items():
        insert(tree, file, before, text)
    insert(tree, "docs/guides/layers.md", *THE_GUIDE_AGAIN)
    chosen = "ScaleNorm or row or guides or numbers or beyond or public or maps"
    said = said_of(tree, *RULES, *LAWS, "-k", chosen)
    assert re.search(r"^\d+ passed", said, re.MULTILINE), said
    assert int(re.search(r"(\d+) passed", said)[1]) > 50


# An option: here all that it needs for the laws. Its formula and its refusals are for
# the file of the family, its words for the guide and the changelog.
CODE = "src/graftree/nn/multi_head_attention.py"
OPTION = [
    (CODE, "        num_kv_heads: int | None", "        query_gain: float = 1.0,\n"),
    (CODE, "        self.num_kv_heads =", "        self.query_gain = query_gain\n"),
]
PEERS = "tests/nn/test_peer_grid.py"
BEYOND_PEER = "normalize_qk_axes rope"


@pytest.mark.pages
def test_an_option_of_attention_touches_its_file_and_the_row_for_the_laws(tree):
    for file, before, text in OPTION:
        insert(tree, file, before, text)
    said = said_of(tree, PEERS, "-k", "of_the_peer and MultiHeadAttention-0")
    assert "1 failed" in said and "query_gain" in said
    insert(tree, "tests/catalog.py", BEYOND_PEER, "query_gain ")
    said = said_of(tree, *RULES, *LAWS, "-k", "MultiHeadAttention or row")
    assert re.search(r"^\d+ passed", said, re.MULTILINE), said


def test_the_walk_is_that_of_contributing():
    text = (sources.ROOT / "CONTRIBUTING.md").read_text()
    (walk,) = re.findall(r"### A new layer\n(.*?)\n#", text, re.DOTALL)
    named = {*re.findall(r"`([\w/]+\.(?:py|md))`", walk)}
    rest = {x for x in WALK if x not in named}
    assert rest == {"src/graftree/nn/activations.py"}  # the file of the layer
