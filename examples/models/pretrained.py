"""A model from a folder of Hugging Face: its config.json and its weights."""

import json
import pathlib
from typing import Any

import jax

import graftree as nnx
from examples.models import gpt2, llama, qwen3


def load(
    folder: str | pathlib.Path,
    *,
    content: dict[str, Any] | None = None,
    dtype: Any = None,
    shardings: Any = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Any:
    """Makes the model that a folder has.

    Args:
        folder: Has a ``config.json``, and safetensors files.
        content: What the ``config.json`` says; ``None``: it is read.
        dtype: As for `nnx.weights.load`.
        shardings: As for `nnx.weights.load`.
        mesh: Devices that the parameters are divided over, as `divided` says.

    Raises:
        ValueError: If it is of another family.
        WeightsError: If a file is missing or damaged.
    """
    make, weights = family(read_config(folder) if content is None else content)
    model = nnx.eval_shape(make)
    if mesh is not None:
        shardings = divided(model, mesh)
    return nnx.weights.load(folder, model, weights, dtype=dtype, shardings=shardings)


def read_config(folder: str | pathlib.Path) -> dict[str, Any]:
    """What the config.json of a folder says.

    Raises:
        ValueError: If there is none, or it is none.
    """
    path = pathlib.Path(folder).expanduser() / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} has a {type(content).__name__}, and no settings")
    return content


def family(content: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The constructor of a model, and its table of weights.

    Raises:
        ValueError: If the family is unknown, or a setting is missing.
    """
    kind = content.get("model_type")
    if kind not in FAMILIES:
        *others, last = FAMILIES
        raise ValueError(
            f"model_type is {kind!r}; known are {', '.join(others)} and {last}"
        )
    try:
        return FAMILIES[kind](content)
    except KeyError as error:
        raise ValueError(
            f"the config.json lacks {error}, which a model of the family {kind} has"
        ) from error


def _gpt2(content: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    config = gpt2.Config.from_json(content)
    return lambda: gpt2.GPT2(config, rngs=nnx.Rngs(0)), gpt2.WEIGHTS


def _llama(content: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    config = llama.Config.from_json(content)
    return lambda: llama.Llama(config, rngs=nnx.Rngs(0)), llama.WEIGHTS


def _qwen3(content: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    config = llama.Config.from_json(content, normalizes_heads=True)
    return lambda: llama.Llama(config, rngs=nnx.Rngs(0)), qwen3.WEIGHTS


# By the `model_type` of a config.json.
FAMILIES = {"gpt2": _gpt2, "llama": _llama, "qwen3": _qwen3}


def divided(model: Any, mesh: jax.sharding.Mesh) -> Any:
    """Shardings that divide each parameter over all devices, along its longest axis.

    So what a device holds gets smaller with each device (FSDP). An array of which no
    axis can be divided by their number is whole on each.
    """

    def of(array: Any) -> jax.sharding.NamedSharding:
        sizes = [size if size % mesh.size == 0 else 0 for size in array.shape]
        spec: list[Any] = [None] * len(sizes)
        if any(sizes):
            spec[sizes.index(max(sizes))] = mesh.axis_names
        return jax.NamedSharding(mesh, jax.P(*spec))

    return jax.tree.map(of, nnx.state(model))


def mesh_of(devices: int) -> jax.sharding.Mesh:
    """A mesh of some devices, in one axis.

    Raises:
        ValueError: If there are fewer.
    """
    if devices > jax.device_count():
        raise ValueError(f"there are {jax.device_count()} devices, not {devices}")
    kinds = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh(
        (devices,), ("fsdp",), axis_types=kinds, devices=jax.devices()[:devices]
    )


def save(
    folder: str | pathlib.Path,
    model: Any,
    origin: str | pathlib.Path,
    content: dict[str, Any],
) -> None:
    """Writes a model as the folder that it is from: in as many files, with its config.

    Args:
        folder: Is made if it is missing.
        model: The model.
        origin: The folder that it is from.
        content: What the ``config.json`` there says.
    """
    _, weights = family(content)
    folder, origin = pathlib.Path(folder).expanduser(), pathlib.Path(origin)
    folder.mkdir(parents=True, exist_ok=True)
    nnx.weights.save(folder, model, weights, shard_bytes=_largest_shard(origin))
    dtypes = {x.dtype.name for x in jax.tree.leaves(nnx.state(model, nnx.Param))}
    name = "torch_dtype" if "torch_dtype" in content else "dtype"
    content = {**content, name: "/".join(sorted(dtypes))}
    text = json.dumps(content, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    for path in origin.expanduser().glob("*token*.json"):
        (folder / path.name).write_bytes(path.read_bytes())


def _largest_shard(origin: pathlib.Path) -> int | None:
    """The bytes of data in the largest of several files: so they are parted again."""
    if not [*origin.expanduser().glob("*.safetensors.index.json")]:
        return None
    sizes = []
    for path in origin.expanduser().glob("*.safetensors"):
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        sizes.append(path.stat().st_size - 8 - header)
    return max(sizes)
