"""The examples and the README run as a user would run them."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def test_compile_model(tmp_path):
    """The main job, on a text of the test's own, shorter than the largest batch."""
    text = tmp_path / "text.txt"
    text.write_text("A short text. " * 20)
    command = [
        sys.executable,
        ROOT / "examples/compile_model.py",
        text,
        "--batch-sizes",
        "1",
        "3",
        "--layers",
        "2",
        "--steps",
        "3",
    ]
    # One thread: the model is too small for more, and threads that spin are slow on a busy machine.
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = {line.split("  ")[0].strip(): line for line in result.stdout.splitlines()}
    assert "cpu-fp32-v1" in lines["profile"]
    assert "exact-fp8-k128-k64-v1" in lines["routed profile"]
    assert lines["graph breaks"].split()[-1] == "0"
    assert "yes" in lines["1 shared"] and " 0 / " in lines["1 shared"] and "of 384" in lines["1 shared"]
    assert lines["1 routed"].split() == ["1", "routed", "yes", "0", "of", "384"]
    before, after = map(float, re.findall(r"\d+\.\d+", lines["next-byte loss"]))
    assert after < before
    assert "0 of 7 changed, 0 got a gradient" in lines["expert weights"]


def readme_blocks(language):
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )


def test_readme_code_runs(fresh_compiler):
    """All Python blocks, in their order, in one namespace."""
    blocks = readme_blocks("python")
    assert len(blocks) >= 5
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)


def test_results_of_the_readme_are_those_of_the_files():
    folder = ROOT / "examples/benchmarks"
    command = [sys.executable, folder / "table.py"]
    results = folder / "results"
    for files, lines in (
        (sorted(results.glob("h200_*.json")), 3 * 7),
        ([results / "moe_h200.json"], 3 * 7),
        ([results / "block_h200.json"], 2 * 6),
    ):
        printed = subprocess.run([*command, *files], capture_output=True, text=True, check=True).stdout
        assert printed.count("\n") == 2 + lines
        assert printed in (ROOT / "README.md").read_text()


@pytest.fixture
def bench_mega_moe(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples/benchmarks")
    return importlib.import_module("bench_mega_moe")


def test_the_baseline_of_the_moe_benchmark_is_the_layer(bench_mega_moe):
    """The benchmark's gate on the CPU: grouped products agree with the exact profiles."""
    layer = bench_mega_moe.make_layer(bench_mega_moe.Shape(256, 128, 8, 2), 40, "cpu")
    with torch.no_grad():
        bench_mega_moe.check(layer, ["exact-fp8-k128-k64-v1", "exact-fp8-k128-k128-v1"])
        broken = layer._replace(bf16=(layer.bf16[0], -layer.bf16[1]))
        with pytest.raises(SystemExit, match="RED: exact-fp8-k128-k64-v1: y is"):
            bench_mega_moe.check(broken, ["exact-fp8-k128-k64-v1"])


def test_the_table_of_the_moe_benchmark(bench_mega_moe, tmp_path):
    shape = bench_mega_moe.SHAPES["flash"]
    profile, wide = bench_mega_moe.PROFILES
    baselines = {"grouped_mm", "fp8 rowwise"}
    times = {
        "forward": {profile: 100.0, wide: 80.0, "grouped_mm": 150.0, "fp8 rowwise": 120.0},
        "forward_dx": {profile: 200.0, "grouped_mm": 500.0},
    }
    rows = []
    for name, us in times.items():
        row = {"shape": "flash", "pass": name, "tokens": 8, **shape._asdict()}
        row |= bench_mega_moe.figures(shape, 8, name, us, baselines & set(us), touched=20)
        design = bench_mega_moe.designed_bytes(shape, 8, name, profile)
        rows.append(row | {"peak_bytes": {profile: 2 << 20}, "designed_bytes": {profile: design}})
    assert rows[0]["best_baseline"] == "fp8 rowwise" and rows[0]["ratio"][profile] == 1.2
    assert rows[0]["tflops"][profile] == 2 * 8 * 6 * 3 * 4096 * 2048 / 100 / 1e6
    assert rows[0]["gbytes_per_s"]["grouped_mm"] == 20 * 3 * 4096 * 2048 * 2 / 150 / 1e3
    path = tmp_path / "new.json"
    path.write_text(json.dumps({"card": {}, "rows": rows}))
    command = [sys.executable, ROOT / "examples/benchmarks/table.py", path]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed[0].count("|") == printed[1].count("|") == printed[2].count("|")
    assert printed[2:] == [
        "| flash | 8 | 100.0 us (1.50 / - / 1.20) | 24 | 80.0 us (1.88 / - / 1.50) "
        "| 200.0 us (2.50 / -) | 2.0 / 2.0 |"
    ]


def test_the_options_of_the_moe_benchmark(bench_mega_moe):
    assert bench_mega_moe.parse_arguments([]).tokens == [1, 8, 64, 256, 512, 2048, 8192]
    assert bench_mega_moe.parse_arguments(["--quick"]).shapes == ["flash"]


@pytest.mark.parametrize("name", ["bench_shared_expert", "bench_mega_moe"])
def test_the_benchmark_needs_a_gpu_and_says_so(name):
    command = [sys.executable, ROOT / f"examples/benchmarks/{name}.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 1
    assert "needs a CUDA device" in result.stderr


def test_ci_runs_the_test_command_of_the_readme():
    commands = re.findall(r"^    (pip install .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 2
    assert commands[1] == (ROOT / ".ci/run").read_text().rstrip().splitlines()[-1]
