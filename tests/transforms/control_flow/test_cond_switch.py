"""Branches over objects: `cond` and `switch` (contract, section 9); `remat`."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import graftree as nnx
from tests import meshes, tables, zoo

BOTH = pytest.mark.parametrize("name", ["cond", "switch"])
NUMBERS = pytest.mark.parametrize("number", [0, 1])


def pair():
    a, b = nnx.Param(jnp.array(1.0)), nnx.BatchStat(jnp.array(2.0), tag="x")
    return zoo.Box(a=a, b=b)


def choose(name, number, branches, *operands, **mode):
    """Calls one of two branches."""
    if name == "cond":
        return nnx.cond(number == 0, *branches, *operands, **mode)
    return nnx.switch(number, branches, *operands, **mode)


def nothing(x):
    return None


# --------------------------------------------------------------------------- results


@tables.cases("pred", True, 1, 1.5, np.bool_(True), np.array(True), jnp.array(True))
def test_pred_is_anything_that_is_true(mode, pred):
    def first(pred):
        return nnx.cond(pred, lambda: 1.0, lambda: 2.0, **mode)

    assert first(pred) == jax.jit(first)(pred) == 1.0


@pytest.mark.parametrize(("index", "number"), [(-5, 0), (0, 0), (1, 1), (2, 2), (9, 2)])
def test_index_is_clamped(mode, index, number):
    branches = [lambda x, n=n: x + n for n in range(3)]
    for given in (index, jnp.array(index)):
        assert nnx.switch(given, branches, 10, **mode) == 10 + number


@BOTH
def test_all_variables_of_the_operands_come_back(mode, name):
    variable = nnx.Variable(np.array(1.0))
    choose(name, 0, [nothing, nothing], variable, **mode)
    assert isinstance(variable.get_raw_value(), jax.Array) and variable[...] == 1.0


@BOTH
def test_what_no_branch_writes_may_be_written_by_another_thread(mode, name):
    variable = nnx.Variable({"x": jnp.array(1.0)})

    def read(inner):
        trains = threading.Thread(target=variable.set_value, args=({"x": 5.0},))
        trains.start()
        trains.join()
        return inner["x"] * 1

    assert choose(name, 0, [read, read], variable, **mode) == 1.0
    assert variable["x"] == 5.0


def test_structure_may_change_in_all_branches_alike():
    def grow(value):
        def branch(pair):
            pair.new = nnx.Param(jnp.array(value))
            pair.a, pair.b = pair.b, pair.a

        return branch

    operand = pair()
    a, b = operand.a, operand.b
    nnx.switch(1, [grow(1.0), grow(2.0)], operand)
    assert operand.new[...] == 2.0 and operand.a is b and operand.b is a


@BOTH
@NUMBERS
def test_one_branch_may_replace_an_array_attribute(name, number):
    def double(box):
        box.array = box.array * 2

    def times(box, x):
        return x * box.array

    box = zoo.Box(array=jnp.array(3.0))
    choose(name, number, [nothing, double], box)
    assert box.array == [3.0, 6.0][number]
    before = box.array
    read = jax.jit(lambda x: choose(name, 0, [times, times], box, x))
    assert read(2.0) == 2 * before and box.array is before


# --------------------------------------------------------------------------- tracing


def test_one_function_for_all_branches_is_traced_once_in_a_call(mode):
    calls = []

    def f(variable):
        calls.append(None)
        variable[...] += 1

    variable = nnx.Variable(jnp.array(0))
    nnx.cond(True, f, f, variable, **mode)
    assert len(calls) == 1 and variable[...] == 1
    nnx.switch(1, (f, f, f), variable, **mode)
    assert len(calls) == 2 and variable[...] == 2


# ---------------------------------------------------------------------------- errors


def one(pair):
    return nnx.Param(1.0)


def set_to(number):
    return lambda pair: setattr(pair, "static", number)


# Of each difference: how it is told, and what the two branches do.
DIFFERENCES = {
    r"out: an array in {0}, \(\*,\) in {1}": (lambda p: 1.0, lambda p: (1.0,)),
    "out: a Param in {0}, a BatchStat in {1}": (one, lambda p: nnx.BatchStat(1.0)),
    r"out: \[\*\] in {0}, \(\*,\) in {1}": (lambda p: [1], lambda p: (1,)),
    "out, metadata 'tag': 'y' in {0}, nothing in {1}": (
        lambda p: nnx.Param(1.0, tag="y"),
        one,
    ),
    r"out.value: \[\*\] in {0}, \(\*,\) in {1}": (
        lambda p: nnx.Param([1.0]),
        lambda p: nnx.Param((1.0,)),
    ),
    r"out\[1\]: nothing in {0}, a Param in {1}": (
        lambda p: nnx.List([one(p)]),
        lambda p: nnx.List([one(p), one(p)]),
    ),
    r"operands\[0\]\.b, metadata 'tag': 'y' in {0}, 'x' in {1}": (
        lambda p: p.b.set_metadata(tag="y"),
        nothing,
    ),
    r"operands\[0\]\.a\.value: \[\*\] in {0}, \* in {1}": (
        lambda p: p.a.set_value([1.0]),
        nothing,
    ),
}
STRUCTURES = {
    "out.k: 1 in {0}, True in {1}": (lambda p: zoo.Box(k=1), lambda p: zoo.Box(k=True)),
    "out.x: a Param in {0}, a Box in {1}": (
        lambda p: zoo.Box(x=one(p)),
        lambda p: zoo.Box(x=zoo.Box(y=one(p))),
    ),
    r"operands\[0\]\.static: 1 in {0}, nothing in {1}": (set_to(1), nothing),
    r"operands\[0\]\.b: a BatchStat in {0}, nothing in {1}": (
        nothing,
        lambda p: delattr(p, "b"),
    ),
    r"operands\[0\]\.static: 1 in {0}, 2 in {1}": (set_to(1), set_to(2)),
    "out: a known object in {0}, a Param in {1}": (lambda p: p.a, one),
}
BRANCHES = {
    "cond": ("true_fun", "false_fun"),
    "switch": (r"branches\[0\]", r"branches\[1\]"),
}


def is_untouched(operand):
    values = operand.a[...], operand.b[...], operand.b.tag
    return values == (1.0, 2.0, "x") and not hasattr(operand, "static")


def check_difference(phrase, branches, mode):
    for name, called in BRANCHES.items():
        operand = pair()
        named = rf"(?s)nnx\.{name} must.*{phrase.format(*called)}"
        with pytest.raises(TypeError, match=named) as error:
            choose(name, 0, branches, operand, **mode)
        assert "PyTreeDef" not in str(error.value) and is_untouched(operand)


@pytest.mark.parametrize("phrase", DIFFERENCES)
def test_branches_that_differ_are_told_apart_in_words(phrase, mode):
    check_difference(phrase, DIFFERENCES[phrase], mode)


@pytest.mark.parametrize("phrase", STRUCTURES)
def test_differences_of_structure_count_with_graph_updates(phrase):
    check_difference(phrase, STRUCTURES[phrase], {})


@BOTH
@pytest.mark.parametrize("value", [np.ones(3), np.int32(1)], ids=["shape", "dtype"])
def test_other_shapes_and_dtypes_are_refused_by_jax(mode, name, value):
    operand = pair()
    branches = [lambda pair: pair.a.set_value(jnp.asarray(value)), nothing]
    with pytest.raises(TypeError, match=r"new pair\['a'\]"):
        choose(name, 0, branches, operand, **mode)
    assert is_untouched(operand)


@BOTH
@pytest.mark.parametrize("pred", [jnp.ones(2), "text", None])
def test_pred_that_is_no_scalar_is_refused(mode, name, pred):
    with pytest.raises(TypeError):
        if name == "cond":
            nnx.cond(pred, nothing, nothing, 1, **mode)
        else:
            nnx.switch(pred, [nothing, nothing], 1, **mode)


def test_switch_needs_a_branch():
    with pytest.raises(ValueError, match="Empty branch sequence: nnx.switch"):
        nnx.switch(0, [], 1.0)


# ------------------------------------------------------------------ captured objects


@BOTH
def test_a_write_to_an_operand_of_an_outer_trace_is_told_with_its_path(mode, name):
    def write(pair):
        pair.b[...] += 1
        return 0.0

    operand, branches = pair(), [lambda pair: pair.a * 2, write]
    with pytest.raises(nnx.errors.TraceContextError, match=r"operands\[0\]\.b"):
        jax.jit(lambda i: choose(name, i, branches, operand, **mode))(0)
    assert is_untouched(operand)


@BOTH
def test_one_branch_that_fails_leaves_the_operands(mode, name):
    def fail(pair):
        pair.a[...] += 1
        pair.b.set_metadata(tag="y")
        raise RuntimeError("stop")

    operand = pair()
    for branches in [(fail, nothing), (nothing, fail)]:
        with pytest.raises(RuntimeError, match="stop"):
            choose(name, 0, branches, operand, **mode)
    assert is_untouched(operand)


# -------------------------------------------------------------------------------- remat


def test_nothing_of_the_way_forward_is_kept():
    def residuals(function):
        _, backward = jax.vjp(function, jnp.ones(3))
        return len(jax.tree.leaves(backward))

    def function(x):
        return jnp.sin(jnp.sin(jnp.sin(x)))

    keep_all = jax.checkpoint_policies.everything_saveable
    assert residuals(nnx.remat(function)) < residuals(function)
    assert residuals(nnx.remat(function, policy=keep_all)) == residuals(function)


def test_options_reach_jax(mode):
    f = nnx.remat(lambda x: x, prevent_cse=False, **mode)
    assert "prevent_cse=False" in str(jax.make_jaxpr(f)(1.0))


def test_static_arguments_of_methods_and_keywords(mode):
    class Power(zoo.Scale):
        @nnx.remat(static_argnums=2, **mode)
        def __call__(self, x, power=2):
            assert type(power) is int  # not traced
            return self.w * x**power

    model = Power(3.0)
    assert model(2.0) == model(x=2.0) == 12.0
    assert model(2.0, 3) == model(2.0, power=3) == 24.0


def test_static_positions_are_checked():
    with pytest.raises(ValueError, match="only accepts 1 positional argument"):
        nnx.remat(lambda x: x, static_argnums=1)
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        nnx.remat(lambda x, y: x, static_argnums=1)(1.0, [])


# ------------------------------------------------------------- names, for its policies


def test_a_name_is_in_the_program_and_not_in_what_is_compiled():
    def named(x):
        return jnp.sin(nnx.name(x, "x"))

    assert "name=x" in str(jax.make_jaxpr(named)(1.0))
    texts = [jax.jit(f).lower(1.0).as_text() for f in (named, jnp.sin)]
    assert texts[0].count("stablehlo.") == texts[1].count("stablehlo.") == 1


@pytest.mark.parametrize("is_newer", [False, True], ids=["remat2", "remat3"])
@pytest.mark.parametrize("lift", [lambda f: f, nnx.jit, jax.grad])
def test_names_are_found_in_what_any_kind_of_remat_records(lift, is_newer):
    if "jax_remat3" not in jax.config.values:
        pytest.skip("This JAX has one kind of rematerialization.")
    before = jax.config.values["jax_remat3"]
    try:
        jax.config.update("jax_remat3", is_newer)
        check_names_are_found(lift)
    finally:
        jax.config.update("jax_remat3", before)


def check_names_are_found(lift):
    def f(x):
        return jnp.cos(nnx.name(jnp.sin(x), "a"))

    def run(where):
        return lift(nnx.remat(f, policy=nnx.memory.save(where)))(0.5)

    run("a")
    with pytest.raises(ValueError, match="'b'"):
        run("b")


def test_trees_keep_their_form_and_what_is_no_array():
    tree = {"a": jnp.ones(2, jnp.bfloat16), "b": (np.ones(3), "text", None, 2)}
    assert nnx.name(tree, "tree") is tree  # nothing is traced

    def traced(x):
        named = nnx.name({**tree, "c": x}, "tree")
        assert named["b"][1:] == ("text", None, 2)
        assert named["a"].dtype == jnp.bfloat16
        return named["c"]

    assert jax.eval_shape(traced, jnp.ones(3, jnp.int8)).dtype == jnp.int8


def test_the_sharding_of_what_is_named_stays():
    mesh, spec = meshes.mesh_of("Explicit", data=8), P("data", None)
    with jax.set_mesh(mesh):
        x = nnx.Param(jax.device_put(np.ones((8, 2)), NamedSharding(mesh, spec)))

        @nnx.jit
        def f(x):
            named = nnx.name(x[...], "x")
            assert jax.typeof(named).sharding.spec == spec
            return named

        assert f(x).sharding.spec == spec


@pytest.mark.parametrize("x", [nnx.Param(1.0), [zoo.Scale()], jax.new_ref(1.0)])
def test_objects_are_refused(x):
    with pytest.raises(TypeError, match=r"(?s)nnx.name expects arrays.*name: 'w'"):
        nnx.name(x, "w")


def test_names_are_strings():
    with pytest.raises(TypeError, match="is a string, got int"):
        nnx.name(1.0, 3)
    with pytest.raises(ValueError, match="empty"):
        nnx.name(1.0, "")
