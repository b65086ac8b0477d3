"""The modes of transforms: defaults, when they count, ``compat``, module paths.

At the end all that is set for a time: by a context, a decorator or a plain call.

What `set_graph_mode` and `set_graph_updates` are by themselves, and what functions
other than transforms do in each mode, is tested in ``test_graph_state/test_update.py``.
"""

import contextlib

import jax.numpy as jnp
import pytest

import graftree as nnx
from tests.contract.test_transforms.matrix import MESH, SPEC, X, flat
from tests.modes import GRAPH, GRAPH_UPDATES, TREE
from tests.threads import run_in_threads
from tests.zoo import Box, Parts

# Options with which a function ``f(a, b, x)`` can be transformed and then called.
OPTIONS = {
    "jit": {},
    "grad": {"argnums": (0, 1)},
    "value_and_grad": {"argnums": (0, 1)},
    "custom_vjp": {},
    "remat": {},
    "vmap": {},
    "pmap": {},
    "shard_map": {"mesh": MESH, "in_specs": SPEC, "out_specs": SPEC},
    "scan": {"in_axes": 0, "out_axes": 0},
}
LATE = ("scan",)


def small():
    return Box(a=nnx.Param(jnp.array([1.0, 2.0])), k=1)


def observe(f_of, options):
    """The mode in which a transform runs: by what it refuses, and what it keeps."""
    model = small()

    def f(a, b, x):
        a.k = 5
        return x.sum() if "argnums" in options else x

    transformed = f_of(f)
    if hasattr(transformed, "defvjp"):
        transformed.defvjp(lambda *args: (f(*args), None), lambda *args: None)
    transformed(model, small(), X)
    try:
        transformed(other := small(), other, X)
    except ValueError as error:
        assert "Duplicate" in str(error)
        return TREE if model.k == 1 else None
    return GRAPH_UPDATES if model.k == 5 else GRAPH


@contextlib.contextmanager
def default(mode):
    """A context in which the mode is the default."""
    updates = nnx.set_graph_updates(mode.get("graph_updates", True))
    with nnx.set_graph_mode(mode["graph"]), updates:
        yield


# In G, custom_vjp refuses the same object twice, as in T.
def expected_of(name, mode):
    return TREE if (name, mode) == ("custom_vjp", GRAPH) else mode


@pytest.mark.parametrize("name", OPTIONS)
def test_default_counts_when_the_function_is_given(name, mode):
    options = OPTIONS[name]

    def make(f):
        with default(mode):
            return getattr(nnx, name)(f, **options)

    assert observe(make, options) == expected_of(name, mode)


@pytest.mark.parametrize("name", OPTIONS)
def test_default_counts_when_options_are_given(name, mode):
    options = OPTIONS[name]

    def make(f):
        with default(mode):
            decorator = getattr(nnx, name)(**options)
        return decorator(f)

    seen = observe(make, options)
    assert seen == expected_of(name, GRAPH_UPDATES if name in LATE else mode)


@pytest.mark.parametrize("name", OPTIONS)
def test_keywords_beat_the_default(name, mode):
    options = OPTIONS[name]
    with default(TREE if mode == GRAPH_UPDATES else GRAPH_UPDATES):
        seen = observe(lambda f: getattr(nnx, name)(f, **options, **mode), options)
    assert seen == expected_of(name, mode)


@pytest.mark.parametrize("updates", [True, False, None])
def test_tree_mode_ignores_graph_updates(updates):
    make = lambda f: nnx.jit(f, graph=False, graph_updates=updates)  # noqa: E731
    assert observe(make, {}) == TREE


IMMEDIATE = {
    "cond": lambda f, *args: nnx.cond(True, f, f, *args),
    "switch": lambda f, *args: nnx.switch(0, [f, f], *args),
    "checkify": lambda f, *args: nnx.checkify(f)(*args),
    "while_loop": lambda f, *args: nnx.while_loop(
        lambda v: v[1] < 1, lambda v: (f(*v[0]), (v[0], v[1] + 1))[1], (args, 0)
    ),
    "fori_loop": lambda f, *args: nnx.fori_loop(0, 1, lambda i, v: (f(*v), v)[1], args),
}


@pytest.mark.parametrize("name", IMMEDIATE)
def test_calls_follow_the_default(name, mode):
    model, calls = Parts(), []
    is_refused = pytest.raises(ValueError, match="Duplicate")
    with default(mode), is_refused if mode == TREE else contextlib.nullcontext():
        IMMEDIATE[name](lambda a, b, x: (calls.append(a is b), x)[1], model, model, X)
    assert all(calls)


def test_eval_shape_follows_the_default():
    model = Parts()
    out = nnx.eval_shape(lambda m: m, model)
    assert type(out) is Parts
    with nnx.set_graph_updates(False), pytest.raises(ValueError, match="Duplicate"):
        nnx.eval_shape(lambda m: m, model)


@pytest.mark.parametrize("flag", ["nnx_graph_mode", "nnx_graph_updates"])
def test_flags_are_the_default_of_all_threads(flag):
    seen = []

    def look():
        seen.append(observe(nnx.jit, {}))

    try:
        nnx.config.update(flag, False)
        look()
        run_in_threads(look)
        with nnx.set_graph_mode(True), nnx.set_graph_updates(True):
            look()
    finally:
        nnx.config.update(flag, True)
    assert seen == [TREE if flag == "nnx_graph_mode" else GRAPH] * 2 + [GRAPH_UPDATES]


# --------------------------------------------------- transforms without graph updates

REFUSED = {
    "vjp": (NotImplementedError, lambda **m: nnx.vjp(jnp.sum, X, **m)),
    "jvp": (NotImplementedError, lambda **m: nnx.jvp(jnp.sum, (X,), (X,), **m)),
    "make_jaxpr": (ValueError, lambda **m: nnx.make_jaxpr(jnp.sum, **m)(X)),
    "jit_partial": (ValueError, lambda **m: nnx.jit_partial(jnp.sum, **m)(X)),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("mode", [{}, GRAPH_UPDATES])
def test_graph_updates_are_refused(mode, name):
    error, call = REFUSED[name]
    with pytest.raises(error, match="graph_updates") as raised:
        call(**mode)
    assert f"nnx.{name}" in str(raised.value) or f"`{name}`" in str(raised.value)


@pytest.mark.parametrize("name", REFUSED)
def test_they_run_without_graph_updates(value_mode, name):
    REFUSED[name][1](**value_mode)
    with default(value_mode):
        REFUSED[name][1]()


def test_cached_partial_needs_graph_updates(value_mode):
    with pytest.raises(ValueError, match="graph-mode-only API"):
        nnx.cached_partial(nnx.jit(lambda m: m), Parts(), **value_mode)


# ------------------------------------------------------------------------------- compat

GRAPH_ONLY = (
    "split state clone graphdef flatten iter_graph recursive_map view view_info"
    " iter_modules iter_children reseed backup_keys get_abstract_model"
).split()
WITH_UPDATES = (
    "jit shard_map grad value_and_grad custom_vjp vjp jvp remat vmap scan pmap"
    " while_loop fori_loop eval_shape cond switch checkify cached_partial split_rngs"
    " fork_rngs"
).split()


@pytest.mark.parametrize("name", GRAPH_ONLY + WITH_UPDATES)
def test_compat_has_the_function_with_other_defaults(name):
    partial = getattr(nnx.compat, name)
    updates = {"graph_updates": True} if name in WITH_UPDATES else {}
    assert partial.keywords == {"graph": True, **updates} and not partial.args


@pytest.mark.parametrize("name", ["jit_partial", "make_jaxpr", "transform_metadata"])
def test_compat_has_nothing_that_could_not_work(name):
    assert not hasattr(nnx.compat, name)


@pytest.mark.parametrize("name", OPTIONS)
def test_compat_has_graph_updates_whatever_the_default(name):
    options, transform = OPTIONS[name], getattr(nnx.compat, name)
    without = {**options, "graph_updates": False}
    with default(TREE):
        assert observe(lambda f: transform(f, **options), options) == GRAPH_UPDATES
        seen = observe(lambda f: transform(f, **without), options)
    assert seen == expected_of(name, GRAPH)


def test_keywords_beat_compat():
    model = Parts()
    tied = Box(a=model.a, b=model.a)
    assert list(nnx.compat.split(tied)[1]) == ["a"]
    with pytest.raises(ValueError, match="does not support shared references"):
        nnx.compat.split(tied, graph=False)
    with pytest.raises(ValueError, match="Duplicate"):
        nnx.compat.jit(lambda m: None, graph=False)(tied)


# -------------------------------------------------------------------------------- paths


def test_stages_are_instances_of_their_classes():
    compilation = nnx.transforms.compilation
    for mode, prefix in ((GRAPH_UPDATES, ""), (TREE, "Simple")):
        jitted = nnx.jit(lambda m, x: m.a * x, **mode)
        lowered = jitted.lower(Parts(), X)
        stages = jitted, jitted.trace(Parts(), X), lowered, lowered.compile()
        names = "JitWrapped", "Traced", "Lowered", "Compiled"
        for name, stage in zip(names, stages, strict=True):
            assert isinstance(stage, getattr(compilation, prefix + name))
        assert flat(stages[-1](Parts(), X)) == [10.0, 40.0]


# --------------------------------------------------------------- what is set for a time

# Of each how it is set, how it is read, and the default.
SETTINGS = {
    "graph mode": (nnx.set_graph_mode, nnx.set_graph_mode.current_value, True),
    "graph updates": (nnx.set_graph_updates, nnx.set_graph_updates.current_value, True),
    "placement": (nnx.use_eager_sharding, nnx.using_eager_sharding, True),
    "ref": (lambda x: nnx.var_defaults(ref=x), lambda: nnx.Param(1.0).ref, False),
    "hijax": (lambda x: nnx.var_defaults(hijax=x), lambda: nnx.Param(1.0).hijax, False),
    "older ref": (nnx.use_refs, nnx.using_refs, False),
    "older hijax": (nnx.use_hijax, nnx.using_hijax, False),
}
each_setting = pytest.mark.parametrize(
    ("setting", "current", "default"), SETTINGS.values(), ids=SETTINGS
)


@each_setting
def test_a_context_restores_also_after_an_exception(setting, current, default):
    with pytest.raises(KeyError), setting(not default) as bound:
        assert bound is None and current() is not default
        raise KeyError
    assert current() is default


@each_setting
def test_contexts_nest_and_calls_last_until_their_end(setting, current, default):
    with setting(not default):
        with setting(default):
            assert current() is default
        assert current() is not default
        setting(default)
        assert current() is default
        with setting(not default):
            assert current() is not default
        assert current() is default
    assert current() is default
    with setting(default):
        setting(not default)
        assert current() is not default
    assert current() is default


@each_setting
def test_decorated_functions_run_under_the_value(setting, current, default):
    @setting(not default)
    def inside():
        """Returns what is in force."""
        return current()

    assert current() is default
    assert inside() is not default and current() is default
    assert (inside.__name__, inside.__doc__) == ("inside", "Returns what is in force.")


@each_setting
def test_other_threads_see_the_default(setting, current, default):
    seen = []
    with setting(not default):
        run_in_threads(lambda: seen.append(current()))
    assert seen == [default]


@each_setting
def test_a_plain_call_counts_at_once_in_this_thread_only(setting, current, default):
    seen = []
    run_in_threads(lambda: (setting(not default), seen.append(current())))
    assert seen == [not default] and current() is default


# --------------------------------------------------------------------- var_defaults


def test_defaults_are_a_frozen_mapping_and_set_by_keyword_only():
    defaults = nnx.var_defaults()
    assert dict(defaults) == {"hijax": False, "ref": False}
    assert list(defaults) == ["hijax", "ref"] and len(defaults) == 2
    assert (defaults.hijax, defaults.ref, defaults["ref"]) == (False, False, False)
    with pytest.raises((AttributeError, TypeError)):
        defaults.ref = True
    with pytest.raises(KeyError):
        defaults["other"]
    with pytest.raises(TypeError):
        nnx.var_defaults(True)


@pytest.mark.parametrize(("name", "other"), [("ref", "hijax"), ("hijax", "ref")])
def test_defaults_are_independent(name, other):
    with nnx.var_defaults(**{name: True}):
        assert dict(nnx.var_defaults()) == {name: True, other: False}
        with nnx.var_defaults(**{other: True}):
            assert dict(nnx.var_defaults()) == {"hijax": True, "ref": True}
            with nnx.var_defaults(**{name: False}):
                assert nnx.var_defaults()[other] is True
    assert dict(nnx.var_defaults()) == {"hijax": False, "ref": False}


def test_arguments_beat_defaults():
    with nnx.var_defaults(ref=True):
        assert nnx.Param(jnp.ones(2)).ref is True
        assert nnx.Param(jnp.ones(2), ref=False).ref is False
        with nnx.var_defaults(ref=False):
            assert nnx.Param(jnp.ones(2)).ref is False
