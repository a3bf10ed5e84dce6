"""A small DeepSeek-V3-style decoder whose MLPs are shared experts of moe_ops, eager and compiled.

    python examples/compile_model.py [TEXT_FILE] [--batch-sizes 1 2 8] [--layers 4]

It reads the bytes of a text file (default: this project's README), runs the model eagerly and through
`torch.compile` at several batch sizes, takes one backward through the frozen experts to the embeddings, and
prints what held. Weights are random; nothing is downloaded. On a machine with a GPU it runs there. The exit
status says whether every bit comparison held.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import moe_ops
from moe_ops.testing import bit_mismatches, bits_equal

VOCABULARY = 256  # bytes
HIDDEN, HEADS, DENSE, EXPERT = 256, 4, 512, 128
CONTEXT = 128
REPLAY_ROWS = (1, 2, 7, 64)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        half = HIDDEN // HEADS // 2
        angles = torch.arange(CONTEXT)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * self.cos - second * self.sin, first * self.sin + second * self.cos), -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class DenseMLP(nn.Module):
    """A plain SwiGLU MLP, as HF transformers write it."""

    def __init__(self, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, intermediate_size, bias=False)
        self.up_proj = nn.Linear(HIDDEN, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and an MLP, each after a norm and beside a residual. Also returns the MLP's traffic."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.mlp_norm = nn.RMSNorm(HIDDEN)
        self.mlp = mlp

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        normed = self.mlp_norm(x)
        y = self.mlp(normed)
        return x + y, normed, y


class Decoder(nn.Module):
    """Byte tokens [B, CONTEXT] to logits, with every shared expert's (input, output) as a second result."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        experts = [moe_ops.SharedExpertMLP(HIDDEN, EXPERT) for _ in range(layers - 1)]
        self.blocks = nn.ModuleList(Block(mlp) for mlp in (DenseMLP(DENSE), *experts))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    @property
    def experts(self) -> list[moe_ops.SharedExpertMLP]:
        return [block.mlp for block in self.blocks[1:]]

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x, traffic = self.embedding(tokens), []
        for block in self.blocks:
            x, mlp_input, mlp_output = block(x)
            if isinstance(block.mlp, moe_ops.SharedExpertMLP):
                traffic.append((mlp_input, mlp_output))
        return self.head(self.norm(x)), traffic


def read_tokens(path: Path, sequences: int, device: str) -> Tensor:
    """The file's bytes as [sequences, CONTEXT + 1], from the start again where the file is short."""
    data = path.read_bytes()
    if not data:
        raise SystemExit(f"{path} is empty")
    count = sequences * (CONTEXT + 1)
    data = bytes(itertools.islice(itertools.cycle(data), count))
    return torch.tensor(list(data), device=device).view(sequences, CONTEXT + 1)


def replay(function, rows: Tensor) -> Tensor:
    """`function` over `rows` [T, H] in small batches of changing size."""
    sizes, left = [], len(rows)
    for size in itertools.cycle(REPLAY_ROWS):
        if left == 0:
            break
        sizes.append(min(size, left))
        left -= sizes[-1]
    return torch.cat([function(part) for part in rows.split(sizes)])


def rows_that_differ(function, rows: Tensor) -> int:
    """How many rows have other bits in small batches than in one batch."""
    return bit_mismatches(replay(function, rows), function(rows)).any(1).sum().item()


def plain_twin(expert: moe_ops.SharedExpertMLP, dtype: torch.dtype) -> DenseMLP:
    """A plain MLP of the expert's weights, for contrast."""
    twin = DenseMLP(EXPERT).to(expert.gate_proj.weight.device, dtype)
    twin.load_state_dict(expert.state_dict())
    return twin


def tokens_per_second(function, tokens: Tensor, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        _synchronize(tokens)
        start = time.perf_counter()
        function(tokens)
        _synchronize(tokens)
        times.append(time.perf_counter() - start)
    return tokens.numel() / sorted(times[1:])[repeats // 2]


def _synchronize(tokens: Tensor) -> None:
    if tokens.is_cuda:
        torch.cuda.synchronize()


def embedding_gradient(model: Decoder, function, tokens: Tensor) -> Tensor:
    """One backward of the next-byte loss, through the frozen experts, to the embeddings."""
    model.zero_grad()
    logits, _ = function(tokens[:, :-1])
    F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
    if any(parameter.grad is not None for expert in model.experts for parameter in expert.parameters()):
        raise RuntimeError("a frozen expert weight has a gradient")
    return model.embedding.weight.grad


def log_probabilities(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


def report(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    default_text = Path(__file__).resolve().parent.parent / "README.md"
    parser.add_argument(
        "text", nargs="?", type=Path, default=default_text, help="a text file (default: the README)"
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 8], help="sequences per run")
    parser.add_argument("--layers", type=int, default=4, help="blocks, the first of them dense (at least 2)")
    arguments = parser.parse_args()
    if arguments.layers < 2 or min(arguments.batch_sizes) < 1:
        parser.error("at least 2 layers and batch sizes of at least 1 are needed")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = moe_ops.provenance(device)

    torch.manual_seed(0)
    model = Decoder(arguments.layers).to(device, torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True)
    big = read_tokens(arguments.text, max(arguments.batch_sizes), device)
    inputs = big[:, :-1]

    layer_ok = [True] * len(model.experts)
    with torch.no_grad():
        for batch in arguments.batch_sizes:
            eager_logits, _ = model(inputs[:batch])
            compiled_logits, traffic = compiled(inputs[:batch])
            for index, (expert, (x, y)) in enumerate(zip(model.experts, traffic, strict=True)):
                layer_ok[index] &= bits_equal(expert(x), y)
        inference_graphs = counters["stats"]["unique_graphs"]
        compiled_difference = (
            (log_probabilities(compiled_logits) - log_probabilities(eager_logits)).abs().max()
        )

        eager_logits, eager_traffic = model(inputs)
        alone = torch.cat([model(row[None])[0] for row in inputs])
        batch_difference = (log_probabilities(eager_logits) - log_probabilities(alone)).abs().max()
        replayed = []
        for expert, (x, _) in zip(model.experts, eager_traffic, strict=True):
            rows = x.flatten(0, 1)
            plain = [
                rows_that_differ(plain_twin(expert, d), rows.to(d)) for d in (torch.bfloat16, torch.float32)
            ]
            replayed.append((rows_that_differ(expert, rows), *plain))
        speeds = tokens_per_second(model, inputs), tokens_per_second(compiled, inputs)

    eager_gradient = embedding_gradient(model, model, big).clone()
    compiled_gradient = embedding_gradient(model, compiled, big)
    gradient_norm = eager_gradient.norm()
    gradient_difference = (compiled_gradient - eager_gradient).norm() / gradient_norm
    training_graphs = counters["stats"]["unique_graphs"] - inference_graphs

    batches = ", ".join(map(str, arguments.batch_sizes))
    report(
        [
            ("device", f"{record.device} (torch {record.torch})"),
            ("profile", f"{record.profile}, backend {record.backend}"),
            ("text", f"{arguments.text.name}, {inputs.numel()} bytes in the largest batch"),
            ("batch sizes", f"{batches} x {CONTEXT} tokens"),
            ("graph breaks", f"{sum(counters['graph_break'].values())}"),
            ("recompiles", f"{inference_graphs - 1} in inference, {training_graphs - 1} in training"),
        ]
    )
    print()
    print(f"           compiled  rows with other bits when replayed in batches of 1 to {max(REPLAY_ROWS)}")
    print("MoE layer  == eager  ours / plain MLP in bf16 / plain MLP in fp32")
    for index, (ok, counts) in enumerate(zip(layer_ok, replayed, strict=True)):
        print(
            f"{index + 1:<9}  {'yes' if ok else 'NO':<8}  {' / '.join(map(str, counts))} of {inputs.numel()}"
        )
    print()
    report(
        [
            (
                "logprobs, batch vs one by one",
                f"differ by up to {batch_difference:.1e} (attention is not ours)",
            ),
            ("logprobs, compiled vs eager", f"differ by up to {compiled_difference:.1e}"),
            (
                "gradient at the embeddings",
                f"norm {gradient_norm:.4f}, compiled differs by {gradient_difference:.1e}",
            ),
            ("tokens/s", f"{speeds[0]:,.0f} eager, {speeds[1]:,.0f} compiled"),
        ]
    )
    return 0 if all(layer_ok) and not any(ours for ours, *_ in replayed) else 1


if __name__ == "__main__":
    sys.exit(main())
