"""What PyTorch does for ``python -m graftree.weights convert``: it reads a file.

It is run by its path, in a process of its own, and imports nothing of this package: so
PyTorch never meets JAX, and what it does with a bad file ends there. It gets the file
and the key of a dict in it, then says on one line what is there, as JSON:

    {"tensors": [["fc.weight", "float32", [2, 3]], ...], "others": {"epoch": "int"}}
    {"error": "what is wrong"}

After that it answers each line with a name, as JSON, by the bytes of the tensor.
"""

import json
import sys
import zipfile


def main() -> None:
    """Reads, and answers until the input ends."""
    import torch

    path, key = sys.argv[1:]
    options = {"map_location": "cpu", "mmap": zipfile.is_zipfile(path)}
    try:
        found = torch.load(path, weights_only=True, **options)
    except Exception as error:
        _say({"error": f"{type(error).__name__}: {_reason(error)}"})
        return
    for part in key.split(".") if key else []:
        found = found.get(part) if isinstance(found, dict) else None
    items = found if isinstance(found, dict) else {key or "the file": found}
    tensors = {
        name: x
        for name, x in items.items()
        if items is found and isinstance(x, torch.Tensor) and isinstance(name, str)
    }
    described = [[name, _dtype(x, torch), [*x.shape]] for name, x in tensors.items()]
    others = {str(k): _described(x) for k, x in items.items() if k not in tensors}
    _say({"tensors": described, "others": others})
    for line in sys.stdin:
        tensor = tensors[json.loads(line)].detach().contiguous()
        sys.stdout.buffer.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        sys.stdout.buffer.flush()


def _dtype(tensor, torch) -> str:
    is_plain = tensor.layout is torch.strided
    return str(tensor.dtype if is_plain else tensor.layout).removeprefix("torch.")


def _described(x) -> str:
    size = f" of {len(x)}" if isinstance(x, (dict, list, tuple)) else ""
    return type(x).__name__ + size


def _reason(error) -> str:
    """What is wrong, without the advice to run code from the file."""
    lines = str(error).strip().splitlines() or [""]
    chosen = next((line for line in lines if "WeightsUnpickler" in line), lines[0])
    return chosen.strip().partition(". ")[0]


def _say(content) -> None:
    sys.stdout.buffer.write(json.dumps(content).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
