"""The module: parameters, state dict, taking over other modules, freezing."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import moe_ops
from moe_ops.testing import bits_equal

HIDDEN, INTERMEDIATE = 64, 48
KEYS = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]


class HFStyleMLP(nn.Module):
    """The MLP of HF transformers' LLaMA-like models."""

    def __init__(self, act_fn=None, bias=False):
        super().__init__()
        options = {"bias": bias, "dtype": torch.bfloat16}
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, **options)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, **options)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, **options)
        self.act_fn = nn.SiLU() if act_fn is None else act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LoraLinear(nn.Module):
    """What an adapter library puts in the place of a Linear: it still has a `weight`."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(base.in_features, 2, bias=False, dtype=torch.bfloat16)
        self.lora_b = nn.Linear(2, base.out_features, bias=False, dtype=torch.bfloat16)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.lora_b(self.lora_a(x))


def activations(rows=5):
    return torch.randn(rows, HIDDEN).bfloat16()


def test_parameters_are_frozen_bf16_and_named_as_in_hf():
    layer = moe_ops.SharedExpertMLP(HIDDEN, INTERMEDIATE)
    assert list(layer.state_dict()) == KEYS == list(HFStyleMLP().state_dict())
    shapes = {name: tuple(value.shape) for name, value in layer.named_parameters()}
    assert shapes == dict(zip(KEYS, [(48, 64), (48, 64), (64, 48)], strict=True))
    assert all(value.dtype == torch.bfloat16 and not value.requires_grad for value in layer.parameters())


def test_forward_is_the_function():
    layer = moe_ops.SharedExpertMLP(
        HIDDEN, INTERMEDIATE, swiglu_limit=0.5, profile="fp32-serial-v1", save="activations"
    )
    x = activations()
    weights = [layer.get_parameter(key) for key in KEYS]
    expected = moe_ops.shared_expert_mlp(x, *weights, swiglu_limit=0.5, profile="fp32-serial-v1")
    assert bits_equal(layer(x), expected)
    unlimited = moe_ops.shared_expert_mlp(x * 8, *weights, profile="fp32-serial-v1")
    assert not bits_equal(layer(x * 8), unlimited)


def test_initialisation_is_that_of_linear():
    """Every weight is drawn, within +-1 / sqrt(in_features), and one seed gives one layer."""
    torch.manual_seed(3)
    layer = moe_ops.SharedExpertMLP(HIDDEN, INTERMEDIATE)
    for name, fan_in in zip(KEYS, (HIDDEN, HIDDEN, INTERMEDIATE), strict=True):
        weight = layer.get_parameter(name).float()
        assert weight.abs().max() <= fan_in**-0.5 * (1 + 2**-8)  # the bound, rounded to bf16
        assert weight.std().item() == pytest.approx(fan_in**-0.5 / 3**0.5, rel=0.1)
    torch.manual_seed(3)
    again = moe_ops.SharedExpertMLP(HIDDEN, INTERMEDIATE)
    assert all(bits_equal(*pair) for pair in zip(layer.parameters(), again.parameters(), strict=True))


def test_loads_the_state_dict_of_an_hf_mlp():
    mlp = HFStyleMLP()
    layer = moe_ops.SharedExpertMLP(HIDDEN, INTERMEDIATE)
    layer.load_state_dict(mlp.state_dict())
    x = activations()
    torch.testing.assert_close(layer(x), mlp(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["deepcopy", "pickle"]
)
def test_copies(copier):
    layer = moe_ops.SharedExpertMLP(HIDDEN, INTERMEDIATE, swiglu_limit=2.0)
    twin = copier(layer)
    x = activations()
    assert bits_equal(twin(x), layer(x))
    assert not any(value.requires_grad for value in twin.parameters())


def test_meta_device_and_materialisation():
    layer = moe_ops.SharedExpertMLP(HIDDEN, INTERMEDIATE, device="meta")
    assert layer(torch.empty(2, HIDDEN, dtype=torch.bfloat16, device="meta")).shape == (2, HIDDEN)
    layer.to_empty(device="cpu")
    layer.load_state_dict(HFStyleMLP().state_dict())
    assert layer(activations()).isfinite().all()
    with torch.device("meta"):
        assert moe_ops.SharedExpertMLP(HIDDEN, INTERMEDIATE).gate_proj.weight.is_meta


def test_cast_weights_are_refused_at_the_call():
    layer = moe_ops.SharedExpertMLP(HIDDEN, INTERMEDIATE).half()
    with pytest.raises(TypeError, match="w_gate must be torch.bfloat16; got torch.float16"):
        layer(activations())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"profile": "fast"}, ValueError, "profile must be None or one of"),
        ({"backend": 3}, TypeError, "backend must be a str or None"),
        ({"save": "g"}, ValueError, "save must be one of"),
        ({"swiglu_limit": "7"}, TypeError, "swiglu_limit must be a float or None"),
    ],
)
def test_names_are_checked_at_construction(options, error, message):
    with pytest.raises(error, match=f"moe_ops.SharedExpertMLP: {message}"):
        moe_ops.SharedExpertMLP(HIDDEN, INTERMEDIATE, **options)


def test_parametrised_weight_raises_at_the_call():
    """W + BA on an operator without weight gradients would freeze the adapter silently."""

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.b = nn.Parameter(torch.zeros(INTERMEDIATE, 2, dtype=torch.bfloat16))
            self.a = nn.Parameter(torch.ones(2, HIDDEN, dtype=torch.bfloat16))

        def forward(self, weight):
            return weight + self.b @ self.a

    layer = moe_ops.SharedExpertMLP(HIDDEN, INTERMEDIATE)
    x = activations()
    expected = layer(x)
    nn.utils.parametrize.register_parametrization(layer.up_proj, "weight", Adapter())
    with pytest.raises(ValueError, match="w_up must be frozen.*merge the adapter"):
        layer(x)
    with torch.no_grad():
        assert bits_equal(layer(x), expected)


@pytest.mark.parametrize(
    "act_fn",
    [nn.SiLU(), F.silu, "silu", lambda x: x * torch.sigmoid(x)],
    ids=["module", "function", "name", "own"],
)
def test_from_module_shares_the_tensors(act_fn):
    mlp = HFStyleMLP(act_fn).eval()
    layer = moe_ops.SharedExpertMLP.from_module(mlp, save="activations")
    for key in KEYS:
        assert layer.get_parameter(key) is mlp.get_parameter(key)
    assert (layer.hidden_size, layer.intermediate_size, layer.save) == (HIDDEN, INTERMEDIATE, "activations")
    assert not layer.training
    assert all(value.requires_grad for value in mlp.parameters()), "requires_grad is the caller's"
    with pytest.raises(ValueError, match="w_gate must be frozen"):
        layer(activations())
    assert set(moe_ops.freeze(layer)) == set(KEYS)
    x = activations().requires_grad_()
    layer(x).sum().backward()
    assert x.grad.isfinite().all()


def test_from_module_takes_the_limit_over():
    mlp = HFStyleMLP()
    mlp.swiglu_limit = 7.0
    assert moe_ops.SharedExpertMLP.from_module(mlp).swiglu_limit == 7.0
    assert moe_ops.SharedExpertMLP.from_module(mlp, swiglu_limit=7.0).swiglu_limit == 7.0
    with pytest.raises(ValueError, match=r"swiglu_limit must be the module's, 7.0; got 5.0"):
        moe_ops.SharedExpertMLP.from_module(mlp, swiglu_limit=5.0)


def with_bias():
    return HFStyleMLP(bias=True)


def with_lora():
    mlp = HFStyleMLP()
    mlp.up_proj = LoraLinear(mlp.up_proj)
    return mlp


def with_parametrisation():
    mlp = HFStyleMLP()
    nn.utils.parametrizations.weight_norm(mlp.down_proj)
    return mlp


def with_hook():
    mlp = HFStyleMLP()
    mlp.gate_proj.register_forward_hook(lambda module, args, output: output * 2)
    return mlp


def with_replaced_forward():
    mlp = HFStyleMLP()
    mlp.gate_proj.forward = lambda x: x
    return mlp


def without_activation():
    mlp = HFStyleMLP()
    del mlp.act_fn
    return mlp


def without_gate():
    mlp = HFStyleMLP()
    del mlp.gate_proj
    return mlp


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (with_bias, ValueError, "HFStyleMLP.gate_proj must have no bias"),
        (with_lora, TypeError, "HFStyleMLP.up_proj must be a plain torch.nn.Linear; got LoraLinear. Merge"),
        (with_parametrisation, TypeError, "HFStyleMLP.down_proj must be a plain torch.nn.Linear; got Param"),
        (with_hook, ValueError, "HFStyleMLP.gate_proj must have no hooks"),
        (with_replaced_forward, ValueError, "HFStyleMLP.gate_proj must have no hooks and its own forward"),
        (without_gate, TypeError, "HFStyleMLP.gate_proj must be a plain torch.nn.Linear; got NoneType"),
        (without_activation, TypeError, "activation of HFStyleMLP must be SiLU; got no attribute act_fn"),
        (lambda: HFStyleMLP(nn.GELU()), TypeError, "activation of HFStyleMLP must be SiLU; got GELU"),
        (lambda: HFStyleMLP(F.relu), TypeError, "activation of HFStyleMLP must be SiLU; got relu"),
        (lambda: HFStyleMLP("gelu"), TypeError, "activation of HFStyleMLP must be SiLU; got 'gelu'"),
    ],
)
def test_from_module_refuses_by_name(make, error, message):
    with pytest.raises(error, match=message):
        moe_ops.SharedExpertMLP.from_module(make())


def test_freeze_touches_only_our_weights(caplog):
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), moe_ops.SharedExpertMLP(HIDDEN, INTERMEDIATE))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    with caplog.at_level("INFO", logger="moe_ops"):
        names = moe_ops.freeze(model)
    assert names == tuple(f"1.{key}" for key in KEYS)
    assert all(name in caplog.text for name in names)
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trainable == ["0.weight", "0.bias"]
    assert moe_ops.freeze(model) == ()


def test_freeze_says_what_it_cannot_do():
    with pytest.raises(ValueError, match=r"must hold a moe_ops layer; got Linear.*requires_grad_\(False\)"):
        moe_ops.freeze(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="must be a torch.nn.Module; got Tensor"):
        moe_ops.freeze(torch.ones(2))


def test_provenance_round_trip():
    """The record names what was asked for and what is used, and what it names can be asked for."""
    record = moe_ops.provenance("cpu")
    assert (record.backend_requested, record.backend, record.profile) == (None, "aten", "cpu-fp32-v1")
    assert record.threads == torch.get_num_threads()
    assert record.torch == torch.__version__
    assert "32 rows" in record.tile and "128" in record.reduction
    again = moe_ops.provenance("cpu", profile=record.profile, backend=record.backend)
    assert again.backend_requested == "aten"
    layer = moe_ops.SharedExpertMLP(HIDDEN, INTERMEDIATE)
    x = activations()
    expected = layer(x)
    layer.profile, layer.backend = record.profile, record.backend
    assert bits_equal(layer(x), expected)
    assert moe_ops.provenance("cpu", profile="fp32-serial-v1").backend == "reference"
    with pytest.raises(NotImplementedError, match="profile must be one that this build computes on cpu"):
        moe_ops.provenance("cpu", profile="tc-fp32-v1")


def test_profiles():
    """By device in a fixed order; with a layer too, the default first."""
    fp8 = ("fp8-k128-k64-v1", "fp8-k128-k128-v1")
    exact = tuple(f"exact-{name}" for name in fp8)
    assert moe_ops.profiles() == ("fp32-serial-v1", "tc-fp32-v1", "cpu-fp32-v1", *fp8, *exact)
    assert moe_ops.profiles("cpu") == ("fp32-serial-v1", "cpu-fp32-v1", *exact)
    assert moe_ops.profiles("cuda") == ("fp32-serial-v1", "tc-fp32-v1", *fp8, *exact)
    assert moe_ops.profiles("cpu", "shared_expert_mlp") == ("cpu-fp32-v1", "fp32-serial-v1")
    assert moe_ops.profiles("cuda", "mega_moe") == (*fp8, *exact)
    assert moe_ops.profiles("cpu", "mega_moe_bf16")[0] == moe_ops.provenance(layer="mega_moe_bf16").profile
    assert moe_ops.profiles(layer="mega_moe") == (*fp8, *exact)
    for function in (lambda: moe_ops.profiles(layer="moe"), lambda: moe_ops.provenance(layer="moe")):
        with pytest.raises(ValueError, match="layer must be .*mega_moe"):
            function()
