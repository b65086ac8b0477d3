"""JAX transforms over objects.

    lifting/        objects into a trace and back: pack, unpack, collect, commit
    compiled/       jit, its stages, partials
    derivatives/    grad, remat, vjp and jvp, custom_vjp
    control_flow/   scan, while and for loops, cond and switch
    maps.py         vmap, pmap, shard_map
    recordings.py   eval_shape, make_jaxpr, checkify; programs for tools that read them

A transform defines its inputs and outputs; `lifting` does the rest. Transforms don't
import each other.
"""
