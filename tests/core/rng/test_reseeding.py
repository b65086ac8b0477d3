"""Saving, restoring and reseeding the keys of all streams inside an object."""

import jax
import pytest

import graftree as nnx
from tests import zoo
from tests.core.rng.keys import data, nth_key


def model(dropout=0, noise=1):
    """Three streams, two of them named ``dropout``."""
    rngs = nnx.Rngs(dropout=dropout, noise=noise)
    first, second = rngs.dropout.fork(), rngs.dropout.fork()
    return zoo.Box(first=first, second=nnx.List([second]), noise=rngs.noise.fork())


def drawn(node):
    """What the streams inside ``node`` hold: keys and counts, in order."""
    streams = [x for _, x in nnx.iter_graph(node) if isinstance(x, nnx.RngStream)]
    return [(data(stream.key), stream.count[...].tolist()) for stream in streams]


def test_backup_keys_restores_keys_and_leaves_counts(graph):
    node = model()
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
    node = model(dropout=0, noise=1)
    node.first(), node.noise()
    assert nnx.reseed(node, graph=graph, dropout=42, noise=43) is None
    assert drawn(node) == drawn(model(dropout=42, noise=43))


def test_reseed_draws_one_key_per_stream_and_leaves_other_names_alone():
    node = model()
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
    assert "policy='match_shape'" in str(error.value)
    assert drawn(node) == before


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
    node = model()
    before = drawn(node)
    with pytest.raises(nnx.errors.TraceContextError):
        jax.jit(lambda: nnx.reseed(node, dropout=1))()
    assert drawn(node) == before


@pytest.mark.peers
def test_reseed_gives_the_keys_of_the_peer():
    peer = pytest.importorskip("flax.nnx")
    ours, theirs = nnx.Rngs(0, a=1).split(3), peer.Rngs(0, a=1).split(3)
    nnx.reseed(ours, a=5, default=6, policy="match_shape")
    peer.reseed(theirs, a=5, default=6, policy="match_shape")
    assert data(ours.a.key) == data(theirs.a.key)
    assert data(ours.default.key) == data(theirs.default.key)
