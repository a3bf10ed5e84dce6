"""The layers as functions."""

import torch
from torch import Tensor

from . import contracts


def shared_expert_mlp(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    swiglu_limit: float | None = None,
    profile: str | None = None,
    backend: str | None = None,
    save: str = "recompute",
) -> Tensor:
    """Shared-expert SwiGLU MLP with frozen weights: `bf16((g * sigmoid(g)) * u) @ w_down.T`, g and u in fp32.

    `g = x @ w_gate.T` and `u = x @ w_up.T` are not rounded, the activation is rounded once, the output once.
    A row's bits do not depend on the other rows. The gradient exists for x alone. The activation is that of
    Shazeer, "GLU Variants Improve Transformer" (2020).

    Args:
        x: [..., H] bf16, any strides. Under bf16 autocast a floating x is cast to bf16.
        w_gate, w_up: [I, H] bf16, frozen. Halves of a packed [2I, H] weight may be passed as views.
        w_down: [H, I] bf16, frozen.
        swiglu_limit: c, finite and > 0, replaces g by `min(g, c)` and u by `clamp(u, -c, c)`; `None` for no
            limit.
        profile: the reduction order, one of `moe_ops.profiles()`; `None` for the device's default.
        backend: what computes it, "reference", "triton" or "cuda" (or "aten", the one of `cpu-fp32-v1`);
            `None` for the preferred one of the profile.
        save: what the backward finds: "recompute" keeps x, "activations" keeps g and u (8 * I bytes per row).
            The gradient's bits are the same.

    Returns:
        [..., H] bf16, row-major.

    Raises:
        TypeError: a wrong type or dtype; fp16 autocast.
        ValueError: a wrong shape, range or device; a weight that requires grad while grad mode is enabled.
        NotImplementedError: a profile or backend that this build or machine does not have; nothing falls
            back.
        RuntimeError: the first call of `fp32-serial-v1` on a GPU while a CUDA graph is captured: it waits for
            the device, once, to compare the kernels' sigmoid with `torch.sigmoid`.
    """
    contracts.check_call(
        "shared_expert_mlp",
        {"x": x, "w_gate": w_gate, "w_up": w_up, "w_down": w_down},
        swiglu_limit,
        profile,
        backend,
        save,
    )
    saves = save == "activations" and torch.is_grad_enabled() and x.requires_grad
    op = torch.ops.moe_ops._shared_expert_mlp_save if saves else torch.ops.moe_ops.shared_expert_mlp
    result = op(x, w_gate, w_up, w_down, swiglu_limit=swiglu_limit, profile=profile, backend=backend)
    return result[0] if saves else result
