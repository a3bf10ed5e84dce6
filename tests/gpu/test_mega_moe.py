"""The MoE layer on a GPU: against the reference, a token's bits whatever is around it, graphs, memory."""

import pytest
import torch

import moe_ops
from moe_ops import moe_reference
from moe_ops.testing import bits_equal, mega_moe_inputs

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="fp8 profiles are Hopper's")]
DEVICE = "cuda"
OPS = torch.ops.moe_ops
PROFILES = ["fp8-k128-k64-v1", "fp8-k128-k128-v1", "tc-fp32-v1"]
# (T, H, I, E, top_k): one-ulp faults do not show at tiny shapes; ragged H and I; I above a cap others had.
SHAPES = [
    (1, 128, 128, 4, 2),
    (17, 384, 192, 8, 3),
    (33, 100, 72, 5, 2),
    (90, 128, 200, 5, 2),
    (50, 256, 80, 3, 2),
    (256, 1024, 512, 8, 2),
    (64, 256, 320, 3, 32),
    (300, 384, 4224, 6, 1),
    (100, 7168, 256, 512, 8),
]
SHAPE_IDS = ["T{}-H{}-I{}-E{}-top{}".format(*shape) for shape in SHAPES]


def make(shape, profile, **options):
    options.setdefault("device", DEVICE)
    return mega_moe_inputs(*shape, weights="bf16" if profile == "tc-fp32-v1" else "fp8", **options)


def passes(inputs, profile=None, limit=None, **options):
    """(y, dx, d topk_weights)."""
    x, weights = (
        inputs.x.detach().clone().requires_grad_(),
        inputs.topk_weights.detach().clone().requires_grad_(),
    )
    y = moe_ops.mega_moe(
        x, inputs.topk_idx, weights, *inputs.weights, profile=profile, swiglu_limit=limit, **options
    )
    y.backward(inputs.dy)
    return y.detach(), x.grad, weights.grad


def distance(actual, expected):
    x, y = actual.double(), expected.double()
    return (1 - 2 * (x * y).sum() / ((x * x).sum() + (y * y).sum())).item()


def mm(a, weight, *, transpose_weight):
    """cuBLAS with an fp32 result, a witness for the bf16 weights."""
    return torch.mm(a, weight.t() if transpose_weight else weight, out_dtype=torch.float32)


def expected_passes(inputs, profile, limit):
    """The reference's (y, dx, d topk_weights) and counts."""
    rules = moe_reference.Bf16Rules(mm)
    if profile != "tc-fp32-v1":
        rules = moe_reference.Fp8Rules(64 if "k64" in profile else 128)
    arguments = (
        inputs.x,
        None,
        inputs.topk_idx,
        inputs.topk_weights,
        moe_reference.MoeWeights(*inputs.weights),
    )
    y, counts = moe_reference.forward(rules, *arguments, limit)
    dx, dweights = moe_reference.backward(rules, inputs.dy, *arguments, limit)
    return (y, dx.bfloat16(), dweights), counts


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
@pytest.mark.parametrize("limit", [None, 1.0], ids=["nolimit", "limit"])
@pytest.mark.parametrize("profile", PROFILES)
def test_against_the_reference(shape, limit, profile, nan_memory):
    """(d), (e) Forward and both gradients; half of the slots masked with NaN routing weights."""
    inputs = make(shape, profile, masked=0.5 if shape[4] > 1 else 0.0)
    expected, expected_counts = expected_passes(inputs, profile, limit)
    # Within rounding of the limit an element's gradient is all or nothing, so that gradients may jump there.
    bounds = (1e-4, 1e-4, 1e-4) if limit is None else (1e-4, 2e-3, 1e-4)
    for value, wanted, bound in zip(passes(inputs, profile, limit), expected, bounds, strict=True):
        assert value.dtype == wanted.dtype
        assert distance(value, wanted) < bound
        assert bits_equal((value == 0).all(-1), (wanted == 0).all(-1))
    _, counts = moe_ops.mega_moe(*inputs.arguments, profile=profile, return_expert_counts=True)
    assert torch.equal(counts, expected_counts)


@pytest.mark.parametrize("profile", ["exact-fp8-k128-k64-v1", "exact-fp8-k128-k128-v1"])
@pytest.mark.parametrize("limit", [None, 1.0], ids=["nolimit", "limit"])
@pytest.mark.parametrize("shape", [(64, 1024, 512, 8, 2), (33, 100, 72, 5, 2)], ids=str)
def test_the_exact_profiles_on_cpu_and_gpu(profile, limit, shape):
    """Equal bits, forward and both gradients."""
    inputs = make(shape, None, masked=0.2)
    expected = passes(type(inputs)(*(value.cpu() for value in inputs)), profile, limit)
    for actual, wanted in zip(passes(inputs, profile, limit), expected, strict=True):
        assert bits_equal(actual, wanted)


def select(inputs, rows, **changes):
    return inputs._replace(
        x=inputs.x[rows],
        dy=inputs.dy[rows],
        topk_idx=inputs.topk_idx[rows],
        topk_weights=inputs.topk_weights[rows],
        **changes,
    )


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("sizes", [(1024, 512, 8, 2), (4096, 2048, 32, 6)], ids=str)
def test_bits_do_not_depend_on_the_batch(profile, sizes):
    """Alone, among 2 .. 8192 others, at any position: the same bits forward, dX and d topk_weights."""
    inputs = make((8192, *sizes), profile)
    expected = passes(inputs, profile)
    generator = torch.Generator().manual_seed(3)
    for count in (1, 2, 3, 17, 64, 100, 257, 1000, 4096):
        rows = torch.randperm(8192, generator=generator)[:count].to(DEVICE)
        for actual, wanted in zip(passes(select(inputs, rows), profile), expected, strict=True):
            assert bits_equal(actual, wanted[rows])


@pytest.mark.parametrize("profile", PROFILES)
def test_bits_do_not_depend_on_other_experts(profile):
    """The others' routing changes: one expert takes all of them, or they drop out."""
    inputs = make((600, 1024, 512, 8, 2), profile)
    expected = passes(inputs, profile)
    for other in (0, 7, -1, 99):
        index = inputs.topk_idx.clone()
        index[10:] = other
        actual = passes(inputs._replace(topk_idx=index), profile)
        assert all(bits_equal(a[:10], e[:10]) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("profile", PROFILES)
def test_experts_permuted(profile):
    inputs = make((200, 1024, 512, 8, 3), profile)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    weights = [w if w is None else w.view(torch.uint8)[order].view(w.dtype) for w in inputs.weights]
    moved = type(inputs)(inputs.x, inputs.dy, order.argsort()[inputs.topk_idx], inputs.topk_weights, *weights)
    for actual, wanted in zip(passes(moved, profile), passes(inputs, profile), strict=True):
        assert bits_equal(actual, wanted)


def test_special_routings(nan_memory):
    """All on one expert, an expert twice in a row, all slots masked, dropped indices."""
    inputs = make((70, 384, 192, 8, 3), None)
    for index in (
        torch.zeros_like(inputs.topk_idx),
        torch.full_like(inputs.topk_idx, -1),
        torch.full_like(inputs.topk_idx, 8),
        inputs.topk_idx % 2,
        torch.where(inputs.topk_idx > 4, -7, inputs.topk_idx),
    ):
        case = inputs._replace(topk_idx=index)
        actual = passes(case)
        expected = passes(case, "exact-fp8-k128-k64-v1")
        for value, wanted in zip(actual, expected, strict=True):
            assert value.isfinite().all()
            assert distance(value, wanted) < 1e-4 or not wanted.any()
            assert bits_equal((value == 0).all(-1), (wanted == 0).all(-1))


def test_masked_then_unmasked_leaves_nothing():
    inputs = make((90, 384, 192, 8, 3), None)
    expected = passes(inputs)
    for _ in range(3):
        passes(
            inputs._replace(topk_idx=torch.where(torch.rand(90, 3, device=DEVICE) < 0.7, -1, inputs.topk_idx))
        )
        assert all(bits_equal(*pair) for pair in zip(passes(inputs), expected, strict=True))


@pytest.mark.parametrize("profile", PROFILES[:2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_not_finite_tokens(profile, value):
    """A whole NaN row for that token, the bits of all others unchanged."""
    inputs = make((40, 384, 320, 8, 3), profile)
    expected = passes(inputs, profile)
    inputs.x[7, 5] = value
    y, dx, dweights = passes(inputs, profile)
    assert y[7].isnan().all()
    others = torch.arange(40, device=DEVICE) != 7
    for actual, wanted in zip((y, dx, dweights), expected, strict=True):
        assert bits_equal(actual[others], wanted[others])


@pytest.mark.parametrize("profile", PROFILES[:2])
def test_zero_tokens_and_blocks(profile):
    inputs = make((40, 384, 320, 8, 3), profile)
    inputs.x[3] = 0
    inputs.w_gate_up[:, :128, 128:256] = 0
    inputs.w_gate_up_scale[:, 0, 1] = 1.0
    y, dx, dweights = passes(inputs, profile)
    assert not y[3].any()
    assert not dweights[3].any()
    assert y.isfinite().all() and dx.isfinite().all()


@pytest.mark.parametrize("profile", PROFILES)
def test_no_tokens(profile):
    inputs = make((0, 384, 192, 8, 3), profile)
    y, dx, dweights = passes(inputs, profile)
    assert y.shape == dx.shape == (0, 384)
    assert dweights.shape == (0, 3)
    _, counts = moe_ops.mega_moe(*inputs.arguments, profile=profile, return_expert_counts=True)
    assert not counts.any()


@pytest.mark.parametrize("profile", PROFILES[:2])
def test_pair(profile):
    """Quantised by the caller: the same bits; strided codes and scales too."""
    inputs = make((100, 384, 192, 8, 3), profile)
    codes, scales = moe_ops.quantize_activations(inputs.x)
    wide = torch.empty(100, 2, 384, device=DEVICE, dtype=torch.uint8).view(codes.dtype)
    wide[:, 1].copy_(codes)
    expected = passes(inputs, profile)
    for pair in ((codes, scales), (wide[:, 1], scales.t().contiguous().t())):
        weights = inputs.topk_weights.clone().requires_grad_()
        y = moe_ops.mega_moe(pair, inputs.topk_idx, weights, *inputs.weights, profile=profile)
        y.backward(inputs.dy)
        assert bits_equal(y, expected[0])
        assert bits_equal(weights.grad, expected[2])


def test_gradients_asked_for_alone():
    inputs = make((100, 384, 192, 8, 3), None)
    _, dx, dweights = passes(inputs)
    x = inputs.x.clone().requires_grad_()
    moe_ops.mega_moe(x, *inputs.arguments[1:]).backward(inputs.dy)
    assert bits_equal(x.grad, dx)
    weights = inputs.topk_weights.clone().requires_grad_()
    moe_ops.mega_moe(inputs.x, inputs.topk_idx, weights, *inputs.weights).backward(inputs.dy)
    assert bits_equal(weights.grad, dweights)


@pytest.mark.parametrize("profile", PROFILES)
def test_strides(profile):
    """x, routing, gradient and (bf16) weights of any strides."""
    inputs = make((100, 384, 192, 8, 3), profile)
    expected = passes(inputs, profile)

    def spread(value):
        return value.repeat_interleave(2, -1)[..., ::2]

    changed = inputs._replace(
        x=inputs.x.t().contiguous().t(),
        topk_idx=spread(inputs.topk_idx),
        topk_weights=inputs.topk_weights.t().contiguous().t(),
    )
    if profile == "tc-fp32-v1":
        changed = changed._replace(
            w_gate_up=inputs.w_gate_up.mT.contiguous().mT, w_down=spread(inputs.w_down)
        )
    assert all(bits_equal(*pair) for pair in zip(passes(changed, profile), expected, strict=True))
    ones = passes(inputs._replace(dy=torch.ones_like(inputs.dy)), profile)
    stride_0 = passes(
        inputs._replace(dy=torch.ones(1, 1, device=DEVICE).bfloat16().expand(100, 384)), profile
    )
    assert all(bits_equal(*pair) for pair in zip(stride_0, ones, strict=True))


@pytest.mark.parametrize("profile", PROFILES)
def test_graph_replay(profile):
    """Captured as the very first call of its shape, replayed with other inputs and routings."""
    first = make((96, 384, 256, 8, 3), profile, seed=11)
    static = first._replace(**{n: getattr(first, n).clone() for n in ("x", "dy", "topk_idx", "topk_weights")})
    arguments = (static.x, None, static.topk_idx, static.topk_weights, *static.weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = OPS._mega_moe(*arguments, profile=profile)
        dx, dweights = OPS._mega_moe_dx_dweights(static.dy, *arguments, profile=profile)
    for seed in (11, 12, 13):
        other = make((96, 384, 256, 8, 3), profile, seed=seed, masked=0.3 if seed == 13 else 0.0)
        for name in ("x", "dy", "topk_idx", "topk_weights"):
            getattr(static, name).copy_(getattr(other, name))
        graph.replay()
        expected = passes(
            other._replace(**dict(zip(static._fields[4:], static.weights, strict=True))), profile
        )
        assert all(bits_equal(*pair) for pair in zip((y, dx, dweights), expected, strict=True))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode, fresh_compiler):
    """Dynamic T, training and inference: eager's bits; routing differs at every call."""
    layer = moe_ops.MegaMoE(384, 192, 8).to(DEVICE)
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for tokens in (17, 33, 64, 2048):
        inputs = make((tokens, 384, 192, 8, 3), None, seed=tokens)
        results = []
        for function in (layer, compiled):
            x, weights = inputs.x.clone().requires_grad_(), inputs.topk_weights.clone().requires_grad_()
            torch.compiler.cudagraph_mark_step_begin()
            y = function(x, inputs.topk_idx, weights)
            y.backward(inputs.dy)
            trained = tuple(value.detach().clone() for value in (y, x.grad, weights.grad))
            del y
            torch.compiler.cudagraph_mark_step_begin()
            with torch.no_grad():
                quiet = function(inputs.x, inputs.topk_idx, inputs.topk_weights).clone()
            results.append((*trained, quiet))
        assert all(bits_equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("profile", ["fp8-k128-k64-v1", "tc-fp32-v1"])
def test_opcheck(profile, fp8_allclose):
    inputs = make((19, 384, 192, 8, 3), profile, masked=0.2)
    others = (inputs.topk_idx, inputs.topk_weights, *inputs.weights)
    calls = [("_mega_moe", (inputs.x.clone().requires_grad_(), None, *others))]
    for name in ("_mega_moe_dx", "_mega_moe_dweights", "_mega_moe_dx_dweights"):
        calls.append((name, (inputs.dy, inputs.x, None, *others)))
    if profile == "fp8-k128-k64-v1":
        calls.append(("_mega_moe", (*moe_ops.quantize_activations(inputs.x), *others)))
        calls.append(("quantize_activations", (inputs.x,)))
        calls.append(("quantize_weights_block", (torch.randn(3, 200, 300, device=DEVICE),)))
    for name, arguments in calls:
        torch.library.opcheck(getattr(OPS, name).default, arguments)


@pytest.mark.parametrize("profile", ["fp8-k128-k64-v1", "tc-fp32-v1"])
def test_offsets_beyond_32_bits(profile):
    """E * 2I * H above 2^31: the last experts' rows are those of a layer that has only them."""
    experts, hidden, intermediate = 512, 4096, 1024
    few = make((50, hidden, intermediate, 4, 2), profile)

    def grown(value):
        if value is None:
            return None
        big = torch.zeros((experts, *value.shape[1:]), dtype=value.dtype, device=DEVICE)
        big.view(torch.uint8)[-4:] = value.view(torch.uint8)
        return big

    many = type(few)(few.x, few.dy, few.topk_idx + experts - 4, few.topk_weights, *map(grown, few.weights))
    assert many.w_gate_up.numel() > 2**31
    for actual, wanted in zip(passes(many, profile), passes(few, profile), strict=True):
        assert bits_equal(actual, wanted)


def test_rows_beyond_32_bits():
    """R * 2I above 2^31."""
    inputs = make((1000, 128, 4096, 4, 2), None)
    repeat = 200  # R = 400,000
    many = select(inputs, torch.arange(1000, device=DEVICE).repeat(repeat))
    assert many.topk_idx.numel() * 2 * 4096 > 2**31
    for actual, wanted in zip(passes(many), passes(inputs), strict=True):
        assert bits_equal(actual[-1000:], wanted)


def test_memory():
    """Beyond its inputs the forward allocates what the documentation lists."""
    from moe_ops.testing.benchmark import peak_bytes

    tokens, hidden, intermediate, experts, top_k = 512, 1024, 512, 8, 4
    inputs = make((tokens, hidden, intermediate, experts, top_k), None)
    rows = tokens * top_k
    tables = rows * 4 * 4 + (2 * experts + 1 + 8 * 32) * 4
    x = rows * hidden + rows * hidden // 128 * 4
    h = rows * intermediate + rows * intermediate // 64 * 4
    out, y = rows * hidden * 2, tokens * hidden * 2
    arguments = (inputs.x, None, inputs.topk_idx, inputs.topk_weights, *inputs.weights)
    used = peak_bytes(lambda: OPS._mega_moe(*arguments))
    assert used <= max(x + h, h + out, out + h + y) + tables
    dz, partials = rows * 2 * intermediate * 2, rows * intermediate // 64 * 4
    used = peak_bytes(lambda: OPS._mega_moe_dx_dweights(inputs.dy, *arguments))
    assert used <= max(x + out + dz + partials, out + dz + partials + y) + 2 * tables


def test_other_devices_are_refused_by_name(monkeypatch):
    inputs = make((5, 128, 128, 4, 2), None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(NotImplementedError, match=r"compute capability 9\.0 .* capability 8\.0.*exact-fp8"):
        moe_ops.mega_moe(*inputs.arguments)
