"""The table of measurements. A row is one library doing what its group is named for."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from benchmarks import (
    blocks,
    calls,
    construction,
    control_flow,
    decoding,
    eager_layers,
    forms,
    fresh_models,
    gauges,
    gpts,
    imports,
    libraries,
    lifted_calls,
    long_runs,
    memory,
    paths,
    perceptrons,
    plain_jit,
    planned_memory,
    steps,
    switched_modes,
    transformer_blocks,
)
from benchmarks.gauges import Operation
from benchmarks.libraries import EQUINOX, FLAX, GRAFTREE, RAW

MODES = {
    "default": {},
    "graph=True, graph_updates=False": {"graph": True, "graph_updates": False},
    "graph=False": {"graph": False},
}


@dataclasses.dataclass(frozen=True)
class Quantity:
    """What is measured.

    Attributes:
        unit: In which unit it is printed.
        scale: Units per what ``measure`` gives.
        measure: Measures operations that are compared.
        digits: How many are printed after the point.
        has_ratios: Whether ratios mean something: not if it should be zero.
    """

    unit: str
    scale: float
    measure: Callable[[Sequence[Operation], gauges.Effort], list[float]]
    digits: int = 1
    has_ratios: bool = True


MICROSECONDS = Quantity("µs", 1e6, gauges.seconds_per_call)
HOST_MICROSECONDS = Quantity("µs", 1e6, partial(gauges.seconds_per_call, wait=False))
MILLISECONDS = Quantity("ms", 1e3, gauges.seconds_per_call)
OWN_MILLISECONDS = Quantity("ms", 1e3, gauges.readings)
COURSE_MICROSECONDS = Quantity("µs", 1e6, gauges.reading)
EQUATIONS = Quantity("equations", 1, gauges.reading, digits=0)
LINES = Quantity("lines", 1, gauges.reading, digits=0)
STATES = Quantity("x state", 1, gauges.reading, digits=2)
OBJECTS = Quantity("objects", 1, gauges.reading, digits=2, has_ratios=False)
KILOBYTES = Quantity("KB", 1e-3, gauges.reading)
TIMES = Quantity("x median", 1, gauges.readings)
OWN_MICROSECONDS = Quantity("µs", 1e6, gauges.readings)
BYTES = Quantity("bytes", 1, gauges.reading, digits=0, has_ratios=False)


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        library: Who does it; the row of ``RAW`` is what the others are compared with.
        variant: The mode, or nothing.
        set_up: Makes the operation that is measured.
    """

    library: str
    variant: str
    set_up: Callable[[], Operation]


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that do the same, so that their figures can be compared.

    Attributes:
        name: What they do.
        quantity: What is measured of it.
        rows: Who does it.
        target: What we want to reach, as ratios.
    """

    name: str
    quantity: Quantity
    rows: tuple[Row, ...]
    target: str = ""


def groups(quick: bool = False) -> list[Group]:
    """All measurements, in the order in which they are printed.

    Args:
        quick: Leave out rows, since compiling is what takes long: most other modes, and
            the peers of large models. And make fewer models.
    """
    dispatch = [
        *(train_step(depth, donate=d) for depth in (4, 50) for d in (False, True)),
        *(forward_call(depth) for depth in (4, 50)),
    ]
    large = [train_step(200), train_step(200, donate=True), forward_call(200)]
    others = [
        train_step(50, passing="nested in a dict"),
        train_step(50, passing="keywords"),
        train_step_in_place(50),
        step_of_blocks(20),
        *map(train_and_evaluate, (4, 50)),
        decode_step(12),
        eager_cond(4),
        eager_cond(4, captured=True),
        *map(eager_transform, lifted_calls.NAMES),
        *map(plain_jit_of_state, (600, 2_400)),
        *map(plain_jit_of_model, (4, 50)),
        *map(eager_layer, eager_layers.RAW),
        *(functional_form(name, 50) for name in (*forms.FORMS, *forms.TREES)),
        construct(50),
        trace(12),
        program_lines(12),
        *(equations(of) for of in ("forward", "gradient")),
        importing(),
        peak_memory(),
        *(
            bytes_planned(program, part)
            for program in planned_memory.PROGRAMS
            for part in planned_memory.PARTS
        ),
        *map(trace_per_variable, (100, 300, 900) if quick else (250, 1_000, 4_000)),
        *paths_known(12),
        slowest_calls(2_000 if quick else 10_000),
        *courses(2_000 if quick else 10_000),
    ]
    if quick:
        large = map(in_default_mode, map(without_peers, large))
        others = map(in_default_mode, others)
    return [*dispatch, *large, *others]


def in_default_mode(group: Group) -> Group:
    """The group without the rows of the other modes."""
    return _where(group, lambda row: row.variant not in [*MODES][1:])


def without_peers(group: Group) -> Group:
    """The group with raw JAX and Graftree alone."""
    return _where(group, lambda row: row.library in (RAW, GRAFTREE))


def _where(group: Group, is_kept: Callable[[Row], bool]) -> Group:
    return dataclasses.replace(group, rows=tuple(filter(is_kept, group.rows)))


def compared(
    name: str,
    quantity: Quantity,
    by_hand: str,
    raw: Callable[..., Operation],
    nnx: Callable[..., Operation],
    *args: Any,
    equinox: Callable[..., Operation] | None = None,
    in_modes: bool = True,
    target: str = "",
) -> Group:
    """The group of raw JAX, Graftree, Flax NNX and Equinox, as far as installed.

    Args:
        name: What they do.
        quantity: What is measured of it.
        by_hand: How raw JAX does it.
        raw: Makes its operation, of ``args``.
        nnx: Makes that of Graftree or Flax NNX, of the library, ``args`` and a mode.
        *args: What is to be done.
        equinox: Makes that of Equinox, of the library and ``args``.
        in_modes: Whether Graftree and Flax NNX have a row for each mode.
        target: What we want to reach.
    """
    found = [Row(RAW, by_hand, partial(raw, *args))]
    for library, module in libraries.installed(GRAFTREE, FLAX).items():
        for mode, options in (MODES if in_modes else {"": {}}).items():
            found.append(Row(library, mode, partial(nnx, module, *args, **options)))
    if equinox is not None:
        for library, module in libraries.installed(EQUINOX).items():
            found.append(Row(library, "", partial(equinox, module, *args)))
    return Group(name, quantity, tuple(found), target)


# ------------------------------------------------------------------------------ calls

PASSING = {
    "by position": steps.POSITIONAL,
    "nested in a dict": steps.NESTED,
    "keywords": steps.KEYWORDS,
}


TRAIN_STEP_TARGETS = {
    (4, "plain"): "1.10 raw",
    (4, "donated"): "1.20 raw",
    (50, "plain"): "1.05 raw",
    (50, "donated"): "1.05 raw",
}


def train_step(
    depth: int,
    *,
    donate: bool = False,
    passing: str = "by position",
) -> Group:
    """One step of Adam on the MLP."""
    options = {"donate": donate, "passing": PASSING[passing]}
    batch = perceptrons.batch()
    loss = perceptrons.nnx_loss

    def raw():
        params = perceptrons.parameters(depth)
        return steps.raw(perceptrons.loss, params, batch, **options)

    def nnx(library, **mode):
        model = perceptrons.nnx_model(library, depth)
        return steps.nnx(library, loss, model, batch, **options, **mode)

    def equinox(library):
        model = perceptrons.equinox_model(library, depth)
        return steps.equinox(library, loss, model, batch, **options)

    how = "donated" if donate else "plain" if passing == "by position" else passing
    name, target = f"train step, {depth} layers, {how}", TRAIN_STEP_TARGETS
    return compared(
        name,
        MICROSECONDS,
        "flat list",
        raw,
        nnx,
        equinox=equinox,
        target=target.get((depth, how), "1.30 raw"),
    )


def train_step_in_place(depth: int) -> Group:
    """The same with parameters in array refs, under plain ``jax.jit``."""
    batch = perceptrons.batch()

    def raw():
        return steps.raw_refs(perceptrons.loss, perceptrons.parameters(depth), batch)

    def nnx(library):
        make = partial(perceptrons.nnx_model, library, depth)
        return steps.nnx_refs(library, perceptrons.nnx_loss, make, batch)

    name = f"train step, {depth} layers, array refs under jax.jit"
    by_hand = "flat list of refs"
    return compared(name, MICROSECONDS, by_hand, raw, nnx, in_modes=False)


def forward_call(depth: int) -> Group:
    """The MLP called."""
    return compared(
        f"forward call, {depth} layers",
        *(MICROSECONDS, "flat list", calls.raw, calls.nnx, depth),
        equinox=calls.equinox,
        target={4: "1.25 raw", 50: "1.10 raw"}.get(depth, ""),
    )


def plain_jit_of_state(count: int) -> Group:
    """A State as the argument of ``jax.jit``."""
    return compared(
        f"plain jax.jit(State), {count:,} Variables",
        *(MICROSECONDS, "dict", plain_jit.raw_dict, plain_jit.nnx_state, count),
        in_modes=False,
        target="1.30 raw",
    )


def plain_jit_of_model(depth: int) -> Group:
    """The MLP called under ``jax.jit``, as a pytree."""
    return compared(
        f"plain jax.jit(model), {depth} layers",
        *(MICROSECONDS, "list of dicts", plain_jit.raw_call, plain_jit.nnx_call, depth),
        equinox=plain_jit.equinox_call,
        in_modes=False,
        target="1.50 raw, 1.00 Equinox" if depth == 50 else "",
    )


def step_of_blocks(depth: int) -> Group:
    """One step of Adam on blocks with batch statistics and dropout."""
    batch = perceptrons.batch()

    def raw():
        params, states = blocks.parameters(depth), blocks.states(depth)
        return steps.raw(blocks.loss, params, batch, state=states)

    def nnx(library, **mode):
        model = blocks.nnx_model(library, depth)
        loss = perceptrons.nnx_loss
        return steps.nnx(library, loss, model, batch, has_state=True, **mode)

    name = f"train step, {depth} blocks of Linear, BatchNorm, Dropout"
    return compared(name, MICROSECONDS, "flat list", raw, nnx, target="1.30 raw")


def train_and_evaluate(depth: int) -> Group:
    """A train step and an evaluation of these blocks, which are switched."""
    name = f"train() and a step, eval() and a call, {depth} blocks"
    by_hand, made = "flat list, two functions", switched_modes
    group = compared(name, MICROSECONDS, by_hand, made.raw, made.nnx, depth)
    (library,) = libraries.installed(GRAFTREE).values()
    view = Row(GRAFTREE, "a view", partial(made.nnx_view, library, depth))
    return dataclasses.replace(group, rows=(*group.rows, view))


def decode_step(depth: int) -> Group:
    """One token, with a cache."""
    name = f"decode step, {depth} attention layers with a cache"
    by_hand, made = "flat lists", decoding
    return compared(name, MICROSECONDS, by_hand, made.raw, made.nnx, depth)


def eager_cond(depth: int, captured: bool = False) -> Group:
    """A call of ``cond`` on the MLP that no ``jit`` is around."""
    how = "captured" if captured else "an operand"
    name = f"eager cond, {depth} layers, the model is {how}"
    by_hand, made = "pytree, an operand", control_flow
    return compared(name, MICROSECONDS, by_hand, made.raw, made.nnx, depth, captured)


def eager_layer(name: str) -> Group:
    """A call of a layer that no ``jit`` is around."""
    variant, *others = eager_layers.RAW[name]
    group = compared(
        f"eager call, {name}",
        *(MICROSECONDS, variant, partial(eager_layers.raw, variant)),
        *(eager_layers.nnx, name),
        in_modes=False,
        target="1.50 raw",
    )
    raw, *rest = group.rows
    more = [Row(RAW, x, partial(eager_layers.raw, x, name)) for x in others]
    return dataclasses.replace(group, rows=(raw, *more, *rest))


def eager_transform(name: str) -> Group:
    """A transform that is called outside of a trace, with the same objects again."""
    title = f"eager {name}, {lifted_calls.DEPTH} layers, the same objects again"
    by_hand, made = "a list of arrays", lifted_calls
    target = "1.30 raw"
    return compared(
        title, MICROSECONDS, by_hand, made.raw, made.nnx, name, target=target
    )


# ---------------------------------------------------------------------------- objects

FORM_TARGETS = {
    **dict.fromkeys(("split", "state", "update", "clone"), "0.17 Flax"),
    "merge": "0.33 Flax",
    "jax.tree.flatten": "0.50 Equinox",
}


def functional_form(name: str, depth: int) -> Group:
    """One function of the functional form, in the default mode."""
    group = compared(
        f"{name}, {depth} layers",
        *(HOST_MICROSECONDS, "jax.tree", forms.raw, forms.nnx, name, depth),
        equinox=forms.equinox if name in forms.EQUINOX_NAMES else None,
        in_modes=False,
        target=FORM_TARGETS.get(name, ""),
    )
    variants = {EQUINOX: forms.EQUINOX_NAMES.get(name, "")}
    rows = [
        dataclasses.replace(x, variant=variants.get(x.library, x.variant))
        for x in group.rows
    ]
    return dataclasses.replace(group, rows=tuple(rows))


def construct(depth: int) -> Group:
    """Making the MLP."""
    made = construction
    return compared(
        f"construction, {depth} layers",
        *(MICROSECONDS, "its arrays", made.raw, made.nnx, depth),
        equinox=made.equinox,
        in_modes=False,
        target="0.50 Flax, 1.30 raw",
    )


# ------------------------------------------------------------------ before and after


def trace(depth: int) -> Group:
    """Tracing and lowering of the train step of a GPT, as in a first call."""

    def lowering(make):
        return gauges.at_many_depths(lambda: make().lower())

    name = f"trace and lower, train step of a GPT, {depth} layers"
    return _of_a_gpt(name, MILLISECONDS, depth, lowering, "1.15 raw")


def program_lines(depth: int) -> Group:
    """The length of what XLA gets from that."""

    def lines(make):
        return lambda: make().lower().as_text().count("\n")

    name = f"lines of StableHLO, train step of a GPT, {depth} layers"
    return _of_a_gpt(name, LINES, depth, lines, "1.03 raw")


def _of_a_gpt(
    name: str,
    quantity: Quantity,
    depth: int,
    operation_of: Callable[..., Operation],
    target: str = "",
) -> Group:
    def raw():
        return operation_of(gpts.raw(depth))

    def nnx(library, **mode):
        return operation_of(gpts.nnx(library, depth, **mode))

    return compared(name, quantity, "functions of dicts", raw, nnx, target=target)


def equations(of: str) -> Group:
    """The size of what tracing a transformer block gives."""

    def count(block, model):
        function = (
            block if of == "forward" else jax.grad(transformer_blocks.loss(block))
        )
        return partial(
            transformer_blocks.equations, function, model, transformer_blocks.inputs()
        )

    def raw():
        return count(transformer_blocks.raw, transformer_blocks.parameters())

    def nnx(library):
        return count(lambda m, h: m(h), transformer_blocks.nnx_block(library))

    return compared(
        f"equations of a transformer block, {of}",
        *(EQUATIONS, "functions of dicts", raw, nnx),
        in_modes=False,
        target="1.00 raw",
    )


def importing() -> Group:
    """What an import takes when JAX is there."""
    return Group(
        "import, after import jax",
        OWN_MILLISECONDS,
        tuple(
            Row(name, "", partial(imports.seconds, libraries.MODULES[name]))
            for name in libraries.installed(GRAFTREE, FLAX, EQUINOX)
        ),
        "0.33 Flax",
    )


def peak_memory() -> Group:
    """How many copies of its state a donated train step needs."""
    name = "peak memory of a donated train step"
    return compared(name, STATES, "flat list", memory.raw, memory.nnx)


def bytes_planned(program: str, part: str) -> Group:
    """What XLA plans for a compiled program."""
    return compared(
        f"{program}: bytes of {part}",
        *(KILOBYTES, "by hand", planned_memory.raw, planned_memory.nnx, program, part),
        target="1.01 raw",
    )


def trace_per_variable(count: int) -> Group:
    """Tracing and lowering of a call, per Variable: the same for any number."""

    def raw():
        return long_runs.tracing(long_runs.raw_lower(count), count)

    def nnx(library, **mode):
        return long_runs.tracing(long_runs.nnx_lower(library, count, **mode), count)

    name = f"trace and lower a call, {count:,} Variables, per Variable"
    return compared(name, OWN_MICROSECONDS, "flat list", raw, nnx)


def paths_known(depth: int) -> list[Group]:
    """What it costs that the path of the running module is known."""

    def group(title, quantity, raw, make):
        (library,) = libraries.installed(GRAFTREE).values()
        rows = [
            Row(GRAFTREE, f"paths {word}", partial(make, library, is_on))
            for word, is_on in (("off", False), ("on", True))
        ]
        return Group(title, quantity, (raw, *rows))

    def trace(library, is_on):
        return paths.trace(library, depth, is_on)

    title = f"paths of modules: trace the train step of a GPT, {depth} layers"
    lowering = _of_a_gpt(title, MILLISECONDS, depth, lambda f: lambda: f().lower())
    call = Row(RAW, "flat list", partial(calls.raw, paths.LAYERS))
    eager = Row(RAW, "by hand", paths.raw_eager)
    return [
        group(title, MILLISECONDS, lowering.rows[0], trace),
        group("paths of modules: a warm call", MICROSECONDS, call, paths.warm_call),
        group("paths of modules: Linear, eager", MICROSECONDS, eager, paths.eager),
    ]


def slowest_calls(count: int) -> Group:
    """Whether some calls take much longer than most."""

    def raw():
        return long_runs.slowest_calls(long_runs.raw_call, count)

    def nnx(library, **mode):
        make = partial(long_runs.nnx_call, library, **mode)
        return long_runs.slowest_calls(make, count)

    name = f"{count:,} calls, the slowest in a thousand"
    return compared(name, TIMES, "flat list", raw, nnx, target="3 x median")


def courses(count: int) -> list[Group]:
    """What calls cost when each has a fresh model."""

    def course(title, quantity, figure):
        def raw():
            return lambda: getattr(fresh_models.raw(count), figure)

        def nnx(library, **mode):
            return lambda: getattr(fresh_models.nnx(library, count, **mode), figure)

        name = f"{count:,} fresh models: {title}"
        return compared(name, quantity, "flat list", raw, nnx)

    return [
        course("a call in the first tenth", COURSE_MICROSECONDS, "first"),
        course("a call in the last tenth", COURSE_MICROSECONDS, "last"),
        course("objects that stay, per model", OBJECTS, "objects"),
        course("memory that stays, per model", BYTES, "resident"),
    ]
