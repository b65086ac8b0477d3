"""The documentation: its pages run, and say what they print."""
