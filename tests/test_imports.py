"""Imports run one way, `import moe_ops` is light, and the package lives beside others (fresh processes)."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

# What each file may import from the project. A file that is not listed fails the test.
ARROWS = {
    "moe_ops/__init__.py": {
        "autograd",
        "checkpoint",
        "environment",
        "functional",
        "layers",
        "moe_autograd",
        "moe_layer",
        "moe_oracle",
        "numerics",
        "plugin",
        "reference",
        "testing",
    },
    "moe_ops/plugin.py": {"lowering"},
    "moe_ops/layers.py": {"contracts", "functional", "moe_layer"},
    "moe_ops/moe_layer.py": {"contracts", "functional", "quant_contracts"},
    "moe_ops/functional.py": {"contracts", "moe_contracts", "quant", "quant_contracts"},
    "moe_ops/autograd.py": {"contracts", "ops", "registration"},
    "moe_ops/moe_autograd.py": {
        "contracts",
        "moe_contracts",
        "moe_operators",
        "quant_contracts",
        "registration",
    },
    "moe_ops/checkpoint.py": {"moe_operators", "ops"},
    "moe_ops/environment.py": {"contracts", "kernels.cpu_matmul", "moe_contracts", "numerics"},
    # The Triton kernels are imported when a call first needs them.
    "moe_ops/ops.py": {"contracts", "kernels", "kernels.cpu_matmul", "reference", "registration"},
    "moe_ops/moe_operators.py": {
        "contracts",
        "kernels",
        "kernels.cpu_matmul",
        "moe_contracts",
        "moe_reference",
        "numerics",
        "quant",
        "reference",
        "registration",
    },
    "moe_ops/registration.py": {"plugin"},
    "moe_ops/reference.py": {"contracts"},
    "moe_ops/moe_oracle.py": {"contracts", "moe_contracts", "moe_reference", "numerics", "reference"},
    "moe_ops/moe_reference.py": {"exact", "quant", "reference"},
    "moe_ops/exact.py": set(),
    "moe_ops/quant.py": set(),
    "moe_ops/quant_contracts.py": {"contracts"},
    "moe_ops/moe_contracts.py": {"contracts", "numerics"},
    "moe_ops/contracts.py": {"numerics"},
    "moe_ops/numerics.py": set(),
    "moe_ops/testing/__init__.py": {"bits", "inputs"},
    "moe_ops/testing/benchmark.py": set(),
    "moe_ops/testing/bits.py": set(),
    "moe_ops/testing/inputs.py": set(),
    "kernels/configs.py": {"launch"},
    "kernels/cpu_matmul.py": set(),
    "kernels/launch.py": set(),
    "kernels/moe.py": {"moe_backward", "moe_dispatch", "moe_forward", "moe_operands", "moe_routing"},
    "kernels/moe_backward.py": {
        "launch",
        "moe_configs",
        "moe_operands",
        "moe_routing",
        "moe_tiles",
        "operands",
        "tiles",
    },
    "kernels/moe_configs.py": {"launch"},
    "kernels/moe_dispatch.py": {"launch", "moe_routing", "moe_tiles", "operands", "tiles"},
    "kernels/moe_forward.py": {
        "launch",
        "moe_configs",
        "moe_operands",
        "moe_routing",
        "moe_tiles",
        "operands",
        "tiles",
    },
    "kernels/moe_operands.py": set(),
    "kernels/moe_routing.py": {"launch"},
    "kernels/moe_tiles.py": {"tiles"},
    "kernels/operand_range.py": {"launch", "operands", "tiles"},
    "kernels/operands.py": set(),
    "kernels/shared_expert.py": {"operands", "shared_expert_backward", "shared_expert_forward"},
    "kernels/shared_expert_backward.py": {"configs", "launch", "operand_range", "operands", "tiles"},
    "kernels/shared_expert_forward.py": {"configs", "launch", "operand_range", "operands", "tiles"},
    "kernels/sigmoid_check.py": {"launch", "tiles"},
    "kernels/template_configs.py": {"configs", "launch"},
    "kernels/tiles.py": set(),
    "lowering/cpu_shared_expert.py": {"kernels.cpu_matmul", "shells"},
    "lowering/cuda_shared_expert.py": {"inductor", "kernels", "kernels.launch", "source"},
    "lowering/inductor.py": set(),
    "lowering/shared_expert.py": {"contracts", "cpu_shared_expert", "cuda_shared_expert"},
    "lowering/shells.py": set(),
    "lowering/source.py": {"kernels", "shells"},
}


def shipped_files():
    return [
        path
        for folder in ("moe_ops", "kernels", "lowering")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def imports_of(path):
    """(relative imports, absolute imports) of a file, wherever in it they stand."""
    relative, absolute = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            absolute |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            absolute.add(node.module)
        elif isinstance(node, ast.ImportFrom):
            above = 2 if path.parent.name == "lowering" else 1  # it stands on what the package has
            assert node.level <= above, f"{path}: an import from above its own folder"
            relative |= {node.module} if node.module else {alias.name for alias in node.names}
    return relative, absolute


@pytest.mark.parametrize("path", shipped_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows(path):
    relative, absolute = imports_of(path)
    assert relative == ARROWS[str(path.relative_to(ROOT))]
    third_party = {name.split(".")[0] for name in absolute} - set(sys.stdlib_module_names)
    gpu_kernel = path.parent.name == "kernels" and path.name != "cpu_matmul.py"
    lowering = path.parent.name == "lowering"
    allowed = {"torch", "triton"} if gpu_kernel or path.name == "source.py" else {"torch"}
    allowed |= {"sympy"} if lowering else set()  # as torch has it
    assert third_party <= allowed, "optional packages are imported where they are first needed"
    private = any(name.startswith(("torch._inductor", "torch._dynamo")) for name in absolute)
    assert lowering or not private, "what is private to Inductor is used by lowerings alone"


def test_arrows_run_one_way():
    graph = {
        Path(name).stem: {target.split(".")[-1] for target in targets} for name, targets in ARROWS.items()
    }

    def reachable(name, seen=()):
        assert name not in seen, f"a cycle: {' -> '.join((*seen, name))}"
        for target in graph.get(name, ()):
            reachable(target, (*seen, name))

    del graph["__init__"]
    for name in graph:
        reachable(name)


def run_python(code, *paths, cwd=None, **environment):
    """Run `code` in a fresh process that finds modules in `paths` before the installed ones."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))} | environment
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env=env,
        cwd=cwd,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


USE = """
import torch, moe_ops
layer = moe_ops.SharedExpertMLP(64, 32)
x = torch.randn(3, 64).bfloat16().requires_grad_()
layer(x).sum().backward()
"""


def test_import_is_light(tmp_path):
    heavy = "[n for n in sys.modules if n.startswith(('triton', 'torch._inductor', 'torch._dynamo'))]"
    code = f"import sys, torch; before = set({heavy})\n{USE}\nprint(len(set({heavy}) - before))"
    assert run_python(code, ROOT, cwd=tmp_path) == ["0"]


def test_works_without_triton_and_without_cuda(tmp_path):
    code = f"import sys; sys.modules['triton'] = None\n{USE}\nprint(moe_ops.provenance().backend)"
    assert run_python(code, ROOT, cwd=tmp_path, CUDA_VISIBLE_DEVICES="") == ["aten"]


def test_plain_checkout(tmp_path):
    """Not installed, used from another folder: kernels/ and lowering/ belong to the package all the same."""
    modules = "import moe_ops, moe_ops.lowering, moe_ops.kernels.cpu_matmul as cpu_matmul"
    code = f"{modules}\nprint(moe_ops.__file__, cpu_matmul.__file__)"
    found = run_python(code, ROOT, cwd=tmp_path)
    assert [Path(name) for name in found] == [ROOT / "moe_ops/__init__.py", ROOT / "kernels/cpu_matmul.py"]


@pytest.mark.parametrize("checkout_first", [True, False])
def test_lives_beside_another_package_called_kernels(tmp_path, checkout_first):
    """The Hugging Face hub client is a package called `kernels`."""
    other = tmp_path / "site" / "kernels"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("name = 'other'")
    paths = (ROOT, other.parent) if checkout_first else (other.parent, ROOT)
    code = f"import kernels\n{USE}\nprint(kernels.name, moe_ops.kernels.__name__)"
    assert run_python(code, *paths, cwd=ROOT) == ["other", "moe_ops.kernels"]


def test_packaging_maps_the_folders():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert tool["package-dir"]["moe_ops.kernels"] == "kernels"
    assert tool["package-dir"]["moe_ops.lowering"] == "lowering"
    folders = {tool["package-dir"][package] for package in tool["packages"]}
    assert {str(path.parent.relative_to(ROOT)) for path in shipped_files()} <= folders
    for folder in ("kernels", "lowering"):
        assert not (ROOT / folder / "__init__.py").exists(), "it would shadow another package of that name"


def test_wheel_holds_the_folders(tmp_path):
    """Built from a copy, installed by unpacking, imported from there."""
    pytest.importorskip("setuptools", minversion="77")
    source = shutil.copytree(
        ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(".*", "build", "*.egg-info")
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
    ]
    subprocess.run([*command, source], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert {path.name for path in site.iterdir()} == {"moe_ops", f"moe_ops-{VERSION}.dist-info"}
    for name in ("py.typed", "lowering/templates/tiles.jinja", "lowering/templates/cpu_product.jinja"):
        assert (site / "moe_ops" / name).exists()
    code = "import moe_ops.lowering, moe_ops.kernels.cpu_matmul as kernel"
    found = run_python(f"{code}\nprint(moe_ops.__version__, kernel.__file__)", site, cwd=tmp_path)
    assert found == [VERSION, str(site / "moe_ops/kernels/cpu_matmul.py")]
