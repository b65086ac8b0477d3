"""Names that are gone say what to write today.

Not in Flax today: the hint.
"""

from flax import nnx

for name in ("Scan", "Intermediates", "mutable", "GraphNode"):
    try:
        getattr(nnx, name)
    except AttributeError as error:
        assert "Write nnx." in str(error)
        print(str(error).rpartition("attribute ")[2])
