"""What crosses into a trace and back: back come the changes, and only these."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.config import GRAPH, GRAPH_UPDATES, TREE
from graftree.transforms.crossing.inside import Inside
from graftree.transforms.crossing.outside import Call
from graftree.transforms.crossing.rows import Row

MODES = [GRAPH_UPDATES, GRAPH, TREE]


class Model(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.array(1.0))
        self.b = nnx.Param({"x": jnp.array(2.0)})
        self.c = nnx.Param(jnp.array(3.0))


def cross(model, change, mode, forced=frozenset()):
    """The outside of a call, and the result of its inside, without a JAX transform."""
    row = Row.uniform("jit", mode)
    call = Call(change, row, (model,), {})
    inside = Inside(row, call.groups)
    return call, inside.leave(inside.run(change), forced)


def values(result):
    """The positions of what changed, and the new values."""
    returned, changed, *_ = result
    return returned.changed, list(changed)


@pytest.mark.parametrize("mode", MODES)
def test_only_changed_variables_are_returned(mode):
    _, result = cross(Model(), lambda m: m.a.set_value(jnp.array(5.0)), mode)
    assert values(result) == ((0,), [5.0])
    assert result[0].structure is None and result[2] == []


@pytest.mark.parametrize("mode", MODES)
def test_rewritten_but_equal_object_is_no_change(mode):
    _, result = cross(Model(), lambda m: m.a.set_value(m.a.get_value()), mode)
    assert values(result) == ((), [])


@pytest.mark.parametrize("mode", MODES)
def test_writes_into_containers_are_seen(mode):
    model = Model()
    call, result = cross(model, lambda m: m.b.__setitem__("x", jnp.array(9.0)), mode)
    assert result[0].changed == (1,)
    call.commit(result)
    assert model.b["x"] == 9.0


@pytest.mark.parametrize("mode", MODES)
def test_unpacked_objects_are_fresh(mode):
    model = Model()

    def change(inner):
        assert inner is not model and inner.a is not model.a
        assert inner.b.get_raw_value() is not None
        inner.a[...] = jnp.array(7.0)

    _, result = cross(model, change, mode)
    assert model.a[...] == 1.0 and values(result)[1] == [7.0]


@pytest.mark.parametrize("mode", MODES)
def test_forced_leaves_are_returned_unchanged(mode):
    _, result = cross(Model(), lambda m: None, mode, frozenset({2}))
    assert values(result) == ((2,), [3.0])


def test_commit_checks_before_it_writes():
    model = Model()
    call, result = cross(
        model,
        lambda m: (m.a.set_value(jnp.array(5.0)), setattr(m, "new", 1), None)[2],
        GRAPH_UPDATES,
    )
    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(lambda: call.commit(result))()
    assert model.a[...] == 1.0 and not hasattr(model, "new")
    call.commit(result)
    assert model.a[...] == 5.0 and model.new == 1


def test_error_of_commit_names_the_path():
    model = nnx.Dict(sub=Model())
    call, result = cross(
        model, lambda m: m.sub.a.set_value(jnp.array(5.0)), GRAPH_UPDATES
    )
    with pytest.raises(nnx.errors.TraceContextError, match=r"args\[0\]\.sub\.a"):
        jax.jit(lambda: call.commit(result))()


def test_returned_part_is_static_and_comparable():
    a, b = (cross(Model(), lambda m: nnx.Param(m.a * 2), GRAPH)[1][0] for _ in range(2))
    assert a == b and hash(a) == hash(b)
    assert jax.tree.leaves(a) == []


def test_nothing_is_traced_that_mathematics_does_not_need():
    def f(model, x):
        model.a[...] = model.a * x
        return model.c + x

    jitted = nnx.jit(f)
    plain = jax.jit(lambda a, c, x: (a * x, c + x))
    model = Model()
    jitted(model, 2.0)
    text = str(jax.make_jaxpr(lambda x: jitted(nnx.clone(model), x))(2.0))
    wanted = str(jax.make_jaxpr(plain)(1.0, 3.0, 2.0))
    assert text.count(" mul ") == wanted.count(" mul ") == 1
    assert text.count(" add ") == wanted.count(" add ") == 1
