"""The exact block products against Python fractions, which share no code with them."""

import itertools
import math
import struct
from fractions import Fraction

import pytest
import torch

from moe_ops import exact, moe_reference
from moe_ops.testing import bit_mismatches, bits_equal

E4M3 = torch.float8_e4m3fn
HUGE = 2.0**127 * (2 - 2.0**-23)
SPECIAL = [0.0, 1.0, 1 + 2.0**-23, 1 - 2.0**-24, 3.0, 2.0**-149, 2.0**-126, 2.0**-75, 2.0**64, HUGE, math.inf]
SPECIAL += [-value for value in SPECIAL] + [math.nan]


def fp32(value: Fraction) -> float:
    """One rounding of an exact number, ties to even; no sign of zero."""
    magnitude = abs(value)
    exponent = -126
    if magnitude >= Fraction(2) ** -126:
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        exponent -= Fraction(2) ** exponent > magnitude
    place = Fraction(2) ** (exponent - 23)
    rounded = round(magnitude / place) * place
    rounded = math.inf if rounded >= 2**128 else float(rounded)
    return math.copysign(rounded, value)


def fma(a: float, b: float, c: float) -> float:
    """a * b + c, rounded once."""
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    total = Fraction(a) * Fraction(b) + Fraction(c)
    return fp32(total) if total else a * b + c  # the sign of zero: the product is exact in doubles


def nearest(value: float) -> float:
    """fp32 of a number that a double holds."""
    return struct.unpack("f", struct.pack("f", value))[0]


def columns_of(rows) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True)]


def in_doubles(a, b, c):
    return (a.double() * b.double() + c.double()).float()


def check_fma(rows):
    a, b, c = columns_of(rows)
    expected = [fma(*row) for row in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    assert bits_equal(exact.fma(a, b, c), torch.tensor(expected))


def test_fma_of_special_values():
    check_fma(itertools.product(SPECIAL, SPECIAL, SPECIAL))


@pytest.mark.parametrize("spread", [4, 30, 120])
def test_fma_of_random_values(spread):
    """c is near the product, far from it and cancels it; results from subnormal to infinite."""
    torch.manual_seed(spread)
    a, b, near = torch.randn(3, 1500) * torch.exp2(torch.randint(-spread, spread, (3, 1500)))
    product = a.double() * b.double()
    for c in (near, product.float(), -product.float(), -(product * (1 + near.sign() * 2.0**-24)).float()):
        check_fma(torch.stack((a, b, c), 1).tolist())


def test_fma_where_doubles_round_twice():
    """The double sum is the middle of two fp32 numbers; the exact sum is beside it."""
    u = 2.0**-23
    tail = [(1 + u, 2.0**-24 * (1 - u)), (1 + u, 2.0**-24 * (1 - u) * -1)]  # +-(2^-24 - 2^-70)
    rows = [(a, b, c) for a, b in tail for c in (1 + u, -1 - u, 1 + 3 * u, -1 - 3 * u)]
    rows += [(a, b * 2.0**40, c * 2.0**40) for a, b, c in rows]
    a, b, c = columns_of(rows)
    check_fma(rows)
    assert bit_mismatches(in_doubles(a, b, c), exact.fma(a, b, c)).all()


def test_fma_at_the_borders():
    """Subnormal results, underflow to a signed zero, the largest number and overflow."""
    u = 2.0**-23
    check_fma(
        [(s * a, b, s * c) for s in (1, -1) for a, b, c in (
            (2.0**-75, 2.0**-75, 0.0), (2.0**-75, 2.0**-75 * (1 + u), 0.0), (2.0**-80, 2.0**-80, 0.0),
            (2.0**-75, 2.0**-75, 2.0**-149), (2.0**-75, -(2.0**-75), 2.0**-149),
            (2.0**-75, 2.0**-74, -(2.0**-126)),
            (2.0**-75, 2.0**-75 * (1 + u), 2.0**-126 - 2.0**-149), (2.0**-64, 2.0**-64, -(2.0**-126)),
            (2.0**51, 2.0**52, HUGE), (2.0**51, 2.0**52 * (1 - u), HUGE), (2.0**51, 2.0**52, HUGE * (1 - u)),
            (HUGE, HUGE, -HUGE), (HUGE, 2.0, -HUGE), (HUGE, 1.0, HUGE), (2.0**-149, 2.0**-149, HUGE),
        )]
    )  # fmt: skip


def codes(*shape: int) -> torch.Tensor:
    """All finite e4m3 numbers alike."""
    magnitudes, signs = torch.randint(0, 127, shape), torch.randint(0, 2, shape) * 128
    return (magnitudes + signs).to(torch.uint8).view(E4M3)


def block_sum(a: list[float], b: list[float]) -> float:
    return fp32(sum((Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)), Fraction(0)))


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("size_k", [1, 64, 100, 128, 200, 321])
def test_product(size_k, group):
    m, n = 3, 131
    a, w = codes(m, size_k), codes(n, size_k)
    a_scale = torch.rand(m, -(-size_k // group)) * 1e-2
    w_scale = torch.rand(2, -(-size_k // 128))
    a_scale[1] *= 2.0**-120  # the product of the scales is rounded, and subnormal
    actual = exact.block_scaled_product(a, a_scale, w, w_scale, group)
    picked = [0, 1, 127, 128, 130]
    expected = torch.zeros(m, len(picked))
    for i, (j, column) in itertools.product(range(m), enumerate(picked)):
        total = 0.0
        for k in range(0, size_k, group):
            partial = block_sum(
                a[i, k : k + group].float().tolist(), w[column, k : k + group].float().tolist()
            )
            scale = nearest(a_scale[i, k // group].item() * w_scale[column // 128, k // 128].item())
            total = fma(partial, scale, total)
        expected[i, j] = total
    assert bits_equal(actual[:, picked], expected)


def test_product_with_a_nan_scale():
    a, w = codes(3, 200), codes(5, 200)
    a_scale, w_scale = torch.rand(3, 4), torch.rand(1, 2)
    expected = exact.block_scaled_product(a, a_scale, w, w_scale, 64)
    a_scale[1, 2] = math.nan
    actual = exact.block_scaled_product(a, a_scale, w, w_scale, 64)
    assert actual[1].isnan().all()
    assert bits_equal(actual[[0, 2]], expected[[0, 2]])


def wide(m: int, k: int) -> torch.Tensor:
    """Every finite bf16 alike, from 2^-133 to 2^127."""
    bits = torch.randint(0, 0x7F80, (m, k)) | torch.randint(0, 2, (m, k)) << 15
    return bits.to(torch.uint16).view(torch.bfloat16)


def cancelling(m: int, k: int) -> torch.Tensor:
    """Small numbers among pairs of large ones: what is left of a row is in its smallest numbers."""
    dy = wide(m, k)
    half = k // 2 // 2
    dy[:, half : 2 * half] = -dy[:, :half]
    dy[:, 2 * half :] = (dy[:, 2 * half :].float() * 2.0**-100).bfloat16()
    return dy


GRADIENTS = {
    "normal": lambda m, k: torch.randn(m, k).bfloat16(),
    "every-exponent": wide,
    "small": lambda m, k: (torch.randn(m, k) * 2.0**-130).bfloat16(),
    "overflow": lambda m, k: (torch.randn(m, k) * 2.0**118).bfloat16(),
    "cancelling": cancelling,
    "zero": lambda m, k: torch.zeros(m, k).bfloat16(),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("size_k", [1, 128, 200])
def test_gradient(size_k, name):
    torch.manual_seed(size_k)
    m, n = 4, 131
    dy, w = GRADIENTS[name](m, size_k), codes(size_k, n)
    if name == "cancelling":
        half = size_k // 4
        w.view(torch.uint8)[half : 2 * half] = w.view(torch.uint8)[:half]
    w_scale = torch.rand(-(-size_k // 128), 2)
    picked = [0, 127, 128, 130]
    expected = torch.zeros(m, len(picked))
    for i, (j, column) in itertools.product(range(m), enumerate(picked)):
        total = 0.0
        for k in range(0, size_k, 128):
            partial = block_sum(dy[i, k : k + 128].tolist(), w[k : k + 128, column].float().tolist())
            total = fma(partial, w_scale[k // 128, column // 128].item(), total)
        expected[i, j] = total
    assert bits_equal(exact.block_scaled_gradient(dy, w, w_scale)[:, picked], expected)


PARTIALS = {  # (dy, w) of one block
    "middle": ([1.0, 2.0**-24], [1.0, 1.0]),
    "above-middle": ([1.0, 2.0**-24, 2.0**-60], [1.0, 1.0, 1.0]),
    "below-middle": ([1.0, 2.0**-24, 2.0**-60], [1.0, 1.0, -1.0]),
    "above-middle-by-least": ([1.0, 2.0**-24, 2.0**-133], [1.0, 1.0, 2.0**-9]),
    "behind-large": ([2.0**66, 2.0**67, 1.0, 2.0**-24, 2.0**-60], [256.0, -128.0, 1.0, 1.0, 1.0]),
    "behind-two-large": (
        [2.0**66, 2.0**67, 2.0**126, 2.0**127, 1.0, 2.0**-24, 2.0**-130],
        [256.0, -128.0, -448.0, 224.0, 1.0, 1.0, 1.0],
    ),
    "all-cancels": ([2.0**127, 2.0**126, 2.0**-133], [1.0, -2.0, 0.0]),
    "beyond-fp32-and-back": ([2.0**127, -(2.0**127), 3.0], [448.0, 448.0, 1.0]),
}


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])
@pytest.mark.parametrize("name", PARTIALS)
def test_partial_is_rounded_once(name, sign):
    """Where one more rounding of a part of the sum, even to a double, would show."""
    values, weights = PARTIALS[name]
    dy, w = torch.tensor([values]) * sign, torch.tensor([weights])
    actual = exact.block_scaled_gradient(dy.bfloat16(), w.t().contiguous().to(E4M3), torch.ones(1, 1))
    assert actual.item() == block_sum(dy[0].tolist(), weights)


def test_gradient_of_infinities_and_nan():
    """They reach their own row alone; inf - inf is NaN."""
    dy, w, w_scale = torch.randn(5, 200).bfloat16(), codes(200, 40), torch.rand(2, 1)
    w = torch.where(w.float() == 0, 1.0, w.float()).to(E4M3)
    expected = exact.block_scaled_gradient(dy, w, w_scale)
    dy[1, 3], dy[2, 150], dy[3, 0], dy[3, 1] = math.nan, math.inf, math.inf, -math.inf
    actual = exact.block_scaled_gradient(dy, w, w_scale)
    assert actual[1].isnan().all()
    assert bits_equal(actual[2], w[150].float() * math.inf)
    assert bits_equal(actual[3].isnan(), (w[0].float() > 0) == (w[1].float() > 0))
    assert bits_equal(actual[[0, 4]], expected[[0, 4]])


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("nan_weight", [False, True], ids=["finite", "nan"])
def test_row_bits_do_not_depend_on_the_rows(name, nan_weight):
    """Nor which windows of exponents the other rows need; a NaN weight reaches a zero row too."""
    rows = torch.cat([make(7, 200) for make in (GRADIENTS[name], GRADIENTS["every-exponent"])])
    rows[3] = 0
    a, a_scale = codes(14, 200), torch.rand(14, 4)
    w, w_scale = codes(200, 50), torch.rand(2, 1)
    if nan_weight:
        w.view(torch.uint8)[150, 20] = 0x7F
    by_k = w.view(torch.uint8).t().contiguous().view(E4M3)
    gradient = exact.block_scaled_gradient(rows, w, w_scale)
    product = exact.block_scaled_product(a, a_scale, by_k, w_scale.t(), 64)
    for picked in ([0], [3], [9, 1], [13, 12, 11, 3, 4, 5, 6]):
        few = a.view(torch.uint8)[picked].view(E4M3)
        assert bits_equal(exact.block_scaled_gradient(rows[picked], w, w_scale), gradient[picked])
        assert bits_equal(
            exact.block_scaled_product(few, a_scale[picked], by_k, w_scale.t(), 64), product[picked]
        )
    none = exact.block_scaled_gradient(rows[:0], w, w_scale)
    assert none.shape == (0, 50) and none.dtype == torch.float32


def scalar_tree(values: list[float]) -> float:
    total = 0.0
    for start in range(0, len(values), 64):
        level = values[start : start + 64]
        level = level + [0.0] * (64 - len(level))
        while len(level) > 1:
            level = [nearest(a + b) for a, b in zip(level[::2], level[1::2], strict=True)]
        total = nearest(total + level[0])
    return total


@pytest.mark.parametrize("columns", [1, 2, 63, 64, 65, 100, 128, 200, 512])
def test_tree_sum(columns):
    products = torch.randn(20, columns) * torch.exp2(torch.randint(-10, 10, (20, columns)))
    expected = torch.tensor([scalar_tree(row) for row in products.tolist()])
    assert bits_equal(moe_reference.tree_sum(products), expected)
    zeros = moe_reference.tree_sum(torch.full((2, columns), -0.0))
    assert bits_equal(zeros, torch.zeros(2))
