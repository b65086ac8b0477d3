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
# - `placement.py`: values placed on a mesh: inside of a model, a model being made;
#   names, shapes and a mesh that don't fit together; the place of each array, and the
#   bytes that a device holds.
# - `process_arrays.py`: arrays of all processes, made of the rows of each, and read.
# - `collectives.py`: how processes agree before they act together; checkpoints and
#   weights do so too.

from graftree import namespaces
from graftree.sharding.placement import (
    Report as Report,
    constrain as constrain,
    init as init,
    report as report,
)
from graftree.sharding.process_arrays import (
    fetch as fetch,
    global_batch as global_batch,
)

__dir__ = namespaces.lister(__name__)
