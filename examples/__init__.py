"""Complete programs written with Graftree; each folder runs as a module."""
