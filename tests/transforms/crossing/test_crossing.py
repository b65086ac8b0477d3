"""What crosses into a trace and back, where the contract's tables say nothing.

What each transform lets through in each mode is in `tests/contract/test_transforms`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree import config, errors
from tests import modes, tables, zoo
from tests.contract.test_transforms.matrix import MESH, SPEC, cases


def test_modes_are_two_booleans():
    assert config.propagation(True, True) == config.GRAPH_UPDATES
    assert config.propagation(True, False) == config.GRAPH
    assert config.propagation(False, True) == config.TREE
    assert config.propagation(None, None) == config.GRAPH_UPDATES
    with nnx.set_graph_updates(False):
        assert config.propagation(None, None) == config.GRAPH


@pytest.mark.parametrize("transform", [nnx.jit, nnx.grad])
def test_other_callables_are_taken(transform):
    class Plain(nnx.Pytree):
        def __call__(self, x):
            return x * 2

    for f in (Plain().__call__, zoo.Scale(), functools.partial(lambda x: x * 2.0)):
        assert transform(f)(3.0) == (6 if transform is nnx.jit else 2)


def test_compiled_functions_have_keywords_and_defaults(mode):
    @nnx.jit(**mode)
    def f(*, model, x=1.0):
        model.w[...] += x

    model = zoo.Scale()
    f(model=model, x=3.0)
    f(model=model)
    assert model.w == 6


def takes(*names):
    return cases(lambda row: row.transform in names)


@takes("jit", "grad")
def test_values_may_change_their_shape_or_a_part(case):
    def change(model, x):
        model.a.set_value(jnp.full(3, 7.0))
        model.b["x"] = model.b["x"] * 4

    model = zoo.Box(a=nnx.Param(jnp.ones(())), b=nnx.Param({"x": jnp.array(2.0)}))
    a = model.a
    case(change, model)
    assert model.a is a and a[...].tolist() == [7, 7, 7] and model.b["x"] == 8


@takes("jit", "grad")
def test_containers_of_the_caller_are_left_alone(case):
    def change(model, x):
        model.items[0][...] *= 2
        model.items.append(nnx.Param(jnp.array(3.0)))

    model = zoo.Box(items=nnx.data([nnx.Param(jnp.array(1.0))]))
    items = model.items
    case(change, model)
    assert len(items) == 1 and items[0] == 2


def test_a_function_that_jax_refuses_changes_nothing(mode):
    def bad(model):
        model.w[...] *= 2
        model.static = 5
        return "no array"

    model = zoo.Box(w=nnx.Param(jnp.array(1.0)), static=1)
    with pytest.raises(TypeError):
        nnx.jit(bad, **mode)(model)
    assert model.w == 1 and model.static == 1


def test_a_write_into_another_trace_is_told_with_its_path(mode):
    model = nnx.Dict(sub=zoo.Scale())
    step = nnx.jit(lambda m: m.sub.w.set_value(m.sub.w + 1), **mode)
    for count in range(4):
        with pytest.raises(errors.TraceContextError, match=r"args\[0\]\.sub\.w"):
            jax.jit(lambda: step(model))()
        assert model.sub.w == 2 + count
        step(model)


def test_classes_that_are_no_pytrees_are_arguments_of_graphs(graph_mode):
    model = zoo.Hidden(w=nnx.Param(jnp.array(1.0)))
    nnx.jit(lambda m: m.w.set_value(jnp.array(3.0)), **graph_mode)(model)
    assert model.w == 3
    phrase = "Hidden.*pytree=False.*\n.*not a valid JAX type"
    with pytest.raises(TypeError, match=phrase):
        nnx.jit(lambda m: None, **modes.TREE)(model)


@takes("jit", "remat", "checkify", "cond", "switch")
def test_numbers_become_arrays(case):
    def f(model, x):
        model.a.set_value(7)
        return 1.0, nnx.Cache(2), None

    model = zoo.Parts()
    number, variable, nothing = case(f, model)
    values = number, variable.get_value(), model.a.get_value()
    assert all(isinstance(x, jax.Array) for x in values) and nothing is None
    assert values == (1.0, 2, 7)


NO_KEYWORDS = {
    "checkify": (nnx.checkify, modes.VALUES),
    "pmap": (nnx.pmap, {"graph_updates": modes.GRAPH_UPDATES}),
    "shard_map": (
        functools.partial(nnx.shard_map, mesh=MESH, in_specs=SPEC, out_specs=SPEC),
        modes.BY_NAME,
    ),
}


@pytest.mark.parametrize("name", NO_KEYWORDS)
def test_keywords_are_refused_by_name(name):
    transform, refusing = NO_KEYWORDS[name]
    message = rf"nnx.{name} takes no keyword arguments.*'model'"
    for mode in refusing.values():
        model = zoo.Counter()
        with pytest.raises(TypeError, match=message):
            transform(lambda model: model(), **mode)(model=model)
        assert model.count[...] == 0


NAMED_TWICE = {
    "jit": nnx.jit,
    "remat": nnx.remat,
    "vmap": nnx.vmap,
    "eval_shape": lambda f, **mode: lambda *x, **y: nnx.eval_shape(f, *x, **y, **mode),
}


@pytest.mark.parametrize("name", NAMED_TWICE)
def test_trees_name_an_alias_among_the_keywords(name):
    f = NAMED_TWICE[name](lambda a, b: 0.0, **modes.TREE)
    variable = nnx.Param(jnp.ones(2))
    with pytest.raises(ValueError, match="Duplicate Param") as error:
        f(zoo.Box(w=variable), b=variable)
    assert "  - .args[0].w\n  - .kwargs['b']" in str(error.value)


# ----------------------------------------------------- objects that are built as before


def fixed():
    """Only attributes can change in it; two of them hold nothing, or what is fixed."""
    layer = zoo.Box(kernel=nnx.Param(jnp.ones(2)), bias=nnx.data(None), use_bias=False)
    return zoo.Box(layer=layer, scale=nnx.data(None))


def containers():
    return nnx.Dict(
        named=nnx.data({"a": nnx.Param(jnp.ones(2)), "b": [jnp.ones(1)]}), size=1
    )


def zeros():
    return nnx.Param(jnp.zeros(2))


CHANGES = {
    "nothing": lambda fixed, others: None,
    "a Variable for None": lambda fixed, others: setattr(fixed, "scale", zeros()),
    "a Variable below": lambda fixed, others: setattr(fixed.layer, "bias", zeros()),
    "an alias": lambda fixed, others: setattr(fixed.layer, "kernel", others.named["a"]),
    "a static value": lambda fixed, others: setattr(fixed.layer, "use_bias", True),
    "more in a dict": lambda fixed, others: others.named.update(c=zeros()),
    "an alias in a dict": lambda fixed, others: others.named.update(
        a=fixed.layer.kernel
    ),
    "more in a list": lambda fixed, others: others.named["b"].append(jnp.zeros(1)),
    "item of a list": lambda fixed, others: others.named["b"].__setitem__(
        0, jnp.zeros(1)
    ),
    "less in a dict": lambda fixed, others: others.named.pop("a"),
    "a size": lambda fixed, others: setattr(others, "size", 2),
    "one in the other": lambda fixed, others: setattr(others, "fixed", fixed),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_objects_that_are_built_as_before_hide_no_change_in_others(name, swapped):
    def call(fixed, others):
        fixed.layer.kernel[...] += 1
        CHANGES[name](fixed, others)

    ours, theirs = (fixed(), containers()), (fixed(), containers())
    kernel = ours[0].layer.kernel
    call(*theirs)
    if swapped:
        nnx.jit(lambda others, fixed: call(fixed, others))(*ours[::-1])
    else:
        nnx.jit(call)(*ours)
    (ours_def, ours_state), (theirs_def, theirs_state) = map(nnx.split, (ours, theirs))
    assert ours_def == theirs_def
    jax.tree.map(np.testing.assert_array_equal, ours_state, theirs_state)
    assert (kernel is ours[0].layer.kernel) == (name != "an alias")


@tables.cases(
    "transform",
    lambda f, **mode: nnx.grad(f, argnums=1, **mode),
    lambda f, **mode: nnx.vmap(f, in_axes=(None, None), axis_size=2, **mode),
    nnx.jit,
    ids=["grad", "vmap", "jit"],
)
def test_writes_reach_no_numpy_array_of_the_caller(transform, mode):
    def count(box, x):
        box.count[...] += x
        return x

    given = np.zeros(2, np.float32)
    box = zoo.Box(count=nnx.BatchStat(given))
    with pytest.raises(ZeroDivisionError):
        transform(lambda box, x: (count(box, x), 1 / 0), **mode)(box, 1.0)
    assert box.count.get_raw_value() is given
    transform(count, **mode)(box, 1.0)
    assert box.count[...].tolist() == [1.0, 1.0]
    assert given.tolist() == [0.0, 0.0]
