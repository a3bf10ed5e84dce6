"""The quantisers against the contract in plain Python numbers, and their operators."""

import math
import struct
from fractions import Fraction

import pytest
import torch

import moe_ops
from moe_ops import quant
from moe_ops.testing import bits_equal

OPS = torch.ops.moe_ops
# Every e4m3 value by code, without NaN.
VALUES = {
    code: torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).double().item()
    for code in range(256)
    if code & 0x7F != 0x7F
}


def fp32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def nearest_code(value, sign):
    """The code nearest to an exact number of magnitude at most 448; ties to the even code."""
    candidates = [code for code in VALUES if (code >= 128) == sign]
    return min(candidates, key=lambda code: (abs(Fraction(VALUES[code]) - value), code & 1))


def step_1(group):
    """(codes, scale) of a list of fp32 numbers, by the contract's words."""
    amax = max(map(abs, group))
    if any(map(math.isnan, group)) or math.isinf(amax):
        return [0x7F] * len(group), math.nan
    scale = max(fp32(amax / 448), 2.0**-126) if amax else 1.0
    codes = []
    for x in group:
        quotient = min(max(fp32(x / scale), -448.0), 448.0)
        codes.append(nearest_code(Fraction(quotient), math.copysign(1, x) < 0))
    return codes, scale


def step_5(group):
    amax = max(map(abs, group))
    if any(map(math.isnan, group)) or math.isinf(amax):
        return [0x7F] * len(group), math.nan
    power = -126
    while amax and Fraction(2) ** power * 448 < Fraction(amax):
        power += 1
    scale = Fraction(2) ** power if amax else Fraction(1)
    return [nearest_code(Fraction(x) / scale, math.copysign(1, x) < 0) for x in group], float(scale)


def rows():
    """Rows of 100 numbers: every magnitude, zeros, borders of the scale, numbers that are none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 100, generator=generator)
    x *= 2.0 ** torch.linspace(-140, 120, 24)[:, None].round()
    x[1], x[2, 3], x[3, 7], x[4, :64] = -0.0, torch.nan, -torch.inf, 0.0
    for row, bits in enumerate((0x43E00000, 0x43E00001, 0x43DFFFFF, 1, 0x007FFFFF, 0x7F7FFFFF), 5):
        x[row] = x[row].sign() * 2.0**-140
        x[row, 70] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    x[11] = torch.linspace(-448, 448, 100)
    return x


def expect(function, group, rule):
    x = rows()
    codes, scales = function(x, group)
    assert codes.shape == x.shape and scales.shape == (24, -(-100 // group))
    for row, code_row, scale_row in zip(x.tolist(), codes.view(torch.uint8).tolist(), scales, strict=True):
        for index, scale in enumerate(scale_row.tolist()):
            part = slice(index * group, (index + 1) * group)
            expected_codes, expected_scale = rule(row[part])
            assert scale == expected_scale or math.isnan(scale) and math.isnan(expected_scale)
            assert code_row[part] == expected_codes


@pytest.mark.parametrize("group", [64, 128])
def test_activations(group):
    expect(moe_ops.quantize_activations, group, step_1)


@pytest.mark.parametrize("group", [64, 128])
def test_requantised_activations(group):
    expect(quant.requantize_rows, group, step_5)


@pytest.mark.parametrize("shape", [(2, 200, 300), (128, 128), (1, 1), (3, 2, 130, 128)], ids=str)
@pytest.mark.parametrize("block", [(128, 128), (64, 32)], ids=str)
def test_weight_blocks(shape, block):
    """A block is a row of its numbers; an all-zero one has scale 1 and zero codes."""
    w = torch.randn(shape)
    w.view(-1, *shape[-2:])[0, : block[0], : block[1]] = 0
    codes, scales = moe_ops.quantize_weights_block(w, block)
    assert scales.shape == (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    assert codes.is_contiguous() and scales.is_contiguous()
    flat = zip(w.view(-1, *shape[-2:]), codes.view(-1, *shape[-2:]), strict=True)
    for (matrix, code), scale in zip(flat, scales.view(-1, *scales.shape[-2:]), strict=True):
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
                tile = matrix[part].flatten()
                expected, expected_scale = quant.quantize_rows(tile[None], tile.numel())
                assert bits_equal(scale[i, j], expected_scale[0, 0])
                assert bits_equal(code[part].flatten().float(), expected[0].float())
    assert scales.flatten()[0] == 1
    assert not codes.view(-1, *shape[-2:])[0, : block[0], : block[1]].float().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_round_trip(dtype):
    """Within half a unit of 3 mantissa bits, for numbers that are not far below their group's largest."""
    x = torch.randn(3, 5, 300).to(dtype)
    y = moe_ops.dequantize_activations(*moe_ops.quantize_activations(x))
    w = moe_ops.dequantize_weights_block(*moe_ops.quantize_weights_block(x))
    for value in (y, w):
        assert value.dtype == torch.float32
        assert (
            (value - x.float()).abs() <= x.float().abs() / 16 + 2.0**-10 * x.float().abs().max() / 448
        ).all()


def test_strides_and_empty():
    x = torch.randn(6, 4, 200).bfloat16()
    expected = moe_ops.quantize_activations(x.contiguous())
    for actual, wanted in zip(moe_ops.quantize_activations(x.mT.contiguous().mT), expected, strict=True):
        assert actual.is_contiguous() and bits_equal(actual.float(), wanted.float())
    codes, scales = moe_ops.quantize_activations(x[:0])
    assert codes.shape == (0, 4, 200) and scales.shape == (0, 4, 2)


def test_bad_input():
    x = torch.randn(4, 128)
    with pytest.raises(ValueError, match="without requires_grad"):
        moe_ops.quantize_activations(x.clone().requires_grad_())
    with torch.no_grad():
        moe_ops.quantize_activations(x.clone().requires_grad_())
    with pytest.raises(TypeError, match="bfloat16, torch.float16 or torch.float32; got torch.int64"):
        moe_ops.quantize_activations(x.long())
    with pytest.raises(ValueError, match="positive"):
        moe_ops.quantize_activations(x, 0)
    with pytest.raises(TypeError, match="a pair"):
        moe_ops.quantize_weights_block(x, 128)
    with pytest.raises(ValueError, match=r"scales must be one per group = \[4, 1\]; got \[4, 2\]"):
        moe_ops.dequantize_activations(*moe_ops.quantize_activations(x, 64))
    with pytest.raises(TypeError, match="codes must be torch.float8_e4m3fn"):
        moe_ops.dequantize_weights_block(x, x[:1, :1])


def test_operators(fresh_compiler):
    """opcheck, vmap, and eager's bits when compiled."""
    x = torch.randn(5, 6, 200).bfloat16()
    torch.library.opcheck(OPS.quantize_activations.default, (x.mT.contiguous().mT, 64))
    torch.library.opcheck(OPS.quantize_weights_block.default, (x, 64, 32))
    for function in (moe_ops.quantize_activations, moe_ops.quantize_weights_block):
        expected = function(x)
        for changed in (torch.vmap(function), torch.compile(function, fullgraph=True)):
            for actual, wanted in zip(changed(x), expected, strict=True):
                assert bits_equal(actual.float(), wanted.float())
