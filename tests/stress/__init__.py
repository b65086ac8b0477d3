"""Programs that run for minutes; a short run of each that can't crash is a test."""
