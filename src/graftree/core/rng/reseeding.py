"""The keys of all the random streams inside an object: saved, restored, reseeded.

`backup_keys` reads the keys, `restore_rngs` and `reseed` write them. `SplitBackups` is
what the functions of `graftree.core.rng.splitting` return when they change streams in
place. Writing replaces the values of Variables, never the Variables or streams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from graftree.annotations import Path, PRNGKey
from graftree.core.graph import traversals
from graftree.core.rng import streams
from graftree.core.rng.streams import Rngs, RngStream

Backup: TypeAlias = tuple[RngStream, PRNGKey] | tuple[RngStream, PRNGKey, jax.Array]
"""A stream and the values of its key and, if given, its count."""
ReseedPolicy: TypeAlias = (
    Literal["scalars_only", "match_shape"]
    | Callable[[Path, PRNGKey, tuple[int, ...]], PRNGKey]
)


@dataclasses.dataclass(frozen=True)
class SplitBackups(Iterable[Backup]):
    """The state of streams before they were split or forked in place.

    As a context manager it restores them on exit, also after an exception.

    Attributes:
        backups: Tuples of a stream, its key and its count, for `restore_rngs`.

    Example:
        >>> rngs = nnx.Rngs(0)
        >>> with nnx.split_rngs(rngs, splits=3):
        ...     print(rngs.default.key.shape)
        (3,)
        >>> rngs.default.key.shape
        ()
    """

    backups: list[Backup]

    def __iter__(self) -> Iterator[Backup]:
        return iter(self.backups)

    def __enter__(self) -> SplitBackups:
        return self

    def __exit__(self, *exception: object) -> None:
        restore_rngs(self)


jax.tree_util.register_dataclass(SplitBackups, ["backups"], [])


def restore_rngs(backups: Iterable[Backup], /) -> None:
    """Writes keys, and counts where given, back into their streams.

    Args:
        backups: What `split_rngs` and `fork_rngs` return in place or `backup_keys`
            returns: tuples ``(stream, key)`` or ``(stream, key, count)``.

    Raises:
        TraceContextError: If a stream belongs to another trace.

    Example:
        >>> rngs = nnx.Rngs(0)
        >>> backups = nnx.split_rngs(rngs, splits=2)
        >>> nnx.restore_rngs(backups)
        >>> rngs.default.key.shape, rngs.default.count[...]
        ((), Array(1, dtype=uint32))
    """
    # A draw in another thread takes the key and the count of one time.
    with streams.lock:
        for stream, key, *count in backups:
            stream.key.set_value(key)
            if count:
                stream.count.set_value(count[0])


def backup_keys(
    node: Any, /, *, graph: bool | None = None
) -> list[tuple[RngStream, PRNGKey]]:
    """Lists the random streams inside an object with their keys, for `restore_rngs`.

    Args:
        node: An object that holds streams.
        graph: Whether ``node`` is a graph or a tree; ``None`` means the default in
            force.

    Returns:
        One tuple per stream; restoring them leaves the counts as they are.

    Raises:
        ValueError: In tree mode, if a Variable is shared.

    Example:
        >>> from graftree.core.rng import reseeding
        >>> rngs = nnx.Rngs(params=0, dropout=1)
        >>> [stream.tag for stream, key in reseeding.backup_keys(rngs)]
        ['dropout', 'params']
    """
    return [(stream, stream.key.get_value()) for _, stream in streams_in(node, graph)]


def reseed(
    node: Any,
    /,
    *,
    graph: bool | None = None,
    policy: ReseedPolicy = "scalars_only",
    **stream_keys: streams.RngValue,
) -> None:
    """Gives the random streams inside an object new keys, and sets their counts to 0.

    For each name a fresh stream is made of the given seed or key; the streams of that
    name inside ``node`` get keys drawn from it, in the order of `iter_graph`. Layers
    get their keys from a `Rngs` in the same way, so a reseeded model draws what one
    built with that seed would draw.

    Args:
        node: An object that holds streams; it is changed in place.
        graph: Whether ``node`` is a graph or a tree; ``None`` means the default in
            force.
        policy: How to treat a stream whose key has axes: ``"scalars_only"`` raises,
            ``"match_shape"`` splits the new key to that shape. Or a function
            ``(path, scalar_key, target_shape) -> key`` that is called for every stream.
        **stream_keys: A seed or a key per stream name. Names that ``node`` lacks are
            ignored; ``default`` applies to the streams of that name only.

    Raises:
        ValueError: If the policy is unknown; if it is ``"scalars_only"`` and the key of
            a stream has axes; in tree mode, if a Variable is shared.
        TraceContextError: If a stream belongs to another trace.

    Example:
        >>> rngs = nnx.Rngs(params=0, dropout=1)
        >>> nnx.reseed(rngs, dropout=jax.random.key(7))
        >>> rngs.dropout.key[...] == jax.random.fold_in(jax.random.key(7), 0)
        Array(True, dtype=bool)
        >>> rngs.dropout.count[...]
        Array(0, dtype=uint32)
    """
    if not callable(policy) and policy not in _POLICIES:
        raise ValueError(
            "policy must be 'scalars_only', 'match_shape' or a function "
            f"(path, scalar_key, target_shape) -> key, got {policy!r}."
        )
    shape_key = policy if callable(policy) else _POLICIES[policy]
    sources = Rngs(stream_keys)
    new_keys = []
    for path, stream in streams_in(node, graph):
        tag = stream.key.get_metadata("tag", None)
        if tag in stream_keys:
            key = shape_key(path, sources[tag](), stream.key.shape)
            new_keys.append((stream, key))
    restore_rngs((s, key, jnp.zeros(key.shape, jnp.uint32)) for s, key in new_keys)


def streams_in(node: Any, graph: bool | None) -> list[tuple[Path, RngStream]]:
    """Lists the random streams inside an object."""
    nodes = traversals.iter_graph(node, graph=graph)
    return [(path, value) for path, value in nodes if isinstance(value, RngStream)]


def _scalars_only(path: Path, key: PRNGKey, shape: tuple[int, ...]) -> PRNGKey:
    if shape:
        raise ValueError(
            f"Cannot reseed stream at path {path}: its key is not a scalar but has "
            f"shape {shape}.\nPass policy='match_shape' to give it an array of "
            "different keys, or a function that makes them."
        )
    return key


def _match_shape(path: Path, key: PRNGKey, shape: tuple[int, ...]) -> PRNGKey:
    return jax.random.split(key, shape) if shape else key


_POLICIES: dict[str, Callable[[Path, PRNGKey, tuple[int, ...]], PRNGKey]] = {
    "scalars_only": _scalars_only,
    "match_shape": _match_shape,
}
