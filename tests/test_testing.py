"""The comparison that every exact claim rests on."""

import math

import pytest
import torch

from moe_ops.testing import bit_mismatches, bits_equal

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits(dtype):
    value = torch.tensor([0.0, 1.0, -2.0, math.nan]).to(dtype)
    assert bits_equal(value, value.clone())
    negative_zero = torch.tensor([-0.0, 1.0, -2.0, math.nan]).to(dtype)
    assert bit_mismatches(negative_zero, value).tolist() == [True, False, False, False]
    assert not bits_equal(negative_zero, value)


def test_one_ulp_and_nan_payloads():
    value = torch.tensor([1.0, math.nan])
    bits = value.view(torch.int32)
    assert not bits_equal((bits + torch.tensor([1, 0], dtype=torch.int32)).view(torch.float32), value)
    assert bits_equal((bits + torch.tensor([0, 1], dtype=torch.int32)).view(torch.float32), value)
    assert not bits_equal(torch.tensor([1.0, 2.0]), value), "a NaN equals no number"


def test_strides_may_differ_and_nothing_else():
    value = torch.randn(3, 4)
    assert bits_equal(value.t().contiguous().t(), value)
    assert not bits_equal(value, value.view(4, 3))
    assert not bits_equal(value, value.double())
    assert bits_equal(torch.empty(0, 4), torch.empty(0, 4))
    assert not bits_equal(torch.tensor([1, 2]), torch.tensor([1, 3]))
    with pytest.raises(ValueError, match=r"expected must have the shape and dtype of actual, \[3, 4\]"):
        bit_mismatches(value, value[:2])
