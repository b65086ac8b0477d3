"""Numbers are given once."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

from graftree import ids


def test_every_uuid_is_another():
    assert ids.uuid() != ids.uuid()


def test_threads_get_different_numbers():
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: ids.uuid(), range(1000)))
    assert len(set(numbers)) == 1000


def test_equal_numbers_are_equal_and_hash_alike():
    assert ids.UUID(3) == ids.UUID(3) != ids.UUID(4)
    assert len({ids.UUID(3), ids.UUID(3)}) == 1


def test_copies_have_numbers_of_their_own():
    original = ids.uuid()
    copies = {original, copy.copy(original), copy.deepcopy(original)}
    assert len(copies) == 3


def test_pickling_keeps_the_number():
    original = ids.uuid()
    assert pickle.loads(pickle.dumps(original)) == original


def test_repr_shows_the_number():
    assert repr(ids.UUID(3)) == "UUID(3)"
