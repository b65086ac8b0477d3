"""Streams of random keys, sets of them, their distributions; threads that draw."""

import functools
import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from tests import comparisons, tables, threads
from tests.core.rng.test_splitting import counts, data, keys, nth_key, shapes

# ------------------------------------------------------------------------- variables


def test_variables_carry_the_name_of_the_stream():
    stream = nnx.RngStream(0, tag="dropout")
    kinds = type(stream.key), type(stream.count)
    assert kinds == (nnx.RngKey, nnx.RngCount)
    assert all(issubclass(kind, nnx.RngState) for kind in kinds)
    assert stream.tag == stream.key.tag == stream.count.tag == "dropout"


def test_leaves_are_count_and_key_and_found_by_filters():
    rngs = nnx.Rngs(params=0, dropout=1)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(rngs.params)]
    assert paths == [".count.value", ".key.value"]
    assert nnx.state(rngs, nnx.rnglib.NotKey) == nnx.state(rngs, nnx.RngCount)
    assert list(nnx.state(rngs, "dropout")) == ["dropout"]


def test_count_is_a_uint32_zero_of_the_shape_of_the_key():
    stream = nnx.RngStream(jax.random.split(jax.random.key(0), (2, 3)), tag="a")
    assert stream.count.dtype == jnp.uint32
    assert stream.count[...].tolist() == [[0] * 3] * 2


# -------------------------------------------------------------------- what keys may be


@pytest.mark.parametrize("seed", [3, np.int64(3), np.uint8(3), jax.random.PRNGKey(3)])
def test_an_integer_or_the_numbers_of_a_key_are_a_seed(seed):
    assert data(nnx.RngStream(seed, tag="a").key) == [0, 3]
    assert data(nnx.Rngs(True).default.key) == [0, 1]


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_a_typed_key_is_kept_as_it_is(implementation):
    key = jax.random.key(0, impl=implementation)
    assert nnx.RngStream(key, tag="a").key.get_raw_value() is key
    assert nnx.Rngs(key).default.key.get_raw_value() is key


@tables.cases("value", 1.0, "seed", None, [1], np.zeros(2, "uint32"), jnp.array([1, 2]))
def test_anything_else_is_refused(value):
    with comparisons.raises(ValueError, "Invalid rng value", str(value)):
        nnx.Rngs(params=value)


# --------------------------------------------------------------------------- drawing


def test_the_nth_draw_folds_n_into_the_key():
    stream = nnx.RngStream(5, tag="a")
    assert [data(stream()) for _ in "abc"] == [data(nth_key(5, n)) for n in range(3)]
    assert data(stream.key) == [0, 5]
    with pytest.raises(ValueError, match="vmap"):
        stream.split(2)()


def test_the_count_goes_on_after_jit_returned_the_rngs():
    rngs = nnx.Rngs(0)
    key, returned = jax.jit(lambda rngs: (rngs.params(), rngs))(rngs)
    assert data(key) == data(nth_key(0, 0))
    assert data(returned()) == data(nth_key(0, 1))
    assert counts(rngs) == {"default": 0}


def test_drawing_adds_two_equations_to_a_trace():
    jaxpr = jax.make_jaxpr(lambda stream: stream())(nnx.RngStream(0, tag="a"))
    names = [equation.primitive.name for equation in jaxpr.eqns]
    assert names == ["random_fold_in", "add"]


def test_a_stream_of_another_or_a_finished_trace_is_refused():
    rngs, made = nnx.Rngs(0), []
    phrase = "Cannot mutate RngCount from a different trace level"
    with pytest.raises(nnx.errors.TraceContextError, match=phrase):
        jax.jit(lambda x: x * rngs.normal())(1.0)
    assert counts(rngs) == {"default": 0}
    jax.jit(lambda x: made.append(nnx.Rngs(0)) or x)(1.0)
    with pytest.raises(nnx.errors.TraceContextError, match="RngCount"):
        made[0]()


def test_refs_count_in_plain_jit():
    with nnx.var_defaults(ref=True):
        rngs = nnx.Rngs(0)
    drawn = [data(jax.jit(lambda: rngs())()) for _ in range(2)]
    assert drawn == [data(nth_key(0, n)) for n in range(2)]


# ------------------------------------------------------------- streams out of streams


@pytest.mark.parametrize("k", [3, np.int64(3), (2, 3), ()])
def test_split_gives_the_keys_that_jax_splits_and_broadcast_repeats_one(k):
    parent, other = nnx.RngStream(0, tag="a"), nnx.RngStream(0, tag="a")
    split, broadcast = parent.split(k), other.broadcast(k)
    assert data(split.key) == data(jax.random.split(nth_key(0, 0), k))
    each = jax.random.key_data(broadcast.key[...]).reshape(-1, 2)
    assert np.unique(each, axis=0).tolist() == [data(nth_key(0, 0))]
    for stream in (split, broadcast):
        assert stream.key.shape == stream.count.shape == np.empty(k).shape
        assert stream.tag == stream.key.tag == "a"
    assert parent.count[...] == other.count[...] == 1


def test_fork_starts_from_the_next_key():
    parent = nnx.RngStream(0, tag="a")
    parent()
    stream = parent.fork()
    assert data(stream.key) == data(nth_key(0, 1))
    assert (parent.count[...], stream.count[...]) == (2, 0)
    with pytest.warns(DeprecationWarning, match="use the 'split' method instead"):
        stream = parent.fork(split=3)
    assert data(stream.key) == data(jax.random.split(nth_key(0, 2), 3))


def test_derived_streams_keep_the_class():
    class Own(nnx.RngStream):
        pass

    stream = Own(0, tag="a")
    derived = [stream.split(2), stream.fork(), stream.broadcast(2)]
    assert {type(s) for s in derived} == {Own}


def test_split_streams_are_mapped():
    samples = jax.vmap(lambda rngs: rngs.normal((2,)))(nnx.Rngs(0).split(3))
    expected = [
        jax.random.normal(jax.random.fold_in(key, 0), (2,))
        for key in jax.random.split(nth_key(0, 0), 3)
    ]
    np.testing.assert_array_equal(samples, jnp.stack(expected))


# ------------------------------------------------------------------------ sets: names


def test_streams_are_in_the_order_given_default_last():
    rngs = nnx.Rngs(0, b=1, a=2)
    assert list(rngs) == ["b", "a", "default"] and len(rngs) == 3
    assert [stream.tag for _, stream in rngs.items()] == ["b", "a", "default"]
    named_like_methods = nnx.Rngs(split=0, items=1)
    assert list(named_like_methods) == ["split", "items"]
    assert list(nnx.clone(named_like_methods)) == ["items", "split"]


def test_keywords_override_a_mapping_and_default_is_given_once():
    rngs = nnx.Rngs({"a": 1, "default": 2}, a=3, c=4)
    assert keys(rngs) == {"a": [0, 3], "default": [0, 2], "c": [0, 4]}
    assert keys(nnx.Rngs(default=3, a=4)) == {"a": [0, 4], "default": [0, 3]}
    with pytest.raises(TypeError):
        nnx.Rngs(0, default=1)


def test_of_a_stream_only_the_key_is_taken():
    stream = nnx.RngStream(3, tag="z")
    stream()
    rngs = nnx.Rngs(stream, a=stream)
    assert keys(rngs) == {"a": [0, 3], "default": [0, 3]}
    assert counts(rngs) == {"a": 0, "default": 0}
    assert (rngs.a.tag, rngs.default.tag, stream.tag) == ("a", "default", "z")


def test_other_names_draw_from_the_default_stream():
    rngs = nnx.Rngs(5)
    drawn = [data(rngs.foo()), data(rngs["bar"]()), data(rngs())]
    assert drawn == [data(nth_key(5, n)) for n in range(3)]


def test_no_default_stream():
    rngs = nnx.Rngs(params=0)
    with pytest.raises(AttributeError, match="No RngStream named 'foo' found in Rngs"):
        rngs.foo
    with pytest.raises(KeyError, match="No RngStream named 'foo' found in Rngs"):
        rngs["foo"]
    with pytest.raises(AttributeError, match="No RngStream named 'default'"):
        rngs()


@tables.cases("rngs, has", (nnx.Rngs(), "no streams"), (nnx.Rngs(b=0, a=1), "'b', 'a'"))
def test_a_missing_stream_is_told_with_those_there_are(rngs, has):
    # Issue 12: it said no more than that.
    told = "named 'params' found", f"It has {has}."
    ways_out = "nnx.Rngs(params=0)", "nnx.Rngs(0)"
    with comparisons.raises(AttributeError, *told, *ways_out):
        nnx.Linear(2, 3, rngs=rngs)


def test_only_real_streams_are_in_the_set():
    rngs = nnx.Rngs(0, params=1)
    rngs.extra = 3
    assert [name in rngs for name in ("params", "default", "dropout")] == [1, 1, 0]
    assert list(rngs) == ["params", "default"] and not hasattr(rngs, "__json__")


# -------------------------------------------------------------------- sets: derivation


@pytest.mark.parametrize("k", [3, (2, 3)])
def test_split_and_broadcast_apply_to_all_streams(k):
    rngs = nnx.Rngs(0, a=1)
    split, broadcast = rngs.split(k), rngs.broadcast(k)
    for name, stream in nnx.Rngs(0, a=1).items():
        assert data(split[name].key) == data(stream.split(k).key)
        assert data(broadcast[name].key) == data(stream.broadcast(k).key)
    assert counts(rngs) == {"a": 2, "default": 2}


def test_first_filter_that_matches_the_stream_gives_the_size():
    sizes = {nnx.PathContains("a"): 5, "a": 2, nnx.RngStream: (3,), ...: 4}
    assert shapes(nnx.Rngs(0, a=1).split(sizes)) == {"a": (2,), "default": (3,)}
    assert shapes(nnx.Rngs(a=1).split({nnx.PathContains("a"): 2})) == {"a": ()}


@tables.cases("sizes", {"b": 2}, {"a": None, "b": 2}, {"b": 2, ...: None}, {}, None)
@pytest.mark.parametrize("method", ["split", "broadcast"])
def test_other_streams_are_copied_with_their_count(method, sizes):
    rngs = nnx.Rngs(a=0, b=1)
    rngs.a()
    derived = getattr(rngs, method)(sizes)
    assert derived.b.key.shape == ((2,) if sizes else ())
    assert counts(rngs) == {"a": 1, "b": bool(sizes)}
    assert data(derived.a.key) == data(rngs.a.key) and derived.a.count[...] == 1
    assert derived.a is not rngs.a and derived.a.count is not rngs.a.count


@pytest.mark.parametrize("split", [None, {"a": 3}, {"a": 3, "default": None}])
def test_fork_draws_from_all_streams_and_splits_those_that_are_told(split):
    rngs = nnx.Rngs(0, a=1)
    if split is None:
        forked, key = rngs.fork(), nth_key(1, 0)
    else:
        with pytest.warns(DeprecationWarning, match="'split' argument"):
            forked, key = rngs.fork(split=split), jax.random.split(nth_key(1, 0), 3)
    assert keys(forked) == {"a": data(key), "default": data(nth_key(0, 0))}
    assert counts(rngs) == {"a": 1, "default": 1}
    assert not forked.a.count[...].any() and not forked.default.count[...]


def test_derived_sets_are_plain_and_tagged_by_attribute():
    class Own(nnx.Rngs):
        pass

    rngs = Own(0)
    rngs.extra = nnx.RngStream(1, tag="other")
    for derived in (rngs.split(2), rngs.broadcast(2), rngs.fork(), rngs.split({})):
        assert type(derived) is nnx.Rngs
        assert {stream.key.tag for _, stream in derived.items()} == {"default", "extra"}


def test_an_abstract_stream_says_how_to_make_its_keys():
    model = nnx.eval_shape(lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0)))
    with pytest.raises(TypeError, match=r"(?s)'dropout' is abstract.*nnx.reseed"):
        model(jnp.ones(2))
    nnx.reseed(model, dropout=0)
    assert model(jnp.ones(2)).shape == (2,)


# ------------------------------------------------------------------------------ threads


THREADS, DRAWS = 4, 50


@pytest.fixture(autouse=True)
def eager_switches():
    """Threads take turns after almost each instruction."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


# Each draws one key of the stream `default`; what it gives tells which.
WAYS = {
    "stream": lambda rngs: rngs.default(),
    "rngs": lambda rngs: rngs(),
    "other name": lambda rngs: rngs.params(),
    "fork": lambda rngs: rngs.fork().default.key[...],
    "fork of a stream": lambda rngs: rngs["x"].fork().key[...],
    "split": lambda rngs: rngs.split(2).default.key[...][1],
    "broadcast": lambda rngs: rngs.default.broadcast(2).key[...][1],
    "distribution": lambda rngs: rngs.bits((2,)),
    "initializer": lambda rngs: rngs.params.lecun_normal()((2, 3)),
    "layer": lambda rngs: nnx.Linear(1, 2, use_bias=False, rngs=rngs).kernel[...],
}


def drawn_in_threads(rngs, ways):
    found = []

    def draw(way):
        found.extend([WAYS[way](rngs) for _ in range(DRAWS)])

    threads.run_in_threads(*[functools.partial(draw, way) for way in ways])
    return found


def as_text(drawn):
    is_key = jax.numpy.issubdtype(drawn.dtype, jax.dtypes.prng_key)
    return str(jax.random.key_data(drawn) if is_key else drawn)


@pytest.mark.parametrize("way", WAYS)
def test_draws_of_one_kind_differ_and_all_count(way):
    rngs = nnx.Rngs(0)
    drawn = drawn_in_threads(rngs, [way] * THREADS)
    assert len({*map(as_text, drawn)}) == THREADS * DRAWS
    assert int(rngs.default.count[...]) == THREADS * DRAWS


@pytest.mark.parametrize("ref", [False, True])
def test_draws_are_those_of_one_thread_in_some_order(ref):
    with nnx.var_defaults(ref=ref):
        rngs, alone = nnx.Rngs(0), nnx.Rngs(0)
    ways = ["stream", "rngs", "fork", "other name"]
    drawn = drawn_in_threads(rngs, ways)
    expected = [alone() for _ in range(len(ways) * DRAWS)]
    assert {*map(as_text, drawn)} == {*map(as_text, expected)}


def test_streams_changed_in_place_are_changed_between_two_draws():
    rngs, drawn = nnx.Rngs(0), []

    def reseed():
        for seed in range(DRAWS):
            nnx.reseed(rngs, default=seed + 1)

    def draw():
        drawn.extend(rngs() for _ in range(DRAWS))

    threads.run_in_threads(reseed, draw)
    assert len({*map(as_text, drawn)}) == DRAWS


# ------------------------------------------------------------------------ distributions

DISTRIBUTIONS = """
    ball bernoulli beta binomial bits categorical cauchy chisquare choice dirichlet
    double_sided_maxwell exponential f gamma generalized_normal geometric gumbel
    laplace loggamma logistic lognormal maxwell multinomial multivariate_normal
    normal orthogonal pareto permutation poisson rademacher randint rayleigh t
    triangular truncated_normal uniform wald weibull_min
""".split()
INITIALIZERS = """
    delta_orthogonal glorot_normal glorot_uniform he_normal he_uniform kaiming_normal
    kaiming_uniform lecun_normal lecun_uniform variance_scaling xavier_normal
    xavier_uniform
""".split()


def test_all_methods_are_listed_here():
    methods = {name for name in vars(nnx.RngStream.__mro__[1]) if name[0] != "_"}
    assert methods == {*DISTRIBUTIONS, *INITIALIZERS}


@pytest.fixture
def put(monkeypatch):
    """Puts a function in the place of one of JAX that notes what it is given."""

    def put(module, name, calls, gives):
        def note(*args, **options):
            calls.append((args, options))
            return gives

        monkeypatch.setattr(module, name, note)

    return put


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distribution_samples_with_the_next_key(name, put):
    rngs, calls = nnx.Rngs(7, params=1), []
    put(jax.random, name, calls, "sample")
    rngs()
    assert getattr(rngs, name)(2.0, (3,), dtype="float16") == "sample"
    [((key, *args), options)] = calls
    assert (args, options) == ([2.0, (3,)], {"dtype": "float16"})
    assert data(key) == data(nth_key(7, 1))
    assert counts(rngs) == {"params": 0, "default": 2}


@pytest.mark.parametrize("name", INITIALIZERS)
def test_initializer_draws_a_key_at_each_call(name, put):
    makes, calls = [], []
    name_of_jax = getattr(jax.nn.initializers, name).__name__  # some have two names
    put(
        jax.nn.initializers,
        name_of_jax,
        makes,
        lambda *args: calls.append(args) or "values",
    )
    stream = nnx.RngStream(7, tag="params")
    initialize = getattr(stream, name)(0, out_axis=1)
    assert makes == [((0,), {"out_axis": 1})] and stream.count[...] == 0
    for n in range(2):
        assert initialize((3, 4), jnp.float32) == "values"
        assert data(calls[n][0]) == data(nth_key(7, n))
        assert calls[n][1:] == ((3, 4), jnp.float32)


def test_a_dtype_is_accepted_and_a_key_is_not():
    initialize = nnx.Rngs(0).he_normal()
    assert initialize((2, 3), jnp.bfloat16).dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="key"):
        nnx.Rngs(0).normal(key=jax.random.key(0))
    with pytest.raises(TypeError, match="key"):
        initialize(key=jax.random.key(0), shape=(2, 3))


@pytest.mark.parametrize("name", ["constant", "zeros", "ones", "foo"])
def test_initializers_without_randomness_have_no_method(name):
    assert not hasattr(nnx.RngStream(0, tag="params"), name)


def test_signature_shows_the_arguments_without_the_key():
    for method, first in (
        (nnx.Rngs(0).uniform, ["shape", "dtype"]),
        (nnx.Rngs.variance_scaling, ["self", "scale"]),
    ):
        assert list(inspect.signature(method).parameters)[:2] == first


def test_docstring_names_the_function_of_jax():
    assert "`jax.random.normal`" in nnx.Rngs.normal.__doc__
    assert "`jax.nn.initializers.he_normal`" in nnx.RngStream.he_normal.__doc__
