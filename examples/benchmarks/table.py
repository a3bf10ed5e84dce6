"""Prints the results table of the README from JSON files of `bench_shared_expert.py`.

    python examples/benchmarks/table.py examples/benchmarks/results/h200_*.json

Files may hold different baselines: each ratio is of one run. The microseconds are those of the first file (by
name) that has the row.
"""

import json
import sys
from pathlib import Path

PASSES = ("forward", "dx", "forward_dx")
BASELINES = ("eager", "compile", "max-autotune")
FAST, STRICT = "tc-fp32-v1", "fp32-serial-v1"


def table(paths: list[Path]) -> str:
    """Markdown: one line per shape and T."""
    cells: dict[tuple[int, int, int], dict[str, dict]] = {}
    for path in sorted(paths, key=lambda path: "eager" not in path.name):
        for row in json.loads(path.read_text())["rows"]:
            passes = cells.setdefault((row["hidden"], row["intermediate"], row["tokens"]), {})
            entry = passes.setdefault(row["pass"], {**row, "ratio": {}, "ratio_per_layer": {}})
            for key in ("ratio", "ratio_per_layer"):
                entry[key] = row[key] | entry[key]
    titles = ("H x I", "T", "forward", "forward, layers", "dX", "forward + dX", "strict forward + dX")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for (hidden, intermediate, tokens), passes in cells.items():
        forward, dx, both = (_cell(passes[name], "us", "ratio") for name in PASSES)
        layers = _cell(passes["forward"], "us_per_layer", "ratio_per_layer")
        strict = f"{passes['forward_dx']['us'][STRICT] / 1e3:.2f} ms"
        columns = (f"{hidden} x {intermediate}", str(tokens), forward, layers, dx, both, strict)
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines)


def _cell(entry: dict, us: str, ratio: str) -> str:
    ratios = [f"{entry[ratio][key]:.2f}" if key in entry[ratio] else "-" for key in BASELINES]
    while len(ratios) > 1 and ratios[-1] == "-":
        ratios.pop()
    return f"{entry[us][FAST]:.1f} us ({' / '.join(ratios)})"


if __name__ == "__main__":
    print(table([Path(name) for name in sys.argv[1:]]))
