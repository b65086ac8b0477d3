"""What a failed block wrote is taken back."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from graftree.nn.support import rollbacks


@pytest.mark.parametrize("ref", [False, True])
def test_values_come_back_after_a_failure(ref):
    a, b = (nnx.Variable(jnp.arange(2.0), ref=ref) for _ in range(2))
    with pytest.raises(KeyError), rollbacks.undone_on_failure(a, b):
        a[...] = jnp.ones(2)
        raise KeyError
    assert a[...].tolist() == b[...].tolist() == [0.0, 1.0]


def test_hooks_do_not_change_what_comes_back():
    class Doubled(nnx.Variable):
        def get_value(self, **options):
            return 2 * super().get_value(**options)

    a = Doubled(jnp.arange(2.0))
    with pytest.raises(KeyError), rollbacks.undone_on_failure(a):
        a[...] = jnp.ones(2)
        raise KeyError
    assert a.get_raw_value().tolist() == [0.0, 1.0]


def test_values_stay_after_a_success():
    a = nnx.Variable(jnp.arange(2.0))
    with rollbacks.undone_on_failure(a):
        a[...] = jnp.ones(2)
    assert a[...].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("ref", [False, True])
def test_failures_of_those_who_may_not_write_pass_through(ref):
    a = nnx.Variable(jnp.arange(2.0), ref=ref)

    def fail(x):
        with rollbacks.undone_on_failure(a):
            raise KeyError(x.shape)

    with pytest.raises(KeyError):
        jax.eval_shape(fail, jnp.ones(3))
    assert a[...].tolist() == [0.0, 1.0]


def test_refs_cost_a_program_nothing():
    def step(a):
        with rollbacks.undone_on_failure(a):
            a[...] = jnp.ones(2)

    jaxpr = jax.make_jaxpr(step)(nnx.Variable(jnp.arange(2.0), ref=True))
    assert "get" not in [e.primitive.name for e in jaxpr.eqns]


def test_counts_of_streams_come_back():
    rngs = nnx.Rngs(params=0)
    with pytest.raises(KeyError), rollbacks.undone_on_failure(rngs.params, None):
        rngs.params()
        raise KeyError
    assert rngs.params.count[...] == 0
