"""Models: what is embedded, what a pipeline stage does, what the head makes of it."""
