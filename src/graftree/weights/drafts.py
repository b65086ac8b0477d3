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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
    "mlp ffn feedforward ff, final f last, up fc fc1 w3 wi, down proj fc2 w2, gate w1, "
    "1 input pre before, 2 post after"
)
_MEANING: dict[str, str] = {
    word: words.split()[0] for words in _WORDS.split(", ") for word in words.split()
}


@dataclasses.dataclass(frozen=True)
class Draft:
    """Result of `draft`; prints as the source of a table, for you to complete.

    Attributes:
        entries: The lines for which there is a choice, with the best one: a path, or
            paths and a layout.
        doubtful: Names that something else would also fit, with that.
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

    entries: Mapping[str, Any]
    doubtful: Mapping[str, Sequence[Any]]
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
    words = {name: _with_siblings(name, theirs) for name in theirs}
    chosen, doubtful = _matched(theirs, ours, words)
    entries: dict[str, Any] = {name: chosen[name] for name in theirs if name in chosen}
    theirs = {name: x for name, x in theirs.items() if name not in chosen}
    ours = {path: x for path, x in ours.items() if path not in chosen.values()}
    numbered = {_with_numbers(name, x, shapes): name for name, x in theirs.items()}
    facts = {
        name: (theirs[old][0], tuple(count for count in theirs[old][1] if count > 1))
        for name, old in numbered.items()
    }
    more, also_doubtful = _matched(facts, ours, {n: words[numbered[n]] for n in facts})
    entries |= more
    doubtful |= also_doubtful
    theirs = {
        name: x for name, x in theirs.items() if name not in map(numbered.get, more)
    }
    ours = {path: x for path, x in ours.items() if path not in more.values()}
    names, arrays = _single(theirs), _single(ours)
    own = {path: x for path, x in arrays.items() if path in ours}
    for line in _lines_with_layouts(names, own):
        entries[line.name], *others = line.values
        if others:
            doubtful[line.name] = others
        del names[line.name]
        for path in line.paths:
            del arrays[path]
    return Draft(
        entries,
        doubtful,
        {name: shape for name, (shape, _) in names.items()},
        {path: shape for path, (shape, _) in arrays.items()},
    )


def _matched(
    theirs: Mapping[str, _Facts], ours: Mapping[str, _Facts], words: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """Chooses the path of each name, and lists others that would be as good.

    Args:
        theirs: The facts of the file by name.
        ours: The facts of the model by path.
        words: The text that stands for a name when it is compared.
    """
    fits = [
        (_likeness(words[name], path), name, path)
        for name, tensors in theirs.items()
        for path, layer in ours.items()
        if tensors == layer and not _contradict(words[name], path)
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
    return chosen, doubtful


def _with_siblings(name: str, names: Iterable[str]) -> str:
    """Adds the next names below a number that tells kinds of layers apart.

    As in T5, where ``layer.0`` has ``SelfAttention`` and ``layer_norm``.
    """
    steps = name.split(".")
    ends = [i for i, step in enumerate(steps) if step.isdecimal()]
    if not ends:
        return name
    prefix = ".".join(steps[: ends[-1] + 1]) + "."
    others = {
        x.removeprefix(prefix).split(".")[0] for x in names if x.startswith(prefix)
    }
    return ".".join([*sorted(others - {*steps}), name])


def _with_numbers(name: str, facts: _Facts, names: Iterable[str]) -> str:
    """Puts numbers in for indices that have a single value."""
    pieces = re.split(r"\{\w\}", name)
    pattern = re.compile(r"(\d+)".join(map(re.escape, pieces)) + r"(?:\..*)?")
    numbers = next(match.groups() for x in names if (match := pattern.fullmatch(x)))
    letters = _letters()
    texts = [
        number if count == 1 else next(letters)
        for number, count in zip(numbers, facts[1], strict=True)
    ]
    return "".join(itertools.chain(*zip(pieces, [*texts, ""], strict=True)))


_Shape = tuple[int, ...]
# For a layer: its name or path without indices, the indices, and its tensors.
_Layer = tuple[str, Iterable[tuple[int, ...]], Mapping[str, _Shape]]


# The facts that are compared: below a prefix, the tensors by name with their shape, and
# the number of values of each index.
_Facts = tuple[frozenset[tuple[str, _Shape]], tuple[int, ...]]


# The shape of a single tensor, and the number of values of each of its indices.
_Single = tuple[_Shape, tuple[int, ...]]


def _single(layers: Mapping[str, _Facts]) -> dict[str, _Single]:
    """Returns the tensors of layers one by one."""
    return {
        f"{prefix}.{name}" if name else prefix: (shape, counts)
        for prefix, (tensors, counts) in layers.items()
        for name, shape in sorted(tensors)
    }


class _Line(NamedTuple):
    """A line that would fit.

    Attributes:
        score: How well.
        name: A name in the file.
        paths: The arrays of the model that it needs.
        values: Its right-hand sides, the best first.
    """

    score: float
    name: str
    paths: tuple[str, ...]
    values: list[Any]


def _lines_with_layouts(
    names: Mapping[str, _Single], arrays: Mapping[str, _Single]
) -> list[_Line]:
    """Chooses lines for arrays in other layouts than their tensors, as of experts.

    They may be transposed, an array for each expert in the file, or gate and up of all
    experts in one tensor.
    """
    lines = [line for name in names for line in _possible_lines(name, names, arrays)]
    chosen: dict[str, _Line] = {}
    for line in sorted(lines, key=lambda line: -line.score):
        used = {path for other in chosen.values() for path in other.paths}
        if line.name not in chosen and not used & {*line.paths}:
            chosen[line.name] = line
    return [chosen[name] for name in names if name in chosen]


def _possible_lines(
    name: str, names: Mapping[str, _Single], arrays: Mapping[str, _Single]
) -> Iterator[_Line]:
    shape, counts = names[name]
    for path, (ours, our_counts) in arrays.items():
        values = list[Any]()
        if counts == our_counts:
            values = [(path, x) if x else path for x in _forms(shape, ours)]
        elif ours and counts == (*our_counts, ours[0]):
            values = [(path, x) if x else path for x in _forms(shape, ours[1:])]
        if values and not _contradict(name, path):
            yield _Line(_likeness(name, path), name, (path,), values)
    for pair in itertools.permutations(arrays, 2):
        one, other = map(_meanings, pair)
        is_alike = len(one) == len(other) and sum(map(operator.ne, one, other)) == 1
        if is_alike and arrays[pair[0]] == arrays[pair[1]]:
            ours, our_counts = arrays[pair[0]]
            forms = _fused_forms(shape, ours) if counts == our_counts else []
            words = [x for x in _meanings(name) if x in {*one} ^ {*other}]
            if forms and words == [x for y in (one, other) for x in y if x in words]:
                score = sum(_likeness(name, path) for path in pair) / 2
                yield _Line(score, name, pair, [([*pair], x) for x in forms])


def _forms(shape: _Shape, ours: _Shape) -> list[str | None]:
    """Returns the layouts of a tensor that would be an array; None for equal axes."""
    lead = "".join(f"{x} " for x in "edc"[: len(ours) - 2])
    forms = list[str | None]()
    if len(ours) > 1 and shape == (*ours[:-2], ours[-1], ours[-2]):
        forms.append(f"{lead}o i -> {lead}i o")
    return [*forms, None] if shape == ours else forms


def _fused_forms(shape: _Shape, ours: _Shape) -> list[str]:
    """Returns the layouts of a tensor that would be two equal arrays."""
    if len(shape) != len(ours) or not ours:
        return []
    *lead, last = "edc"[: len(ours) - 1] + "o"
    before = "".join(f"{x} " for x in lead)
    doubled = (*ours[:-1], 2 * ours[-1])
    forms = list[str]()
    if shape == doubled:
        forms = [f"{before}({last} part) -> {before}{last}"]
        forms.append(f"{before}+{last} -> {before}{last}")
    if len(ours) > 1 and shape == (*doubled[:-2], doubled[-1], doubled[-2]):
        *lead, i = lead
        before = "".join(f"{x} " for x in lead)
        forms.append(f"{before}+{last} {i} -> {before}{i} {last}")
        forms.append(f"{before}({last} part) {i} -> {before}{i} {last}")
    return forms


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
    """Whether one is of attention and the other of an MLP, or of both ends of that."""
    for meanings in (_TOPICS, _ENDS):
        theirs, ours = (
            {meanings[x] for x in _meanings(text) if x in meanings}
            for text in (name, path)
        )
        if theirs and ours and not theirs & ours:
            return True
    return False


_TOPICS = {
    **dict.fromkeys("attention query key value qkv".split(), "attention"),
    **dict.fromkeys("mlp up down gate".split(), "mlp"),
}

_ENDS = {"up": "inputs", "gate": "inputs", "down": "outputs"}

# The meanings of several words together.
_PHRASES = {
    "wi_0": "gate",
    "wi_1": "up",
    "densereludense.wo": "mlp.down",
    "densereludense": "mlp",
    "selfattention": "attention",
    "encdecattention": "cross_attention",
    "encoder_attn": "cross_attention",
    "layer_norm": "norm",
    "post_attention": "mlp",
    "pre_feedforward": "mlp",
    "input_layernorm": "attention_norm",
    "ln_1": "attention_norm",
    "ln_2": "mlp_norm",
    "norm1": "attention_norm",
    "norm2": "mlp_norm",
}


def _meanings(text: str) -> list[str]:
    text = text.lower()
    for phrase, meaning in _PHRASES.items():
        text = text.replace(phrase, meaning)
    text = re.sub(r"\{\w\}", "", text)
    words: list[str] = re.findall(r"[a-z]+[0-9]*|[0-9]+", text)
    return [_MEANING.get(x, x) for x in words if x not in ("proj", "weight")]
