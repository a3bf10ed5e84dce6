"""The contract's expressions in plain torch: each line below is one line of it, and none is ever "optimised".

The functions take the matrix product as an argument, since that is all in which the torch profiles differ:
`serial_matmul` makes them the oracle of `fp32-serial-v1`, `moe_ops.kernels.cpu_matmul.blocked_matmul` makes
them `cpu-fp32-v1`. A product is called as `matmul(a, weight, transpose_weight=...)` and returns fp32. Every
operation is one rounding to nearest even: eager ATen calls do not contract.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from . import contracts

Matmul = Callable[..., Tensor]

_SIGMOID_CHUNK = 16384
_SIGMOID_LANES = 64


def serial_matmul(a: Tensor, weight: Tensor, *, transpose_weight: bool) -> Tensor:
    """`a @ weight.T` or `a @ weight`, k ascending: each product and each sum is rounded to fp32.

    Args:
        a: [M, K], any floating dtype.
        weight: [N, K] if `transpose_weight`, else [K, N]; any floating dtype.
        transpose_weight: whether `weight` is stored with the reduction axis last.

    Returns:
        [M, N] fp32.
    """
    a = a.float()
    weight = (weight.t() if transpose_weight else weight).float().contiguous()
    accumulator = a.new_zeros(a.shape[0], weight.shape[1])
    for k in range(a.shape[1]):
        accumulator += a[:, k, None] * weight[k]
    return accumulator


def sigmoid(x: Tensor) -> Tensor:
    """`torch.sigmoid` of fp32, one function of the value alone on every device.

    ATen's CPU kernel computes whole vectors by other code than the tail of a buffer and of each thread's
    share, so on the CPU it only ever sees whole vectors, in chunks too small to be shared among threads.
    """
    if x.device.type != "cpu":
        return torch.sigmoid(x)
    count = x.numel()
    buffer = x.new_zeros(-(-count // _SIGMOID_LANES) * _SIGMOID_LANES)
    buffer[:count] = x.reshape(-1)
    for chunk in buffer.split(_SIGMOID_CHUNK):
        chunk.sigmoid_()
    return buffer[:count].view(x.shape)


def swiglu(g: Tensor, u: Tensor, limit: float | None) -> Tensor:
    """`bf16((g * sigmoid(g)) * u)`: one round. g, u: fp32 of one shape."""
    g, u = clamped(g, u, limit)
    return ((g * sigmoid(g)) * u).bfloat16()


def swiglu_backward(
    dh: Tensor,
    g: Tensor,
    u: Tensor,
    limit: float | None,
    sigmoid: Callable[[Tensor], Tensor] = sigmoid,
) -> tuple[Tensor, Tensor]:
    """The gradients (dgate, dup), bf16. dh: bf16 or fp32; g, u: fp32, before any limit; all of one shape.

    A limit is a select: the gradient is zero exactly at the bound, and NaN passes. `sigmoid`: of fp32.
    """
    dh = dh.float()
    gc, uc = clamped(g, u, limit)
    sig = sigmoid(gc)
    silu = gc * sig
    dsilu = sig * (1 + gc * (1 - sig))
    dgate = (dh * uc) * dsilu
    dup = dh * silu
    if limit is not None:
        dgate = torch.where(g >= limit, 0.0, dgate)
        dup = torch.where(u.abs() >= limit, 0.0, dup)
    return dgate.bfloat16(), dup.bfloat16()


def gate_up(x: Tensor, w_gate: Tensor, w_up: Tensor, matmul: Matmul) -> tuple[Tensor, Tensor]:
    """The pre-activations (g, u), fp32 [T, I]. x: [T, H]; w_gate, w_up: [I, H]."""
    return matmul(x, w_gate, transpose_weight=True), matmul(x, w_up, transpose_weight=True)


def down(g: Tensor, u: Tensor, w_down: Tensor, limit: float | None, matmul: Matmul) -> Tensor:
    """The output y, bf16 [T, H], from the pre-activations. w_down: [H, I]."""
    return matmul(swiglu(g, u, limit), w_down, transpose_weight=True).bfloat16()


def dx_from_pre_activations(
    dy: Tensor,
    g: Tensor,
    u: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    limit: float | None,
    matmul: Matmul,
) -> Tensor:
    """The gradient of x, fp32 [T, H], not yet rounded. dy: [T, H] bf16; g, u: [T, I] fp32."""
    dh = matmul(dy, w_down, transpose_weight=False).bfloat16()
    dgate, dup = swiglu_backward(dh, g, u, limit)
    return matmul(torch.cat((dgate, dup), 1), torch.cat((w_gate, w_up)), transpose_weight=False)


def shared_expert_mlp_reference(
    x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, *, swiglu_limit: float | None = None
) -> Tensor:
    """The oracle of the shared expert: serial fp32, slow, the same text on CPU and CUDA.

    The profile `fp32-serial-v1` of `moe_ops.shared_expert_mlp` has these bits on the same device.
    Differentiable in x, by `shared_expert_mlp_dx_reference`.

    Args:
        x: [..., H] bf16.
        w_gate, w_up: [I, H] bf16, frozen.
        w_down: [H, I] bf16, frozen.
        swiglu_limit: upper bound of g and bound of |u| before the activation, or `None`.

    Returns:
        [..., H] bf16.

    Raises:
        TypeError, ValueError: as `moe_ops.shared_expert_mlp`.
    """
    op = "shared_expert_mlp_reference"
    weights = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    contracts.check_call(op, {"x": x, **weights}, swiglu_limit)
    contracts.check_frozen(op, **weights)
    _check(op, {"x": x}, weights, swiglu_limit)
    return _Oracle.apply(x, w_gate, w_up, w_down, swiglu_limit)


def shared_expert_mlp_dx_reference(
    dy: Tensor,
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    swiglu_limit: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The oracle's gradient of x, serial fp32.

    Args:
        dy: the gradient of the output, [..., H] bf16.
        x, w_gate, w_up, w_down, swiglu_limit: as for the forward.
        out_dtype: `torch.float32`, or `None` for x's dtype (the fp32 bits, rounded once).

    Returns:
        [..., H] in `out_dtype`.

    Raises:
        TypeError, ValueError: as `moe_ops.shared_expert_mlp`.
    """
    op = "shared_expert_mlp_dx_reference"
    activations, weights = {"x": x, "dy": dy}, {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    contracts.check_call(op, activations | weights, swiglu_limit)
    contracts.check_frozen(op, **weights)
    if any(value.requires_grad for value in activations.values()):
        contracts.check_first_derivative(op)
    contracts.check_out_dtype(op, out_dtype)
    _check(op, activations, weights, swiglu_limit)
    with torch.no_grad():
        hidden = x.shape[-1]
        g, u = gate_up(x.reshape(-1, hidden), w_gate, w_up, serial_matmul)
        dx = dx_from_pre_activations(
            dy.reshape(-1, hidden), g, u, w_gate, w_up, w_down, swiglu_limit, serial_matmul
        )
        return dx.to(out_dtype or x.dtype).view(x.shape)


class _Oracle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_gate, w_up, w_down, limit):
        ctx.save_for_backward(x, w_gate, w_up, w_down)
        ctx.limit = limit
        g, u = gate_up(x.reshape(-1, x.shape[-1]), w_gate, w_up, serial_matmul)
        return down(g, u, w_down, limit, serial_matmul).view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        contracts.check_first_derivative("shared_expert_mlp_reference")
        dx = shared_expert_mlp_dx_reference(dy, *ctx.saved_tensors, swiglu_limit=ctx.limit)
        return dx, None, None, None, None


def _check(
    op: str, activations: dict[str, Tensor], weights: dict[str, Tensor], swiglu_limit: float | None
) -> None:
    contracts.check_shared_expert(
        op, activations, **weights, swiglu_limit=swiglu_limit, profile="fp32-serial-v1", backend="reference"
    )


def clamped(g: Tensor, u: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """`min(g, c)` and `clamp(u, -c, c)`; NaN passes."""
    if limit is None:
        return g, u
    return g.clamp(max=limit), u.clamp(-limit, limit)
