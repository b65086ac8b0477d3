"""What `nnx.remat` keeps by names and by the paths of modules, and what it says."""

import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftree as nnx
from graftree.memory import keeping  # its list of memories is replaced
from tests import tables, zoo

X = np.random.default_rng(0).normal(size=(2, 4)).astype("float32")
save, offload = nnx.memory.save, nnx.memory.offload


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(4, 4, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.sin(self.scores(x)))

    @nnx.debugging.named
    def scores(self, x):
        return jnp.cos(x)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = Attention(rngs)
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        x = jnp.sin(x + self.attention(x))
        return self.down(nnx.name(jnp.sin(self.up(x)), "hidden"))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def kept(function, *args):
    """The names that a function keeps for the way back, sorted, by JAX's own count."""
    graphdef, state = nnx.split(args)

    def pure(state):
        return function(*nnx.merge(graphdef, state))

    program = jax.make_jaxpr(lambda state: jax.vjp(pure, state))(state).jaxpr
    made_by = {id(e.outvars[0]): e for e in program.eqns}
    found = []
    for out in {id(x): x for x in program.outvars}.values():
        step = made_by.get(id(out))
        while step and step.primitive.name in ("reduce_precision", "device_put"):
            step = made_by.get(id(step.invars[0]))
        if step and step.primitive.name == "name":
            found.append(str(step.params["name"]))
    return sorted(found)


def forward_and_backward(function, *args):
    """The program of a function of ``X`` last, and of its derivative."""
    return jax.make_jaxpr(lambda x: jax.vjp(function, *args, x)[1])(X)


def gradient(function, *args):
    step = nnx.jit(nnx.grad(lambda *args: function(*args).sum()))
    return jax.tree.leaves(step(*args))


def assert_close(found, expected):
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------- what is kept


@tables.cases(
    "where, names",
    (["hidden"], ["hidden"]),
    (["attention"], ["attention()"]),
    (["attention", ["hidden"]], ["attention()", "hidden"]),
    (["attention.scores"], ["attention.scores()"]),
    (["attention.*"], ["attention.scores()"]),
    (["{attention,up}"], ["attention()", "up()"]),
    ([Attention], ["attention()"]),
    ([lambda path, module: path == ("up",)], ["up()"]),
    ([nnx.All(nnx.Linear, nnx.PathContains("up"))], ["up()"]),
)
def test_names_and_outputs_of_modules_are_kept_and_nothing_else(where, names):
    found = kept(nnx.remat(Block.__call__, policy=save(*where)), Block(nnx.Rngs(0)), X)
    # Of an output that is not needed on the way back, nothing is kept.
    assert [x for x in found if x != "attention.out()"] == names


def test_paths_begin_at_the_argument_of_the_function():
    model = Model(nnx.Rngs(0))
    whole = nnx.remat(Model.__call__, policy=save("blocks[1].attention"))
    assert kept(whole, model, X) == ["blocks[1].attention()"]
    of_dict = nnx.remat(lambda d: d["m"](d["x"]), policy=save("m.blocks[*].attention"))
    assert len(kept(of_dict, {"m": model, "x": X})) == 2


def test_paths_in_a_method_begin_at_its_object():
    class Net(nnx.Module):
        def __init__(self):
            self.model = Model(nnx.Rngs(0))

        def __call__(self, x):
            policy = save("model.blocks[0].attention")
            return nnx.remat(lambda x: self.model(x), policy=policy)(x)

        @nnx.remat(policy=save("model.blocks[1].attention"))
        def decorated(self, x):
            return self.model(x)

    assert kept(Net.__call__, Net(), X) == ["model.blocks[0].attention()"]
    assert kept(Net.decorated, Net(), X) == ["model.blocks[1].attention()"]


def test_paths_of_what_is_closed_over_begin_at_itself():
    model = Model(nnx.Rngs(0))
    function = nnx.remat(lambda x: model(x), policy=save("blocks[0].attention"))
    assert kept(function, X) == ["blocks[0].attention()"]


def test_paths_lead_through_transforms_inside():
    def run(net, x):
        return nnx.jit(lambda block, x: block(x))(net.last, net.stack(x))

    rngs = nnx.Rngs(0)
    net = zoo.Box(stack=nnx.Stack(Block, 3, rngs=rngs), last=Block(rngs))
    function = nnx.remat(run, policy=save("stack.layers.attention", "last.attention"))
    whole = str(jax.make_jaxpr(lambda x: function(net, x))(X))
    assert "name=stack.layers.attention()" in whole
    assert "name=last.attention()" in whole


def test_layers_of_a_stack_begin_at_the_layer():
    def stack(policy):
        return nnx.Stack(Block, 3, remat=policy, rngs=nnx.Rngs(0))

    def residuals(policy):
        _, backward = jax.vjp(stack(policy), X)
        return sum(x.nbytes for x in jax.tree.leaves(backward))

    assert residuals(save("attention")) - residuals(True) == 3 * X.nbytes
    plain, found = stack(False), stack(save("hidden"))
    assert_close(*(gradient(nnx.Stack.__call__, x, X) for x in (found, plain)))


def test_compiled_programs_need_less_memory():
    x = jnp.ones((64, 4))

    class Wide(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(4, 128, use_bias=False, rngs=rngs)
            self.down = nnx.Linear(128, 4, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.sin(jnp.sin(nnx.name(self.up(x), "hidden"))))

    def temporaries(policy):
        stack = nnx.Stack(Wide, 6, remat=policy, rngs=nnx.Rngs(0))
        step = nnx.jit(nnx.grad(lambda stack, x: stack(x).sum()))
        return step.lower(stack, x).compile().memory_analysis().temp_size_in_bytes

    hidden = 6 * 64 * 128 * 4
    nothing, named, everything = map(temporaries, (True, save("hidden"), False))
    assert named - nothing == pytest.approx(hidden, rel=0.2)
    assert everything - named > hidden / 2


@jax.custom_vjp
def halved(x):
    return jnp.sin(x)


halved.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x) / 2,))

LIFTS = {
    "nothing": lambda f: f,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "grad twice": lambda f: jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x)[0, 0]),
    "vmap": lambda f: jax.vmap(f),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 2)[0],
}


@pytest.mark.parametrize("lift", LIFTS)
def test_programs_are_those_of_a_policy_of_jax(lift):
    traced = []

    def inner(around, layer, x):
        traced.append(1)
        return jax.nn.relu(halved(nnx.name(layer(x), "a")) + around)

    def f(policy, x):
        layer, around = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.cos(x)
        with jax.named_scope("here"):
            return nnx.remat(functools.partial(inner, around), policy=policy)(layer, x)

    jaxs = jax.checkpoint_policies.save_only_these_names("a")
    policies = [save("a"), save("a") | jaxs, jaxs]
    found = []
    for policy in policies:
        lowered = jax.jit(LIFTS[lift](functools.partial(f, policy))).lower(X)
        text = lowered.as_text(debug_info=True)
        scopes = {x for x in re.findall(r'loc\("([^"]+)"', text) if ".py" not in x}
        found.append((lowered.as_text(), sorted(scopes)))
        line = inner.__code__.co_firstlineno + 2
        assert re.search(rf'test_keeping.py":{line}\b', text)
    assert found[0] == found[1] == found[2] and len(traced) == len(policies)
    assert any("here" in scope for scope in found[0][1])


def test_branches_are_gone_into():
    def function(block, x):
        branches = (lambda x: nnx.name(jnp.sin(x), "sine"), jnp.cos)
        return block.attention(jax.lax.cond(x[0, 0] > 0, *branches, x))

    run = nnx.remat(function, policy=save("sine", "attention.out"))
    block = Block(nnx.Rngs(0))
    assert_close(gradient(run, block, X), gradient(function, block, X))


def test_policies_are_combined():
    dots = jax.checkpoint_policies.dots_saveable
    block = Block(nnx.Rngs(0))
    for policy in (save("attention") | dots, dots | save("attention")):
        function = nnx.remat(Block.__call__, policy=policy)
        assert "name=attention()" in str(forward_and_backward(function, block))
    both = nnx.remat(Block.__call__, policy=save("hidden") | save("attention"))
    assert kept(both, block, X) == ["attention()", "hidden"]
    first = nnx.remat(Block.__call__, policy=offload("hidden") | save("*"))
    program = str(forward_and_backward(first, block))
    assert "<host>" in program or "Host" in program


@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_policy_of_jax_keeps_is_kept_in_a_combination(is_first):
    def count_kept(policy):
        function = nnx.remat(Block.__call__, policy=policy)
        return len(forward_and_backward(function, block).jaxpr.outvars)

    dots, named = jax.checkpoint_policies.dots_saveable, save("attention")
    block = Block(nnx.Rngs(0))
    combined = dots | named if is_first else named | dots
    assert count_kept(combined) == count_kept(named) + 1  # the dot of `up`


# ----------------------------------------------------------------- numbers and modes


@pytest.mark.parametrize("make", [save, offload])
def test_numbers_are_those_without_remat(mode, make):
    class Counting(Block):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.calls = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return super().__call__(x)

    block = Counting(nnx.Rngs(0))
    graphdef, params, rest = nnx.split(block, nnx.Param, ...)

    def gradients(run):
        def loss(params):
            block = nnx.merge(graphdef, params, rest, copy=True)
            return run(block, X).sum(), block.calls[...]

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    policy = make("hidden", "attention")
    found = gradients(nnx.remat(Counting.__call__, policy=policy, **mode))
    expected = gradients(Counting.__call__)
    assert found[1] == expected[1] == 1
    assert_close(found, expected)


def test_works_under_vmap_nested_and_eagerly():
    inner = nnx.remat(Attention.__call__, policy=save("out"))

    def function(block, x):
        return block.down(jnp.sin(block.up(inner(block.attention, x))))

    outer = nnx.remat(function, policy=save("up"))
    block = Block(nnx.Rngs(0))
    assert kept(outer, block, X) == ["up()"]
    many = nnx.vmap(outer, in_axes=(None, 0))
    np.testing.assert_allclose(many(block, X), function(block, X), rtol=1e-5)
    eager = nnx.grad(lambda block: outer(block, X).sum())(block)
    assert_close(eager, nnx.grad(lambda block: function(block, X).sum())(block))


def test_what_is_named_for_a_policy_is_not_used_elsewhere():
    inner = jax.jit(lambda x: jnp.sin(x))
    step = nnx.jit(lambda block, x: block(inner(x)))
    block = Block(nnx.Rngs(0))

    def program(function):
        return str(jax.make_jaxpr(lambda x: function(block, x))(X))

    before = program(step)
    watched = nnx.remat(step, policy=save("attention"))
    assert "attention()" not in before and "attention()" in program(watched)
    assert program(step) == before


def test_nothing_is_left_behind_after_an_error():
    def fails(block, x):
        block(x)
        raise RuntimeError

    block = Block(nnx.Rngs(0))
    with pytest.raises(RuntimeError):
        nnx.remat(fails, policy=save("attention"))(block, X)
    with pytest.raises(ValueError, match="matches no name"):
        nnx.remat(Block.__call__, policy=save("typo"))(block, X)
    assert "attention()" not in str(jax.make_jaxpr(lambda x: block(x))(X))


# ------------------------------------------------------------------------- policies


def test_equal_policies_are_equal():
    assert save("a", nnx.Linear) == save("a", nnx.Linear) != offload("a", nnx.Linear)
    assert hash(save("a")) == hash(save(["a"])) and save("a") != save("b")
    assert pickle.loads(pickle.dumps(save("a"))) == save("a")
    text = "nnx.memory.save('a') | nnx.memory.offload('b')"
    assert repr(save("a") | offload("b")) == text


def test_misspelt_names_are_told_with_what_is_near():
    block = Block(nnx.Rngs(0))
    with pytest.raises(ValueError) as error:
        nnx.remat(Block.__call__, policy=save("atention"))(block, X)
    assert str(error.value).splitlines() == [
        "nnx.memory.save: where='atention' matches no name and no module of "
        "Block.__call__.",
        "  similar paths: attention, attention.out, attention.scores",
        "A pattern matches whole paths: '**' stands for any number of steps.",
    ]
    with pytest.raises(ValueError, match=r"(?s)Conv matches no .*: hidden, "):
        nnx.remat(Block.__call__, policy=save("hidden", nnx.Conv))(block, X)
    with pytest.raises(ValueError, match="no module of a layer of nnx.Stack"):
        nnx.Stack(Block, 2, remat=save("hiden"), rngs=nnx.Rngs(0))(X)


def test_a_name_that_was_given_for_nothing_is_told():
    def forgets(x):
        nnx.name(x, "hidden")
        return jnp.sin(x)

    with pytest.raises(ValueError, match="'hidden' matches no name"):
        jax.eval_shape(nnx.remat(forgets, policy=save("hidden")), X)


def test_what_a_custom_vjp_may_hide_is_only_warned_of():
    @jax.custom_vjp
    def triple(x):
        return 3 * x

    def forward(x):
        return triple(x), nnx.name(jnp.sin(x), "residual")

    triple.defvjp(forward, lambda kept, g: (g * kept,))
    function = nnx.remat(lambda x: triple(x).sum(), policy=save("residual"))
    with pytest.warns(UserWarning, match=r"(?s).residual. matches no .*custom_vjp"):
        assert kept(function, X) == ["residual"]


def test_the_memory_of_the_host_is_asked_for(monkeypatch):
    monkeypatch.setattr(keeping, "kinds_of_memory", lambda: ["device"])
    function = nnx.remat(jnp.sin, policy=offload("x"))
    with pytest.raises(ValueError, match=r"(?s)'pinned_host'.*they have: device"):
        function(X)


def test_wrong_selections_are_refused_at_once():
    for wrong, kind in [((), ValueError), (("[",), ValueError), ((None,), TypeError)]:
        with pytest.raises(kind):
            save(*wrong)
    message = r"save expects names; add a policy .* with `\|`"
    with pytest.raises(TypeError, match=message):
        save(jax.checkpoint_policies.dots_saveable)
    with pytest.raises(TypeError, match="expects a hashable value"):
        offload(
            nnx.All(nnx.Linear, lambda path, x, seen={}: seen),
            type("F", (), {"__call__": lambda self, path, x: True, "__hash__": None})(),
        )
    with pytest.raises(TypeError, match="combined"):
        save("a") | "b"


def test_jax_alone_refuses_the_policy():
    function = jax.checkpoint(jnp.sin, policy=save("hidden"))
    with pytest.raises(TypeError, match=r"(?s)jax.checkpoint can.t use.*nnx.remat"):
        jax.grad(function)(1.0)
