"""Forecasts what a step costs on hardware that you don't have.

    target = nnx.forecast.target("v5e:4x4")               # or "h100:8", "cpu:16"
    mesh = target.mesh({"fsdp": 8, "tensor": 2})
    model = nnx.merge(*nnx.get_abstract_model(make, mesh))  # no array is made
    print(nnx.forecast.step(train_step, model, batch))

The compiler of the target compiles the step, and the report says what each device
holds, computes and sends, what each module costs, and the least time it can take.
"""

# targets.py           devices to compile for; accelerators.py has their figures
# compiled_steps.py    from a step to its forecast, or why it doesn't compile
# placed_arguments.py  the arguments of a step, and the devices that they are on
# hlo.py               the text of a compiled program
# costs.py             operations and bytes: of instructions, and their sums
# traffic.py           what collectives send, along which axes
# undivided.py         large arrays that aren't divided
# scopes.py            the module that an operation is from
# forecasts.py         what it all comes to, as text; pictures.py draws it
# progress.py          what is being compiled, and for how long
# choices.py           the largest size that fits; forecasts side by side

from graftree import namespaces
from graftree.forecast.choices import (
    Comparison as Comparison,
    Largest as Largest,
    compare as compare,
    largest as largest,
)
from graftree.forecast.compiled_steps import step as step
from graftree.forecast.forecasts import (
    Activation as Activation,
    Costs as Costs,
    Forecast as Forecast,
    Memory as Memory,
    Work as Work,
)
from graftree.forecast.scopes import Scope as Scope
from graftree.forecast.targets import Target as Target, target as target
from graftree.forecast.traffic import Traffic as Traffic, collectives as collectives

__dir__ = namespaces.lister(__name__)
