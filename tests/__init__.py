"""The tests mirror the package, folder for folder."""
