"""Each name in backticks is there: in docstrings, in comments, and on the pages.

A name is the word of a program: one that a file of this repository defines or uses, or
the code on the page itself. So a function that was renamed is found in what still tells
of it. The names of others are the vocabulary below.
"""

import builtins
import functools
import io
import re
import tokenize

import pytest

from tests import sources
from website import pages

NAME = re.compile(r"(?<!`)`([\w.]+)`(?!`)")
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

# Pages that say how others name a thing.
OF_OTHERS = ("coming_from/", "guides/other_libraries.md", "guides/model_families.md")
VOCABULARY = {
    "of JAX": "jax_explain_cache_misses JAX_ENABLE_X64 jax.profiler jax.profiler.trace"
    " jax_persistent_cache_min_compile_time_secs Exported.serialize shard_alike"
    " jax._src.traceback_util.register_exclusion .deserialization_registry"
    " jax._src.export._export.serialization_registry .with_layout_constraint"
    " jaxlib.mlir.dialects.sdy.ShardingConstraintOp .current_name_stack"
    " jax.interpreters.batching.primitive_batchers"
    " jax.extend.source_info_util.transform_name_stack"
    " jax._src.source_info_util.register_exclusion XLA_PYTHON_CLIENT_MEM_FRACTION",
    "of Python and its tools": "__future__ pdb pyright pyproject.toml LD_LIBRARY_PATH"
    " GRAFTREE_REPOSITORY",
    "of other libraries": "transformers metrax.nnx Resizing rotate_half"
    " target_parameter query_pre_attn_scalar attn_logit_softcapping"
    " QtProvider _private_parameters requires_grad autocast BackupAndRestore"
    " TORCH_LOGS",
    "of axes, keys, versions": "NCHW fft t² nav 0.MINOR.PATCH",
}
KNOWN = {name for names in VOCABULARY.values() for name in names.split()}


# Docstrings, comments and sentences, none of which define a name.
PROSE = re.compile(r'"""[\s\S]*?"""|#.*|"[^"\n]{40,}"')


@functools.cache
def words_of_programs():
    """All words that stand in the code of the repository."""
    words = {*dir(builtins)}
    for source in sources.repository():
        words.update(source.path.with_suffix("").parts)
        words.update(re.findall(r"\w+", PROSE.sub("", source.text)))
    return words


def missing(text, words=frozenset()):
    """The names in a text that no program has."""
    for name in NAME.findall(text):
        parts = {x for x in name.split(".") if x and not x.isdigit()}
        if name not in KNOWN and parts - words_of_programs() - words - {"py"}:
            yield name


def test_names_in_docstrings_and_comments_are_there():
    gone = []
    for source in sources.package():
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type == tokenize.COMMENT or token.string.startswith('"""'):
                line = f"{source.path}:{token.start[0]}"
                gone += [f"{line}: {name}" for name in missing(token.string)]
    assert not gone, "\n".join(gone)


PAGES = [
    path
    for path in sorted(pages.DOCS.rglob("*.md"))
    if not str(path.relative_to(pages.DOCS)).startswith(OF_OTHERS)
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_names_on_pages_are_there(page):
    text = page.read_text()
    code = {*re.findall(r"\w+", "\n".join(BLOCK.findall(text)))}
    assert not [*missing(BLOCK.sub("", text), code)]


def test_files_on_pages_about_the_code_are_there():
    paths = [f"/{source.path.as_posix()}" for source in sources.repository()]
    pages_of_code = ("docs/look_up/design.md", "docs/look_up/how_it_is_built.md")
    for page in (*pages_of_code, "CONTRIBUTING.md"):
        named = re.findall(r"`([\w/]+\.py)`", (sources.ROOT / page).read_text())
        gone = [x for x in named if not any(p.endswith(f"/{x}") for p in paths)]
        assert named and not gone, f"{page}: {gone}"


def test_a_name_that_is_gone_is_found():
    gone = "_".join(["jit", "without", "end"])  # in pieces: else it is in a program
    text = f"`nnx.jit` and ``{gone}`` in two, `nnx.{gone}`"
    assert [*missing(text)] == [f"nnx.{gone}"]
    assert [*missing(text, {gone})] == []
