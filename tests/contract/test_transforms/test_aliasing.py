"""Identity, aliases, closures, static values (contract, sections 1.3 to 1.5)."""

import contextlib
import dataclasses
import enum
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import zoo
from tests.comparisons import raises, unchanged
from tests.contract.test_transforms import matrix
from tests.modes import BY_NAME, GRAPH_UPDATES

SHARING = ("graph_updates", "graph")


def nested():
    """Two Modules that share a Variable, at the paths ``a`` and ``b.c``."""
    shared = nnx.Param(jnp.array([1.0, 2.0]))
    return zoo.Box(a=shared), zoo.Box(b=zoo.Box(c=shared))


# --------------------------------------------------------------------------- aliases in


def pins_aliases(row):
    """Whether the contract has the row refuse aliases in graph mode too."""
    return row.transform in ("eval_shape", "custom_vjp")


@matrix.cases(lambda row: not pins_aliases(row), modes=SHARING)
def test_what_arguments_share_is_one_object_inside(case):
    """A Module in two, a Variable of two that is one itself, a cycle in one."""

    def f(model, tree, a, b, variable, cyclic, x):
        again = tree["m"][0]
        assert model is again and model.a is again.a
        matrix.write(model.a, model.a + x)
        matrix.write(again.a, again.a + x)
        assert a.a is b.b.c and b.b.c is variable
        matrix.write(a.a, a.a + x)
        matrix.write(variable, variable * 2)
        assert cyclic.a is cyclic.b.c and cyclic.me is cyclic
        matrix.write(cyclic.a, cyclic.a + x)
        matrix.write(cyclic.b.c, cyclic.b.c + x)

    model, (a, b), cyclic = zoo.Parts(), nested(), nested()[1]
    cyclic.a, cyclic.me = cyclic.b.c, cyclic
    case(f, model, {"m": [model]}, a, b, a.a, cyclic)
    new = [[21.0, 42.0], [22.0, 44.0], [21.0, 42.0]]
    expected = new if case.keeps_values else [[1.0, 2.0]] * 3
    assert [matrix.flat(m.a) for m in (model, a, cyclic)] == expected
    assert b.b.c is a.a
    assert cyclic.a is cyclic.b.c and cyclic.me is cyclic
    assert not matrix.tracers_in(cyclic)
    matrix.check_usable(case, model, a)


def check_report(error, case, first, second):
    """Asserts all facts of an alias error (section 1.4)."""
    message, name = str(error.value), case.row.transform
    lines = re.findall(r"^  - (\S+)$", message, re.MULTILINE)
    assert message.startswith("Duplicate Param") and "found at paths" in message
    assert len(lines) == 2
    assert re.search(f"{first}$", lines[0]) and re.search(f"{second}$", lines[1])
    expected = f"nnx.{name} with graph_updates=False does not support Variable aliasing"
    assert expected in message and "nnx.clone" in message
    assert (f"nnx.compat.{name}" in message) <= hasattr(nnx.compat, name)


@matrix.cases(modes=("tree",))
def test_trees_refuse_aliases_and_name_both_paths(case):
    a, b = nested()
    with unchanged(a, b), pytest.raises(ValueError, match="Duplicate") as error:
        case(lambda a, b, x: None, a, b)
    inputs = case.row.inputs
    check_report(error, case, rf"{inputs}(\[\d\])*\.a", rf"{inputs}(\[\d\])*\.b\.c")
    matrix.check_usable(case, a)


@matrix.cases(modes=("tree",))
def test_trees_refuse_a_variable_twice_in_one_object_and_cycles(case):
    model = nested()[1]
    model.a = model.b.c
    with pytest.raises(ValueError, match="Duplicate Param"):
        case(lambda m, x: None, model)
    model = zoo.Parts()
    model.me = model
    with pytest.raises((ValueError, RecursionError)) as error:
        case(lambda m, x: None, model)
    assert not isinstance(error.value, RecursionError) or "Box" in str(error.value)


def test_eval_shape_refuses_aliases_without_graph_updates(value_mode):
    model = zoo.Parts()
    with pytest.raises(ValueError, match="Duplicate Param"):
        nnx.eval_shape(lambda a, b: None, model, model, **value_mode)
    with pytest.raises(ValueError, match="Duplicate Param"):
        nnx.eval_shape(lambda a, b: None, a=model, b=model, **value_mode)
    with pytest.raises(ValueError, match="Duplicate Param"):
        nnx.eval_shape(lambda pair: None, [model, model], **value_mode)


def test_custom_vjp_refuses_aliases_without_graph_updates(value_mode):
    f = nnx.custom_vjp(lambda a, b: a[...] * b[...], nondiff_argnums=(1,), **value_mode)
    f.defvjp(lambda a, b: (f(a, b), None), lambda b, residual, g: (g,))
    variable = nnx.Param(jnp.array(1.0))
    with pytest.raises(ValueError, match="Duplicate Param"):
        f(variable, variable)


@matrix.cases(without=matrix.SLOW)
def test_arrays_and_objects_without_variables_may_be_shared(case):
    def f(a, b, x, y, z):
        assert (a is b) is case.shares
        return x + y + z

    case(f, empty := zoo.Box(k=1), empty, matrix.X, matrix.X)
    assert empty.k == 1


# -------------------------------------------------------------------------- aliases out

# Where an output is found; rows with two outputs have that of the function second.
OUT = r"\.out(\[1\])?"
# Ways to return what came in, and the path of the first Variable in it.
RETURNS = {
    "object": (lambda m, x: m, r"\.a"),
    "part": (lambda m, x: m.left, r"\.w"),
    "Variable": (lambda m, x: (x, m.a), r"\[1\]"),
    "holder": (lambda m, x: {"new": zoo.Box(b=x * 2, c=m.a)}, r"\['new'\]\.c"),
}
# What a row gets back of a carry or a broadcast argument can't have its axes.
_OTHER_AXES = ("scan carry", "scan broadcast")


@matrix.cases(
    lambda row: row.has_output,
    modes=("graph_updates",),
    without=("eval_shape", "cached_partial", *_OTHER_AXES),
)
def test_returned_inputs_are_the_objects_of_the_caller(case):
    model = zoo.Parts()
    out = case(lambda m, x: {name: f(m, x) for name, (f, _) in RETURNS.items()}, model)
    assert out["object"] is model and out["part"] is model.left
    assert out["Variable"][1] is out["holder"]["new"].c is model.a
    assert matrix.flat(out["holder"]["new"].b) == [20.0, 40.0]
    matrix.check_usable(case, model)


@matrix.cases(lambda row: row.has_output, modes=matrix.PLAIN)
@pytest.mark.parametrize("name", ["object", "holder"])
def test_returned_inputs_are_refused_without_graph_updates(name, case):
    f, path = RETURNS[name]
    model = zoo.Parts()
    with unchanged(model), pytest.raises(ValueError, match="Duplicate") as error:
        case(f, model)
    inputs = rf"({case.row.inputs}|\.carry)"
    check_report(error, case, rf"{inputs}(\[0\])*\.(a|left\.w)", OUT + path)
    matrix.check_usable(case, model)


@matrix.cases(lambda row: row.has_output, modes=matrix.PLAIN)
def test_returned_inputs_without_variables_are_copies(case):
    model = zoo.Box(inner=zoo.Box(k=3), a=nnx.Param(matrix.X))
    out = case(lambda m, x: m.inner, model)
    assert out is not model.inner and out.k == 3


@matrix.cases(lambda row: row.has_output, modes=SHARING, without=matrix.SLOW)
def test_new_object_at_two_places_is_one_object(case):
    def f(m, x):
        new = zoo.Box(a=nnx.Param(x * 2))
        return new, {"again": new, "part": new.a}

    first, rest = case(f, zoo.Parts())
    assert rest["again"] is first and rest["part"] is first.a


@matrix.cases(lambda row: row.has_output, modes=("tree",))
def test_trees_refuse_a_new_object_at_two_places(case):
    def f(m, x):
        new = zoo.Box(a=nnx.Param(x * 2))
        return new, {"again": new}

    with pytest.raises(ValueError, match="Duplicate") as error:
        case(f, zoo.Parts())
    check_report(error, case, rf"{OUT}\[0\]\.a", rf"{OUT}\[1\]\['again'\]\.a")


@pytest.mark.parametrize("part", [lambda m: m, lambda m: m.left, lambda m: m.a])
def test_eval_shape_returns_inputs_as_new_objects(part):
    model = zoo.Parts()
    out = nnx.eval_shape(part, model, **GRAPH_UPDATES)
    assert type(out) is type(part(model)) and out is not part(model)
    shapes = [leaf.shape for leaf in jax.tree.leaves(out)]
    assert shapes and set(shapes) == {(2,)}
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(out))


# ----------------------------------------------------------------------------- closures


@matrix.cases(without=matrix.SLOW)
def test_captured_objects_can_be_read(case):
    def add(m, x):
        matrix.write(m.a, m.a + outer.a.sum() + outer.left.w[0] * outer.k)

    model, outer = zoo.Parts(), zoo.Parts()
    with unchanged(outer):
        case(add, model)
    assert matrix.flat(model.a) == ([11.0, 12.0] if case.keeps_values else [1.0, 2.0])


WRITES = {
    "value": (
        lambda m, x: matrix.write(m.a, x),
        "Cannot mutate Param from a different trace",
    ),
    "part of a value": (lambda m, x: m.a.__setitem__(0, 1.0), "Cannot mutate Param"),
    "metadata": (lambda m, x: m.a.set_metadata(tag="y"), "Cannot mutate Param"),
    "attribute": (
        lambda m, x: setattr(m, "array", x),
        "Cannot mutate 'Parts' from different trace level",
    ),
    "static": (lambda m, x: setattr(m, "k", 5), "Cannot mutate 'Parts'"),
    "deletion": (lambda m, x: delattr(m, "b"), "Cannot mutate 'Parts'"),
    "container": (lambda m, x: m.left.update(n=1), "Cannot mutate 'Dict'"),
}


@matrix.cases(lambda row: row.traces)
def test_captured_objects_can_not_be_written(case):
    model, outer = zoo.Parts(), zoo.Parts()
    refused = nnx.errors.TraceContextError

    def f(m, x):
        matrix.write(m.a, m.a + x)
        for change, message in WRITES.values():
            with pytest.raises(refused, match=message):
                change(outer, x)
        matrix.write(outer.a, x)

    message = "Cannot mutate Param"
    with unchanged(model, outer), pytest.raises(refused, match=message):
        case(f, model)
    matrix.check_usable(case, outer)


@matrix.cases(lambda row: row.traces and row.has_output, modes=matrix.PLAIN)
def test_captured_variables_can_not_be_returned(case):
    outer = zoo.Parts()
    with pytest.raises(ValueError, match="Cannot return captured Variable") as error:
        case(lambda m, x: (x, zoo.Box(c=outer.a)), zoo.Parts())
    message = str(error.value)
    assert "Param" in message and f"nnx.{case.row.transform}" in message
    assert re.search(rf"Found at path: {OUT}\[1\]\.c$", message, re.MULTILINE)
    matrix.check_usable(case, outer)


STRICT = ("jit", "vmap", "pmap", "scan", "shard_map")


@matrix.cases(lambda row: row.transform in STRICT, modes=("graph_updates",))
@pytest.mark.parametrize("part", [lambda m: m, lambda m: m.a])
def test_captured_objects_can_not_be_returned(part, case):
    outer = zoo.Parts()
    message = "Cannot extract graph node from different trace level"
    with pytest.raises(ValueError, match=message):
        case(lambda m, x: part(outer), zoo.Parts())
    matrix.check_usable(case, outer)


COPYING = ("grad", "remat", "cond", "switch", "checkify", "eval_shape")


@matrix.cases(lambda row: row.transform in COPYING, modes=("graph_updates",))
def test_captured_objects_are_returned_as_copies(case):
    outer = zoo.Parts()
    out = case(lambda m, x: outer, zoo.Parts())
    assert type(out) is zoo.Parts and out is not outer and out.a is not outer.a
    if case.row.transform != "eval_shape":
        assert matrix.flat(out.a) == [1.0, 2.0]
    matrix.check_usable(case, outer)


# -------------------------------------------------------- captured objects as arguments

OUTER = {
    "jax.jit": lambda f: jax.jit(f)(matrix.X),
    "jax.eval_shape": lambda f: jax.eval_shape(f, matrix.X),
    "jax.vmap": lambda f: jax.vmap(f)(jnp.stack([matrix.X, matrix.X])),
    "jax.grad": lambda f: jax.grad(lambda x: (f(x), x.sum())[1])(matrix.X),
    "nnx.jit": lambda f: nnx.jit(f)(matrix.X),
}


# The rows that stand for all others where each outer transform is tried.
TYPICAL = ("jit", "grad", "vmap", "scan", "cond")
# Each outer transform with each of these rows, whose modes take turns.
PAIRS = [
    (outer, name, row.modes[(i + j) % len(row.modes)])
    for i, outer in enumerate(OUTER)
    for j, (name, row) in enumerate(matrix.ROWS.items())
    if row.transform in TYPICAL
]


def under(outer, pairs=PAIRS, condition=lambda row: True):
    """Runs a test with all rows under one transform, and with some under each."""
    rows = {name: row for name, row in matrix.ROWS.items() if condition(row)}
    under_one = [(outer, name, mode) for name in rows for mode in rows[name].modes]
    listed = [
        pytest.param(
            outer, matrix.Case(matrix.ROWS[name], mode), id=f"{outer}-{name}-{mode}"
        )
        for outer, name, mode in dict.fromkeys([*under_one, *pairs])
    ]
    return pytest.mark.parametrize(("outer", "case"), listed)


@under("jax.eval_shape")
def test_captured_objects_can_be_read_under_every_transform(outer, case):
    model, seen = zoo.Parts(), []

    def f(x):
        case(lambda m, x: seen.append((m.a + m.left.w).shape), model)
        return x

    with unchanged(model):
        OUTER[outer](f)
    assert seen
    matrix.check_usable(case, model)


def check_refused(outer, change, reaches_caller, case):
    def f(x):
        case(change, model)
        return x

    model = zoo.Parts()
    refused = pytest.raises(nnx.errors.TraceContextError, match="Cannot mutate")
    with unchanged(model), refused if reaches_caller else contextlib.nullcontext():
        OUTER[outer](f)
    matrix.check_usable(case, model)


@under("jax.jit", condition=lambda row: row.transform != "cached_partial")
def test_captured_objects_can_not_be_written_under_any_transform(outer, case):
    check_refused(outer, lambda m, x: matrix.write(m.a, x), case.keeps_values, case)


def change_structure(m, x):
    m.k = 5
    m.array = x * 1
    m.new = nnx.Param(x * 2)
    del m.b


@under("jax.jit", (), lambda row: not row.is_fixed)
def test_structure_of_captured_objects_can_not_be_changed(outer, case):
    check_refused(outer, change_structure, case.keeps_structure, case)


# ------------------------------------------------------------------------ static values


class Size(enum.IntEnum):
    ONE = 1
    TWO = 2


class Flag(enum.Enum):
    ONE = 1


@dataclasses.dataclass(frozen=True)
class Config:
    size: object = 1


class Collides:
    """Equal to none of its kind but by number; the hash of all is one."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return isinstance(other, Collides) and self.number == other.number

    def __hash__(self):
        return 0

    def __repr__(self):
        return f"Collides({self.number!r})"


VALUES = [
    *(1, True, 1.0, np.int8(1), np.int32(1), np.float32(1), Size.ONE, Flag.ONE, 1 + 0j),
    *(0, False, 0.0, -0.0, np.float32(0), np.float32(-0.0), complex(0.0, -0.0)),
    *(-1, -2, "1", b"1", None, (), frozenset()),
    *((1,), (True,), (1.0,), ((1,),), ((1.0,),), (0.0,), (-0.0,)),
    *(frozenset([1]), frozenset([1.0]), frozenset([(1, 2.0)]), frozenset([(1.0, 2)])),
    *(Config(), Config(True), Config(1.0), Config((1,)), Config((1.0,))),
    *(Collides(1), Collides(2), Collides(1.0)),
]


def model():
    return zoo.Box(p=nnx.Param(jnp.ones(())), k=None)


def told(x):
    """What is to be seen of a static value."""
    return f"{type(x).__name__} {x!r}"


@pytest.fixture
def seen():
    return []


@pytest.mark.parametrize("form", ["position", "name", "without a model"])
def test_static_arguments(mode, form, seen):
    @functools.partial(nnx.jit, static_argnames="s", **mode)
    def f(m, s):
        seen.append(told(s))

    for s in VALUES * 3:
        m = 1.0 if form == "without a model" else model()
        f(m, s=s) if form == "name" else f(m, s)
    assert seen == [*map(told, VALUES)]


JITS = {name: functools.partial(nnx.jit, **mode) for name, mode in BY_NAME.items()}
JITS["jax.jit"] = jax.jit


@pytest.mark.parametrize("name", JITS)
def test_static_attributes_set_outside(name, seen):
    f = JITS[name](lambda m: seen.append(told(m.k)))
    m = model()
    for m.k in VALUES * 3:
        f(m)
    assert seen == [*map(told, VALUES)]


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat, nnx.grad, nnx.vmap])
def test_static_attributes_set_inside(transform):
    m = model()
    m.p = nnx.Param(jnp.ones(1))
    for value in VALUES:

        @functools.partial(transform, **GRAPH_UPDATES)
        def f(m, value=value):
            m.k = value
            return m.p.sum()

        f(m)
        assert told(m.k) == told(value)


def test_memos_of_functions_that_take_apart(graph):
    m = model()
    for value in VALUES * 2:
        m.k = value
        for _ in range(3):
            graphdef, state = nnx.split(m, graph=graph)
            assert told(nnx.merge(graphdef, state).k) == told(value)
            assert told(nnx.clone(m, graph=graph).k) == told(value)
    m.k = VALUES[0]
    first = nnx.graphdef(m, graph=graph)
    for m.k in VALUES[1:]:
        assert nnx.graphdef(m, graph=graph) != first


def test_metadata(mode, seen):
    f = nnx.jit(lambda m: seen.append(told(m.p.tag)), **mode)
    m = model()
    for _ in range(3):
        for tag in VALUES:
            m.p.set_metadata(tag=tag)
            f(m)
    assert seen == [*map(told, VALUES)]
    for tag in VALUES:

        @functools.partial(nnx.jit, **mode)
        def change(m, tag=tag):
            m.p.set_metadata(tag=tag)

        change(m)
        assert told(m.p.tag) == told(tag)


@pytest.mark.parametrize("numbers", [(1, 1.0), (-1, -2), (0.0, -0.0)])
def test_a_static_value_that_was_changed_in_place(numbers, seen):
    f = nnx.jit(lambda m: seen.append(told(m.k.number)))
    m = model()
    m.k = Collides(None)
    for m.k.number in numbers * 3:
        f(m)
    assert seen == [*map(told, numbers)]


# Beside each of these members, another one is told from its equals.
BESIDE = {"alone": [], "a name": ["a"], "a number": [0.5], "a tuple": [("a", 1)]}
FILLS = {
    "list": (list, lambda members: members),
    "keys": (dict, lambda members: dict.fromkeys(members, 1)),
    "values": (dict, lambda members: dict(enumerate(members))),
    "set": (set, lambda members: {*members}),
}


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("kind", FILLS)
def test_members_of_a_container_that_changes_in_place(kind, beside, seen):
    make, fill = FILLS[kind]
    f = nnx.jit(lambda m: seen.append(str(m.k)))
    m, expected = model(), []
    m.k = make()
    for x in (1, True, 1.0, 0, False, 0.0, -0.0, "1", b"1", None, (1,), (True,)) * 2:
        m.k.clear()
        (m.k.extend if make is list else m.k.update)(fill([*beside, x]))
        expected.append(str(m.k))
        f(m)
    assert seen == [*dict.fromkeys(expected)] and len(seen) == 12


class Constant(nnx.Pytree):
    """An object without data, which is hashed by content."""

    def __init__(self, size):
        self.size = size

    def __eq__(self, other):
        return self.size == other.size

    def __hash__(self):
        return hash(self.size)


DATA = {
    "Module": model,
    "first Module": model,
    "Variable": lambda: nnx.Param(jnp.ones(())),
    "array": lambda: jnp.ones(()),
    "in a tuple": lambda: (1, model()),
    "partial": lambda: functools.partial(zoo.Box.__init__, model()),
    "method": lambda: model().train,
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat, nnx.pmap])
def test_data_is_refused_as_a_static_argument(transform, name):
    option = "static_broadcasted_argnums" if transform is nnx.pmap else "static_argnums"
    number = 0 if name == "first Module" else 1
    f = transform(lambda x, y: 1.0, **{option: number})
    args = [jnp.ones(1), jnp.ones(1)]
    args[number] = DATA[name]()
    told = f"argument {number}: {type(args[number]).__name__}"
    advice = "Pass it as an ordinary argument"
    with raises(nnx.errors.StaticArgumentError, told, advice) as error:
        f(*args)
    assert isinstance(error.value, TypeError) and isinstance(error.value, ValueError)


def test_a_hashable_object_without_data_may_be_static():
    f = nnx.jit(lambda x, c: x * c.size, static_argnums=1)
    assert [f(1.0, Constant(2)), f(1.0, Constant(3))] == [2.0, 3.0]
