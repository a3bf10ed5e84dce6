"""The Triton kernels of `tc-fp32-v1`: a row's bits depend on the row alone."""

import functools

import pytest
import torch

import moe_ops
from moe_ops import reference
from moe_ops.testing import bits_equal, shared_expert_inputs

pytestmark = pytest.mark.gpu

OPS = torch.ops.moe_ops
# Two DeepSeek sizes, Qwen3-MoE's, and one below every large tile.
SHAPES = [(4096, 2048), (7168, 2048), (2048, 768), (384, 128)]
SHAPE_IDS = [f"H{h}-I{i}" for h, i in SHAPES]
# Ragged against every tile; rows that a descriptor can address, and rows that it cannot.
RAGGED = [(136, 72), (100, 37)]
ALL_SHAPES = pytest.mark.parametrize(
    "inputs", SHAPES + RAGGED, ids=[f"H{h}-I{i}" for h, i in SHAPES + RAGGED], indirect=True
)
TOKENS = 8192


@functools.lru_cache(maxsize=1)
def layer_inputs(shape):
    return shared_expert_inputs(TOKENS, *shape, device="cuda", seed=sum(shape))


@pytest.fixture(params=SHAPES, ids=SHAPE_IDS)
def inputs(request):
    """`TOKENS` rows for the layers' shapes. Not to be written to."""
    return layer_inputs(request.param)


def run(x, dy, weights, **options):
    x = x.detach().requires_grad_()
    y = moe_ops.shared_expert_mlp(x, *weights, **options)
    (dx,) = torch.autograd.grad(y, x, dy)
    return y.detach(), dx


def all_equal(actual, expected):
    return all(bits_equal(*pair) for pair in zip(actual, expected, strict=True))


def mm(a, weight, *, transpose_weight):
    """cuBLAS: from T = 256 on it does not split K (H200, torch 2.11), so that its products are a witness."""
    return torch.mm(a, weight.t() if transpose_weight else weight, out_dtype=torch.float32)


@ALL_SHAPES
@pytest.mark.parametrize("limit", [None, 0.7], ids=["nolimit", "limit"])
def test_rows_alone_and_among_others(inputs, limit, nan_memory):
    """First, last and anywhere; beside other rows, zeros, NaN; computed twice; g and u saved or not."""
    x, dy, *weights = inputs
    copies = [weight.clone() for weight in weights]
    y, dx = run(x, dy, weights, swiglu_limit=limit)
    assert torch.isfinite(y).all()
    assert torch.isfinite(dx).all()
    assert all_equal(run(x, dy, weights, swiglu_limit=limit, save="activations"), (y, dx))
    shuffled = torch.randperm(TOKENS, device="cuda")
    for rows in (1, 2, 15, 16, 17, 33, 64, 100, 129, 256, 1000, 2048, 4097):
        for picked in (shuffled[:rows], torch.arange(TOKENS - rows, TOKENS, device="cuda")):
            for save in ("recompute", "activations"):
                actual = run(x[picked], dy[picked], weights, swiglu_limit=limit, save=save)
                assert all_equal(actual, (y[picked], dx[picked])), (rows, save)
    for filler in (0.0, float("nan"), float("inf")):
        for rows, position in ((5, 0), (5, 4), (300, 77), (300, 299)):
            padded_x, padded_dy = torch.full_like(x[:rows], filler), torch.full_like(dy[:rows], filler)
            padded_x[position], padded_dy[position] = x[7], dy[7]
            actual = run(padded_x, padded_dy, weights, swiglu_limit=limit)
            assert all_equal((a[position] for a in actual), (y[7], dx[7])), (filler, rows, position)
    assert all_equal(weights, copies)


@ALL_SHAPES
def test_every_tile(inputs, monkeypatch, nan_memory):
    """Every tile of `configs.py`, TMA or not, forward and dX."""
    from moe_ops.kernels import configs
    from moe_ops.kernels.launch import device_facts

    x, dy, *weights = inputs
    facts = device_facts(x.device)
    expected = run(x, dy, weights, swiglu_limit=0.7)
    valid = {
        name: [
            tile
            for tile in configs.tiles(name, strict=False)
            if configs.is_valid(family, tile, facts, tma=True)
        ]
        for name, family in configs.FAMILIES.items()
    }
    used = set()
    for index in range(max(map(len, valid.values()))):

        def forced(name, *_, tma, index=index, **__):
            tiles = [tile for tile in valid[name] if tma or not tile.tma]
            tile = tiles[index % len(tiles)]
            used.add((name, tile))
            return tile

        monkeypatch.setattr(configs, "choose", forced)
        for rows in (1, 70, 300):
            for save in ("recompute", "activations"):
                actual = run(x[:rows], dy[:rows], weights, swiglu_limit=0.7, save=save)
                assert all_equal(actual, (value[:rows] for value in expected)), (index, rows, save)
    takes_descriptors = weights[0].shape[1] % 8 == 0
    assert len(used) == sum(takes_descriptors or not tile.tma for tiles in valid.values() for tile in tiles)


def test_layouts(inputs, nan_memory):
    """Strides and alignments that a descriptor takes and that it does not: the same bits, without a copy."""
    x, dy, w_gate, w_up, w_down = inputs
    x, dy = x[:300], dy[:300]
    expected = run(x, dy, (w_gate, w_up, w_down))

    def sliced(value, offset):
        wide = torch.full((*value.shape[:-1], value.shape[-1] + 24), float("nan")).to(value)
        wide[..., offset : offset + value.shape[-1]] = value
        return wide[..., offset : offset + value.shape[-1]]

    def transposed(value):
        return value.t().contiguous().t()

    for name, layout in {
        "aligned slice": functools.partial(sliced, offset=8),
        "odd slice": functools.partial(sliced, offset=3),
        "transposed": transposed,
        "every other row": lambda value: value.repeat_interleave(2, 0)[::2],
    }.items():
        actual = run(layout(x), layout(dy), (w_gate, w_up, w_down))
        assert all_equal(actual, expected), f"activations: {name}"
        actual = run(x, dy, [layout(weight) for weight in (w_gate, w_up, w_down)])
        assert all_equal(actual, expected), f"weights: {name}"
    packed = torch.cat((w_gate, w_up))
    assert all_equal(run(x, dy, (*packed.chunk(2), w_down)), expected)
    # Leading dimensions on two strides: rows (i, j) at i * H + j * 3 * H.
    crossed_x, crossed_dy = (value.view(100, 3, -1).transpose(0, 1) for value in (x, dy))
    for save in ("recompute", "activations"):
        y, dx = run(crossed_x, crossed_dy, (w_gate, w_up, w_down), save=save)
        assert all_equal((value.transpose(0, 1).reshape(300, -1) for value in (y, dx)), expected)
    x = x.detach().requires_grad_()
    moe_ops.shared_expert_mlp(x, w_gate, w_up, w_down).sum().backward()  # a gradient of stride 0
    assert bits_equal(x.grad, run(x, torch.ones_like(dy), (w_gate, w_up, w_down))[1])


@pytest.mark.parametrize("tokens", [256, 1000, 8192])
@pytest.mark.parametrize("limit", [None, 0.7], ids=["nolimit", "limit"])
def test_against_torch_mm(inputs, tokens, limit):
    """The whole layer, in fp32 where it is fp32, with products of another library."""
    x, dy, w_gate, w_up, w_down = inputs
    x, dy = x[:tokens], dy[:tokens]

    g, u = reference.gate_up(x, w_gate, w_up, mm)
    y = reference.down(g, u, w_down, limit, mm)
    dx = reference.dx_from_pre_activations(dy, g, u, w_gate, w_up, w_down, limit, mm)
    options = {"swiglu_limit": limit}
    saved = OPS._shared_expert_mlp_save(x, w_gate, w_up, w_down, **options)
    assert all_equal(saved, (y, g, u))
    for actual in (
        OPS._shared_expert_mlp_dx(dy, x, w_gate, w_up, w_down, out_dtype=torch.float32, **options),
        OPS._shared_expert_mlp_dx_saved(dy, g, u, w_gate, w_up, w_down, out_dtype=torch.float32, **options),
    ):
        assert bits_equal(actual, dx)
    assert bits_equal(OPS._shared_expert_mlp_dx(dy, x, w_gate, w_up, w_down, **options), dx.bfloat16())


def test_the_gradient_at_the_limit(inputs):
    """Pre-activations exactly at the bound, beside it, infinite and NaN."""
    _, dy, *weights = inputs
    g, u = pre_activations_at(0.75, 256, weights[0].shape[0])

    options = {"swiglu_limit": 0.75, "out_dtype": torch.float32}
    dx = OPS._shared_expert_mlp_dx_saved(dy[:256], g, u, *weights, **options)
    assert bits_equal(dx, reference.dx_from_pre_activations(dy[:256], g, u, *weights, 0.75, mm))
    assert torch.isfinite(dx[:200]).all()


def pre_activations_at(limit, rows, columns):
    """(g, u) of values around the limit; the last rows hold infinities and NaN too."""
    after = torch.nextafter(torch.tensor(limit), torch.tensor(2 * limit)).item()
    values = torch.tensor([limit, -limit, after, -after, limit / 2, 0.0, -0.0, -3.0], device="cuda")
    g, u = (values[torch.randint(len(values), (rows, columns), device="cuda")] for _ in range(2))
    for row, value in enumerate((float("inf"), float("-inf"), float("nan")), start=rows - 6):
        g[row, ::3], u[row + 3, ::3] = value, value
    return g, u


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_and_in_a_graph(inputs, mode, fresh_compiler):
    """Eager, compiled for every T, and as CUDA graphs."""
    x, dy, *weights = inputs
    y, dx = run(x, dy, weights)
    compiled = torch.compile(moe_ops.shared_expert_mlp, fullgraph=True, mode=mode)
    for rows in (2048, 17, 33, 300) if mode is None else (256, 256, 256):
        torch.compiler.cudagraph_mark_step_begin()
        step_x = x[:rows].detach().clone().requires_grad_()
        step_y = compiled(step_x, *weights)
        (step_dx,) = torch.autograd.grad(step_y, step_x, dy[:rows])
        assert all_equal((step_y.detach(), step_dx), (y[:rows], dx[:rows])), rows


@pytest.mark.parametrize("variant", [{}, {"profile": "fp32-serial-v1"}], ids=["fast", "strict"])
def test_nothing_outside_the_outputs_is_written(variant, monkeypatch):
    """Every tensor that the kernels allocate lies between guards, and is written whole."""
    guarded = []
    new_empty = torch.Tensor.new_empty

    def with_guards(self, *shape, dtype=None, device=None):
        shape = shape[0] if isinstance(shape[0], tuple | list | torch.Size) else shape
        size = torch.Size(shape).numel() * (dtype or self.dtype).itemsize
        storage = new_empty(self, (size + 2048,), dtype=torch.uint8)
        storage.fill_(0xFF)  # NaN in bf16 and in fp32
        inside = storage[1024 : 1024 + size].view(dtype or self.dtype)
        guarded.append((storage, inside))
        return inside.view(shape)

    for shape in ((70, 384, 136), (33, 100, 37), (300, 1024, 520)):
        inputs = shared_expert_inputs(*shape, device="cuda")
        expected = [
            run(inputs.x, inputs.dy, inputs.weights, save=s, **variant) for s in ("recompute", "activations")
        ]
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", with_guards)
            actual = [
                run(inputs.x, inputs.dy, inputs.weights, save=s, **variant)
                for s in ("recompute", "activations")
            ]
        for pair in zip(actual, expected, strict=True):
            assert all_equal(*pair)
    assert len(guarded) == 3 * (4 + 6)
    for storage, inside in guarded:
        assert (storage[:1024] == 0xFF).all()
        assert (storage[-1024:] == 0xFF).all()
        assert not inside.isnan().any()


def test_memory(inputs):
    """Forward: h and y. dX: dz and dx. Nothing else, whatever the layout of x; recompute keeps x alone."""
    x, dy, *weights = inputs
    tokens, (intermediate, hidden) = 4096, weights[0].shape
    wide = torch.zeros(tokens, hidden + 8, device="cuda", dtype=torch.bfloat16)
    wide[:, :hidden] = x[:tokens]
    for activations in (x[:tokens], wide[:, :hidden], wide[:, 3 : hidden + 3]):
        activations = activations.detach().requires_grad_()
        moe_ops.shared_expert_mlp(activations, *weights)
        y, kept, peak = requested_bytes(lambda: moe_ops.shared_expert_mlp(activations, *weights))  # noqa: B023
        assert peak == 2 * tokens * (intermediate + hidden)
        assert kept == 2 * tokens * hidden
        _, kept, peak = requested_bytes(lambda: torch.autograd.grad(y, activations, dy[:tokens]))  # noqa: B023
        assert peak == 2 * tokens * (2 * intermediate + hidden)
        assert kept == 2 * tokens * hidden


def requested_bytes(function):
    """(result, bytes allocated after `function`, at its peak), beyond those before it."""
    key = "requested_bytes.all."
    before = torch.cuda.memory_stats()[key + "current"]
    torch.cuda.reset_peak_memory_stats()
    result = function()
    stats = torch.cuda.memory_stats()
    return result, stats[key + "current"] - before, stats[key + "peak"] - before


@pytest.mark.parametrize(
    ("profile", "offset"),
    [("tc-fp32-v1", 0), ("tc-fp32-v1", 3), ("fp32-serial-v1", 0)],
    ids=["fast-tma", "fast-pointers", "strict"],
)
def test_more_than_2_31_elements(profile, offset):
    """T * I > 2^31 and T * H > 2^32: 64-bit offsets everywhere."""
    tokens, hidden, intermediate, period = 17_000_000, 256, 128, 1000
    inputs = shared_expert_inputs(period, hidden, intermediate, device="cuda")
    expected = run(inputs.x, inputs.dy, inputs.weights, profile=profile)
    wide = torch.empty(tokens, hidden + 8, device="cuda", dtype=torch.bfloat16)
    x = wide[:, offset : offset + hidden]
    x.unflatten(0, (-1, period)).copy_(inputs.x)
    dy = inputs.dy.repeat(tokens // period, 1)
    y, dx = run(x, dy, inputs.weights, profile=profile, save="activations")
    for actual, wanted in zip((y, dx), expected, strict=True):
        for start in range(0, tokens, 1_000_000):
            part = actual[start : start + 1_000_000].view(-1, period, hidden)
            assert torch.equal(part, wanted.expand_as(part)), start
