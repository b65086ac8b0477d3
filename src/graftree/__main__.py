"""``python -m graftree`` lists the commands of the package."""

import graftree

COMMANDS = {
    "graftree.dropin": "runs a program for flax.nnx unchanged, on Graftree",
    "graftree.weights": "converts a file of torch.save to safetensors",
}


def main() -> None:
    """Prints the commands."""
    width = max(map(len, COMMANDS))
    print(f"Graftree {graftree.__version__}, neural networks for JAX. In a program:\n")
    print("  import graftree as nnx\n\nCommands, each with --help:\n")
    for name, purpose in COMMANDS.items():
        print(f"  python -m {name:{width}}  {purpose}")


if __name__ == "__main__":
    main()
