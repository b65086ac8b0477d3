"""The tests mirror the package, file for file."""
