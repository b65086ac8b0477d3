"""The words of pages, docstrings, comments and messages: none that read as translated.

A linter such as vale would do, but its binary is on no package registry.
"""

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
}

# Printed by programs, or with words of others.
NOT_OURS = {"docs/look_up/measurements.md", "CODE_OF_CONDUCT.md"}


def texts():
    """Path and text of all we write for people, without the code in pages."""
    for path in [*sources.ROOT.glob("*.md"), *pages.DOCS.rglob("*.md")]:
        name = path.relative_to(sources.ROOT).as_posix()
        if name not in NOT_OURS:
            yield name, without_code(path.read_text())
    for source in (*sources.package(), *sources.read(sources.ROOT / "website")):
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
)
def test_a_finding_may_be_over_two_lines_and_is_none_in_code(text, found):
    assert len([*findings("page.md", without_code(text))]) == found


def test_both_pages_and_the_package_are_read():
    names = {name for name, _ in texts()}
    assert {"README.md", "docs/index.md", "src/graftree/errors.py"} <= names
