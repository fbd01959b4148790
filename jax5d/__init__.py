"""jax5d: five-dimensional parallelism for training transformers, every collective written out by hand."""
