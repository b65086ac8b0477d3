"""How objects get into a trace and back, the same way for every transform.

    outside.py                                     inside.py
    Call: pack   (args, kwargs) -> groups -> JAX -> Inside: unpack  fresh objects
                                                            run     the function
    commit       objects and output <- JAX <- result <----- leave   what changed

A call is a `Signature` (static: a treedef, and a GraphDef for each object) and a flat
list of leaves. A leaf is a `Slot` of its signature: entry, path, definition, name. JAX
sees groups of leaves only, one for each value of a `Prefix` (an axis, a sharding, a
role); signatures are static data of the pytree nodes that carry the groups, so they are
part of JAX's own cache key, and the static part of a result comes with a cached call.

- ``rows.py``: a transform as a row of a table, and the groups that its leaves are in;
  ``prefixes.py``: what the user says of that.
- ``outside.py``, ``inside.py``: the crossing; ``plans/``: the memo of a `Call`;
  ``traces/``: what a trace depended on.
- ``signatures.py``: what is static; ``packing.py``: the form in which leaves travel;
  ``parameters.py``: what the arguments are called in the function; ``guises.py``: what
  JAX says of a traced function is about the user's.
- ``arguments.py``, ``decorators.py``, ``axis_names.py``: static and donated arguments,
  forms of use, names of mapped axes.
- ``programs.py``: control flow outside of a trace: traced each time, compiled once.
- ``reports.py``: what is refused, or warned of; ``static_contents.py``: no tracer stays
  in a static attribute; ``ref_contents.py``: array refs where JAX takes none.

What always holds:

- Nothing outside is written before `commit` has checked everything; then nothing fails.
- A Variable whose value is the object that came in was not changed, is not returned and
  not written.
- What JAX traces closes over nothing but the user's function, except in `custom_vjp`
  and in control flow, which is traced on each call (see ``programs.py``).
"""
