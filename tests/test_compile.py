"""torch.compile, export and checkpointing: no graph break, few graphs, and the bits of eager."""

import functools
import io

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import moe_ops
from moe_ops import ops
from moe_ops.testing import bits_equal, shared_expert_inputs

HIDDEN, INTERMEDIATE = 384, 50


def make_layer(**options):
    layer = moe_ops.SharedExpertMLP(HIDDEN, INTERMEDIATE, **options)
    inputs = shared_expert_inputs(300, HIDDEN, INTERMEDIATE, seed=5)
    for name, weight in zip(("gate_proj", "up_proj", "down_proj"), inputs.weights, strict=True):
        layer.get_submodule(name).weight.data.copy_(weight)
    return layer, inputs.x, inputs.dy


class Block(nn.Module):
    """Norm -> shared expert -> residual: ours between operators that Inductor fuses."""

    def __init__(self, layer):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, dtype=torch.bfloat16)
        self.mlp = layer

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def forward_and_dx(module, x, dy):
    x = x.detach().clone().requires_grad_()
    y = module(x)
    y.backward(dy)
    return y.detach(), x.grad


@pytest.mark.parametrize("save", ["recompute", "activations"])
@pytest.mark.parametrize("profile", ["cpu-fp32-v1", "fp32-serial-v1"])
def test_compiled_layer_is_the_eager_layer(save, profile, fresh_compiler):
    layer, x, dy = make_layer(save=save, profile=profile, swiglu_limit=1.5)
    compiled = torch.compile(layer, fullgraph=True)
    for rows in (300, 17, 1, 0):
        actual = forward_and_dx(compiled, x[:rows], dy[:rows])
        expected = forward_and_dx(layer, x[:rows], dy[:rows])
        assert all(bits_equal(*pair) for pair in zip(actual, expected, strict=True)), rows
    with torch.no_grad():
        assert bits_equal(compiled(x), layer(x))
    assert not counters["graph_break"]


def test_compiled_model_feeds_the_layer_its_own_inputs(fresh_compiler):
    """Inside a compiled block the layer gives the eager layer's bits on the inputs that it got."""
    layer, x, _ = make_layer()
    block = Block(layer)

    def run(x):
        normed = block.norm(x)
        y = block.mlp(normed)
        return x + y, normed, y

    _, normed, y = torch.compile(run, fullgraph=True)(x)
    assert bits_equal(y, layer(normed))


@pytest.mark.parametrize("save", ["recompute", "activations"])
def test_one_graph_for_every_number_of_tokens(save, fresh_compiler):
    layer, x, dy = make_layer(save=save)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(Block(layer), fullgraph=True, backend=counter)
    forward_and_dx(compiled, x[:17], dy[:17])
    forward_and_dx(compiled, x[:33], dy[:33])
    assert counter.frame_count <= 2, "the second T may make the dimension dynamic, once"
    dynamic = counter.frame_count
    for rows in (2, 300, 48, 17, 64, 65, 128):
        forward_and_dx(compiled, x[:rows], dy[:rows])
    assert counter.frame_count == dynamic
    for rows in (1, 0, 1, 0):
        forward_and_dx(compiled, x[:rows], dy[:rows])
    assert counter.frame_count <= dynamic + 2


def test_twenty_sizes_on_a_dynamic_dimension_compile_once(fresh_compiler):
    layer, x, dy = make_layer()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in range(2, 282, 14):
            actual = forward_and_dx(compiled, x[:rows], dy[:rows])
            expected = forward_and_dx(layer, x[:rows], dy[:rows])
            assert all(bits_equal(*pair) for pair in zip(actual, expected, strict=True)), rows
    assert counter.frame_count == 1


def test_unbacked_tokens_compile_once(fresh_compiler):
    """With `mark_unbacked` one graph serves T = 0 and 1 as well: neither contracts nor fakes guard on T."""
    layer, x, dy = make_layer()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for rows in (17, 1, 0, 300, 2):
        tokens = x[:rows].detach().clone().requires_grad_()
        torch._dynamo.decorators.mark_unbacked(tokens, 0)
        y = compiled(tokens)
        y.backward(dy[:rows])
        expected = forward_and_dx(layer, x[:rows], dy[:rows])
        assert bits_equal(y, expected[0]) and bits_equal(tokens.grad, expected[1])
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", ["transposed", "sliced"])
def test_compiled_strides_are_eager_strides(kind, fresh_compiler):
    layer, x, dy = make_layer()
    x = x.t().contiguous().t() if kind == "transposed" else x[::2]
    compiled = torch.compile(layer, fullgraph=True)
    actual, expected = compiled(x), layer(x)
    assert actual.stride() == expected.stride()
    assert bits_equal(actual, expected)
    actual, expected = forward_and_dx(compiled, x, dy[: len(x)]), forward_and_dx(layer, x, dy[: len(x)])
    assert all(bits_equal(*pair) for pair in zip(actual, expected, strict=True))


def test_autocast(fresh_compiler):
    layer, x, dy = make_layer()

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    x = x.float()
    actual, expected = forward_and_dx(torch.compile(run, fullgraph=True), x, dy), forward_and_dx(run, x, dy)
    assert actual[0].dtype == torch.bfloat16 and actual[1].dtype == torch.float32
    assert all(bits_equal(*pair) for pair in zip(actual, expected, strict=True))


def test_vmap(fresh_compiler):
    layer, x, _ = make_layer()
    batched = x.view(3, 100, HIDDEN)
    compiled = torch.compile(torch.vmap(layer), fullgraph=True)
    assert bits_equal(compiled(batched), layer(batched))


def test_export_saves_loads_and_runs_another_t():
    layer, x, _ = make_layer()
    block = Block(layer)
    program = torch.export.export(block, (x[:17],), dynamic_shapes=({0: torch.export.Dim("T")},))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    for rows in (1, 2, 33, 300):
        assert bits_equal(loaded(x[:rows]), block(x[:rows])), rows


def count_forwards(monkeypatch):
    """Counts how often each forward computes: everything that it multiplies goes through `reference.down`."""
    calls = []
    original = ops.reference.down
    monkeypatch.setattr(ops.reference, "down", lambda *args: calls.append(1) or original(*args))
    return calls


def normed_block(layer):
    """A block whose backward needs the layer's output; else the compiler drops its recomputation anyway."""
    return nn.Sequential(Block(layer), nn.RMSNorm(HIDDEN, dtype=torch.bfloat16))


def checkpointed(block, policy):
    contexts = functools.partial(create_selective_checkpoint_contexts, policy) if policy else None
    options = {"context_fn": contexts} if policy else {}
    return lambda x: checkpoint(block, x, use_reentrant=False, **options)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("save", ["recompute", "activations"])
def test_checkpoint_policy_runs_each_forward_once(mode, save, monkeypatch, fresh_compiler, opaque):
    layer, x, dy = make_layer(save=save)
    block = normed_block(layer)
    expected = forward_and_dx(block, x, dy)
    calls = count_forwards(monkeypatch)
    run = checkpointed(block, moe_ops.checkpoint_policy())
    if mode == "compiled":
        run = torch.compile(run, fullgraph=True)
    actual = forward_and_dx(run, x, dy)
    assert len(calls) == 1
    if mode == "eager":
        assert all(bits_equal(*pair) for pair in zip(actual, expected, strict=True))
    for ours, exact in zip(actual, expected, strict=True):  # Inductor's RMSNorm rounds on its own
        assert (ours.float() - exact.float()).norm() <= 2e-2 * exact.float().norm()


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_plain_checkpointing_computes_twice(mode, monkeypatch, fresh_compiler, opaque):
    """What the policy avoids, and that the count above sees it."""
    layer, x, dy = make_layer()
    calls = count_forwards(monkeypatch)
    run = checkpointed(normed_block(layer), None)
    forward_and_dx(torch.compile(run, fullgraph=True) if mode == "compiled" else run, x, dy)
    assert len(calls) == 2


def test_checkpoint_policy_leaves_others_alone():
    policy = moe_ops.checkpoint_policy()
    assert policy(None, torch.ops.aten.mm.default) == CheckpointPolicy.PREFER_RECOMPUTE
    assert policy(None, torch.ops.moe_ops._shared_expert_mlp_dx.default) == CheckpointPolicy.PREFER_RECOMPUTE
    assert policy(None, torch.ops.moe_ops.shared_expert_mlp.default) == CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("save", ["recompute", "activations"])
def test_graphs(save, kept_graphs):
    """One operator forward, one backward, nothing else: no copy, no cast, no decomposition."""
    backend, graphs = kept_graphs
    layer, x, dy = make_layer(save=save)
    forward_and_dx(torch.compile(layer, fullgraph=True, backend=backend), x, dy)
    text = f"forward:\n{graphs['forward']}\nbackward:\n{graphs['backward']}"
    if save == "recompute":
        assert_expected_inline(
            text,
            """\
forward:
moe_ops.shared_expert_mlp.default
backward:
moe_ops._shared_expert_mlp_dx.default""",
        )
    else:
        assert_expected_inline(
            text,
            """\
forward:
moe_ops._shared_expert_mlp_save.default
backward:
moe_ops._shared_expert_mlp_dx_saved.default""",
        )
