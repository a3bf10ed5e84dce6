"""The layers as functions."""

import torch
from torch import Tensor

from . import contracts, moe_contracts, quant, quant_contracts


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


def mega_moe(
    x: Tensor | tuple[Tensor, Tensor],
    topk_idx: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_gate_up_scale: Tensor | None,
    w_down: Tensor,
    w_down_scale: Tensor | None,
    *,
    swiglu_limit: float | None = None,
    profile: str | None = None,
    backend: str | None = None,
    return_expert_counts: bool = False,
    validate_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """MoE layer with frozen experts: dispatch, gate/up product, SwiGLU, down product, combine.

    Row (t, slot) is expert `topk_idx[t, slot]`'s SwiGLU MLP of token t; the routing weight multiplies the
    activation before the second product. A token's rows are rounded to bf16 and summed in fp32 in slot order,
    so a token's bits depend neither on the other tokens nor on where its experts are. Gradients exist for x
    and topk_weights. Scales are those of DeepSeek-V3's checkpoints (`weight_scale_inv`; DeepSeek-AI,
    "DeepSeek-V3 Technical Report", 2024, section 3.3).

    Args:
        x: [T, H] bf16, any strides; under bf16 autocast fp32 and fp16 are cast. Or a pair (x_fp8 [T, H] e4m3,
            x_scale [T, ceil(H/128)] fp32), any strides, as `quantize_activations` returns; gradients then go
            to topk_weights only.
        topk_idx: [T, top_k] int32 or int64; -1 is a masked slot. Any other index outside [0, E) drops the
            slot like a masked one and is counted. An expert may occur twice in a row.
        topk_weights: [T, top_k] fp32. Those of masked and dropped slots are never read into arithmetic.
        w_gate_up: [E, 2I, H], gate rows first, frozen: e4m3 with rows of contiguous elements, or bf16 with
            any strides.
        w_gate_up_scale: [E, ceil(2I/128), ceil(H/128)] fp32 (or float8_e8m0fnu, widened exactly), row-major;
            value = code * scale. `None` for bf16 weights. A scale that was rounded to a power of two without
            requantising the codes, or a transposed contiguous copy of a square one, cannot be told from a
            right one.
        w_down, w_down_scale: [E, H, I] and [E, ceil(H/128), ceil(I/128)], as above.
        swiglu_limit: c, finite and > 0, replaces g by `min(g, c)` and u by `clamp(u, -c, c)`; `None` for no
            limit.
        profile: the arithmetic, one of `moe_ops.profiles(device, "mega_moe")` (fp8 weights) or
            "mega_moe_bf16"; `None` for the device's default.
        backend: what computes it, "reference" or "triton" ("aten" for `cpu-fp32-v1`); `None` for the
            preferred one.
        return_expert_counts: also return the counts. Accumulate them outside of checkpointed regions.
        validate_indices: raise for an index outside [-1, E), which waits for the device.

    Returns:
        y [T, H] bf16, or (y, counts): [E + 1] int32, the rows of each expert, then the dropped indices.

    Raises:
        TypeError: a wrong type or dtype; fp16 autocast.
        ValueError: a wrong shape, stride, range or device; a weight or scale that requires grad while grad
            mode is enabled; with `validate_indices`, an index out of range.
        NotImplementedError: a profile or backend that this build or machine does not have, torch.vmap, a
            second derivative; nothing falls back.
        RuntimeError: `validate_indices` while a CUDA graph is captured.
    """
    others = {
        "topk_idx": topk_idx,
        "topk_weights": topk_weights,
        "w_gate_up": w_gate_up,
        "w_gate_up_scale": w_gate_up_scale,
        "w_down": w_down,
        "w_down_scale": w_down_scale,
    }
    values, x_scale = moe_contracts.check_types("mega_moe", x, others)
    contracts.check_call("mega_moe", {}, swiglu_limit, profile, backend)
    x_scale, w_gate_up_scale, w_down_scale = map(
        moe_contracts.widened, (x_scale, w_gate_up_scale, w_down_scale)
    )
    if validate_indices:
        moe_contracts.check_routing("mega_moe", topk_idx, w_gate_up)
        topk_idx = torch.ops.moe_ops._validated_indices(topk_idx, w_gate_up.shape[0])
    y, counts = torch.ops.moe_ops._mega_moe(
        values,
        x_scale,
        topk_idx,
        topk_weights,
        w_gate_up,
        w_gate_up_scale,
        w_down,
        w_down_scale,
        swiglu_limit=swiglu_limit,
        profile=profile,
        backend=backend,
    )
    return (y, counts) if return_expert_counts else y


def quantize_activations(x: Tensor, group: int = 128) -> tuple[Tensor, Tensor]:
    """e4m3 codes and fp32 scales of each `group` columns: value = code * scale.

    `scale = max(amax / 448, 2^-126)`, `code = e4m3(clamp(x / scale, -448, 448))`, both divisions correctly
    rounded; an all-zero group has scale 1, a group with NaN or inf has scale NaN and codes 0x7F.

    Args:
        x: [..., K] bf16, fp16 or fp32, any strides, not requiring grad.
        group: columns of a group; the last one may be ragged.

    Returns:
        codes [..., K] float8_e4m3fn and scales [..., ceil(K / group)] fp32, row-major.

    Raises:
        TypeError, ValueError: a wrong type, dtype or size; an x that requires grad while grad mode is
            enabled.
    """
    quant_contracts.check_group("quantize_activations", group)
    quant_contracts.check_quantize("quantize_activations", "x", x, 1)
    return torch.ops.moe_ops.quantize_activations(x, group)


def quantize_weights_block(w: Tensor, block: tuple[int, int] = (128, 128)) -> tuple[Tensor, Tensor]:
    """e4m3 codes and fp32 scales of blocks, by the rule of `quantize_activations`.

    Args:
        w: [..., N, K] bf16, fp16 or fp32, not requiring grad.
        block: rows and columns of a block; the last ones may be ragged.

    Returns:
        codes [..., N, K] float8_e4m3fn and scales [..., ceil(N / block[0]), ceil(K / block[1])] fp32.

    Raises:
        TypeError, ValueError: as `quantize_activations`.
    """
    quant_contracts.check_block("quantize_weights_block", block)
    quant_contracts.check_quantize("quantize_weights_block", "w", w, 2)
    return torch.ops.moe_ops.quantize_weights_block(w, *block)


def dequantize_activations(codes: Tensor, scales: Tensor, group: int = 128) -> Tensor:
    """`code * scale` in fp32, rounded once: the inverse of `quantize_activations`.

    Args:
        codes: [..., K] e4m3. scales: [..., ceil(K / group)] fp32.
        group: columns of a group.

    Returns:
        [..., K] fp32.

    Raises:
        TypeError, ValueError: a wrong type or shape.
    """
    quant_contracts.check_group("dequantize_activations", group)
    quant_contracts.check_scales("dequantize_activations", codes, scales, (group,))
    return codes.float() * quant.widen_rows(scales.float(), codes.shape[-1], group)


def dequantize_weights_block(codes: Tensor, scales: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """`code * scale` in fp32, rounded once: the inverse of `quantize_weights_block`.

    Args:
        codes: [..., N, K] e4m3. scales: [..., ceil(N / block[0]), ceil(K / block[1])] fp32.
        block: rows and columns of a block.

    Returns:
        [..., N, K] fp32.

    Raises:
        TypeError, ValueError: a wrong type or shape.
    """
    quant_contracts.check_block("dequantize_weights_block", block)
    quant_contracts.check_scales("dequantize_weights_block", codes, scales, block)
    return codes.float() * quant.widen_blocks(scales.float(), *codes.shape[-2:], block)
