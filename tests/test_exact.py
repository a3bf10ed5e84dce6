"""Exact partial sums and the fused multiply-add in plain torch, against rational numbers."""

import itertools
from fractions import Fraction

import pytest
import torch

from moe_ops import exact, moe_reference
from moe_ops.testing import bits_equal, mega_moe_inputs


def rounded(value):
    """A rational number, rounded once to fp32 (nearest even), through two neighbours."""
    guess = torch.tensor(float(value), dtype=torch.float64).float()
    near = [guess, guess.nextafter(torch.tensor(torch.inf)), guess.nextafter(torch.tensor(-torch.inf))]
    near = [v for v in near if v.isfinite()]
    best = min(near, key=lambda v: (abs(Fraction(v.item()) - value), v.view(torch.int32).item() & 1))
    return best.item()


def test_fma():
    """Random numbers, and those where two roundings would differ from one; subnormal results."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(400, generator=generator) for _ in range(2))
    c = torch.randn(400, generator=generator) * 2.0 ** torch.randint(-60, 4, (400,), generator=generator)
    a[200:300] *= 2.0**-70
    b[200:300] *= 2.0**-72
    c[200:300] *= 2.0**-120
    # 1 + 2^-23 * (1 + tiny): fp64 rounds the tiny part away and then to even.
    a[300:] = 1 + 2.0**-12
    b[300:] = 1 + torch.arange(100) * 2.0**-23
    c[300:] = 2.0**30 + 2.0**7 * torch.arange(100)
    actual = exact.fma(a, b, c).tolist()
    for x, y, z, value in zip(a.tolist(), b.tolist(), c.tolist(), actual, strict=True):
        assert value == rounded(Fraction(x) * Fraction(y) + Fraction(z))


def test_fma_differs_from_two_roundings():
    a, b, c = torch.tensor([1 + 2.0**-23]), torch.tensor([1 - 2.0**-24]), torch.tensor([-1.0])
    assert exact.fma(a, b, c).item() != (a * b + c).item()
    # A tie in fp64's 53 bits that only rounding to odd decides: 2^24 + 1 + 2^-40.
    a, b, c = torch.tensor([1.0]), torch.tensor([1 + 2.0**-23]), torch.tensor([2.0**24 + 2])
    assert exact.fma(a, b, c).item() == rounded(Fraction(1 + 2.0**-23) + Fraction(2**24 + 2))


def test_fma_of_numbers_that_are_none():
    inf, nan, big = torch.inf, torch.nan, 3e38
    a = torch.tensor([inf, inf, nan, big, 0.0, -0.0, 1.0])
    b = torch.tensor([1.0, 1.0, 1.0, 10.0, -1.0, 1.0, inf])
    c = torch.tensor([1.0, -inf, 1.0, 0.0, 0.0, -0.0, 1.0])
    expected = torch.tensor([inf, nan, nan, inf, 0.0, -0.0, inf])
    assert bits_equal(exact.fma(a, b, c), expected)


@pytest.mark.parametrize("group", [64, 128])
def test_block_scaled_product(group):
    """Each partial is the exact sum, rounded once; blocks ascending; ragged K and N."""
    generator = torch.Generator().manual_seed(1)
    a, w = (torch.randn(n, 200, generator=generator).to(torch.float8_e4m3fn) for n in (3, 150))
    a_scale, w_scale = (
        torch.rand(3, -(-200 // group), generator=generator),
        torch.rand(2, 2, generator=generator),
    )
    actual = exact.block_scaled_product(a, a_scale, w, w_scale, group)
    for row, column in itertools.product(range(3), (0, 127, 128, 149)):
        total = 0.0
        for index, start in enumerate(range(0, 200, group)):
            pairs = zip(
                a[row, start : start + group].tolist(), w[column, start : start + group].tolist(), strict=True
            )
            partial = rounded(sum(Fraction(x) * Fraction(y) for x, y in pairs))
            scale = (a_scale[row, index] * w_scale[column // 128, start // 128]).item()
            total = rounded(Fraction(partial) * Fraction(scale) + Fraction(total))
        assert actual[row, column].item() == total


@pytest.mark.parametrize("spread", [0, 20, 90], ids="exponents{}".format)
def test_block_scaled_gradient(spread):
    """bf16 numbers over many binades, cancelling: the sum is exact all the same."""
    generator = torch.Generator().manual_seed(spread)
    dy = torch.randn(3, 200, generator=generator)
    dy = (dy * 2.0 ** torch.randint(-spread, spread + 1, dy.shape, generator=generator)).bfloat16()
    dy[:, 100:200] = -dy[:, :100]
    w = torch.randn(200, 130, generator=generator).to(torch.float8_e4m3fn)
    w[100:150] = w[:50]
    w_scale = torch.rand(2, 2, generator=generator)
    actual = exact.block_scaled_gradient(dy, w, w_scale)
    for row, column in itertools.product(range(3), (0, 127, 128)):
        total = 0.0
        for index, start in enumerate((0, 128)):
            pairs = zip(
                dy[row, start : start + 128].tolist(), w[start : start + 128, column].tolist(), strict=True
            )
            partial = rounded(sum(Fraction(x) * Fraction(y) for x, y in pairs))
            total = rounded(
                Fraction(partial) * Fraction(w_scale[index, column // 128].item()) + Fraction(total)
            )
        assert actual[row, column].item() == total


def test_gradient_of_numbers_that_are_none():
    """They reach their own row only."""
    dy = torch.randn(4, 128).bfloat16()
    expected = exact.block_scaled_gradient(dy, torch.ones(128, 8).to(torch.float8_e4m3fn), torch.ones(1, 1))
    dy[1, 5], dy[2, 6], dy[2, 7] = torch.nan, torch.inf, -torch.inf
    actual = exact.block_scaled_gradient(dy, torch.ones(128, 8).to(torch.float8_e4m3fn), torch.ones(1, 1))
    assert actual[1:3].isnan().all()
    assert bits_equal(actual[::3], expected[::3])


def test_rows_do_not_depend_on_each_other():
    inputs = mega_moe_inputs(300, 256, 128, 1, 1)
    w, scale = inputs.w_down[0], inputs.w_down_scale[0]
    whole = exact.block_scaled_gradient(inputs.dy, w, scale)
    for rows in (1, 2, 17, 100):
        assert bits_equal(exact.block_scaled_gradient(inputs.dy[:rows], w, scale), whole[:rows])


def test_tree_sum():
    """Pairs of neighbours, six times, then group after group; a ragged group is padded with zeros."""
    products = torch.randn(5, 150)
    for row, value in zip(products, moe_reference.tree_sum(products), strict=True):
        total = torch.tensor(0.0)
        for start in (0, 64, 128):
            group = [*row[start : start + 64], *[torch.tensor(0.0)] * (64 - len(row[start : start + 64]))]
            while len(group) > 1:
                group = [group[i] + group[i + 1] for i in range(0, len(group), 2)]
            total = total + group[0]
        assert bits_equal(value, total)
