"""The MoE module: parameters, dtypes that no cast changes, copies, state dict, quantising, training."""

import copy
import functools
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moe_ops
from moe_ops import moe_operators
from moe_ops.testing import bits_equal, mega_moe_inputs

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 200, 192, 4, 2
FP8 = {
    "gate_up_proj": ((4, 384, 200), torch.float8_e4m3fn),
    "gate_up_proj_scale_inv": ((4, 3, 2), torch.float32),
    "down_proj": ((4, 200, 192), torch.float8_e4m3fn),
    "down_proj_scale_inv": ((4, 2, 2), torch.float32),
}
BF16 = {
    "gate_up_proj": ((4, 384, 200), torch.bfloat16),
    "down_proj": ((4, 200, 192), torch.bfloat16),
}
FORMATS = {"fp8": FP8, "bf16": BF16}
both = pytest.mark.parametrize("weights", FORMATS)


def make_layer(weights="fp8", **options):
    return moe_ops.MegaMoE(HIDDEN, INTERMEDIATE, EXPERTS, weights=weights, **options)


def routed(tokens=9, **options):
    """(hidden_states, top_k_index, top_k_weights)."""
    return mega_moe_inputs(tokens, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, **options).arguments[:3]


def same(one, other):
    """Equal parameters: dtypes, and codes and numbers to the bit."""
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and x.dtype == y.dtype and bits_equal(x.float(), y.float()) for (a, x), (b, y) in pairs)


def described(layer):
    return {name: (tuple(value.shape), value.dtype) for name, value in layer.named_parameters()}


@both
def test_parameters_are_frozen_and_named_as_in_hf(weights):
    layer = make_layer(weights)
    assert described(layer) == FORMATS[weights]
    assert set(layer.state_dict()) == set(FORMATS[weights])
    assert not any(value.requires_grad for value in layer.parameters())
    assert f"num_experts=4, weights='{weights}'" in repr(layer)


@both
def test_forward_is_the_function(weights):
    profile = "exact-fp8-k128-k128-v1" if weights == "fp8" else "fp32-serial-v1"
    layer = make_layer(weights, swiglu_limit=0.5, profile=profile)
    x, index, routing = routed()
    options = {"swiglu_limit": 0.5, "profile": profile, "return_expert_counts": True}
    names = ("gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv")
    y, counts = layer(x * 8, index, routing, return_expert_counts=True)
    expected = moe_ops.mega_moe(x * 8, index, routing, *(getattr(layer, n) for n in names), **options)
    assert bits_equal(y, expected[0]) and torch.equal(counts, expected[1])
    options["swiglu_limit"] = None
    unlimited = moe_ops.mega_moe(x * 8, index, routing, *(getattr(layer, n) for n in names), **options)
    assert not bits_equal(y, unlimited[0])
    if weights == "fp8":
        assert bits_equal(layer(moe_ops.quantize_activations(x * 8), index, routing), y)
    with pytest.raises(ValueError, match=r"topk_idx must be in \[-1, E\)"):
        layer(x, index + 4, routing, validate_indices=True)


@both
def test_initialisation(weights):
    """Every weight is drawn, within +-1 / sqrt(fan in), and one seed gives one layer."""
    torch.manual_seed(3)
    layer = make_layer(weights)
    for name, fan_in in (("gate_up_proj", HIDDEN), ("down_proj", INTERMEDIATE)):
        value = getattr(layer, name)
        if weights == "fp8":
            value = moe_ops.dequantize_weights_block(value, getattr(layer, f"{name}_scale_inv"))
        value = value.float()
        assert value.abs().max() <= fan_in**-0.5 * (1 + 2**-8)
        for expert in value:
            assert expert.std().item() == pytest.approx(fan_in**-0.5 / 3**0.5, rel=0.1)
    torch.manual_seed(3)
    assert same(layer, make_layer(weights))


CASTS = {
    "bfloat16": lambda layer: layer.bfloat16(),
    "half": lambda layer: layer.half(),
    "float": lambda layer: layer.float(),
    "double": lambda layer: layer.double(),
    "to-dtype": lambda layer: layer.to(torch.bfloat16),
    "to-both": lambda layer: layer.to("cpu", torch.float16),
    "to-like": lambda layer: layer.to(torch.zeros((), dtype=torch.float64)),
    "parent": lambda layer: nn.Sequential(layer, nn.Linear(2, 2)).bfloat16()[0],
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_casts_leave_fp8_weights_and_scales_alone(cast):
    layer = make_layer()
    before, x = copy.deepcopy(layer), routed()
    cast(layer)
    assert described(layer) == FP8 and same(layer, before)
    assert bits_equal(layer(*x), before(*x))


def test_bf16_weights_are_cast_and_then_refused_at_the_call():
    with pytest.raises(TypeError, match="w_gate_up must be .*; got torch.float16"):
        make_layer("bf16").half()(*routed())


@both
def test_moves_between_devices(weights):
    layer = make_layer(weights).to("meta")
    assert described(layer) == FORMATS[weights] and layer.gate_up_proj.is_meta
    assert layer(*(value.to("meta") for value in routed())).shape == (9, HIDDEN)
    layer.to_empty(device="cpu")
    assert described(layer) == FORMATS[weights]
    source = make_layer(weights)
    layer.load_state_dict(source.state_dict())
    assert same(layer, source) and bits_equal(layer(*routed()), source(*routed()))
    with torch.device("meta"):
        assert make_layer(weights).down_proj.is_meta


def through_torch_save(layer):
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": through_torch_save,
}


@both
@pytest.mark.parametrize("copier", COPIES.values(), ids=COPIES)
def test_copies(copier, weights):
    layer = make_layer(weights, swiglu_limit=2.0)
    twin = copier(layer)
    assert same(twin, layer) and described(twin) == FORMATS[weights]
    assert bits_equal(twin(*routed()), layer(*routed()))
    assert not any(value.requires_grad for value in twin.parameters())
    assert twin.gate_up_proj.data_ptr() != layer.gate_up_proj.data_ptr()
    assert described(twin.bfloat16()) == FORMATS[weights]


@both
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_state_dict(weights, assign):
    source, layer = make_layer(weights), make_layer(weights)
    assert not same(source, layer)
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    layer.load_state_dict(torch.load(buffer), assign=assign)
    assert same(layer, source) and described(layer) == FORMATS[weights]
    assert not any(value.requires_grad for value in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_from_bf16(dtype, capsys):
    inputs = mega_moe_inputs(9, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, weights="bf16")
    stacked = inputs.w_gate_up.to(dtype), nn.Parameter(inputs.w_down.to(dtype))
    layer = moe_ops.MegaMoE.from_bf16(*stacked, swiglu_limit=3.0, profile="exact-fp8-k128-k64-v1")
    assert "100" in capsys.readouterr().err  # per cent
    assert described(layer) == FP8 and not any(value.requires_grad for value in layer.parameters())
    assert (layer.swiglu_limit, layer.profile) == (3.0, "exact-fp8-k128-k64-v1")
    for name, value in zip(("gate_up_proj", "down_proj"), stacked, strict=True):
        codes, scales = moe_ops.quantize_weights_block(value.detach())
        assert bits_equal(getattr(layer, name).float(), codes.float())
        assert bits_equal(getattr(layer, f"{name}_scale_inv"), scales)
    moe_ops.MegaMoE.from_bf16(*stacked, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda gate_up, down: (gate_up[0], down), ValueError, "gate_up_proj must be .*3 or more"),
        (lambda gate_up, down: (gate_up[None], down), ValueError, r"gate_up_proj must be \[E, out, in\]"),
        (lambda gate_up, down: (gate_up, down.mT), ValueError, r"down_proj must be .*\[4, 200, 192\]"),
        (lambda gate_up, down: (gate_up, down[1:]), ValueError, r"down_proj must be .*got \[3, 200, 192\]"),
        (lambda gate_up, down: (gate_up[:, 1:], down), ValueError, "down_proj must be"),
        (lambda gate_up, down: (gate_up.double(), down), TypeError, "gate_up_proj must be torch.bfloat16"),
        (lambda gate_up, down: (gate_up, [down]), TypeError, "down_proj must be a torch.Tensor; got list"),
    ],
)
def test_from_bf16_refuses_by_name(change, error, message):
    inputs = mega_moe_inputs(1, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, weights="bf16")
    with pytest.raises(error, match=f"moe_ops.MegaMoE.from_bf16: {message}"):
        moe_ops.MegaMoE.from_bf16(*change(inputs.w_gate_up, inputs.w_down), progress=False)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"profile": "fast"}, ValueError, "profile must be None or one of"),
        ({"swiglu_limit": "7"}, TypeError, "swiglu_limit must be a float or None"),
        ({"weights": "int4"}, ValueError, "weights must be one of 'fp8', 'bf16'; got 'int4'"),
    ],
)
def test_options_are_checked_at_construction(options, error, message):
    with pytest.raises(error, match=f"moe_ops.MegaMoE: {message}"):
        moe_ops.MegaMoE(HIDDEN, INTERMEDIATE, EXPERTS, **options)


@both
def test_routing_weights_in_bf16(weights):
    """The layer widens them; their gradient returns in bf16, rounded from the one in fp32."""
    layer = make_layer(weights)
    x, index, routing = routed()
    narrow, wide = (
        routing.bfloat16().to(dtype).requires_grad_() for dtype in (torch.bfloat16, torch.float32)
    )
    y = layer(x, index, narrow)
    assert bits_equal(y, layer(x, index, wide))
    for leaf in (narrow, wide):
        layer(x, index, leaf).sum().backward()
    assert bits_equal(narrow.grad, wide.grad.bfloat16())


@both
def test_gradients_reach_what_is_upstream(weights):
    """Through two layers to the norm before and the router, none to the experts."""
    norm, router = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, EXPERTS, bias=False)
    layers = make_layer(weights), make_layer(weights)
    values = norm(routed()[0].float())
    for layer in layers:
        routing, index = router(values).softmax(-1).topk(TOP_K)
        values = values + layer(values.bfloat16(), index, routing).float()
    values.square().sum().backward()
    for value in (norm.weight, router.weight):
        assert value.grad.isfinite().all() and value.grad.any()
    assert all(value.grad is None for layer in layers for value in layer.parameters())


def test_freeze():
    model = nn.Sequential(nn.Linear(2, 2), make_layer("bf16"))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    with pytest.raises(ValueError, match="w_gate_up must be frozen"):
        model[1](*routed())
    assert moe_ops.freeze(model) == ("1.gate_up_proj", "1.down_proj")
    assert [name for name, value in model.named_parameters() if value.requires_grad] == ["0.weight", "0.bias"]
    model[1](*routed())


def test_provenance_names_what_the_layer_runs():
    for weights, name in (("fp8", "mega_moe"), ("bf16", "mega_moe_bf16")):
        record = moe_ops.provenance("cpu", layer=name)
        layer, x = make_layer(weights), routed()
        expected = layer(*x)
        layer.profile = record.profile
        assert bits_equal(layer(*x), expected)


def test_provenance_of_a_machine_that_cannot(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(NotImplementedError, match="provenance: device must be of compute capability 9.0"):
        moe_ops.provenance("cuda", layer="mega_moe")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with pytest.raises(NotImplementedError, match="provenance: device must be .* 8.0 or newer"):
        moe_ops.provenance("cuda", layer="mega_moe_bf16")


def count_calls(monkeypatch, name):
    calls = []
    original = getattr(moe_operators.moe_reference, name)
    monkeypatch.setattr(moe_operators.moe_reference, name, lambda *args: calls.append(1) or original(*args))
    return calls


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("policy", [True, False], ids=["policy", "plain"])
def test_checkpointing(mode, policy, monkeypatch, fresh_compiler):
    """With the policy the forward runs once, without it twice; the gradients are the same."""
    layer, norm = make_layer(), nn.RMSNorm(HIDDEN, dtype=torch.bfloat16)
    x, index, routing = routed()

    def block(x, routing):
        return norm(layer(x, index, routing))  # its backward needs the layer's output

    def gradients(function):
        leaves = x.clone().requires_grad_(), routing.clone().requires_grad_()
        y = function(*leaves)
        return torch.autograd.grad(y.float().square().sum(), leaves)

    contexts = functools.partial(create_selective_checkpoint_contexts, moe_ops.checkpoint_policy())
    options = {"context_fn": contexts} if policy else {}

    def run(*leaves):
        return checkpoint(block, *leaves, use_reentrant=False, **options)

    expected = gradients(block)
    calls = count_calls(monkeypatch, "forward")
    actual = gradients(torch.compile(run, fullgraph=True) if mode == "compiled" else run)
    assert len(calls) == (1 if policy else 2)
    for ours, wanted in zip(actual, expected, strict=True):
        if mode == "eager":
            assert bits_equal(ours, wanted)
        assert (ours.float() - wanted.float()).norm() <= 2e-2 * wanted.float().norm()
