"""GPT-2 and its training step in PyTorch, as a careful user would write them for one GPU.

The same model, batch size and optimizer as `jax5d`: tied head, tanh GELU, biases, AdamW with b2 0.95 and decay on
matrices, clipping at 1. Compiled whole, flash attention through scaled_dot_product_attention, bfloat16 autocast
over float32 parameters, fused AdamW. The learning rate is constant, so losses are not for comparison.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jax5d.config import ModelConfig


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); [b, s, d] -> [b, s, d]."""

    def __init__(self, d_model: int, heads: int, d_ff: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.w_in, self.w_out = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, d] -> [b, s, d]."""
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, d))
        return x + self.w_out(F.gelu(self.w_in(self.norm_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    """Token ids and labels int64 [b, s] -> mean cross-entropy, float32 []."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab, c.d_model), nn.Embedding(c.context, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.heads, c.d_ff) for _ in range(c.layers))
        self.norm_f = nn.LayerNorm(c.d_model)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean next-token cross-entropy."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def has_cuda() -> bool:
    """Whether torch can use a GPU."""
    return torch.cuda.is_available()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW; weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)


def step_seconds(c: ModelConfig, rows: int, where: str, *, warm: int, timed: int) -> tuple[float, dict[str, Any]]:
    """Seconds of a training step, steps enqueued back to back; and compile time, peak memory and versions.

    Args:
        rows: sequences of a step.
        where: "cuda" or "cpu".
        warm, timed: steps before the clock starts, and under it.
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Gpt2(c).to(where)
    optimizer, run = make_optimizer(model), torch.compile(model)
    tokens = torch.randint(c.vocab, (rows, c.context + 1), device=where)
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> Tensor:
        with torch.autocast(where, dtype=torch.bfloat16):
            loss = run(ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    start = time.perf_counter()
    loss = step()
    _wait(where)
    compiled = time.perf_counter() - start
    for i in range(warm + timed):
        if i == warm:
            _wait(where)
            start = time.perf_counter()
        loss = step()
    _wait(where)
    seconds = (time.perf_counter() - start) / timed
    peak = torch.cuda.max_memory_allocated() if where == "cuda" else None
    rest = {"compile_seconds": compiled, "peak_bytes": peak, "loss": float(loss), "torch": torch.__version__}
    return seconds, rest


def _wait(where: str) -> None:
    if where == "cuda":
        torch.cuda.synchronize()
