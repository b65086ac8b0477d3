"""Features that are right alone, together: a small decoder in 216 cells.

A cell is a dtype, a cache, a way through the batch, a form of the layers, and one
device or a mesh. In each cell the program for the loss and its gradients is traced. Its
products, its cache and what it keeps for the gradient have the dtype asked for, and in
float64 it computes what the mathematics say, which is written in NumPy (`loss_of`).
`make test` has twelve cells, in which each pair of features occurs; two of these are
compiled and run there, and all twelve in long tests.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import graftree as nnx
from tests import exact_programs, meshes

WIDTH, HEADS, SIZE, VOCABULARY, LENGTH, WINDOW = 12, 2, 4, 16, 6, 3
PAD, EPSILON = 0, 1e-6

# The dtype that is loaded, the policy, and the dtype that products should have.
DTYPES = {
    "float32": ("float32", None, "float32"),
    "bf16-policy": ("float32", "params=f32, compute=bf16, output=f32", "bfloat16"),
    "bf16-loaded": ("bfloat16", None, "bfloat16"),
    "f16-loaded": ("float16", None, "float16"),
}
CACHES = {"no-cache": None, "cache": None, "ring": WINDOW}  # and the window
BATCHES = "whole", "accumulated", "padded"
FORMS = {"plain": 1, "remat": 1, "stack": 2}  # and how many layers
DEVICES = "device", "mesh"
FEATURES = DTYPES, CACHES, BATCHES, FORMS, DEVICES
CELLS = [*itertools.product(*FEATURES)]


TWELVE = [
    (
        dtype,
        cache,
        BATCHES[(i + j) % 3],
        [*FORMS][(i + 2 * j) % 3],
        DEVICES[(i + j) % 2],
    )
    for i, dtype in enumerate(DTYPES)
    for j, cache in enumerate(CACHES)
]


def cells(usual, others):
    """Runs a test with cells, in `make test` with some of them."""
    rows = [
        pytest.param(cell, id="-".join(cell), marks=marks)
        for part, marks in ((usual, ()), (others, pytest.mark.long))
        for cell in part
    ]
    return pytest.mark.parametrize("cell", rows)


TOLERANCES = {"float32": 2e-6, "bfloat16": 0.06, "float16": 0.01}


class Block(nnx.Module):
    def __init__(self, window, rngs):
        heads, options = (HEADS + 2, SIZE), {"use_bias": False, "rngs": rngs}
        self.norm = nnx.RMSNorm(WIDTH, epsilon=EPSILON, rngs=rngs)
        self.qkv = nnx.LinearGeneral(WIDTH, heads, **options)
        self.out = nnx.LinearGeneral((HEADS, SIZE), WIDTH, axis=(-2, -1), **options)
        self.rope = nnx.RoPE()
        self.window, self.cache = window, nnx.data(None)

    def __call__(self, x, positions):
        qkv = self.qkv(self.norm(x))
        qk = self.rope.rotate_heads(qkv[:, :, :-1], positions)
        q, k, v = qk[:, :, :-1], qk[:, :, -1:], qkv[:, :, -1:]
        window = {"sliding_window": self.window}
        return x + self.out(
            nnx.decoding.attend(q, k, v, positions, self.cache, **window)
        )


class Decoder(nnx.Module):
    def __init__(self, window, layers, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(window, rngs) for _ in range(layers)])
        self.is_remat = self.has_cache = False

    def __call__(self, tokens, positions):
        x = self.embed(tokens)
        if isinstance(self.blocks, nnx.Stack):
            return self.embed.attend(self.blocks(x, positions))
        call = nnx.remat(Block.__call__) if self.is_remat else Block.__call__
        for block in self.blocks:
            x = call(block, x, positions)
        return self.embed.attend(x)


def make_decoder(cell, rows):
    """A decoder with `WEIGHTS`, loaded, set up and given caches as a user would."""
    dtype, cache, _, form, _ = cell
    (stored, policy, _), window, layers = DTYPES[dtype], CACHES[cache], FORMS[form]
    axes = {1: "a -> a", 2: "a b -> a b", 3: "a b c -> a b c"}
    tensors = {name: x.astype("float32") for name, x in weights_of(layers).items()}
    model = nnx.weights.load(
        tensors,
        nnx.eval_shape(lambda: Decoder(window, layers, nnx.Rngs(0))),
        {name: (name, axes[x.ndim]) for name, x in tensors.items()},
        dtype=stored,
    )
    if policy is not None:
        nnx.precision.set_policy(model, policy)
    model.is_remat, model.has_cache = form == "remat", cache != "no-cache"
    for block in model.blocks if model.has_cache else ():
        block.cache = nnx.decoding.KeyValueCache(
            rows,
            LENGTH,
            kv_heads=1,
            head_dim=SIZE,
            window=window,
            dtype=nnx.precision.compute_dtype(block),
        )
    if form == "stack":
        nnx.surgery.stack(model, "blocks")
    return model


def sum_and_count(model, tokens):
    """The losses of the tokens that follow others, in a call or, cached, in two."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = jnp.where(inputs == PAD, -1, np.arange(LENGTH)[None])
    ends = [0, LENGTH - 1, LENGTH] if model.has_cache else [0, LENGTH]
    chunks = itertools.starmap(slice, itertools.pairwise(ends))
    logits = [model(inputs[:, x], positions[:, x]) for x in chunks]
    logits = jnp.concatenate(logits, axis=1).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.sum(where=targets != PAD), (targets != PAD).sum()


def mean(model, tokens):
    total, count = sum_and_count(model, tokens)
    return total / count


GRADIENTS = {
    "whole": nnx.value_and_grad(mean),
    "accumulated": nnx.memory.value_and_grad(mean, 2),
    "padded": nnx.memory.value_and_grad(sum_and_count, 2, has_count=True),
}


# What it should be. All dtypes hold these numbers exactly.

RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(1, VOCABULARY, (8, LENGTH + 1))
LENGTHS = np.array([7, 5, 2, 6, 3, 3, 7, 4])[:, None]
ROWS = {
    **dict.fromkeys(BATCHES, TOKENS),
    "padded": np.where(np.arange(LENGTH + 1) < LENGTHS, TOKENS, PAD),
}
SHAPES = {
    "norm.scale": (WIDTH,),
    "qkv.kernel": (WIDTH, HEADS + 2, SIZE),
    "out.kernel": (HEADS, SIZE, WIDTH),
}


@functools.cache
def weights_of(layers):
    shapes = {
        f"blocks.{i}.{name}": x for i in range(layers) for name, x in SHAPES.items()
    }
    shapes["embed.embedding"] = (VOCABULARY, WIDTH)
    random = np.random.default_rng(1)
    return {name: random.integers(-12, 13, x) / 16 for name, x in shapes.items()}


def loss_of(weights, tokens, window):
    """The mean loss of all tokens that follow others and are no padding."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    back = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    sees = (back >= 0) & (back < (window or LENGTH))
    x = weights["embed.embedding"][inputs]
    for i in range((len(weights) - 1) // len(SHAPES)):
        scale, to_qkv, to_out = (weights[f"blocks.{i}.{name}"] for name in SHAPES)
        y = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPSILON) * scale
        qkv = np.einsum("btd,dhs->bths", y, to_qkv)
        qk, v = rotated(qkv[:, :, :-1]), qkv[:, :, -1]
        scores = np.einsum("bths,bus->bhtu", qk[:, :, :-1], qk[:, :, -1]) / SIZE**0.5
        shares = np.where(sees, np.exp(scores), 0)
        shares = shares / shares.sum(-1, keepdims=True)
        x = x + np.einsum("bhtu,bus,hsd->btd", shares, v, to_out, optimize=True)
    logits = x @ weights["embed.embedding"].T
    own = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = np.log(np.exp(logits).sum(-1)) - own
    return losses[targets != PAD].mean()


def rotated(x):
    first, second = np.split(x, 2, axis=-1)
    angles = np.arange(LENGTH)[:, None] * 10000.0 ** (-np.arange(0, SIZE, 2) / SIZE)
    sin, cos = np.sin(angles)[:, None], np.cos(angles)[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


@functools.cache
def expected_of(is_padded, window, layers):
    """The loss and its gradients, in float64.

    A derivative is the imaginary part after a complex step: no difference is taken, so
    it is exact to rounding.
    """
    tokens = ROWS["padded" if is_padded else "whole"]
    weights = {name: x + 0j for name, x in weights_of(layers).items()}
    grads = {name: np.zeros(x.shape) for name, x in weights.items()}
    for name, x in weights.items():
        for index in np.ndindex(x.shape):
            x[index] += 1e-30j
            grads[name][index] = loss_of(weights, tokens, window).imag / 1e-30
            x[index] -= 1e-30j
    return loss_of(weights, tokens, window).real, grads


def test_the_cells_of_make_test_have_each_pair_of_features():
    for a, b in itertools.combinations(range(len(FEATURES)), 2):
        pairs = {(cell[a], cell[b]) for cell in TWELVE}
        assert len(pairs) == len(FEATURES[a]) * len(FEATURES[b])


def check_numbers(cell, loss, grads, tolerance):
    _, cache, batch, form, _ = cell
    expected, of_weights = expected_of(batch == "padded", CACHES[cache], FORMS[form])
    of_weights = dict(of_weights)
    np.testing.assert_allclose(loss, expected, rtol=tolerance)
    grads = nnx.to_pure_dict(grads)
    if form == "stack":
        layers = grads["blocks"]["layers"]
        parts = [jax.tree.map(lambda x, i=i: x[i], layers) for i in range(FORMS[form])]
        grads["blocks"] = dict(enumerate(parts))
    for path, gradient in jax.tree.leaves_with_path(grads):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        of_weight = of_weights.pop(name)
        largest = np.abs(of_weight).max()
        np.testing.assert_allclose(
            np.asarray(gradient, float), of_weight, 0, tolerance * largest, err_msg=name
        )
    assert not of_weights


def traced(cell):
    """The program of a cell, its arguments, and the types of what it returns."""
    batch, devices = cell[2], cell[4]
    model = make_decoder(cell, rows=8 if batch == "whole" else 4)
    tokens = jnp.asarray(ROWS[batch])
    if devices == "mesh":
        mesh = meshes.mesh_of(data=4, model=2)
        rows, whole = (jax.NamedSharding(mesh, x) for x in (jax.P("data"), jax.P()))
        tokens = jax.device_put(tokens, rows)
        nnx.update(model, jax.device_put(nnx.state(model), whole))
    graphdef, state = nnx.split(model)

    def step(state, tokens):
        model = nnx.merge(graphdef, state)
        return GRADIENTS[batch](model, tokens), nnx.state(model, nnx.Cache)

    return jax.jit(step).trace(state, tokens), (state, tokens)


EVALUATED = {}


@cells(TWELVE, [cell for cell in CELLS if cell not in TWELVE])
def test_each_cell_has_the_dtypes_asked_for_and_means_the_mathematics(cell):
    stored, _, compute = DTYPES[cell[0]]
    program, arguments = traced(cell)
    for equation in exact_programs.products(program.jaxpr):
        operands = {str(x.aval.dtype) for x in equation.invars}
        # The scores of attention are float32, and so are their gradients.
        is_attention = any(equation.params["dimension_numbers"][1])
        assert operands in ({compute}, {compute, "float32"} if is_attention else ())
    (_, grads), caches = program.out_info
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype(stored)}
    assert {x.dtype for x in jax.tree.leaves(caches)} <= {jnp.dtype(compute)}
    # Both devices and mesh have one program, as a rule: then what it computes is known.
    key = cell[:-1], str(program.jaxpr)
    if key not in EVALUATED:
        # Not on the mesh: many small programs that wait for its devices may hang.
        leaves = [*map(np.asarray, jax.tree.leaves(arguments))]
        EVALUATED[key] = exact_programs.in_float64(program.jaxpr, leaves)
    structure = jax.tree.structure(program.out_info)
    (loss, grads), _ = jax.tree.unflatten(structure, EVALUATED[key])
    check_numbers(cell, loss, grads, 1e-6)


PLAIN = [cell for cell in CELLS if cell[2::2] == ("whole", "device")]
# One in three: each pair of dtype, cache and form.
SQUARE = [PLAIN[9 * i + 3 * j + (i + j) % 3] for i in range(4) for j in range(3)]


@cells(SQUARE, [cell for cell in PLAIN if cell not in SQUARE])
def test_what_a_gradient_keeps_has_the_dtype_asked_for(cell):
    report = nnx.memory.saved(mean, make_decoder(cell, 8), jnp.asarray(TOKENS))
    # Norms, rotations and the softmax, whose last axis is the keys, are in float32.
    sizes = (WIDTH,), (SIZE,)
    kept = [x for x in report.values if x.why != "argument" and x.shape[-1:] in sizes]
    others = [x.dtype for x in kept if "norm" not in x.path and x.dtype != bool]
    assert {*map(str, others)} == {DTYPES[cell[0]][2]}
    assert cell[3] != "remat" or len(others) == len(kept)


@cells(TWELVE[::10], [cell for cell in TWELVE if cell not in TWELVE[::10]])
def test_compiled_programs_compute_what_they_mean(cell):
    program, arguments = traced(cell)
    (loss, grads), _ = program.lower().compile()(*arguments)
    check_numbers(cell, loss, grads, TOLERANCES[DTYPES[cell[0]][2]])
