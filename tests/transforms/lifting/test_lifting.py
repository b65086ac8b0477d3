"""What crosses into a trace and back: refs, arguments, threads; beyond the contract.

What each transform lets through in each mode is in `tests/contract/test_transforms`.
"""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree import errors
from tests import comparisons, modes, tables, threads, zoo
from tests.contract.test_transforms.matrix import MESH, SPEC, cases
from tests.static_values import Tag
from tests.transforms.lifting.test_repeated_calls import EACH


def takes(*names):
    return cases(lambda row: row.transform in names)


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


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat, nnx.vmap])
def test_trees_name_an_alias_among_the_keywords(transform):
    f = transform(lambda a, b: 0.0, **modes.TREE)
    variable = nnx.Param(jnp.ones(2))
    places = "  - .args[0].w\n  - .kwargs['b']"
    with comparisons.raises(ValueError, "Duplicate Param", places):
        f(zoo.Box(w=variable), b=variable)


@pytest.mark.parametrize("swapped", [False, True])
def test_an_argument_may_get_parts_of_another(swapped):
    """Also one in which nothing but its attributes can change."""

    def call(one, other):
        one.layer.kernel[...] += 1
        one.layer.bias = other.named["a"]
        other.named.update(a=one.layer.kernel, b=nnx.Param(jnp.zeros(2)))
        other.one = one

    def made():
        kernel, bias = nnx.Param(jnp.ones(2)), nnx.data(None)
        named = nnx.data({"a": nnx.Param(jnp.full(2, 3.0))})
        return zoo.Box(layer=zoo.Box(kernel=kernel, bias=bias)), zoo.Box(named=named)

    ours, theirs = made(), made()
    kernel, a = ours[0].layer.kernel, ours[1].named["a"]
    call(*theirs)
    if swapped:
        nnx.jit(lambda other, one: call(one, other))(*ours[::-1])
    else:
        nnx.jit(call)(*ours)
    (ours_def, ours_state), (theirs_def, theirs_state) = map(nnx.split, (ours, theirs))
    assert ours_def == theirs_def
    jax.tree.map(np.testing.assert_array_equal, ours_state, theirs_state)
    assert ours[1].named["a"] is kernel and ours[0].layer.bias is a


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


# --------------------------------------------------------------------------------- refs


def ref_param(value):
    return nnx.Param(jnp.array(value), ref=True)


def test_rematerialized_writes_are_done_once(mode):
    @nnx.remat(**mode)
    def f(x, v):
        v[...] += jax.lax.stop_gradient(x)
        return jnp.sin(x) * jax.lax.stop_gradient(v[...])

    v = ref_param(0.0)
    np.testing.assert_allclose(nnx.grad(f, **mode)(2.0, v), 2 * np.cos(2.0), rtol=1e-6)
    assert v[...] == 2
    jax.jit(jax.grad(f))(2.0, v)
    assert v[...] == 4


def test_gradients_pass_through_refs_that_are_differentiated(mode):
    @nnx.remat(**mode)
    def double(v):
        v[...] = 2 * v[...]

    def square(x):
        v = nnx.Variable(x, ref=True)
        double(v)
        return v[...] ** 2

    np.testing.assert_allclose(jax.grad(square)(3.0), 8 * 3.0)


def test_tangents_of_refs_are_in_other_refs(value_mode):
    v, tangent = ref_param(3.0), ref_param(1.0)

    def f(v):
        v[...] = v[...] ** 2
        return v[...]

    with pytest.raises(ValueError, match="as the tangent of primals"):
        nnx.jvp(f, (v,), (v,), **value_mode)
    assert v[...] == 3
    y, dy = nnx.jvp(f, (v,), (tangent,), **value_mode)
    assert (y, dy) == (9, 6) and v[...] == 9


def test_a_write_to_a_broadcast_ref_in_vmap_is_told_with_its_path():
    """Issue 12, §12; other errors have no such hint."""

    def write(m, x):
        m.inner.w[...] += x

    def fails(m, x):
        raise KeyError("stop")

    model = zoo.Box(inner=zoo.Box(w=ref_param(0.0)))
    told = "array ref that is not mapped", "args[0].inner.w", "nnx.to_arrays"
    with comparisons.raises(ValueError, *told):
        nnx.vmap(write, in_axes=(None, 0))(model, jnp.ones(3))
    with pytest.raises(KeyError) as caught:
        nnx.vmap(fails, in_axes=(None, 0))(model, jnp.ones(3))
    assert not any("ref" in note for note in getattr(caught.value, "__notes__", []))


# ---------------------------------------------------------------------------- arguments


def f(a, b, /, c, *, d=0):
    """A function with arguments of all kinds; gives the names of those that aren't."""
    return [isinstance(x, int) for x in (a, b, c, d)]


def g(*args, **kwargs):
    """A function whose signature tells nothing."""
    return [isinstance(x, int) for x in (*args, *kwargs.values())]


STATIC = {
    "none": (f, {}, ""),
    "position": (f, {"static_argnums": 0}, "a"),
    "name": (f, {"static_argnames": "c"}, "c"),
    "names": (f, {"static_argnames": ["c", "d"]}, "cd"),
    "position of a name": (f, {"static_argnums": 2}, "c"),
    "position and name": (f, {"static_argnums": 0, "static_argnames": "d"}, "ad"),
    "no signature": (g, {"static_argnums": 0, "static_argnames": "d"}, "ad"),
}


@pytest.mark.parametrize("name", STATIC)
def test_static_arguments_are_found_however_they_are_passed(name, mode):
    function, options, expected = STATIC[name]
    static = []

    @functools.wraps(function)
    def note(*args, **kwargs):
        static.append(function(*args, **kwargs))

    step = nnx.jit(note, **options, **mode)
    step(1, 2, 3, d=4)
    step(1, 2, c=3, d=4)
    assert static == [[x in expected for x in "abcd"]] * 2


INTERSECT = r"static_arg(nums|names) and donate_arg\1 cannot intersect"
REFUSED = [
    (f, {"donate_argnums": 3}, r"f has donate_argnums=\(3,\), but only accepts 3 posi"),
    (f, {"donate_argnums": -4}, r"f has donate_argnums=\(-4,\), but only accepts 3"),
    (f, {"static_argnums": 3}, r"f has static_argnums=\(3,\), but only accepts 3 posi"),
    (f, {"static_argnames": ("c", "x")}, r"invalid argnames \['x'\] in static_argn"),
    (g, {"static_argnames": "x", "donate_argnames": ("x", "y")}, INTERSECT),
    (f, {"static_argnums": 2, "donate_argnames": "c"}, "cannot intersect"),
]


@pytest.mark.parametrize(("function", "options", "message"), REFUSED)
def test_wrong_positions_and_names_are_refused(function, options, message):
    with pytest.raises(ValueError, match=message):
        nnx.jit(function, **options)


def test_positions_beyond_a_call_are_skipped_and_none_is_before_the_first():
    step = nnx.jit(lambda *args: len(args), static_argnums=(0, -1, 7))
    assert step(1, jnp.ones(1), 3) == 3
    with pytest.raises(ValueError, match="1 positional"):
        nnx.jit(lambda *args: None, static_argnums=-2)(1.0)


def test_static_values_must_be_hashable():
    with pytest.raises(ValueError, match=r"(?s)hashable.*nnx\.jit.*argument 0.*list"):
        nnx.jit(lambda x: None, static_argnums=0)([])


# ------------------------------------------------------------------------------ names


def named(net, x, *rest, train=False, **others):
    return 1


def names(function, *args, kwargs=(), **options):
    """What JAX calls the inputs of a compiled function."""
    traced = nnx.jit(function, **options).trace(*args, **dict(kwargs))
    return " ".join(traced.jaxpr.jaxpr.debug_info.arg_names)


@tables.cases(
    "function, args, kwargs, expected",
    (named, (1, 2, 3, {"k": 4}), {}, "net x rest[0] rest[1]['k']"),
    (named, (1,), {"train": True, "x": 2, "z": 3}, "net train x others['z']"),
    (functools.partial(named, 1), (2,), {}, "x"),
    (zoo.Scale.__call__, (zoo.Scale(), 1), {}, "self.w x"),
    (zoo.Scale(), (1,), {}, "x fun.w"),
    (dict, ({"a": 1},), {"b": [2]}, "args[0]['a'] kwargs['b'][0]"),
    (named, ({"k": nnx.List([zoo.Scale()])},), {"x": 1}, "net['k'][0].w x"),
)
def test_arguments_are_called_as_in_the_function(function, args, kwargs, expected):
    assert names(function, *args, kwargs=kwargs) == expected


def test_static_arguments_have_positions_but_no_names():
    options = {"static_argnums": 0, "static_argnames": "train"}
    kwargs = {"z": 4, "train": True}
    assert names(named, 1, 2, 3, kwargs=kwargs, **options) == "x rest[0] others['z']"


# ------------------------------------------------------------------------------ threads


def in_threads(work, *arguments):
    """Does some work in one thread for each argument."""
    threads.run_in_threads(*[lambda x=x: work(x) for x in arguments])


def multiply(model):
    model.w[...] *= model.factor
    return model.w[...]


@EACH
def test_threads_may_share_a_function(transform, mode):
    call = transform(multiply, **mode)

    def work(model):
        for model.factor in (1, 2, 3, 1, 2):
            call(model)
            call(model)

    models = [zoo.Scale(1.0) for _ in range(4)]
    in_threads(work, *models)
    assert [float(m.w) for m in models] == 4 * [144.0]


def test_threads_may_share_a_function_of_states(mode):
    step = nnx.jit(lambda state: jax.tree.map(lambda x: x * 0.5, state), **mode)

    def work(start):
        state = nnx.State({"a": nnx.Param(jnp.array(start))})
        for _ in range(20):
            state = step(state)
        assert state["a"] == start * 0.5**20

    in_threads(work, 1.0, 2.0, 3.0, 4.0)


def test_threads_may_share_a_model(mode):
    total, model = nnx.jit(lambda model, x: model.w + x, **mode), zoo.Scale()

    def work(offset):
        for x in range(offset, offset + 30):
            assert float(total(model, x)) == 2 + x

    in_threads(work, 0, 100, 200, 300)


def test_a_model_that_another_thread_switches_is_in_one_mode_or_the_other(mode):
    step, model, done = nnx.jit(lambda m: m.w * m.flag, **mode), zoo.Scale(), []
    model.flag = 0

    def switch():
        for count in range(200):
            model.flag = count % 2
        done.append(1)

    def call():
        while not done:
            assert float(step(model)) in (0, 2)

    threads.run_in_threads(switch, call, call)
    for model.flag in (0, 1, 0):
        assert float(step(model)) == 2 * model.flag


def test_threads_that_come_at_once_with_equal_structures_trace_once(mode):
    traces, start = [], threading.Barrier(4)
    step = nnx.jit(lambda model: traces.append(1) or model.w * 2, **mode)

    def come(model):
        start.wait()
        assert step(model) == 4

    equal = [zoo.Box(w=nnx.Param(jnp.array(2.0)), tag=Tag("a")) for _ in range(4)]
    in_threads(come, *equal)
    assert len(traces) == 1


@jax.tree_util.register_pytree_node_class
class Dataset:
    """As in GPJax: its constructor reads shapes, so it accepts nothing but arrays."""

    def __init__(self, x, y):
        assert x.shape[0] == y.shape[0]
        self.x, self.y = x, y

    def tree_flatten(self):
        return (self.x, self.y), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize("transform", [nnx.grad, lambda f: nnx.jit(nnx.grad(f))])
def test_a_pytree_that_accepts_only_arrays_is_an_argument(transform):
    model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    data = Dataset(jnp.ones((4, 2)), jnp.ones((4, 1)))
    grads = transform(lambda model, data: jnp.sum(model(data.x) - data.y))(model, data)
    np.testing.assert_allclose(grads.kernel[...], [[4.0], [4.0]])


def test_a_prefix_that_does_not_fit_it_is_told(mode):
    data = Dataset(jnp.ones((4, 2)), jnp.ones((4, 1)))
    mapped = nnx.vmap(lambda data: data.x, in_axes=((0, 0),), **mode)
    told = r"`in_axes` of nnx.vmap must be a tree prefix(.|\n)*CustomNode\(Dataset"
    with pytest.raises(ValueError, match=told):
        mapped(data)
