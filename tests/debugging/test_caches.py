"""With and without what is remembered between calls, everything means the same.

Random programs, with and without, are in `tests/differential`.
"""

import threading

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
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
    nothing = made()._pytree__state
    for node in nodes:
        state = node._pytree__state
        assert state.results is nothing.results and state.aux is nothing.aux
        assert type(vars(node)) is dict


def test_a_write_that_no_cache_sees_is_seen_without(caches):
    box = zoo.Box(w=nnx.Param(jnp.ones(2)), k=1)
    for _ in range(3):
        nnx.split(box)
    object.__setattr__(box, "k", 2)  # of which `nnx.touch` would tell
    assert nnx.merge(*nnx.split(box)).k == 1
    with nnx.debugging.disable_caches():
        assert nnx.merge(*nnx.split(box)).k == 2


def test_changes_made_meanwhile_are_seen_afterwards(caches):
    model = made()
    first = [nnx.graphdef(model) for _ in range(3)][-1]
    with nnx.debugging.disable_caches():
        model.layers[0].kernel[...] *= 2
        model.tag = "new"
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
