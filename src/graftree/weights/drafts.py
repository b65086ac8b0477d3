"""A first version of a table, from the names in a file and a model.

Names of tensors and paths of layers are compared with indices taken out, so that all
blocks are one line. What has the right number, the right shapes and the most similar
name comes first. It is a draft: a person reads it, and completes what is left open.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from graftree.core import paths
from graftree.core.graph import nodes
from graftree.core.graph.nodes import Leaf
from graftree.core.variables.variables import Variable
from graftree.nn import stacks
from graftree.weights import layouts, sources, tables, torch_layouts

# What the same thing is called here and elsewhere; each word stands for the first.
_WORDS = [
    ("query", "q", "wq"),
    ("key", "k", "wk"),
    ("value", "v", "wv"),
    ("out", "o", "wo", "dense"),
    ("embed", "embedding", "wte", "tok", "embeddings", "tokens"),
    ("position", "wpe", "pos", "positions"),
    ("norm", "ln", "layernorm", "rmsnorm"),
    ("attention", "attn", "selfattn", "self"),
    ("blocks", "layers", "h", "block", "layer"),
    ("head", "lm", "classifier"),
    ("mlp", "ffn", "feedforward", "ff"),
    ("final", "f", "last"),
    ("up", "fc", "fc1", "w3"),
    ("down", "proj", "fc2", "w2"),
    ("gate", "w1"),
    ("1", "input", "pre", "before"),
    ("2", "post", "after"),
]
_MEANING = {word: words[0] for words in _WORDS for word in words}


@dataclasses.dataclass(frozen=True)
class Draft:
    """What `draft` found; prints as the source of a table, to be read and completed.

    Attributes:
        entries: The lines for which there is a choice, the best one taken.
        doubtful: Names for which other paths would have fitted too, with these.
        names: Names in the file that are left, with their shapes.
        paths: Paths in the model that are left, with their shapes.

    Example:
        >>> model = nnx.Dict(up=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> nnx.weights.draft({"down.weight": jnp.ones((9, 9))}, model)
        nnx.weights.Mapping({
        })
        # in the file: 'down.weight' [9, 9]
        # in the model: 'up.bias' [3]
        # in the model: 'up.weight' [3, 2]
    """

    entries: Mapping[str, str]
    doubtful: Mapping[str, Sequence[str]]
    names: Mapping[str, tuple[int, ...]]
    paths: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        lines = ["nnx.weights.Mapping({"]
        for name, path in self.entries.items():
            also = self.doubtful.get(name)
            remark = f"  # or {', '.join(map(repr, also))}?" if also else ""
            lines.append(f"    {name!r}: {path!r},{remark}")
        lines.append("})")
        lines += [f"# in the file: {n!r} {list(s)}" for n, s in self.names.items()]
        lines += [f"# in the model: {p!r} {list(s)}" for p, s in self.paths.items()]
        return "\n".join(lines)

    __repr__ = __str__


def draft(path: Any, model: Any) -> Draft:
    """Drafts a table for a file and a model.

    Args:
        path: What `load` reads; only names and shapes are looked at.
        model: The model; also an abstract one.

    Returns:
        A `Draft`; print it, and mend what is wrong: equal shapes and similar names are
        all it goes by. What it could not place is listed below the table.

    Raises:
        WeightsError: If the file is damaged.

    Example:
        >>> weights = {"fc1.weight": jnp.ones((3, 2)), "fc1.bias": jnp.ones(3)}
        >>> model = nnx.Dict(up=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        >>> nnx.weights.draft(weights, model)
        nnx.weights.Mapping({
            'fc1': 'up',
        })
    """
    with sources.open(path) as source:
        theirs = _of_file({name: x.shape for name, x in source.tensors.items()})
        has_fused = any(name.endswith("in_proj_weight") for name in source.tensors)
    ours = _of_model(model, has_fused)
    fits = sorted(
        (
            (_likeness(name, path), name, path)
            for name, tensors in theirs.items()
            for path, part in ours.items()
            if tensors == part and not _contradict(name, path)
        ),
        key=lambda fit: -fit[0],
    )
    chosen: dict[str, str] = {}
    for _, name, path in fits:
        if name not in chosen and path not in chosen.values():
            chosen[name] = path
    doubtful = {
        name: others
        for name, path in chosen.items()
        if (others := _others(name, path, fits))
    }
    return Draft(
        {name: chosen[name] for name in theirs if name in chosen},
        doubtful,
        {
            n: s
            for n, part in theirs.items()
            if n not in chosen
            for n, s in _full(n, part)
        },
        {
            p: s
            for p, part in ours.items()
            if p not in chosen.values()
            for p, s in _full(p, part)
        },
    )


# What is compared: below a prefix, the tensors by name with their shape, and how many
# there are of each index.
class _Part(NamedTuple):
    tensors: frozenset[tuple[str, tuple[int, ...]]]
    counts: tuple[int, ...]


def _full(prefix: str, part: _Part) -> Iterable[tuple[str, tuple[int, ...]]]:
    for name, shape in sorted(part.tensors):
        yield f"{prefix}.{name}" if name else prefix, shape


def _others(name: str, path: str, fits: Sequence[Any]) -> list[str]:
    """The other paths that a name could be, if they are as similar."""
    scores = {p: score for score, n, p in fits if n == name}
    return [
        p for p, score in scores.items() if p != path and score >= scores[path] - 0.1
    ]


_TENSOR_NAMES = {"weight", "bias", "running_mean", "running_var"}


def _of_file(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, _Part]:
    """The tensors of a file by layer, with indices taken out."""
    found: dict[str, dict[str, Any]] = {}
    indices: dict[str, set[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        prefix, _, last = name.rpartition(".")
        if last not in _TENSOR_NAMES or not prefix:
            prefix, last = name, ""
        pattern, numbers = _without_numbers(prefix)
        found.setdefault(pattern, {}).setdefault(last, shape)
        indices.setdefault(pattern, set()).add(numbers)
    return {
        pattern: _Part(frozenset(tensors.items()), _counts(indices[pattern]))
        for pattern, tensors in found.items()
    }


def _without_numbers(name: str) -> tuple[str, tuple[int, ...]]:
    numbers: list[int] = []

    def place(found: re.Match[str]) -> str:
        numbers.append(int(found[0]))
        return "{" + "ijklmn"[min(len(numbers), 6) - 1] + "}"

    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", place, name), tuple(numbers)


def _counts(numbers: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(len({*column}) for column in zip(*numbers, strict=True))


def _of_model(model: Any, has_fused: bool) -> dict[str, _Part]:
    """The layers of a model as PyTorch stores them, with indices taken out."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    indices: dict[str, set[tuple[int, ...]]] = {}
    for path, numbers, tensors in _layers(model, (), (), (), has_fused):
        found.setdefault(path, dict(tensors))
        indices.setdefault(path, set()).update(numbers)
    return {
        path: _Part(frozenset(tensors.items()), _counts(indices[path]))
        for path, tensors in found.items()
    }


def _layers(
    part: Any, path: Any, numbers: Any, stacked: Any, has_fused: bool
) -> Iterable[Any]:
    """Path, indices and tensors of each layer, and of each array beside them."""
    if isinstance(part, stacks.Stack):
        place = "ijklmn"[len(numbers) + len(stacked)]
        below = (*path, "{" + place + "}")
        more = (*stacked, part.length)
        yield from _layers(part.layers, below, numbers, more, has_fused)
        return
    known = torch_layouts.tensors_of(part)
    is_fused = any(len(tensor.attributes) > 1 for tensor in known or ())
    if known is not None and (has_fused or not is_fused):
        yield _spelled(path), _all(numbers, stacked), _shapes(part, known, len(stacked))
        return
    for key, value, is_data in nodes.children(part):
        if is_data is False or tables.is_transient(value):
            continue
        if isinstance(key, int):
            place = "{" + "ijklmn"[len(numbers) + len(stacked)] + "}"
            step, inner = place, (*numbers, key)
        else:
            step, inner = key, numbers
        if isinstance(value, Variable) or nodes.kind_of(value) is Leaf.ARRAY:
            shape = tuple(getattr(value, "shape", ()))[len(stacked) :]
            yield _spelled((*path, step)), _all(inner, stacked), {"": shape}
        else:
            yield from _layers(value, (*path, step), inner, stacked, has_fused)


def _all(numbers: tuple[int, ...], stacked: Sequence[int]) -> list[tuple[int, ...]]:
    """All indices that a layer has, with those of the Stacks that it is in."""
    return [
        (*numbers, *more) for more in itertools.product(*[range(n) for n in stacked])
    ]


def _shapes(layer: Any, known: Sequence[Any], depth: int) -> dict[str, Any]:
    """The shapes that PyTorch has for the tensors of a layer."""
    shapes = {}
    for tensor in known:
        ours = []
        for path in tensor.attributes:
            held = layer
            for name in path:
                held = getattr(held, name)
            ours.append(tuple(held.shape)[depth:])
        text = tensor.layout
        if text is None:
            shapes[tensor.name] = ours[0]
        else:
            layout = layouts.parse(text, {}, len(ours))
            shapes[tensor.name] = layout.solve(ours).file_shape
    return shapes


def _spelled(path: Sequence[Any]) -> str:
    texts = [
        f"[{key}]" if str(key).startswith("{") else paths.dotted((key,)) for key in path
    ]
    joined = "".join(t if t.startswith("[") else f".{t}" for t in texts)
    return joined.removeprefix(".")


def _likeness(name: str, path: str) -> float:
    """How similar a name in a file and a path are, from 0 to 1; the ends count most."""
    theirs, ours = _meanings(name), _meanings(path)
    common = len({*theirs} & {*ours}) / max(1, len({*theirs} | {*ours}))
    ends = difflib.SequenceMatcher(None, theirs[-1:], ours[-1:]).ratio()
    letters = difflib.SequenceMatcher(None, name, path).ratio()
    return 0.5 * common + 0.3 * ends + 0.2 * letters


def _contradict(name: str, path: str) -> bool:
    """Whether one is known to be of attention, and the other of an MLP."""
    theirs, ours = ({_TOPICS.get(x) for x in _meanings(y)} for y in (name, path))
    return bool((theirs - {None}) and (ours - {None}) and not (theirs & ours - {None}))


_TOPICS = {
    word: topic
    for topic, words in (
        ("attention", ("attention", "query", "key", "value", "qkv")),
        ("mlp", ("mlp", "up", "down", "gate")),
    )
    for word in words
}

# What several words together mean.
_PHRASES = {
    "post_attention": "mlp",
    "pre_feedforward": "mlp",
    "input_layernorm": "attention_norm",
    "ln_1": "attention_norm",
    "ln_2": "mlp_norm",
    "norm1": "attention_norm",
    "norm2": "mlp_norm",
}


def _meanings(text: str) -> list[str]:
    for phrase, meaning in _PHRASES.items():
        text = text.replace(phrase, meaning)
    words = re.findall(r"[a-z]+[0-9]*|[0-9]+", re.sub(r"\{\w\}", "", text.lower()))
    return [
        _MEANING.get(word, word) for word in words if word not in ("proj", "weight")
    ]
