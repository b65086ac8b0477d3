"""The transforms as plain Python: what they mean, without any trace or cache.

`Plain` stands in for the library in a program. Objects and Variables are the real ones;
a transform calls the user's function with the caller's own objects. What it promises
beyond that is done by hand, on a `Snapshot`: a failed call changes nothing, a branch
that is not taken is tried and undone, and without graph updates only Variables come
back.
"""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np

import graftree
from tests.differential.vocabulary import checked, children, is_array, metadata


def is_node(x):
    return isinstance(x, (graftree.Pytree, list, tuple, dict))


def walk(x, path=(), seen=None):
    """All objects, containers, Variables and leaves in something, with their paths."""
    seen = set() if seen is None else seen
    # What is no object has no identity: it is there as often as it is named.
    if id(x) in seen and (is_node(x) or isinstance(x, graftree.Variable)):
        return
    seen.add(id(x))
    yield path, x
    for key, child in children(x):
        yield from walk(child, (*path, key), seen)


def variables(x):
    return [found for _, found in walk(x) if isinstance(found, graftree.Variable)]


def put(parent, key, value):
    """Sets one child."""
    if isinstance(parent, (list, dict, graftree.List, graftree.Dict)):
        parent[key] = value
    else:
        is_plain = type(value) in (list, dict)
        setattr(parent, key, graftree.data(value) if is_plain else value)


def replace_children(x, known):
    """Gives an object these children and no others."""
    now = dict(children(x))
    if now.keys() == known.keys() and all(now[key] is known[key] for key in known):
        return
    if isinstance(x, (list, graftree.List)):
        x.clear()
        x.extend(known.values())
        return
    for key in now.keys() - known.keys():
        x.__delitem__(key) if isinstance(x, dict) else delattr(x, key)
    for key, child in known.items():
        if key not in now or now[key] is not child:
            put(x, key, child)


class Snapshot:
    """What is in some objects, so that it can be put back."""

    def __init__(self, x):
        nodes = [found for _, found in walk(x) if is_node(found)]
        nodes = [node for node in nodes if not isinstance(node, tuple)]
        self.nodes = [(node, dict(children(node))) for node in nodes]
        self.variables = [
            (v, v.get_value(), dict(v.get_metadata())) for v in variables(x)
        ]

    def restore_structure(self):
        for node, known in self.nodes:
            replace_children(node, known)

    def restore(self):
        self.restore_structure()
        for variable, value, known in self.variables:
            if variable.get_value() is not value:
                variable.set_value(value)
            for key, _ in metadata(variable):
                if key not in known:
                    variable.del_metadata(key)
            now = dict(variable.get_metadata())
            if [*now] != [*known] or any(now[k] is not known[k] for k in known):
                variable.set_metadata(**known)


class Rows:
    """Objects of which a function gets one row after the other."""

    def __init__(self, x):
        nodes = [node for _, node in walk(x)]
        self.places = [(n, k) for n in nodes for k, v in children(n) if is_array(v)]
        self.variables = variables(x)
        self.given = self._read()
        self.results = []

    def _read(self):
        arrays = [dict(children(node)).get(key) for node, key in self.places]
        return arrays, [v.get_value() for v in self.variables]

    def _write(self, arrays, values):
        for (node, key), array in zip(self.places, arrays, strict=True):
            put(node, key, array)
        for variable, value in zip(self.variables, values, strict=True):
            variable.set_value(value)

    def take(self, i):
        arrays, values = self.given
        self._write([x[i] for x in arrays], [x[i] for x in values])

    def note(self):
        self.results.append(self._read())

    def finish(self):
        columns = [zip(*part, strict=True) for part in zip(*self.results, strict=True)]
        self._write(*([jnp.stack(rows) for rows in column] for column in columns))


def copied(x, values=None, known=None):
    """A copy of an object, if asked with other values of Variables, by identity."""
    known = {} if known is None else known
    if id(x) in known:
        return known[id(x)]
    if isinstance(x, graftree.Variable):
        value = (values or {}).get(id(x), x.get_value())
        known[id(x)] = type(x)(value, **dict(metadata(x)))
    elif type(x) is tuple:
        return tuple(copied(child, values, known) for child in x)
    elif isinstance(x, (graftree.Pytree, list, dict)):
        made = known[id(x)] = type(x).__new__(type(x))
        if isinstance(x, (graftree.List, graftree.Dict)):
            made.__init__()
        items = [(key, copied(child, values, known)) for key, child in children(x)]
        replace_children(made, dict(items))
    else:
        return x
    return known[id(x)]


def as_arrays(x):
    """Arguments as a traced function sees them: numbers are arrays."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, (int, float)) else leaf,
        x,
        is_leaf=lambda x: isinstance(x, (graftree.Variable, graftree.Pytree)),
    )


def optional_function(transform):
    """Lets a method be used as ``f(function)`` and as ``f(**options)(function)``."""

    @functools.wraps(transform)
    def method(self, f=None, **options):
        if f is None:
            return functools.partial(method, self, **options)
        return functools.wraps(f)(transform(self, f, **options))

    return method


class Plain:
    """The library, with transforms that are plain Python.

    Args:
        keeps_structure: Whether a transform lets structural changes out.
    """

    def __init__(self, keeps_structure):
        self.keeps_structure = keeps_structure

    def __getattr__(self, name):
        return getattr(graftree, name)

    def _call(self, f, args, kwargs):
        snapshot = Snapshot((args, kwargs))
        try:
            out = f(*args, **kwargs)
        except BaseException:
            snapshot.restore()
            raise
        if not self.keeps_structure:
            snapshot.restore_structure()
        return out

    def _try(self, f, args):
        snapshot = Snapshot(args)
        try:
            f(*args)
        finally:
            snapshot.restore()

    @optional_function
    def jit(self, f, *, static_argnums=(), static_argnames=(), **options):
        names = list(inspect.signature(f).parameters)
        numbers = np.atleast_1d(np.asarray(static_argnums, int)).tolist()
        static = {names[i] for i in numbers} | {*np.atleast_1d(static_argnames)}

        def as_traced(name, x):
            return x if name in static else as_arrays(x)

        def call(*args, **kwargs):
            args = tuple(map(as_traced, names, args))
            kwargs = {name: as_traced(name, x) for name, x in kwargs.items()}
            return self._call(f, args, kwargs)

        return call

    @optional_function
    def remat(self, f, *, static_argnums=()):
        return self.jit(f, static_argnums=static_argnums)

    @optional_function
    def value_and_grad(self, f):
        def call(x, *args):
            args = as_arrays(args)
            params = [v for v in variables(x) if isinstance(v, graftree.Param)]

            def pure(values):
                ids = {id(v): new for v, new in zip(params, values, strict=True)}
                return f(copied(x, ids), *args)

            grads = jax.grad(pure)([v.get_value() for v in params])
            return self._call(f, (x, *args), {}), Gradients(grads)

        return call

    @optional_function
    def grad(self, f):
        both = self.value_and_grad(f)
        return lambda *args: both(*args)[1]

    @optional_function
    def vmap(self, f, *, in_axes):
        def call(*args):
            undo, groups = Snapshot(args).restore, _mapped(args, in_axes)

            def run(*args):
                return _each_row(groups, lambda i: f(*_row_of(args, in_axes, i)), undo)

            return self._call(run, args, {})

        return call

    @optional_function
    def scan(self, f, *, in_axes, out_axes):
        def call(carry, *args):
            axes, undo = in_axes[1:], lambda: None
            groups = _mapped(args, axes)
            if self.keeps_structure:
                undo = Snapshot(_mapped(args, axes, None, lambda x: x)).restore

            def run(carry, *args):
                carry = as_arrays(carry)

                def step(i):
                    nonlocal carry
                    carry, out = f(carry, *_row_of(args, axes, i))
                    return out

                outs = _each_row(groups, step, undo)
                undo()
                return carry, outs

            return self._call(run, (carry, *args), {})

        return call

    def cond(self, pred, true_fun, false_fun, *operands):
        return self.switch(int(not pred), (true_fun, false_fun), *operands)

    def switch(self, index, branches, *operands):
        operands = as_arrays(operands)
        index = min(max(int(index), 0), len(branches) - 1)
        for branch in branches:
            self._try(branch, operands)
        return self._call(branches[index], operands, {})

    def fori_loop(self, lower, upper, body, init):
        def run(value):
            for i in range(int(lower), int(upper)):
                value = body(jnp.asarray(i), value)
            return value

        return self._loop(run, functools.partial(body, jnp.asarray(lower)), init)

    def while_loop(self, condition, body, init):
        def run(value):
            while condition(value):
                value = body(value)
            return value

        return self._loop(run, body, init)

    def _loop(self, run, body, init):
        init = as_arrays(init)
        self._try(body, (init,))
        return self._call(run, (init,), {})

    def clone(self, x):
        return copied(x)

    # Two words of the vocabulary.

    def functional(self, f):
        return self.jit(f)

    def constant_rule(self, f, factor):
        def call(m, x):
            values = [v.get_value() for v in variables(m)]
            tilt = sum(jnp.sum(v - jax.lax.stop_gradient(v)) for v in values)
            return jax.lax.stop_gradient(f(m, jnp.float32(x))) + factor * tilt

        return self.jit(call)


def _mapped(args, axes, which=0, kind=Rows):
    """The arguments with one of the axes."""
    return [kind(x) for x, axis in zip(args, axes, strict=True) if axis == which]


def _row_of(args, axes, i):
    """The arguments of one call; of mapped objects the row was taken before."""
    pairs = zip(args, axes, strict=True)
    return [x[i] if axis == 0 and is_array(x) else x for x, axis in pairs]


def _each_row(groups, call, undo):
    """What a call gives for each row, stacked; what it does to others is undone."""
    outs = []
    for i in range(2):
        undo()
        for group in groups:
            group.take(i)
        outs.append(call(i))
        for group in groups:
            group.note()
    for group in groups:
        group.finish()
    return jnp.stack(outs)


class Gradients(list):
    """Those of all Params, in the order of their paths."""


def gradient(grads):
    return jnp.float32(sum(jnp.sum(g) * (1 + i % 3) for i, g in enumerate(grads)))


def state_of(x, *filters):
    return {
        "/".join(map(str, path)): found if is_array(found) else found.get_value()
        for path, found in walk(checked(x))
        if isinstance(found, filters or (graftree.Variable, jax.Array, np.ndarray))
    }


def halved(x):
    checked(x)
    for variable in variables(x):
        variable.set_value(variable.get_value() * 0.5)
    for _, node in list(walk(x)):
        for key, child in children(node):
            if is_array(child):
                put(node, key, child * 0.5)


def popped(x, kind):
    checked(x)
    count = 0
    for _, node in list(walk(x)):
        known = dict(children(node))
        kept = {k: c for k, c in known.items() if not isinstance(c, kind)}
        count += sum(c.get_value().size for k, c in known.items() if k not in kept)
        replace_children(node, kept)
    return jnp.float32(count)


def words(nnx):
    """The names of the vocabulary that use the library for what is tested."""
    return {
        **{"constant_rule": nnx.constant_rule, "functional": nnx.functional},
        **{"gradient": gradient, "halved": halved, "popped": popped},
        **{"rebuilt": lambda x: copied(checked(x)), "state_of": state_of},
    }
