"""Layers in flax.nnx: the spec stands beside each weight, sizes come from arrays. Run inside the step's shard_map."""
