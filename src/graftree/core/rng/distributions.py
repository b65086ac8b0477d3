"""Distributions and initializers as methods that draw their own keys.

A method is one row of `RandomMethods`: the function of JAX that it calls. The class
that mixes this in gives a key when called. Every call of a distribution, and every call
of a function that an initializer method made, draws exactly one key.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax

from graftree.core.objects import methods

P = ParamSpec("P")
R = TypeVar("R")


def _keyless(
    sample: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """Makes a method of a function of ``jax.random``, which draws its own key."""

    def method(self: Callable[[], jax.Array], /, *args: Any, **kwargs: Any) -> Any:
        # Looked up in each call, in case it has been replaced.
        return getattr(jax.random, name)(self(), *args, **kwargs)

    name = sample.__name__
    _describe(
        method,
        name,
        f"Draws a key and samples with it.\n\n"
        f"Takes the arguments of `jax.random.{name}` except ``key``, and returns\n"
        "what it returns.",
        list(inspect.signature(sample).parameters.values())[1:],
    )
    return methods.observable(method)


def _initializer(
    make: Callable[P, Any],
) -> Callable[Concatenate[Any, P], Callable[..., jax.Array]]:
    """Makes a method of a factory of ``jax.nn.initializers``."""

    def method(self: Callable[[], jax.Array], /, *args: Any, **kwargs: Any) -> Any:
        initialize = getattr(jax.nn.initializers, name)(*args, **kwargs)

        def draw_and_initialize(*args: Any, **kwargs: Any) -> jax.Array:
            return initialize(self(), *args, **kwargs)

        return draw_and_initialize

    name = make.__name__
    _describe(
        method,
        name,
        f"Makes an initializer that needs no key.\n\n"
        f"Takes the arguments of `jax.nn.initializers.{name}`. Returns a function\n"
        "``(shape, dtype=None, out_sharding=None) -> array``, which draws a key at\n"
        "each of its calls.",
        list(inspect.signature(make).parameters.values()),
    )
    return method


def _describe(
    method: Any, name: str, doc: str, parameters: list[inspect.Parameter]
) -> None:
    # functools.wraps would promise the parameter `key`, which the methods don't take.
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__name__ = name
    method.__qualname__ = f"RandomMethods.{name}"
    method.__doc__ = doc
    method.__signature__ = inspect.Signature([itself, *parameters])


class RandomMethods:
    """The methods of whatever gives a key when called: distributions, initializers.

    Example:
        >>> rngs = nnx.Rngs(0)
        >>> rngs.uniform((2, 3)).shape
        (2, 3)
        >>> rngs.params.lecun_normal()((4, 5), jnp.bfloat16).dtype
        dtype(bfloat16)
        >>> rngs.default.count[...]
        Array(2, dtype=uint32)
    """

    ball = _keyless(jax.random.ball)
    bernoulli = _keyless(jax.random.bernoulli)
    beta = _keyless(jax.random.beta)
    binomial = _keyless(jax.random.binomial)
    bits = _keyless(jax.random.bits)
    categorical = _keyless(jax.random.categorical)
    cauchy = _keyless(jax.random.cauchy)
    chisquare = _keyless(jax.random.chisquare)
    choice = _keyless(jax.random.choice)
    dirichlet = _keyless(jax.random.dirichlet)
    double_sided_maxwell = _keyless(jax.random.double_sided_maxwell)
    exponential = _keyless(jax.random.exponential)
    f = _keyless(jax.random.f)
    gamma = _keyless(jax.random.gamma)
    generalized_normal = _keyless(jax.random.generalized_normal)
    geometric = _keyless(jax.random.geometric)
    gumbel = _keyless(jax.random.gumbel)
    laplace = _keyless(jax.random.laplace)
    loggamma = _keyless(jax.random.loggamma)
    logistic = _keyless(jax.random.logistic)
    lognormal = _keyless(jax.random.lognormal)
    maxwell = _keyless(jax.random.maxwell)
    multinomial = _keyless(jax.random.multinomial)
    multivariate_normal = _keyless(jax.random.multivariate_normal)
    normal = _keyless(jax.random.normal)
    orthogonal = _keyless(jax.random.orthogonal)
    pareto = _keyless(jax.random.pareto)
    permutation = _keyless(jax.random.permutation)
    poisson = _keyless(jax.random.poisson)
    rademacher = _keyless(jax.random.rademacher)
    randint = _keyless(jax.random.randint)
    rayleigh = _keyless(jax.random.rayleigh)
    t = _keyless(jax.random.t)
    triangular = _keyless(jax.random.triangular)
    truncated_normal = _keyless(jax.random.truncated_normal)
    uniform = _keyless(jax.random.uniform)
    wald = _keyless(jax.random.wald)
    weibull_min = _keyless(jax.random.weibull_min)

    delta_orthogonal = _initializer(jax.nn.initializers.delta_orthogonal)
    glorot_normal = _initializer(jax.nn.initializers.glorot_normal)
    glorot_uniform = _initializer(jax.nn.initializers.glorot_uniform)
    he_normal = _initializer(jax.nn.initializers.he_normal)
    he_uniform = _initializer(jax.nn.initializers.he_uniform)
    kaiming_normal = _initializer(jax.nn.initializers.kaiming_normal)
    kaiming_uniform = _initializer(jax.nn.initializers.kaiming_uniform)
    lecun_normal = _initializer(jax.nn.initializers.lecun_normal)
    lecun_uniform = _initializer(jax.nn.initializers.lecun_uniform)
    variance_scaling = _initializer(jax.nn.initializers.variance_scaling)
    xavier_normal = _initializer(jax.nn.initializers.xavier_normal)
    xavier_uniform = _initializer(jax.nn.initializers.xavier_uniform)
