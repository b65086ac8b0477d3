"""Random keys as objects: a stream of keys, and a set of named streams.

An `RngStream` holds a base key and a count, both Variables, so a model that holds
streams is split, mapped and checkpointed with them. Drawing gives the key
``fold_in(key, count)`` and then adds one to the count; the base key never changes. So
the n-th draw, from 0, is ``jax.random.fold_in(key, n)``, in every trace and on every
device. An `Rngs` is a set of named streams; for a name that it lacks, it gives its
``default`` stream.

Both are callable (a call draws a key) and offer the distributions of ``jax.random`` and
the initializers of ``jax.nn.initializers`` as methods that need no key. Every call of a
distribution, and of a function that an initializer method made, draws one key.

Invariants:

* The Variables of a stream carry ``tag=<name of the stream>``, so that a string is a
  filter for them, and ``count`` has the shape of ``key``.
* A stream whose key has axes was made for ``vmap`` or ``scan`` over them: drawing from
  it directly is an error, raised by JAX.
* No two draws give the same key, unless a stream was broadcast or copied. That holds
  for eager draws in several threads, too: each takes `lock` to read and count.

Functions that act on all the streams of an object are in `model_streams.py`.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, ItemsView, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax, config, errors
from graftree.annotations import Filter, PRNGKey
from graftree.core import filters
from graftree.core.objects import methods, pytrees
from graftree.core.text import representations
from graftree.core.variables import variables

P = ParamSpec("P")
R = TypeVar("R")

RngValue: TypeAlias = int | np.integer | jax.Array
"""The source of a stream: a seed, key data (uint32) or a typed key array."""
Size: TypeAlias = int | tuple[int, ...]
"""The shape of an array of keys; an integer is the size of its only axis."""
Sizes: TypeAlias = Size | Mapping[Filter, Size | None] | None
"""One size for all streams, or one per filter; ``None`` means no size."""


# Held while a stream is read and written; code that writes several holds it throughout.
# One for all, so that a stream holds nothing that can't be copied, pickled or traced;
# a draw takes as long as Python does, so more locks would hardly be faster.
lock = threading.RLock()


class RngState(variables.Variable[jax.Array], representations.CountedAsOne):
    """Kind of Variable that random streams consist of.

    Example:
        >>> state = nnx.state(nnx.Rngs(0), nnx.RngState)
        >>> [path for path, variable in nnx.to_flat_state(state)]
        [('default', 'count'), ('default', 'key')]
    """


class RngKey(RngState):
    """Base key of an `RngStream`.

    Example:
        >>> jax.random.key_data(nnx.Rngs(7).default.key[...])
        Array([0, 7], dtype=uint32)
    """


class RngCount(RngState):
    """How many keys were drawn from an `RngStream`.

    Example:
        >>> rngs = nnx.Rngs(0)
        >>> key = rngs.default()
        >>> rngs.default.count[...]
        Array(1, dtype=uint32)
    """


NotKey = filters.All(RngState, filters.Not(RngKey))
"""The filter for the state of streams without their base keys."""


# Methods that draw their own keys: a method is one row of `RandomMethods`.


def _keyless(
    sample: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """Makes a method of a function of ``jax.random``, which draws its own key."""

    def method(self: Callable[[], jax.Array], /, *args: Any, **kwargs: Any) -> Any:
        # Looked up in each call, in case it has been replaced.
        return getattr(jax.random, name)(self(), *args, **kwargs)

    name = sample.__name__
    words = (
        f"Draws a key and samples with it.\n\nTakes the arguments of "
        f"`jax.random.{name}` except ``key``, and returns\nwhat it returns."
    )
    return methods.observable(_describe_method(method, sample, words, leaves_out=1))


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
    words = (
        f"Makes an initializer that needs no key.\n\nTakes the arguments of "
        f"`jax.nn.initializers.{name}`. Returns a function\n"
        "``(shape, dtype=None, out_sharding=None) -> array``, which draws a key at\n"
        "each of its calls."
    )
    return _describe_method(method, make, words)


def _describe_method(
    method: Any, function: Any, words: str, leaves_out: int = 0
) -> Any:
    # functools.wraps would promise the parameter `key`, which the methods don't take.
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [*inspect.signature(function).parameters.values()][leaves_out:]
    method.__name__ = function.__name__
    method.__qualname__ = f"RandomMethods.{function.__name__}"
    method.__doc__ = words
    method.__signature__ = inspect.Signature([itself, *parameters])
    return method


class RandomMethods:
    """Methods of objects that give a key when called: distributions, initializers.

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


class RngStream(RandomMethods, pytrees.Pytree):
    """A stream of random keys: a base key and the number of keys drawn from it.

    Args:
        key: A seed, key data (a uint32 ``jax.Array``), or a typed key array of any
            shape.
        tag: The name of the stream; its Variables carry it as metadata.

    Attributes:
        tag: The name of the stream.
        key: The base key, an `RngKey`.
        count: How many keys were drawn, an `RngCount` with the shape of the key.

    Raises:
        ValueError: If ``key`` is anything else.

    Example:
        >>> stream = nnx.RngStream(0, tag="dropout")
        >>> first, second = stream(), stream()
        >>> second == jax.random.fold_in(jax.random.key(0), 1)
        Array(True, dtype=bool)
    """

    def __init__(self, key: RngValue, *, tag: str) -> None:
        key = _typed_key(key)
        self.tag = tag
        self.key = RngKey(key, tag=tag)
        self.count = RngCount(jnp.zeros(key.shape, jnp.uint32), tag=tag)

    @methods.observable
    def __call__(self) -> PRNGKey:
        """Draws the next key: ``fold_in(key, count)``; then the count grows by one.

        Raises:
            TraceContextError: If the stream belongs to another trace.
            ValueError: If the key is an array of keys.
        """
        # Before the draw: the values of a stream of a finished trace are dead tracers.
        counter = self.count
        variables.check_write(counter)
        # In a trace, two plain equations instead of a nested function. And a function
        # that replaces `fold_in` is called each time.
        is_own = jax.random.fold_in is _fold_in and _code_of(_fold_in) is _fold_in_code
        with lock:
            key, count = self.key.get_value(), counter.get_value()
            is_traced = isinstance(key, _jax.Tracer)
            is_at_once = config.caches.are_used and is_own and not is_traced
            if jax.ShapeDtypeStruct in (type(key), type(count)):
                raise _abstract_error(self.tag)
            key, count = (_draw_at_once if is_at_once else _draw)(key, count)
            counter.set_value(count)
        return key

    @methods.observable
    def split(self, k: Size) -> RngStream:
        """Draws a key and makes a stream of ``k`` different keys from it.

        Args:
            k: The shape of the new key; an integer is the size of its only axis.

        Returns:
            A new stream whose key is ``jax.random.split(self(), k)``.

        Example:
            >>> streams = nnx.RngStream(0, tag="params").split(3)
            >>> jax.vmap(lambda stream: stream.normal())(streams).shape
            (3,)
        """
        return self._with_key(jax.random.split(self(), k))

    @methods.observable
    def broadcast(self, k: Size) -> RngStream:
        """Draws a key and makes a stream that holds it ``k`` times.

        Args:
            k: The axes to add in front of those of the key.

        Returns:
            A new stream whose keys are all equal.

        Example:
            >>> streams = nnx.RngStream(0, tag="params").broadcast(3)
            >>> numbers = jax.vmap(lambda stream: stream.normal())(streams)
            >>> numbers[0] == numbers[1]
            Array(True, dtype=bool)
        """
        key = self()
        axes = (k,) if isinstance(k, (int, np.integer)) else tuple(k)
        return self._with_key(jnp.broadcast_to(key, axes + key.shape))

    @methods.observable
    def fork(self, *, split: Size | None = None) -> RngStream:
        """Draws a key and makes an independent stream of it.

        Args:
            split: Deprecated: call `split` instead.

        Returns:
            A new stream whose key is ``self()``.

        Example:
            >>> parent = nnx.RngStream(0, tag="dropout")
            >>> child = parent.fork()
            >>> child.key[...] == jax.random.fold_in(parent.key[...], 0)
            Array(True, dtype=bool)
        """
        if split is not None:
            _warn_of_split()
            return self.split(split)
        return self._with_key(self())

    def _with_key(self, key: PRNGKey) -> RngStream:
        return type(self)(key, tag=self.tag)


def _typed_key(value: Any) -> PRNGKey:
    if isinstance(value, (int, np.integer)):
        return jax.random.key(int(value))
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        if value.dtype == jnp.uint32:
            return jax.random.wrap_key_data(value)
    raise ValueError(
        f"Invalid rng value: {value}, expected an integer seed, a typed key as "
        "jax.random.key makes it, or uint32 key data in a jax.Array; got "
        f"{type(value).__name__}."
    )


def _abstract_error(name: str) -> TypeError:
    return TypeError(
        errors.message(
            f"The random stream {name!r} is abstract: it has no values yet.",
            way_out=f"Give it values: nnx.reseed(model, {name}=0), or load the state "
            "of the streams with that of the model.",
        )
    )


def _draw(key: PRNGKey, count: jax.Array) -> tuple[PRNGKey, jax.Array]:
    return jax.random.fold_in(key, count), count + 1


def _code_of(function: Any) -> Any:
    return getattr(function, "__code__", None)


_fold_in: Any = jax.random.fold_in
_fold_in_code = _code_of(_fold_in)
# One dispatch for both results: 10 us, where fold_in alone takes 57 and the sum 8.
_draw_at_once = jax.jit(_draw)


def _warn_of_split() -> None:
    warnings.warn(
        "The 'split' argument of 'fork' is deprecated; use the 'split' method instead.",
        DeprecationWarning,
        stacklevel=3,
    )


class Rngs(RandomMethods, pytrees.Pytree):
    """A set of named random streams.

    Each stream is an attribute. Any other name stands for the stream ``default``, if
    there is one, so ``rngs.params`` and ``rngs.dropout`` may be the same stream.
    Calling the object draws from ``default``, and so do its distributions and
    initializers.

    Args:
        default: The source of the stream ``default``: a seed, a key or a stream; or a
            mapping of names to sources, which keywords override; or ``None`` for no
            such stream.
        **rngs: The sources of the other streams. Only the base key of a stream is
            used: the new one counts from 0, and its tag is the name given here.

    Raises:
        TypeError: If ``default`` is given twice.
        ValueError: If a source is neither a seed nor a key nor a stream.

    Example:
        >>> rngs = nnx.Rngs(0, dropout=1)
        >>> list(rngs)
        ['dropout', 'default']
        >>> rngs.params() == jax.random.fold_in(jax.random.key(0), 0)
        Array(True, dtype=bool)
        >>> rngs.normal((2,)) == jax.random.normal(
        ...     jax.random.fold_in(jax.random.key(0), 1), (2,)
        ... )
        Array([ True,  True], dtype=bool)
    """

    def __init__(
        self,
        default: RngValue
        | RngStream
        | Mapping[str, RngValue | RngStream]
        | None = None,
        **rngs: RngValue | RngStream,
    ) -> None:
        if isinstance(default, Mapping):
            rngs = {**default, **rngs}
        elif default is not None:
            rngs["default"] = default
        for name, value in rngs.items():
            key = value.key.get_value() if isinstance(value, RngStream) else value
            setattr(self, name, RngStream(key, tag=name))

    def __getattr__(self, name: str) -> RngStream:
        # Dunder names are protocols of Python and of libraries: never a stream.
        is_protocol = name.startswith("__") and name.endswith("__")
        default = None if is_protocol else vars(self).get("default")
        if default is None:
            raise AttributeError(_missing_stream(self, name), name=name, obj=self)
        return default

    def __getitem__(self, name: str) -> RngStream:
        stream = vars(self).get(name, vars(self).get("default"))
        if stream is None:
            raise KeyError(_missing_stream(self, name))
        return stream

    def __contains__(self, name: object) -> bool:
        return name in vars(self)

    def __iter__(self) -> Iterator[str]:
        return iter(_streams(self))

    def __len__(self) -> int:
        return len(_streams(self))

    def items(self) -> ItemsView[str, RngStream]:
        """Returns the streams with their names.

        Example:
            >>> [name for name, stream in nnx.Rngs(0, params=1).items()]
            ['params', 'default']
        """
        return _streams(self).items()

    @methods.observable
    def __call__(self) -> PRNGKey:
        """Draws the next key of the stream ``default``."""
        return self.default()

    @methods.observable
    def split(self, k: Sizes) -> Rngs:
        """Draws a key from each stream and splits it, for use along mapped axes.

        Args:
            k: The shape of the new keys, or a mapping of filters to shapes. The first
                filter that matches a stream counts; it is called with the path ``()``
                and the stream, so a string is the name of a stream.

        Returns:
            A new `Rngs`. A stream that no filter matches, or whose size is ``None``, is
            copied with its count; nothing is drawn from it.

        Example:
            >>> rngs = nnx.Rngs(params=0, dropout=1)
            >>> keys = rngs.split({"params": 4})
            >>> keys.params.key.shape, keys.dropout.key.shape
            ((4,), ())
        """
        return self._derive("split", k)

    @methods.observable
    def broadcast(self, k: Sizes) -> Rngs:
        """Draws a key from each stream and repeats it, for use along mapped axes.

        Args:
            k: The axes to add in front of those of the keys, or a mapping of filters
                to such axes, as for `split`.

        Returns:
            A new `Rngs`; streams not matched are copied with their counts.

        Example:
            >>> nnx.Rngs(0).broadcast((2, 3)).default.key.shape
            (2, 3)
        """
        return self._derive("broadcast", k)

    @methods.observable
    def fork(self, *, split: Sizes = None) -> Rngs:
        """Draws a key from each stream and makes an independent stream of it.

        Args:
            split: Deprecated: call `split` instead. Streams not matched are forked.

        Returns:
            A new `Rngs`.

        Example:
            >>> rngs = nnx.Rngs(0)
            >>> forked = rngs.fork()
            >>> rngs.default.count[...], forked.default.count[...]
            (Array(1, dtype=uint32), Array(0, dtype=uint32))
        """
        if split is not None:
            _warn_of_split()
        return self._derive("split", split, forks_others=True)

    def _derive(self, method: str, sizes: Sizes, *, forks_others: bool = False) -> Rngs:
        rules = [
            (filters.to_predicate(key), size)
            for key, size in sizes_by_filter(sizes).items()
        ]
        derived = _streams(self)
        for name, stream in derived.items():
            size = next((size for matches, size in rules if matches((), stream)), None)
            if size is not None:
                derived[name] = getattr(stream, method)(size)
            elif forks_others:
                derived[name] = stream.fork()
        result = Rngs(derived)
        for name, stream in derived.items():
            result[name].count.set_value(stream.count.get_value())
        return result


def _missing_stream(rngs: Rngs, name: str) -> str:
    """Writes a message of one line: a KeyError shows its message as a literal."""
    return (
        f"No RngStream named '{name}' found in Rngs. It has "
        f"{', '.join(map(repr, _streams(rngs))) or 'no streams'}. Make it with a seed "
        f"for that name, nnx.Rngs({name}=0), or with one for all names, nnx.Rngs(0)."
    )


def _streams(rngs: Rngs) -> dict[str, RngStream]:
    return {k: v for k, v in vars(rngs).items() if isinstance(v, RngStream)}


def sizes_by_filter(sizes: Sizes) -> Mapping[Filter, Size | None]:
    """Lists the size for each stream; the first filter that matches counts."""
    if sizes is None:
        return {}
    return sizes if isinstance(sizes, Mapping) else {...: sizes}
