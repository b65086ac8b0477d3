"""The picture of a session: what a terminal shows, run and then drawn by rich.

``python -m website session`` draws it, where the extra ``forecast-tpu`` is installed: a
forecast for a TPU is part of it. The file says which program it shows, so that a test
sees whether it is old.
"""

import contextlib
import io
import os
import pathlib
import re
from typing import Any
from xml.sax.saxutils import escape

from website import pages

PICTURE = pages.DOCS / "pictures" / "session.svg"

SETUP = """
import jax, jax.numpy as jnp, optax
import graftree as nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.encoder = nnx.Linear(784, 256, rngs=rngs)
        self.norm = nnx.LayerNorm(256, rngs=rngs)
        self.head = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.encoder(x))))

@nnx.jit
def train_step(net, optimizer, x):
    grads = nnx.grad(lambda net: jnp.mean(net(x) ** 2))(net)
    optimizer.update(net, grads)

def make():
    net = Net(nnx.Rngs(0))
    return net, nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)

def forecast(target, **sizes):
    mesh = nnx.forecast.target(target).mesh(sizes)
    net, optimizer = nnx.merge(*nnx.get_abstract_model(make, mesh))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.ShapeDtypeStruct((4096, 784), jnp.float32, sharding=rows)
    with jax.set_mesh(mesh):
        return nnx.forecast.step(train_step, net, optimizer, x)

(net, optimizer), x = make(), jnp.ones((32, 784))
"""

COMMANDS = (
    "print(nnx.tabulate(net, x))",
    "net(x[:, :28])",
    "train_step(net, optimizer, x)",
    "train_step(net, optimizer, x[:30])",
    "nnx.debugging.explain_recompile(train_step)",
    'forecast("v5e:1x1", data=1)',
)


def draw(path: pathlib.Path = PICTURE) -> int:
    """Runs the session and draws it; gives 0."""
    import rich.console
    import rich.syntax
    import rich.text

    os.environ["COLUMNS"] = "88"  # the width of the table
    namespace: dict[str, Any] = {}
    exec(SETUP, namespace)
    console = rich.console.Console(record=True, width=92, file=io.StringIO())
    for command in COMMANDS:
        code = rich.syntax.Syntax(command, "python").highlight(command)
        console.print(rich.text.Text(">>> ", "bold green") + code, end="")
        printed = printed_by(command, namespace)
        if printed:
            console.print(rich.text.Text.from_ansi(printed, no_wrap=True))
    drawing = console.export_svg(title="python")
    # No font from a server: a page should load without one.
    drawing = re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL)
    path.write_text(f"{drawing}{program()}\n")
    return 0


def program() -> str:
    """What the picture shows, as a comment in its file."""
    lines = "\n".join([SETUP, *COMMANDS])
    return f"<!-- {escape(lines)} -->"


def printed_by(command: str, namespace: dict[str, Any]) -> str:
    """What a command prints, with its value, or its error."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(command, "<session>", "single"), namespace)
        except Exception as error:
            module, *_ = error.__notes__  # a note of JAX's comes after it
            print(f"{type(error).__name__}: {error}", module, sep="\n")
    return out.getvalue()
