"""What crosses a boundary: back come the changes, and only these."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.transforms.crossing import boundary, packing
from graftree.transforms.crossing.propagation import GRAPH, GRAPH_UPDATES, TREE

MODES = [GRAPH_UPDATES, GRAPH, TREE]


class Model(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.array(1.0))
        self.b = nnx.Param({"x": jnp.array(2.0)})
        self.c = nnx.Param(jnp.array(3.0))


def cross(model, change, mode):
    """Packs, unpacks, changes and collects, without a JAX transform."""
    packed = packing.pack(((model,), {}), mode, "jit")
    crossing = boundary.Crossing(packed.skeleton, packed.values(), mode, "jit")
    (inner,), _ = crossing.tree
    out = change(inner)
    return packed, crossing.collect(out)


def commit(packed, found):
    structure, out = found.structure.values(), found.out.values()
    return boundary.commit(packed, found.returned, found.changed, structure, out)


@pytest.mark.parametrize("mode", MODES)
def test_only_changed_variables_are_returned(mode):
    _, found = cross(Model(), lambda m: m.a.set_value(jnp.array(5.0)), mode)
    assert found.returned.changed == (0,) and found.changed == [5.0]
    assert found.returned.structure is None and found.structure.values() == []


@pytest.mark.parametrize("mode", MODES)
def test_rewritten_but_equal_object_is_no_change(mode):
    _, found = cross(Model(), lambda m: m.a.set_value(m.a.get_value()), mode)
    assert found.returned.changed == ()


@pytest.mark.parametrize("mode", MODES)
def test_writes_into_containers_are_seen(mode):
    model = Model()
    packed, found = cross(model, lambda m: m.b.__setitem__("x", jnp.array(9.0)), mode)
    assert found.returned.changed == (1,)
    commit(packed, found)
    assert model.b["x"] == 9.0


@pytest.mark.parametrize("mode", MODES)
def test_unpacked_objects_are_fresh(mode):
    model = Model()

    def change(inner):
        assert inner is not model and inner.a is not model.a
        assert inner.b.get_raw_value() is not None
        inner.a[...] = jnp.array(7.0)

    _, found = cross(model, change, mode)
    assert model.a[...] == 1.0 and found.changed == [7.0]


@pytest.mark.parametrize("mode", MODES)
def test_forced_leaves_are_returned_unchanged(mode):
    packed = packing.pack(((Model(),), {}), mode, "jit")
    crossing = boundary.Crossing(packed.skeleton, packed.values(), mode, "jit")
    found = crossing.collect(None, frozenset({2}))
    assert found.returned.changed == (2,) and found.changed == [3.0]


def test_commit_checks_before_it_writes():
    model = Model()
    packed, found = cross(
        model,
        lambda m: (m.a.set_value(jnp.array(5.0)), setattr(m, "new", 1), None)[2],
        GRAPH_UPDATES,
    )
    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(lambda: commit(packed, found))()
    assert model.a[...] == 1.0 and not hasattr(model, "new")
    commit(packed, found)
    assert model.a[...] == 5.0 and model.new == 1


def test_error_of_commit_names_the_path():
    model = nnx.Dict(sub=Model())
    packed, found = cross(
        model, lambda m: m.sub.a.set_value(jnp.array(5.0)), GRAPH_UPDATES
    )
    with pytest.raises(nnx.errors.TraceContextError, match=r"args\[0\]\.sub\.a"):
        jax.jit(lambda: commit(packed, found))()


def test_returned_part_is_static_and_comparable():
    a, b = (cross(Model(), lambda m: nnx.Param(m.a * 2), GRAPH)[1] for _ in range(2))
    assert a.returned == b.returned and hash(a.returned) == hash(b.returned)
    assert jax.tree.leaves(a.returned) == []


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
