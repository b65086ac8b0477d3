"""Programs with bridge Modules: Modules in the style of Linen."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp

from tests.interop.bridge.comparing import catch
from tests.interop.bridge.modules import X, compact, dense, mlp
from tests.interop.bridge.programs_to_nnx import Block


def both(nnx, cls, *args, rngs=0, inputs=X, **options):
    """What init and apply give."""
    model = cls(*args)
    v = model.init(rngs, inputs)
    outputs = [model.apply(v, inputs, **options)]
    outputs += [model.apply(v, inputs, mutable=True, **options)]
    return v, model.init_with_output(rngs, inputs), outputs


def dataclasses(nnx):
    Dense = dense(nnx)
    one, same, other = Dense(2), Dense(2, True), Dense(3)
    results = [one == same, one == other, hash(one) == hash(same), same.use_bias]
    results += [str(inspect.signature(Dense.__init__)), len(jax.tree.leaves(one))]
    wrong = {"features": 2, "wrong": 3}, {}, {"features": 2, "name": "x"}
    errors = [catch(Dense, **arguments) for arguments in wrong]
    return results, errors, one.scope, one.attr_priorities


def simple(nnx):
    return both(nnx, dense(nnx), 4), both(nnx, mlp(nnx))


def forms_of_rngs(nnx):
    Dense = dense(nnx)
    key = jax.random.key(3)
    rngs = nnx.Rngs(3)
    forms = [3, key, {"params": key}, {"params": 3}, rngs, nnx.Rngs(params=3), rngs]
    forms += [jax.random.PRNGKey(3)]
    results = [Dense(2).init(form, X) for form in forms]
    errors = [catch(Dense(2).init, form, X) for form in (None, {"dropout": key})]
    return results, errors, rngs.default.count.get_value()


def with_setup(nnx):
    Dense = dense(nnx)

    class Net(nnx.bridge.Module):
        size: int = 3

        def setup(self):
            self.first = Dense(self.size)
            self.second = Dense(2)
            self.scale = self.param("scale", nn.initializers.normal(), (2,))

        def __call__(self, x):
            return self.second(self.first(x)) * self.scale

        def encode(self, x):
            return self.first(x)

    model = Net()
    v = model.init(0, X)
    ways = ["encode", Net.encode, model.encode, lambda self, x: self.second(x)]
    results = [model.apply(v, X, method=method) for method in ways]
    return both(nnx, Net), results, model.init(0, X, method="encode")


def bad_methods(nnx):
    methods = "use_bias", "nothing", 3
    return [catch(dense(nnx)(2).apply, {}, X, method=method) for method in methods]


def names(nnx):
    Dense, MLP = dense(nnx), mlp(nnx)

    @compact(nnx)
    def Net(self, x):
        first = Dense(3, name="x")
        self.kept, self.other = Dense(3), Dense(3, name="zz")
        free = Dense(3, parent=None)
        self.free = free
        mlp = MLP(4)
        x = self.other(self.kept(first(x)))
        return free(x), mlp(x), Dense(3)(x)

    return both(nnx, Net)


def names_in_setup(nnx):
    Dense = dense(nnx)

    class Net(nnx.bridge.Module):
        def setup(self):
            self.a = Dense(3, name="named")
            self.b = self.a
            self.d = Dense(2)
            self.c = self.d

        @nnx.bridge.compact
        def __call__(self, x):
            return Dense(4)(self.c(self.b(x)))

    return both(nnx, Net)


def bad_names(nnx):
    Dense, MLP = dense(nnx), mlp(nnx)
    errors = []
    for options in {"name": 3}, {"parent": MLP()}:

        @compact(nnx)
        def Net(self, x, options=options):
            return Dense(3, **options)(x)

        error = catch(Net().init, 0, X)
        errors += [error, str(error).splitlines()[0]]
    return errors


def modules_in_fields(nnx):
    Dense = dense(nnx)

    class One(nnx.bridge.Module):
        inner: nnx.bridge.Module

        def setup(self):
            self.outer = self.inner

        def __call__(self, x):
            return self.outer(x)

    class Many(nnx.bridge.Module):
        layers: list

        @nnx.bridge.compact
        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return Dense(1)(x)

    layers = [Dense(2), Dense(3)]
    return both(nnx, One, Dense(3)), both(nnx, Many, layers)


def other_fields(nnx):
    Dense = dense(nnx)

    class Net(nnx.bridge.Module):
        sizes: list
        options: dict
        f: object

        @nnx.bridge.compact
        def __call__(self, x):
            for size in self.sizes:
                x = self.f(Dense(size)(x))
            return x * self.options["scale"]

    return both(nnx, Net, [3, 2], {"scale": 2.0}, jnp.sin)


def containers(nnx):
    Dense = dense(nnx)

    class Net(nnx.bridge.Module):
        def setup(self):
            self.pair = (Dense(2), Dense(2))
            self.named = {"x": [Dense(2)], "y": Dense(2)}
            self.layers = [Dense(2), Dense(2)]

        def __call__(self, x):
            for layer in (*self.pair, *self.named["x"], *self.layers):
                x = layer(x)
            return self.named["y"](x)

    return both(nnx, Net)


def list_in_compact(nnx):
    Dense = dense(nnx)

    @compact(nnx)
    def Net(self, x):
        self.layers = [Dense(2) for _ in range(2)]
        for layer in self.layers:
            x = layer(x)
        return x

    return both(nnx, Net)


def inherited(nnx):
    Dense = dense(nnx)

    class Bigger(Dense):
        factor: float = 2.0

        @nnx.bridge.compact
        def __call__(self, x):
            return self.factor * super().__call__(x)

    class Own(nnx.bridge.Module):
        def __init__(self, features):
            self.features = features

        @nnx.bridge.compact
        def __call__(self, x):
            return Dense(self.features)(x)

    return both(nnx, Bigger, 3), both(nnx, Own, 3)


def variables_used(nnx):
    @compact(nnx)
    def Net(self, x):
        first = self.param("a", nn.initializers.normal(), (2,))
        again = self.param("a", nn.initializers.normal(), (2,))

        def ones(shape, scale):
            return scale * jnp.ones(shape)

        other = self.variable("readings", "r", ones, (2,), scale=3.0)
        other[...] += 1
        return first is again, first[...], other[...], type(other), type(first)

    v = Net().init(0, X)
    return v, Net().apply(v, X), Net().apply(v, X, mutable=["readings"])


def without_init_fn(nnx):
    @compact(nnx)
    def Net(self, x):
        return self.variable("cache", "a", None)[...]

    return catch(Net().init, 0, X), Net().apply({"cache": {"a": X}}, X)


def seen_from_inside(nnx):
    Dense = dense(nnx)
    log = []

    class Net(nnx.bridge.Module):
        @nnx.bridge.compact
        def __call__(self, x):
            bridge = nnx.bridge
            in_it = bridge.current_module() is self, bridge.current_context().in_compact
            log.append((self.is_initializing(), self.variables, self.scope.mutable))
            log.append((in_it, [self.make_rng(n) for n in ("default", "a", "params")]))
            return Dense(2)(x)

        def other(self, x):
            return nnx.bridge.current_context().in_compact

    v = Net().init(0, X)
    Net().apply(v, X, rngs=3)
    Net().apply(v, X, rngs={"default": 1, "a": 2}, mutable=["params"])
    log.append(Net().apply(v, X, method="other"))
    return log, nnx.bridge.current_module(), nnx.bridge.current_context()


def unbound(nnx):
    model = dense(nnx)(2)
    uses = [
        lambda: model(X),
        lambda: model.param("a", nn.initializers.ones, (2,)),
        lambda: model.variable("cache", "a", lambda: 1),
        lambda: model.make_rng(),
    ]
    errors = [*map(catch, uses)]
    said = ["must be initialized in" in str(error) for error in errors]
    return errors, said, model.variables, model.is_initializing()


def outside_compact(nnx):
    Dense = dense(nnx)

    class Net(nnx.bridge.Module):
        def __call__(self, x):
            return Dense(3)(x)

    class Named(nnx.bridge.Module):
        def __call__(self, x):
            return Dense(3, name="named")(x), self.param("a", nn.initializers.ones, ())

    error = catch(Net().init, 0, X)
    return error, "must be initialized in" in str(error), both(nnx, Named)


def priorities(nnx):
    Dense = dense(nnx)
    results = [(p.name, int(p)) for p in nnx.bridge.AttrPriority]
    for name, level in ("z", "HIGH"), ("a", "LOW"), ("b", "HIGH"):
        priority = nnx.bridge.AttrPriority[level]

        class Net(nnx.bridge.Module):
            def setup(self, name=name, priority=priority):
                self.z = Dense(2)
                self.a = self.b = self.z
                self.set_attr_priority(name, priority)

            def __call__(self, x):
                return self.b(x)

        results.append(both(nnx, Net))

    @compact(nnx)
    def Compact(self, x):
        self.a = Dense(2)
        self.set_attr_priority("a", nnx.bridge.AttrPriority.HIGH)
        return self.a(x)

    return results, both(nnx, Compact)


def order_of_setup(nnx):
    log = []

    class Leaf(nnx.bridge.Module):
        name_of: str

        def setup(self):
            log.append(f"setup {self.name_of}")
            self.w = self.param("w", nn.initializers.normal(), (3,))

        def __call__(self, x):
            return x * self.w

    class Net(nnx.bridge.Module):
        def setup(self):
            log.append("setup")
            self.a = Leaf("a")
            self.b = Leaf("b")
            log.append("end")

        @nnx.bridge.compact
        def __call__(self, x):
            log.append("call")
            c = Leaf("c")
            log.append("made")
            return self.a(self.b(c(x))) + self.a.w

    return both(nnx, Net), log


def nnx_in_it(nnx):
    class Layer(nnx.Module):
        def __init__(self, features, *, rngs):
            self.w = nnx.Param(rngs.params.normal((3, features)))
            self.count = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            self.count[...] += 1
            return x @ self.w

    def make(rngs):
        return Layer(3, rngs=rngs)

    @compact(nnx)
    def Compact(self, x):
        first = nnx.bridge.nnx_in_bridge_mdl(make)
        second = nnx.bridge.nnx_in_bridge_mdl(make, "named")
        return second(first(x)) + nnx.bridge.nnx_in_bridge_mdl(make)(x)

    class Setup(nnx.bridge.Module):
        def setup(self):
            self.a = nnx.bridge.nnx_in_bridge_mdl(make)
            self.b = nnx.bridge.nnx_in_bridge_mdl(make, name="named")

        def __call__(self, x):
            return self.a(self.b(x))

    return both(nnx, Compact), both(nnx, Compact, rngs={"params": 7}), both(nnx, Setup)


def nnx_in_it_draws(nnx):
    def make(rngs):
        linear = nnx.Linear(3, 8, rngs=rngs)
        return nnx.Sequential(linear, nnx.Dropout(0.5, rngs=rngs))

    @compact(nnx)
    def Net(self, x):
        return nnx.bridge.nnx_in_bridge_mdl(make)(x), self.make_rng("dropout")

    v = Net().init({"params": 7, "dropout": 8}, X)
    return v, [Net().apply(v, X, rngs=seed) for seed in (9, 10)]


def linen_in_it(nnx):
    @compact(nnx)
    def Compact(self, x, train=False):
        block = nnx.bridge.linen_in_bridge_mdl(Block())
        other = nnx.bridge.linen_in_bridge_mdl(nn.Dense(4), name="named")
        return block(x, train) + other(x), nnx.bridge.linen_in_bridge_mdl(Block())(x)

    class Setup(nnx.bridge.Module):
        def setup(self):
            self.a = nnx.bridge.linen_in_bridge_mdl(nn.Dense(4))

        def __call__(self, x):
            return self.a(x)

    v = Compact().init({"params": 1, "dropout": 2}, X)
    options = {"train": True, "rngs": {"dropout": 3}}
    mutable = [["batch_stats"], ["batch_stats", "intermediates"], True]
    trained = [Compact().apply(v, X, mutable=m, **options) for m in mutable]
    refused = catch(Compact().apply, v, X, **options)
    return both(nnx, Compact), trained, refused, both(nnx, Setup)


def raw_modules_in_it(nnx):
    class Net(nnx.bridge.Module):
        def setup(self):
            self.lin = nnx.Linear(3, 5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.lin(x)

    params = {"lin": {"kernel": jnp.zeros((3, 5)), "bias": jnp.ones(5)}}
    return Net().init(0, X), Net().apply({"params": params}, X)


def under_transforms(nnx):
    model = mlp(nnx)()
    v = jax.jit(model.init)(jax.random.key(0), X)
    out = jax.jit(lambda v: model.apply(v, X, mutable=["counts"]))(v)

    def loss(params):
        return (model.apply({**v, "params": params}, X) ** 2).sum()

    abstract = jax.eval_shape(model.init, jax.random.key(0), X)
    keys = jax.random.split(jax.random.key(0))
    many = jax.vmap(model.init, in_axes=(0, None))(keys, X)
    return v, out, jax.grad(loss)(v["params"]), str(jax.tree.leaves(abstract)), many


def boxes(nnx):
    @compact(nnx)
    def Net(self, x):
        ones = nn.initializers.ones
        linen_box = nn.with_partitioning(ones, ("x", "y"))
        bridge_box = nnx.bridge.with_partitioning(ones, ("x", None))
        self.param("a", linen_box, (2, 3))
        self.param("b", linen_box, (2, 3), unbox=False)
        self.param("c", bridge_box, (2, 3))
        return x

    with nnx.use_eager_sharding(False):
        return both(nnx, Net)


def functional(nnx):
    made = nnx.bridge.functional(nnx.Linear)(3, 4, use_bias=True)
    state = made.init(rngs=nnx.Rngs(0))
    out, (_, new) = made.apply(state)(X)
    fields = made.module_type, made.args, made.kwargs
    return nnx.to_pure_dict(state), out, nnx.to_pure_dict(new), fields
