"""Keys and paths: what names the values in an object tree; their order and texts.

A path is a tuple of keys: attribute names (``str``), dict keys and indices (``int``);
``()`` is the root. Keys are hashable, and ``sort_key`` orders any two of them, even
of different types: numbers first, by value; then strings; then other keys, grouped
by type. Every listing of leaves in the package follows this order.

A key has one text, `key_text`, and a path has two that users see:

    blocks[3].mlp     as Python writes it: `dotted`, and `below` with a root in front,
                      as in args[0].kernel; selections of parts of a model, arguments
                      of transforms, weights
    blocks/3/mlp      with slashes: `to_string`; states, walks over objects, capture

`keystr` prints a path of JAX's own, which tells a dict's entry ``['a']`` from an
attribute. Only `steps_of` and `key_of` read the first form: patterns (`patterns.py`)
and tables of weights give steps more meanings.
"""

import ast
import keyword
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

from graftree.annotations import Key, Path

V = TypeVar("V")

_NUMBERS, _STRINGS, _OTHERS = range(3)


def sort_key(key: Key) -> tuple:
    """Sorts keys: numbers by value, then strings, then others, type by type."""
    if isinstance(key, str):
        return (_STRINGS, "", key)
    if isinstance(key, (int, float)):
        return (_NUMBERS, "", key)
    if isinstance(key, tuple):
        return (_OTHERS, type(key).__name__, path_sort_key(key))
    return (_OTHERS, type(key).__name__, key)


def path_sort_key(path: Path) -> tuple:
    """Sorts paths, key by key."""
    return tuple(map(sort_key, path))


def sorted_keys(keys: Iterable[Key]) -> list[Key]:
    """Lists keys in the order of `sort_key`."""
    # Python's own comparison is several times faster, gives the same order where it
    # gives one, and raises for the mixed types that it can't order.
    key_list: list[Any] = list(keys)
    try:
        return sorted(key_list)
    except TypeError:
        return sorted(key_list, key=sort_key)


def sorted_items(mapping: Mapping[Any, V]) -> list[tuple[Any, V]]:
    """Lists the items of a mapping in the order of its keys."""
    return [(key, mapping[key]) for key in sorted_keys(mapping)]


def sorted_by_path(items: Iterable[tuple[Path, V]]) -> list[tuple[Path, V]]:
    """Lists ``(path, value)`` pairs in the order of their paths."""
    items = list(items)
    try:
        return sorted(items, key=operator.itemgetter(0))
    except TypeError:
        return sorted(items, key=lambda item: path_sort_key(item[0]))


def from_jax(jax_key_path: tuple) -> Path:
    """Turns the key path of a JAX tree function into a path.

    Args:
        jax_key_path: Entries as given by ``jax.tree_util.tree_flatten_with_path``.

    Returns:
        A tuple of keys: indices, dict keys and attribute names; entries of unknown
        types become strings.

    Raises:
        ValueError: If a key can't be hashed or can't be compared with others.

    Example:
        >>> from graftree.core import paths
        >>> [(path, _)] = jax.tree.leaves_with_path({"a": [None, 1.0]})
        >>> paths.from_jax(path)
        ('a', 1)
    """
    return tuple(map(key_from_jax, jax_key_path))


def key_from_jax(entry: Any) -> Key:
    """Turns one entry of a JAX key path into a key."""
    if isinstance(entry, jax.tree_util.GetAttrKey):
        return entry.name
    if isinstance(entry, jax.tree_util.SequenceKey):
        return entry.idx
    if not isinstance(entry, (jax.tree_util.DictKey, jax.tree_util.FlattenedIndexKey)):
        return str(entry)
    key: Any = entry.key
    # The common types need no test. None has no order, but is the only one of its type.
    if isinstance(key, (str, int)) or key is None:
        return key
    try:
        hash(key)
        orderable = type(key).__lt__ not in (vars(object)["__lt__"], None)
    except TypeError:
        orderable = False
    if not orderable:
        raise ValueError(
            f"Invalid key {key!r} of type {type(key).__name__} in a path: keys must "
            "be hashable and comparable. Use strings or integers as keys."
        )
    return key


# ------------------------------------------------------------------- paths as text


def key_text(key: Key) -> str:
    """Prints a key as Python writes it: ``.name``, or ``[key]`` if it is not a name."""
    # Python normalizes names that are not ASCII, so that they may be those of others.
    if isinstance(key, str) and key.isascii() and key.isidentifier():
        return f"[{key!r}]" if keyword.iskeyword(key) else f".{key}"
    return f"[{key!r}]"


def below(start: str, path: Path) -> str:
    """Prints a path below a named value: below ``args[0]``, ``args[0].kernel``."""
    return start + "".join(map(key_text, path))


def dotted(path: Path, root: str = "<root>") -> str:
    """Prints a path as Python writes it, as in ``blocks[3].mlp``.

    Args:
        path: A tuple of keys.
        root: The text for the empty path.

    Example:
        >>> from graftree.core import paths
        >>> paths.dotted(("blocks", 3, "mlp")), paths.dotted(("a b", "c"))
        ('blocks[3].mlp', "['a b'].c")
    """
    return below("", path).removeprefix(".") or root


def to_string(path: Path, root: str = "") -> str:
    """Prints a path with slashes, as in ``layers/0/kernel``."""
    return "/".join(map(str, path)) if path else root


def spelled(path: Path) -> tuple[str, ...]:
    """Spells a path as checkpoints do, where all keys are strings."""
    return tuple(map(str, path))


# Prints a JAX key path as the Python expression that reads it.
keystr: Callable[[tuple], str] = jax.tree_util.keystr


class PathStep(NamedTuple):
    """A step of a written path.

    Attributes:
        text: The text as written, without brackets.
        is_item: Whether it was in brackets.
    """

    text: str
    is_item: bool


QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_STEP = re.compile(
    rf"\[(?P<item>(?:{QUOTED}|[^\[\]'\"])*)\]"
    rf"|(?P<name>\{{\w+\}}|[^./\[\]{{}},'\"\s]+)"
)


def steps_of(text: str) -> list[PathStep]:
    """Cuts a path as Python writes it into its steps; slashes are taken for dots.

    Raises:
        ValueError: If it is malformed; its message is the reason, without the text.

    Example:
        >>> from graftree.core import paths
        >>> [step.text for step in paths.steps_of("blocks[3].mlp")]
        ['blocks', '3', 'mlp']
    """
    steps: list[PathStep] = []
    position = 0
    while position < len(text) or not steps:
        has_dot = bool(steps) and text[position] in "./"
        position += has_dot
        match = _STEP.match(text, position)
        # After a dot comes a name; else only the first step may be one.
        is_item = match is not None and match["name"] is None
        if match is None or (steps and is_item == has_dot):
            rest = text[position:]
            problem = f"expected a step at {rest!r}"
            raise ValueError(problem if rest else "a step is missing")
        name = match["item"].strip() if is_item else match["name"]
        steps.append(PathStep(name, is_item))
        position = match.end()
    return steps


def key_of(step: PathStep) -> Key:
    """Returns the key of a step, as `key_text` prints it; digits are an index.

    Raises:
        ValueError: If the text in brackets is not a literal, or can't be a key.
    """
    text = step.text
    if not step.is_item:
        return int(text) if text.isascii() and text.isdigit() else text
    try:
        key = ast.literal_eval(text)
        hash(key)
    except (ValueError, SyntaxError, TypeError):
        raise ValueError(f"[{text}] is not an index or quoted key") from None
    return key
