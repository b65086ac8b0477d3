"""A first version of a table, from the names in a file and a model.

Names of tensors and paths of layers are compared without their indices, so that all
blocks are one line. The right number, the right shapes and the most similar name come
first. It is a draft: read it, and complete the open parts.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import operator
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from graftree.annotations import Path
from graftree.core import paths, walks
from graftree.core.graph import nodes
from graftree.surgery import stacks
from graftree.weights import block_scales, layouts, sources, tables, torch_layouts

# Names for the same thing here and elsewhere; each word stands for the first.
_WORDS = (
    "query q wq, key k wk, value v wv, out o wo dense, position wpe pos positions, "
    "embed embedding wte tok embeddings tokens, norm ln layernorm rmsnorm, "
    "attention attn selfattn self, blocks layers h block layer, head lm classifier, "
    "mlp ffn feedforward ff, final f last, up fc fc1 w3, down proj fc2 w2, gate w1, "
    "1 input pre before, 2 post after"
)
_MEANING: dict[str, str] = {
    word: words.split()[0] for words in _WORDS.split(", ") for word in words.split()
}


@dataclasses.dataclass(frozen=True)
class Draft:
    """Result of `draft`; prints as the source of a table, for you to complete.

    Attributes:
        entries: The lines for which there is a choice, with the best one.
        doubtful: Names that other paths would also fit, with these paths.
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
        path: A source as for `load`; only names and shapes are read.
        model: The model; also an abstract one.

    Returns:
        A `Draft`; print it, and fix its mistakes: it relies only on equal shapes and
        similar names. Names and paths without a place are listed below the table.

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
        tensors = block_scales.decoded(source).tensors
        shapes = {name: stored.shape for name, stored in tensors.items()}
        has_fused = any(name.endswith("in_proj_weight") for name in tensors)
    theirs, ours = (
        _compared_facts(_of_file(shapes)),
        _compared_facts(_of_model(model, has_fused)),
    )
    fits = [
        (_likeness(name, path), name, path)
        for name, tensors in theirs.items()
        for path, layer in ours.items()
        if tensors == layer and not _contradict(name, path)
    ]
    fits.sort(key=lambda fit: -fit[0])
    chosen: dict[str, str] = {}
    for _, name, path in fits:
        if name not in chosen and path not in chosen.values():
            chosen[name] = path
    doubtful = {}
    for name, path in chosen.items():
        scores = {other: score for score, n, other in fits if n == name}
        least = scores.pop(path) - 0.1
        if others := [other for other, score in scores.items() if score >= least]:
            doubtful[name] = others
    entries = {name: chosen[name] for name in theirs if name in chosen}
    names, rest = _left(theirs, chosen), _left(ours, [*chosen.values()])
    return Draft(entries, doubtful, names, rest)


_Shape = tuple[int, ...]
# For a layer: its name or path without indices, the indices, and its tensors.
_Layer = tuple[str, Iterable[tuple[int, ...]], Mapping[str, _Shape]]


# The facts that are compared: below a prefix, the tensors by name with their shape, and
# the number of values of each index.
_Facts = tuple[frozenset[tuple[str, _Shape]], tuple[int, ...]]


def _left(layers: Mapping[str, _Facts], chosen: Container[str]) -> dict[str, _Shape]:
    """Returns the tensors of the layers that were not chosen."""
    return {
        f"{prefix}.{name}" if name else prefix: shape
        for prefix, (tensors, _) in layers.items()
        if prefix not in chosen
        for name, shape in sorted(tensors)
    }


def _compared_facts(layers: Iterable[_Layer]) -> dict[str, _Facts]:
    """Joins layers that differ only in indices."""
    shapes: dict[str, dict[str, _Shape]] = {}
    indices: dict[str, set[tuple[int, ...]]] = {}
    for pattern, numbers, tensors in layers:
        shapes[pattern] = {**tensors, **shapes.get(pattern, {})}
        indices.setdefault(pattern, set()).update(numbers)
    return {
        pattern: (
            frozenset(tensors.items()),
            tuple(len({*column}) for column in zip(*indices[pattern], strict=True)),
        )
        for pattern, tensors in shapes.items()
    }


_TENSOR_NAMES = {"weight", "bias", "running_mean", "running_var"}


def _of_file(shapes: Mapping[str, _Shape]) -> Iterator[_Layer]:
    """Returns the layers of a file, judged by the names of tensors."""
    kinds = _kinds(shapes)
    for name, shape in shapes.items():
        prefix, _, last = name.rpartition(".")
        if last not in _TENSOR_NAMES or not prefix:
            prefix, last = name, ""
        steps, letters, numbers = prefix.split("."), _letters(), list[int]()
        pattern = [*steps]
        for i, step in enumerate(steps):
            if step.isdecimal() and _without_numbers(steps[:i]) not in kinds:
                numbers.append(int(step))
                pattern[i] = next(letters)
        yield ".".join(pattern), [tuple(numbers)], {last: shape}


def _kinds(names: Iterable[str]) -> set[str]:
    """Returns the prefixes below which numbers tell kinds of layers apart.

    Such as ``layer.0.SelfAttention`` and ``layer.1.DenseReluDense`` of T5: below most
    numbers are other names than below the one before.
    """
    by_prefix: dict[str, dict[int, set[str]]] = {}
    for name in names:
        steps = name.split(".")
        for i, step in enumerate(steps):
            if step.isdecimal():
                numbers = by_prefix.setdefault(_without_numbers(steps[:i]), {})
                rest = _without_numbers(steps[i + 1 :])
                numbers.setdefault(int(step), set()).add(rest)
    kinds = set[str]()
    for prefix, numbers in by_prefix.items():
        pairs = [*itertools.pairwise(numbers[i] for i in sorted(numbers))]
        differ = [2 * len(one & other) < len(one | other) for one, other in pairs]
        if 2 * sum(differ) > len(pairs):
            kinds.add(prefix)
    return kinds


def _without_numbers(steps: Iterable[str]) -> str:
    return ".".join("#" if step.isdecimal() else step for step in steps)


def _letters() -> Iterator[str]:
    """Yields the names of indices, from left to right."""
    return itertools.chain(map("{{{}}}".format, "ijklm"), itertools.repeat("{n}"))


def _of_model(model: Any, has_fused: bool) -> Iterator[_Layer]:
    """Returns the layers of a model as PyTorch stores them, and the arrays beside them.

    All layers of a Stack are below it, with a range as their key.
    """
    above = walks.Above()

    def known(x: Any) -> list[torch_layouts.TorchTensor] | None:
        tensors = torch_layouts.tensors_of(x)
        is_fused = any(len(tensor.attributes) > 1 for tensor in tensors or ())
        return None if is_fused and not has_fused else tensors

    def below(x: Any, path: Path) -> list[tuple[Any, Any]] | None:
        if above(x, path) is not None:
            return None
        if isinstance(x, stacks.Stack):
            return [(_key(part), part.value) for part in stacks.numbered(x)]
        return [] if known(x) is not None else tables.children_of(x)

    for path, x in walks.walk(model, below):
        depth = sum(isinstance(key, range) for key in path)
        tensors = known(x)
        if nodes.is_node_leaf(x):
            shapes = {"": tuple(getattr(x, "shape", ()))[depth:]}
        elif tensors is not None:
            shapes = {tensor.name: _shape(x, tensor, depth) for tensor in tensors}
        else:
            continue
        along = [key for key in path if isinstance(key, int | range)]
        numbers = [key if isinstance(key, range) else (key,) for key in along]
        yield _spelled(path), itertools.product(*numbers), shapes


def _key(part: stacks.Numbered) -> range | int:
    return part.numbers if part.is_stacked else part.numbers.start


def _shape(layer: Any, tensor: torch_layouts.TorchTensor, depth: int) -> _Shape:
    """Returns the shape of a layer's tensor in PyTorch, without the stacked axes."""
    arrays = [operator.attrgetter(path)(layer) for path in tensor.attributes]
    shapes = [tuple(x.shape)[depth:] for x in arrays]
    return layouts.solved(tensor.layout, shapes).file_shape


def _spelled(path: Path) -> str:
    """Puts names of indices into a path, as in tables."""
    letters = _letters()
    texts = [
        f"[{next(letters)}]" if isinstance(key, int | range) else paths.key_text(key)
        for key in path
    ]
    return "".join(texts).removeprefix(".")


def _likeness(name: str, path: str) -> float:
    """Rates how alike a name in a file and a path are, 0 to 1; ends count most."""
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
    **dict.fromkeys("attention query key value qkv".split(), "attention"),
    **dict.fromkeys("mlp up down gate".split(), "mlp"),
}

# The meanings of several words together.
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
    text = re.sub(r"\{\w\}", "", text.lower())
    words: list[str] = re.findall(r"[a-z]+[0-9]*|[0-9]+", text)
    return [_MEANING.get(x, x) for x in words if x not in ("proj", "weight")]
