"""`nnx.tabulate`: calls, shapes, Variables, and what is trained."""

import functools
import re
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx
from tests import tables

X = jnp.ones((2, 4))


FLOPS = {"compute_flops": True, "compute_vjp_flops": True}


def table(model, *args, lib=nnx, **options):
    console = {"width": 170, "force_terminal": False}
    return lib.tabulate(model, *args, **{"console_kwargs": console, **options})


def rows(text):
    """The cells of each row; those of several lines are joined by newlines."""
    found = []
    for part in re.split(r"\n[├┡].*\n", text)[1:-1]:
        lines = [line.strip("│").split("│") for line in part.splitlines()]
        found.append(["\n".join(x).strip() for x in zip(*lines, strict=True)])
    return [["\n".join(y.strip() for y in x.split("\n")) for x in row] for row in found]


def paths(text):
    return [row[0] for row in rows(text)]


class Calls(nnx.Module):
    """Calls a function of itself."""

    def __init__(self, f, **parts):
        self.f = nnx.static(f)
        for name, part in parts.items():
            setattr(self, name, nnx.data(part))

    def __call__(self, *args, **kwargs):
        return self.f(self, *args, **kwargs)


def linear(seed=0):
    return nnx.Linear(4, 4, rngs=nnx.Rngs(seed))


# What stands in the inputs.


@tables.cases("args, kwargs, text",
        ((), {}, ""),
        ((None,), {}, "None"),
        (({},), {}, "{}"),
        ((X, None), {}, "- float32[2,4]\n- None"),
        (({}, X, []), {}, "- {}\n- float32[2,4]\n- []"),
        ((), {"a": {}}, "a: {}"),
        (({"b": X, "n": None, "e": {}, "l": [], "a": "x"},), {},
         "a: x\nb: float32[2,4]\ne: {}\nl: []\nn: None"),
        ((jnp.float32(1),), {"k": True}, "- float32[]\nk: True"),
        ((((X, 1), [X]),), {}, "- - float32[2,4]\n- 1\n- - float32[2,4]"),
        ((nnx.Linear, int, "it's [bold]"), {},
         "- type[Linear]\n- type[int]\n- it's [bold]"),
        ((nnx.Dropout(0.5),), {}, "Dropout(...)"),
        ((nnx.List([X]), nnx.Dict(a=1)), {}, "- - float32[2,4]\n- a: 1"),
        ((nnx.Param(X),), {}, "value: float32[2,4]"),
        ((jax.ShapeDtypeStruct((3,), jnp.int32),), {}, "int32[3]"))  # fmt: skip
def test_inputs_are_shown_by_shape(args, kwargs, text):
    assert rows(table(Calls(lambda *_, **__: None), *args, **kwargs))[0][2] == text


@pytest.mark.parametrize(
    ("output", "text"),
    [(None, ""), ({}, "{}"), ((None,), "- None"), ({"a": None}, "a: None"), ("s", "s")],
)
def test_outputs_are_shown_by_shape(output, text):
    assert rows(table(Calls(lambda _: output)))[0][3] == text


# Which calls there are.


def test_calls_under_transforms_have_the_paths_of_the_originals():
    apply = nnx.remat(lambda layer, x: layer(x))
    over = nnx.scan(lambda m, x: m(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    stacked = nnx.vmap(lambda key: nnx.Linear(4, 4, rngs=nnx.Rngs(key)))

    def run(self, x):
        x = self.b(self.a(x))
        for layer in self.layers:
            x = apply(layer, x)
        for stack in self.stacks:
            x = over(stack, x)
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(None, 0))(self.last, x)

    keys = jax.random.split(jax.random.key(0), 3)
    lifted = nnx.jit(lambda self, x: self.inner(x))
    a, b = (Calls(lifted, inner=linear()) for _ in "ab")
    parts = {"layers": [linear(), linear()], "last": linear()}
    model = Calls(run, a=a, b=b, stacks=[stacked(keys), stacked(keys)], **parts)
    found = rows(table(model, X, compute_flops=True))
    names = "a a/inner b b/inner layers/0 layers/1 stacks/0 stacks/1 last"
    assert [row[0] for row in found] == ["", *names.split()]
    stack, last = found[-2], found[-1]
    assert stack[2:5] == ["float32[2,4]", "float32[2,4]", "72"]
    assert "kernel: float32[3,4,4]" in stack[5]
    assert last[2:5] == ["float32[4]", "float32[4]", "36"]  # one slice


def test_one_row_per_object_method_and_shapes():
    class Coder(nnx.Module):
        def __init__(self):
            self.layer = linear()

        def encode(self, x):
            return self._hidden(self.layer(x))

        def decode(self, x):
            return self.layer(x[:1])

        def _hidden(self, x):
            return x

        def __call__(self, x):
            self.layer(x)
            return self.decode(self.encode(x))

    assert paths(table(Coder(), X)) == ["", "layer", "encode", "decode", "layer"]
    assert paths(table(Coder(), X, method="encode")) == ["encode", "layer"]
    assert paths(table(Coder(), X, method="_hidden")) == []
    assert paths(table(Coder(), X, depth=0)) == [""]


def test_shared_objects_and_variables_count_once():
    first, second = linear(0), linear(1)
    second.kernel = first.kernel
    model = Calls(lambda self, x: self.z(self.b(self.a(x))), a=first, z=first, b=second)
    found = rows(table(model, X))
    assert [(row[0], row[-1].split("\n")[-1]) for row in found] == [
        ("", "24 (96 B)"),
        ("a", "20 (80 B)"),
        ("b", "4 (16 B)"),
    ]


def test_draws_are_rows_that_the_default_filter_leaves_out():
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    assert paths(table(model, X)) == [""]
    text = table(model, X, row_filter=lambda row: True)
    assert paths(text) == ["", "rngs"]
    assert "RngStream" in text and "key<fry>[]" in text


def test_static_methods_can_be_called_and_tabulated():
    class Model(nnx.Module):
        def __init__(self):
            self.layer = linear()

        @staticmethod
        def double(x):
            return 2 * x

        def __call__(self, x):
            return self.layer(self.double(x))

    assert paths(table(Model(), X)) == ["", "layer"]
    assert paths(table(Model(), X, method="double")) == ["double"]


# What is counted.


def test_metadata_of_variables_is_shown():
    w = nnx.Param(jnp.ones(2), tag="t", unset=None, f=len, e={})
    cell = rows(table(Calls(lambda self: self.w[...], w=w)))[0][-1]
    f = "f: <built-in function len>"
    assert cell == f"w:\ne: {{}}\n{f}\ntag: t\nvalue: float32[2]\n\n2 (8 B)"


def test_sizes_have_decimal_units():
    def parts(self):
        return None

    model = Calls(
        parts,
        a=nnx.Param(jax.ShapeDtypeStruct((1000, 300), jnp.bfloat16)),
        b=nnx.Cache(jax.ShapeDtypeStruct((1000,), jnp.int8)),
        c=nnx.Rngs(0),
        d=nnx.BatchStat(jax.ShapeDtypeStruct((10**9,), jnp.float32)),
    )
    assert rows(table(model))[0][-4:] == [
        "d: float32[1000000000]\n\n1,000,000,000 (4.0 GB)",
        "b: int8[1000]\n\n1,000 (1,000 B)",
        "a: bfloat16[1000,300]\n\n300,000 (600.0 KB)",
        "2 (12 B)",
    ]


def test_operations_are_those_of_the_mathematics():
    text = table(linear(), X, **FLOPS)
    product = 2 * 2 * 4 * 4
    # Forward: a product and a sum; back: two products, and the sum of two rows.
    assert rows(text)[0][4:6] == [str(product + 8), str(3 * product + 8 + 4)]


def test_operations_of_calls_inside_derivatives_and_maps_of_jax():
    def run(self, x):
        return jax.vmap(self.a)(x) + jax.grad(lambda x: self.b(x).sum())(x)

    found = rows(table(Calls(run, a=linear(), b=linear()), X, compute_flops=True))
    assert [row[4] for row in found[1:]] == ["36", "72"]


def scanned(f):
    return lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 3)[0]


def with_rule(f):
    function = jax.custom_jvp(lambda x: f(x))
    function.defjvp(lambda x, t: (f(*x), t[0]))
    return function


def sum_of(f):
    return lambda x: f(x).sum()


# In which a layer is called with two rows; `True` if it is traced once more.
PLACES = {
    "itself": (lambda f: f, False),
    "jit": (jax.jit, False),
    "inline": (lambda f: jax.jit(lambda x: f(x), inline=True), False),
    "checkpoint": (jax.checkpoint, False),
    "scan": (scanned, False),
    "cond": (lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, jnp.sin, x), False),
    "while": (lambda f: lambda x: jax.lax.while_loop(
        lambda x: x[0, 0] > 9, f, x), False),
    "custom_jvp": (with_rule, True),  # the rule is, for the derivative
    "an output that is not used": (lambda f: lambda x: (f(x), x)[1], False),
    "eval_shape": (lambda f: lambda x: x + jax.eval_shape(f, x).ndim, True),
    "vmap": (lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x])), True),
    "jit in vmap": (lambda f: lambda x: jax.vmap(jax.jit(f))(jnp.stack([x, x])), True),
    "grad": (lambda f: jax.grad(sum_of(f)), True),
    "jit in grad": (lambda f: jax.grad(sum_of(jax.jit(f))), True),
    "scan in grad": (lambda f: jax.grad(sum_of(scanned(f))), True),
    "linearize": (lambda f: lambda x: jax.linearize(f, x)[0], True),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_operations_of_a_call_are_the_same_wherever_it_is(place):
    lift, is_traced_again = PLACES[place]
    traced = []

    class Layer(nnx.Linear):
        def __call__(self, x):
            traced.append(1)
            return super().__call__(x)

    layer = Layer(4, 4, rngs=nnx.Rngs(0))
    model = Calls(lambda self, x: lift(lambda x: self.a(x))(x), a=layer)
    found = rows(table(model, X, **FLOPS))
    # `Calls` has a row, too, and what goes in and out of the layer is the same.
    assert found[1][2:6] == ["float32[2,4]", "float32[2,4]", "72", "204"]
    assert len(traced) == 1 + is_traced_again
    if place not in ("an output that is not used", "eval_shape"):
        assert int(found[0][4]) >= 64


def test_calls_that_return_no_array_are_traced_once():
    traced = []
    layer = Calls(lambda self, x: traced.append(self.v.set_value(x)), v=nnx.Param(X))
    found = rows(table(Calls(lambda m, x: m.a(x), a=layer), X, compute_flops=True))
    assert [row[4] for row in found] == ["0", "0"] and len(traced) == 1


def test_what_can_not_be_counted_is_none_and_the_rest_counts():
    mesh = jax.make_mesh((1,), ("i",))
    spec = jax.sharding.PartitionSpec()

    def run(self, x):
        # A loop of unknown length has no derivative.
        x = jax.lax.while_loop(lambda x: x[0, 0] > 9, lambda x: self.a(x), x)
        return jax.shard_map(
            lambda x: self.b(x), mesh=mesh, in_specs=spec, out_specs=spec
        )(x)

    last = Calls(lambda self, x: jax.lax.psum(x @ x.T, "i"))
    text = table(Calls(run, a=linear(), b=last), X, **FLOPS)
    whole, *others = [row[4:6] for row in rows(text)]
    assert int(whole[0]) >= 72 and whole[1] == "0"
    assert others == [["72", "204"], ["0", "0"]]


def test_dropout_costs_as_much_as_its_formula():
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def formula(key, count, x):
        key = jax.random.fold_in(key, count)
        is_kept = jax.random.bernoulli(key, 0.5, x.shape)
        return jax.lax.select(is_kept, x / 0.5, jnp.zeros_like(x))

    lowered = jax.jit(formula).lower(layer.rngs.key[...], layer.rngs.count[...], X)
    found = rows(table(layer, X, compute_flops=True))
    assert int(found[0][4]) == lowered.cost_analysis()["flops"]


def test_keyword_inputs_have_derivatives():
    text = table(linear(), inputs=X, compute_vjp_flops=True)
    assert rows(text)[0][2:5] == ["inputs: float32[2,4]", "float32[2,4]", "204"]


def test_each_method_is_traced_once():
    traced = []

    def run(self, x):
        traced.append(1)
        assert isinstance(x, jax.core.Tracer)
        return self.layer(x)

    blocks = nnx.List([Calls(run, layer=linear()) for _ in range(10)])
    model = Calls(lambda self, x: sum([b(x) for b in self.blocks]), blocks=blocks)
    table(model, X, **FLOPS)
    assert len(traced) == 10


# What is left as it was, and what is not possible.


def test_the_model_stays_as_it_is(graph):
    with nnx.set_graph_mode(graph):
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
        before, leaves = nnx.graphdef(model), jax.tree.leaves(nnx.state(model))
        table(model, X)
        assert nnx.graphdef(model) == before
        after = jax.tree.leaves(nnx.state(model))
        assert all(a is b for a, b in zip(leaves, after, strict=True))


def test_errors_leave_nothing_behind():
    model = nnx.Sequential(linear(), linear())
    with pytest.raises(TypeError):
        table(model, jnp.ones((2, 3)))
    assert model(X).shape == (2, 4)
    assert paths(table(model, X)) == ["", "layers/0", "layers/1"]


def test_abstract_models_with_arrays_as_attributes():
    def make():
        def run(self, x):
            return self.layer(x) * self.table[None]

        return Calls(run, layer=linear(), table=jnp.ones(4))

    for model in (make(), nnx.eval_shape(make)):
        text = table(model, jax.ShapeDtypeStruct((2, 4), jnp.float32))
        assert paths(text) == ["", "layer"]
        assert "Total Parameters: 20 (80 B)" in text


def test_refs_are_written_in_the_trace_alone():
    model = nnx.to_refs(Calls(lambda self: self.v.set_value(self.v[...] + 1),
                              v=nnx.Variable(jnp.zeros(()))))  # fmt: skip
    assert rows(table(model, compute_flops=True))[0][-1] == "v: float32[]\n\n1 (4 B)"
    assert model.v[...] == 0


class Deep(nnx.Module):
    """Needs inputs; says whether it was called."""

    called = False

    def __init__(self, count=12):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List(
            nnx.Dict(up=linear(i), norm=nnx.BatchNorm(4, rngs=rngs))
            for i in range(count)
        )
        self.out, self.drop = linear(), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, *, scale=1):
        Deep.called = True
        return x


def caption(text):
    return text[text.index("Total Parameters") :].split("\n")


def test_a_model_that_needs_inputs_is_listed_by_path_without_them():
    found = rows(table(Deep()))
    assert not Deep.called
    assert [row[:2] for row in found] == [
        ["", "Deep"],
        ["blocks", "List"],
        ["blocks/0-11", "12 x Dict"],
        ["blocks/0-11/norm", "12 x BatchNorm"],
        ["blocks/0-11/up", "12 x Linear"],
        ["drop", "Dropout"],
        ["out", "Linear"],
    ]
    params = "bias: float32[4]\nkernel: float32[4,4]\n\n20 (80 B)"
    assert [row[3] for row in found[-3:]] == [f"{params} each", "", params]
    assert found[2][2:4] == ["8 (32 B) each", "28 (112 B) each"]
    assert paths(table(Deep(), depth=1)) == ["", "blocks", "drop", "out"]
    abstract = table(nnx.eval_shape(Deep))
    assert abstract == table(Deep())


def test_functions_in_a_list_are_rows_by_their_names_where_calls_are_not_listed():
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    pool = functools.partial(nnx.max_pool, window_shape=(2, 2))
    model = nnx.Sequential(layer, nnx.relu, nnx.tanh, pool)
    listed = [row[:2] for row in rows(table(model))]
    assert listed[2:] == [
        ["layers/0", "Linear"],
        ["layers/1", "relu"],
        ["layers/2", "tanh"],
        ["layers/3", "partial"],
    ]


def test_totals_tell_what_is_trained_and_count_random_keys_with_calls_alone():
    model = Deep(3)
    params, statistics = 3 * (20 + 8) + 20, 3 * 8
    total, split, *_ = map(str.strip, caption(table(model)))
    assert total == f"Total Parameters: {params + statistics} (512 B)"
    assert split == f"Trainable: {params} (416 B), Other: {statistics} (96 B)"
    nnx.surgery.freeze(model, where="blocks[:2]")
    trained = "Trainable: 48 (192 B), Frozen: 56 (224 B)"
    split = f"{trained}, Other: 24 (96 B)"
    assert [x.strip() for x in caption(table(model))][:2] == [total, split]
    total = f"Total Parameters: {params + statistics + 2} (524 B)"
    split = f"{trained}, Random: 2 (12 B), Other: 24 (96 B)"
    assert [x.strip() for x in caption(table(model, X))][:2] == [total, split]


def test_frozen_variables_read_like_others():
    layer = linear()
    layer.a = nnx.LoRAParam(jnp.ones(2))
    nnx.surgery.freeze(layer)
    cell = "frozen_type: LoRAParam\nvalue: float32[2]"
    for args in ((), (X,)):
        assert rows(table(layer, *args))[0][-1] == (
            f"a:\n{cell}\nbias: float32[4]\nkernel: float32[4,4]\n\n22 (88 B)"
        )


def test_what_differs_or_is_shared_is_not_folded():
    model = Deep(4)
    model.blocks[1].up.kernel = model.blocks[0].up.kernel
    model.blocks[3].norm = model.blocks[2].norm
    found = {row[0]: row[-2].split("\n")[-1] for row in rows(table(model))}
    up = [found[f"blocks/{i}/up"] for i in "*1"]
    assert up == ["20 (80 B) each", "4 (16 B)"]
    assert found["blocks/0-2/norm"] == "8 (32 B) each" and "blocks/3/norm" not in found


def test_what_takes_any_inputs_is_called_without_them_if_it_can_be():
    model = nnx.Sequential(linear(), nnx.relu)
    assert paths(table(model)) == ["", "layers", "layers/0", "layers/1"]
    assert "┃ inputs" in table(nnx.Sequential(lambda: X, linear()))


def test_operations_and_other_methods_need_the_inputs():
    for options in ({"compute_flops": True}, {"method": "encode"}):
        model = Calls(lambda self, x: x)
        Calls.encode = Calls.__call__
        with pytest.raises(TypeError, match="missing 1 required positional"):
            table(model, **options)


def test_containers_are_listed_without_calls():
    assert paths(table([linear(), nnx.Dict(a=linear())])) == ["", "0", "1", "1/a"]
    with pytest.raises(KeyError, match="list has no method '__call__'"):
        table([linear()], X)


def test_unknown_methods_name_the_known_ones():
    known = "Embed has no method 'decode'. Its methods: __call__, attend."
    with pytest.raises(KeyError, match=known):
        table(nnx.Embed(3, 4, rngs=nnx.Rngs(0)), X, method="decode")


@pytest.mark.parametrize("obj", [3, X, "model"])
def test_what_is_no_graph_node_is_refused(obj):
    with pytest.raises(ValueError, match="Expected a graph node"):
        nnx.tabulate(obj, X)


def test_titles_and_options_of_rich_can_be_given():
    text = table(linear(), X, table_kwargs={"title": "Mine", "show_footer": False})
    assert text.split("\n")[0].strip() == "Mine" and "Total │" not in text


def test_without_rich_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ImportError, match="pip install rich"):
        table(linear(), X)


# What the peer prints, letter by letter.


def peer_block(nnx):
    class Block(nnx.Module):
        def __init__(self, size, rngs):
            self.linear = nnx.Linear(32, size, rngs=rngs)
            self.norm = nnx.BatchNorm(size, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, *, scale=None):
            return self.dropout(self.norm(self.linear(x)))

    return Block


def peer_model(nnx):
    Block = peer_block(nnx)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(32, rngs), Block(10, rngs)])
            self.again = self.blocks[0]
            self.scale = nnx.Param(jnp.ones((1, 10)), unit="m", f=len)

        def __call__(self, x, train=True):
            y = self.blocks[1](self.again(self.blocks[0](x["a"])), scale=(x, train))
            return y * self.scale, (None, y)

    return Model(nnx.Rngs(0))


@tables.cases(
    "options",
    {"row_filter": lambda row: True},
    {"depth": 2, "train": False, "console_kwargs": {"width": 150}},
)
def test_tables_are_those_of_the_peer(peer, options):
    x = {"a": jnp.ones((1, 32)), "b": [jnp.ones(1)]}
    ours, theirs = [table(peer_model(y), x, lib=y, **options) for y in (nnx, peer)]
    assert ours == theirs


@pytest.mark.parametrize("layer", ["Linear", "Conv", "LayerNorm"])
def test_operations_are_those_of_the_peer(peer, layer):
    sizes = {"Linear": (4, 3), "Conv": (4, 8, (3,)), "LayerNorm": (4,)}[layer]
    x = jnp.ones((2, 5, 4))
    ours, theirs = [
        table(getattr(lib, layer)(*sizes, rngs=lib.Rngs(0)), x, lib=lib, **FLOPS)
        for lib in (nnx, peer)
    ]
    assert ours == theirs


def test_a_table_in_a_notebook_is_text_and_nothing_is_drawn(monkeypatch):
    rich_in_notebooks = pytest.importorskip("rich.jupyter")
    drawn = []
    monkeypatch.setattr(rich_in_notebooks, "display", lambda *args: drawn.append(args))
    notebook = types.SimpleNamespace(get_ipython=object)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    assert "Linear" in nnx.tabulate(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), X)
    assert not drawn
