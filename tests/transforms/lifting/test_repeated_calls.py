"""Calls of one function again and again, while its arguments change in any way.

Each call gives what a first one gives: a transform that remembers what it found out
about its arguments must not be seen to. What it remembers is in `test_costs.py`.
"""

import collections
import dataclasses
import functools
import os

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import graftree as nnx
from graftree import errors
from tests import changes, strategies, tables, zoo
from tests.changes import ALIASES, changed, layer, made, param, plain
from tests.modes import BY_NAME, GRAPH, GRAPH_UPDATES, TREE


def arguments():
    """A model, a State, Variables in containers, and an array."""
    inner = {"x": param(1), "y": nnx.Cache(jnp.zeros(1))}
    state = nnx.State({"a": inner, "b": param(2)})
    loose = [param(7, 1), (param(8, tag=1), None)]
    return {"model": made(), "state": state, "loose": loose, "x": jnp.ones(())}


IN_MODEL = changes.VALUES | changes.STATICS | changes.OBJECTS | changes.STRUCTURES
STEADY = changes.VALUES | changes.STATICS | changes.OBJECTS
SWITCHES = [*changes.STATICS, "mode", "static below"]


def increased(tree):
    return jax.tree.map(lambda x: x + 1, tree)


def in_model(change):
    return lambda tree, k: change(tree["model"], k)


# Each is given what `arguments` gives, and 0 or 1.
IN_ARGUMENTS = {
    "value in a State": lambda tree, k: tree["state"]["b"].set_value(jnp.ones(k + 1)),
    "dict as a value": lambda tree, k: tree["state"]["b"].set_value(
        {"p": jnp.ones(k + 1)}
    ),
    "Variable in a State": lambda tree, k: tree["state"].update(b=param(1)),
    "kind in a State": lambda tree, k: tree["state"].update(b=nnx.Cache(jnp.ones(2))),
    "array in a State": lambda tree, k: tree["state"].update(b=jnp.ones(2)),
    "more in a State": lambda tree, k: tree["state"].update({f"c{k}": param(1, 1)}),
    "less in a State": lambda tree, k: tree["state"].update(a={"x": param(1)}),
    "nested in a State": lambda tree, k: tree["state"]["a"].update(x=param(3)),
    "all metadata": lambda tree, k: nnx.set_metadata(tree["state"], tag=k),
    "mapped State": lambda tree, k: tree.update(state=increased(tree["state"])),
    "longer": lambda tree, k: tree["loose"].append(param(1, 1)),
    "reversed": lambda tree, k: tree["loose"].reverse(),
    "tuple": lambda tree, k: tree["loose"].__setitem__(0, (param(1, 1), ())),
    "dict": lambda tree, k: tree["loose"].__setitem__(0, {"q": param(1, 1)}),
    "no argument": lambda tree, k: tree["loose"].__setitem__(0, None),
    "loose array": lambda tree, k: tree["loose"].__setitem__(0, jnp.full(2, float(k))),
    "given array": lambda tree, k: tree.update(x=jnp.full(k, 2.0)),
    "another model": lambda tree, k: tree.update(model=made()),
    "dict for a State": lambda tree, k: tree.update(state={"a": param(1, k + 1)}),
    "empty State": lambda tree, k: tree.update(state=nnx.State({})),
}
LOOSE_ALIAS = {
    "loose alias": lambda tree, k: tree["loose"].__setitem__(0, tree["model"].kernel)
}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Statics:
    """What is static in a tree, as lines of text; equal if they are."""

    lines: tuple[str, ...]


def visit(tree):
    """All that is in a tree: what is static, and its arrays; writes each Variable."""
    model, variables, lines, values = tree["model"], [], [], []
    for path, leaf in nnx.to_flat_state(nnx.state(tree)):
        if isinstance(leaf, nnx.Variable):
            metadata = [leaf.get_metadata(x, None) for x in ("tag", "sizes", "axes")]
            lines.append(f"{path}: {type(leaf).__name__} {metadata}")
            variables.append(leaf)
            values += jax.tree.leaves(leaf.get_value())
        elif path[:2] not in [("model", "items"), ("model", "named")]:
            # So is one in what became data: static in graph mode, and data in a tree.
            is_number = len(path) > 2 and getattr(leaf, "weak_type", False)
            values += [] if is_number else [leaf]
            lines += [] if is_number else [str(path)]
    write_each(variables)
    # Numbers in containers are static, and data in tree mode.
    # JAX sorts the keys of dicts.
    named = [x for _, x in sorted(getattr(model, "named", {}).items())]
    inside = [*getattr(model, "items", ()), *named]
    values += [x for x in inside if not isinstance(x, nnx.Variable)]
    statics = [model.tags[1].name, model.dropout.deterministic, len(model.layers)]
    for name in ("_name", "flag", "rate", "text", "none", "tag", "unhashable"):
        if model._pytree__nodes.get(name) is False:
            value = vars(model)[name]
            statics.append((name, getattr(value, "name", value)))
    return Statics((*lines, f"{statics} {model.heads.flag}")), [
        *map(jnp.asarray, values)
    ]


def write_each(variables):
    """Gives each value to the next of its shape and type; one without is negated."""
    values, structure = jax.tree.flatten([x.get_value() for x in variables])
    places = {}
    for place, x in enumerate(values):
        places.setdefault((jnp.shape(x), jnp.result_type(x)), []).append(place)
    moved = [*values]
    for group in places.values():
        for place, following in zip(group, [*group[1:], group[0]], strict=True):
            moved[following] = values[place] if len(group) > 1 else -values[place]
    for variable, value in zip(variables, structure.unflatten(moved), strict=True):
        variable.set_value(value)


def visit_and_return(tree):
    return visit(tree), increased(tree["state"])


def visit_model(model):
    return visit({"model": model})


# What is called, what makes its argument, what may change in that, and how it may be
# shared, which tree mode refuses.
FORMS = {
    "plain": (visit_model, plain, IN_MODEL, ALIASES),
    "alone": (visit_model, made, IN_MODEL, ALIASES),
    "together": (
        visit_and_return,
        arguments,
        {name: in_model(change) for name, change in IN_MODEL.items()} | IN_ARGUMENTS,
        {name: in_model(change) for name, change in ALIASES.items()} | LOOSE_ALIAS,
    ),
}
EACH_FORM = pytest.mark.parametrize("form", FORMS)


def form_of(name, mode):
    function, make, own, shared = FORMS[name]
    return function, make, own if mode == TREE else own | shared


def mapped(f, **mode):
    each = nnx.vmap(lambda m, x: (f(m), x), in_axes=(None, 0), **mode)
    return lambda model: each(model, jnp.arange(2.0))


def differentiated(f, **mode):
    def loss(model):
        outputs = f(model)
        return sum_of_squares(jax.tree.leaves(outputs)), outputs

    derive = nnx.value_and_grad(loss, has_aux=True, allow_int=True, **mode)

    def call(model):
        (total, outputs), gradients = derive(model)
        return outputs, total, gradients

    return call


def sum_of_squares(values):
    """A number whose derivatives are the values, twice; one vector compiles little."""
    flat = [jnp.ravel(x).astype("float32") for x in values]
    return jnp.sum(jnp.concatenate(flat) ** 2)


def scanned(f, **mode):
    axes = (nnx.Carry, 0)
    each = nnx.scan(lambda m, x: (m, (f(m), x)), in_axes=axes, out_axes=axes, **mode)
    return lambda model: each(model, jnp.arange(1.0))[1]


# Transforms that are traced at each call. All take a function of a model.
TRACED = {"vmap": mapped, "grad": differentiated, "scan": scanned}
TRANSFORMS = {"jit": nnx.jit, "vmap": mapped, "grad": differentiated}
EACH = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


@functools.cache
def compiled(form, graph, graph_updates=False):
    """The same function in all tests, so that little is compiled."""
    return nnx.jit(FORMS[form][0], graph=graph, graph_updates=graph_updates)


def arrays(tree):
    """The arrays and numbers in an output, less the derivatives of integers."""
    # A compiled function makes arrays of numbers.
    found = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array | int | float)]
    return [x for x in found if jnp.result_type(x) != jax.dtypes.float0]


def check_same(one, other, told=None):
    """Asserts that two outputs have the same structure and values."""
    assert jax.tree.structure(one) == jax.tree.structure(other), told
    for a, b in zip(arrays(one), arrays(other), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=str(told))


def check_alike(ours, theirs, told=None):
    """Asserts that arguments are alike, aliases included."""
    ours_def, ours_state = nnx.split(ours, graph=True)
    theirs_def, theirs_state = nnx.split(theirs, graph=True)
    assert ours_def == theirs_def, told
    check_same(ours_state, theirs_state, told)


# ---------------------------------------------------------------------- random changes


def in_turn(form, mode):
    """The changes that `make test` makes: each in one of the modes and forms."""
    turn, of_form = [*BY_NAME.values()].index(mode), form == "plain"
    own = [name for i, name in enumerate(IN_MODEL) if i % 6 == 2 * turn + of_form]
    more = [*IN_ARGUMENTS][turn::3] if form == "together" else []
    return [*own, *more, *([] if mode == TREE else FORMS[form][3])]


@pytest.mark.parametrize("form", ["plain", "together"])
def test_a_compiled_function_sees_each_change(form, mode):
    function, make, changes = form_of(form, mode)
    step, is_whole = compiled(form, **mode), os.environ.get("TEST_ALL")
    for name in changes if is_whole else in_turn(form, mode):
        change = changes[name]
        ours, theirs = make(), make()
        for _ in range(2):
            step(ours), function(theirs)
        for k in (0, 1) if is_whole or name in STEADY else (0,):  # each compiles
            made = [changed(x, change, k) for x in (ours, theirs)]
            assert made[0] == made[1] and (k or made[0] or form == "plain"), name
            for _ in range(2):
                check_same(step(ours), function(theirs), name)
        check_alike(ours, theirs, name)


def examples(few, many):
    """Without making a failing one smaller: each step of that compiles."""
    settings = strategies.examples(few, many)
    return hypothesis.settings(settings, phases=[hypothesis.Phase.generate])


STEPS = st.tuples(st.integers(0, 1), st.integers(1, 3))


def steps_of(names, most):
    """Some changes; of each what it is given, and how many calls are before it."""
    step = st.tuples(st.sampled_from([*names]), STEPS)
    return st.lists(step, min_size=1, max_size=most)


@EACH_FORM
@examples(3, 40)
@given(data=st.data())
def test_compiled_calls_equal_those_of_the_function(form, mode, data):
    function, make, changes = form_of(form, mode)
    step, ours, theirs = compiled(form, **mode), make(), make()
    names = [*changes, *[*SWITCHES] * 4]
    for name, (k, calls) in data.draw(steps_of(names, 8)):
        for _ in range(calls):
            check_same(step(ours), function(theirs))
        for x in (ours, theirs):
            changed(x, changes[name], k)
    check_same(step(ours), function(theirs))
    check_alike(ours, theirs)


@EACH_FORM
@examples(2, 25)
@given(data=st.data())
def test_calls_with_new_objects_equal_those_of_the_function(form, mode, data):
    function, make, changes = form_of(form, mode)
    drawn = data.draw(steps_of(changes, 4))
    for _ in range(3):
        ours, theirs = make(), make()
        for name, (k, _) in drawn:
            for x in (ours, theirs):
                changed(x, changes[name], k)
        check_same(compiled(form, **mode)(ours), function(theirs))
        check_alike(ours, theirs)


@examples(3, 75)
@given(data=st.data())
def test_traced_calls_equal_first_ones(mode, data):
    make = TRACED[data.draw(st.sampled_from([*TRACED]))]
    _, arguments, changes = form_of("together", mode)
    kept, ours, theirs = make(visit, **mode), arguments(), arguments()
    # What JAX lists of a derivative has no end if an object contains itself.
    names = [name for name in changes if name != "a way back"]
    for name, (k, calls) in data.draw(steps_of(names, 4)):
        for _ in range(calls):
            check_same(kept(ours), make(visit, **mode)(theirs))
        for tree in (ours, theirs):
            changed(tree, changes[name], k)
    check_alike(ours, theirs)


def changing(change, k):
    """A function of a model that changes it."""

    def call(model):
        changed(model, change, k)
        return jnp.array(0.0)

    return call


@EACH
@tables.cases("make", plain, made)
@tables.cases("name", *sorted({*IN_MODEL, *ALIASES} - {"class", "flags"}))
def test_each_change_inside_reaches_the_caller_twice(name, make, transform):
    ours, theirs = make(), make()
    for k in (1, 0):
        function = changing((IN_MODEL | ALIASES)[name], k)
        transform(function, **GRAPH_UPDATES)(ours)
        function(theirs)
        assert nnx.graphdef(ours) == nnx.graphdef(theirs)


# ------------------------------------------------------------- what a call gives, again


def test_objects_are_taken_wherever_they_are(mode):
    @nnx.jit(static_argnums=1, donate_argnums=2, **mode)
    def step(tree, factor, donated, *, other, x):
        for model in (*tree["models"], donated, other):
            model.w[...] *= factor
        tree["box"][...] += x
        return x + tree["x"], nnx.Param(other.w * 1)

    def called(models, factor, x):
        box = nnx.Param(jnp.zeros(()))
        tree = {"models": models[:2], "x": jnp.ones(1), "box": box}
        out, new = step(tree, factor, models[2], other=models[3], x=x)
        assert out[0] == 1.0 + x and box == x
        return [float(v) for v in (*(m.w for m in models), new)]

    kept = [zoo.Scale(1.0) for _ in range(4)]
    for count in range(1, 4):
        assert called(kept, 3.0, count) == [3.0**count] * 5
        new = [zoo.Scale(float(count)) for _ in range(4)]
        assert called(new, 3.0, count) == [3.0 * count] * 5
    first, second, third, last = kept
    assert called([second, first, last, third], 2.0, 0) == [54.0] * 5


def test_one_function_takes_objects_and_arrays_in_any_place(mode):
    @nnx.jit(**mode)
    def f(a, b=1.0):
        a, b = (x.w if isinstance(x, zoo.Scale) else x for x in (a, b))
        return a * b

    kept = zoo.Scale()
    for _ in range(3):
        for model in (kept, zoo.Scale()):
            assert f(model, 5.0) == 10.0
            assert f(model, nnx.Param(jnp.array(3.0))) == 6.0
        assert f(zoo.Scale(), 5.0) == f(5.0, zoo.Scale()) == 10.0
        assert f(zoo.Scale(), b=7.0) == 14.0 and f(a=zoo.Scale()) == 2.0
        assert f(zoo.Scale(), zoo.Scale(3.0)) == 6.0


def test_other_shapes_may_write_other_variables_and_metadata(mode):
    @nnx.jit(**mode)
    def step(model, x):
        (model.a if x.ndim else model.b)[...] += 1
        model.a.set_metadata(dim=x.ndim)

    model = zoo.Parts()
    for x in 3 * (jnp.ones(3), jnp.ones(()), jnp.ones(())):
        step(model, x)
        assert model.a.dim == x.ndim
    assert model.a[...].tolist() == [4, 5] and model.b[...].tolist() == [9, 10]


def test_new_attributes_and_returned_objects_are_those_of_each_call():
    @nnx.jit
    def step(model, x):
        model.w[...] += 1
        model.count = jnp.asarray(x)
        return model, model.w, nnx.Param(model.w[...])

    model = zoo.Scale()
    for count in range(4):
        same, w, new = step(model, jnp.array(count))
        assert same is model and w is model.w and new is not w
        assert model.count == count and model.w == new == 3.0 + count


@pytest.mark.parametrize("donated", [(), (0,)], ids=["plain", "donated"])
def test_a_state_that_is_returned_is_the_next_argument(mode, donated):
    halve = lambda state: jax.tree.map(lambda x: x * 0.5, state)  # noqa: E731
    step, state = nnx.jit(halve, donate_argnums=donated, **mode), nnx.state(layer(8))
    for count in range(1, 4):
        state = step(state)
        assert type(state["w"]) is nnx.Param
        assert state["w"][...].tolist() == [8 / 2**count] * 2


class Special(nnx.State):
    """A subclass, registered by itself."""


def example():
    return nnx.State({"b": {"d": 1, "c": {"e": 2}}, "a": 3})


STATES = {
    "a State": example(),
    "two States": (example(), [nnx.State({"x": 1}), 2]),
    "numbers as keys": nnx.State({"l": {10: {"w": 1}, 2: {"w": 2}}, "a": 3}),
    "mixed keys": nnx.State({"l": {"b": 1, 2: 3}}),
    "a subclass": (Special({"a": {"b": 1}}), example()),
    "a State in a list": nnx.State({"l": [nnx.State({"b": 1, "a": 2}), None]}),
    "an ordered dict": nnx.State({"l": collections.OrderedDict(b=1, a={"c": 2})}),
    "no leaves": nnx.State({"a": {}}),
}


@tables.cases("tree", *STATES.values(), ids=STATES)
def test_trees_of_states_come_back_as_jax_returns_them(tree, mode):
    same, wanted = nnx.jit(lambda tree: tree, **mode), jax.jit(lambda tree: tree)(tree)
    for _ in range(3):
        assert str(same(tree)) == str(wanted)  # in the same order
        assert jax.tree.structure(same(tree)) == jax.tree.structure(wanted)


def test_trees_are_not_taken_for_those_with_other_containers(mode):
    same = nnx.jit(lambda tree: tree, **mode)
    others = nnx.State({"a": 3}), example().raw_mapping, 3, Special(example())
    for tree in 3 * [(example(), 1.0), [example(), 1.0], *((x, 1.0) for x in others)]:
        assert jax.tree.structure(same(tree)) == jax.tree.structure(tree)


@EACH
def test_an_exception_leaves_no_tracer_and_no_update(transform, mode):
    def step(model):
        model.w[...] *= 2
        if model.x.ndim:
            raise ZeroDivisionError
        return model.w.sum()

    def make(w):
        return zoo.Box(w=nnx.Param(jnp.array(w)), x=jnp.ones(()))

    call, model = transform(step, **mode), make(1.0)
    for _ in range(4):
        call(model)
    for failing in (model, model, make(16.0)):
        failing.x = jnp.ones(1)
        with pytest.raises(ZeroDivisionError):
            call(failing)
        assert not isinstance(failing.w.get_value(), jax.core.Tracer)
        assert failing.w == 16
    model.x = jnp.ones(())
    call(model)
    assert model.w == 32


@EACH
def test_what_tree_mode_refuses_it_refuses_later_too(transform):
    call = transform(lambda models: models[0].w.sum(), **TREE)
    models, first = [zoo.Scale(), zoo.Scale()], zoo.Scale()
    for _ in range(4):
        call(models)
    for pair in ([first, first], [first, zoo.Box(w=first.w)]):
        with pytest.raises(ValueError, match=r"(?s)Duplicate Param.*\.w"):
            call(pair)
    models[1].w = models[0].w
    with pytest.raises(ValueError, match="Duplicate"):
        call(models)
    models[1].w, models[0].models = nnx.Param(jnp.ones(())), nnx.data(models)
    with pytest.raises(ValueError, match="Cycle"):
        call(models)


def test_an_alias_over_two_axes_that_comes_later_is_refused():
    add = nnx.vmap(lambda a, b: a.w + b.w, in_axes=(0, None))
    a, b = (zoo.Scale([1.0, 2.0]) for _ in range(2))
    for _ in range(4):
        assert add(a, b).shape == (2, 2)
    b.w = a.w
    with pytest.raises(ValueError, match="Inconsistent aliasing"):
        add(a, b)


def test_a_ref_that_comes_to_two_variables_is_refused(mode):
    step = nnx.jit(lambda pair: pair[0].sum() + pair[1].sum(), **mode)
    pair, ref = [param(1), param(1)], jax.new_ref(jnp.full(2, 3.0))
    for _ in range(2):
        step(pair)
    for variable in pair:
        variable.set_raw_value(ref)
    phrase = r"only one reference .*pair\[0\] and pair\[1\]"
    with pytest.raises(ValueError, match=phrase):
        step(pair)


@pytest.mark.parametrize("donated", [(), (0,)], ids=["plain", "donated"])
def test_nothing_is_written_into_variables_of_another_trace(mode, donated):
    step = nnx.jit(lambda x: x.set_value(x + 1), donate_argnums=donated, **mode)
    for _ in range(2):
        step(nnx.Param(jnp.zeros(3)))
    kept, zeros = [], jnp.zeros(3)
    jax.eval_shape(lambda: kept.append(nnx.Param(zeros)))
    with pytest.raises(errors.TraceContextError):
        step(kept[0])
    assert zeros.tolist() == [0, 0, 0]  # which has not been donated


def test_refs_and_read_only_variables_come_as_often(mode):
    @nnx.jit(**mode)
    def step(model):
        model.w[...] *= 2
        return model.parts.a[...]

    def made(**options):
        return zoo.Box(w=nnx.Param(jnp.ones(()), **options), parts=zoo.Parts())

    model, frozen = nnx.to_refs(made()), made()
    frozen.parts = nnx.with_vars(frozen.parts, mutable=False)
    for count in range(3):
        step(model), step(frozen)
        assert model.w == frozen.w == 2 ** (count + 1)
        new = made(ref=True)
        step(new)
        assert new.w == 2
    frozen.w = nnx.with_vars(frozen.w, mutable=False)
    for refused in (frozen, frozen, nnx.with_vars(made(), mutable=False)):
        with pytest.raises(errors.ImmutableVariableError):
            step(refused)


@pytest.mark.parametrize("transform", [mapped, differentiated])
def test_a_change_of_structure_that_is_dropped_is_told_each_time(transform):
    call = transform(lambda model: setattr(model, "k", 4) or jnp.array(0.0), **GRAPH)
    model = zoo.Parts()
    for _ in range(5):
        with pytest.warns(errors.LostUpdateWarning, match="drops a change") as warned:
            call(model)
        assert warned[0].filename == __file__
        assert "a Parts." in str(warned[0].message)
    assert model.k == 1


def test_filters_that_look_at_values_are_asked_at_each_call():
    is_big = nnx.DiffState(0, lambda _, x: float(x[...].sum()) > 1)
    loss = nnx.grad(lambda m: m.a.sum() + m.b.sum(), argnums=is_big)
    model = zoo.Box(a=param(0, 1), b=param(2, 1))
    for _ in range(4):
        assert [*loss(model)] == ["b"]
    model.a[...] = jnp.full(1, 2.0)
    assert [*loss(model)] == ["a", "b"]


def test_filters_that_look_at_shapes_are_asked_at_each_call():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (jax.NamedSharding(mesh, jax.P(*x)) for x in ("x", ""))
    shardings = nnx.StateSharding({(lambda _, v: v.shape == (2,)): split, ...: whole})
    step = nnx.jit(lambda m: m.w.set_value(m.w + 1), in_shardings=(shardings,))
    model = zoo.Box(w=param(1))
    for size, expected in ((2, split), (2, split), (2, split), (3, whole)):
        model.w.set_value(jnp.ones(size))
        step(model)
        assert model.w[...].sharding.is_equivalent_to(expected, 1)


@tables.cases(
    "chosen",
    nnx.Param,
    nnx.Not(nnx.Cache),
    (nnx.All(nnx.Param, nnx.PathContains("w")), nnx.Param),
    nnx.Any(nnx.Param, nnx.filterlib.PathIn(("other",))),
)
def test_filters_of_classes_and_paths_follow_replaced_variables(chosen):
    grad = nnx.grad(lambda m: m.w**2 + m.a, argnums=nnx.DiffState(0, chosen))
    model = zoo.Box(w=nnx.Param(jnp.ones(())), a=nnx.Param(jnp.ones(())))
    for _ in range(4):
        assert "w" in grad(model)
    model.w = nnx.Cache(jnp.ones(()))
    assert "w" not in grad(model)


def test_a_compiled_function_is_called_under_other_transforms(mode):
    scale, model = nnx.jit(lambda model, x: model.w * x, **mode), zoo.Scale()
    for _ in range(2):
        gradients = jax.vmap(jax.grad(lambda x: scale(model, x)))(jnp.ones(3))
        assert gradients.tolist() == [2, 2, 2] and scale(model, 3.0) == 6


def test_copies_of_vars_are_not_taken_for_the_object():
    model, other = zoo.Scale(), object.__new__(zoo.Scale)
    vars(other).update(vars(model))
    vars(other)["w"] = nnx.Param(jnp.zeros(()))
    total = nnx.jit(lambda model: model.w * 1)
    assert [float(total(m)) for m in 3 * (model, other)] == 3 * [2, 0]
