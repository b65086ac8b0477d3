"""The words of pages, docstrings, comments and messages: none that read as translated.

A linter such as vale would do, but its binary is on no package registry.
"""

import itertools
import re

from tests import sources, tables
from website import pages

# What not to write, as a regular expression whose spaces may be line ends, and what to
# write instead.
WORDS = {
    r"anew": "again, or a new ...; recompiles",
    r"told": "reports, names, warns, learns",
    r"mend(s|ed|ing)?": "fix",
    r"in earnest": "in practice",
    r"as a rule": "usually",
    r"mostly": "usually",
    r"(the|is|to the) contrary": "the opposite",
    r"whoever": "you, users, code that ...",
    r"one's": "your, its",
    r"look(s|ed|ing)? into": "inspect",
    r"CI runs (the|its) code": "nothing: it is not about the reader",
    r"without your word": "unless you allow it",
    r"(?<!there\s)(is|are|was|were) no (?!longer|more|less|better)\w+": "is not a ...",
    r"has(n't| not) the": "does not have the",
    r"shall": "will, must",
    # English puts `even` or `including` where German has `auch`.
    r"(?<=,\s)also (?=(in|under|for|after|where|when|if|with|as|on|of|from|along)\b)": (
        "even, including"
    ),
    # Three nouns in a row that hang on each other: turn one into an adjective or verb.
    r"\w+s? of (the )?\w+s of (the )?\w+s of": "fewer `of`: a verb, or the noun before",
    # Words of our own, where the field has one.
    r"(moments|steps) per fall": "time steps per episode",
    r"models of hugging face": "Hugging Face models",
    r"weights of (pytorch|hugging face)": "PyTorch weights, Hugging Face weights",
}

# A heading names its subject, or asks a question; half a question does neither.
BARE_HEADING = re.compile(
    r"^#+ (What|Which|Who|Whose|Where)\b(?!.*\?$).*$", re.MULTILINE
)

# Printed by programs, or with words of others.
NOT_OURS = {"docs/look_up/measurements.md", "CODE_OF_CONDUCT.md"}


def texts():
    """Path and text of all we write for people, without the code in pages."""
    for path in [*sources.ROOT.glob("*.md"), *pages.DOCS.rglob("*.md")]:
        name = path.relative_to(sources.ROOT).as_posix()
        if name not in NOT_OURS:
            yield name, without_code(path.read_text())
    ours = (sources.ROOT / folder for folder in ("website", "examples"))
    for source in (*sources.package(), *itertools.chain(*map(sources.read, ours))):
        yield str(source.path), source.text


def without_code(text):
    """A page with empty lines for its blocks, and ``-`` for code in a sentence."""
    blocks = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
    text = blocks.sub(lambda block: "\n" * block[0].count("\n"), text)
    return re.sub(r"`[^`\n]+`", "-", text)


def findings(name, text):
    for pattern, instead in WORDS.items():
        spaced = pattern.replace(" ", r'[\s#"]+')
        for match in re.finditer(rf"\b{spaced}\b", text, re.IGNORECASE):
            line = text.count("\n", 0, match.start()) + 1
            yield f'{name}:{line}: "{match[0]}"; write: {instead}'


def test_headings_name_their_subject_or_ask():
    bare = [
        f"{name}: {heading[0]}"
        for name, text in texts()
        if name.endswith(".md")
        for heading in BARE_HEADING.finditer(text)
    ]
    assert not bare, "name the subject, as `Files on disk`:\n" + "\n".join(bare)


@tables.cases(
    "heading, is_bare",
    ("## What it costs", True),
    ("## What does it cost?", False),
    ("## Cost", False),
    ("### Which one to use", True),
)
def test_half_a_question_is_a_bare_heading(heading, is_bare):
    assert bool(BARE_HEADING.search(f"text\n\n{heading}\n\ntext")) == is_bare


def test_pages_docstrings_and_messages_have_plain_words():
    found = [finding for name, text in texts() for finding in findings(name, text)]
    assert not found, f"{len(found)} to write plainly:\n" + "\n".join(found)


@tables.cases(
    "text, found",
    ("It compiles anew.", 1),
    ("This is, as a\n    # rule, right, if told.", 2),
    ("`told`, and\n```python\nanew\n```\n", 0),
    ("It looks into them, whoever mended it.", 3),
    ("canewton, retold_, amends", 0),
    ("It is no list. There is no list; it is no longer one.", 1),
    ("It works, also in loops. It also works in loops.", 1),
    ("the sums of the rows of the tables of a file, the sums of rows", 1),
)
def test_a_finding_may_be_over_two_lines_and_is_none_in_code(text, found):
    assert len([*findings("page.md", without_code(text))]) == found


def test_pages_the_package_and_the_examples_are_read():
    names = {name for name, _ in texts()}
    assert {"README.md", "docs/index.md"} <= names
    assert {"src/graftree/errors.py", "examples/pictures.py"} <= names
