"""Only the trace that owns an object may change it (contract, section 6)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx

TraceContextError = nnx.errors.TraceContextError

# Each runs `f(x)` inside the transform, x being a tracer.
TRANSFORMS = {
    "jit": lambda f: jax.jit(f)(1.0),
    "grad": lambda f: jax.grad(lambda x: (f(x), x)[1])(1.0),
    "value_and_grad": lambda f: jax.value_and_grad(lambda x: (f(x), x)[1])(1.0),
    "vmap": lambda f: jax.vmap(f)(jnp.ones(2)),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, jnp.ones(2)),
    "while": lambda f: jax.lax.while_loop(
        lambda x: x < 2.0, lambda x: (f(x), x + 1.0)[1], 1.0
    ),
    "cond": lambda f: jax.jit(
        lambda p: jax.lax.cond(p > 0, lambda x: (f(x), x)[1], lambda x: x, 1.0)
    )(1.0),
    "eval_shape": lambda f: jax.eval_shape(f, 1.0),
    "checkpoint": lambda f: jax.checkpoint(f)(1.0),
    "jvp": lambda f: jax.jvp(lambda x: (f(x), x)[1], (1.0,), (1.0,)),
    "vjp": lambda f: jax.vjp(lambda x: (f(x), x)[1], 1.0),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(1.0),
    "nnx.jit": lambda f: nnx.jit(f)(1.0),
    "nnx.grad": lambda f: nnx.grad(lambda x: (f(x), x)[1])(1.0),
}


class Model(nnx.Module):
    def __init__(self):
        self.array = nnx.Param(jnp.zeros(2), tag="x")
        self.mapping = nnx.Cache({"a": jnp.zeros(2)})
        self.items = nnx.Cache([jnp.zeros(2)])
        self.buffer = nnx.Cache(np.zeros(2))
        self.list = nnx.List([jnp.zeros(2), jnp.ones(2)])
        self.dict = nnx.Dict(a=jnp.zeros(2))
        self.bare = jnp.zeros(2)
        self.static = 1


def set_item(node, key, value):
    node[key] = value


def del_item(node, key):
    del node[key]


MUTATIONS = {
    "v[...] = x": (lambda m, x: set_item(m.array, ..., x), "Param"),
    "v[0] = x": (lambda m, x: set_item(m.array, 0, x), "Param"),
    "set_value": (lambda m, x: m.array.set_value(x), "Param"),
    "set_raw_value": (lambda m, x: m.array.set_raw_value(x), "Param"),
    "bypassed": (
        lambda m, x: m.array.set_raw_value(x, _unsafe_bypass_check=True),
        "Param",
    ),
    "copy_from": (lambda m, x: m.array.copy_from(nnx.Param(x)), "Param"),
    "update_from_state": (
        lambda m, x: m.array.update_from_state(nnx.Param(x)),
        "Param",
    ),
    "metadata": (lambda m, x: m.array.set_metadata(tag="y"), "Param"),
    "v['a'] = x": (lambda m, x: set_item(m.mapping, "a", x), "Cache"),
    "v['new'] = x": (lambda m, x: set_item(m.mapping, "new", x), "Cache"),
    "del v['a']": (lambda m, x: del_item(m.mapping, "a"), "Cache"),
    "list value": (lambda m, x: set_item(m.items, 0, x), "Cache"),
    "numpy value": (lambda m, x: set_item(m.buffer, 0, 1.0), "Cache"),
    "setattr": (lambda m, x: setattr(m, "bare", x), "'Model'"),
    "new attribute": (lambda m, x: setattr(m, "new", x), "'Model'"),
    "static attribute": (lambda m, x: setattr(m, "static", 2), "'Model'"),
    "delattr": (lambda m, x: delattr(m, "bare"), "'Model'"),
    "list[0] = x": (lambda m, x: set_item(m.list, 0, x), "'List'"),
    "list append": (lambda m, x: m.list.append(x), "'List'"),
    "list insert": (lambda m, x: m.list.insert(0, x), "'List'"),
    "list extend": (lambda m, x: m.list.extend([x]), "'List'"),
    "list pop": (lambda m, x: m.list.pop(), "'List'"),
    "list reverse": (lambda m, x: m.list.reverse(), "'List'"),
    "list clear": (lambda m, x: m.list.clear(), "'List'"),
    "del list[0]": (lambda m, x: del_item(m.list, 0), "'List'"),
    "list slice": (lambda m, x: set_item(m.list, slice(0, 1), [x]), "'List'"),
    "dict['a'] = x": (lambda m, x: set_item(m.dict, "a", x), "'Dict'"),
    "del dict['a']": (lambda m, x: del_item(m.dict, "a"), "'Dict'"),
    "nnx.update": (lambda m, x: nnx.update(m.dict, {"a": x}), "'Dict'"),
    "nnx.set_metadata": (
        lambda m, x: nnx.set_metadata(m, only=nnx.Param, tag="y"),
        "Param",
    ),
}


def snapshot(model):
    leaves = jax.tree.leaves(model)
    return [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]


def check_untouched(model, before, structure):
    after = jax.tree.leaves(model)
    assert jax.tree.structure(model) == structure
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in after)
    for old, new in zip(before, after, strict=True):
        same = (old == new).all() if isinstance(old, np.ndarray) else old is new
        assert same


def check_refused(transform, mutation):
    mutate, name = MUTATIONS[mutation]
    model = Model()
    before, structure = snapshot(model), jax.tree.structure(model)
    article = "" if name.startswith("'") else "a "
    message = f"Cannot mutate {name} from {article}different trace level"
    with pytest.raises(TraceContextError, match=message):
        TRANSFORMS[transform](lambda x: (mutate(model, x), x)[1])
    check_untouched(model, before, structure)


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("transform", ["jit", "vmap", "grad", "eval_shape"])
def test_every_mutation_of_a_captured_object_is_refused(transform, mutation):
    check_refused(transform, mutation)


@pytest.mark.parametrize("mutation", ["v[...] = x", "setattr", "v['a'] = x", "delattr"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_transform_protects_captured_objects(transform, mutation):
    check_refused(transform, mutation)


def test_error_is_an_error_of_the_library_and_no_value_error():
    assert issubclass(TraceContextError, nnx.errors.FlaxError)
    assert issubclass(nnx.errors.ImmutableVariableError, nnx.errors.FlaxError)
    assert not issubclass(TraceContextError, ValueError)


# ------------------------------------------------------------------- what is allowed


def read(model, x):
    parts = [
        model.array[...],
        model.mapping["a"],
        model.items[0],
        model.buffer[0],
        model.list[0],
        model.dict["a"],
        model.bare,
    ]
    return x + sum(jnp.sum(part) for part in parts)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_reading_is_always_allowed(transform):
    model = Model()
    before, structure = snapshot(model), jax.tree.structure(model)
    TRANSFORMS[transform](lambda x: read(model, x))
    check_untouched(model, before, structure)


def test_arguments_are_objects_of_the_inner_trace():
    @jax.jit
    def f(model):
        for name, (mutate, _) in MUTATIONS.items():
            if name not in ("delattr", "list pop", "list clear", "del list[0]"):
                mutate(model, jnp.ones(2) if name != "v[0] = x" else 1.0)
        return model

    model = Model()
    before, structure = snapshot(model), jax.tree.structure(model)
    assert f(model).static == 2
    check_untouched(model, before, structure)


def test_objects_made_inside_can_be_changed_inside():
    @jax.jit
    def f(x):
        model = Model()
        model.array[...] = x
        model.mapping["a"] = x
        model.bare = x
        model.list[0] = x
        return model

    model = f(jnp.full(2, 3.0))
    assert model.bare.tolist() == model.list[0].tolist() == [3.0, 3.0]
    model.bare = jnp.zeros(2)
    model.array[...] = jnp.zeros(2)


def test_objects_of_an_outer_trace_are_protected_from_an_inner_one():
    @jax.jit
    def f(x):
        variable = nnx.Param(x)
        jax.grad(lambda y: (variable.set_value(y), y)[1])(x)

    with pytest.raises(TraceContextError):
        f(1.0)


def test_merged_and_unflattened_objects_belong_to_the_trace():
    graphdef, state = nnx.split(Model())

    @jax.jit
    def f(state):
        model = nnx.merge(graphdef, state)
        model.array[...] += 1
        model.bare = model.bare + 1
        mapped = jax.tree.map(lambda x: x, model)
        mapped.array[...] += 1
        return mapped.array[...]

    assert f(state).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("transform", ["jit", "scan", "checkpoint"])
def test_ref_backed_variables_may_be_written_from_inside(transform):
    count = nnx.Variable(jnp.array(0.0), ref=True)

    def f(x):
        count[...] += x
        return x

    TRANSFORMS[transform](f)
    assert count[...] == {"jit": 1.0, "scan": 2.0, "checkpoint": 1.0}[transform]


def test_metadata_of_ref_backed_variables_may_be_written_from_inside():
    variable = nnx.Variable(jnp.array(0.0), ref=True)
    jax.jit(lambda: variable.set_metadata(tag="x"))()
    assert variable.tag == "x"


def test_property_setters_are_code_of_the_user():
    class Counted(nnx.Pytree):
        @property
        def total(self):
            return 0

        @total.setter
        def total(self, value):
            seen.append(value)

    seen, obj = [], Counted()
    jax.jit(lambda: setattr(obj, "total", 1))()
    assert seen == [1]
