"""The argument rules of the quantisers."""

import torch
from torch import Tensor

from . import contracts
from .contracts import fail, shape_text, type_name

E4M3 = torch.float8_e4m3fn


def check_not_differentiated(op: str, argument: str, value: Tensor) -> None:
    """Quantising gives codes, which have no gradient."""
    if torch.is_grad_enabled() and value.requires_grad:
        required = "without requires_grad: codes and scales have no gradient"
        remedy = "Detach it, or call under torch.no_grad()."
        fail(ValueError, op, argument, required, "a tensor that requires grad", remedy)


def check_quantize(op: str, argument: str, value: object, dims: int) -> None:
    """A floating tensor of at least `dims` dimensions."""
    contracts.check_tensors(op, {argument: value})
    if value.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        required = "torch.bfloat16, torch.float16 or torch.float32"
        fail(TypeError, op, argument, required, str(value.dtype), "Cast it.")
    contracts.check_strided(op, {argument: value})
    if value.dim() < dims:
        fail(ValueError, op, argument, f"of {dims} or more dimensions", shape_text(value), "Reshape it.")


def check_group(op: str, group: object, argument: str = "group") -> None:
    """A positive number of columns."""
    if isinstance(group, bool) or not isinstance(group, int):
        fail(TypeError, op, argument, "an int", type_name(group), "Pass a Python integer.")
    if group < 1:
        fail(ValueError, op, argument, "positive", str(group), "The layer's is 128.")


def check_block(op: str, block: object) -> None:
    """Two positive numbers."""
    if not isinstance(block, tuple | list) or len(block) != 2:
        fail(TypeError, op, "block", "a pair (rows, columns)", repr(block), "Pass two integers.")
    for index, size in enumerate(block):
        check_group(op, size, f"block[{index}]")


def check_scales(op: str, codes: Tensor, scales: Tensor, block: tuple[int, ...]) -> None:
    """Codes are e4m3; scales are one fp32 (or e8m0) number per group or block."""
    contracts.check_tensors(op, {"codes": codes, "scales": scales})
    if codes.dtype != E4M3:
        fail(TypeError, op, "codes", str(E4M3), str(codes.dtype), "Pass what the quantiser returned.")
    if scales.dtype not in (torch.float32, torch.float8_e8m0fnu):
        required = "torch.float32 or torch.float8_e8m0fnu"
        fail(TypeError, op, "scales", required, str(scales.dtype), "Pass what the quantiser returned.")
    if codes.dim() < len(block):
        required = f"of {len(block)} or more dimensions"
        fail(ValueError, op, "codes", required, shape_text(codes), "Pass what the quantiser returned.")
    leading, sizes = codes.shape[: -len(block)], codes.shape[-len(block) :]
    shape = (*leading, *(-(-size // count) for size, count in zip(sizes, block, strict=True)))
    if tuple(scales.shape) != shape:
        required = f"one per group = {list(shape)}"
        fail(ValueError, op, "scales", required, shape_text(scales), "Pass what the quantiser returned.")
    contracts.check_same_device(op, "codes", codes, {"scales": scales})
