"""All the random streams of an object: split, forked, saved, restored, reseeded.

`split_rngs`, `fork_rngs` and `with_rngs` replace streams of an object by streams
derived from them, each in its own way; they share one mechanism, in two forms:

* in place (graph mode with graph updates; `with_rngs` has no such form): the streams of
  the caller's object get the derived keys, and `SplitBackups` put the old ones back,
* as a copy (otherwise): the result is a copy of the object with other streams; it
  shares the Variables that were not derived with the input.

Either way, each stream gives away one key, so its count is one higher afterwards, and
no key is drawn twice. All keys are derived before the first stream changes. Each of the
three is also a decorator: without an object, it acts on the arguments of a function.

`backup_keys` reads the keys of streams, `restore_rngs` and `reseed` write them. Writing
replaces the values of Variables, never the Variables or streams.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp

from graftree import config, errors
from graftree.annotations import Filter, Path, Predicate, PRNGKey
from graftree.core import filters, paths
from graftree.core.graph import functional, traversals
from graftree.core.rng import streams
from graftree.core.rng.streams import Rngs, RngStream
from graftree.core.variables import variables

P = typing.ParamSpec("P")
Q = typing.ParamSpec("Q")
R = typing.TypeVar("R")

Derivation = Callable[[RngStream], RngStream]
"""Draws from a stream, and makes a new stream of the key."""
Choice = Callable[[Path, RngStream], Derivation | None]
"""Says how the stream at a path is derived; ``None``: it stays as it is."""

Backup = tuple[RngStream, PRNGKey] | tuple[RngStream, PRNGKey, jax.Array]
"""A stream and the values of its key and, if given, its count."""
ReseedPolicy = (
    typing.Literal["scalars_only", "match_shape"]
    | Callable[[Path, PRNGKey, tuple[int, ...]], PRNGKey]
)


# Stands for the object where the functions below are used as decorators.
_ARGUMENTS: Any = object()


class _OrDecorator(typing.Protocol[Q]):
    """A function of an object; without the object it is a decorator."""

    @overload
    def __call__(self, node: Any, /, *args: Q.args, **kwargs: Q.kwargs) -> Any: ...
    @overload
    def __call__(
        self, *args: Q.args, **kwargs: Q.kwargs
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def _or_decorator(
    function: Callable[typing.Concatenate[Any, Q], Any],
) -> _OrDecorator[Q]:
    """Gives a function the type for this."""
    typed: Any = function
    return typed


_FORK: Derivation = operator.methodcaller("fork")


@_or_decorator
def split_rngs(
    node: Any = _ARGUMENTS,
    /,
    *,
    splits: streams.Size,
    only: Filter = ...,
    squeeze: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Replaces the keys of random streams by arrays of keys, for mapped axes.

    The new key of a stream is ``jax.random.split(stream(), splits)``, its count zeros
    of that shape.

    Args:
        node: An object that holds streams. If left out, the result is a decorator that
            acts on all arguments of a function during each call.
        splits: The shape of the new keys; an integer is the size of their only axis.
        only: Which streams to split. The filter must match both Variables of a stream:
            use the name of a stream, a path filter or `RngState`.
        squeeze: Whether to drop the new axis; requires ``splits=1``.
        graph: Whether ``node`` is a graph, whose shared streams are split once, or a
            tree; ``None`` means the default in force.
        graph_updates: Whether, in graph mode, to work in place; ``None`` means the
            default in force.

    Returns:
        In place: the `SplitBackups`, which restore the streams with counts one higher
        than before. Otherwise: a new object with the new streams, which shares all
        other Variables with ``node``; the counts in ``node`` are one higher.

    Raises:
        ValueError: If ``squeeze`` is set and ``splits`` is not 1, if a stream was split
            before or is one of a Stack, or, in tree mode, if a Variable is shared.
        TraceContextError: If a stream belongs to another trace.

    Example:
        >>> @nnx.split_rngs(splits=5)
        ... def create(rngs):
        ...     return jax.vmap(lambda rngs: rngs.params.normal((2,)))(rngs)
        >>> create(nnx.Rngs(0)).shape
        (5, 2)
    """
    if squeeze and splits != 1:
        raise ValueError(
            f"squeeze=True is only supported for splits=1, got splits={splits}."
        )
    derive = _split_once if squeeze else operator.methodcaller("split", splits)
    choose = _choice([_Rule("split", only, _both_variables_match(only), derive)])
    return _derive(node, choose, graph, _in_place(graph, graph_updates))


@_or_decorator
def fork_rngs(
    node: Any = _ARGUMENTS,
    /,
    *,
    split: streams.Sizes = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Replaces random streams by independent ones made from a key drawn from each.

    Args:
        node: An object that holds streams. If left out, the result is a decorator that
            acts on all arguments of a function during each call.
        split: ``None`` forks all streams; a size forks and splits all of them. A
            mapping of filters to sizes, or to ``None`` for no split, acts on the
            streams that a filter matches; the first that matches both Variables of a
            stream counts.
        graph: As for `split_rngs`.
        graph_updates: As for `split_rngs`.

    Returns:
        As for `split_rngs`: in place `SplitBackups`, otherwise a new object.

    Raises:
        ValueError: If a stream was split before, or, in tree mode, if a Variable is
            shared.
        TraceContextError: If a stream belongs to another trace.

    Example:
        >>> rngs = nnx.Rngs(params=0, dropout=1)
        >>> with nnx.fork_rngs(rngs, split={"dropout": 4}):
        ...     print(rngs.params.key.shape, rngs.dropout.key.shape)
        () (4,)
    """
    sizes = {...: None} if split is None else streams.sizes_by_filter(split)
    choose = _choice(_rules("split", sizes.items(), _both_variables_match))
    return _derive(node, choose, graph, _in_place(graph, graph_updates))


@_or_decorator
def with_rngs(
    node: Any = _ARGUMENTS,
    /,
    *,
    split: streams.Sizes = None,
    fork: Filter = None,
    broadcast: streams.Sizes = None,
    only: Filter = True,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Makes a copy of an object with random streams derived from its own.

    Filters are called with the path of a stream and the `RngStream`, so a string is the
    name of a stream. Within one rule, the first filter that matches counts. If several
    rules match, ``split`` precedes ``broadcast``, which precedes ``fork``, even where a
    later rule is more specific. At most one of the matching filters may be something
    other than ``...`` and ``True``.

    Args:
        node: An object that holds streams. If left out, the result is a decorator that
            gives a function copies of all its arguments.
        split: Streams to split, as for `RngStream.split`: a size for all, or a mapping
            of filters to sizes.
        fork: Streams to fork: a filter or a sequence of filters.
        broadcast: Streams to broadcast, as for `RngStream.broadcast`: a size for all,
            or a mapping of filters to sizes.
        only: Limits all three to the streams that it matches.
        graph: Whether ``node`` is a graph or a tree; ``None`` means the default in
            force.
        graph_updates: Must be off in graph mode; ``None`` means the default in force.

    Returns:
        A new object with the derived streams, which shares all other Variables with
        ``node``. The counts of the derived streams in ``node`` are one higher.

    Raises:
        NotImplementedError: In graph mode with graph updates.
        ValueError: If specific filters of several rules match one stream, if a stream
            was split before, or, in tree mode, if a Variable is shared.
        TraceContextError: If a stream belongs to another trace.

    Example:
        >>> rngs = nnx.Rngs(params=0, dropout=1, noise=2)
        >>> new = nnx.with_rngs(
        ...     rngs,
        ...     split={"params": 3},
        ...     broadcast={"dropout": 3},
        ...     fork=...,
        ...     graph=False,
        ... )
        >>> {name: stream.key.shape for name, stream in sorted(new.items())}
        {'dropout': (3,), 'noise': (), 'params': (3,)}
    """
    if _in_place(graph, graph_updates):
        raise NotImplementedError(
            "graph=True and graph_updates=True is not supported for `with_rngs`, which "
            "always returns a copy.\nPass graph=False or graph_updates=False."
        )
    forked = fork if isinstance(fork, (list, tuple)) else (fork,)
    rules = [
        *_rules("split", streams.sizes_by_filter(split).items()),
        *_rules("broadcast", streams.sizes_by_filter(broadcast).items()),
        *_rules("fork", [(key, None) for key in forked]),
    ]
    return _derive(node, _choice(rules, only), graph, in_place=False)


def _both_variables_match(filter_: Filter) -> Predicate:
    """Chooses streams by a filter on their Variables."""
    predicate = filters.to_predicate(filter_)

    def matches(path: Path, stream: RngStream) -> bool:
        return predicate((*path, "key"), stream.key) and predicate(
            (*path, "count"), stream.count
        )

    return matches


def _split_once(stream: RngStream) -> RngStream:
    split = stream.split(1)
    return type(stream)(split.key.get_value()[0], tag=stream.tag)


class _Rule(NamedTuple):
    """One filter given to a function above, and its request."""

    method: str
    filter: Filter
    matches: Predicate
    derive: Derivation


def _rules(
    method: str,
    sizes: Iterable[tuple[Filter, streams.Size | None]],
    matches: Callable[[Filter], Predicate] = filters.to_predicate,
) -> list[_Rule]:
    """Lists for each filter its rule; streams without a size are forked."""
    return [
        _Rule(
            method,
            key,
            matches(key),
            _FORK if size is None else operator.methodcaller(method, size),
        )
        for key, size in sizes
    ]


def _choice(rules: list[_Rule], only: Filter = ...) -> Choice:
    allowed = filters.to_predicate(only)

    def choose(path: Path, stream: RngStream) -> Derivation | None:
        # The first match for each method, in the order of precedence.
        matching: dict[str, _Rule] = {}
        for rule in rules if allowed(path, stream) else ():
            if rule.method not in matching and rule.matches(path, stream):
                matching[rule.method] = rule
        specific = [x for x in matching.values() if x.filter not in (..., True)]
        if len(specific) > 1:
            raise ValueError(
                errors.message(
                    f"RngStream at path {path} matches multiple rules:",
                    where="\n".join(
                        f"- {rule.method} matches filter {rule.filter!r}"
                        for rule in matching.values()
                    ),
                    way_out="Let the filters of all rules but one exclude this stream.",
                )
            )
        return next((rule.derive for rule in matching.values()), None)

    return choose


def _in_place(graph: bool | None, graph_updates: bool | None) -> bool:
    return config.propagation(graph, graph_updates).structure


def _derive(node: Any, choose: Choice, graph: bool | None, in_place: bool) -> Any:
    """Derives streams of ``node``, or makes a decorator that does for arguments."""
    graph = config.graph_mode(graph)
    if node is not _ARGUMENTS and in_place:
        return _derive_in_place(node, choose)
    if node is not _ARGUMENTS:
        return _derived(node, choose, graph)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def on_derived_streams(*args: Any, **kwargs: Any) -> Any:
            if in_place:
                with _derive_in_place((args, kwargs), choose):
                    return function(*args, **kwargs)
            args, kwargs = _derived((args, kwargs), choose, graph)
            return function(*args, **kwargs)

        return on_derived_streams

    return decorate


def _derive_in_place(node: Any, choose: Choice) -> SplitBackups:
    chosen = _chosen(node, choose, graph=True)
    for stream, derive in chosen:
        # On a copy: a draw that is refused must not count.
        new = derive(functional.clone(stream)) if stream.key.ref else stream
        if new.key.shape != stream.key.shape:
            raise ValueError(
                "Cannot split a stream in place whose state is held by refs: a ref of "
                f"shape {stream.key.shape} can't hold a key of shape {new.key.shape}.\n"
                "Pass graph_updates=False to get a new object, or call the method "
                "`split` of the stream or of its Rngs."
            )
    with streams.lock:
        derived = [derive(stream) for stream, derive in chosen]
        backups, writes = [], []
        for (stream, _), new in zip(chosen, derived, strict=True):
            # After the draw: the count restored later is beyond the key given away now.
            backups.append((stream, stream.key.get_value(), stream.count.get_value()))
            writes.append((stream, new.key.get_value(), new.count.get_value()))
        restore_rngs(writes)
    return SplitBackups(backups)


def _derived(node: Any, choose: Choice, graph: bool) -> Any:
    """Copies ``node`` with derived streams; its other Variables are shared."""
    copy = functional.clone(node, variables=False, graph=graph)
    for stream, derive in _chosen(copy, choose, graph):
        new = derive(stream)
        stream.key, stream.count = new.key, new.count
    return copy


def _chosen(
    node: Any, choose: Choice, graph: bool
) -> list[tuple[RngStream, Derivation]]:
    choices = [(path, s, choose(path, s)) for path, s in streams_in(node, graph)]
    chosen = [(path, s, derive) for path, s, derive in choices if derive is not None]
    # All checks come before the first draw: those of the other streams would count.
    for _, stream, _ in chosen:
        variables.check_write(stream.count)
    arrays = {path: s.key.shape for path, s, _ in chosen if s.key.shape}
    if arrays:
        raise ValueError(
            errors.message(
                "Cannot split, fork or broadcast streams that are arrays of streams, "
                "such as those of a Stack and those that were split before.",
                where="\n".join(
                    f"{paths.dotted(path)}: keys of shape {shape}"
                    for path, shape in arrays.items()
                ),
                way_out="Do it inside nnx.vmap over their axes, or choose the "
                "other streams: split_rngs and with_rngs have `only`, fork_rngs takes "
                "a mapping.",
            )
        )
    return [(stream, derive) for _, stream, derive in chosen]


# The keys themselves.


@dataclasses.dataclass(frozen=True)
class SplitBackups(Iterable[Backup]):
    """State of streams before they were split or forked in place.

    As a context manager, it restores them on exit, even after an exception.

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
        backups: The results of `split_rngs` and `fork_rngs` in place, or of
            `backup_keys`: tuples ``(stream, key)`` or ``(stream, key, count)``.

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
    """Lists the random streams of an object with their keys, for `restore_rngs`.

    Args:
        node: An object that holds streams.
        graph: Whether ``node`` is a graph or a tree; ``None`` means the default in
            force.

    Returns:
        One tuple per stream; restoring them leaves the counts as they are.

    Raises:
        ValueError: In tree mode, if a Variable is shared.

    Example:
        >>> from graftree.core.rng import model_streams
        >>> rngs = nnx.Rngs(params=0, dropout=1)
        >>> [stream.tag for stream, key in model_streams.backup_keys(rngs)]
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
    """Gives the random streams of an object new keys, and sets their counts to 0.

    For each name, a fresh stream is made from the given seed or key; the streams of
    that name inside ``node`` get keys drawn from it, in the order of `iter_graph`.
    Layers get their keys from an `Rngs` in the same way, so a reseeded model draws the
    same numbers as one built with that seed.

    Args:
        node: An object that holds streams; it is changed in place.
        graph: Whether ``node`` is a graph or a tree; ``None`` means the default in
            force.
        policy: How to treat a stream whose key has axes: ``"scalars_only"`` raises,
            ``"match_shape"`` splits the new key to that shape. Or a function
            ``(path, scalar_key, target_shape) -> key`` that is called for every stream.
        **stream_keys: A seed or a key per stream name. Names that ``node`` lacks are
            ignored; ``default`` applies only to the streams of that name.

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
    if not callable(policy) and policy not in ("scalars_only", "match_shape"):
        raise ValueError(
            "policy must be 'scalars_only', 'match_shape' or a function "
            f"(path, scalar_key, target_shape) -> key, got {policy!r}."
        )
    sources = Rngs(stream_keys)
    new_keys = []
    for path, stream in streams_in(node, graph):
        tag = stream.key.get_metadata("tag", None)
        if tag in stream_keys:
            key = _shaped(policy, path, sources[tag](), stream.key.shape)
            new_keys.append((stream, key))
    restore_rngs((s, key, jnp.zeros(key.shape, jnp.uint32)) for s, key in new_keys)


def streams_in(node: Any, graph: bool | None) -> list[tuple[Path, RngStream]]:
    """Lists the random streams of an object."""
    nodes = traversals.iter_graph(node, graph=graph)
    return [(path, value) for path, value in nodes if isinstance(value, RngStream)]


def _shaped(
    policy: ReseedPolicy, path: Path, key: PRNGKey, shape: tuple[int, ...]
) -> PRNGKey:
    if callable(policy):
        return policy(path, key, shape)
    if shape and policy == "scalars_only":
        raise ValueError(
            f"Cannot reseed stream at path {path}: its key is not a scalar but has "
            f"shape {shape}.\nPass policy='match_shape' to give it an array of "
            "different keys, or a function that makes them."
        )
    return jax.random.split(key, shape) if shape else key
