"""What `nnx.memory.saved` lists is what JAX keeps, by the paths of modules."""

import jax
import jax.numpy as jnp
import pytest

import graftree as nnx

X = jnp.ones((2, 4))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(8, 4, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.sin(nnx.name(self.up(x), "hidden")))


class Model(nnx.Module):
    def __init__(self, policy=None, stacked=False):
        rngs = nnx.Rngs(0)
        self.blocks = (
            nnx.Stack(Block, 3, remat=policy, rngs=rngs)
            if stacked
            else nnx.List([Block(rngs) for _ in range(3)])
        )
        self.policy = policy

    def __call__(self, x):
        if isinstance(self.blocks, nnx.Stack):
            return self.blocks(x)
        run = nnx.remat(Block.__call__, policy=self.policy)
        for block in self.blocks:
            x = run(block, x)
        return x


def loss_fn(model, x):
    return model(x).sum()


def rows(report):
    return [(x.path, x.why, x.shape) for x in report.values if x.why != "argument"]


def test_values_have_the_path_of_their_module_also_in_layers_that_are_alike():
    report = nnx.memory.saved(loss_fn, Model(nnx.memory.save("hidden", "down")), X)
    assert sorted(rows(report)) == [
        ("model.blocks[0]", "named 'hidden'", (2, 8)),
        ("model.blocks[0].down", "output", (2, 4)),
        ("model.blocks[1]", "named 'hidden'", (2, 8)),
        ("model.blocks[1].down", "output", (2, 4)),
        ("model.blocks[2]", "named 'hidden'", (2, 8)),
    ]
    kernels = {x.path for x in report.values if x.why == "argument"} - {"x"}
    # The input is not differentiated, so the first kernel is not needed.
    assert kernels == {
        *(f"model.blocks[{i}].down.kernel" for i in range(3)),
        *(f"model.blocks[{i}].up.kernel" for i in (1, 2)),
    }
    assert report.bytes == 4 * (3 * 16 + 2 * 8) and report.offloaded_bytes == 0


def test_loops_are_gone_into():
    report = nnx.memory.saved(loss_fn, Model(nnx.memory.save("hidden"), True), X)
    assert sorted(rows(report)) == [
        ("model.blocks", "carry", (3, 2, 4)),
        ("model.blocks.layers", "named 'hidden'", (3, 2, 8)),
    ]


@pytest.mark.parametrize("stacked", [False, True])
def test_bytes_are_those_that_jax_keeps_and_fall_as_the_policy_says(stacked):
    policies = [
        jax.checkpoint_policies.everything_saveable,
        nnx.memory.save("hidden"),
        jax.checkpoint_policies.nothing_saveable,
    ]
    found = []
    for policy in policies:
        model = Model(policy, stacked)
        report = nnx.memory.saved(loss_fn, model, X)
        graphdef, state = nnx.split(model)

        def pure(state, graphdef=graphdef):
            return loss_fn(nnx.merge(graphdef, state), X)

        backward = jax.eval_shape(lambda s, f=pure: jax.vjp(f, s)[1], state)
        kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(backward))
        all_bytes = sum(x.bytes for x in report.values)
        assert all_bytes - X.nbytes <= kept <= all_bytes
        found.append(report.bytes)
    assert found == sorted(found, reverse=True) and len({*found}) == 3


def test_the_memory_of_the_host_is_told():
    report = nnx.memory.saved(loss_fn, Model(nnx.memory.offload("hidden"), True), X)
    assert report.offloaded_bytes == 3 * 2 * 8 * 4 and report.bytes == 3 * X.nbytes
    assert "total on the host" in str(report) and " host " in str(report)


def test_takes_what_grad_takes():
    def both(w, model, x):
        return jnp.sum(w * model(x)), {"aux": jnp.exp(x)}

    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    report = nnx.memory.saved(both, 2.0, Block(nnx.Rngs(0)), shape, has_aux=True)
    assert rows(report) == [("model.down", "dot_general", (2, 4))]
    argnum = nnx.DiffState(1, nnx.PathContains("down"))
    report = nnx.memory.saved(both, 2.0, Block(nnx.Rngs(0)), X, argnums=argnum)
    assert ("model", "sin", (2, 8)) in rows(report)
    of_module = nnx.memory.saved(Block(nnx.Rngs(0)), X)
    assert {x.path.partition(".")[0] for x in of_module.values} <= {"Block", "x"}


def test_nothing_is_written_and_no_trace_is_used_again():
    class Counting(Block):
        def __init__(self):
            super().__init__(nnx.Rngs(0))
            self.count = nnx.BatchStat(jnp.array(0))

        def __call__(self, x):
            self.count[...] += 1
            return super().__call__(x)

    model = Counting()
    step = nnx.jit(loss_fn)
    nnx.memory.saved(step, model, X)
    assert model.count[...] == 0
    step(model, X)
    assert model.count[...] == 1
