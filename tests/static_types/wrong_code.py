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


def calls(model: Net, x: jax.Array) -> None:
    model(x, x)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    model("x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    model(x).shap  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def filters(model: Net) -> None:
    nnx.split(model, 3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
