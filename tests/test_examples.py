"""The examples run as a user would run them."""

import os
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
