"""`cpu-fp32-v1`: a row's bits depend on the row alone."""

import pytest
import torch
from moe_ops.kernels.cpu_matmul import BLOCK_ROWS, CHUNK_K, blocked_matmul

import moe_ops
from moe_ops.testing import bit_mismatches, bits_equal, shared_expert_inputs

# (384, 50): a ragged I, where BLAS edge kernels and ATen's vector tails gave other bits; (100, 37): all of it
# ragged; (1024, 512): long enough for one-ulp faults to show.
SHAPES = [(384, 50), (100, 37), (1024, 512)]
SHAPE_IDS = [f"H{hidden}-I{intermediate}" for hidden, intermediate in SHAPES]
ROWS = 300


def forward_and_dx(x, dy, weights, **options):
    x = x.detach().clone().requires_grad_()
    y = moe_ops.shared_expert_mlp(x, *weights, **options)
    y.backward(dy)
    return y.detach(), x.grad


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("limit", [None, 1.5], ids=["nolimit", "limit"])
def test_row_bits_do_not_depend_on_the_batch(shape, limit, threads, nan_memory):
    x, dy, *weights = shared_expert_inputs(ROWS, *shape, seed=threads)
    y, dx = forward_and_dx(x, dy, weights, swiglu_limit=limit)
    for rows in (1, 2, 7, BLOCK_ROWS + 1, ROWS):
        picked = torch.randperm(ROWS)[:rows]
        y_few, dx_few = forward_and_dx(x[picked], dy[picked], weights, swiglu_limit=limit)
        assert bits_equal(y_few, y[picked]), f"forward, {rows} rows"
        assert bits_equal(dx_few, dx[picked]), f"dX, {rows} rows"


def test_row_bits_do_not_depend_on_the_position_in_a_block(threads):
    x, dy, *weights = shared_expert_inputs(BLOCK_ROWS, 384, 50)
    y, dx = forward_and_dx(x, dy, weights)
    for shift in range(1, BLOCK_ROWS):
        y_shifted, dx_shifted = forward_and_dx(x.roll(shift, 0), dy.roll(shift, 0), weights)
        assert bits_equal(y_shifted, y.roll(shift, 0)), shift
        assert bits_equal(dx_shifted, dx.roll(shift, 0)), shift


def test_neighbours_do_not_leak():
    """NaN, infinities and huge values in the other rows of a block."""
    x, dy, *weights = shared_expert_inputs(9, 384, 50)
    y, dx = forward_and_dx(x, dy, weights)
    for bad in (float("nan"), float("inf"), 1e38):
        spoilt, spoilt_dy = torch.full_like(x, bad), torch.full_like(dy, bad)
        spoilt[4], spoilt_dy[4] = x[4], dy[4]
        y_spoilt, dx_spoilt = forward_and_dx(spoilt, spoilt_dy, weights)
        assert bits_equal(y_spoilt[4], y[4])
        assert bits_equal(dx_spoilt[4], dx[4])


def chained(a, weight):
    """The reduction order of the profile, step by step. a: [M, K]; weight: [K, N].

    A double holds the product of two bf16 exactly, and rounding a double sum to fp32 again is innocuous, so
    each step is an fp32 FMA.
    """
    total = torch.zeros(a.shape[0], weight.shape[1])
    for start in range(0, a.shape[1], CHUNK_K):
        chunk_sum = torch.zeros_like(total)
        for k in range(start, min(start + CHUNK_K, a.shape[1])):
            chunk_sum = (chunk_sum.double() + a[:, k, None].double() * weight[k].double()).float()
        total += chunk_sum
    return total


@pytest.mark.parametrize("transpose_weight", [True, False], ids=["NK", "KN"])
def test_matmul_is_the_chain_at_every_thread_count(transpose_weight):
    """Shapes at which long products gave other bits by position, rows or threads: K 50, 1024; N 37, 24, 8."""
    shapes = (
        (50, 8),
        (50, 37),
        (64, 24),
        (1000, 37),
        (1024, 64),
        (2048, 50),
        (1, 1),
        (384, 512),
        (128, 2048),
    )
    before = torch.get_num_threads()
    try:
        for k, n in shapes:
            a = torch.randn(BLOCK_ROWS + 16, k).bfloat16()
            weight = (torch.randn(n, k) if transpose_weight else torch.randn(k, n)).bfloat16()
            expected = chained(a, weight.t() if transpose_weight else weight)
            for thread_count in (1, 2, 3, 8, 16):
                torch.set_num_threads(thread_count)
                for rows in (slice(None), slice(3, 4), slice(5, 12)):
                    actual = blocked_matmul(a[rows], weight, transpose_weight=transpose_weight)
                    assert actual.is_contiguous()
                    assert bits_equal(actual, expected[rows]), (k, n, thread_count, rows)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("transpose_weight", [True, False], ids=["NK", "KN"])
def test_matmul_of_subnormal_and_huge_products(transpose_weight):
    """Nothing is flushed to zero, overflow is infinite, and padding adds no NaN beside infinities."""
    a = torch.randn(7, 300).bfloat16()
    weight = (torch.randn(5, 300) if transpose_weight else torch.randn(300, 5)).bfloat16()
    for scale in (2.0**-120, 2.0**-133, 1e38):
        scaled = (a.float() * scale).bfloat16()
        expected = chained(scaled, weight.t() if transpose_weight else weight)
        assert bits_equal(blocked_matmul(scaled, weight, transpose_weight=transpose_weight), expected), scale


def test_matmul_against_fp64():
    """K 4096: the error is that of fp32 accumulation, the padding adds nothing."""
    a, weight = torch.randn(130, 4096).bfloat16(), torch.randn(50, 4096).bfloat16()
    exact = a.double() @ weight.double().t()
    scale = a.double().abs() @ weight.double().abs().t()
    for transpose_weight in (True, False):
        stored = weight if transpose_weight else weight.t().contiguous()
        actual = blocked_matmul(a, stored, transpose_weight=transpose_weight)
        assert ((actual.double() - exact).abs() <= 4096 * 2.0**-24 * scale).all()


def test_plain_torch_is_not_batch_invariant_here():
    """The contrast that the blocks exist for; if this stops failing, they may not be needed."""
    x, _, w_gate, _, _ = shared_expert_inputs(ROWS, 1024, 50)
    weight = w_gate.float().t()
    full = x.float() @ weight
    alone = torch.cat([row[None].float() @ weight for row in x])
    assert bit_mismatches(alone, full).any()


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_float32_matmul_precision_does_not_reach_the_bits(precision):
    x, dy, *weights = shared_expert_inputs(65, 384, 128)
    expected = forward_and_dx(x, dy, weights)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        actual = forward_and_dx(x, dy, weights)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(bits_equal(*pair) for pair in zip(actual, expected, strict=True))


def test_two_runs_and_saved_weights():
    """The same bits twice, and not one bit of the weights is written."""
    x, dy, *weights = shared_expert_inputs(33, 384, 50)
    copies = [weight.clone() for weight in weights]
    first, second = (forward_and_dx(x, dy, weights) for _ in range(2))
    assert all(bits_equal(*pair) for pair in zip(first, second, strict=True))
    assert all(bits_equal(*pair) for pair in zip(weights, copies, strict=True))
    assert all(weight._version == 0 for weight in weights)
