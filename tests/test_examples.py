"""The examples and the README run as a user would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

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
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = {line.split("  ")[0].strip(): line for line in result.stdout.splitlines()}
    assert "cpu-fp32-v1" in lines["profile"]
    assert lines["graph breaks"].split()[-1] == "0"
    assert "yes" in lines["1"] and " 0 / " in lines["1"] and "of 384" in lines["1"]


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
    command = [sys.executable, folder / "table.py", *sorted((folder / "results").glob("h200_*.json"))]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.count("\n") == 2 + 3 * 7
    assert printed in (ROOT / "README.md").read_text()


def test_the_benchmark_needs_a_gpu_and_says_so():
    command = [sys.executable, ROOT / "examples/benchmarks/bench_shared_expert.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 1
    assert "needs a CUDA device" in result.stderr


def test_ci_runs_the_test_command_of_the_readme():
    commands = re.findall(r"^    (pip install .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 2
    assert commands[1] == (ROOT / ".ci/run").read_text().rstrip().splitlines()[-1]
