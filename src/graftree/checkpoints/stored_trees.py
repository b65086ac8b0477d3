"""Objects as Orbax stores them, and the way back.

A checkpoint is a tree of arrays: what ``nnx.state(obj)`` lists, each Variable as a
folder with the single entry ``value``, all keys as strings. Programs for Flax NNX write
the same layout, so each side reads the other's.

    model.layers[0].kernel        layers/0/kernel/value
    optimizer.opt_state[0].count  opt_state/0/count/value
    a bare array at "x"           x

JAX takes apart plain containers around objects (tuples, dicts, a `TrainState`), so that
numbers in them are stored too; our own walk takes apart objects, and stores shared
parts once. On disk are arrays, NumPy arrays and Python numbers.

`core/graph/matching.py` compares the contents of the disk, as a state of abstract
arrays, with an abstract copy of the object, and `strict_loading.Choice` decides what
may differ, as for a state in memory. Then each value is made as the object has it: in
the same form, on the same devices.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from graftree import _jax, config, errors
from graftree.annotations import Path
from graftree.checkpoints import orbax_side, strict_loading
from graftree.core import paths
from graftree.core.graph import flattening, matching, nodes
from graftree.core.states import flat_states
from graftree.core.variables import partitioning, values as variable_values, variables
from graftree.sharding import collectives, process_arrays


class StoredValue(NamedTuple):
    """One value of an object that is stored."""

    path: Path  # as the user writes it
    disk_path: orbax_side.DiskPath
    value: Any
    metadata: Mapping[str, Any]  # of its Variable


class ObjectTree:
    """An object, taken apart.

    Attributes:
        holders: Its Variables, refs, arrays and numbers, with their paths.
        stored: Their stored values, in the same order.
    """

    def __init__(self, obj: Any, function: str) -> None:
        items, self._treedef = jax.tree.flatten_with_path(obj, is_leaf=_is_part)
        self._items = [x for _, x in items]
        objects = {i: x for i, x in enumerate(self._items) if _is_object(x)}
        if config.graph_mode(None):
            self._skeleton, leaves = flattening.flatten_graph(objects)
        else:
            name = f"checkpoints.{function}"
            flattening.flatten_tree(obj, name)  # its errors have the caller's paths
            self._skeleton, leaves = flattening.flatten_tree(objects, name)
        bases = [paths.from_jax(path) for path, _ in items]
        owned = zip(self._skeleton.paths(), leaves, strict=True)
        self.holders = [((*bases[i], *path), leaf) for (i, *path), leaf in owned]
        self._num_owned = len(self.holders)  # the others are in plain containers
        self.holders += [
            (bases[i], x) for i, x in enumerate(self._items) if i not in objects
        ]
        raw = [flattening.raw_of(leaf) for _, leaf in self.holders]
        values, self._values = jax.tree.flatten_with_path(raw, is_leaf=_is_part)
        self.stored = [self._stored(keys, value) for keys, value in values]
        _check_disk_paths(self.stored, function)

    def _stored(self, keys: tuple[Any, ...], value: Any) -> StoredValue:
        """Describes the value at JAX's key path in the list of all holders' values."""
        path, leaf = self.holders[keys[0].idx]
        inner = paths.from_jax(keys[1:])
        is_variable = isinstance(leaf, variables.Variable)
        metadata = variables.metadata_of(leaf) if is_variable else {}
        disk_path = (*_disk_path_of(path, leaf), *inner)
        value = value[...] if _jax.is_ref(value) else value
        return StoredValue((*path, *inner), paths.spelled(disk_path), value, metadata)

    def by_holder(self, values: Sequence[Any]) -> Iterator[tuple[Path, Any, Any]]:
        """Yields the path, the leaf and the new value of each holder."""
        holder_values = self._values.unflatten(values)
        for (path, leaf), value in zip(self.holders, holder_values, strict=True):
            yield path, leaf, value

    def tree(self, stored: Sequence[Any]) -> dict[str, Any]:
        """Makes the tree that Orbax gets.

        Args:
            stored: For each value, its stored form.
        """
        disk_items = [
            (paths.spelled(_disk_path_of(path, leaf)), value)
            for path, leaf, value in self.by_holder(stored)
        ]
        # Orbax refuses a tree without any entry.
        return flat_states.nest(disk_items) or {"nothing": None}

    def rebuilt(self, new: Sequence[Any], *, boxed: bool = False) -> Any:
        """Makes a new object like the one taken apart.

        Args:
            new: For each stored value another one.
            boxed: Whether bare values get a Variable, so that abstract arrays and
                numbers in containers count as leaves.
        """
        raw = [_raw_like(leaf, value) for _, leaf, value in self.by_holder(new)]
        if boxed:
            raw = [
                x if _is_object(leaf) else variables.Variable(x)
                for x, (_, leaf) in zip(raw, self.holders, strict=True)
            ]
        objects = flattening.unflatten(self._skeleton, raw[: self._num_owned])
        others = iter(raw[self._num_owned :])
        items = [
            objects[i] if _is_object(item) else next(others)
            for i, item in enumerate(self._items)
        ]
        return self._treedef.unflatten(items)

    def update(self, new: Sequence[Any]) -> dict[Any, Any]:
        """Returns the values that `nnx.update` is to write into the object.

        Args:
            new: For each stored value another one.
        """
        new_items: list[tuple[Path, Any]] = []
        for path, leaf, value in self.by_holder(new):
            if isinstance(leaf, variables.Variable):
                # As a Variable, so that a dict in it is not taken for more paths.
                metadata = variables.metadata_of(leaf)
                value = variables.rebuild(type(leaf), value, metadata)
            new_items.append((path, value))
        return flat_states.nest(new_items)


def _disk_path_of(path: Path, leaf: Any) -> Path:
    """Returns the path on disk of a holder's value."""
    return (*path, "value") if isinstance(leaf, variables.Variable) else path


def _raw_like(leaf: Any, value: Any) -> Any:
    """Makes a new raw value of a leaf; in a ref if the present one is."""
    is_ref = leaf.ref if isinstance(leaf, variables.Variable) else _jax.is_ref(leaf)
    return variable_values.stored(value, ref=is_ref)


def _is_object(x: Any) -> bool:
    """Whether it may be shared: an object, a Variable or a ref."""
    return nodes.is_graph_node(x)


def _is_part(x: Any) -> bool:
    """Whether JAX must not take it apart; it would accept iterators, for one."""
    is_static = x is not None and nodes.kind_of(x) is nodes.Leaf.STATIC
    return is_static or _is_object(x)


def _check_disk_paths(stored: Sequence[StoredValue], function: str) -> None:
    """Raises if the disk would mix values up, or not keep them at all."""
    by_name: dict[str, StoredValue] = {}
    by_disk_path = {x.disk_path: x for x in stored}
    contents: dict[Any, tuple[Path, StoredValue]] = {}
    for x in stored:
        # Orbax joins keys with dots, and doesn't see that names collide.
        name = ".".join(x.disk_path)
        if x.disk_path and not _can_be_named(name):
            raise ValueError(
                errors.message(
                    f"nnx.checkpoints.{function}: {name!r} is not a valid name on "
                    "disk.",
                    where=f"{x.path!r}",
                    way_out="Rename the key: a name is a string that is not empty and "
                    "doesn't end with a slash.",
                )
            )
        parents = (x.disk_path[:end] for end in range(1, len(x.disk_path)))
        other = next((by_disk_path[p] for p in parents if p in by_disk_path), None)
        other = other or by_name.setdefault(name, x)
        for end in range(1, len(x.path) + 1):
            # Keys such as 1 and "1", whose contents would be in one folder.
            prefix = x.path[:end]
            other_prefix, first = contents.setdefault(
                paths.spelled(prefix), (prefix, x)
            )
            other = first if other is x and other_prefix != prefix else other
        if other is not x:
            raise ValueError(
                errors.message(
                    f"nnx.checkpoints.{function}: two paths have the same name on "
                    f"disk, {'.'.join(other.disk_path)!r}.",
                    where=f"{other.path!r}\n{x.path!r}",
                    way_out="Rename one of the keys: on disk, keys are strings joined "
                    "by dots.",
                )
            )


def _can_be_named(name: str) -> bool:
    """Whether Orbax can find an array again that it saved under a name."""
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    # TensorStore drops a slash at the end, which changes the name.
    return bool(name) and not name.endswith("/")


# ---------------------------------------------------------------- to disk


class ToStore(NamedTuple):
    """What is stored for an object.

    Attributes:
        tree: Its arrays; of several processes, all are arrays of all of them.
        digest: Of the arrays that this process has for itself. It must be the same in
            all processes, as only those of one are stored.
    """

    tree: dict[str, Any]
    digest: str


def to_store(obj: Any, function: str, name: str = "") -> ToStore:
    """Makes the tree of arrays that is stored for an object.

    Later changes of the object don't reach it.

    Args:
        obj: The object.
        function: The function that stores it, for messages.
        name: Its name there.

    Raises:
        TypeError: If a leaf can't be stored.
    """
    tree = ObjectTree(obj, function)
    named = f"{name}: " if name else ""
    stored, refused = _convert_all(tree, _to_disk)
    if not refused and not all(x.disk_path for x in tree.stored):
        refused.append("<root> is a single array: put it in a dict")
    if refused:
        raise TypeError(
            errors.message(
                f"nnx.checkpoints.{function} can't store all of the "
                f"{type(obj).__name__}.",
                where="\n".join([named + line for line in refused]),
                way_out="Leave these out, or convert them to arrays.",
            )
        )
    if jax.process_count() == 1:
        return ToStore(tree.tree(stored), "")
    return ToStore(tree.tree(_joined(stored)), _digest([*filter(_is_local, stored)]))


def check_digests(digests: Sequence[Any]) -> None:
    """Raises if processes have different arrays where only those of one are stored."""
    if any(digest != digests[0] for digest in digests):
        raise ValueError(
            "nnx.checkpoints: arrays that are local to each process differ between "
            "the processes, but only the first process saves them.\nMake them with "
            "the same seed everywhere, or shard them over all devices."
        )


def _joined(leaves: Sequence[Any]) -> list[Any]:
    """Turns local arrays of each process into arrays of all processes.

    Orbax stores only those. Counters and random keys are usually local.
    """
    # On one device of each process, and not divided among them.
    devices = {d.process_index: d for d in reversed(jax.devices())}
    mesh = jax.sharding.Mesh([devices[i] for i in sorted(devices)], "processes")
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return [
        process_arrays.joined_rows(leaf, everywhere) if _is_local(leaf) else leaf
        for leaf in leaves
    ]


def _is_local(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_fully_addressable


def _digest(arrays: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        data = jax.random.key_data(array) if _is_key(array.dtype) else array
        digest.update(np.asarray(data).tobytes())
    return digest.hexdigest()


class _Unsupported(Exception):
    """A value can't be stored, or restored; the text says why."""


def _convert_all(
    tree: ObjectTree, convert: Callable[[StoredValue], Any]
) -> tuple[list[Any], list[str]]:
    """Converts each value; returns the new ones, and a line for each refused one."""
    converted, refused = [], []
    for x in tree.stored:
        try:
            converted.append(convert(x))
        except _Unsupported as reason:
            refused.append(f"{paths.to_string(x.path, '<root>')} {reason}")
    return converted, refused


def _to_disk(stored: StoredValue) -> Any:
    """Returns the value that Orbax gets; ``None`` for arrays without numbers."""
    x = stored.value
    if isinstance(x, _jax.Tracer):
        raise _Unsupported("is traced: save outside of jit and other transforms")
    if isinstance(x, jax.ShapeDtypeStruct):
        raise _Unsupported("is abstract: it has no value")
    if type(x) is complex:
        x = np.asarray(x)
    if _is_number(x):
        if type(x) is int and not -(2**63) <= x < 2**63:
            raise _Unsupported("is an integer of more than 64 bits")
        return x
    _check_is_array(x)
    if isinstance(x, jax.Array) and x.is_deleted():
        raise _Unsupported("has been deleted or donated")
    if not _is_key(x.dtype):
        _check_dtype(x.dtype)
    if x.size == 0:
        return None  # Orbax refuses it; its shape says all.
    return x if isinstance(x, jax.Array) else np.array(x)


def _is_number(x: Any) -> bool:
    is_scalar = isinstance(x, (bool, int, float, complex))
    return is_scalar and not isinstance(x, np.generic)


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _check_is_array(x: Any) -> None:
    if not isinstance(x, (jax.Array, np.ndarray, np.generic)):
        raise _Unsupported(f"is of type {type(x).__name__}, not an array or a number")


def _check_dtype(dtype: Any) -> None:
    import tensorstore

    is_numeric = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    try:
        tensorstore.dtype(np.dtype(dtype).name)
    except (TypeError, ValueError):
        is_numeric = False
    if not is_numeric or np.dtype(dtype).name in _UNREADABLE:
        raise _Unsupported(f"has the dtype {dtype}, which Orbax can't store")


# TensorStore has them in memory, but its Zarr files don't.
_UNREADABLE = ("uint4",)


# ---------------------------------------------------------------- from disk


def compare(
    folders: Mapping[str, Any],
    likes: Mapping[str, Any],
    message: str,
    way_out: str = "",
    **allowed: Any,
) -> dict[str, Restored]:
    """Compares several objects with what is on disk; `read_all` reads them then.

    Args:
        folders: Where each of them is.
        likes: The objects to be filled, or objects like them. Paths begin with their
            names; a single object may have the name "".
        message: The first line of the message if anything else differs.
        way_out: Its last line.
        **allowed: The differences that are allowed, as for a `Choice`.
    """
    choice, read = strict_loading.Choice(**allowed, has_values=False), {}
    for name, like in likes.items():
        with orbax_side.explained(orbax_side.READING, folders[name]):
            contents = orbax_side.read_contents(folders[name])
        read[name] = Restored(like, contents)
        read[name].choose(choice, name)
    choice.check(message, way_out)
    return read


def read_all(name: str, restored: Mapping[str, Restored]) -> None:
    """Reads the arrays of objects that were compared, in all processes.

    Args:
        name: The call, for messages.
        restored: What `compare` returned.
    """
    collectives.together(name, lambda: [each.read() for each in restored.values()])


class Restored:
    """An object, and the values read for it.

    Args:
        like: The object.
        contents: What the folder holds.
    """

    def __init__(self, like: Any, contents: orbax_side.FolderContents) -> None:
        self._tree = ObjectTree(like, "restore")
        self._contents = contents
        # The target of each value: the present one; abstract arrays where they belong.
        self._targets, refused = _convert_all(self._tree, _target_of)
        if refused:
            raise ValueError(
                errors.message(
                    f"No checkpoint can be restored into the {type(like).__name__}.",
                    where="\n".join(refused),
                )
            )
        # For each value, its path on disk; `None` keeps the present value.
        self._disk_paths: list[orbax_side.DiskPath | None] = []
        self._new: list[Any] = []

    def choose(self, choice: strict_loading.Choice, name: str) -> None:
        """Decides which values to read, and which to keep.

        Args:
            choice: Makes the decisions.
            name: The beginning of all paths, if not empty.
        """
        node = self._tree.rebuilt([*map(_abstract, self._targets)], boxed=True)
        offer = self._offer()
        state, start = flat_states.nest(offer.items()), ()
        if name:
            node, state, start = {name: node}, {name: state}, (name,)
        fit = matching.compare(node, state)
        disk_path_of = {id(x): disk_path for disk_path, x in offer.items()}
        pairs = {pair.path: pair for pair in fit.pairs}
        for path, leaf, value in self._tree.by_holder(self._targets):
            pair, targets = pairs[*start, *path], jax.tree.leaves(value)
            offered = [None] * len(targets)
            if pair.has_value:
                offered = jax.tree.leaves(flattening.raw_of(pair.value))
            disk_paths: list[Any] = [disk_path_of.get(id(x)) for x in offered]
            are_numbers = [*map(self._is_same_number, disk_paths, targets)]
            pair = _without_width(pair) if are_numbers and all(are_numbers) else pair
            pair = pair._replace(leaf=leaf)
            is_read = choice.decide(pair) and pair.has_value
            self._disk_paths += disk_paths if is_read else [None] * len(targets)
        for path, x in fit.unexpected:
            choice.drop(path, x)

    def _offer(self) -> dict[orbax_side.DiskPath, jax.ShapeDtypeStruct]:
        """Returns the contents of the disk, as an abstract state."""
        offer = dict(self._contents.leaves)
        for x, target in zip(self._tree.stored, self._targets, strict=True):
            # Arrays without numbers are not on disk.
            if 0 in np.shape(target) and paths.spelled(x.path) not in offer:
                offer.setdefault(x.disk_path, _abstract(target))
        return offer

    def _is_same_number(self, disk_path: Any, target: Any) -> bool:
        """Whether one of the two is a Python number, and the other is of that kind."""
        stored = self._contents.leaves.get(disk_path)
        if stored is None or not (
            disk_path in self._contents.numbers or _is_number(target)
        ):
            return False
        dtypes = stored.dtype, _dtype_of(target)
        kinds = jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating
        return any(all(jnp.issubdtype(x, kind) for x in dtypes) for kind in kinds)

    def read(self) -> None:
        """Reads the arrays."""
        leaves = self._contents.leaves
        planned = [*zip(self._disk_paths, self._targets, strict=True)]
        wanted = {
            disk_path: _read_form(target, leaves[disk_path].dtype)
            for disk_path, target in planned
            if disk_path in leaves
        }
        with orbax_side.explained(orbax_side.READING, self._contents.folder):
            values = orbax_side.read(self._contents, wanted)
            self._new = [
                _copied(target)
                if disk_path is None
                else _from_disk(values.get(disk_path), target)
                for disk_path, target in planned
            ]

    def rebuilt(self) -> Any:
        """Makes a new object with the values."""
        return self._tree.rebuilt(self._new)

    def update(self) -> dict[Any, Any]:
        """Returns the values that `nnx.update` is to write into the object itself."""
        return self._tree.update(self._new)


def _without_width(pair: matching.Pair) -> matching.Pair:
    """Ignores the dtype in a pair of numbers: those of one kind may be equal."""
    differences = [x for x in pair.differences if getattr(x, "what", "") != "dtype"]
    return pair._replace(differences=tuple(differences))


def _target_of(stored: StoredValue) -> Any:
    """Returns the target for a value from disk: the present one, placed if abstract."""
    x = stored.value
    if isinstance(x, jax.ShapeDtypeStruct):
        x = partitioning.place_abstract(x, stored.metadata)
        mesh = getattr(x.sharding, "mesh", None)
        is_nowhere = isinstance(mesh, jax.sharding.AbstractMesh) and mesh.empty
        return x.update(
            sharding=None
            if is_nowhere
            else partitioning.on_concrete_mesh(
                x.sharding, stored.path, "nnx.checkpoints.restore"
            )
        )
    if isinstance(x, _jax.Tracer):
        raise _Unsupported("is traced: restore outside of jit and other transforms")
    if not _is_number(x):
        _check_is_array(x)
    return x


def _dtype_of(target: Any) -> Any:
    return np.asarray(target).dtype if _is_number(target) else target.dtype


def _abstract(target: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(target), _dtype_of(target))


def _copied(target: Any) -> Any:
    """Copies a value into a buffer of its own: the other one may be donated."""
    return target.copy() if isinstance(target, jax.Array) else target


def _read_form(target: Any, dtype: Any) -> jax.ShapeDtypeStruct | None:
    """Returns the form in which `orbax_side.read` reads an array of this dtype."""
    # Without a sharding it comes as NumPy: JAX then puts it on the default device
    # uncommitted, so that it can follow the arrays that it meets.
    sharding = _sharding_of(target)
    if sharding is None or _is_key(target.dtype):
        return None
    return jax.ShapeDtypeStruct(target.shape, dtype, sharding=sharding)


def _sharding_of(target: Any) -> Any:
    is_committed = getattr(target, "committed", True)
    return getattr(target, "sharding", None) if is_committed else None


def _from_disk(value: Any, target: Any) -> Any:
    """Converts a value that was read; ``None`` if none had to be read."""
    dtype = _dtype_of(target)
    if _is_key(dtype):
        return _keys(value, target)
    if value is None:
        value = np.zeros(target.shape, dtype)
    if _is_number(target):
        return type(target)(np.asarray(value).item())
    if value.dtype != dtype and not strict_loading.is_in_range(value, dtype):
        raise ValueError(f"numbers from disk do not fit into {dtype}")
    value = strict_loading.array_like(target, value)
    return _as_weak(value) if getattr(target, "weak_type", False) else value


def _keys(data: Any, target: Any) -> jax.Array:
    """Makes random keys from their numbers, or from ``None`` if there are none."""
    blank = jnp.zeros(target.shape, target.dtype)
    data = jax.random.key_data(blank) if data is None else data
    implementation = jax.random.key_impl(blank)
    wrap = functools.partial(jax.random.wrap_key_data, impl=implementation)
    sharding = _sharding_of(target)
    if sharding is None:
        return wrap(jnp.array(data))
    return jax.jit(wrap, out_shardings=sharding)(np.asarray(data))


def _as_weak(x: jax.Array) -> jax.Array:
    """Makes an array weakly typed: in arithmetic the dtype of the other counts.

    Such arrays exist only in the dtypes of Python numbers.
    """
    zero = {"f": 0.0, "i": 0, "c": 0j}.get(x.dtype.kind)
    if zero is None:
        return x
    with jax.enable_x64(x.dtype.itemsize == np.dtype(type(zero)).itemsize):
        weak = jax.lax.full(x.shape, zero)
        if weak.dtype != x.dtype:
            return x
        weak = weak.at[...].set(x)
    return jax.device_put(weak, x.sharding if x.committed else None)
