"""The sentences and rows of pages that quote what was measured: see `figures.py`.

In a sentence ``#`` stands for a figure. A new one is a new line of ``QUOTATIONS``.
"""

import dataclasses
import functools
import re

from benchmarks.libraries import EQUINOX, FLAX, GRAFTREE, RAW

NUMBER = r"(\d[\d,]*(?:\.\d+)?)"


@dataclasses.dataclass(frozen=True)
class Quotation:
    """A sentence of a page with figures.

    Attributes:
        page: The path of the page, from the root.
        words: The sentence, with ``#`` for a figure.
        figures: The group and the label of the row of each figure.
        scale: What a figure is multiplied by: 1e-3 if the page has ms for µs.
    """

    page: str
    words: str
    figures: tuple[tuple[str, str], ...]
    scale: float = 1

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """Finds the sentence, over line ends, too."""
        parts = [re.escape(part) for part in self.words.split("#")]
        return re.compile(NUMBER.join(parts).replace(r"\ ", r"\s+"))


def _row(
    label: str, group: str, *labels: str, unit: str = "µs", scale: float = 1
) -> Quotation:
    """A row of a table of the page on performance, of one group."""
    words = " | ".join([f"| {label}", *[f"# {unit}"] * len(labels)]) + " |"
    return Quotation(PERFORMANCE, words, tuple((group, x) for x in labels), scale)


def _in_performance(
    words: str, *figures: tuple[str, str], scale: float = 1
) -> Quotation:
    return Quotation(PERFORMANCE, words, figures, scale)


PERFORMANCE = "docs/look_up/performance.md"
PROFILING = "docs/guides/profiling.md"
ISSUES = "docs/look_up/issues.md"
FORECAST = "docs/guides/forecast.md"

STEP = "train step, 50 layers, plain"
OURS, FLAT, FLAX_DEFAULT = (
    f"{GRAFTREE}, default",
    f"{RAW}, flat list",
    f"{FLAX}, default",
)
ALL = FLAT, OURS, EQUINOX, FLAX_DEFAULT
STEP_FIGURES = tuple((STEP, label) for label in (OURS, FLAT, EQUINOX, FLAX_DEFAULT))
HEADLINE = (
    "50 small layers takes # ms; `jax.jit` on a flat list of the same arrays takes #,"
    " Equinox # and Flax NNX #"
)
SWITCHED = "train() and a step, eval() and a call, 4 blocks"
FRESH = "10,000 fresh models: a call in the last tenth"
SCAN = "eager scan, 4 layers, the same objects again"
STATE = "forward call with a State, 50 layers"
PLAIN_STATE = "plain jax.jit(State), 600 Variables"
PLAIN_MODEL = "plain jax.jit(model), 50 layers"
FORMS = "split, 50 layers", "merge, 50 layers", "update, 50 layers"
UNFLATTEN = "jax.tree.unflatten, 50 layers"
IMPORT = "import, after import jax"
LANGUAGE = "language model, one device, "
WARM, EAGER = "paths of modules: a warm call", "paths of modules: Linear, eager"
TRACED = "paths of modules: trace the train step of a GPT, 12 layers"


def _of_paths(words: str, group: str, raw: str, scale: float = 1) -> Quotation:
    labels = raw, "Graftree, paths off", "Graftree, paths on"
    return Quotation(PROFILING, words, tuple((group, x) for x in labels), scale)


def _of_issues(label: str, unit: str, problem: str) -> Quotation:
    words = f"{label} | # {unit} | # {unit} |"
    group = f"{problem}: {label}"
    return Quotation(ISSUES, words, ((group, FLAX), (group, GRAFTREE)))


def _of_accelerators(target: str, model: str) -> Quotation:
    """The two rows of a target and a model; compilers for GPUs count no bytes."""
    counts_bytes = target.startswith("v")
    columns = ["operations", *["bytes accessed"] * counts_bytes]
    columns += ["temporaries", "kernels"]
    cells = f"| # Gflop | {'# GB' if counts_bytes else 'unknown'} | # MiB | # |"
    words = f"| `{target}`, {model} | by hand {cells} | | Graftree {cells}"
    groups = [f"accelerators, {target}, {model}: {column}" for column in columns]
    figures = [(group, label) for label in (RAW, GRAFTREE) for group in groups]
    return Quotation(FORECAST, words, tuple(figures))


# Figures that a page repeats from a report of somebody else.
OF_OTHERS = {ISSUES: ("41 ms", "28 ms", "12.7 GB")}

QUOTATIONS = [
    *(
        Quotation(x, HEADLINE, STEP_FIGURES, 1e-3)
        for x in ("README.md", "docs/index.md")
    ),
    Quotation(
        "docs/start/compared.md",
        "`jax.jit` on arrays takes # ms ([page](../look_up/measurements.md)) | # ms"
        " | # ms | # ms |",
        tuple((STEP, x) for x in (FLAT, OURS, FLAX_DEFAULT, EQUINOX)),
        1e-3,
    ),
    Quotation(
        "docs/coming_from/equinox.md",
        "with 50 layers, # ms in Equinox, # in Graftree, and # in `jax.jit`",
        tuple((STEP, x) for x in (EQUINOX, OURS, FLAT)),
        1e-3,
    ),
    Quotation(
        "docs/coming_from/flax_nnx.md",
        "| a jitted training step of 50 small layers | # ms | # ms",
        tuple((STEP, x) for x in (FLAX_DEFAULT, OURS)),
        1e-3,
    ),
    _row("a training step, 4 layers", "train step, 4 layers, plain", *ALL),
    _row("a training step, 4 layers, donated", "train step, 4 layers, donated", *ALL),
    _row("a training step, 50 layers", STEP, *ALL),
    _row("a training step, 200 layers", "train step, 200 layers, plain", *ALL),
    _row("a forward call, 4 layers", "forward call, 4 layers", *ALL),
    _row("a forward call, 50 layers", "forward call, 50 layers", *ALL),
    _row(
        "a training step, 20 blocks of Linear, BatchNorm, Dropout",
        "train step, 20 blocks of Linear, BatchNorm, Dropout",
        *(FLAT, OURS, FLAX_DEFAULT),
    ),
    _row(
        "a decoding step, 12 layers of attention with a cache",
        "decode step, 12 attention layers with a cache",
        *(f"{RAW}, flat lists", OURS, FLAX_DEFAULT),
    ),
    _in_performance(
        "takes # µs for it, raw JAX #, Flax NNX #. Keep",
        *((FRESH, label) for label in (OURS, FLAT, FLAX_DEFAULT)),
    ),
    _in_performance(
        "[tree mode](../guides/transforms.md): # µs", (FRESH, "Graftree, graph=False")
    ),
    _in_performance(
        "with 4 blocks # ms for a step and an evaluation, raw JAX #.",
        *((SWITCHED, label) for label in (OURS, "raw JAX, flat list, two functions")),
        scale=1e-3,
    ),
    _in_performance(
        "costs nothing of this: # ms", (SWITCHED, "Graftree, a view"), scale=1e-3
    ),
    _in_performance(
        "An eager `scan` over 4 layers takes # ms, raw JAX #, Flax NNX # (in tree"
        " mode #,",
        *(
            (SCAN, label)
            for label in (
                *(OURS, "raw JAX, a list of arrays", FLAX_DEFAULT),
                "Flax NNX, graph=False",
            )
        ),
        scale=1e-3,
    ),
    _in_performance(
        "50 layers take # µs, a dict of the arrays #, Flax NNX #.",
        *((STATE, label) for label in (OURS, "raw JAX, dicts", FLAX_DEFAULT)),
    ),
    _in_performance(
        "A State of 600 Variables takes # µs, a dict of their arrays #, Flax NNX #.",
        *((PLAIN_STATE, label) for label in (GRAFTREE, "raw JAX, dict", FLAX)),
    ),
    _in_performance(
        "A model of 50 layers takes # µs, lists of dicts #, Equinox #.",
        *((PLAIN_MODEL, x) for x in (GRAFTREE, "raw JAX, list of dicts", EQUINOX)),
    ),
    *(
        _row(f"`{name}`", f"eager call, {name}", f"{RAW}, {raw}", GRAFTREE, FLAX)
        for name, raw in {
            "Linear": "jnp",
            "LayerNorm": "jnp",
            "BatchNorm": "jnp",
            "MultiHeadAttention": "jnp.einsum",
        }.items()
    ),
    _row(
        "make 50 layers",
        "construction, 50 layers",
        *(f"{RAW}, its arrays", GRAFTREE, EQUINOX, FLAX),
        unit="ms",
        scale=1e-3,
    ),
    _row(
        "trace and lower the training step of a 12-layer GPT",
        "trace and lower, train step of a GPT, 12 layers",
        *(f"{RAW}, functions of dicts", OURS, FLAX_DEFAULT),
        unit="ms",
    ),
    *(
        _row(label, LANGUAGE + group, RAW, GRAFTREE, FLAX, unit=unit)
        for label, group, unit in [
            ("compile a language model of 12 layers", "unrolled: compile", "ms"),
            (
                "trace and lower it as a `Stack`",
                "a Stack: trace and lower 12 layers",
                "ms",
            ),
            (
                "train the [language model](../examples/language_model.md), tokens/s",
                "unrolled: speed",
                "tokens/s",
            ),
            ("the same as a `Stack`", "a Stack: speed", "tokens/s"),
        ]
    ),
    _in_performance(
        "The import takes # ms after that of JAX, Equinox's # and Flax NNX's #.",
        *((IMPORT, x) for x in (GRAFTREE, EQUINOX, FLAX)),
    ),
    _in_performance(
        "needs # times its state", ("peak memory of a donated train step", OURS)
    ),
    _in_performance(
        "makes # tokens/s of one prompt, by hand #; of 8 prompts of different lengths"
        " #, by hand #.",
        *(
            (f"greedy decoding, {prompts}", x)
            for prompts in ("1 prompt", "8 prompts of different lengths")
            for x in (GRAFTREE, RAW)
        ),
    ),
    _in_performance(
        "`nnx.split` of 50 layers takes # µs, `nnx.merge` #, `nnx.update` #;",
        *((x, GRAFTREE) for x in FORMS),
    ),
    _in_performance("Flax NNX takes #, # and #.", *((x, FLAX) for x in FORMS)),
    _in_performance(
        "rebuilds a model from its leaves in # µs; `jax.tree.unflatten` of ours"
        " takes #.",
        *((UNFLATTEN, x) for x in (EQUINOX, GRAFTREE)),
    ),
    _of_paths(
        "| a compiled call, warm: it runs no method | # µs | # µs | # µs |", WARM, FLAT
    ),
    _of_paths(
        "| `Linear`, eager; off: its function itself | # µs | # µs | # µs |",
        *(EAGER, "raw JAX, by hand"),
    ),
    _of_paths(
        "| trace the train step of a 12-layer GPT | # s | # s | # s |",
        *(TRACED, "raw JAX, functions of dicts", 1e-3),
    ),
    *(
        _of_issues(label, unit, problem)
        for problem, label, unit in [
            ("Decoding bound by the host", "nnx.jit of 50 layers, time", "µs"),
            ("Decoding bound by the host", "jax.jit of their State, time", "µs"),
            ("Quadratic tracing", "800 writes, time per write", "µs"),
            ("One step in a hundred is slow", "median step", "ms"),
            ("One step in a hundred is slow", "slowest of 300 steps", "ms"),
            ("Hidden recompiles, control flow", "a call of cond", "ms"),
        ]
    ),
    *(
        _of_accelerators(target, model)
        for target in ("v5e:1x1", "h100:1")
        for model in ("GPT", "ViT", "conv net")
    ),
]
