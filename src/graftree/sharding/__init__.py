"""Makes and trains models on many devices.

    model, optimizer = nnx.sharding.init(make, mesh, rules)   # each device its own part
    print(nnx.sharding.report(model))                         # the bytes of each device
    x = nnx.sharding.constrain(x, ("batch", "hidden"))        # inside of a model
    batch = nnx.sharding.global_batch(rows_of_this_process, sharding)

The rules map a named axis to the axis of the mesh that divides it, as in ``[("hidden",
"tensor")]``; without a mesh, none of this does anything. `fetch` reads a value that is
spread over processes.
"""

# The files of this folder:
#
# - `placement.py`: values placed on a mesh: inside of a model, a model being made,
#   batches of all processes; names, shapes and a mesh that don't fit together; the
#   place of each array, and the bytes that a device holds.

from graftree import namespaces
from graftree.sharding.placement import (
    Report as Report,
    constrain as constrain,
    fetch as fetch,
    global_batch as global_batch,
    init as init,
    report as report,
)

__dir__ = namespaces.lister(__name__)
