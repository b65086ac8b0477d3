"""What several tests of the crossing count."""

import pytest

from graftree.transforms.crossing import packing


@pytest.fixture
def packs(monkeypatch):
    """Counts how often something is taken apart."""
    count = []
    pack = packing.pack

    def counting(*args):
        count.append(1)
        return pack(*args)

    monkeypatch.setattr(packing, "pack", counting)
    return count
