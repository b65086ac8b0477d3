"""Only the trace that owns an object may change it (contract, section 6).

No tracer rests in an object (contract of graphs, sections 19 and 21). A class may say
itself whether its objects may change: `_check_valid_context`.
"""

import copy
import pickle
from operator import delitem, setitem

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import comparisons, tables, zoo

TraceContextError = nnx.errors.TraceContextError
pytestmark = pytest.mark.filterwarnings("ignore:Calling Module.sow")


def passing(f):
    """The function that calls another, and gives its own argument back."""
    return lambda x: (f(x), x)[1]


# Each runs `f(x)` inside the transform, x being a tracer.
TRANSFORMS = {
    "jit": lambda f: jax.jit(f)(1.0),
    "grad": lambda f: jax.grad(passing(f))(1.0),
    "value_and_grad": lambda f: jax.value_and_grad(passing(f))(1.0),
    "vmap": lambda f: jax.vmap(f)(jnp.ones(2)),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0.0, jnp.ones(2)),
    "while": lambda f: jax.lax.while_loop(
        lambda x: x < 2.0, lambda x: passing(f)(x) + 1.0, 1.0
    ),
    "cond": lambda f: jax.jit(
        lambda p: jax.lax.cond(p > 0, passing(f), lambda x: x, 1.0)
    )(1.0),
    "eval_shape": lambda f: jax.eval_shape(f, 1.0),
    "checkpoint": lambda f: jax.checkpoint(f)(1.0),
    "jvp": lambda f: jax.jvp(passing(f), (1.0,), (1.0,)),
    "vjp": lambda f: jax.vjp(passing(f), 1.0),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(1.0),
    "nnx.jit": lambda f: nnx.jit(f)(1.0),
    "nnx.grad": lambda f: nnx.grad(passing(f))(1.0),
}


# Some of them, where each thing is tried in each.
TRACES = ("jit", "vmap", "grad", "eval_shape", "scan")
each_trace = pytest.mark.parametrize("transform", TRACES)


def box():
    """A Module that holds something of each kind that can be written."""
    return zoo.Box(
        array=nnx.Param(jnp.zeros(2), tag="x"),
        mapping=nnx.Cache({"a": jnp.zeros(2)}),
        items=nnx.Cache([jnp.zeros(2)]),
        buffer=nnx.Cache(np.zeros(2)),
        list=nnx.List([jnp.zeros(2), jnp.ones(2)]),
        dict=nnx.Dict(a=jnp.zeros(2)),
        held=nnx.data({"k": jnp.zeros(2), "v": nnx.Param(jnp.zeros(2))}),
        rngs=nnx.Rngs(0),
        rows=nnx.data([jnp.zeros(2)]),
        bare=jnp.zeros(2),
        static=1,
    )


BYPASSED = {"_unsafe_bypass_check": True}
MUTATIONS = {
    "v[...] = x": (lambda m, x: setitem(m.array, ..., x), "Param"),
    "v[...] = 0": (lambda m, x: setitem(m.array, ..., 0.0), "Param"),
    "v[0] = x": (lambda m, x: setitem(m.array, 0, x), "Param"),
    "set_value": (lambda m, x: m.array.set_value(x), "Param"),
    "set_raw_value": (lambda m, x: m.array.set_raw_value(x), "Param"),
    "bypassed": (lambda m, x: m.array.set_raw_value(x, **BYPASSED), "Param"),
    "copy_from": (lambda m, x: m.array.copy_from(nnx.Param(x)), "Param"),
    "from a state": (lambda m, x: m.array.update_from_state(nnx.Param(x)), "Param"),
    "metadata": (lambda m, x: m.array.set_metadata(tag="y"), "Param"),
    "metadata by dict": (lambda m, x: m.array.set_metadata({"tag": "y"}), "Param"),
    "metadata by name": (lambda m, x: m.array.set_metadata("tag", "y"), "Param"),
    "del_metadata": (lambda m, x: m.array.del_metadata("tag"), "Param"),
    "v['a'] = x": (lambda m, x: setitem(m.mapping, "a", x), "Cache"),
    "v['new'] = x": (lambda m, x: setitem(m.mapping, "new", x), "Cache"),
    "del v['a']": (lambda m, x: delitem(m.mapping, "a"), "Cache"),
    "list value": (lambda m, x: setitem(m.items, 0, x), "Cache"),
    "numpy value": (lambda m, x: setitem(m.buffer, 0, 1.0), "Cache"),
    "method of a dict value": (lambda m, x: m.mapping.update(k=x), "Cache"),
    "method of a list value": (lambda m, x: m.items.append(x), "Cache"),
    "method of a numpy value": (lambda m, x: m.buffer.sort(), "Cache"),
    "setattr": (lambda m, x: setattr(m, "bare", x), "'Box'"),
    "new attribute": (lambda m, x: setattr(m, "new", x), "'Box'"),
    "static attribute": (lambda m, x: setattr(m, "static", 2), "'Box'"),
    "delattr": (lambda m, x: delattr(m, "bare"), "'Box'"),
    "list[0] = x": (lambda m, x: setitem(m.list, 0, x), "'List'"),
    "list append": (lambda m, x: m.list.append(x), "'List'"),
    "list insert": (lambda m, x: m.list.insert(0, x), "'List'"),
    "list extend": (lambda m, x: m.list.extend([x]), "'List'"),
    "list pop": (lambda m, x: m.list.pop(), "'List'"),
    "list reverse": (lambda m, x: m.list.reverse(), "'List'"),
    "list clear": (lambda m, x: m.list.clear(), "'List'"),
    "del list[0]": (lambda m, x: delitem(m.list, 0), "'List'"),
    "list slice": (lambda m, x: setitem(m.list, slice(0, 1), [x]), "'List'"),
    "dict['a'] = x": (lambda m, x: setitem(m.dict, "a", x), "'Dict'"),
    "dict update": (lambda m, x: m.dict.update(n=x), "'Dict'"),
    "del dict['a']": (lambda m, x: delitem(m.dict, "a"), "'Dict'"),
    "nnx.update": (lambda m, x: nnx.update(m.dict, {"a": x}), "'Dict'"),
    "nnx.set_metadata": (
        lambda m, x: nnx.set_metadata(m, only=nnx.Param, tag="y"),
        "Param",
    ),
    "draw": (lambda m, x: m.rngs(), "RngCount"),
    "sow": (lambda m, x: m.sow(nnx.Intermediate, "s", x), "'Box'"),
    "update a Variable": (lambda m, x: nnx.update(m, {"array": x}), "Param"),
    "update an array": (lambda m, x: nnx.update(m, {"bare": x}), "'Box'"),
    "update a dict": (lambda m, x: nnx.update(m, {"held": {"k": x}}), "'Box'"),
    "update a new key": (lambda m, x: nnx.update(m, {"held": {"new": x}}), "'Box'"),
    "update a list": (lambda m, x: nnx.update(m, {"rows": {0: x}}), "'Box'"),
    "update a new attribute": (lambda m, x: nnx.update(m, {"added": x}), "'Box'"),
    "update last": (lambda m, x: nnx.update(m, {"bare": x, "held": {"v": x}}), "'Box'"),
    "delattr of a Variable": (lambda m, x: delattr(m, "array"), "'Box'"),
    "pop": (lambda m, x: nnx.pop(m, nnx.PathContains("array")), "'Box'"),
    "pop held": (lambda m, x: nnx.pop(m, nnx.PathContains("v")), "'Box'"),
    "pop arrays": (lambda m, x: nnx.pop(m, nnx.PathContains("bare")), "'Box'"),
}
# After these there is nothing to be written by another.
REMOVALS = ("delattr", "delattr of a Variable", "list pop", "list clear", "del list[0]")
REMOVALS += ("pop", "pop held", "pop arrays")


def snapshot(model):
    leaves, structure = jax.tree.flatten(model)
    copied = [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    return copied, structure, comparisons.snapshot(model)


def check_untouched(model, before):
    old_leaves, structure, identities = before
    leaves = jax.tree.leaves(model)
    assert jax.tree.structure(model) == structure
    assert comparisons.snapshot(model) == identities
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    for old, new in zip(old_leaves, leaves, strict=True):
        same = (old == new).all() if isinstance(old, np.ndarray) else old is new
        assert same


# One of each kind, which are tried in all transforms.
TYPICAL = ("v[...] = x", "v[...] = 0", "metadata", "v['a'] = x", "setattr", "delattr")
TYPICAL += ("new attribute", "dict update", "sow", "draw")


@tables.cases(
    "transform, mutation",
    *[
        (transform, mutation)
        for transform in TRANSFORMS
        for mutation in MUTATIONS
        if transform in TRACES or mutation in TYPICAL
    ],
)
def test_mutations_of_a_captured_object_are_refused(transform, mutation):
    mutate, name = MUTATIONS[mutation]
    model = box()
    before = snapshot(model)
    article = "" if name.startswith("'") else "a "
    message = f"Cannot mutate {name} from {article}different trace level"
    with pytest.raises(TraceContextError, match=message):
        TRANSFORMS[transform](passing(lambda x: mutate(model, x)))
    check_untouched(model, before)
    model.array[...] += 1
    model.rngs()


def test_error_is_an_error_of_the_library_and_no_value_error():
    assert issubclass(TraceContextError, nnx.errors.FlaxError)
    assert issubclass(nnx.errors.ImmutableVariableError, nnx.errors.FlaxError)
    assert nnx.errors.FlaxError is nnx.errors.GraftreeError
    assert not issubclass(TraceContextError, ValueError)


# ------------------------------------------------------------------- what is allowed


def read(model, x):
    parts = [model.array[...], model.mapping["a"], model.items[0], model.buffer[0]]
    parts += [model.list[0], model.dict["a"], model.bare]
    return x + sum(jnp.sum(part) for part in parts)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_reading_is_always_allowed(transform):
    model = box()
    before = snapshot(model)
    TRANSFORMS[transform](lambda x: read(model, x))
    check_untouched(model, before)


@each_trace
def test_functions_of_graphs_read_captured_objects(transform):
    model = box()
    before = snapshot(model)

    def f(x):
        graphdef, state = nnx.split(model)
        merged = nnx.merge(graphdef, state)
        copied = nnx.clone(model)
        copied.array[...] = x
        copied.new = x
        nnx.update(copied, {"held": {"k": x}})
        nnx.pop(copied, nnx.PathContains("array"), nnx.PathContains("held"))
        merged.bare = x
        assert len(list(nnx.iter_graph(model))) > 0
        return model.array[...] + model.bare

    TRANSFORMS[transform](f)
    check_untouched(model, before)


@each_trace
def test_merged_captured_variables_keep_their_trace(transform):
    model = box()
    before = snapshot(model)
    graphdef, state = nnx.split(model)

    def f(x):
        merged = nnx.merge(graphdef, state)
        merged.new = x
        phrase = "Cannot mutate Param from a different trace level"
        with pytest.raises(TraceContextError, match=phrase):
            merged.array[...] = x
        copied = nnx.merge(graphdef, state, copy=True)
        copied.array[...] = x
        raw = nnx.merge(graphdef, nnx.to_pure_dict(state))
        raw.array[...] = x

    TRANSFORMS[transform](f)
    check_untouched(model, before)


@each_trace
def test_a_copy_of_a_variable_made_inside_is_written_inside(transform):
    variable = nnx.Param(jnp.zeros(()))

    def f(x):
        copied = copy.copy(variable)
        copied[...] = x

    TRANSFORMS[transform](f)
    assert variable[...] == 0


@each_trace
@tables.cases(
    "remake",
    nnx.clone,
    copy.deepcopy,
    lambda m: nnx.map(lambda path, x: jax.tree.map(lambda y: y + 1, x), m),
    lambda m: jax.tree.map(lambda x: x, m),
    lambda m: nnx.merge(*nnx.split(m), copy=True),
    lambda m: pickle.loads(pickle.dumps(m)),
    ids=["clone", "deepcopy", "map", "tree.map", "merge", "pickle"],
)
def test_copies_made_inside_are_written_inside(transform, remake):
    model = box()
    del model.rngs  # JAX can't make a deep copy of a key in a trace
    before = snapshot(model)

    def f(x):
        made = remake(model)
        for name in ("set_value", "setattr", "new attribute", "list append"):
            MUTATIONS[name][0](made, x)
        MUTATIONS["update a dict"][0](made, x)

    TRANSFORMS[transform](f)
    check_untouched(model, before)


@each_trace
def test_objects_that_left_their_trace_can_t_be_written(transform):
    made = []
    TRANSFORMS[transform](passing(lambda x: made.append(zoo.Box(a=nnx.Param(1)))))
    with pytest.raises(TraceContextError):
        made[0].a.set_value(2)
    with pytest.raises(TraceContextError):
        made[0].b = 3


def test_unflatten_into_captured_objects_is_refused():
    model, refs = box(), nnx.graphlib.RefMap()
    before = snapshot(model)
    nnx.flatten(model, ref_index=refs)
    known = nnx.graphlib.IndexMap.from_refmap(refs)

    def f(x):
        graphdef, flat = nnx.flatten(model, ref_outer_index=refs)
        with pytest.raises(TraceContextError):
            nnx.unflatten(graphdef, [x for _ in flat], outer_index_outer_ref=known)

    jax.jit(f)(jnp.zeros(2))
    check_untouched(model, before)


def test_arguments_are_objects_of_the_inner_trace():
    @jax.jit
    def f(model):
        for name, (mutate, _) in MUTATIONS.items():
            if name not in REMOVALS:
                mutate(model, jnp.ones(2) if name != "v[0] = x" else 1.0)
        return model

    model = box()
    before = snapshot(model)
    assert f(model).static == 2
    check_untouched(model, before)


def test_objects_made_inside_can_be_changed_inside():
    @jax.jit
    def f(x):
        model = box()
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
    write = lambda x: jax.grad(passing(nnx.Param(x).set_value))(x)  # noqa: E731
    with pytest.raises(TraceContextError):
        jax.jit(write)(1.0)


@tables.cases("transform, expected", ("jit", 1.0), ("scan", 2.0), ("checkpoint", 1.0))
def test_ref_backed_variables_may_be_written_from_inside(transform, expected):
    count = nnx.Variable(jnp.array(0.0), ref=True)

    def f(x):
        count[...] += x
        count.set_metadata(tag="x")
        return x

    TRANSFORMS[transform](f)
    assert count[...] == expected and count.tag == "x"


@pytest.mark.parametrize("transform", ["jit", "grad", "scan"])
def test_ref_backed_variables_may_be_updated_from_inside(transform):
    model = zoo.Box(a=nnx.Param(jnp.ones(()), ref=True))
    TRANSFORMS[transform](passing(lambda x: nnx.update(model, {"a": jnp.zeros(())})))
    assert model.a[...] == 0.0


def test_property_setters_are_code_of_the_user():
    class Counted(nnx.Pytree):
        total = property(None, lambda self, value: seen.append(value))

    seen, obj = [], Counted()
    jax.jit(lambda: setattr(obj, "total", 1))()
    assert seen == [1]


# ------------------------------------------------------------------------- trace states


def test_trace_states():
    outer = nnx.tracers.TraceState()
    assert outer.is_valid() and outer == nnx.tracers.TraceState()
    assert jax.tree.leaves(outer) == []
    with pytest.raises(TypeError):
        hash(outer)
    assert pickle.loads(pickle.dumps(outer)).is_valid()


@each_trace
def test_trace_states_are_snapshots(transform):
    outer = nnx.tracers.TraceState()

    def f(x):
        inner = nnx.tracers.TraceState()
        assert inner.is_valid() and not outer.is_valid() and inner != outer
        assert jax.tree.map(lambda y: y, outer).is_valid()

    TRANSFORMS[transform](f)
    assert outer.is_valid()


# ------------------------------------------- classes that say themselves who may write


# Every way of changing an object asks `_check_valid_context`, as in Flax NNX. So Keras
# builds layers while it infers shapes.
class Held:
    """What the objects below are made of."""

    def __init__(self):
        self.a = 1
        self.list = self.List([1, 2, 3])
        self.dict = self.Dict(a=1, b=2)
        self.param = nnx.Param(jnp.ones(2))


def family(check):
    """A Module whose parts all have this check."""

    class Checked:
        _check_valid_context = check

    class Model(Checked, Held, nnx.Module, pytree=False):
        class List(Checked, nnx.List):
            pass

        class Dict(Checked, nnx.Dict):
            pass

    return Model


OWN_WRITES = {
    "setattr": lambda m: setattr(m, "a", 2),
    "new": lambda m: setattr(m, "b", 2),
    "delattr": lambda m: delattr(m, "a"),
    "list[i]=": lambda m: setitem(m.list, 0, 5),
    "list[:]=": lambda m: setitem(m.list, slice(0, 2), [5, 6]),
    "del list[i]": lambda m: delitem(m.list, 1),
    "del list[:]": lambda m: delitem(m.list, slice(0, 2)),
    "append": lambda m: m.list.append(4),
    "extend": lambda m: m.list.extend([4, 5]),
    "insert": lambda m: m.list.insert(1, 9),
    "pop": lambda m: m.list.pop(),
    "reverse": lambda m: m.list.reverse(),
    "clear": lambda m: m.list.clear(),
    "del list.0": lambda m: delattr(m.list, "0"),
    "dict[k]=": lambda m: setitem(m.dict, "c", 3),
    "del dict[k]": lambda m: delitem(m.dict, "a"),
    "dict.pop": lambda m: m.dict.pop("a"),
    "dict.update": lambda m: m.dict.update(c=3),
    "sow": lambda m: m.sow(nnx.Intermediate, "h", 1),
    "nnx.pop": lambda m: nnx.pop(m, nnx.Param),
    "set_attributes": lambda m: m.set_attributes(a=7),
}


def outcome(model):
    items = {k: v for k, v in vars(model).items() if not k.startswith("_pytree")}
    parts = items.pop("list", ()), items.pop("dict", {})
    return sorted(items), items.get("a"), list(parts[0]), dict(parts[1])


def in_a_trace(write, model):
    jax.eval_shape(passing(lambda x: write(model)), 1.0)


@pytest.mark.parametrize("write", OWN_WRITES.values(), ids=OWN_WRITES)
def test_objects_that_allow_it_change_inside_another_trace(write):
    model, expected = (family(lambda self, error_msg: None)() for _ in range(2))
    in_a_trace(write, model)
    write(expected)
    assert outcome(model) == outcome(expected)


@pytest.mark.parametrize("write", OWN_WRITES.values(), ids=OWN_WRITES)
def test_objects_that_refuse_it_stay_as_they_are(write):
    locked = []

    def check(self, error_msg):
        if locked:
            raise RuntimeError(error_msg())

    model = family(check)()
    before = outcome(model)
    locked.append(True)
    with pytest.raises(RuntimeError, match="Cannot mutate"):
        write(model)
    assert outcome(model) == before


def test_a_check_may_come_and_go():
    class Model(nnx.Module):
        pass

    write, model = OWN_WRITES["setattr"], Model()
    with pytest.raises(TraceContextError):
        in_a_trace(write, model)
    Model._check_valid_context = lambda self, error_msg: None
    in_a_trace(write, model)
    assert model.a == 2
    del Model._check_valid_context
    with pytest.raises(TraceContextError):
        in_a_trace(write, model)
    model._check_valid_context = lambda error_msg: None  # of this object alone
    in_a_trace(write, model)


def test_compiled_functions_see_what_was_allowed():
    model = family(lambda self, error_msg: None)()
    double = nnx.jit(lambda m, x: m.a * x, graph=True)
    assert [int(double(model, 3)) for _ in range(3)] == [3, 3, 3]
    in_a_trace(lambda m: setattr(m, "a", 5), model)
    assert int(double(model, 3)) == 15
