"""Takes objects into a trace and back, in the same way for every transform.

    caller.py                                      traced.py
    Call: pack   arguments -> Leaves -> JAX -> TracedCall: unpack   fresh objects
                                                           run      the function
    commit       objects, output <- JAX <- Result <------- collect  what changed

A call is a `Signature` (static: the skeleton of its arguments) and a flat list of
leaves. Each is described by a `LeafSpec` of the signature: entry, path, definition,
name. JAX sees only groups of leaves, one for each value of a `Prefix` (an axis, a
sharding, a role); signatures are static data of the pytree nodes that carry the groups,
so they are part of JAX's own cache key, and the static part of a result comes with a
cached call.

A function that holds objects is taken apart like an argument
(``core/objects/callables.py``), and comes third in the tree of a call.

- ``specs.py``: what a transform is; ``prefixes.py``: the groups that its leaves are in,
  and the user's choice of them.
- ``caller.py``, ``traced.py``: the two sides of a call.
- ``signatures.py``: the static part; ``argument_trees.py``: trees taken apart, and
  built again; ``leaves.py``: the form in which leaves travel.
- ``debug_info.py``: JAX's messages about a traced function name the user's.
- ``jaxprs.py``: programs as JAX records them, read and put together again.
- ``decorators.py``: forms of use; static and donated arguments.
- ``argument_errors.py``: errors and warnings.
- ``tracer_leaks.py``: no tracer stays in a static attribute, no array ref comes where
  JAX takes none.

Two rooms are for speed, and nothing but time depends on them (``config.caches``):

- ``dispatch.py``: what a call knows of earlier ones with the same objects.
- ``programs.py``: control flow outside of a trace: traced each time, compiled once.

Invariants:

- Nothing outside is written before `commit` has checked everything; then nothing fails.
- A Variable whose value is still the object that came in was not changed, is not
  returned and not written.
- A function that JAX traces closes over nothing but the user's function, except in
  `custom_vjp` and in control flow, which is traced on each call (see ``programs.py``).
"""
