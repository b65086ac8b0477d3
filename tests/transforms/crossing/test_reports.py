"""Objects at two places, or of another trace (contract of transforms, 1.3 to 1.5)."""

import jax.numpy as jnp
import pytest

import graftree as nnx
from tests.modes import GRAPH, GRAPH_UPDATES, TREE

SHARING, PLAIN = [GRAPH_UPDATES, GRAPH], [GRAPH, TREE]


def param(value=1.0):
    return nnx.Param(jnp.array(value))


def duplicate(transform, first, second):
    return (
        rf"(?s)^Duplicate Param.*found at paths.*  - {first}\n  - {second}\n.*"
        rf"nnx\.{transform} with graph_updates=False does not support Variable aliasing"
        rf".*nnx\.clone\(\).*graph=True, graph_updates=True.*nnx\.compat\.{transform}"
    )


# -------------------------------------------------------------------- inputs


@pytest.mark.parametrize("mode", SHARING)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: nnx.Dict(w=v)])
def test_same_object_twice_is_one_object_inside(mode, wrap):
    v = param()
    obj = wrap(v)

    @nnx.jit(**mode)
    def f(a, b):
        assert a is b
        variable = a if isinstance(a, nnx.Param) else a.w
        variable[...] += 1

    f(obj, obj)
    assert v[...] == 2.0


@pytest.mark.parametrize("mode", SHARING)
def test_shared_variable_inside_one_module_is_kept(mode):
    v = param()
    model = nnx.Dict(a=v, b=nnx.Dict(c=v))
    nnx.jit(lambda m: m.a.set_value(m.b.c + 5), **mode)(model)
    assert v[...] == 6.0 and model.b.c is v


def test_tree_mode_refuses_a_variable_at_two_places():
    v = param()
    nested = nnx.Dict(b=nnx.Dict(c=v))
    with pytest.raises(
        ValueError, match=duplicate("jit", r"\.args\[0\]\.a", r"\.args\[1\]\.b\.c")
    ):
        nnx.jit(lambda a, b: None, **TREE)(nnx.Dict(a=v), nested)
    with pytest.raises(
        ValueError, match=duplicate("jit", r"\.args\[0\]", r"\.kwargs\['b'\]")
    ):
        nnx.jit(lambda a, b: None, **TREE)(v, b=v)
    for transform in (nnx.grad, nnx.value_and_grad):
        with pytest.raises(ValueError, match="(?s)Duplicate Param.*found at paths"):
            transform(lambda a, b: a[...] + b[...], **TREE)(v, v)


def test_arrays_and_empty_modules_may_be_shared(mode):
    array, empty = jnp.ones(2), nnx.Dict(k=1)
    out = nnx.jit(lambda a, b, c, d: a + b + c.k + d.k, **mode)(
        array, array, empty, empty
    )
    assert out.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("mode", SHARING)
def test_cycles_are_fine_in_graph_mode(mode):
    model = nnx.Dict(w=param())
    model.me = model
    nnx.jit(lambda m: m.me.me.w.set_value(jnp.array(3.0)), **mode)(model)
    assert model.w[...] == 3.0


def test_cycles_are_refused_in_tree_mode():
    model = nnx.Dict(w=param())
    model.me = model
    with pytest.raises(ValueError, match="(?s)Cycle.*found at paths"):
        nnx.jit(lambda m: None, **TREE)(model)


@pytest.mark.parametrize("mode", SHARING)
def test_classes_that_are_no_pytrees_are_arguments_in_graph_mode(mode):
    class Hidden(nnx.Module, pytree=False):
        def __init__(self):
            self.w = param()

    model = Hidden()
    nnx.jit(lambda m: m.w.set_value(jnp.array(3.0)), **mode)(model)
    assert model.w[...] == 3.0
    with pytest.raises(
        TypeError, match="Hidden.*pytree=False.*\n.*not a valid JAX type"
    ):
        nnx.jit(lambda m: None, **TREE)(model)


# -------------------------------------------------------------------- outputs


def test_returned_inputs_are_the_callers_objects_with_graph_updates():
    model = nnx.Dict(w=param(), sub=nnx.Dict(v=param()))
    out, sub, w, again = nnx.jit(lambda m: (m, m.sub, m.w, [m]), **GRAPH_UPDATES)(model)
    assert out is model and sub is model.sub and w is model.w and again[0] is model


def test_new_objects_keep_their_sharing_with_graph_updates():
    def f(m):
        new = nnx.Dict(w=nnx.Param(m.w * 2), old=m.w)
        return new, new

    model = nnx.Dict(w=param())
    a, b = nnx.jit(f, **GRAPH_UPDATES)(model)
    assert a is b and a.old is model.w and a.w[...] == 2.0


@pytest.mark.parametrize("mode", PLAIN)
@pytest.mark.parametrize(
    "part", [lambda m: m, lambda m: m.w, lambda m: nnx.Dict(x=m.w)]
)
def test_returned_inputs_are_refused_without_graph_updates(mode, part):
    model = nnx.Dict(w=param())
    with pytest.raises(ValueError, match=r"(?s)Duplicate Param.*\.args\[0\].*\.out"):
        nnx.jit(part, **mode)(model)
    assert model.w[...] == 1.0


def test_new_object_returned_twice():
    def f():
        new = param()
        return new, new

    assert len(set(map(id, nnx.jit(f, **GRAPH)()))) == 1
    with pytest.raises(
        ValueError, match=r"(?s)Duplicate Param.*\.out\[0\].*\.out\[1\]"
    ):
        nnx.jit(f, **TREE)()


@pytest.mark.parametrize("mode", PLAIN)
def test_node_without_variables_comes_back_as_a_new_object(mode):
    model = nnx.Dict(k=1, a=jnp.ones(2))
    out = nnx.jit(lambda m: m, **mode)(model)
    assert out is not model and out.k == 1 and out.a.tolist() == [1.0, 1.0]
