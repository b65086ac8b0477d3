"""Loops: `scan` along axes of objects, with a carry; `while_loop` and `fori_loop`.

That it goes along any axis is asserted with the maps, in
`tests/contract/test_transforms/test_matrix.py`, and what it carries with other loops.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import comparisons, modes, tables, zoo


def test_outputs_may_have_different_axes(mode):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0, 1), **mode)
    def scan(c, x):
        return c + 1, x, x

    x = np.arange(6.0).reshape(2, 3)
    count, rows, columns = scan(0, x)
    assert count == 2
    np.testing.assert_array_equal(rows, x)
    np.testing.assert_array_equal(columns, x.T)


def test_axes_and_positions_may_be_integers_of_numpy():
    def step(c, x, y):
        return c + x @ y, x

    axes = nnx.Carry, np.int64(0), np.int32(-1)
    scan = nnx.scan(step, in_axes=axes, out_axes=(nnx.Carry, np.int64(1)))
    x = np.arange(6.0).reshape(2, 3)
    total, columns = scan(0.0, x, x.T)
    assert total == 55
    np.testing.assert_array_equal(columns, x.T)
    power = nnx.jit(lambda x, n: x**n, static_argnums=np.int64(1))
    assert power(2.0, 3) == 8


def test_the_place_of_the_carry_in_the_output_is_free(mode):
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(0, nnx.Carry), **mode)
    def scan(x, c):
        return x * c, c + x

    products, last = scan(jnp.arange(1.0, 4.0), 0.0)
    assert products.tolist() == [0, 2, 9] and last == 6


def test_reverse_and_length_and_unroll_are_those_of_jax(mode):
    @nnx.scan(in_axes=(nnx.Carry, 0), reverse=True, unroll=2, **mode)
    def f(c, x):
        return c + x, c

    assert f(0, jnp.arange(4))[1].tolist() == [6, 5, 3, 0]


def test_without_graph_updates_the_modules_of_the_carry_may_be_made_anew(value_mode):
    def step(node, x):
        node.variable[...] += x
        return zoo.Node(variable=node.variable), x

    box = zoo.Node(variable=nnx.Variable(jnp.array(0.0)))
    out, _ = nnx.scan(step, **value_mode)(box, jnp.arange(4.0))
    assert out.variable is box.variable and out is not box
    assert box.variable[...] == 6


def test_new_data_in_a_broadcast_object_is_refused():
    def step(x, model):
        model.extra = nnx.Param(x)
        return x

    model = zoo.Scale()
    with pytest.raises(TypeError, match=r"nnx\.scan.*broadcast argument must not"):
        nnx.scan(step, in_axes=(0, None), out_axes=0)(jnp.arange(3.0), model)
    assert not hasattr(model, "extra")


def test_state_axes_part_an_object():
    cell = zoo.Box(
        weight=nnx.Param(jnp.array([1.0, 2.0, 3.0])),
        total=nnx.BatchStat(jnp.array(0.0)),
        array=jnp.array(1.0),
        fixed=nnx.Cache(jnp.array(10.0)),
        rngs=nnx.Rngs(dropout=0),
    )
    axes = {nnx.Param: 0, (nnx.Cache, "dropout"): None, ...: nnx.Carry}

    @nnx.scan(in_axes=(nnx.StateAxes(axes), 0), out_axes=0)
    def step(cell, x):
        cell.total[...] += cell.weight
        cell.array = cell.array * 2
        cell.fixed[...] += 1
        return cell.total + cell.fixed + x, cell.rngs.dropout.uniform(())

    out, draws = step(cell, jnp.zeros(3))
    assert out.tolist() == [12, 14, 17] and len({*draws.tolist()}) == 1
    assert cell.total[...] == 6 and cell.array == 8 and cell.fixed[...] == 10


def test_pytree_values_and_numpy_arrays_are_scanned(mode):
    variable = nnx.Variable({"a": np.arange(3.0), "b": jnp.ones((3, 2))})

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, **mode)
    def step(total, variable):
        value = variable.get_value()
        variable.set_value({"a": value["a"] + 1, "b": value["b"]})
        return total + value["a"] + value["b"].sum()

    assert step(0.0, variable) == 9.0
    np.testing.assert_array_equal(variable.get_value()["a"], [1, 2, 3])


def test_one_variable_as_carry_and_scanned_is_refused(mode):
    variable = nnx.Variable(jnp.zeros(3))
    phrase = "Duplicate Variable" if mode is modes.TREE else "Inconsistent aliasing"
    with pytest.raises(ValueError, match=phrase):
        nnx.scan(lambda c, x: (c, None), **mode)(variable, variable)


def test_a_default_is_scanned_if_the_axes_have_an_entry_for_it():
    numbers = jnp.arange(3.0)

    def step(c, x, y=numbers, *, scale=2.0):
        return c + x * scale, y

    scanned = nnx.scan(step, in_axes=(nnx.Carry, 0, 0))
    for _ in range(2):
        last, ys = scanned(0.0, jnp.ones(3))
        assert last == 6.0 and ys.tolist() == [0.0, 1.0, 2.0]
    assert scanned(0.0, jnp.ones(3), jnp.ones(3))[1].tolist() == [1.0] * 3
    last, ys = nnx.scan(step)(0.0, jnp.ones(3))
    assert last == 6.0 and ys.shape == (3, 3)


def by_filter(axis):
    return nnx.Carry, nnx.StateAxes({...: axis})


@tables.cases(
    "axes, message",
    ({"in_axes": ((nnx.Carry, 0), 0)}, "Carry must"),
    ({"in_axes": (nnx.Carry, nnx.Carry)}, "Found multiple Carry definitions"),
    ({"in_axes": (0, 0)}, "If one of in_axes or out_axes has Carry, the other"),
    ({"out_axes": 0}, "If one of in_axes or out_axes has Carry, the other"),
    ({"out_axes": (nnx.Carry, None)}, "Cannot broadcast output state"),
    ({"out_axes": by_filter(None)}, "Cannot broadcast output state. Got StateAxes"),
    ({"out_axes": by_filter(nnx.Carry)}, "Cannot carry output state"),
    ({"in_axes": (nnx.Carry, "0")}, "Invalid axis '0' in `in_axes`"),
    ({"out_axes": (nnx.Carry, 0.5)}, "Invalid axis 0.5 in `out_axes`"),
    (
        {"in_axes": nnx.Carry(), "out_axes": nnx.Carry(), "length": 3},
        "in `in_axes` of nnx.scan: an axis is an integer, None, or the class",
    ),
    ({"in_axes": by_filter("0")}, "Invalid axis '0'"),
    ({"in_axes": (nnx.Carry, nnx.Param(0))}, r"found a Param at in_axes\[1\]"),
)
def test_wrong_axes_are_refused_at_creation(axes, message):
    with pytest.raises(ValueError, match=message):
        nnx.scan(lambda c, x: (c, x), **axes)


def test_wrong_calls_are_refused(mode):
    carry = nnx.scan(lambda c: c, in_axes=nnx.Carry, out_axes=nnx.Carry, **mode)
    with pytest.raises(ValueError, match="must take exactly one argument, got 2"):
        carry(1, 2)
    with pytest.raises(ValueError):
        carry(1)  # no length
    step = nnx.scan(lambda c, *x: (c, x), **mode)
    for args in [(1, 2), (1,), (1, jnp.arange(3), jnp.arange(3))]:
        with pytest.raises(ValueError):
            step(*args)
    with pytest.raises(ValueError, match="axis 2"):
        nnx.scan(lambda c, x: (c, x), in_axes=(nnx.Carry, 2), **mode)(1, jnp.ones(3))
    with pytest.raises(ValueError, match="index 0"):
        nnx.scan(lambda c, x: c, **mode)(1, jnp.arange(3))


def test_what_lacks_the_scanned_axis_is_named(mode):
    axes = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry, **mode}
    scan = nnx.scan(lambda x, carry: carry, **axes)
    with pytest.raises(ValueError, match=r"axis 0 .*\(\).*\n  at args\[0\]\['a'\]"):
        scan({"a": jnp.array(1.0)}, 0.0)
    with pytest.raises(ValueError, match=r"at args\[0\].default.*\n.*rngs.split\(n"):
        scan(nnx.Rngs(0), 0.0)


def test_other_objects_in_the_carry_are_refused(mode):
    phrase = "scan Variable identity must be preserved across iterations"
    if mode is modes.GRAPH_UPDATES:
        phrase = "Carry references must be the same between iterations"
    with pytest.raises(ValueError, match=phrase):
        nnx.scan(lambda m, x: (zoo.Scale(), x), **mode)(zoo.Scale(), jnp.arange(3.0))


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_attributes_of_carried_objects_stay(error):
    def step(model, x):
        model.extra = nnx.Param(x)
        return model, x

    model = zoo.Scale()
    with pytest.raises(error, match=r"nnx\.scan.*structure of the carry"):
        nnx.scan(step)(model, jnp.arange(3.0))
    assert not hasattr(model, "extra")


class Switched(nnx.Module):
    """Scales by another factor in each of its modes."""

    def __init__(self):
        self.mode, self.scale = "off", nnx.Param(jnp.array(2.0))

    def __call__(self, x):
        factor = jnp.array(1.0 if self.mode == "on" else 0.5)
        return jax.nn.relu(x) * self.scale * factor


def test_what_all_steps_set_first_is_set():
    def step(model, x):
        model.mode = "on"
        model.scale[...] += 1.0
        return model, model(x)

    model = Switched()
    out, y = nnx.scan(step)(model, jnp.ones(3))
    assert out is model and model.mode == "on" and y.tolist() == [3.0, 4.0, 5.0]
    # From now on there is nothing to set.
    assert nnx.scan(step)(model, jnp.ones(2))[1].tolist() == [6.0, 7.0]


def _set_after_use(model, x):
    y = model(x)
    model.mode = "on"
    return model, y


def _toggled(model, x):
    model.mode = "off" if model.mode == "on" else "on"
    return model, x


def _counting(model, x):
    model.mode += "."
    return model, x


def _with_another_object(model, x):
    model.part = nnx.Dict()
    return model, x


@tables.cases("step", _set_after_use, _toggled, _counting, _with_another_object)
def test_steps_that_would_differ_are_refused(step):
    model = Switched()
    with pytest.raises(ValueError, match=r"structure of the carry|Carry references"):
        nnx.scan(step)(model, jnp.ones(3))
    assert model.mode == "off" and not hasattr(model, "part")


@pytest.mark.parametrize("step", [_set_after_use, _toggled, _counting])
def test_the_same_of_what_goes_round_by_filters(step):
    model, axes = Switched(), nnx.StateAxes({...: nnx.Carry})
    scan = nnx.scan(lambda m, x: step(m, x)[1], in_axes=(axes, 0), out_axes=0)
    with pytest.raises(ValueError, match=r"of the carry.*\n  args\[0\]\.mode"):
        scan(model, jnp.ones(3))
    assert model.mode == "off"


@pytest.mark.parametrize("sets", [False, True])
def test_scanned_layers_with_a_carried_stream_get_new_data(sets):
    def step(layer, x):
        if sets:
            layer.mark = "called"
        layer.out = nnx.Intermediate(layer.dropout(layer.w * x))
        return x

    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    layers = zoo.Box(w=nnx.Param(jnp.ones(4)), dropout=dropout, mark="new")
    axes = nnx.StateAxes({nnx.RngState: nnx.Carry, ...: 0})
    scan = nnx.scan(step, in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)
    scan(layers, jnp.ones((2, 2)))
    assert layers.out.shape == (4, 2, 2) and dropout.rngs.count[...] == 4
    assert layers.mark == ("called" if sets else "new")


def test_a_carried_variable_may_be_a_new_one_with_graph_updates():
    def step(v, x):
        return nnx.Variable(v[...] + x), x

    out, _ = nnx.scan(step)(nnx.Variable(jnp.array(0.0)), jnp.arange(4.0))
    assert out[...] == 6


# ---------------------------------------------------------------- while_loop, fori_loop


LOOPS = pytest.mark.parametrize("loop", ["while_loop", "fori_loop"])
WITH_SCAN = pytest.mark.parametrize("loop", ["while_loop", "fori_loop", "scan"])


def pair():
    return zoo.Box(a=nnx.Variable(jnp.array(0.0)), b=nnx.Variable(jnp.array(1.0)))


def run(loop, body, value, count=3, **mode):
    """The body ``count`` times, in any loop."""
    if loop == "fori_loop":
        return nnx.fori_loop(0, count, lambda i, value: body(value), value, **mode)
    if loop == "scan":
        axes = {"in_axes": nnx.Carry, "out_axes": nnx.Carry}
        return nnx.scan(body, length=count, **axes, **mode)(value)

    def step(state):
        number, value = state
        return number + 1, body(value)

    return nnx.while_loop(lambda state: state[0] < count, step, (0, value), **mode)[1]


@WITH_SCAN
@pytest.mark.parametrize("count", [3, 0])
def test_updates_reach_the_callers_objects(loop, count, mode):
    model = pair()
    model.c = jnp.array(1.0)

    def body(model):
        model.a[...] += model.b
        model.c = model.c * 2
        return model

    out = run(loop, body, model, count, **mode)
    assert model.a[...] == count and out.c == 2**count
    assert model.c == (2**count if mode is modes.GRAPH_UPDATES else 1)
    assert (out is model) == (mode is modes.GRAPH_UPDATES)
    assert out.a is model.a and out.b is model.b


def test_writes_of_the_condition_are_dropped(mode):
    model = pair()

    def condition(model):
        model.b[...] += 100
        return model.a < 3

    def body(model):
        model.a[...] += 1
        return model

    nnx.while_loop(condition, body, model, **mode)
    assert model.a[...] == 3 and model.b[...] == 1


def test_the_number_of_the_step_is_passed(mode):
    total = nnx.Variable(jnp.array(0))

    def add(i, total):
        total[...] += i
        return total

    for bounds, expected in (((2, 5), 9), ((jnp.array(2), np.int32(5)), 18)):
        nnx.fori_loop(*bounds, add, total, **mode)
        assert total[...] == expected


def test_bounds_may_be_traced_or_known_for_a_derivative_in_reverse(mode):
    def power(x, n):
        return nnx.fori_loop(0, n, lambda i, y: x * y, 1.0, **mode)

    assert jax.jit(power)(2.0, 5) == 32
    assert jax.grad(lambda x: power(x, 3))(2.0) == 12


def swap_parts(model):
    model.a, model.b = model.b, model.a
    return model


def variable():
    return nnx.Variable(jnp.array(0.0))


OTHERS = {
    "a new object": (pair, lambda model: pair()),
    "a new Variable": (variable, lambda v: nnx.Variable(v[...] + 1)),
    "swapped Variables": (lambda: (variable(), variable()), lambda both: both[::-1]),
    "swapped attributes": (pair, swap_parts),
}


@LOOPS
@pytest.mark.parametrize("name", OTHERS)
def test_other_objects_than_those_of_the_caller_are_refused(name, loop, mode):
    make, body = OTHERS[name]
    value = make()
    phrase = f"{loop} Variable identity must be preserved across iterations"
    if mode is modes.GRAPH_UPDATES:
        phrase = "same reference and pytree structure"
    with comparisons.unchanged(value), pytest.raises(ValueError, match=phrase):
        run(loop, body, value, **mode)


@LOOPS
@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_a_changed_attribute_is_an_error_of_both_types(loop, error, mode):
    def mark(model):
        model.mark = 2
        return model

    model = pair()
    model.mark = 1
    with pytest.raises(error, match=r"mark.*1.*before.*2.*after"):
        run(loop, mark, model, **mode)
    assert model.mark == 1


PLAIN = {
    "while_loop": lambda x: jax.lax.while_loop(
        lambda state: state[0] < 3, lambda state: (state[0] + 1, state[1] * 2), (0, x)
    ),
    "fori_loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x * 2, x),
    "scan": lambda x: jax.lax.scan(lambda x, _: (x * 2, None), x, length=3),
}


@WITH_SCAN
def test_nothing_is_around_the_loop_that_jax_compiles(loop, mode):
    def f(x):
        return run(loop, lambda x: x * 2, x, **mode)

    ours, theirs = (jax.jit(g).lower(1.0).as_text() for g in (f, PLAIN[loop]))
    assert ours.count("func.func") == theirs.count("func.func")
