"""The peers grid: functions without Params."""

import jax

from tests.nn.peer_cases import (
    Case,
    each,
    grid,
    integers,
    real,
    with_call,
    with_inputs,
)


def pooling():
    for name in ("avg_pool", "max_pool", "min_pool"):
        base = Case(name, inputs=(real(2, 5, 4, 3),), call={"window_shape": (2, 3)})
        yield from with_call(
            base,
            grid(padding=("SAME", "VALID", ((0, 1), (2, 1))), strides=(None, (2, 1))),
        )
        dtypes = ("bfloat16", "float16")
        yield from with_inputs(base, *(real(2, 5, 4, 3, dtype=d) for d in dtypes))
        yield from with_inputs(base, real(5, 4, 3), real(2, 1, 5, 4, 3))
        line = base.but(inputs=(real(2, 5, 3),), call={"window_shape": (2,)})
        yield from with_call(line, each(padding=("SAME", ((1, 1),))))
        yield base.but(
            inputs=(real(2, 1, 5, 4, 3),),
            call={"padding": ((0, 1), (2, 1))},
            why_different="explicit padding knows one batch axis only",
        )
    yield Case(
        "max_pool", inputs=(integers(2, 5, 4, 3),), call={"window_shape": (2, 3)}
    )
    average = Case(
        "avg_pool",
        inputs=(real(2, 5, 4, 3),),
        call={"window_shape": (2, 3), "count_include_pad": False},
    )
    yield from with_call(average, each(padding=("SAME", "VALID", ((0, 1), (2, 1)))))
    yield average.but(inputs=(integers(2, 5, 4, 3),))
    yield average.but(
        inputs=(real(2, 5, 4, 3, dtype="bfloat16"),), why_different="upcast to float32"
    )
    general = {"window_shape": (2, 3), "strides": (1, 1), "padding": "VALID"}
    for options in (
        {"init": 1.0, "reduce_fn": jax.lax.mul},
        {"init": 0.0, "reduce_fn": jax.lax.add},
    ):
        yield Case("pool", inputs=average.inputs, call={**options, **general})


TABLES = {
    "pooling": pooling,
}
