"""The quantisers against scalar Python arithmetic, written from the contract."""

import bisect
import itertools
import math
import struct
from fractions import Fraction

import pytest
import torch

import moe_ops
from moe_ops import quant
from moe_ops.testing import bits_equal

OPS = torch.ops.moe_ops
# The magnitudes of the codes 0x00 .. 0x7E.
E4M3 = [
    Fraction(code & 7, 512) if code < 8 else Fraction(8 + (code & 7)) * Fraction(2) ** ((code >> 3) - 10)
    for code in range(127)
]


def bits_of(value: float) -> int:
    return struct.unpack("I", struct.pack("f", value))[0]


def from_bits(bits: int) -> float:
    return struct.unpack("f", struct.pack("I", bits))[0]


def nearest(magnitude: Fraction, grid) -> int:
    """The index of the nearest entry of an ascending grid, the even one in a tie."""
    above = bisect.bisect_left(grid, magnitude)
    if above == len(grid):
        return above - 1
    if grid[above] == magnitude or above == 0:
        return above
    low, high = magnitude - grid[above - 1], grid[above] - magnitude
    return above - (low < high or (low == high and above % 2 == 1))


def fp32(exact: Fraction) -> float:
    """One rounding of a magnitude below 2^128: to a multiple of the last place, ties to even."""
    exponent = -126
    if exact >= Fraction(2) ** -126:
        exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
        exponent -= Fraction(2) ** exponent > exact
    place = Fraction(2) ** (exponent - 23)
    return float(round(exact / place) * place)


def encode(value: float, scale: float) -> int:
    """e4m3(clamp(value / scale, -448, 448)) with the division rounded to fp32."""
    quotient = fp32(abs(Fraction(value)) / Fraction(scale))
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    return sign | nearest(min(Fraction(quotient), E4M3[-1]), E4M3)


def quantized(values: list[float]) -> tuple[list[int], float]:
    """Step 1 for one group."""
    if not all(math.isfinite(value) for value in values):
        return [0x7F] * len(values), math.nan
    amax = max(abs(value) for value in values)
    scale = max(fp32(Fraction(amax) / 448), 2.0**-126) if amax else 1.0
    return [encode(value, scale) for value in values], scale


def requantized(values: list[float]) -> tuple[list[int], float]:
    """Step 5 for one group: the smallest power of two not below amax / 448, by search."""
    if not all(math.isfinite(value) for value in values):
        return [0x7F] * len(values), math.nan
    amax = max(abs(value) for value in values)
    power = -126
    while amax and Fraction(amax) > 448 * Fraction(2) ** power:
        power += 1
    scale = 2.0**power if amax else 1.0
    return [encode(value, scale) for value in values], scale


def expected_rows(x: torch.Tensor, group: int, rule):
    codes, scales = [], []
    for row in x.float().tolist():
        for start in range(0, len(row), group):
            code, scale = rule(row[start : start + group])
            codes += code
            scales.append(scale)
    return torch.tensor(codes, dtype=torch.uint8).view(x.shape), torch.tensor(scales).view(x.shape[0], -1)


def codes_equal(codes: torch.Tensor, expected: torch.Tensor) -> bool:
    """NaN codes too."""
    return codes.dtype == torch.float8_e4m3fn and torch.equal(codes.view(torch.uint8), expected)


def all_ties() -> torch.Tensor:
    """With a scale of 1: every code, every middle between two codes and its two neighbours."""
    middles = [float((low + high) / 2) for low, high in itertools.pairwise(E4M3)]
    rows = [[float(code) for code in E4M3]]
    rows += [[from_bits(bits_of(value) + step) for value in middles] + [448.0] for step in (-1, 0, 1)]
    return torch.tensor([[*row, -448.0] for row in rows])


def borders() -> torch.Tensor:
    """Largest elements at the mantissa where the power of two changes, one below and one above."""
    amax = [
        from_bits(exponent << 23 | mantissa)
        for exponent in (0, 1, 2, 7, 8, 9, 10, 127, 135, 136, 253, 254)
        for mantissa in (0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF)
    ]
    x = torch.tensor(amax)[:, None] * torch.linspace(-1, 1, 64)
    x[:, -1] = torch.tensor(amax)
    return x


def special() -> torch.Tensor:
    x = torch.randn(8, 128)
    x[0], x[1] = 0, -0.0
    x[2, 5], x[3, 70], x[4, 0] = math.nan, math.inf, -math.inf
    x[5, :64], x[5, 3] = 0, -0.0
    x[6, 9], x[6, 10] = math.nan, math.inf
    x[7] = torch.tensor([3.4028234663852886e38, 2.0**-149] * 64)
    return x


INPUTS = {
    "bf16": lambda: torch.randn(12, 256).bfloat16(),
    "fp32": lambda: torch.randn(12, 256) * torch.logspace(-40, 30, 12, base=2)[:, None],
    "fp16": lambda: torch.randn(4, 128).half(),
    "every-bf16-exponent": lambda: torch.randint(-(2**15), 2**15, (40, 128), dtype=torch.int16).view(
        torch.bfloat16
    ),
    "bf16-subnormal": lambda: torch.randint(0, 128, (4, 128), dtype=torch.int16).view(torch.bfloat16),
    "fp32-subnormal": lambda: torch.randint(0, 2**23, (4, 128), dtype=torch.int32).view(torch.float32),
    "smallest-normals": lambda: torch.randn(8, 128) * 2.0**-118,
    "ties": all_ties,
    "borders": borders,
    "special": special,
    "ragged": lambda: torch.randn(3, 200).bfloat16(),
    "one-column": lambda: torch.randn(3, 129),
    "narrow": lambda: torch.randn(3, 5),
}


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("name", INPUTS)
def test_rows_equal_scalar_arithmetic(name, group):
    torch.manual_seed(5)
    x = INPUTS[name]()
    for function, rule in (
        (moe_ops.quantize_activations, quantized),
        (quant.requantize_rows, requantized),
    ):
        codes, scales = function(x, group)
        expected_codes, expected_scales = expected_rows(x, group, rule)
        assert codes_equal(codes, expected_codes)
        assert bits_equal(scales, expected_scales)
        assert codes.is_contiguous() and scales.is_contiguous()


@pytest.mark.parametrize(
    ("mantissa", "power"), [(0x5FFFFF, 0), (0x600000, 0), (0x600001, 1)], ids=["below", "at", "above"]
)
def test_the_power_of_two_border(mantissa, power):
    """448 = 1.75 * 2^8: an amax of 1.75 * 2^E fits a scale of 2^(E - 8) exactly, the next number does not."""
    a = torch.full((1, 64), from_bits(135 << 23 | mantissa))
    codes, scale = quant.requantize_rows(a, 64)
    assert scale.item() == 2.0**power
    assert codes.float().max().item() == (448.0 if power == 0 else 224.0)


@pytest.mark.parametrize("block", [(128, 128), (64, 128), (32, 48), (1, 7)], ids=str)
@pytest.mark.parametrize("shape", [(256, 128), (130, 200), (5, 300), (1, 1)], ids=str)
def test_blocks_equal_scalar_arithmetic(shape, block):
    w = torch.randn(shape).bfloat16()
    w[: block[0], : block[1]] = 0
    w[-1, -1] = math.inf
    codes, scales = moe_ops.quantize_weights_block(w, block)
    expected_codes = torch.empty(shape, dtype=torch.uint8)
    expected_scales = torch.empty(-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    for i, j in itertools.product(*map(range, expected_scales.shape)):
        area = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
        tile = w[area].float()
        code, expected_scales[i, j] = quantized(tile.flatten().tolist())
        expected_codes[area] = torch.tensor(code, dtype=torch.uint8).view(tile.shape)
    assert codes_equal(codes, expected_codes)
    assert bits_equal(scales, expected_scales)


def test_leading_dimensions():
    x = torch.randn(2, 3, 4, 200)
    codes, scales = moe_ops.quantize_activations(x)
    flat_codes, flat_scales = moe_ops.quantize_activations(x.view(24, 200))
    assert bits_equal(codes, flat_codes.view(2, 3, 4, 200)) and bits_equal(
        scales, flat_scales.view(2, 3, 4, 2)
    )
    vector = moe_ops.quantize_activations(x[0, 0, 0])
    assert bits_equal(vector[0], codes[0, 0, 0]) and bits_equal(vector[1], scales[0, 0, 0])
    codes, scales = moe_ops.quantize_weights_block(x[0].transpose(1, 2), (128, 2))
    assert scales.shape == (3, 2, 2)
    for index in range(3):
        alone = moe_ops.quantize_weights_block(x[0, index].t().contiguous(), (128, 2))
        assert bits_equal(codes[index], alone[0]) and bits_equal(scales[index], alone[1])


@pytest.mark.parametrize("quantizer", ["activations", "weights_block"])
def test_strides_do_not_reach_the_bits(quantizer):
    function = getattr(moe_ops, f"quantize_{quantizer}")
    x = torch.randn(40, 200).bfloat16()
    wide = torch.full((40, 400), math.nan).bfloat16()
    wide[:, 1::2] = x
    expected = function(x)
    for strided in (wide[:, 1::2], x.t().contiguous().t()):
        actual = function(strided)
        assert all(
            bits_equal(*pair) and pair[0].is_contiguous() for pair in zip(actual, expected, strict=True)
        )
    expanded, copied = function(x[:1].expand(40, 200)), function(x[:1].repeat(40, 1))
    assert all(bits_equal(*pair) for pair in zip(expanded, copied, strict=True))


@pytest.mark.parametrize("shape", [(0, 200), (3, 0), (2, 0, 5), (0, 3, 128)], ids=str)
def test_empty(shape):
    codes, scales = moe_ops.quantize_activations(torch.empty(shape))
    assert codes.shape == shape and codes.dtype == torch.float8_e4m3fn
    assert scales.shape == (*shape[:-1], -(-shape[-1] // 128)) and scales.dtype == torch.float32
    codes, scales = moe_ops.quantize_weights_block(torch.empty(shape))
    assert codes.shape == shape
    assert scales.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))


@pytest.mark.parametrize("magnitude", [1.0, 2.0**-120, 2.0**-126, 2.0**100], ids=str)
def test_round_trip_error(magnitude):
    """Half a place of e4m3: 2^-4 of a normal quotient, 2^-10 of the scale of a subnormal one."""
    x = torch.randn(64, 300) * magnitude
    for restored, scales in (
        (moe_ops.dequantize_activations(*(pair := moe_ops.quantize_activations(x, 64)), 64), pair[1]),
        (
            moe_ops.dequantize_weights_block(
                *(pair := moe_ops.quantize_weights_block(x, (16, 64))), (16, 64)
            ),
            None,
        ),
    ):
        scale = x.abs().max() / 448 if scales is None else scales.repeat_interleave(64, 1)[:, :300]
        scale = torch.as_tensor(scale).double().clamp(min=2.0**-126)
        bound = torch.maximum(x.double().abs() * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-20) + 2.0**-149
        assert ((restored.double() - x.double()).abs() <= bound).all()


def test_dequantize_is_one_product():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128).repeat(1, 2)[:, :200]
    scales = torch.tensor([[0.1, 2.0**-140], [3e38, 0.7]])
    expected = torch.tensor(
        [
            [codes[i, j].float().item() * scales[i, j // 128].item() for j in range(200)]  # exact in doubles
            for i in range(2)
        ],
        dtype=torch.float64,
    ).float()
    assert bits_equal(moe_ops.dequantize_activations(codes, scales), expected)
    assert bits_equal(moe_ops.dequantize_weights_block(codes, scales, (1, 128)), expected)
    powers = torch.tensor([[0.25, 2.0**-30], [4.0, 1.0]])
    by_e8m0 = moe_ops.dequantize_activations(codes, powers.to(torch.float8_e8m0fnu))
    assert bits_equal(by_e8m0, moe_ops.dequantize_activations(codes, powers))


@pytest.mark.parametrize("in_dim", [0, 1, 2, -1])
@pytest.mark.parametrize("quantizer", ["activations", "weights_block"])
def test_vmap(quantizer, in_dim):
    function = getattr(moe_ops, f"quantize_{quantizer}")
    x = torch.randn(3, 20, 200)
    expected = [torch.stack(parts) for parts in zip(*map(function, x), strict=True)]
    actual = torch.vmap(function, in_dims=in_dim)(x.movedim(0, in_dim))
    assert all(bits_equal(*pair) for pair in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_opcheck(layout, dtype):
    x = torch.randn(30, 200, dtype=dtype)
    x = x if layout == "contiguous" else x.t()
    for sizes in ((), (64,)):
        torch.library.opcheck(OPS.quantize_activations.default, (x, *sizes))
    for sizes in ((), (64, 32)):
        torch.library.opcheck(OPS.quantize_weights_block.default, (x, *sizes))


@pytest.mark.parametrize("quantizer", ["activations", "weights_block"])
def test_an_input_that_requires_grad_is_refused(quantizer):
    function = getattr(moe_ops, f"quantize_{quantizer}")
    x = torch.randn(4, 200, requires_grad=True)
    with pytest.raises(ValueError, match="codes and scales have no gradient"):
        function(x)
    with torch.no_grad():
        assert all(bits_equal(*pair) for pair in zip(function(x), function(x.detach()), strict=True))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled(dynamic, fresh_compiler):
    def everything(x):
        rows, blocks = moe_ops.quantize_activations(x), moe_ops.quantize_weights_block(x)
        return (
            *rows,
            *blocks,
            moe_ops.dequantize_activations(*rows),
            moe_ops.dequantize_weights_block(*blocks),
        )

    compiled = torch.compile(everything, fullgraph=True, dynamic=dynamic)
    for x in (torch.randn(30, 200).bfloat16(), special()):
        assert all(bits_equal(*pair) for pair in zip(compiled(x), everything(x), strict=True))
