"""The shared expert on the GPU: the two passes as sequences of launches."""

import torch
from torch import Tensor

from .operands import activation, matrix
from .shared_expert_backward import launch_shared_expert_dx, launch_shared_expert_swiglu_backward
from .shared_expert_forward import launch_shared_expert_down, launch_shared_expert_gate_up


def forward(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, limit: float | None, *, strict: bool, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(y, g, u): [T, H] bf16 and, with `save`, the pre-activations [T, I] fp32.

    Beyond these it allocates h [T, I] bf16; copies of x or of a weight are never made.

    Args:
        x: [..., H] bf16, any strides; T is the product of its leading dimensions.
        w_gate, w_up: [I, H] bf16, any strides. w_down: [H, I] bf16, any strides.
        limit: `swiglu_limit`.
        strict: the reduction of `fp32-serial-v1`, else that of `tc-fp32-v1`.
        save: whether to return g and u.
    """
    with torch.cuda.device(x.device):
        h, g, u = launch_shared_expert_gate_up(
            activation(x), matrix(w_gate), matrix(w_up), limit, strict=strict, save=save
        )
        return launch_shared_expert_down(h, matrix(w_down), strict=strict), g, u


def dx(
    dy: Tensor,
    x: Tensor | None,
    saved: tuple[Tensor, Tensor] | None,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    limit: float | None,
    out_dtype: torch.dtype,
    *,
    strict: bool,
) -> Tensor:
    """The gradient of x, [T, H] in `out_dtype`, fp32 or bf16.

    Beyond it this allocates [dgate | dup], [T, 2I] bf16.

    Args:
        dy: [..., H] bf16, any strides.
        x: as for the forward, to compute g and u again, or `None`.
        saved: (g, u), [T, I] fp32, where x is `None`.
        w_gate, w_up, w_down, limit, strict: as for the forward.
    """
    gate, up = matrix(w_gate), matrix(w_up)
    with torch.cuda.device(dy.device):
        recompute = None if x is None else (activation(x), gate, up)
        if saved is not None:
            saved = tuple(value.contiguous() for value in saved)
        dz = launch_shared_expert_swiglu_backward(
            activation(dy), matrix(w_down), recompute, saved, limit, strict=strict
        )
        return launch_shared_expert_dx(dz, gate, up, out_dtype, strict=strict)
