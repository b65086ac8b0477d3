"""Programs with Linen Modules in Modules."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.interop.bridge.comparing import catch
from tests.interop.bridge.modules import X, linen, mapped, on_devices, scanned


class Block(nn.Module):
    """Has parameters, statistics, dropout, a counter and a sown value."""

    features: int = 4

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(self.features)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        self.sow("intermediates", "h", x)
        count = self.variable("counts", "n", lambda: jnp.zeros(()))
        if self.is_mutable_collection("counts"):
            count.value += 1
        return x


class TwoMethods(nn.Module):
    def setup(self):
        self.dense = nn.Dense(4)

    def __call__(self, x):
        return self.dense(x)

    def shifted(self, x, by=1.0):
        return self.dense(x) + by


class Keys(nn.Module):
    """Draws from streams, at initialization and in calls."""

    names: tuple = ("params",)

    @nn.compact
    def __call__(self):
        for name in self.names:

            def draw(name=name):
                return jax.random.key_data(self.make_rng(name))

            self.variable("keys", f"at_{name}", draw)
        return [jax.random.key_data(self.make_rng(name)) for name in self.names]


@linen
def Annotated(self, x):
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    logical = nn.with_logical_partitioning(nn.initializers.ones, ("out",))
    kernel = self.param("kernel", init, (x.shape[-1], 4))
    return x @ kernel + self.param("bias", logical, (4,))


def block(nnx, rngs=None, **options):
    rngs = nnx.Rngs(0, params=1, dropout=2) if rngs is None else rngs
    return nnx.bridge.ToNNX(Block(**options), rngs).lazy_init(X)


def counts(model):
    return {name: s.count.get_value() for name, s in model.to_nnx__rngs.items()}


def everything(nnx, model):
    """All Variables with their types and metadata."""
    return nnx.to_pure_dict(nnx.state(model)), {
        "/".join(map(str, path)): type(v).__name__
        for path, v in nnx.to_flat_state(nnx.state(model))
    }


def called(nnx):
    model = block(nnx)
    return everything(nnx, model), model(X), counts(model), everything(nnx, model)


def trained(nnx):
    results = []
    for mutable in ["batch_stats", "counts"], True:
        model = block(nnx)
        results += [model(X, train=True, mutable=mutable) for _ in range(2)]
        results.append(everything(nnx, model))
    return results


def initialized_twice(nnx):
    model = block(nnx)
    model.Dense_0["bias"][...] += 1.0
    model.lazy_init(X)
    return everything(nnx, model)


def not_mutable(nnx):
    model = block(nnx)
    return catch(model, X, train=True), counts(model), everything(nnx, model)


def not_initialized(nnx):
    model = nnx.bridge.ToNNX(Block(), nnx.Rngs(0))
    return catch(model, X), counts(model)


def without_streams_of_its_own(nnx):
    refused = catch(nnx.bridge.ToNNX(TwoMethods()).lazy_init, X)
    model = nnx.bridge.ToNNX(TwoMethods()).lazy_init(X, rngs=nnx.Rngs(3))
    return refused, model(X), everything(nnx, model)


def from_a_key(nnx):
    model = nnx.bridge.ToNNX(Block(), jax.random.key(5)).lazy_init(X)
    return model(X), everything(nnx, model)


STREAMS = [
    {"default": 0},
    {"params": 0},
    {"default": 0, "params": 1},
    {"params": 1, "dropout": 2},
    {"default": 0, "dropout": 2},
    {"default": 0, "params": 1, "dropout": 2, "carry": 3},
]


def keys_drawn(nnx):
    results = []
    for streams in STREAMS:
        for names in ("params",), ("params", "dropout"), ("dropout", "params"):
            rngs = nnx.Rngs(**streams)
            model = nnx.bridge.ToNNX(Keys(names), rngs).lazy_init()
            calls = [model(), model(), model(rngs=nnx.Rngs(9))]
            key = model(rngs=jax.random.key(4))
            results += [calls, key, everything(nnx, model), counts(model)]
            results += [s.count.get_value() for _, s in rngs.items()]
    return results


def methods(nnx):
    model = nnx.bridge.ToNNX(TwoMethods(), nnx.Rngs(0)).lazy_init(X)
    by_name = model(X, by=2.0, method="shifted"), model(X, method=TwoMethods.shifted)
    called = model.shifted(X), model.shifted(X, by=3.0), by_name, counts(model)
    refused = [catch(model, X, method=method) for method in ("nothing", 3)]
    return called, refused, catch(getattr, model, "nothing")


def boxes(nnx):
    with nnx.use_eager_sharding(False):
        model = nnx.bridge.ToNNX(Annotated(), nnx.Rngs(0)).lazy_init(X)
        out = model(X, mutable=["params"])
        specs = nnx.get_partition_spec(nnx.state(model, nnx.Param))
        return out, model.kernel, model.bias, specs["kernel"], specs["bias"]


def boxes_on_a_mesh(nnx):
    with on_devices("in", "out"):

        @nnx.jit
        def make():
            return nnx.bridge.ToNNX(Annotated(), nnx.Rngs(0)).lazy_init(X)

        model = make()
        return model(X), model.kernel, str(model.kernel.get_value().sharding.spec)


def unfilled(nnx, **streams):
    """A Module with two Linen Modules in it; a class for each library."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.bridge.ToNNX(Block(5), rngs)
            self.second = nnx.Linear(5, 2, rngs=rngs)
            self.third = nnx.bridge.ToNNX(nn.Dense(2), rngs)

        def __call__(self, x, **options):
            return self.third(self.second(self.first(x, **options)))

        def encode(self, x):
            return self.first(x)

    return Net(nnx.Rngs(0, **streams))


def filled(nnx, **streams):
    return nnx.bridge.lazy_init(unfilled(nnx, **streams), X)


def nested(nnx):
    model, same = filled(nnx), unfilled(nnx)
    encode = nnx.bridge.lazy_init(same.encode, X)
    return model(X), everything(nnx, model), encode(X), everything(nnx, same)


def under_jit(nnx):
    model = filled(nnx, dropout=1)

    @nnx.jit
    def step(model, x):
        return model(x, train=True, mutable=["batch_stats", "counts"])

    return [step(model, X) for _ in range(3)], everything(nnx, model)


def initialized_abstractly(nnx):
    abstract = nnx.eval_shape(lambda: filled(nnx))
    flat = nnx.to_flat_state(nnx.state(abstract, nnx.Not(nnx.RngState)))
    return {"/".join(p): str(v.get_value().shape) for p, v in flat}


def loss(model):
    return (model(X, train=True, mutable=["batch_stats", "counts"]) ** 2).mean()


def gradients(nnx):
    model = filled(nnx)

    value, grads = nnx.value_and_grad(loss)(model)
    return value, nnx.to_pure_dict(grads), everything(nnx, model)


def each(nnx, layers, x):
    return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None), out_axes=0)(layers, x)


def made_under_vmap(nnx):
    axes = nnx.StateAxes({nnx.RngState: 0, ...: None})

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(axes,), out_axes=0)
    def make(rngs):
        return nnx.bridge.ToNNX(nn.Dense(2), rngs).lazy_init(X)

    layers = make(nnx.Rngs(0))
    return each(nnx, layers, X), everything(nnx, layers)


def initialized_under_vmap(nnx):
    class Layers(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,))
            def make(rngs):
                return nnx.bridge.ToNNX(nn.Dense(2), rngs=rngs)

            self.layers = make(rngs)

        def __call__(self, x):
            return each(nnx, self.layers, x)

    model = nnx.bridge.lazy_init(Layers(nnx.Rngs(0)), X)
    return model(X), everything(nnx, model)


def steps_under_scan(nnx):
    model = filled(nnx)

    @nnx.scan(in_axes=(nnx.Carry, None), out_axes=(nnx.Carry, 0), length=3)
    def steps(model, x):
        return model, model(x, train=True, mutable=["batch_stats", "counts"])

    _, out = steps(model, X)
    return out, everything(nnx, model)


@linen
def Layer(self, x, _):
    return nn.Dense(x.shape[-1])(x), None


def linen_transforms(nnx):
    @linen
    def Stack(self, x):
        x = nn.remat(nn.Dense)(2)(mapped(nn.Dense)(5)(x))
        return scanned(Layer, 3)()(x, None)[0]

    model = nnx.bridge.ToNNX(Stack(), nnx.Rngs(0)).lazy_init(X)
    return model(X), everything(nnx, model)


def boxes_of_a_stack(nnx):
    @linen
    def Stack(self, x):
        names = {nn.PARTITION_NAME: "layers"}
        return mapped(Annotated, metadata_params=names)(name="many")(x)

    with nnx.use_eager_sharding(False):
        model = nnx.bridge.ToNNX(Stack(), nnx.Rngs(0)).lazy_init(X)
        return model(X), everything(nnx, model), model.many["kernel"]


def perturbed(nnx):
    @linen
    def Perturbed(self, x):
        return (self.perturb("p", nn.Dense(2)(x)) ** 2).sum()

    model = nnx.bridge.ToNNX(Perturbed(), nnx.Rngs(0)).lazy_init(X)
    grads = nnx.grad(lambda m: m(X), argnums=nnx.DiffState(0, nnx.Perturbation))(model)
    return everything(nnx, model), nnx.to_pure_dict(grads)


def older_names(nnx):
    model = nnx.bridge.ToNNX(nn.Dense(2), nnx.Rngs(0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same = model.module is model.to_nnx__module, model.rngs is model.to_nnx__rngs
    return same, [(w.category, str(w.message)) for w in caught]
