"""What each transform lets through in each mode (contract `transforms-and-refs`, 1.2).

At the end what holds for all that map over an axis, and for all that donate.
`docs/look_up/transform_rules.md` is the table of what is asserted here.
"""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import modes
from tests.comparisons import unchanged
from tests.contract.test_transforms.matrix import (
    MESH,
    SLOW,
    X,
    cases,
    check_usable,
    facts,
    flat,
    tracers_in,
    write,
)
from tests.zoo import Box, Parts

# ------------------------------------------------------------------------------- values


@cases()
def test_new_values_reach_the_variables_of_the_caller(case):
    def change(m, x):
        write(m.a, m.a + x)
        m.b.set_value(m.b * x)
        write(m.left.w, m.right.w[...])
        write(m.right.w, x)
        write(m.right.w, m.right.w * 2)

    model = Parts()
    variables = model.a, model.b, model.left.w, model.right.w
    holders = [model.a], Box(a=model.a)
    case(change, model)
    found = model.a, model.b, model.left.w, model.right.w
    assert all(map(operator.is_, found, variables))
    expected = [[11.0, 22.0], [30.0, 80.0], [9.0, 10.0], [20.0, 40.0]]
    if not case.keeps_values:
        expected = [[1.0, 2.0], [3.0, 4.0], [7.0, 8.0], [9.0, 10.0]]
    assert [*map(flat, variables)] == expected
    assert flat(holders[0][0]) == flat(holders[1].a) == expected[0]
    check_usable(case, model)


def nested(value, tag):
    """A Variable whose value is another one, of another class."""
    return nnx.Param(nnx.BatchStat(value, tag="inner"), tag=tag)


def inner(variable, tag):
    """The Variable in such a one, with the same tag."""
    found = variable.get_raw_value()
    assert (type(variable), type(found)) == (nnx.Param, nnx.BatchStat)
    assert (variable.tag, found.tag) == (tag, "inner")
    return found


@cases(without=SLOW)
def test_a_variable_that_is_a_value_stays_one(case):
    def change(box, x):
        box.v.set_value(inner(box.v, "outer").replace(box.v * 2))
        return nested(x * 3, "new") if case.row.has_output else None

    box = Box(v=nested(X, "outer"))
    made = case(change, box)
    expected = [20.0, 40.0] if case.keeps_values else [10.0, 20.0]
    assert flat(inner(box.v, "outer")) == expected
    if case.row.has_output:
        assert inner(made, "new").size == 2
    if case.row.has_output and case.row.transform != "eval_shape":
        assert flat(inner(made, "new")) == [30.0, 60.0]


@cases(lambda row: not row.is_fixed, without=SLOW)
def test_values_may_change_their_kind(case):
    def change(m, x):
        m.a.set_value(x.astype(jnp.float16))
        m.b.set_value({"y": m.b * 2, "z": (x * 1,)})

    model = Parts()
    case(change, model)
    if case.keeps_values:
        assert flat(model.a) == [10.0, 20.0] and model.a.dtype == jnp.float16
        value = jax.tree.map(flat, model.b.get_value())
        assert value == {"y": [6.0, 8.0], "z": ([10.0, 20.0],)}
    check_usable(case, model)


@cases(lambda row: not row.writes_all)
def test_variables_that_did_not_change_keep_their_value_object(case):
    model = Parts()
    kept = np.array([3.0, 4.0], np.float32)
    model.b.set_raw_value(kept)
    before = model.left.w.get_raw_value()
    case(lambda m, x: write(m.a, m.a + x + m.b + m.left.w), model)
    assert model.b.get_raw_value() is kept
    assert model.left.w.get_raw_value() is before


@cases(lambda row: not row.drops, without=SLOW)
def test_variables_anywhere_in_the_arguments_are_updated(case):
    def change(tree, variable, x):
        write(tree["models"][0].a, x)
        write(variable, variable + x)
        if not case.row.is_fixed:
            tree["models"].append(None)
            tree["new"] = x

    tree, variable = {"models": [Parts()]}, nnx.Param(jnp.array([1.0, 2.0]))
    case(change, tree, variable)
    assert flat(tree["models"][0].a) == [10.0, 20.0]
    assert flat(variable) == [11.0, 22.0]
    assert len(tree["models"]) == 1 and list(tree) == ["models"]
    check_usable(case, tree, variable)


@cases(lambda row: not row.is_fixed and row.transform != "jit_partial")
def test_metadata_reaches_the_variables_of_the_caller(case):
    model = Parts()
    case(lambda m, x: m.a.set_metadata(tag="y", new=1), model)
    expected = {"tag": "y", "new": 1} if case.keeps_values else {"tag": "x"}
    assert expected.items() <= model.a.get_metadata().items()
    assert ("new" in model.a.get_metadata()) is case.keeps_values
    check_usable(case, model)


# ---------------------------------------------------------------------------- structure


def has(name, *numbers):
    return lambda m: flat(getattr(m, name)) == [*numbers]


# Changes of the structure, and how a model is known to have been changed so.
STRUCTURE = {
    "array": (lambda m, x: setattr(m, "array", m.array + x), has("array", 15.0, 26.0)),
    "static": (lambda m, x: setattr(m, "k", 5), lambda m: m.k == 5),
    "new static": (lambda m, x: setattr(m, "s", "s"), lambda m: m.s == "s"),
    "new array": (lambda m, x: setattr(m, "y", x * 2), has("y", 20.0, 40.0)),
    "new Variable": (
        lambda m, x: setattr(m, "v", nnx.Param(m.a * 7, tag="n")),
        lambda m: flat(m.v) == [7.0, 14.0] and m.v.tag == "n",
    ),
    "new module": (
        lambda m, x: setattr(m, "n", nnx.Dict(w=nnx.Cache(x * 1))),
        lambda m: flat(m.n.w) == [10.0, 20.0] and type(m.n.w) is nnx.Cache,
    ),
    "deleted": (lambda m, x: delattr(m, "b"), lambda m: not hasattr(m, "b")),
    "nested": (lambda m, x: m.left.__setitem__("n", 1), lambda m: m.left["n"] == 1),
    "alias": (lambda m, x: setattr(m, "c", m.a), lambda m: m.c is m.a),
    "self": (lambda m, x: setattr(m, "me", m), lambda m: m.me is m),
}


# Those that fit into one model; references among its own parts come on their own.
REFERENCES = ["alias", "self"]
ATTRIBUTES = [name for name in STRUCTURE if name not in REFERENCES]
TOGETHER = {"attributes": ATTRIBUTES, "references": REFERENCES}


@cases(lambda row: not row.is_fixed)
@pytest.mark.parametrize("group", TOGETHER)
def test_structure_reaches_the_caller_with_graph_updates_only(group, case):
    changes = {name: STRUCTURE[name] for name in TOGETHER[group]}

    def change(m, x):
        for apply, _ in changes.values():
            apply(m, x)

    model = Parts()
    before = facts(case, model)
    case(change, model)
    if case.keeps_structure:
        arrived = {name: test(model) for name, (_, test) in changes.items()}
        assert arrived == dict.fromkeys(changes, True)
    else:
        assert facts(case, model) == before
    check_usable(case, model)


@cases(lambda row: not row.is_fixed)
def test_swapped_parts_keep_their_identity(case):
    def swap(m, x):
        m.left, m.right = m.right, m.left
        m.a, m.right["w"] = m.right["w"], m.a

    model = Parts()
    old, left, right = model.left, model.left, model.right
    a, w = model.a, model.left["w"]
    case(swap, model)
    if case.keeps_structure:
        left, right, a, w = right, left, w, a
    assert model.left is left and model.right is right and model.a is a
    assert old["w"] is w
    check_usable(case, model)


@cases(lambda row: row.is_fixed and row.transform.endswith("loop"))
def test_loops_refuse_state_that_was_not_there(case):
    model = Parts()
    with unchanged(model), pytest.raises((TypeError, ValueError)):
        case(lambda m, x: setattr(m, "new", nnx.Param(x * 2)), model)
    check_usable(case, model)


# ----------------------------------------------------------------------------- failures


def change_everything(m, x):
    write(m.a, m.a + x)
    m.a.set_metadata(tag="y")
    m.array = m.array * x
    m.k = 5
    m.new = nnx.Param(x * 2)
    m.left, m.right = m.right, m.left
    del m.b


@cases()
def test_failed_functions_change_nothing(case):
    def fails(m, x):
        change_everything(m, x)
        raise RuntimeError("stop")

    model = Parts()
    for _ in range(2):
        with unchanged(model), pytest.raises(RuntimeError, match="stop"):
            case(fails, model)
    check_usable(case, model)


@cases(lambda row: not row.is_fixed and row.transform != "jit_partial")
def test_no_tracer_stays_behind(case):
    inside, model = [], Parts()

    def change(m, x):
        change_everything(m, x)
        inside.append(m)
        return Box(y=nnx.Param(x * 2), z=x * 3, k=1)

    out = case(change, model)
    assert not tracers_in([model, out])
    assert inside[0] is not model
    check_usable(case, model)


@jax.custom_vjp
def fails_backward(x):
    return x


def _raise(residual, g):
    raise RuntimeError("backward")


fails_backward.defvjp(lambda x: (x, None), _raise)


def _own_rule(loss, model, mode):
    f = nnx.custom_vjp(loss, **mode)
    f.defvjp(lambda m: (f(m), None), _raise)
    return nnx.grad(f, **mode)(model)


def _grad_of(lift):
    return lambda loss, model, mode: nnx.grad(lift(loss, mode), **mode)(model)


BACKWARD = {
    "grad": _grad_of(lambda loss, mode: loss),
    "value_and_grad": lambda loss, m, mode: nnx.value_and_grad(loss, **mode)(m),
    "grad in jit": lambda loss, m, mode: nnx.jit(nnx.grad(loss, **mode), **mode)(m),
    "jit": _grad_of(lambda loss, mode: nnx.jit(loss, **mode)),
    "remat": _grad_of(lambda loss, mode: nnx.remat(loss, **mode)),
    "cond": _grad_of(lambda f, mode: lambda m: nnx.cond(True, f, f, m, **mode)),
    "custom_vjp": _own_rule,
}


def loss_that_fails(m):
    write(m.a, m.a + 1)
    return jnp.sum(fails_backward(m.a[...]))


@pytest.mark.parametrize("name", BACKWARD)
def test_exceptions_of_the_backward_pass_change_nothing(name, mode):
    model = Parts()
    with unchanged(model), pytest.raises(RuntimeError, match="backward"):
        BACKWARD[name](loss_that_fails, model, mode)
    write(model.a, X)


def test_vjp_keeps_the_updates_of_its_forward_pass(value_mode):
    model = Parts()
    _, backward = nnx.vjp(loss_that_fails, model, **value_mode)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="backward"):
            backward(jnp.array(1.0))
    assert flat(model.a) == [2.0, 3.0] and not tracers_in(model)


# ------------------------------------------------------------------------------ outputs


@cases(lambda row: row.has_output, without=("eval_shape",))
def test_outputs_keep_their_form_and_objects_made_inside_can_be_changed(case):
    def make(m, x):
        made = Box(w=nnx.Param(m.a * x, tag="n"), array=x * 3, k=2)
        made.inner = nnx.List([made.w])
        made = made if case.shares else Box(w=made.w, k=2)
        plain = {"y": (x * 2, [m.a[...]]), "none": None, "v": nnx.Cache(x * 3)}
        return {"made": made, "x": x, **plain}

    model = Parts()
    out = case(make, model)
    made = out["made"]
    assert flat(made.w) == [10.0, 40.0] and made.w.tag == "n" and made.k == 2
    if case.shares:
        assert made.inner[0] is made.w and flat(made.array) == [30.0, 60.0]
    assert flat(out["y"][0]) == [20.0, 40.0] and flat(out["y"][1][0]) == [1.0, 2.0]
    assert out["none"] is None
    assert type(out["v"]) is nnx.Cache and flat(out["v"]) == [30.0, 60.0]
    made.w[...] = made.w + 1
    made.new = 1
    check_usable(case, model)


def test_eval_shape_gives_abstract_objects(mode):
    def make(m, x):
        return Box(w=nnx.Param(x * 2, tag="n"), array=x * 3, k=2)

    out = nnx.eval_shape(make, Parts(), X, **mode)
    expected = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert out.w.get_value() == expected and out.w.tag == "n"
    assert out.array == expected and out.k == 2


# ------------------------------------------------------------------------------ streams


_WITH_AXES_OR_TANGENTS = "grad value_and_grad vjp jvp vmap pmap shard_map scan".split()


@cases(without=_WITH_AXES_OR_TANGENTS)
def test_streams_advance_as_often_as_they_are_drawn_from(case):
    def draw(rngs, x):
        rngs()
        rngs()

    rngs, plain = nnx.Rngs(0), nnx.Rngs(0)
    case(draw, rngs)
    if case.keeps_values:
        draw(plain, X)
    assert rngs.default.count[...] == plain.default.count[...]
    assert rngs() == plain()


# ----------------------------------------------------------- where transforms differ


@pytest.mark.parametrize("stage", ["lower", "trace", "eval_shape"])
def test_stages_change_nothing(stage, mode):
    model = Parts()
    with unchanged(model):
        getattr(nnx.jit(change_everything, **mode), stage)(model, X)
    assert not tracers_in(model)


def test_scan_broadcasts_or_carries_what_is_written(mode):
    @nnx.scan(in_axes=(None, 0), out_axes=0, **mode)
    def f(m, x):
        seen = m.a[...]
        write(m.a, m.a + x)
        return seen

    model = Parts()
    seen = f(model, jnp.stack([X, X]))
    is_read_only = mode == modes.GRAPH_UPDATES
    assert flat(seen[0]) == [1.0, 2.0]
    assert flat(seen[1]) == ([1.0, 2.0] if is_read_only else [11.0, 22.0])
    assert flat(model.a) == ([1.0, 2.0] if is_read_only else [21.0, 42.0])


def test_jit_partial_refuses_new_metadata(value_mode):
    model, message = Parts(), "Variable metadata changed inside jit"
    f = nnx.jit_partial(lambda m, x: m.a.set_metadata(tag="y"), model, **value_mode)
    with unchanged(model), pytest.raises(ValueError, match=message):
        f(X)


def test_branches_may_write_different_variables(mode):
    branches = [lambda m, x: write(m.a, x), lambda m, x: write(m.left.w, x)]
    written = [[10.0, 20.0], [7.0, 8.0]], [[1.0, 2.0], [10.0, 20.0]]
    for index, expected in enumerate(written):
        model = Parts()
        nnx.switch(index, branches, model, X, **mode)
        assert [flat(model.a), flat(model.left.w)] == expected


# ------------------------------------------------------------------------- mapped axes

P = jax.sharding.PartitionSpec


def spec(axis):
    """The entry of a mapped axis, one of two, in the specs of `shard_map`."""
    return P() if axis is None else P(*(None,) * (axis % 2), "d")


def sharded(f, axes, out_axis, mode):
    specs = {"in_specs": tuple(map(spec, axes)), "out_specs": spec(out_axis)}
    return nnx.shard_map(f, mesh=MESH, **specs, **mode)


def by_axes(transform):
    return lambda f, ins, out, mode: transform(f, in_axes=ins, out_axes=out, **mode)


# Called with a function, the axis of each argument and that of the output.
MAPPED = {name: by_axes(getattr(nnx, name)) for name in ("vmap", "pmap", "scan")}
MAPPED["shard_map"] = sharded
each_mapped = pytest.mark.parametrize("name", MAPPED)


def square():
    return Box(a=nnx.Param(jnp.array([[0.0, 1.0], [2.0, 3.0]]), tag="x"))


@each_mapped
@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_updates_and_outputs_are_on_the_axis_that_was_mapped(name, axis, mode):
    def double(m):
        assert m.a.size == 2 and m.a.ndim == (2 if name == "shard_map" else 1)
        m.a[...] *= 2
        return m.a + 1

    model = square()
    out = MAPPED[name](double, (axis,), axis, mode)(model)
    assert model.a[...].tolist() == [[0.0, 2.0], [4.0, 6.0]]
    assert out.tolist() == [[1.0, 3.0], [5.0, 7.0]]


@each_mapped
def test_outputs_may_have_another_axis_than_the_arguments(name, mode):
    out = MAPPED[name](lambda m: m.a * 2, (0,), 1, mode)(square())
    rows = {"shard_map": [[0.0, 2.0, 4.0, 6.0]]}.get(name, [[0.0, 4.0], [2.0, 6.0]])
    assert out.tolist() == rows


@each_mapped
def test_one_object_has_one_axis(name, graph_mode):
    model = square()
    different = MAPPED[name](lambda a, b: a.a * 1, (0, None), 0, graph_mode)
    axes = r"0/a: P.*1/a: P" if name == "shard_map" else r"0/a: 0.*1/a: None"
    phrase = rf"(?s)Inconsistent aliasing detected.*Param.*{axes}"
    with unchanged(model), pytest.raises(ValueError, match=phrase):
        different(model, model)


@each_mapped
def test_a_returned_argument_keeps_its_axis(name):
    model = square()
    with pytest.raises(ValueError, match="Inconsistent aliasing detected"):
        MAPPED[name](lambda m: m, (0,), 1, {})(model)
    assert MAPPED[name](lambda m: m, (1,), 1, {})(model) is model
    assert model.a[...].tolist() == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize("name", ["vmap", "pmap", "shard_map"])
def test_what_has_no_axis_is_written_once(name, mode):
    def write(m, x):
        m.a[...] += 1
        return x

    model = square()
    MAPPED[name](write, (None, 0), 0, mode)(model, jnp.ones(2))
    assert model.a[...].tolist() == [[1.0, 2.0], [3.0, 4.0]] and model.a.tag == "x"
    assert not tracers_in(model)


# ----------------------------------------------------------------------------- donation

# Each calls ``f(model, x, kept)`` and donates the first two.
DONATED = {"donate_argnums": (0, 1)}
DONATING = {
    "jit": lambda f, args, mode: nnx.jit(f, **DONATED, **mode)(*args),
    "jit_partial": lambda f, args, mode: nnx.jit_partial(f, args[0], **DONATED, **mode)(
        *args[1:]
    ),
    "pmap": lambda f, args, mode: nnx.pmap(f, **DONATED, **mode)(*args),
}


@cases(lambda row: row.transform in DONATING, without=("compiled",))
def test_donated_variables_stay_readable_and_donated_arrays_are_freed(case):
    donate = DONATING[case.row.transform]
    place = jax.pmap(jnp.array) if case.row.transform == "pmap" else jnp.array
    model = Box(w=nnx.Param(place(jnp.ones(2))), other=nnx.Param(place(jnp.zeros(2))))
    x, kept = place(jnp.ones(2)), place(jnp.full(2, 3.0))
    before = model.w.get_raw_value()

    def add(model, x, kept):
        model.w[...] += x + kept
        return x * 2

    out = donate(add, (model, x, kept), modes.BY_NAME[case.mode])
    assert flat(out) == [2.0, 2.0]
    assert before.is_deleted() and x.is_deleted() and not kept.is_deleted()
    assert flat(model.w) == [5.0, 5.0] and flat(model.other) == [0.0, 0.0]
