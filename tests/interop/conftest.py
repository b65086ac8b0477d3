"""Pytest does not look for tests in the corpus: it would run the programs."""

collect_ignore_glob = ["corpus/*"]
