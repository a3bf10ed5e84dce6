"""Compile caches know the sources: fresh processes over one warm cache directory."""

import shutil

import pytest
import torch

import moe_ops
from moe_ops import plugin

from .test_imports import ROOT, run_python

RUN = """
import torch
{before}
import moe_ops
{after}
from torch._dynamo.utils import counters
layer = moe_ops.SharedExpertMLP(64, 32)
x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
for name, weight in layer.named_parameters():
    torch.nn.init.constant_(weight, 0.125)
y = torch.compile(layer, fullgraph=True)(x)
y.sum().backward()
hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
print(hits > 0, torch.equal(y, layer(x)))
"""
HIT, MISS = ["True", "True"], ["False", "True"]


@pytest.fixture
def run(tmp_path):
    """Runs a copy of the project in a fresh process: whether a cache hit, whether compiled is eager."""
    copy = tmp_path / "copy"
    for folder in ("moe_ops", "kernels", "lowering"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)

    def run_once(before="", after=""):
        code = RUN.format(before=before, after=after)
        return run_python(code, copy, cwd=tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))

    run_once.copy = copy
    return run_once


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_an_edited_lowering_or_kernel_or_operator_recompiles(run):
    assert run() == MISS
    assert run() == HIT
    template = run.copy / "lowering/templates/cpu_swiglu.jinja"
    edit(template, "const Vec one(1.0f)", "const Vec one(2.0f)")
    assert run() == ["False", "False"], "the new lowering is what runs"
    edit(template, "const Vec one(2.0f)", "const Vec one(1.0f)")
    edit(run.copy / "kernels/template_configs.py", "cost=3.28", "cost=3.29")
    assert run() == MISS


@pytest.mark.parametrize("name", ["kernels/tiles.py", "lowering/inductor.py", "moe_ops/ops.py"])
def test_every_source_counts(name, run):
    code = "import moe_ops.plugin\nprint(moe_ops.plugin.DIGEST)"
    before = run_python(code, run.copy, cwd=run.copy)
    (run.copy / name).write_text((run.copy / name).read_text() + "\n")
    assert run_python(code, run.copy, cwd=run.copy) != before


def test_the_users_tag_counts_too(run):
    tag = 'torch.compiler.config.cache_key_tag = "mine"'
    assert run(before=tag) == MISS
    assert run(after=tag) == HIT, "set before or after the import, it is the same tag"
    assert run() == MISS
    template = run.copy / "lowering/templates/cpu_swiglu.jinja"
    edit(template, "const Vec one(1.0f)", "const Vec one(2.0f)")
    assert run(after=tag) == ["False", "False"]


def test_tag():
    config = torch.compiler.config
    before = config.cache_key_tag
    try:
        config.cache_key_tag = "mine"
        plugin.tag_caches()
        assert config.cache_key_tag == f"mine;moe_ops={plugin.DIGEST}"
        moe_ops.use_lowerings(False)
        assert config.cache_key_tag == f"mine;moe_ops={plugin.DIGEST}_opaque"
        moe_ops.use_lowerings(True)
        assert config.cache_key_tag == f"mine;moe_ops={plugin.DIGEST}"
        config.cache_key_tag = ""
        plugin.tag_caches()
        assert config.cache_key_tag == f"moe_ops={plugin.DIGEST}"
    finally:
        config.cache_key_tag = before
