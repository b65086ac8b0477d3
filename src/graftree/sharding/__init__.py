"""Makes and trains models on many devices.

    model, optimizer = nnx.sharding.init(make, mesh, rules)   # each device its own part
    print(nnx.sharding.report(model))                         # who holds how much
    x = nnx.sharding.constrain(x, ("batch", "hidden"))        # inside of a model
    batch = nnx.sharding.global_batch(rows_of_this_process, sharding)

The rules say which axis of the mesh divides a named axis, as in ``[("hidden",
"tensor")]``; without a mesh all of it does nothing. `fetch` reads a value that is
spread over processes.
"""

# The files of this folder:
#
# - `creation.py`: a model made directly on a mesh; abstract models.
# - `activations.py`: values placed inside of a model.
# - `reports.py`: where each array is, and how many bytes a device holds.
# - `misfits.py`: names, shapes and a mesh that don't go together.
# - `hosts.py`: batches of all processes made of their parts; values read anywhere.
#
# The public names are in the table below. A file is imported when a name of it is first
# used; `creation` with nnx, for `nnx.as_abstract`.

from __future__ import annotations

import typing

from graftree import lazy_names

# For each file its public names. Type checkers read imports, below the table.
PUBLIC: dict[str, str] = {
    "activations": "constrain",
    "creation": "init",
    "hosts": "fetch global_batch",
    "reports": "Report report",
}

if typing.TYPE_CHECKING:
    from graftree.sharding.activations import constrain as constrain
    from graftree.sharding.creation import init as init
    from graftree.sharding.hosts import fetch as fetch
    from graftree.sharding.hosts import global_batch as global_batch
    from graftree.sharding.reports import Report as Report
    from graftree.sharding.reports import report as report


__getattr__, __dir__ = lazy_names.functions_of(__name__, PUBLIC)
