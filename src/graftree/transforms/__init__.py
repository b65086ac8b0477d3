"""JAX transforms over objects.

    crossing/       objects into a trace and back: pack, unpack, collect, commit
    compiled/       jit, its stages, partials
    derivatives/    grad, vjp and jvp, custom_vjp
    control_flow/   scan, while and for loops, cond and switch
    mapped/         vmap, pmap, shard_map
    remat.py  checkify.py  shape_eval.py
    policies.py      what is kept for the backward pass: names of values, and of modules
    recordings.py    programs recorded to be looked at

A transform says what goes in and what comes out; all else is the crossing. Transforms
don't import each other.
"""
