"""JAX's store of keys and texts, by which the processes of a program find each other.

No documentation describes it. It differs from the collectives of devices in that each
wait has a limit. Without it, processes wait for each other without one
(`sharding/collectives.py`).
"""

from __future__ import annotations

from typing import Any

import jax

from graftree import _jax_names


@_jax_names.by("jax._src.distributed:global_state")
def _client(state: Any) -> Any:
    return state.client


@_jax_names.by("jax._src.distributed:global_state")
def own_number(state: Any) -> int | None:
    """Numbers this process; starts no backend, as `jax.process_index` may."""
    return state.process_id


class Store:
    """What one process writes in it, all can read.

    Its methods raise ``jax.errors.JaxRuntimeError`` if the process that keeps it, the
    first one, can't be reached.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def post(self, key: str, text: str) -> None:
        """Writes a text, which may replace one."""
        self._client.key_value_set_bytes(key, text.encode(), allow_overwrite=True)

    def wait(self, key: str, seconds: float) -> str | None:
        """Waits for a text; ``None`` if it takes longer than these seconds."""
        try:
            milliseconds = max(1, int(seconds * 1000))
            return self._client.blocking_key_value_get_bytes(key, milliseconds).decode()
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def look(self, key: str) -> str | None:
        """Returns a text, if it is there."""
        try:
            return self._client.key_value_try_get_bytes(key).decode()
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def drop(self, folder: str) -> None:
        """Deletes the texts whose keys begin with a folder."""
        self._client.key_value_delete(folder)


def store() -> Store | None:
    """Returns the store of this program; ``None`` if JAX has none for it."""
    client = _client()
    return None if client is None else Store(client)
