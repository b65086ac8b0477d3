"""Distributions and initializers that draw their own keys."""

import inspect

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests.core.rng.keys import counts, nth_key

MEAN, COVARIANCE = jnp.zeros(2), jnp.eye(2)
THIRDS = jnp.full(3, 1 / 3)

# Every distribution with arguments for it.
OF_A_SHAPE = """
    bits cauchy exponential gumbel laplace logistic maxwell rademacher
""".split()
OF_ONE_NUMBER = "chisquare pareto poisson rayleigh t wald".split()
DISTRIBUTIONS = {
    **dict.fromkeys(OF_A_SHAPE, (((3,),), {})),
    **dict.fromkeys(OF_ONE_NUMBER, ((2.0,), {"shape": (3,)})),
    **dict.fromkeys(["gamma", "generalized_normal", "loggamma"], ((2.0, (3,)), {})),
    "ball": ((3,), {"shape": (2,)}),
    "bernoulli": ((0.3, (4,)), {}),
    "beta": ((1.0, 2.0, (3,)), {}),
    "binomial": ((5.0, 0.4), {"shape": (3,)}),
    "categorical": ((jnp.log(THIRDS),), {"shape": (4,)}),
    "choice": ((7, (3,)), {"replace": False}),
    "dirichlet": ((THIRDS,), {"shape": (2,)}),
    "double_sided_maxwell": ((0.0, 1.0, (3,)), {}),
    "f": ((2.0, 3.0), {"shape": (3,)}),
    "geometric": ((0.3,), {"shape": (3,)}),
    "lognormal": ((0.5,), {"shape": (3,)}),
    "multinomial": ((jnp.array(5.0), THIRDS), {}),
    "multivariate_normal": ((MEAN, COVARIANCE), {}),
    "normal": (((2, 3),), {"dtype": jnp.bfloat16}),
    "orthogonal": ((3,), {}),
    "permutation": ((7,), {}),
    "randint": (((3,), 0, 9), {}),
    "triangular": ((0.0, 0.5, 1.0), {"shape": (3,)}),
    "truncated_normal": ((-1.0, 1.0, (3,)), {}),
    "uniform": (((3,),), {"minval": 2.0, "maxval": 3.0}),
    "weibull_min": ((1.0, 2.0, (3,)), {}),
}

# To compile one of these takes seconds.
SLOW = """
    ball beta binomial chisquare dirichlet f gamma generalized_normal loggamma
    multinomial poisson t
""".split()
EACH = [
    pytest.param(name, marks=pytest.mark.long if name in SLOW else ())
    for name in DISTRIBUTIONS
]

# Every initializer with arguments for it.
WITHOUT_ARGUMENTS = """
    delta_orthogonal glorot_normal glorot_uniform he_uniform kaiming_normal
    kaiming_uniform lecun_normal lecun_uniform xavier_normal xavier_uniform
""".split()
INITIALIZERS = {
    **{name: {} for name in WITHOUT_ARGUMENTS},
    "he_normal": {"in_axis": 0, "out_axis": 1},
    "variance_scaling": {"scale": 2.0, "mode": "fan_avg", "distribution": "uniform"},
}
SHAPE = (3, 4, 5)


def assert_same(actual, expected):
    assert (actual.dtype, actual.tolist()) == (expected.dtype, expected.tolist())


def test_all_methods_are_listed_here():
    methods = {name for name in vars(nnx.RngStream.__mro__[1]) if name[0] != "_"}
    assert methods == DISTRIBUTIONS.keys() | INITIALIZERS.keys()


@pytest.mark.parametrize("name", EACH)
def test_distribution_samples_with_the_next_key(name):
    args, kwargs = DISTRIBUTIONS[name]
    rngs = nnx.Rngs(7, params=1)
    rngs()
    sample = getattr(rngs, name)(*args, **kwargs)
    assert_same(sample, getattr(jax.random, name)(nth_key(7, 1), *args, **kwargs))
    assert counts(rngs) == {"params": 0, "default": 2}


@pytest.mark.parametrize("name", INITIALIZERS)
def test_initializer_draws_a_key_at_each_call(name):
    make = getattr(jax.nn.initializers, name)
    stream = nnx.RngStream(7, tag="params")
    initialize = getattr(stream, name)(**INITIALIZERS[name])
    assert stream.count[...] == 0
    for n in range(2):
        expected = make(**INITIALIZERS[name])(nth_key(7, n), SHAPE, jnp.float32)
        assert_same(initialize(SHAPE, jnp.float32), expected)


@pytest.mark.peers
@pytest.mark.parametrize("name", EACH)
def test_distribution_gives_the_numbers_of_the_peer(name):
    peer = pytest.importorskip("flax.nnx")
    args, kwargs = DISTRIBUTIONS[name]
    ours, theirs = nnx.Rngs(3, params=4), peer.Rngs(3, params=4)
    for get in (lambda rngs: rngs, lambda rngs: rngs.params):
        sample = getattr(get(ours), name)(*args, **kwargs)
        assert_same(sample, getattr(get(theirs), name)(*args, **kwargs))


@pytest.mark.peers
@pytest.mark.parametrize("name", INITIALIZERS)
def test_initializer_gives_the_numbers_of_the_peer(name):
    peer = pytest.importorskip("flax.nnx")
    ours = getattr(nnx.Rngs(3), name)(**INITIALIZERS[name])
    theirs = getattr(peer.Rngs(3), name)(**INITIALIZERS[name])
    assert_same(ours(SHAPE), theirs(SHAPE))


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
