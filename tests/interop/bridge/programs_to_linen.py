"""Programs with Modules in Linen Modules."""

import functools
import warnings

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.interop.bridge.comparing import catch
from tests.interop.bridge.modules import KEY, X, linen, mapped, net, on_devices, scanned

KEYS = {"params": KEY, "dropout": jax.random.key(1)}


def run(model, *args, keys=KEY, **options):
    """What init gives, and apply, with options, too."""
    v = model.init(keys, *args)
    return v, model.apply(v, *args), model.apply(v, *args, **options)


def simple(nnx, *args, **kwargs):
    return nnx.bridge.to_linen(net(nnx), *args, **kwargs)


def applied(nnx):
    model = simple(nnx, 3, 4)
    v = model.init(KEYS, X)
    mutable = ["Variable"], True, "params", ["intermediates"]
    mutable = *mutable, flax.core.DenyList(["params"])
    outputs = model.apply(v, X), model.apply(flax.core.freeze(v), X)
    changed = [model.apply(v, X, mutable=x) for x in mutable]
    return v, model.init_with_output(KEYS, X), outputs, changed


def trained(nnx):
    model = simple(nnx, 3, 4, rate=0.25)
    v = model.init(KEYS, X)
    rngs = {"dropout": jax.random.key(3)}
    return [
        model.apply(v, X, train=True, mutable=["batch_stats"], rngs=rngs),
        model.apply(v, X, train=True, mutable=["batch_stats", "Variable"], rngs=KEYS),
        model.apply(v, X, train=True, mutable=["batch_stats"]),
        model.apply(v, X, train=True, rngs=rngs),
    ]


def methods(nnx):
    model = simple(nnx, 3, 4)
    v = model.init(KEYS, X)
    return [
        model.apply(v, X, nnx_method="project"),
        model.apply(v, X, nnx_method=net(nnx).project, times=2),
        model.bind(v)(X),
        model.bind(v).project(X, times=3),
    ]


def bad_methods(nnx):
    model = simple(nnx, 3, 4)
    v = model.init(KEYS, X)
    errors = [catch(model.apply, v, X, nnx_method=x) for x in ("nothing", 3)]
    return [*errors, catch(getattr, model, "nothing"), catch(model, X)]


def as_submodule(nnx):
    class Setup(nn.Module):
        def setup(self):
            self.net = nnx.bridge.to_linen(net(nnx), 3, 4)

        def __call__(self, x):
            return self.net.project(x) + self.net(x)

    @linen
    def Compact(self, x):
        first = nnx.bridge.to_linen(net(nnx), 3, 4, name="first")
        linear = nnx.bridge.to_linen(nnx.Linear, 4, 2)
        return linear(first(x) + first.project(x, times=2)), nn.Dense(2)(x)

    return [run(cls(), X, keys=KEYS, mutable=["Variable"]) for cls in (Setup, Compact)]


def called_twice(nnx):
    class Counter(nnx.Module):
        def __init__(self, rngs):
            self.c = nnx.BatchStat(jnp.zeros(()))

        def __call__(self):
            self.c[...] += 1
            return self.c[...]

    @linen
    def Twice(self):
        counter = nnx.bridge.to_linen(Counter)
        return counter(), counter(), counter()

    return Twice().init_with_output(KEY), run(Twice(), mutable=["batch_stats"])


def ways_of_making(nnx):
    bridge = nnx.bridge
    models = [
        bridge.ToLinen(nnx.Linear, args=(3, 4)),
        bridge.ToLinen(nnx.Linear, (3,), {"out_features": 4, "use_bias": False}),
        bridge.ToLinen(nnx.Linear, (3, 4), {"rngs": nnx.Rngs(9)}),
        bridge.to_linen(functools.partial(nnx.Linear, 3), 4),
        bridge.to_linen(lambda rngs: nnx.Linear(3, 4, rngs=rngs)),
        bridge.to_linen(nnx.Linear, 3, 4, abstract_init=False),
        bridge.to_linen(nnx.Linear, 3, 4, metadata_fn=None, name="named"),
    ]
    return [(m.init(KEY, X), m.name, m.skip_rng, len(m.args)) for m in models]


def equality(nnx):
    cls = net(nnx)
    models = [nnx.bridge.to_linen(cls, 3, 4, rate=rate) for rate in (0.1, 0.1, 0.2)]
    hashes = [hash(m) for m in models]
    pairs = [(0, 1), (0, 2)]
    return [(models[i] == models[j], hashes[i] == hashes[j]) for i, j in pairs]


def without_rngs(nnx):
    class Scale(nnx.Module):
        def __init__(self, size):
            self.scale = nnx.Param(jnp.ones(size))

        def __call__(self, x):
            return x * self.scale

    model = nnx.bridge.to_linen(Scale, 3, skip_rng=True)
    refused = catch(nnx.bridge.to_linen(Scale, 3).init, KEY, X)
    return model.init({}, X), model.init(KEY, X), refused


def keys_drawn(nnx):
    class Keys(nnx.Module):
        def __init__(self, rngs):
            keys = {name: jax.random.key_data(rngs[name]()) for name in rngs}
            self.keys = nnx.data({n: nnx.Variable(k) for n, k in keys.items()})
            self.rngs = rngs

        def __call__(self):
            data = {n: jax.random.key_data(self.rngs[n]()) for n in self.rngs}
            return data, jax.random.key_data(self.rngs["params"]())

    @linen
    def Several(self):
        model = nnx.bridge.to_linen(Keys)
        return model(), model(), nnx.bridge.to_linen(Keys)()

    results = []
    for cls in functools.partial(nnx.bridge.to_linen, Keys), Several:
        for keys in KEY, KEYS, {"params": KEY}, {"default": KEY}:
            v = cls().init(keys)
            results += [cls().init_with_output(keys), cls().apply(v, rngs=keys)]
    return results


def kwargs_given(nnx):
    class Net(nnx.Module):
        def __init__(self, sizes, rngs):
            self.kind = type(sizes).__name__
            self.w = nnx.Param(jnp.ones(sizes["n"]))

        def __call__(self):
            return self.kind, self.w[...]

    return nnx.bridge.to_linen(Net, sizes={"n": 3}).init_with_output(KEY)


def containers_and_sharing(nnx):
    class Net(nnx.Module):
        def __init__(self, rngs):
            def make():
                return nnx.Linear(3, 3, rngs=rngs)

            self.layers = nnx.List([make(), make()])
            self.named = nnx.Dict(a=make())
            self.same = self.named["a"]
            self.scale = nnx.Param(jnp.ones(3))
            self.also = self.scale

        def __call__(self, x):
            self.same.bias[...] += 1.0
            for layer in self.layers:
                x = layer(x)
            return self.named["a"](x) * self.also + self.scale

    return run(nnx.bridge.to_linen(Net), X, mutable=True)


def linen_in_it(nnx):
    class Inner(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.bridge.ToNNX(nn.Dense(4), rngs).lazy_init(jnp.ones((1, 3)))
            norm = nnx.bridge.ToNNX(nn.BatchNorm(use_running_average=False), rngs)
            self.norm = norm.lazy_init(jnp.ones((1, 4)))

        def __call__(self, x):
            return self.norm(self.dense(x))

    @linen
    def Outer(self, x):
        return nn.Dense(2)(nnx.bridge.to_linen(Inner)(x)), nn.Dense(2)(x)

    class Outermost(nnx.Module):
        def __init__(self, rngs):
            self.outer = nnx.bridge.ToNNX(Outer(), rngs)

        def __call__(self, x, **options):
            return self.outer(x, **options)

    results = []
    for model in nnx.bridge.to_linen(Inner), Outer():
        v = model.init(KEY, X)
        results += [v, model.apply(v, X, mutable=["batch_stats"])]
    model = nnx.bridge.lazy_init(Outermost(nnx.Rngs(0)), X)
    out = [model(X, mutable=["batch_stats"]) for _ in range(2)]
    return results, out, nnx.to_pure_dict(nnx.state(model))


def mutable_of_the_context(nnx):
    @linen
    def Count(self, x):
        count = self.variable("batch_stats", "m", lambda: jnp.zeros(()))
        if self.is_mutable_collection("batch_stats"):
            count.value += 1
        return x

    class Inner(nnx.Module):
        def __init__(self, rngs):
            self.count = nnx.bridge.ToNNX(Count(), rngs).lazy_init(X)

        def __call__(self, x):
            return self.count(x)

    @linen
    def Outer(self, x):
        return nnx.bridge.to_linen(Inner)(x)

    mutable = ["batch_stats"], ["params"]
    models = nnx.bridge.to_linen(Inner), Outer()
    return [run(model, X, mutable=m) for model in models for m in mutable]


def unknown_variables(nnx):
    model = simple(nnx, 3, 4)
    v = model.init(KEYS, X)
    unknown = [
        ("params", {"lin": {**v["params"]["lin"], "extra": X}}),
        ("zoo", {"lin": {"extra": X}}),
        ("zoo", {"extra": X}),
    ]
    messages = []
    for col, tree in unknown:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = model.apply({**v, col: {**v.get(col, {}), **tree}}, X)
        messages.append((out, [(w.category, str(w.message)) for w in caught]))
    return messages


def annotated(nnx):
    class Net(nnx.Module):
        def __init__(self, rngs):
            ones = jnp.ones((2, 3))
            self.w = nnx.Param(ones, out_sharding=("a", "b"))
            self.x = nnx.BatchStat(jnp.ones(3), tag="one")
            box = {"linen_meta_type": nn.Partitioned}
            self.y = nnx.Param(ones, out_sharding=("a", "b"), **box)
            init = nnx.bridge.with_partitioning(nnx.initializers.ones, ("a", None))
            self.z = nnx.Param(init(rngs.params(), (2, 3)))
            self.plain = nnx.Param(jnp.ones(3))

        def __call__(self):
            self.x[...] += 1
            metadata = [v.get_metadata() for v in (self.w, self.x, self.y, self.z)]
            return str([{k: m[k] for k in m if k != "mutable"} for m in metadata])

    results = []
    with nnx.use_eager_sharding(False):
        model = nnx.bridge.to_linen(Net)
        out, v = model.init_with_output(KEY)
        results += [v, nn.get_partition_spec(v), model.apply(v, mutable=True)[1]]
        results += [model.apply(nn.unbox(v), mutable=True)[1], nn.unbox(v)]
        results += [nnx.bridge.to_linen(Net, metadata_fn=None).init(KEY)]

        def pair(v):
            return ("pair", v.get_value())

        results += [nnx.bridge.to_linen(Net, metadata_fn=pair).init(KEY)]
    return results


def custom_types(nnx):
    class Special(nnx.Param):
        pass

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Param(rngs.params.normal((3,)))
            self.b = Special(rngs.params.normal((3,)))
            self.c = nnx.Cache(jnp.zeros(3))

        def __call__(self, x):
            self.c[...] += 1
            self.b[...] += 1
            return x * self.a + self.b

    return run(nnx.bridge.to_linen(Net), X, mutable=["Special", "cache"])


def partial_classes(nnx):
    make = nnx.bridge.wrappers.to_linen_class
    Linear = make(nnx.Linear, out_features=4, use_bias=False)

    class Sub(Linear):
        def twice(self, x):
            return 2 * self(x)

    @linen
    def Outer(self, x):
        return Sub(in_features=3)(x), Sub(in_features=3, name="named").twice(x)

    model = Sub(in_features=3)
    v = model.init(KEY, X, method="twice")
    outer = Outer().init(KEY, X)
    fields = model.nnx_class, model.args, dict(model.kwargs), model.skip_rng
    other = Sub(in_features=3, use_bias=True).init(KEY, X)
    names = [cls.__name__ for cls in Sub.__mro__]
    return v, model.apply(v, X), outer, Outer().apply(outer, X), fields, other, names


def under_transforms(nnx):
    model = simple(nnx, 3, 4)
    v = jax.jit(model.init)(KEYS, X)

    @jax.jit
    def step(v, key):
        options = {"train": True, "mutable": ["batch_stats", "Variable"]}
        return model.apply(v, X, rngs={"dropout": key}, **options)

    def loss(params):
        return (model.apply({**v, "params": params}, X) ** 2).mean()

    out, updates = step(v, KEY)
    steps = out, updates, step({**v, **updates}, KEY)
    abstract = str(jax.eval_shape(model.init, KEYS, X))
    return v, steps, jax.value_and_grad(loss)(v["params"]), abstract


def linen_vmap(nnx):
    @linen
    def Stack(self, x, train=False):
        return mapped(nnx.bridge.ToLinen)(net(nnx), args=(3, 4))(x)

    return run(Stack(), X, keys=KEYS, mutable=["batch_stats", "Variable"], rngs=KEYS)


def linen_scan(nnx):
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.lin = nnx.Linear(3, 3, rngs=rngs)
            self.seen = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x, _):
            self.seen[...] += 1
            return nnx.relu(self.lin(x)), x.sum()

    @linen
    def Stack(self, x):
        return scanned(nnx.bridge.ToLinen, 4)(Layer)(x, None)

    return run(Stack(), X, mutable=["batch_stats"])


def linen_scan_over_steps(nnx):
    class Cell(nnx.Module):
        def __init__(self, rngs):
            self.lin = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, carry, x):
            carry = nnx.tanh(self.lin(carry) + x)
            return carry, carry.sum()

    @linen
    def Steps(self, x):
        keys = {"params": False}
        scan = nn.scan(nnx.bridge.ToLinen, variable_broadcast="params", split_rngs=keys)
        return scan(Cell)(jnp.zeros(3), x)

    return run(Steps(), X)


def linen_remat(nnx):
    @linen
    def Net(self, x):
        return nn.remat(nnx.bridge.ToLinen)(nnx.Linear, args=(3, 4))(x)

    v = Net().init(KEY, X)

    def loss(v):
        return (Net().apply(v, X) ** 2).sum()

    return v, jax.grad(loss)(v)


def linen_vmap_of_boxes(nnx):
    class Annotated(nnx.Module):
        def __init__(self, rngs):
            box = {"linen_meta_type": nn.Partitioned}
            w = rngs.params.normal((3, 4))
            self.w = nnx.Param(w, out_sharding=("in", "out"), **box)

        def __call__(self, x):
            return x @ self.w

    @linen
    def Stack(self, x):
        names = {nn.PARTITION_NAME: "layers"}
        return mapped(nnx.bridge.ToLinen, 2, metadata_params=names)(Annotated)(x)

    with nnx.use_eager_sharding(False):
        v = Stack().init(KEY, X)
        return v, nn.get_partition_spec(v), Stack().apply(v, X)


def on_a_mesh(nnx):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "a"))
    with on_devices("a"):
        model = nnx.bridge.to_linen(nnx.Linear, 3, 4, kernel_init=init)
        v = jax.jit(model.init)(KEY, X)
        spec = v["params"]["kernel"].value.sharding.spec
        return v, str(spec), jax.jit(model.apply)(v, X)
