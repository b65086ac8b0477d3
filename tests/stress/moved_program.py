"""What a user's program does, in parts, each of which says what came of it.

Written for `tests/stress/moved_names.py`, which runs it while a name of JAX is away. A
part is a function; what it returns is compared with what it returns in an undisturbed
run.
"""

import contextlib
import functools
import io
import os
import re
import tempfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import export
from jax.sharding import PartitionSpec as P

import graftree as nnx
from tests import meshes
from tests.threads import run_in_threads

PARTS = {}


def part(function):
    """Makes a function a part of the program."""
    PARTS[function.__name__] = function
    return function


def run():
    """What came of each part: its values, or its error."""
    outcomes = {}
    for name, function in PARTS.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcomes[name] = plain(function())
        except Exception as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
    return outcomes


def plain(tree):
    """The leaves of a tree: arrays as type, shape and numbers, all else as text."""
    return [plain_leaf(leaf) for leaf in jax.tree.leaves(nnx.as_pure(tree))]


def plain_leaf(leaf):
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return re.sub(" at 0x[0-9a-f]+", "", str(leaf))
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    values = np.asarray(leaf)
    return [f"{values.dtype}{list(values.shape)}", values.ravel().tolist()]


def refused(function, *args):
    """The type of the error that a call raises, which must be one."""
    try:
        out = function(*args)
    except Exception as error:
        return type(error).__name__
    return f"not refused: {out}"


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        hidden = nnx.name(jnp.sin(self.norm(self.first(x))), "hidden")
        return self.last(self.dropout(hidden))


def inputs(*shape):
    return jnp.asarray(np.linspace(-1, 1, np.prod(shape), dtype="f4").reshape(shape))


def made():
    """A model, its optimizer and a batch."""
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param), inputs(3, 4)


def loss_of(model, x):
    return (model(x) ** 2).mean()


def train(model, optimizer, x, **mode):
    loss, grads = nnx.value_and_grad(loss_of, **mode)(model, x)
    optimizer.update(model, grads)
    return loss


# ------------------------------------------------------------------------ train steps


@part
def a_train_step_in_graph_mode():
    model, optimizer, x = made()
    step = nnx.jit(train)
    return step(model, optimizer, x), step(model, optimizer, x), nnx.state(model)


@part
def a_train_step_in_tree_mode():
    rngs = nnx.Rngs(0)
    layers = nnx.Linear(4, 4, rngs=rngs), jnp.sin, nnx.Linear(4, 2, rngs=rngs)
    model, x = nnx.Sequential(*layers), inputs(3, 4)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    step = nnx.jit(functools.partial(train, graph=False), graph=False)
    return step(model, optimizer, x), step(model, optimizer, x), nnx.state(model)


@part
def a_train_step_of_split_and_merge():
    model, optimizer, x = made()
    graphdef, state = nnx.split((model, optimizer))

    @jax.jit
    def step(state, x):
        objects = nnx.merge(graphdef, state)
        return train(*objects, x), nnx.state(objects)

    first, state = step(state, x)
    second, state = step(state, x)
    nnx.update((model, optimizer), state)
    return first, second, nnx.state(model)


# ----------------------------------------------------------------------------- layers


@part
def eager_layers_and_compiled_ones():
    x, rngs = inputs(2, 3, 4), nnx.Rngs(0)
    layers = {
        "linear": nnx.Linear(4, 4, rngs=rngs),
        "batch": nnx.BatchNorm(4, rngs=rngs),
        "attention": nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs),
        "dropout": nnx.Dropout(0.5, rngs=rngs),
    }
    out = {name: (layer(x), layer(x)) for name, layer in layers.items()}
    call = nnx.jit(lambda layer, x: layer(x))
    compiled = {name: call(nnx.clone(layer), x) for name, layer in layers.items()}
    close = [bool(jnp.allclose(compiled[k], v(x))) for k, v in layers.items()]
    return out, close, nnx.state(layers)


@part
def layers_made_again():
    # The second values are compared with the first, the third are made in another way.
    return [nnx.Linear(4, 4, rngs=nnx.Rngs(seed)) for seed in (0, 0, 1, 2)]


@part
def settings_change_between_layers():
    # What is kept of eager calls must not outlive a setting.
    attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))
    x, out = inputs(2, 3, 4), []
    for _ in range(3):
        out += [attention(x), nnx.Linear(4, 4, rngs=nnx.Rngs(0)).kernel[...]]
    with jax.enable_x64(True):
        for _ in range(3):
            wide = nnx.Linear(4, 4, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
            out += [wide.kernel[...], wide(jnp.ones(4)), attention(x)]
    with jax.default_prng_impl("rbg"):
        out += [nnx.Linear(4, 4, rngs=nnx.Rngs(0)).kernel[...] for _ in range(3)]
    nan = x * jnp.nan
    with jax.debug_nans(True):
        out.append(refused(attention, nan))
    return out, attention(x)


# ----------------------------------------------------------------------- control flow


def each_way(function, x):
    """What a function of a number gives eagerly, compiled and differentiated."""
    compiled = nnx.jit(nnx.grad(function))(x)
    rows = jax.vmap(function)(jnp.stack([x, 2 * x]))
    return [function(x), compiled, rows, nnx.grad(nnx.grad(function))(x)]


@part
def control_flow_that_captures():
    w = nnx.Param(jnp.float32(2.0))

    def functions():
        yield lambda x: nnx.cond(x > 0, lambda x: x * w * x, lambda x: -x, x)
        yield lambda x: nnx.switch(1, [lambda x: x, lambda x: jnp.sin(x * w)], x)
        yield lambda x: nnx.fori_loop(0, 3, lambda _, x: x * w, x)
        scanned = nnx.scan(lambda carry, x: (carry * x * w, carry), length=None)
        yield lambda x: scanned(x, jnp.arange(1.0, 4.0))[0]
        yield nnx.remat(lambda x: jnp.sin(x * w))

    kept, out = [*functions()], []
    for value in (2.0, 3.0):
        w[...] = jnp.float32(value)
        for function in (*kept, *functions()):
            out += each_way(function, jnp.float32(0.5))
        out.append(nnx.while_loop(lambda x: x < 20, lambda x: x * w, jnp.float32(1)))
    return out


@part
def control_flow_that_writes():
    count, out = nnx.Variable(jnp.int32(0)), []

    def add(count, x):
        count[...] += 1
        return x * count[...].astype(x.dtype)

    for _ in range(2):
        out.append(nnx.cond(True, add, lambda count, x: x, count, jnp.float32(2)))
        out.append(nnx.switch(1, [lambda count, x: x, add], count, jnp.float32(2)))
        out.append(nnx.remat(add)(count, jnp.float32(2)))
        nnx.fori_loop(0, 3, lambda _, c: (add(c, jnp.float32(1)), c)[1], count)
        out.append(count[...])
        vector = nnx.Variable(jnp.zeros(3))
        nnx.vmap(lambda v, x: add(v, x))(vector, jnp.ones(3))
        out.append(vector[...])
    return out


@part
def remat_with_policies():
    out = []
    for policy in (nnx.memory.save("hidden"), nnx.memory.save("first", "last")):
        model = Net(nnx.Rngs(0))

        def loss(model, x, policy=policy):
            return (nnx.remat(Net.__call__, policy=policy)(model, x) ** 2).mean()

        out += [nnx.jit(nnx.grad(loss))(model, inputs(3, 4)), nnx.state(model)]
    return out


@part
def stacks_and_accumulation():
    stack = nnx.Stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 3, rngs=nnx.Rngs(0))
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    split = nnx.memory.value_and_grad(loss_of, 2)
    return stack(inputs(2, 4)), nnx.jit(split)(model, inputs(4, 4))


# ----------------------------------------------------------------- refs, states, writes


@part
def array_refs():
    ref = nnx.Variable(jnp.zeros(3), ref=True)

    def add(x):
        ref[...] += x
        return ref[...].sum()

    out = [add(jnp.ones(3)), jax.jit(add)(jnp.ones(3)), nnx.jit(add)(jnp.ones(3))]
    model = nnx.to_refs(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
    step = nnx.jit(lambda model, x: model(x))
    out += [step(model, inputs(3, 4)), nnx.to_arrays(model)]
    make = nnx.jit(lambda: nnx.Variable(jnp.zeros(3), ref=True), graph_updates=False)
    return out, ref[...], refused(make)


@part
def states():
    model = Net(nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    merged = nnx.merge(graphdef, params, rest)
    nnx.update(merged, jax.tree.map(lambda x: 2 * x, params))
    is_equal = str(graphdef == nnx.graphdef(model))
    return nnx.state(merged), nnx.state(nnx.clone(model)), is_equal


@part
def foreign_writes():
    v = nnx.Variable(jnp.zeros(2))
    scalar = nnx.Variable(jnp.float32(0))

    def write(x):
        v[...] = v[...] + 1
        scalar[...] = x.sum()
        return x.sum()

    def loop(f):
        return lambda x: jax.lax.scan(lambda c, y: (c, f(y)), 0.0, x)[1]

    def cond(f):
        return lambda x: jax.lax.cond(True, f, f, x)

    def shape(f):
        return functools.partial(jax.eval_shape, f)

    ways = {"jit": jax.jit, "grad": jax.grad, "vmap": jax.vmap, "scan": loop}
    ways |= {"remat": jax.checkpoint, "cond": cond, "eval_shape": shape}
    ways |= {"nnx.jit": nnx.jit, "nnx.vmap": nnx.vmap, "nnx.grad": nnx.grad}
    found = {name: refused(way(write), jnp.ones(3)) for name, way in ways.items()}
    for outer in ("jit", "vmap", "scan", "remat", "nnx.jit"):
        for inner in ("jit", "vmap", "grad", "cond", "remat"):
            inside = ways[inner](write)
            nested = ways[outer](lambda x, f=inside: f(x * x[None]).sum())
            x = jnp.ones((2, 3)) if outer in ("vmap", "scan") else jnp.ones(3)
            found[f"{outer} {inner}"] = refused(nested, x)
    assert {*found.values()} == {"TraceContextError"}, found
    return found, v[...], scalar[...]


@part
def writes_from_inner_traces():
    def outer(x):
        v = nnx.Variable(x)
        reads = [v[...] for _ in range(20_000)]
        v[...] = reads[-1] + 1  # its own
        found = []
        for way in (jax.jit, jax.vmap, jax.grad):

            def write(y):
                v[...] = y
                return jnp.sum(y)

            found.append(refused(way(write), x if way is not jax.grad else x.sum()))
        v[...] = v[...] * 2
        told.append(found)
        return v[...]

    told = []
    out = [jax.jit(outer)(jnp.ones(2)), jax.vmap(outer)(jnp.ones((2, 2)))]
    assert {x for found in told for x in found} == {"TraceContextError"}, told
    return out, told


@part
def leaked_and_left():
    kept = []

    def leak(x):
        kept.append(nnx.Variable(x))
        return x

    for _ in range(3):
        jax.jit(leak)(jnp.ones(2))
        jax.clear_caches()
    return [refused(lambda v=v: v.__setitem__(..., jnp.zeros(2))) for v in kept]


# ------------------------------------------------------------------------------ tools


@part
def lowered_and_compiled():
    model, x = Net(nnx.Rngs(0)), inputs(3, 4)
    lowered = nnx.jit(lambda model, x: model(x)).lower(model, x)
    return lowered.compile()(model, x), "dot_general" in lowered.as_text()


@part
def text_of_models():
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    return [repr(model), repr(nnx.state(model)), repr(nnx.graphdef(model))]


@part
def tables():
    options = {"console_kwargs": {"width": 200, "force_terminal": False}}
    options |= {"compute_flops": True, "compute_vjp_flops": True}
    return [nnx.tabulate(Net(nnx.Rngs(0)), inputs(3, 4), **options)]


@part
def recompilations():
    step = nnx.jit(lambda model, x: model(x))
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    for rows in (1, 2):
        step(model, inputs(rows, 4))
    with jax.default_matmul_precision("float32"):
        step(model, inputs(2, 4))
    found = nnx.debugging.explain_recompile(step)
    return [found.traces, str(found)]


@part
def interceptions():
    model, out = Net(nnx.Rngs(0)), []

    def note(path, module, args, output):
        out.append((str(path), bool(jnp.ndim(output) == 2)))

    with nnx.debugging.intercept(model, nnx.Linear, note):
        model(inputs(3, 4))
        nnx.jit(Net.__call__)(model, inputs(3, 4))
    nnx.jit(Net.__call__)(model, inputs(3, 4))
    return out


@part
def nans():
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.log)
    report = nnx.debugging.find_nans(lambda model, x: model(x))(model, inputs(3, 4))
    return [str(report).splitlines()[0], report.first.example]


@part
def saved_values():
    model = Net(nnx.Rngs(0))
    report = nnx.memory.saved(lambda m, x: m(x).mean(), model, inputs(3, 4))
    return [report.bytes, str(report)]


@part
def exported_functions():
    model = Net(nnx.Rngs(0))
    model.eval()
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, x: (nnx.merge(graphdef, state)(x), state))
    read = export.deserialize(export.export(run)(state, inputs(3, 4)).serialize())
    out = read.call(state, inputs(3, 4))
    arrays = export.export(nnx.jit(lambda x: model(x)))(inputs(3, 4))
    return out, export.deserialize(arrays.serialize()).call(inputs(3, 4))


@part
def files():
    model, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
    model.scale, other.scale = nnx.Param(jnp.asarray(2.0)), nnx.Param(jnp.asarray(3.0))
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model")
        with contextlib.redirect_stderr(io.StringIO()):
            nnx.checkpoints.save(path, model)
            nnx.checkpoints.restore(path, other)
    return nnx.state(other), other.scale[...].weak_type


@part
def wrong_axes():
    model = Net(nnx.Rngs(0))
    mapped = nnx.vmap(lambda model, xs: xs["a"], in_axes=(None, {"b": 0}))
    return refused(mapped, model, {"a": inputs(3, 4)})


@part
def checks():
    from jax.experimental import checkify

    def invert(v):
        checkify.check(jnp.all(v[...] != 0), "zero in the input")
        v[...] = 1 / v[...]

    v = nnx.Variable(jnp.array([1.0, 0.0]))
    error, _ = nnx.checkify(invert)(v)
    return error.get(), v[...]


# ---------------------------------------------------------------------------- devices


@part
def steps_on_many_devices():
    mesh, out = meshes.mesh_of(data=4, model=2), []
    with jax.set_mesh(mesh), nnx.logical_axis_rules((("wide", "model"),)):
        init = nnx.with_partitioning(nnx.initializers.ones, (None, "wide"))
        model = nnx.Linear(4, 2, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
        x = jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, P("data")))
        step = nnx.jit(train)
        out += [step(model, optimizer, x), step(model, optimizer, x)]
        out.append(str(model.kernel.sharding_names))

        @nnx.jit
        def derive(v, x):
            def write(v, x):
                v[...] = v[...] * x
                return v[...].sum()

            return nnx.grad(write)(v, x), nnx.vmap(write)(v, x)

        out += [derive(model.kernel, jnp.full((4, 2), 3.0)), model.kernel[...]]
    return out


@part
def functions_with_named_axes():
    mesh, out = jax.make_mesh((8,), ("data",)), []
    one = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    stack = nnx.Stack(lambda rngs: nnx.Linear(4, 4, rngs=rngs), 2, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh):
        x = jax.device_put(inputs(8, 4), jax.NamedSharding(mesh, P("data")))
        for net in (one, stack):
            mapped = jax.shard_map(net, in_specs=P("data"), out_specs=P("data"))
            out += [mapped(x), jax.jit(mapped)(x)]

    def make(x):
        init = nnx.with_partitioning(nnx.initializers.ones, (None, "data"))
        return nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0))(x)

    with jax.set_mesh(meshes.mesh_of(data=8)):
        out.append(jax.vmap(make, axis_name="batch")(inputs(8, 4)))
    return out


@part
def threads():
    v, out = nnx.Variable(jnp.zeros(2)), []

    def write():
        v[...] += 1
        nnx.jit(lambda v: v.__setitem__(..., 2 * v[...]))(v)
        out.append(refused(jax.jit(lambda x: v.__setitem__(..., x)), jnp.ones(2)))
        out.append(repr(nnx.Linear(2, 2, rngs=nnx.Rngs(0))))

    for _ in range(3):
        run_in_threads(write)
    return out, v[...]


# ------------------------------------------------------------------------ the drop-in


@part
def the_drop_in():
    from graftree import dropin

    dropin.install()
    os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"  # after JAX was imported
    from flax import nnx as theirs

    out = [theirs.Linear is nnx.Linear, jax.config.jax_numpy_rank_promotion]
    dropin.uninstall()
    return out
