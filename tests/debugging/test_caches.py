"""With and without what is remembered between calls, everything means the same.

Random programs are in `tests/differential`, random changes between calls in
`tests/stress/plans.py`; each takes ``--caches``.
"""

import threading

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.core.graph import watches
from graftree.core.objects import bookkeeping
from graftree.nn.support import eager
from graftree.transforms.crossing import programs
from tests import zoo

X = jnp.ones((2, 3))


def made():
    return nnx.Sequential(
        nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.LayerNorm(3, rngs=nnx.Rngs(1))
    )


def loss(model, x):
    return model(x).sum()


def scanned(model, x):
    return nnx.scan(lambda x, _: (model(x), None), length=2)(x, None)[0]


# Whatever remembers something of its objects, if that may be.
CALLS = {
    "split": lambda m: nnx.split(m),
    "split of two": lambda m: nnx.split((m, m)),
    "state": lambda m: nnx.state(m, nnx.Param),
    "clone": lambda m: nnx.clone(m),
    "leaves": jax.tree.leaves,
    "jax.jit": lambda m: jax.jit(loss)(m, X),
    "call": lambda m: m(X),
    "scan": lambda m: scanned(m, X),
    "cond": lambda m: nnx.cond(True, loss, loss, m, X),
    "vmap": lambda m: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, X),
    "grad": lambda m: nnx.grad(loss)(m, X),
}


@pytest.fixture
def caches():
    """Caches that are in use, also where all other tests run without."""
    with nnx.config.temp_flip_flag("graftree_caches", True):
        yield


def test_nothing_is_remembered_of_an_object(caches):
    model = made()
    nodes = [x for _, x in nnx.iter_graph(model) if isinstance(x, nnx.Pytree)]
    with nnx.debugging.disable_caches():
        for call in [*CALLS.values()] * 3:
            call(model)
        for node in nodes:
            state = bookkeeping.state_of(node)
            assert (state.memos, state.aux) == (None, bookkeeping.NO_AUX)
            assert type(vars(node)) is dict
        assert len(programs.kept) == 0


@pytest.mark.parametrize("name", CALLS)
def test_results_are_the_same_to_the_bit(caches, name):
    def results(model):
        outs = [CALLS[name](model) for _ in range(3)]
        return [jnp.asarray(x) for x in jax.tree.leaves(outs)]

    model, other = made(), made()
    ours = results(model)
    with nnx.debugging.disable_caches():
        theirs = results(other)
    assert [x.tobytes() for x in ours] == [x.tobytes() for x in theirs]
    assert nnx.graphdef(model) == nnx.graphdef(other)


def test_a_stale_cache_is_passed_over(caches, monkeypatch):
    monkeypatch.setattr(watches.StructureWatch, "holds", lambda self: True)
    box = zoo.Box(w=nnx.Param(jnp.ones(2)), k=1)
    for _ in range(3):
        nnx.split(box)
    box.k = 2
    is_stale = nnx.merge(*nnx.split(box)).k == 1
    with nnx.debugging.disable_caches():
        assert nnx.merge(*nnx.split(box)).k == 2
    assert is_stale  # or this test shows nothing


def test_layers_run_their_own_functions(caches):
    runs = []

    @eager.fast()
    def doubled(x):
        runs.append(1)
        return x * 2

    for _ in range(3):
        doubled(X)
    assert len(runs) == 1  # when it was recorded
    with nnx.debugging.disable_caches():
        for _ in range(3):
            doubled(X)
    assert len(runs) == 4


def test_what_was_remembered_is_forgotten_and_made_anew(caches):
    model = made()
    first = [nnx.graphdef(model) for _ in range(3)][-1]
    scanned(model, X)
    assert len(programs.kept) > 0
    with nnx.debugging.disable_caches():
        model.layers[0].kernel[...] *= 2
        model.tag = "new"
    assert len(programs.kept) == 0
    assert nnx.graphdef(model) != first
    assert nnx.merge(*nnx.split(model)).tag == "new"


def test_it_holds_in_all_threads_until_the_end_of_the_context(caches):
    seen = []
    with nnx.debugging.disable_caches():
        with nnx.debugging.disable_caches():
            pass
        note = threading.Thread(target=lambda: seen.append(nnx.config.graftree_caches))
        note.start()
        note.join()
    assert (seen, nnx.config.graftree_caches) == ([False], True)


def test_it_decorates_a_function(caches):
    @nnx.debugging.disable_caches()
    def are_used():
        return nnx.config.graftree_caches

    assert (are_used(), are_used(), nnx.config.graftree_caches) == (False, False, True)
