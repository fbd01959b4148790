"""Communication over the computation that could hide it: at most 1, and it can be hidden whole.

The Ultra-Scale Playbook, appendix A3, with bytes per element as an argument. Data parallelism is corrected: the printed
form has a parameter count left over, which cancels.

C peak FLOP/s, W bytes/s of the link (one direction), e bytes per element, h d_model. Bandwidth only, no latencies.
"""

from __future__ import annotations


def data_parallel(n: int, tokens: int, peak: float, link: float, element: float = 2) -> float:
    """All-reduce of the gradients, 2 (n-1)/n e N / W, over their backward pass, 4 tokens N / C, of N parameters.

    (n-1)/n e C / (2 tokens W); tokens are those of one device for each reduction.
    """
    return (n - 1) / n * element * peak / (2 * tokens * link)


def zero_3(n: int, tokens: int, peak: float, link: float, element: float = 2) -> float:
    """All-gather of a layer's parameters, (n-1)/n e N / W, over the layer before it, 2 tokens N / C.

    (n-1)/n e C / (2 tokens W); tokens are those of one device's microbatch. The backward pass computes twice as much
    and also scatters the gradients, so its ratio is the same.
    """
    return (n - 1) / n * element * peak / (2 * tokens * link)


def tensor_parallel(n: int, d_model: int, peak: float, link: float, element: float = 2) -> float:
    """All-gather of the activations, (n-1)/n e s b h / W, over one product with h x h weights, 2 s b h^2 / (n C).

    (n-1) e C / (2 h W): no number of tokens hides it better.
    """
    return (n - 1) * element * peak / (2 * d_model * link)


def pipeline_parallel(layers: int, d_model: int, peak: float, link: float, element: float = 2) -> float:
    """One activation to the next stage, e s b h / W, over that stage's forward pass, 32 s b h^2 layers / C.

    e C / (32 h layers W), for `layers` of a stage with 16 h^2 weights each (SwiGLU of width 4 h).
    """
    return element * peak / (32 * d_model * layers * link)
