"""The GPU kernels without a GPU: what each tile compiles to, which tile is chosen, what an operand is."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from moe_ops.kernels import (  # noqa: E402
    configs,
    operand_range,
    operands,
    shared_expert_backward,
    shared_expert_forward,
)
from moe_ops.kernels.launch import TRITON, DeviceFacts  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from .rendering import OfflineDriver  # noqa: E402

# Per capability: multiprocessors and shared memory of an A100, an H200, a B200.
FACTS = {
    80: DeviceFacts((8, 0), 108, 166912),
    90: DeviceFacts((9, 0), 132, 232448),
    100: DeviceFacts((10, 0), 148, 232448),
}
HIDDEN, INTERMEDIATE = 4096, 2048
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@pytest.fixture
def compiled(monkeypatch):
    """A function that compiles what a launcher would launch with one tile: kernels by name."""

    def compile_family(
        name, tile, capability, *, strict=False, limit=7.0, out_dtype=torch.bfloat16, tokens=300
    ):
        kernels = {}

        def launch(kernel, grid, *arguments, **options):
            kernels[kernel.__name__] = kernel.warmup(*arguments, grid=grid, **options)

        monkeypatch.setattr(driver, "_active", OfflineDriver(capability))
        monkeypatch.setattr(configs, "choose", lambda *_, **__: tile)
        for module in (shared_expert_forward, shared_expert_backward, operand_range):
            monkeypatch.setattr(module, "launch", launch)
        for module in (shared_expert_forward, shared_expert_backward):
            monkeypatch.setattr(module, "device_facts", lambda device: FACTS[capability])
        run_launcher(name, limit, out_dtype, tokens, strict=strict)
        return kernels

    return compile_family


def run_launcher(name, limit, out_dtype, tokens, *, strict):
    def meta(rows, columns, dtype=torch.bfloat16):
        return torch.empty(rows, columns, dtype=dtype, device="meta")

    x, dy = (operands.matrix(meta(tokens, HIDDEN)) for _ in range(2))
    w_gate, w_up = (operands.matrix(meta(INTERMEDIATE, HIDDEN)) for _ in range(2))
    w_down = operands.matrix(meta(HIDDEN, INTERMEDIATE))
    saved = tuple(meta(tokens, INTERMEDIATE, torch.float32) for _ in range(2))
    forward, backward = shared_expert_forward, shared_expert_backward
    if name == "gate_up":
        forward.launch_shared_expert_gate_up(x, w_gate, w_up, limit, strict=strict, save=False)
    elif name == "down":
        forward.launch_shared_expert_down(meta(tokens, INTERMEDIATE), w_down, strict=strict)
    elif name == "swiglu_backward":
        backward.launch_shared_expert_swiglu_backward(dy, w_down, None, saved, limit, strict=strict)
    elif name == "swiglu_backward_recompute":
        recompute = (x, w_gate, w_up)
        backward.launch_shared_expert_swiglu_backward(dy, w_down, recompute, None, limit, strict=strict)
    else:
        dz = meta(tokens, 2 * INTERMEDIATE)
        backward.launch_shared_expert_dx(dz, w_gate, w_up, out_dtype, strict=strict)


def stack_bytes(kernel, tmp_path):
    """Bytes of local memory a thread uses, spills among them."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage = subprocess.run(
        [CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    return max(map(int, re.findall(r"STACK:(\d+)", usage)))


def cases(*, strict):
    for name, family in configs.FAMILIES.items():
        for tile in configs.tiles(name, strict=strict):
            for capability, facts in FACTS.items():
                if configs.is_valid(family, tile, facts, tma=True):
                    shape = (
                        f"{tile.block_m}x{tile.block_n}x{tile.block_k}-{'tma' if tile.tma else 'pointers'}"
                    )
                    yield pytest.param(name, tile, capability, id=f"{name}-{shape}-sm{capability}")


@pytest.mark.parametrize(("name", "tile", "capability"), cases(strict=False))
def test_fast_kernels_compile(name, tile, capability, compiled, tmp_path):
    """Tensor cores, `wgmma` on Hopper from 64 rows on, TMA where told, no spills, memory as told."""
    (kernel,) = compiled(name, tile, capability).values()
    ptx = kernel.asm["ptx"]
    assert ("wgmma.mma_async" in ptx) == (capability == 90 and tile.block_m >= 64)
    assert ("tcgen05.mma" in ptx) == (capability == 100 and tile.block_m >= 64)
    assert ("mma.sync" in ptx) == (capability == 80 or tile.block_m < 64)
    assert ("cp.async.bulk.tensor" in ptx) == tile.tma
    assert kernel.metadata.shared <= configs.FAMILIES[name].shared_memory(tile)
    # ptxas keeps a few addresses of the large unrolled loops in local memory; accumulators are much more.
    assert stack_bytes(kernel, tmp_path) <= 32


@pytest.mark.parametrize(("name", "tile", "capability"), cases(strict=True))
def test_strict_kernels_compile(name, tile, capability, compiled):
    """FP32 FMAs alone, and beside them the two roundings for operands out of the FMA's range."""
    if capability == 100 and TRITON < (3, 8):
        pytest.skip("refused: tf32 instead of fp32")
    kernels = compiled(name, tile, capability, strict=True)
    kernels.pop("_operand_range_kernel")
    (kernel,) = kernels.values()
    ptx = kernel.asm["ptx"]
    assert not re.search(r"wgmma|mma\.sync|tcgen05", ptx)
    assert "fma.rn.f32" in ptx
    assert "mul.rn.f32" in ptx
    assert "add.rn.f32" in ptx
    assert not re.search(r"(mul|add)\.rn\.ftz\.f32", ptx)
    assert kernel.metadata.shared <= FACTS[capability].shared_memory


def test_fp32_gradient_compiles(compiled):
    """Its staged tiles are twice as large, so that it has fewer tiles to choose from."""
    family, facts = configs.FAMILIES["dx"], FACTS[90]
    valid = [t for t in family.fast if configs.is_valid(family, t, facts, tma=True, output_bytes=4)]
    assert 0 < len(valid) < len(family.fast)
    for tile in valid:
        (kernel,) = compiled("dx", tile, 90, out_dtype=torch.float32).values()
        assert kernel.metadata.shared <= family.shared_memory(tile, 4)


@pytest.mark.parametrize("name", configs.FAMILIES)
def test_a_new_number_of_tokens_compiles_nothing_new(name, compiled):
    """T is never specialised: neither T = 1 nor a multiple of 16 makes another kernel of the same tile."""
    tile = configs.tiles(name, strict=True)[0]
    first, *others = (compiled(name, tile, 90, strict=True, tokens=tokens) for tokens in (300, 1, 16, 301))
    assert len(first) == 2
    for kernels in others:
        assert all(kernels[kernel] is first[kernel] for kernel in first)


@pytest.mark.parametrize("name", configs.FAMILIES)
@pytest.mark.parametrize("capability", FACTS)
@pytest.mark.parametrize("strict", [False, True], ids=["fast", "strict"])
def test_there_is_a_tile_for_everything(name, capability, strict):
    """Any T, any layout, any output dtype; few tokens get small tiles, many get large ones."""
    facts = FACTS[capability]
    for tma in (False, True):
        for output_bytes in (2, 4):
            chosen = [
                configs.choose(name, facts, rows, 2048, strict=strict, tma=tma, output_bytes=output_bytes)
                for rows in (1, 16, 64, 300, 8192, 10**6)
            ]
            assert not any(tile.tma and not (tma and capability >= 90) for tile in chosen)
            assert chosen[0].block_m == chosen[1].block_m == 16
            assert chosen[-1].block_m >= (64 if strict or (capability >= 90 and tma) else 16)


@pytest.mark.parametrize("name", configs.FAMILIES)
@pytest.mark.parametrize("capability", [(8, 6), (8, 9), (12, 0)], ids=str)
def test_cards_with_little_shared_memory(name, capability):
    """99 KiB a block: fewer tiles, but some for everything."""
    facts = DeviceFacts(capability, 100, 101376)
    for strict in (False, True):
        for tma in (False, True):
            for output_bytes in (2, 4):
                for rows in (1, 300, 10**6):
                    tile = configs.choose(
                        name, facts, rows, 2048, strict=strict, tma=tma, output_bytes=output_bytes
                    )
                    needed = configs.FAMILIES[name].shared_memory(tile, output_bytes)
                    assert needed * tile.blocks <= facts.shared_memory


def test_every_tile_of_the_table_is_valid_on_the_card_it_was_measured_on():
    for name, family in configs.FAMILIES.items():
        for strict in (False, True):
            for tile in configs.tiles(name, strict=strict):
                assert configs.is_valid(family, tile, FACTS[90], tma=True), (name, tile)


def test_the_grid_covers_the_output_once():
    tile = configs.FAMILIES["down"].fast[0]
    facts = FACTS[90]
    assert tile.grid(facts, 1, tile.block_n) == (1,)
    assert tile.grid(facts, 10**6, 4096) == (facts.multiprocessors * tile.blocks,)
    assert tile.waves(facts, tile.block_m * facts.multiprocessors + 1, tile.block_n) == 2


@pytest.mark.parametrize(
    ("make", "row_stride", "has_tma_layout"),
    [
        (lambda t: t, 64, True),
        (lambda t: t[:1], 64, True),
        (lambda t: t[:, 8:40], 64, True),
        (lambda t: t[:, 1:33], 64, False),  # not aligned to 16 bytes
        (lambda t: t[:, :36].contiguous(), 36, False),  # rows not aligned
        (lambda t: t[:1, :36].contiguous(), 36, False),
        (lambda t: t[:, ::2], 64, False),
        (lambda t: t.t(), 1, False),
        (lambda t: t[:1].expand(8, 64), 0, False),
        (lambda t: t[2:3].expand(1, 64), 64, True),
        (lambda t: t[::3], 192, True),
    ],
)
def test_matrix_operands(make, row_stride, has_tma_layout):
    base = torch.zeros(8, 64, dtype=torch.bfloat16)
    tensor = make(base)
    operand = operands.matrix(tensor)
    assert (operand.rows, operand.columns) == tuple(tensor.shape)
    assert operand.row_stride == row_stride
    assert operand.has_tma_layout == has_tma_layout
    assert operand.tensor.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t,
        lambda t: t[0, 0, 0],
        lambda t: t[:, :, 0],
        lambda t: t.transpose(0, 1),
        lambda t: t.permute(2, 0, 1, 3),
        lambda t: t.permute(1, 2, 0, 3)[::2],
        lambda t: t[..., ::2].transpose(0, 2),
        lambda t: t[:1].expand(5, 3, 4, 16),
        lambda t: t[:0],
    ],
)
def test_activation_operands_address_every_row(make):
    """Whatever the leading dimensions, without a copy: the operand's addresses find the rows of a reshape."""
    base = torch.arange(2 * 3 * 4 * 16, dtype=torch.float32).view(2, 3, 4, 16)
    tensor = make(base)
    operand = operands.activation(tensor)
    offsets = operand.row_offsets
    if offsets is None:
        offsets = torch.arange(operand.rows) * operand.row_stride
    index = offsets[:, None] + torch.arange(operand.columns) * operand.column_stride
    start = tensor.storage_offset()
    assert torch.equal(base.flatten()[start + index], tensor.reshape(-1, tensor.shape[-1]))
    assert operand.tensor.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
