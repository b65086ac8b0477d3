"""A call runs what is in the place of a function of JAX, and JAX's settings, at once.

Issue 12, defect 16: quantization was lost, or stayed after its end.
"""

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree import _jax, _python
from graftree.nn.support import eager
from tests import catalog

PLACES = {"jax.lax": jax.lax, "jnp": jnp, "jax.nn": jax.nn, "jax.random": jax.random}
running: dict[str, Callable[..., Any]] = {}
"""What runs in the place of a function whose code was exchanged, by its name."""


def has_code(path: str) -> bool:
    """Whether the code of this function can be exchanged."""
    return isinstance(_find(path)[2], types.FunctionType)


@contextlib.contextmanager
def replaced(
    path: str, by: Callable[[Callable[..., Any]], Callable[..., Any]], kind: str
) -> Iterator[None]:
    """Puts ``by(original)`` in the place of a function of JAX.

    Args:
        path: Where the function is: ``jnp.einsum``.
        by: Makes what is called from now on.
        kind: ``name``: under the name, so that who has the function already calls the
            original; ``code``: in the function itself.
    """
    module, name, function = _find(path)
    if kind == "name":
        setattr(module, name, by(function))
        try:
            yield
        finally:
            setattr(module, name, function)
        return
    code = function.__code__
    original = types.FunctionType(code, function.__globals__, name)
    original.__defaults__ = function.__defaults__
    original.__kwdefaults__ = function.__kwdefaults__
    running[path] = by(original)
    function.__code__ = _forwarder(path)
    try:
        yield
    finally:
        function.__code__ = code


def _find(path: str) -> tuple[Any, str, Any]:
    place, name = path.rsplit(".", 1)
    return PLACES[place], name, getattr(PLACES[place], name)


def _forwarder(path: str) -> types.CodeType:
    """Code that needs nothing from where it is put."""
    names: dict[str, Any] = {}
    exec(
        "def forward(*args, **options):\n"
        f"    from {__name__} import running\n"
        f"    return running[{path!r}](*args, **options)",
        names,
    )
    return names["forward"].__code__


DOT = "jax.lax.dot_general"
CONV = "jax.lax.conv_general_dilated"


def rngs():
    return nnx.Rngs(0)


def attention(**options):
    layer = nnx.MultiHeadAttention(2, 8, decode=False, **options, rngs=rngs())
    return layer, (jnp.arange(24.0).reshape(1, 3, 8),)


def layer(name):
    """Makes the layer of the catalog, and what it is called with."""
    row = catalog.BY_NAME[name]
    return lambda: (row.make(), row.inputs())


def recurrent(cell):
    return nnx.RNN(cell(3, 4, rngs=rngs()), rngs=True), (jnp.ones((2, 5, 3)),)


def attend():
    return nnx.Embed(5, 4, rngs=rngs()).attend, (jnp.ones((2, 4)),)


def mask():
    is_token = jnp.array([1, 1, 0])
    return nnx.make_attention_mask, (is_token, is_token)


# What is called, and with what; and the functions of JAX that it calls.
SUBJECTS = {
    "Linear": (layer("Linear"), [DOT]),
    "LinearGeneral": (layer("LinearGeneral"), [DOT]),
    "LoRALinear": (layer("LoRALinear"), [DOT]),
    "Embed": (layer("Embed"), ["jnp.take"]),
    "attend": (attend, [DOT]),
    "Einsum": (layer("Einsum"), ["jnp.einsum"]),
    "Conv": (layer("Conv"), [CONV]),
    "ConvTranspose": (layer("ConvTranspose"), ["jax.lax.conv_transpose"]),
    "LayerNorm": (layer("LayerNorm"), ["jax.lax.rsqrt"]),
    "WeightNorm": (layer("WeightNorm"), ["jax.lax.rsqrt", DOT]),
    "attention": (attention, [DOT, "jax.nn.dot_product_attention"]),
    "explicit attention": (
        lambda: attention(dtype=jnp.float16),
        [DOT, "jnp.einsum", "jax.nn.softmax"],
    ),
    "GRU": (lambda: recurrent(nnx.GRUCell), [DOT, "jax.nn.sigmoid", "jnp.tanh"]),
    "LSTM": (lambda: recurrent(nnx.LSTMCell), [DOT, "jax.nn.sigmoid", "jnp.tanh"]),
    "mask": (mask, ["jnp.multiply"]),
}
# What these give is no number, or random.
KEYS = {
    "Rngs": (lambda: (rngs().params, ()), ["jax.random.fold_in"]),
    "normal": (lambda: (rngs().normal, ()), ["jax.random.normal"]),
    "Dropout": (layer("Dropout"), ["jax.random.bernoulli", "jax.random.fold_in"]),
}


def rows(subjects):
    """Each function by each subject, replaced in each way that there is."""
    return [
        pytest.param(make, path, kind, id=f"{subject}-{path}-{kind}")
        for subject, (make, paths) in subjects.items()
        for path in paths
        for kind in ("name", "code")
        if kind == "name" or has_code(path)
    ]


@pytest.mark.parametrize(("make", "path", "kind"), rows(SUBJECTS | KEYS))
def test_each_call_runs_what_is_in_the_place(make, path, kind):
    function, inputs = make()
    function(*inputs)  # what runs first must not stay
    calls, counts = [], []

    def counted(original):
        return lambda *a, **o: (calls.append(1), original(*a, **o))[1]

    with replaced(path, counted, kind):
        for _ in range(3):
            function(*inputs)
            counts.append(len(calls))
        jax.make_jaxpr(lambda inputs: make()[0](*inputs))(inputs)
    function(*inputs)
    once = counts[0]
    assert once > 0 and counts == [once, 2 * once, 3 * once]
    assert len(calls) > counts[-1]


@pytest.mark.parametrize("first", ["plain", "replaced"])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_is_replaced_comes_back(subject, first):
    make, (path, *_) = SUBJECTS[subject]
    kind = "code" if has_code(path) else "name"

    def call():
        function, inputs = make()
        return function(*inputs)

    def doubled(original):
        return lambda *a, **o: 2 * original(*a, **o)

    plain = [call()] if first == "plain" else []
    with replaced(path, doubled, kind):
        other = call()
    plain += [call(), call()]
    for y in plain[1:]:
        np.testing.assert_array_equal(y, plain[0])
    assert not np.array_equal(other, plain[0])


class Counting(nnx.Module):
    """Counts, in itself, how often its layer calls a function of JAX."""

    def __init__(self, layer, path, kind):
        self.layer, self.path, self.kind = layer, path, kind
        self.count = nnx.Variable(jnp.array(0))

    def __call__(self, *inputs):
        def counted(original):
            def run(*args, **options):
                self.count[...] += 1
                return original(*args, **options)

            return run

        with replaced(self.path, counted, self.kind):
            return self.layer(*inputs)


@pytest.mark.parametrize("kind", ["name", "code"])
@pytest.mark.parametrize("name", ["Linear", "Conv", "Einsum", "LayerNorm", "Embed"])
def test_it_runs_in_the_trace_of_the_caller(name, kind):
    make, (path, *_) = SUBJECTS[name]
    layer, inputs = make()
    model = Counting(layer, path, kind)
    model(*inputs)
    nnx.jit(lambda model, *inputs: model(*inputs))(model, *inputs)
    nnx.grad(lambda model: model(*inputs).sum(), allow_int=True)(model)
    assert model.count[...] == 3


@pytest.mark.parametrize("kind", ["name", "code"])
@pytest.mark.parametrize("name", ["GRUCell", "OptimizedLSTMCell"])
def test_it_runs_in_a_part_that_was_traced_before_the_whole(name, kind):
    cell = getattr(nnx, name)(2, 3, rngs=nnx.Rngs(0))
    x, carry = jnp.ones((1, 2)), cell.initialize_carry((1, 2), nnx.Rngs(0))
    for part, inputs in (cell.dense_i, x), (cell.dense_h, jnp.ones((1, 3))):
        jax.make_jaxpr(lambda part, inputs: part(inputs))(part, inputs)
    jax.make_jaxpr(lambda *args: cell(*args))(carry, x)
    calls = []

    def by(original):
        return lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)

    with replaced("jnp.reshape", by, kind):
        jax.make_jaxpr(lambda *args: cell(*args))(carry, x)
    assert calls


def test_a_function_of_the_user_stays_as_it_is():
    def doubled(*args, **options):
        return 2 * jax.lax.dot_general(*args, **options)

    own = nnx.Linear(3, 4, dot_general=doubled, use_bias=False, rngs=rngs())
    plain = nnx.Linear(3, 4, use_bias=False, rngs=rngs())
    x = jnp.ones((2, 3))
    np.testing.assert_array_equal(own(x), 2 * plain(x))
    with replaced(DOT, lambda original: lambda *a, **o: 0, "name"):
        assert plain(x) == 0 and own(x) == 0


def test_a_replacement_may_take_other_operands():
    def transposed(original):
        return lambda x, kernel, *a, **o: original(x, kernel.T, *a, **o)

    layer = nnx.Linear(3, 4, use_bias=False, rngs=rngs())
    layer.kernel = nnx.Param(layer.kernel[...].T)
    with replaced(DOT, transposed, "code"):
        assert layer(jnp.ones((2, 3))).shape == (2, 4)
    with pytest.raises(TypeError, match="requires contracting dimensions"):
        layer(jnp.ones((2, 3)))


def functions_run(call):
    """The public functions of JAX whose own code runs."""
    paths = {}
    for place, module in PLACES.items():
        for name, x in vars(module).items():
            if code := getattr(x, "__code__", None):
                paths.setdefault(code, []).append((x, f"{place}.{name}"))
    # Some share their code with others, in which they differ by a closure.
    own = {c: p[0][1] for c, p in paths.items() if all(x is p[0][0] for x, _ in p)}
    found = set()
    sys.setprofile(lambda frame, *_: found.add(own.get(frame.f_code)))
    try:
        call()
    finally:
        sys.setprofile(None)
    return found - {None}


FAST = "Linear LinearGeneral Einsum Conv ConvTranspose BatchNorm LayerNorm RMSNorm "
FAST += "GroupNorm InstanceNorm MultiHeadAttention"


FORMS = [(name, how) for name in FAST.split() for how in ("traced", "bfloat16")]
FORMS += [(name, "complex64") for name in FAST.split() if "Norm" in name]
FORMS.append(("Linear", "made"))


@pytest.mark.caches("it asks what fast functions hide")
@pytest.mark.parametrize(("name", "how"), FORMS)
def test_no_program_hides_a_function_that_is_replaced(name, how, monkeypatch):
    row = catalog.BY_NAME[name]
    layer, inputs = row.make(), row.inputs()
    layer.set_attributes(deterministic=True, raise_if_not_found=False)
    layer.set_attributes(use_running_average=how == "traced", raise_if_not_found=False)
    if how not in ("made", "traced"):
        inputs = [x.astype(how) for x in inputs]

    def call():
        if how == "made":
            return row.make()
        if how != "traced":
            return layer(*inputs, **row.call)
        return jax.make_jaxpr(lambda *inputs: layer(*inputs, **row.call))(*inputs)

    def functions_of_call():
        call()
        return functions_run(call)

    in_programs = functions_of_call()
    with monkeypatch.context() as patch:
        patch.setattr(_jax, "can_call_apart", lambda: False)
        in_programs = functions_of_call() - in_programs
    assert in_programs
    for path in in_programs:
        calls = []

        def counted(original, calls=calls):
            return lambda *a, **o: (calls.append(1), original(*a, **o))[1]

        with replaced(path, counted, "code"):
            call()
        assert calls, path


# -------------------------------------------------------------------------- eager calls


ARGUMENTS = {"Linear": (8, 4), "LayerNorm": (8,), "BatchNorm": (8,)}
ARGUMENTS["MultiHeadAttention"] = (2, 8)
each_layer = pytest.mark.parametrize("name", ARGUMENTS)
x = jnp.asarray(np.arange(48, dtype=np.float32).reshape(2, 3, 8) / 48)


def make(name):
    options = {"decode": False} if name == "MultiHeadAttention" else {}
    return getattr(nnx, name)(*ARGUMENTS[name], **options, rngs=nnx.Rngs(0))


@each_layer
def test_settings_of_jax_are_those_of_each_call(name):
    layer, same = make(name), make(name)
    expected = make(name)(x)
    with jax.disable_jit():
        np.testing.assert_allclose(same(x), expected, rtol=1e-5, atol=1e-6)
    with jax.enable_x64(True):
        assert layer(np.asarray(x, np.float64)).dtype == jnp.float64
    with jax.numpy_dtype_promotion("strict"):
        with pytest.raises(ValueError, match="promotion"):
            layer(x.astype(jnp.bfloat16))
        assert layer(x).dtype == jnp.float32


@each_layer
def test_a_nan_is_found_at_the_second_call_too(name):
    layer = make(name)
    layer(x)
    infinite = jnp.full_like(x, jnp.inf)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        layer(infinite)
    assert jnp.isnan(layer(infinite)).any()


@each_layer
def test_outputs_lie_where_the_inputs_say(name):
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Explicit,))
    expected = make(name)(x)
    with jax.set_mesh(mesh):
        outputs = make(name)(jax.sharding.reshard(x, jax.P("data")))
    assert jax.typeof(outputs).sharding.spec[0] == "data"
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("extras", "is_causal", "dtype"),
    [("", False, jnp.float32), ("bias mask", True, jnp.bfloat16)],
)
def test_attention_gives_the_very_numbers_of_jax(is_causal, dtype, extras):
    shapes = (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (2, 4, 5, 7), (1, 1, 5, 7)
    numbers = np.random.default_rng(0)
    q, k, v, bias, mask = (jnp.asarray(numbers.normal(size=s), dtype) for s in shapes)
    options = {"bias": bias, "mask": mask > 0}
    options = {name: x for name, x in options.items() if name in extras}
    expected = jax.nn.dot_product_attention(q, k, v, **options, is_causal=is_causal)
    for _ in range(2):
        y = nnx.dot_product_attention(q, k, v, **options, is_causal=is_causal)
        np.testing.assert_array_equal(y, expected)


# ------------------------------------------------------------------- compiled functions


def counted(function):
    """The function made fast, and the list of its calls."""
    calls = []

    def call(x, absent=None, *, times=2):
        calls.append(1)
        return function(x, times)

    return eager.compiled(call), calls


@pytest.mark.parametrize("times", [np.float32(2), [2], lambda: 2])
def test_settings_that_may_mean_something_else_are_not_compiled(times):
    same, calls = counted(lambda x, times: x)
    for _ in range(2):
        same(x, times=times)
    assert len(calls) == 2


def test_what_looks_at_values_is_called():
    magnitude, _ = counted(lambda x, _: x if x.sum() > 0 else -x)
    for _ in range(2):
        np.testing.assert_array_equal(magnitude(-x), x)


# What layers compute is fast: none of these runs at the second call.
PARTS = ["jnp.reshape", "jnp.mean", "jnp.where", DOT, CONV]
PARTS += ["jax.lax.conv_transpose", "jax.nn.dot_product_attention"]


def test_without_caches_they_are_called_themselves():
    same, calls = counted(lambda x, _: x)
    with nnx.debugging.disable_caches():
        for _ in range(3):
            same(x)
    assert len(calls) == 3


@pytest.mark.caches("it looks at what runs in the second call")
@pytest.mark.parametrize("name", FAST.split())
def test_the_second_eager_call_of_a_layer_runs_a_program(name):
    row = catalog.BY_NAME[name]
    layer, inputs = row.make(), row.inputs()
    if name == "MultiHeadAttention":
        layer.deterministic = True
    layer(*inputs, **row.call)
    again = functions_run(lambda: layer(*inputs, **row.call))
    assert not again.intersection(PARTS)


# ---------------------------------------------------------------------- compiled bodies


class Scaled(nnx.Module):
    """A layer of the user's: it is not compiled."""

    def __init__(self):
        self.calls = 0

    @eager.compiled
    def __call__(self, x):
        self.calls += 1
        return 2 * x


def body_runs(layer, *args, **options):
    """Whether the second of two calls runs the body of the layer."""
    layer(*args, **options)
    body = type(layer).__call__.__wrapped__.__code__
    codes = set()
    sys.setprofile(lambda frame, *_: codes.add(frame.f_code))
    try:
        layer(*args, **options)
    finally:
        sys.setprofile(None)
    return body in codes


def user_function(x):
    return x


class Renamed(nnx.LayerNorm):
    """Only has another name."""

    def to_string(self):
        return "a method"


class Reading(nnx.LayerNorm):
    """Chooses other axes."""

    def _axes(self, ndim):
        return (0,), (ndim - 1,)


BODIES = {
    "a layer": (lambda: nnx.GRUCell(8, 8, rngs=rngs()), False),
    "a subclass": (lambda: Renamed(8, rngs=rngs()), False),
    "another method": (lambda: Reading(8, rngs=rngs()), True),
    "a function of the user": (
        lambda: nnx.GRUCell(8, 8, gate_fn=user_function, rngs=rngs()),
        True,
    ),
    "one in a part": (
        lambda: nnx.GRUCell(8, 8, promote_dtype=lambda *a, **o: a[0], rngs=rngs()),
        True,
    ),
}


@pytest.mark.caches("it looks at what runs in the second call")
@pytest.mark.parametrize("case", BODIES)
def test_bodies_run_where_code_of_the_user_may_run(case):
    make, runs = BODIES[case]
    layer = make()
    inputs = (x[:, 0], x[:, 0]) if isinstance(layer, nnx.GRUCell) else (x,)
    assert body_runs(layer, *inputs) is runs


@pytest.mark.caches("it looks at what runs in the second call")
def test_a_hook_of_a_variable_runs_at_each_call():
    layer, reads = nnx.BatchNorm(8, rngs=rngs()), []
    layer.scale.set_metadata(on_get_value=lambda _, value: reads.append(1) or value)
    for _ in range(3):
        layer(x)
    assert len(reads) >= 3


def test_a_layer_of_the_user_runs_as_it_is_written():
    layer = Scaled()
    for _ in range(3):
        np.testing.assert_array_equal(layer(x), 2 * x)
    assert layer.calls == 3


def test_what_comes_back_as_it_came_is_the_same_object():
    layer = nnx.Dropout(0.5, deterministic=True, rngs=rngs())
    cell = nnx.OptimizedLSTMCell(8, 8, rngs=rngs())
    for _ in range(3):
        (_, h), outputs = cell((x[:, 0], x[:, 1]), x[:, 2])
        assert layer(x) is x and outputs is h


def test_a_failed_call_writes_nothing():
    layer = nnx.BatchNorm(8, rngs=rngs())
    layer(x)
    before = layer.mean[...]
    with pytest.raises(TypeError):
        layer(x[..., :3])
    assert layer.mean[...] is before


def test_changed_attributes_count_at_once():
    layer, dropout = nnx.BatchNorm(8, rngs=rngs()), nnx.Dropout(0.5, rngs=rngs())
    for _ in range(3):
        layer(x), dropout(x)
    layer.eval(), dropout.eval()
    mean = layer.mean[...]
    layer(x)
    assert dropout(x) is x and layer.mean[...] is mean
    layer.scale[...] = 2 * layer.scale[...]
    layer.bias = nnx.Param(jnp.ones(8))
    spread = np.sqrt(np.asarray(layer.var[...], np.float64) + 1e-5)
    expected = 2 * (np.asarray(x, np.float64) - np.asarray(mean)) / spread + 1
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5)


@pytest.mark.caches("it looks at the paths in a program")
def test_parts_of_a_compiled_layer_have_their_paths():
    cell = nnx.GRUCell(8, 8, rngs=rngs())
    for _ in range(2):
        text = jax.jit(lambda h, x: cell(h, x)).lower(x[:, 0], x[:, 0])
        assert "dense_i" in text.as_text(debug_info=True)


# ------------------------------------------- the record of the functions that ran


def one():
    return 1


def two():
    return one() + 1


def recorded(function):
    output, codes = _python.recorded(function)
    return output, None if codes is None else {*codes.values()}


def test_all_functions_that_ran_are_recorded_each_time():
    for _ in range(2):
        output, codes = recorded(two)
        assert output == 2
        assert {one.__code__, two.__code__} <= codes
        assert test_all_functions_that_ran_are_recorded_each_time.__code__ not in codes


def test_a_failure_ends_the_record():
    with pytest.raises(ZeroDivisionError):
        recorded(lambda: 1 / 0)
    assert sys.getprofile() is None
    assert recorded(one)[0] == 1


@contextlib.contextmanager
def profiled():
    sys.setprofile(lambda *_: None)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_beside_a_profiler_there_is_no_record():
    with profiled():
        assert recorded(two) == (2, None)


def test_replaced_functions_are_seen_without_a_record():
    def doubled(original):
        return lambda *args, **options: 2 * original(*args, **options)

    layer = nnx.Linear(8, 8, use_bias=False, rngs=rngs())
    with profiled():
        expected = 2 * layer(x)
    with replaced("jax.lax.dot_general", doubled, "name"):
        assert jnp.array_equal(layer(x), expected)
