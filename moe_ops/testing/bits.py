"""Comparison of tensors bit by bit."""

import torch
from torch import Tensor

_INTEGER_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_equal(actual: Tensor, expected: Tensor) -> bool:
    """Whether both have one shape, one dtype and the same bits: -0 differs from +0, a NaN equals every NaN.

    Devices and strides may differ. Unlike `torch.equal`, which takes -0 for +0 and no NaN for equal.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return not bit_mismatches(actual, expected).any()


def bit_mismatches(actual: Tensor, expected: Tensor) -> Tensor:
    """A boolean tensor on the CPU: where the bits differ.

    Args:
        actual, expected: of one shape and one dtype.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise ValueError(
            f"expected must have the shape and dtype of actual, {list(actual.shape)} {actual.dtype}; "
            f"got {list(expected.shape)} {expected.dtype}. Cast or reshape one of them."
        )
    actual, expected = (value.detach().cpu().contiguous() for value in (actual, expected))
    if not actual.dtype.is_floating_point:
        return actual != expected
    integer = _INTEGER_VIEWS[actual.element_size()]
    both_nan = actual.isnan() & expected.isnan()
    return (actual.view(integer) != expected.view(integer)) & ~both_nan
