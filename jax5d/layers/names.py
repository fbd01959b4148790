"""Names of a layer's values (`jax.ad_checkpoint.checkpoint_name`), by which a policy of recomputation keeps them."""

from __future__ import annotations

QKV = "qkv"
"""Queries [b, s, n, h], keys and values [b, s, m, h] as attention reads them."""
SAVED = "attention_sum"
"""Attention's sum over tp [b, s_stream, d]: whoever keeps it does not send it twice."""
MLP_IN = "mlp_in"
"""The MLP's first product, or products, [b, s, f] before the activation function; an MoE's [g, e, c, f]."""

NAMES = (QKV, SAVED, MLP_IN)
"""All of them, in the order of a layer."""
