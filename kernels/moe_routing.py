"""Routing of the MoE layer on the device: which row of the expert-major order each (token, slot) gets.

Entry `token * top_k + slot` gets row `offset of its expert + number of earlier entries of that expert`, so
the order is fixed and nothing is read back. Sizes depend on T * top_k and E alone.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

BLOCK = 256
"""Entries that one program counts."""

_SCAN = 8192
"""Elements of the scan's tile."""


class Routing(NamedTuple):
    """Attributes:
    counts: [E + 1] int32, rows per expert, then the number of indices that are neither an expert nor -1.
    offsets: [E] int32, the first row of each expert (exclusive sums of counts).
    block_offsets: [blocks, bins] int32, rows of an expert in earlier blocks of entries.
    ranks: [T * top_k] int32, an entry's number among those of its expert in its block.
    bins: power of two >= E + 2.
    """

    counts: Tensor
    offsets: Tensor
    block_offsets: Tensor
    ranks: Tensor
    bins: int


@triton.jit
def expert_tile(topk_idx_ptr, entries, count, experts, top_k, stride_t, stride_k):
    """The expert of each entry; `experts` for a dropped index, `experts + 1` for a masked slot or none."""
    token = (entries // top_k).to(tl.int64)
    pointers = topk_idx_ptr + token * stride_t + (entries % top_k) * stride_k
    index = tl.load(pointers, mask=entries < count, other=-1)
    other = tl.where(index == -1, experts + 1, experts)
    return tl.where((index >= 0) & (index < experts), index.to(tl.int32), other)


@triton.jit
def _store_offsets(totals, counts_ptr, offsets_ptr, experts, BINS: tl.constexpr):
    bins = tl.arange(0, BINS)
    rows = tl.where(bins < experts, totals, 0)
    tl.store(offsets_ptr + bins, tl.cumsum(rows, 0) - rows, mask=bins < experts)
    tl.store(counts_ptr + bins, totals, mask=bins <= experts)


@triton.jit(do_not_specialize=["count"])
def _moe_count_kernel(
    topk_idx_ptr,
    histogram_ptr,
    block_offsets_ptr,
    ranks_ptr,
    counts_ptr,
    offsets_ptr,
    count,
    experts,
    top_k,
    stride_t,
    stride_k,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """One program per `BLOCK` entries: its histogram and each entry's rank. `SINGLE`: the only program."""
    first = tl.program_id(0) * BLOCK
    local = tl.arange(0, BLOCK)
    expert = expert_tile(topk_idx_ptr, first + local, count, experts, top_k, stride_t, stride_k)
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, min(BLOCK, count - first), CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_expert = expert_tile(topk_idx_ptr, first + other, count, experts, top_k, stride_t, stride_k)
        earlier = (other_expert[None, :] == expert[:, None]) & (other[None, :] < local[:, None])
        rank += tl.sum(earlier.to(tl.int32), 1)
    tl.store(ranks_ptr + first + local, rank, mask=first + local < count)
    histogram = tl.histogram(expert, BINS)
    bins = tl.arange(0, BINS)
    if SINGLE:
        _store_offsets(histogram, counts_ptr, offsets_ptr, experts, BINS)
        tl.store(block_offsets_ptr + bins, tl.zeros((BINS,), tl.int32))
    else:
        tl.store(histogram_ptr + tl.program_id(0) * BINS + bins, histogram)


@triton.jit(do_not_specialize=["blocks"])
def _moe_scan_kernel(
    histogram_ptr,
    block_offsets_ptr,
    counts_ptr,
    offsets_ptr,
    blocks,
    experts,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: exclusive sums of the histograms over blocks; their totals become offsets."""
    bins = tl.arange(0, BINS)
    totals = tl.zeros((BINS,), tl.int32)
    for start in range(0, blocks, ROWS):
        rows = start + tl.arange(0, ROWS)
        position = rows[:, None] * BINS + bins[None, :]
        mask = (rows < blocks)[:, None]
        histogram = tl.load(histogram_ptr + position, mask=mask, other=0)
        tl.store(
            block_offsets_ptr + position, totals[None, :] + tl.cumsum(histogram, 0) - histogram, mask=mask
        )
        totals += tl.sum(histogram, 0)
    _store_offsets(totals, counts_ptr, offsets_ptr, experts, BINS)


def launch_moe_routing(topk_idx: Tensor, experts: int) -> Routing:
    """Args: topk_idx: [T, top_k] int32 or int64, any strides. experts: E."""
    count = topk_idx.numel()
    bins = max(32, triton.next_power_of_2(experts + 2))
    blocks = triton.cdiv(count, BLOCK)

    def new(*shape: int) -> Tensor:
        return topk_idx.new_empty(shape, dtype=torch.int32)

    histogram = new(blocks, bins) if blocks > 1 else None
    routing = Routing(new(experts + 1), new(experts), new(blocks, bins), new(count), bins)
    launch(
        _moe_count_kernel,
        (blocks,),
        topk_idx,
        histogram,
        routing.block_offsets,
        routing.ranks,
        routing.counts,
        routing.offsets,
        count,
        experts,
        topk_idx.shape[1],
        *topk_idx.stride(),
        BLOCK=BLOCK,
        CHUNK=64,
        BINS=bins,
        SINGLE=blocks == 1,
        num_warps=8,
    )
    if blocks > 1:
        launch(
            _moe_scan_kernel,
            (1,),
            histogram,
            routing.block_offsets,
            routing.counts,
            routing.offsets,
            blocks,
            experts,
            BINS=bins,
            ROWS=min(triton.next_power_of_2(blocks), max(1, _SCAN // bins)),
            num_warps=8,
        )
    return routing
