"""`vmap(state_axes=)` and `grad(wrt=)` are errors."""

from flax import nnx

for call in (
    lambda: nnx.vmap(lambda m: m, state_axes={...: 0}),
    lambda: nnx.scan(lambda m: m, variable_axes={nnx.Param: 0}),
    lambda: nnx.grad(lambda m: m, wrt=nnx.Param),
):
    try:
        call()
    except TypeError as error:
        print("unexpected keyword" in str(error))
for name in ("Vmap", "Scan", "Remat", "GraphNode"):
    print(name, hasattr(nnx, name))
