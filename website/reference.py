"""The pages that list the public names: one page for each topic.

Each name is on the page of the file that defines it, so that a new name of a known file
needs no entry here.
"""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

import graftree as nnx


@dataclasses.dataclass(frozen=True)
class Topic:
    """A page of the reference.

    Attributes:
        title: Its title.
        words: What it is about, in a sentence.
        sections: For each heading the files, below ``graftree``, whose names it has.
    """

    title: str
    words: str
    sections: dict[str, str]


TOPICS = {
    "modules": Topic(
        "Modules and objects",
        "What models are made of. The guide: [objects](../../guides/objects.md).",
        {
            "Modules and views": "core.modules.modules core.modules.containers",
            "Values from within": "core.modules.capturing",
            "Data and static attributes": "core.objects typing",
        },
    ),
    "variables": Topic(
        "Variables",
        "Boxes for values that change. The guide: [objects](../../guides/objects.md).",
        {
            "Types of Variables": "core.variables.variables core.variables.kinds",
            "Metadata and defaults": "core.variables.metadata",
            "Array refs": "core.modules.refs",
        },
    ),
    "graph": Topic(
        "Split, merge, update",
        "An object as a definition and a state, and what can be done with the two.",
        {
            "Functions that take objects": "core.graph.functional core.graph.updates"
            " core.graph.removals",
            "Results": "core.graph.graphdefs builtins",
            "Walking through objects": "core.graph.traversals",
        },
    ),
    "states": Topic(
        "States",
        "Leaves by path: what `nnx.state` and `nnx.split` give.",
        {
            "States": "core.states.states core.states.flat_states",
            "Pure dicts": "core.states.pure_dicts",
        },
    ),
    "filters": Topic(
        "Filters",
        "Selecting Variables; the guide: [filters](../../guides/filters.md).",
        {"Filters": "core.filters"},
    ),
    "randomness": Topic(
        "Randomness",
        "Streams of random keys. The guide: [randomness](../../guides/randomness.md).",
        {
            "Streams": "core.rng.streams",
            "Streams inside models": "core.rng.model_streams",
        },
    ),
    "transforms": Topic(
        "Transforms",
        "JAX's transforms for functions of objects."
        " The guide: [transforms](../../guides/transforms.md).",
        {
            "Compilation": "transforms.compiled",
            "Derivatives": "transforms.derivatives.grad"
            " transforms.derivatives.vjp_jvp transforms.derivatives",
            "Mapping": "transforms.maps",
            "Control flow": "transforms.control_flow",
            "Inspecting without running": "transforms.recordings",
            "How arguments are passed": "transforms.lifting",
            "Modes": "config",
        },
    ),
    "linear": Topic(
        "Linear layers and embeddings",
        "Maps of the last axis, and tables."
        " The guide: [layers](../../guides/layers.md).",
        {"Linear layers": "nn.linear"},
    ),
    "convolutions": Topic(
        "Convolutions",
        "Channels are last. The guide: [layers](../../guides/layers.md).",
        {"Convolutions": "nn.conv"},
    ),
    "pooling": Topic(
        "Pooling",
        "Windows of inputs become one output."
        " The guide: [layers](../../guides/layers.md).",
        {"Pooling": "nn.pooling"},
    ),
    "normalization": Topic(
        "Normalization",
        "Layers with statistics, and those that normalize the weights of a layer."
        " The guides: [layers](../../guides/layers.md),"
        " [statistics under vmap](../../guides/state_under_vmap.md).",
        {"Of inputs": "nn.normalization", "Of weights": "nn.reparametrization"},
    ),
    "dropout": Topic(
        "Dropout",
        "Random zeros. The guide: [randomness](../../guides/randomness.md).",
        {"Dropout": "nn.dropout"},
    ),
    "containers": Topic(
        "Layers in a row",
        "Layers that call layers. The guide: [stacks](../../guides/stacks.md).",
        {"One after the other": "nn.sequential", "One program": "surgery.stacks"},
    ),
    "lora": Topic(
        "LoRA layers",
        "Low-rank adaptations. The guide: [LoRA](../../guides/lora.md).",
        {"LoRA": "nn.lora"},
    ),
    "attention": Topic(
        "Attention",
        "Layers of attention, and its masks."
        " The guide: [attention](../../guides/attention.md).",
        {
            "Layers": "nn.multi_head_attention nn.latent_attention",
            "Functions": "nn.attention",
        },
    ),
    "positions": Topic(
        "Positions",
        "Rotary positions, and biases by distance."
        " The guide: [positions](../../guides/positions.md).",
        {"Rotary positions": "nn.rope", "Biases": "nn.position_biases"},
    ),
    "recurrent": Topic(
        "Recurrent layers",
        "Cells, and layers that run them along time.",
        {"Layers": "nn.recurrent", "Cells": "nn.cells"},
    ),
    "mixtures": Topic(
        "Mixtures of experts",
        "Each token goes to a few experts."
        " The guide: [mixtures](../../guides/mixtures.md).",
        {"Mixtures of experts": "nn.mixtures"},
    ),
    "activations": Topic(
        "Activations",
        "Functions of arrays, most of them JAX's own under a shorter name.",
        {"Layers": "nn.activations", "Functions": "jax"},
    ),
    "initializers": Topic(
        "Initializers",
        "Functions `(key, shape, dtype)` that make the first values of parameters.",
        {"Initializers": "nn.initializers collections.abc"},
    ),
    "training": Topic(
        "Training",
        "The guide: [the training loop](../../guides/training_loop.md).",
        {
            "Optimizers": "training.optimizers",
            "EMA": "training.ema",
            "TrainState": "training.train_states",
            "Early stopping": "training.early_stopping",
            "Logs": "training.run_logs",
        },
    ),
    "metrics": Topic(
        "Metrics",
        "Sums over batches that give a figure at the end.",
        {
            "Averages": "training.metrics.averages",
            "Scores": "training.metrics.scores",
        },
    ),
    "sharding": Topic(
        "Sharding",
        "Models on many devices. The guide: [scale](../../guides/scale.md).",
        {
            "Creation and reports": "sharding",
            "Annotations of Variables": "core.variables.partitioning"
            " core.variables.sharding",
        },
    ),
    "checkpoints": Topic(
        "Checkpoints",
        "The guide: [checkpoints](../../guides/checkpoints.md).",
        {"Checkpoints": "checkpoints"},
    ),
    "weights": Topic(
        "Weights",
        "The guide: [weights](../../guides/weights.md).",
        {"Weights": "weights"},
    ),
    "surgery": Topic(
        "Surgery",
        "The guide: [surgery](../../guides/surgery.md).",
        {"Surgery": "surgery"},
    ),
    "precision": Topic(
        "Precision",
        "The guide: [precision](../../guides/precision.md).",
        {"Precision": "precision"},
    ),
    "decoding": Topic(
        "Decoding",
        "The guides: [decoding](../../guides/decoding.md),"
        " [beam search](../../guides/beam_search.md),"
        " [encoder-decoders](../../guides/encoder_decoder.md).",
        {"Decoding": "decoding"},
    ),
    "memory": Topic(
        "Memory",
        "Accumulation of gradients, and what is stored for the backward pass."
        " The guide: [stacks and remat](../../guides/stacks.md).",
        {"Memory": "memory"},
    ),
    "forecast": Topic(
        "Forecast",
        "What a step costs on hardware that you don't have."
        " The guide: [before you rent](../../guides/forecast.md).",
        {"Forecast": "forecast"},
    ),
    "debugging": Topic(
        "Debugging",
        "The guide: [debugging](../../guides/debugging.md).",
        {"Debugging": "debugging"},
    ),
    "errors": Topic(
        "Errors and warnings",
        "The types. What they say, and what to do: [errors](../errors.md).",
        {"Errors and warnings": "errors"},
    ),
    "interop": Topic(
        "Older names and the bridge to Linen",
        "For existing programs. `nnx.bridge` needs Flax:"
        " [Linen](../../coming_from/linen.md).",
        {
            "Contexts of split and merge": "interop.graph_contexts interop.node_states",
            "Bridge": "interop.bridge",
        },
    ),
}

# What users call of a module that is not a namespace.
_OF_CONFIG = ("update", "temp_flip_flag")

# Where a name belongs that no file of ours defines.
_ELSEWHERE = {"PARTITION_NAME": "core.variables.partitioning"}


def public_names() -> dict[str, Any]:
    """What users can name below ``nnx``, such as ``Linear`` or ``weights.save``."""
    found = {}
    for name in nnx.__all__:
        value = getattr(nnx, name)
        if isinstance(value, types.ModuleType):
            found.update({f"{name}.{n}": v for n, v in _names_of(name, value)})
        elif not name.startswith("__"):
            found[name] = value
    found.update({f"bridge.{n}": v for n, v in _names_of("bridge", nnx.bridge)})
    return found


def _names_of(name: str, module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """The public names of a sub-module, but for those that are also below ``nnx``."""
    if module is nnx.config:
        names = _OF_CONFIG
    elif hasattr(module, "__all__"):
        names = module.__all__
    else:
        # Those of its files, if it is a folder; nothing that it imports from others.
        names = [
            own
            for own, value in vars(module).items()
            if str(getattr(value, "__module__", "")).startswith(module.__name__)
        ]
    for public in names:
        value = getattr(module, public)
        if not (public.startswith("_") or value is getattr(nnx, public, None)):
            yield public, value


def _file_of(name: str, value: Any) -> str:
    """The file that defines a name, below ``graftree``; or the package it is from."""
    if name.startswith("initializers."):
        return "nn.initializers"
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    module = getattr(value, "__module__", "")
    if module.startswith("graftree."):
        return module.removeprefix("graftree.")
    return module.split("._")[0] if module != "jax.numpy" else "jax"


def sections_of(topic: Topic) -> dict[str, list[str]]:
    """For each heading of a page its names, in the order of the files it lists."""
    found = places()
    return {
        heading: [name for name, at in found.items() if at == (topic.title, heading)]
        for heading in topic.sections
    }


def places() -> dict[str, tuple[str, str]]:
    """For each public name the title and the heading under which it is.

    Raises:
        LookupError: If a name has no place; names it.
    """
    files = {
        file: (topic.title, heading)
        for topic in TOPICS.values()
        for heading, text in topic.sections.items()
        for file in text.split()
    }
    owners = {}
    for name, value in sorted(public_names().items(), key=_order):
        file = _file_of(name, value)
        owner = max((f for f in files if _is_within(file, f)), key=len, default=None)
        if owner is None:
            raise LookupError(
                f"website/reference.py has no page for nnx.{name} ({file})"
            )
        owners[name] = owner
    in_order = sorted(owners, key=lambda name: [*files].index(owners[name]))
    return {name: files[owners[name]] for name in in_order}


def _order(item: tuple[str, Any]) -> tuple[str, bool, bool, int, str]:
    """The file and line of a name, then the name; JAX's own only by name.

    Type variables come after what uses them, as do types of Variables where these are
    not the subject: `OptState` after `Optimizer`.
    """
    name, value = item
    file = _file_of(name, value)
    is_of_types = isinstance(value, typing.TypeVar)
    is_variable = isinstance(value, type) and issubclass(value, nnx.Variable)
    is_used = is_variable and not file.startswith("core.variables")
    is_ours = getattr(value, "__module__", "").startswith("graftree.")
    line = _line(value) if is_ours else 0
    return file, is_of_types, is_used, line, name


@functools.cache
def _line(value: Any) -> int:
    try:
        return inspect.getsourcelines(value)[1]
    except (TypeError, OSError):  # such as a type variable
        return 0


def _is_within(file: str, owner: str) -> bool:
    return file == owner or file.startswith(f"{owner}.")


def text_of(topic: Topic) -> str:
    """The page of a topic, for mkdocstrings."""
    parts = [f"# {topic.title}", topic.words]
    for heading, names in sections_of(topic).items():
        if len(topic.sections) > 1:
            parts.append(f"## {heading}")
        parts += [entry(name, public_names()[name]) for name in names]
    return "\n\n".join(parts) + "\n"


def entry(name: str, value: Any) -> str:
    """A name with its signature, its docstring and its source."""
    anchor = f'<span id="nnx.{name}"></span>'
    module = getattr(value, "__module__", "") or ""
    plain = name.split(".")[-1]
    if module.startswith(("jax", "graftree.nn.initializers")):
        return _borrowed(name, value)
    is_defined = module.startswith("graftree.")
    is_defined = is_defined and getattr(value, "__qualname__", None) == plain
    path = f"{module}.{plain}" if is_defined else f"graftree.{name}"
    return f"{anchor}\n\n::: {path}\n    options:\n      heading: nnx.{name}\n" + (
        f"      toc_label: {name}"
    )


def _borrowed(name: str, value: Any) -> str:
    """A function that is JAX's own: its signature, its first sentence, its page."""
    words = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
    package = "jax.nn.initializers" if "." in name else _package(value)
    plain = name.split(".")[-1]
    try:
        signature = str(inspect.signature(value))
    except (TypeError, ValueError):
        signature = "(...)"
    return (
        f'### nnx.{name} {{ #nnx.{name} data-toc-label="{plain}" }}\n\n'
        f"```python\n{plain}{signature}\n```\n\n{words}\n\n"
        f"It is [`{package}.{plain}`]"
        f"(https://docs.jax.dev/en/latest/_autosummary/{package}.{plain}.html)."
    )


def _package(value: Any) -> str:
    """Where JAX documents one of its functions."""
    if value.__module__.startswith("jax._src.nn"):
        return "jax.nn"
    return "jax.numpy" if value.__module__ == "jax.numpy" else "jax.scipy.special"


def page_of() -> dict[str, str]:
    """For each public name the page that has it."""
    pages = {topic.title: page for page, topic in TOPICS.items()}
    return {name: pages[title] for name, (title, _) in places().items()}


def index() -> str:
    """The first page of the reference: all topics with their names."""
    rows = ["# API", "Each public name is on one page.", "| page | names |\n|---|---|"]
    pages = page_of()
    for page, topic in TOPICS.items():
        names = ", ".join(
            f"[{name}]({page}.md#nnx.{name})" for name in pages if pages[name] == page
        )
        rows[-1] += f"\n| [{topic.title}]({page}.md) | {names} |"
    return "\n\n".join(rows) + "\n"
