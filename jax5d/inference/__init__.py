"""Inference: a trained model continues prompts, with a cache of keys and values or by recomputing a window."""
