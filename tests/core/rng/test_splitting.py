"""Splitting, forking, saving and reseeding all streams inside an object."""

import contextlib
import functools
import warnings

import jax
import numpy as np
import pytest

import graftree as nnx
from tests import comparisons, modes, tables, zoo


def nth_key(seed, n):
    """What the n-th draw of a stream with this seed gives."""
    return jax.random.fold_in(jax.random.key(seed), n)


def data(key):
    """The numbers of a key, or of a Variable that holds one."""
    return jax.random.key_data(getattr(key, "get_value", lambda: key)()).tolist()


def keys(rngs):
    return {name: data(stream.key) for name, stream in rngs.items()}


def shapes(rngs):
    return {name: stream.key.shape for name, stream in rngs.items()}


def counts(rngs):
    return {name: stream.count[...].tolist() for name, stream in rngs.items()}


PLACES = {"place": {}, **modes.VALUES}
IN_PLACE_OR_NOT = pytest.mark.parametrize("options", PLACES.values(), ids=PLACES)
FUNCTIONS = tables.cases(
    "function", lambda *a, **k: nnx.split_rngs(*a, splits=2, **k), nnx.fork_rngs
)


def model():
    """Holds a parameter and two streams, one of them forked."""
    rngs = nnx.Rngs(params=0, dropout=1)
    kernel = nnx.Param(np.ones(2, np.float32))
    return zoo.Box(kernel=kernel, dropout=rngs.dropout.fork(), rngs=rngs)


# ------------------------------------------------------------------- split_rngs, copy


@IN_PLACE_OR_NOT
@tables.cases(
    "given, size",
    ({"splits": 3}, 3),
    ({"splits": (2, 3)}, (2, 3)),
    ({"splits": 1, "squeeze": True}, ()),
)
def test_split_rngs_gives_split_keys(options, given, size):
    rngs = nnx.Rngs(a=5)
    stream, key, count = rngs.a, rngs.a.key, rngs.a.count
    result = nnx.split_rngs(rngs, **given, **options)
    new = result if options else rngs
    expected = jax.random.split(nth_key(5, 0), size or 1)
    assert data(new.a.key) == data(expected if size else expected[0])
    assert counts(new) == {"a": np.zeros(size).tolist()}
    if options:
        assert (keys(rngs), counts(rngs)) == ({"a": [0, 5]}, {"a": 1})
    else:
        assert type(result) is nnx.rnglib.SplitBackups
        assert rngs.a is stream and stream.key is key and stream.count is count


def test_a_copy_shares_the_other_variables(value_mode):
    node = model()
    new = nnx.split_rngs(node, splits=3, only="params", **value_mode)
    assert type(new) is zoo.Box and new is not node
    assert new.kernel is node.kernel and new.dropout is not node.dropout
    assert new.dropout.count is node.dropout.count
    assert shapes(new.rngs) == {"params": (3,), "dropout": ()}
    assert shapes(node.rngs) == {"params": (), "dropout": ()}


@tables.cases(
    "split, filters",
    ("ab", [..., nnx.RngState, ["a", "b"]]),
    ("a", ["a"]),
    ("b", [nnx.PathContains("b"), nnx.Not("a")]),
    ("", [nnx.RngKey, nnx.RngCount, nnx.RngStream, None]),
)
@pytest.mark.parametrize("in_place", [True, False])
def test_both_variables_must_match(split, filters, in_place):
    for only in filters:
        rngs = nnx.Rngs(a=0, b=1)
        result = nnx.split_rngs(rngs, splits=2, only=only, graph_updates=in_place)
        new = shapes(rngs if in_place else result)
        assert "".join(name for name, shape in new.items() if shape) == split


def test_filters_see_the_paths_of_both_variables():
    seen = []
    node = {"x": [nnx.Rngs(a=0)]}
    nnx.split_rngs(node, splits=2, only=lambda *call: seen.append(call) or True)
    assert [(path, type(value)) for path, value in seen] == [
        (("x", 0, "a", "key"), nnx.RngKey),
        (("x", 0, "a", "count"), nnx.RngCount),
    ]


@pytest.mark.parametrize("splits", [2, (1,)])
def test_squeeze_needs_one_split(splits):
    with pytest.raises(ValueError, match="squeeze=True is only supported for splits=1"):
        nnx.split_rngs(splits=splits, squeeze=True)


@FUNCTIONS
def test_shared_streams_stay_shared_or_are_refused(function):
    stream = nnx.RngStream(0, tag="a")
    with pytest.raises(ValueError, match="(?s)Duplicate.*found at paths"):
        function([stream, stream], **modes.TREE)
    assert stream.count[...] == 0
    first, second = function([stream, stream], **modes.GRAPH)
    assert first is second and stream.count[...] == 1


def test_cycles_are_kept_in_graph_mode():
    node = model()
    node.self = node
    new = nnx.split_rngs(node, splits=2, **modes.GRAPH)
    assert new.self is new and new.dropout.key.shape == (2,)


# --------------------------------------------------------------- split_rngs, in place


@pytest.mark.parametrize("error", [None, KeyError])
def test_backups_restore_on_exit_so_that_no_key_comes_twice(error):
    rngs = nnx.Rngs(a=5)
    with contextlib.suppress(KeyError), nnx.split_rngs(rngs, splits=3):
        assert rngs.a.key.shape == (3,)
        if error:
            raise error
    assert (keys(rngs), counts(rngs)) == ({"a": [0, 5]}, {"a": 1})


@FUNCTIONS
def test_split_streams_can_not_be_split_again(function):
    rngs = nnx.Rngs(a=0, b=1)
    nnx.split_rngs(rngs, splits=2, only="b")
    before = counts(rngs)
    for mode in PLACES.values():
        with pytest.raises(ValueError, match=r"(?s)\n  b: keys of shape \(2,\).*vmap"):
            function(rngs, **mode)
    assert shapes(rngs) == {"a": (), "b": (2,)} and counts(rngs) == before


@FUNCTIONS
def test_streams_of_another_trace_are_refused(function):
    rngs = nnx.Rngs(a=0)
    phrase = "Cannot mutate RngCount from a different trace level"

    def next_key_after_a_failure(mode):
        inside = nnx.Rngs(5)
        with pytest.raises(nnx.errors.TraceContextError, match=phrase):
            function(nnx.Dict(first=inside, last=rngs), **mode)
        return jax.random.key_data(inside())

    for mode in PLACES.values():
        key = jax.jit(functools.partial(next_key_after_a_failure, mode))()
        assert key.tolist() == data(nth_key(5, 0))
    assert (keys(rngs), counts(rngs)) == ({"a": [0, 0]}, {"a": 0})


def test_refs_can_be_forked_but_not_split_in_place():
    rngs = nnx.with_vars(nnx.Rngs(0), ref=True)
    with nnx.fork_rngs(rngs):
        assert keys(rngs) == {"default": data(nth_key(0, 0))}
    assert keys(rngs) == {"default": [0, 0]}
    with pytest.raises(ValueError, match="graph_updates=False"):
        nnx.split_rngs(rngs, splits=2)
    assert shapes(rngs) == {"default": ()}


# -------------------------------------------------------------------------- decorators


@IN_PLACE_OR_NOT
def test_decorator_acts_on_all_arguments_and_restores_them(options):
    @nnx.split_rngs(splits=3, **options)
    def function(x, rngs, *, other):
        """Says what came."""
        assert x == 7 and shapes(rngs) == shapes(other) == {"default": (3,)}
        if fails:
            raise KeyError
        return x

    rngs, other = nnx.Rngs(0), nnx.Rngs(1)
    for fails in (False, True):
        with pytest.raises(KeyError) if fails else contextlib.nullcontext():
            assert function(7, rngs, other=other) == 7
        assert shapes(rngs) == shapes(other) == {"default": ()}
        assert counts(rngs) == counts(other) == {"default": 1 + fails}
    assert function.__doc__ == "Says what came."


def test_paths_of_a_decorator_start_at_args_and_kwargs():
    seen = []
    with nnx.set_graph_updates(False):
        decorate = nnx.with_rngs(fork=..., only=lambda *call: seen.append(call))
    decorate(lambda a, *, b: None)(nnx.Rngs(0), b=nnx.Rngs(1))
    assert [path for path, _ in seen] == [(0, 0, "default"), (1, "b", "default")]


def test_decorator_reads_the_mode_when_it_is_made():
    with nnx.set_graph_updates(False):
        decorate = nnx.split_rngs(splits=2)
    rngs = nnx.Rngs(0)
    assert decorate(lambda inner: inner is rngs)(rngs) is False
    assert nnx.split_rngs(splits=2)(lambda inner: inner is rngs)(rngs) is True


# --------------------------------------------------------------------------- fork_rngs


def test_fork_rngs_forks_all_streams(value_mode):
    rngs = nnx.Rngs(a=0, b=1)
    new = nnx.fork_rngs(rngs, **value_mode)
    assert keys(new) == {"a": data(nth_key(0, 0)), "b": data(nth_key(1, 0))}
    assert (counts(new), counts(rngs)) == ({"a": 0, "b": 0}, {"a": 1, "b": 1})


@IN_PLACE_OR_NOT
@tables.cases(
    "split, expected",
    (3, {"a": (3,), "b": (3,)}),
    ((2, 3), {"a": (2, 3), "b": (2, 3)}),
    ({"a": 3}, {"a": (3,), "b": ()}),
    ({"a": 3, nnx.RngState: 2, ...: None}, {"a": (3,), "b": (2,)}),
    ({nnx.RngKey: 3, "b": None}, {"a": (), "b": ()}),
)
def test_first_match_gives_the_split(options, split, expected):
    rngs = nnx.Rngs(a=0, b=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = nnx.fork_rngs(rngs, split=split, **options)
    assert shapes(result if options else rngs) == expected
    if not options:
        nnx.restore_rngs(result)
        assert keys(rngs) == {"a": [0, 0], "b": [0, 1]}


def test_fork_rngs_leaves_streams_that_no_filter_matches():
    rngs = nnx.Rngs(a=0, b=1)
    backups = nnx.fork_rngs(rngs, split={"a": None})
    assert keys(rngs) == {"a": data(nth_key(0, 0)), "b": [0, 1]}
    assert [stream for stream, *_ in backups] == [rngs.a]


# --------------------------------------------------------------------------- with_rngs


def test_with_rngs_derives_by_rule(value_mode):
    rngs, like = nnx.Rngs(a=0, b=1, c=2, d=3), nnx.Rngs(a=0, b=1, c=2)
    split, broadcast, fork = {"a": 2}, {"b": (3,)}, ["c"]
    new = nnx.with_rngs(rngs, split=split, broadcast=broadcast, fork=fork, **value_mode)
    derived = like.a.split(2), like.b.broadcast(3), like.c.fork(), rngs.d
    assert keys(new) == {n: data(x.key) for n, x in zip("abcd", derived, strict=True)}
    assert new.d.key is rngs.d.key and new.d is not rngs.d
    assert counts(rngs) == {"a": 1, "b": 1, "c": 1, "d": 0}


def test_with_rngs_passes_streams_with_their_paths():
    seen = []
    nnx.with_rngs(model(), fork=lambda *call: seen.append(call), **modes.TREE)
    paths = [("dropout",), ("rngs", "dropout"), ("rngs", "params")]
    assert [(path, type(x)) for path, x in seen] == [(p, nnx.RngStream) for p in paths]


@pytest.mark.parametrize("options", [{}, modes.GRAPH_UPDATES])
@pytest.mark.parametrize("args", [(nnx.Rngs(0),), ()])
def test_with_rngs_does_not_work_in_place(options, args):
    with pytest.raises(NotImplementedError, match="not supported for"):
        nnx.with_rngs(*args, split=2, **options)


@tables.cases(
    "rules, expected",
    ({"split": {"a": 2}, "broadcast": 3, "fork": ...}, {"a": (2,), "b": (3,)}),
    ({"split": {"a": 2}, "fork": ...}, {"a": (2,), "b": ()}),
    ({"split": 2, "fork": "a"}, {"a": (2,), "b": (2,)}),
    ({"split": {"a": 2, ...: 4}, "broadcast": 3}, {"a": (2,), "b": (4,)}),
    ({"split": {True: 2}, "fork": ["a", "b"]}, {"a": (2,), "b": (2,)}),
    ({"split": 2, "only": "b"}, {"a": (), "b": (2,)}),
    ({}, {"a": (), "b": ()}),
)
def test_split_goes_before_broadcast_before_fork(rules, expected):
    assert shapes(nnx.with_rngs(nnx.Rngs(a=0, b=1), **rules, **modes.TREE)) == expected


def test_two_specific_rules_for_one_stream_are_refused(value_mode):
    rngs = nnx.Rngs(a=0, b=1)
    fork = "fork matches filter PathContains('b', exact=True)"
    told = "('b',)", "multiple rules", "split matches filter 'b'", fork
    with comparisons.raises(ValueError, *told):
        nnx.with_rngs(rngs, split={"b": 4}, fork=nnx.PathContains("b"), **value_mode)
    assert counts(rngs) == {"a": 0, "b": 0}


# ----------------------------------------------------------------- saving and reseeding


def streams_model(dropout=0, noise=1):
    """Three streams, two of them named ``dropout``."""
    rngs = nnx.Rngs(dropout=dropout, noise=noise)
    first, second = rngs.dropout.fork(), rngs.dropout.fork()
    return zoo.Box(first=first, second=nnx.List([second]), noise=rngs.noise.fork())


def drawn(node):
    """What the streams inside ``node`` hold: keys and counts, in order."""
    streams = [x for _, x in nnx.iter_graph(node) if isinstance(x, nnx.RngStream)]
    return [(data(stream.key), stream.count[...].tolist()) for stream in streams]


def test_backup_keys_restores_keys_and_leaves_counts(graph):
    node = streams_model()
    before = drawn(node)
    backups = nnx.rnglib.backup_keys(node, graph=graph)
    assert [stream.tag for stream, _ in backups] == ["dropout", "noise", "dropout"]
    nnx.reseed(node, dropout=5, noise=6)
    node.noise()
    nnx.restore_rngs(backups)
    assert [key for key, _ in drawn(node)] == [key for key, _ in before]
    assert node.noise.count[...] == 1


def test_shared_streams_are_backed_up_once_or_refused():
    stream = nnx.RngStream(0, tag="a")
    assert len(nnx.rnglib.backup_keys([stream, stream], graph=True)) == 1
    with pytest.raises(ValueError, match="found at paths"):
        nnx.rnglib.backup_keys([stream, stream], graph=False)


@pytest.mark.parametrize("with_count", [True, False])
def test_restore_takes_any_tuples(with_count):
    stream, other = nnx.RngStream(0, tag="a"), nnx.RngStream(1, tag="b")
    stream()
    values = (other.key[...], other.count[...])
    nnx.restore_rngs(iter([(stream, *values[: 1 + with_count])]))
    assert data(stream.key) == [0, 1]
    assert stream.count[...] == (0 if with_count else 1)


def test_backups_are_a_pytree():
    copied = jax.tree.map(lambda leaf: leaf, nnx.split_rngs(nnx.Rngs(0), splits=2))
    assert type(copied) is nnx.rnglib.SplitBackups
    [(stream, key, count)] = copied
    assert (stream.key.shape, key.shape, count) == ((2,), (), 1)


# ---------------------------------------------------------------------------- reseed


def test_reseed_repeats_what_a_model_built_with_the_seed_holds(graph):
    node = streams_model(dropout=0, noise=1)
    node.first(), node.noise()
    assert nnx.reseed(node, graph=graph, dropout=42, noise=43) is None
    assert drawn(node) == drawn(streams_model(dropout=42, noise=43))


def test_reseed_draws_one_key_per_stream_and_leaves_other_names_alone():
    node = streams_model()
    node.noise()
    before = drawn(node)
    nnx.reseed(node, default=3, unknown=4)
    assert drawn(node) == before
    nnx.reseed(node, dropout=jax.random.key(7))
    keys = [data(stream.key) for stream in (node.first, node.second[0])]
    assert keys == [data(nth_key(7, 0)), data(nth_key(7, 1))]
    assert drawn(node)[1] == before[1]


def test_reseed_goes_by_the_tag_of_the_key_and_keeps_variables():
    rngs = nnx.Rngs(0)
    rngs.extra = extra = nnx.RngStream(1, tag="dropout")
    key, count = extra.key, extra.count
    nnx.reseed(rngs, dropout=5)
    assert data(extra.key) == data(nth_key(5, 0)) and data(rngs.default.key) == [0, 0]
    assert extra.key is key and extra.count is count


def test_reseed_of_an_array_of_keys_needs_a_policy():
    rngs = nnx.Rngs(a=0, b=1)
    node = [rngs.a, rngs.split(3).a]
    before = drawn(node)
    with pytest.raises(ValueError, match=r"path \(1,\).*shape \(3,\)") as error:
        nnx.reseed(node, a=5)
    assert "policy='match_shape'" in str(error.value) and drawn(node) == before


def test_match_shape_splits_the_new_key():
    rngs = nnx.Rngs(a=0)
    node = [rngs, rngs.split((2, 3))]
    nnx.reseed(node, policy="match_shape", a=5)
    assert data(node[0].a.key) == data(nth_key(5, 0))
    assert data(node[1].a.key) == data(jax.random.split(nth_key(5, 1), (2, 3)))
    assert node[1].a.count[...].tolist() == [[0] * 3] * 2


def test_a_function_makes_the_new_key():
    calls = []

    def policy(path, key, shape):
        calls.append((path, data(key), shape))
        return jax.random.split(key, 4)

    rngs = nnx.Rngs(a=0).split(3)
    nnx.reseed(rngs, policy=policy, a=5)
    assert calls == [(("a",), data(nth_key(5, 0)), (3,))]
    assert rngs.a.key.shape == rngs.a.count.shape == (4,)


def test_unknown_policy_and_seed_are_refused():
    with pytest.raises(ValueError, match="policy must be"):
        nnx.reseed(nnx.Rngs(0), policy="other", default=0)
    with pytest.raises(ValueError, match="Invalid rng value"):
        nnx.reseed(nnx.Rngs(0), default="seed")


def test_reseed_of_another_trace_is_refused():
    node = streams_model()
    before = drawn(node)
    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(lambda: nnx.reseed(node, dropout=1))()
    assert drawn(node) == before
