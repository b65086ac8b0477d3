"""The table of measurements. A row is one library doing what its group is named for."""

import dataclasses
from functools import partial

import graftree
from benchmarks import (
    accelerator_programs,
    blocks,
    cached_layers,
    calls,
    decoding,
    eager_layers,
    experts,
    forms,
    fresh_models,
    generation,
    gpts,
    groups,
    imports,
    language_model_rows,
    libraries,
    lifted_calls,
    long_runs,
    paths,
    perceptrons,
    planned_memory,
    steps,
)
from benchmarks.groups import (
    HOST_MICROSECONDS,
    MICROSECONDS,
    Group,
    Made,
    Row,
    compared,
)
from benchmarks.libraries import EQUINOX, FLAX, GRAFTREE, RAW


def all_groups(quick: bool = False) -> list[Group]:
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
        *of_a_gpt(12),
        *(equations(of) for of in ("forward", "gradient")),
        importing(),
        peak_memory(),
        *(
            bytes_planned(program, part)
            for program in planned_memory.PROGRAMS
            for part in planned_memory.PARTS
        ),
        *map(trace_per_variable, (100, 300, 900) if quick else (250, 1_000, 4_000)),
        *paths.groups_of(12),
        slowest_calls(2_000 if quick else 10_000),
        *courses(2_000 if quick else 10_000),
        *(group for depth in (4, 50) for group in other_arguments(depth)),
    ]
    if quick:
        large = map(groups.in_default_mode, map(groups.without_peers, large))
        others = map(groups.in_default_mode, others)
    last = (
        *language_model_rows.all_groups(quick),
        *generation.all_groups(),
        *experts.all_groups(),
        *cached_layers.all_groups(),
        *([] if quick else accelerator_programs.all_groups()),
    )
    return [*dispatch, *large, *others, *last]


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
    depth: int, *, donate: bool = False, passing: str = "by position"
) -> Group:
    """One step of Adam on the MLP."""
    how = "donated" if donate else "plain" if passing == "by position" else passing
    return compared(
        f"train step, {depth} layers, {how}",
        *(MICROSECONDS, "flat list", perceptrons, depth),
        donate=donate,
        passing=PASSING[passing],
        target=TRAIN_STEP_TARGETS.get((depth, how), "1.30 raw"),
    )


def train_step_in_place(depth: int) -> Group:
    """The same with parameters in array refs, under plain ``jax.jit``."""
    name = f"train step, {depth} layers, array refs under jax.jit"
    refs = perceptrons.IN_PLACE
    return compared(
        name, MICROSECONDS, "flat list of refs", refs, depth, in_modes=False
    )


def forward_call(depth: int) -> Group:
    """The MLP called."""
    target = {4: "1.25 raw", 50: "1.10 raw"}.get(depth, "")
    name = f"forward call, {depth} layers"
    return compared(name, MICROSECONDS, "flat list", calls, depth, target=target)


def plain_jit_of_state(count: int) -> Group:
    """A State as the argument of ``jax.jit``."""
    return compared(
        f"plain jax.jit(State), {count:,} Variables",
        *(MICROSECONDS, "dict", calls.PLAIN_STATE, count),
        in_modes=False,
        target="1.30 raw",
    )


def plain_jit_of_model(depth: int) -> Group:
    """The MLP called under ``jax.jit``, as a pytree."""
    return compared(
        f"plain jax.jit(model), {depth} layers",
        *(MICROSECONDS, "list of dicts", calls.PLAIN_MODEL, depth),
        in_modes=False,
        target="1.50 raw, 1.00 Equinox" if depth == 50 else "",
    )


def other_arguments(depth: int) -> list[Group]:
    """``nnx.jit`` of what is no object, and `split` of a tuple in the default mode."""
    of_calls = [
        ("forward call with a State", calls.STATE, "1.30 raw"),
        ("step from State to State", calls.STATE_TO_STATE, ""),
        ("forward call with (model, optimizer)", calls.PAIR, "1.30 raw"),
    ]
    split = compared(
        f"split((model, optimizer)), {depth} layers",
        *(HOST_MICROSECONDS, "jax.tree.flatten", calls.SPLIT_PAIR, depth),
        target="0.17 Flax",
    )
    return [
        *(
            compared(
                f"{name}, {depth} layers",
                *(MICROSECONDS, "dicts", made, depth),
                target=target,
            )
            for name, made, target in of_calls
        ),
        groups.in_default_mode(split),
    ]


def step_of_blocks(depth: int) -> Group:
    """One step of Adam on blocks with batch statistics and dropout."""
    name = f"train step, {depth} blocks of Linear, BatchNorm, Dropout"
    return compared(name, MICROSECONDS, "flat list", blocks, depth, target="1.30 raw")


def train_and_evaluate(depth: int) -> Group:
    """A train step and an evaluation of these blocks, which are switched."""
    name = f"train() and a step, eval() and a call, {depth} blocks"
    by_hand, made = "flat list, two functions", blocks.IN_TURNS
    group = compared(name, MICROSECONDS, by_hand, made, depth)
    view = Row(GRAFTREE, "a view", partial(blocks.nnx_view, graftree, depth))
    return groups.with_rows(group, *group.rows, view)


def decode_step(depth: int) -> Group:
    """One token, with a cache."""
    name = f"decode step, {depth} attention layers with a cache"
    return compared(name, MICROSECONDS, "flat lists", decoding, depth)


def eager_cond(depth: int, captured: bool = False) -> Group:
    """A call of ``cond`` on the MLP that no ``jit`` is around."""
    how = "captured" if captured else "an operand"
    name = f"eager cond, {depth} layers, the model is {how}"
    by_hand = "pytree, an operand"
    return compared(name, MICROSECONDS, by_hand, calls.COND, depth, captured)


def eager_layer(name: str) -> Group:
    """A call of a layer that no ``jit`` is around."""
    variant, *others = eager_layers.RAW[name]
    group = compared(
        f"eager call, {name}",
        *(MICROSECONDS, variant),
        *(Made(partial(eager_layers.raw, variant), eager_layers.nnx), name),
        in_modes=False,
        target="1.50 raw",
    )
    raw, *rest = group.rows
    more = [Row(RAW, x, partial(eager_layers.raw, x, name)) for x in others]
    return groups.with_rows(group, raw, *more, *rest)


def eager_transform(name: str) -> Group:
    """A transform that is called outside of a trace, with the same objects again."""
    title = f"eager {name}, {lifted_calls.DEPTH} layers, the same objects again"
    by_hand, made = "a list of arrays", lifted_calls
    return compared(title, MICROSECONDS, by_hand, made, name, target="1.30 raw")


# ---------------------------------------------------------------------------- objects

FORM_TARGETS = {
    **dict.fromkeys(("split", "state", "update", "clone"), "0.17 Flax"),
    "merge": "0.33 Flax",
    "jax.tree.flatten": "0.50 Equinox",
}


def functional_form(name: str, depth: int) -> Group:
    """One function of the functional form, in the default mode."""
    equinox = forms.equinox if name in forms.EQUINOX_NAMES else None
    group = compared(
        f"{name}, {depth} layers",
        *(HOST_MICROSECONDS, "jax.tree", Made(forms.raw, forms.nnx, equinox)),
        *(name, depth),
        in_modes=False,
        target=FORM_TARGETS.get(name, ""),
    )
    variants = {EQUINOX: forms.EQUINOX_NAMES.get(name, "")}
    rows = [
        dataclasses.replace(x, variant=variants.get(x.library, x.variant))
        for x in group.rows
    ]
    return groups.with_rows(group, *rows)


def construct(depth: int) -> Group:
    """Making the MLP."""
    return compared(
        f"construction, {depth} layers",
        *(MICROSECONDS, "its arrays", calls.CONSTRUCTION, depth),
        in_modes=False,
        target="0.50 Flax, 1.30 raw",
    )


# ------------------------------------------------------------------ before and after


def of_a_gpt(depth: int) -> list[Group]:
    """Tracing and lowering of its train step, and how long the program is."""
    by_hand, what = "functions of dicts", f"train step of a GPT, {depth} layers"
    return [
        compared(
            f"trace and lower, {what}",
            *(groups.MILLISECONDS, by_hand, gpts.LOWERING, depth),
            target="1.15 raw",
        ),
        compared(
            f"lines of StableHLO, {what}",
            *(groups.LINES, by_hand, gpts.LINES, depth),
            target="1.03 raw",
        ),
    ]


def equations(of: str) -> Group:
    """The size of what tracing a transformer block gives."""
    return compared(
        f"equations of a transformer block, {of}",
        *(groups.EQUATIONS, "functions of dicts", gpts.EQUATIONS, of),
        in_modes=False,
        target="1.00 raw",
    )


def importing() -> Group:
    """What an import takes when JAX is there."""
    rows = [
        Row(name, "", partial(imports.seconds, libraries.MODULES[name]))
        for name in libraries.installed(GRAFTREE, FLAX, EQUINOX)
    ]
    name, quantity = "import, after import jax", groups.OWN_MILLISECONDS
    return Group(name, quantity, tuple(rows), "0.33 Flax")


def peak_memory() -> Group:
    """How many copies of its state a donated train step needs."""
    name = "peak memory of a donated train step"
    return compared(name, groups.STATES, "flat list", planned_memory.PEAK)


def bytes_planned(program: str, part: str) -> Group:
    """What XLA plans for a compiled program."""
    return compared(
        f"{program}: bytes of {part}",
        *(groups.KILOBYTES, "by hand", planned_memory.BYTES, program),
        part=part,
        target="1.01 raw",
    )


def trace_per_variable(count: int) -> Group:
    """Tracing and lowering of a call, per Variable: the same for any number."""
    name = f"trace and lower a call, {count:,} Variables, per Variable"
    quantity, made = groups.OWN_MICROSECONDS, long_runs.TRACING
    return compared(name, quantity, "flat list", made, count)


def slowest_calls(count: int) -> Group:
    """Whether some calls take much longer than most."""
    return compared(
        f"{count:,} calls, the slowest in a thousand",
        *(groups.TIMES, "flat list", long_runs.SLOWEST, count),
        target="3 x median",
    )


def courses(count: int) -> list[Group]:
    """What calls cost when each has a fresh model."""
    figures = {
        "a call in the first tenth": (groups.COURSE_MICROSECONDS, "first"),
        "a call in the last tenth": (groups.COURSE_MICROSECONDS, "last"),
        "objects that stay, per model": (groups.OBJECTS, "objects"),
        "memory that stays, per model": (groups.BYTES, "resident"),
    }
    return [
        compared(
            f"{count:,} fresh models: {title}",
            *(quantity, "flat list", fresh_models.figure(name), count),
        )
        for title, (quantity, name) in figures.items()
    ]
