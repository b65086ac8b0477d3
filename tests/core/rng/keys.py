"""What a set of streams holds, as plain values that can be compared."""

import jax


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
