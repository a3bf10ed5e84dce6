"""MoE layers as a user of plain torch would write them: grouped products over rows sorted by expert.

Shapes: x [T, H]; topk_idx, topk_weights [T, top_k]; w_gate_up [E, 2I, H], gate rows first; w_down [E, H, I].
No slot is masked. Nothing here waits for the device, so every layer can be captured in a CUDA graph.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

E4M3 = torch.float8_e4m3fn


def sorted_rows(topk_idx: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(the slots in the order of their experts [T * top_k], where each expert's rows end [E] int32)."""
    ordered, order = topk_idx.flatten().sort(stable=True)
    numbers = torch.arange(experts, device=topk_idx.device, dtype=topk_idx.dtype)
    return order, torch.searchsorted(ordered, numbers, right=True).int()


def combine(out: Tensor, order: Tensor, topk_weights: Tensor) -> Tensor:
    """The weighted sum over slots, [T, H], of rows [T * top_k, H] that lie in `order`."""
    slots = torch.empty_like(out).index_copy(0, order, out).unflatten(0, topk_weights.shape)
    return (slots * topk_weights.to(out.dtype)[..., None]).sum(1)


def grouped_mm(a: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Rows of a [R, K] times their expert's w [E, N, K], bf16."""
    function = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return function(a, w.transpose(-2, -1), offs=ends)


def grouped_layer(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor):
    """The layer in bf16, [T, H]."""
    order, ends = sorted_rows(topk_idx, w_gate_up.shape[0])
    rows = x.index_select(0, order // topk_idx.shape[1])
    g, u = grouped_mm(rows, w_gate_up, ends).chunk(2, -1)
    return combine(grouped_mm(F.silu(g) * u, w_down, ends), order, topk_weights)


def grouped_layer_dx(
    dy: Tensor, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *weights: Tensor, layer=grouped_layer
):
    """(y, dx, d topk_weights) of `layer` by autograd; the expert weights are frozen."""
    with torch.enable_grad():
        x, topk_weights = x.detach().requires_grad_(), topk_weights.detach().requires_grad_()
        y = layer(x, topk_idx, topk_weights, *weights)
        return y.detach(), *torch.autograd.grad(y, (x, topk_weights), dy)


def quantize_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes of the shape of x [..., K], and one fp32 scale a row."""
    scale = (x.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1e-12)
    return (x.float() / scale).to(E4M3), scale.squeeze(-1)


def rowwise_weights(w: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [E, N, K] and scales [E, N], expert by expert."""
    codes, scales = torch.empty_like(w, dtype=E4M3), w.new_empty(w.shape[:2], dtype=torch.float32)
    for expert, value in enumerate(w):
        code, scales[expert] = quantize_rowwise(value)
        codes[expert].copy_(code)
    return codes, scales


def scaled_grouped_mm(a: Tensor, a_scale: Tensor, w: Tensor, w_scale: Tensor, ends: Tensor) -> Tensor:
    """Rows of a [R, K] times their expert's w [E, N, K], e4m3 with a scale per row; bf16."""
    return torch._scaled_grouped_mm(
        a, w.transpose(-2, -1), a_scale, w_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def rowwise_layer(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *weights: Tensor) -> Tensor:
    """The layer in e4m3 with a scale per row; weights: codes and scales of w_gate_up, then of w_down."""
    w_gate_up, gate_up_scale, w_down, down_scale = weights
    order, ends = sorted_rows(topk_idx, w_gate_up.shape[0])
    token = order // topk_idx.shape[1]
    codes, scales = quantize_rowwise(x)
    rows = codes.view(torch.uint8).index_select(0, token).view(E4M3)
    g, u = scaled_grouped_mm(rows, scales[token], w_gate_up, gate_up_scale, ends).chunk(2, -1)
    h = quantize_rowwise(F.silu(g) * u)
    return combine(scaled_grouped_mm(*h, w_down, down_scale, ends), order, topk_weights)
