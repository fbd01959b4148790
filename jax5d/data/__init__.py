"""Tokens in, deterministic global batches out."""
