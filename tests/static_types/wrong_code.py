"""Programs that type checkers have to refuse; pyright and mypy read this, nothing runs.

Each wrong line says which errors it is. One that a checker takes for right has an
unused comment, and that fails: `reportUnnecessaryTypeIgnoreComment` of pyright,
`warn_unused_ignores` of mypy.
"""

# pyright: basic
# pyright: reportUnnecessaryTypeIgnoreComment=error

import jax
import optax

import graftree as nnx


class Net(nnx.Module):
    def __init__(self, features: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(features, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def constructors(model: Net, rngs: nnx.Rngs) -> None:
    nnx.Linear(3, 4)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    nnx.Linear(3, "4", rngs=rngs)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nnx.Linear(3, 4, bias=False, rngs=rngs)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Net(3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Net("3", rngs=rngs)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nnx.Optimizer(model, optax.adam(1e-3), rngs=rngs)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def attributes(model: Net) -> None:
    print(model.lineer)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    print(model.linear.kernl)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def assignments(model: Net) -> None:
    model.lineer = model.linear  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    model.linear = 3  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]


def calls(model: Net, x: jax.Array) -> None:
    model(x, x)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    model("x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    model(x).shap  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def filters(model: Net) -> None:
    nnx.split(model, 3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]


def transforms(model: Net, x: jax.Array) -> None:
    def loss(model: Net, x: jax.Array) -> jax.Array:
        return model(x)

    nnx.jit(loss)(model)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    nnx.grad(loss)(x, x)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nnx.value_and_grad(loss)(model)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    nnx.vmap(loss)(model, "x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nnx.vmap(in_axes=0)(loss)(model)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    nnx.vmap(loss, in_axs=0)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    nnx.remat(loss)(model)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    nnx.scan(loss, lenght=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    nnx.cond(True, loss, loss, model, x).shap  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


@nnx.dataclass
class Fields(nnx.Pytree):
    array: jax.Array
    size: int = nnx.static(default=1)


def fields(x: jax.Array) -> None:
    Fields()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Fields(x, "1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def containers(layer: nnx.Linear) -> None:
    nnx.List([layer])[0].kernl  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    nnx.Dict(a=layer).a.kernl  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    layer.bias[...]  # type: ignore[index]  # pyright: ignore[reportOptionalSubscript]


def names() -> None:
    nnx.Liner  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    nnx.variablib  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
