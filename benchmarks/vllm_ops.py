"""Times all linear maps of a step, without the LM head, as the plug-in for vLLM runs them, from 1 to 64 tokens.

    PYTHONPATH=packages/dejavu-vllm python -m benchmarks.vllm_ops

Ways: "dense" is F.linear, as vLLM runs them. "zeroskip" reads the live rows of the map out of the neurons. "dejavu"
reads the rows of the map into them that a predictor chooses as well, and its two matrices. "whole" are those two maps
above the crossover, where weights lie as the plug-in has them and are read whole. Weights are random, all layers' own,
and a step is a CUDA graph. Which neurons tokens use is drawn as `active_sets` draws it. First every op is compared with
float64. vLLM itself is not needed.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from dejavu_vllm import ops
from torch import Tensor
from torch.nn import functional as F

from benchmarks.active_sets import frequencies
from benchmarks.decode_problem import RANKS, SHAPES
from benchmarks.harness import graph_of, step_times
from benchmarks.rows import append_row, command_line, five_digits, gpu_versions, made_now, needs_gpu
from dejavu_train.families import ModelDims

ACTIVE, CHOSEN = 0.06, 0.1  # of a token's neurons
WAYS = ("dense", "zeroskip", "dejavu", "whole")
SOURCES = ("dejavu_vllm.kernels.live_rows", "dejavu_vllm.kernels.chosen_rows")


@dataclass(frozen=True)
class Layer:
    """Weights: attention's two maps, fc1 and fc2 as stored, fc2 as rows of neurons, a predictor."""

    qkv: Tensor
    out: Tensor
    fc1: Tensor
    fc2: Tensor
    rows: Tensor
    down: Tensor
    up: Tensor
    offset: Tensor


def uses(tokens: int, n: int, share: float, device: str) -> Tensor:
    """(B, n) bool: who uses what."""
    return torch.rand(tokens, n, device=device) < frequencies(n, share, device)


class Problem:
    """A shape's layers, and for a number of tokens the inputs under which predictors choose what is drawn."""

    def __init__(self, name: str, layers: int | None, device: str = "cuda") -> None:
        self.dims: ModelDims = SHAPES[name]
        self.rank, self.device, self.dtype = RANKS[name], device, torch.float16
        self.layers = [self._layer() for _ in range(layers or self.dims.n_layers)]

    def _matrix(self, rows: int, columns: int, size: float = 0.02) -> Tensor:
        return torch.empty(rows, columns, dtype=self.dtype, device=self.device).normal_(0, size)

    def _layer(self) -> Layer:
        d, n = self.dims.d_model, self.dims.d_ffn
        heads, groups = self.dims.n_heads * self.dims.head_dim, self.dims.n_kv_heads * self.dims.head_dim
        fc2 = self._matrix(d, n)
        offset = torch.zeros(n, dtype=self.dtype, device=self.device)
        down, up = self._matrix(self.rank, d), self._matrix(n, self.rank, 0.001)
        qkv, out, fc1 = self._matrix(heads + 2 * groups, d), self._matrix(d, heads), self._matrix(n, d)
        return Layer(qkv, out, fc1, fc2, fc2.t().contiguous(), down, up, offset)

    def draw(self, tokens: int) -> None:
        """Draw inputs x (B, d), and for every layer h (B, n) whose active neurons are among the chosen ones.

        Row b of a predictor's first matrix finds token b, whose column of the second is 1 where it chooses, else -1.
        """
        d, n = self.dims.d_model, self.dims.d_ffn
        self.x = self._matrix(tokens, d, 1.0)
        self.chosen, self.h = [], []
        for layer in self.layers:
            keep = uses(tokens, n, CHOSEN, self.device)
            live = keep & (torch.rand(tokens, n, device=self.device) < ACTIVE / CHOSEN)
            layer.down[:tokens] = self.x / self.x.float().square().sum(1, keepdim=True).to(self.dtype)
            layer.up[:, :tokens] = torch.where(keep.T, 1.0, -1.0).to(self.dtype)
            self.chosen.append(keep)
            self.h.append(self._matrix(tokens, n, 1.0) * live)

    def step(self, way: str, most: int = 64) -> None:
        """The maps of all layers, one after the other."""
        for layer, h in zip(self.layers, self.h, strict=True):
            F.linear(self.x, layer.qkv)
            F.linear(self.x, layer.out)  # heads are together as wide as the model
            if way == "dejavu":
                self.predicted(layer, most)
            else:
                F.linear(self.x, layer.fc1)
            if way == "dense":
                F.linear(h, layer.fc2)
            else:
                ops.live_rows(h, layer.rows, None, 0 if way == "whole" else most)

    def predicted(self, layer: Layer, most: int = 64) -> Tensor:
        return ops.predicted_rows(
            self.x, layer.fc1, None, layer.down, layer.up, layer.offset, False, 0.0, most
        )  # fmt: skip

    def check(self) -> None:
        """Compare both ops of the first and the last layer with float64. Raises AssertionError."""
        for i in (0, -1):
            layer, h, keep = self.layers[i], self.h[i], self.chosen[i]
            made, want = ops.live_rows(h, layer.rows, None, 64).double(), h.double() @ layer.rows.double()
            torch.testing.assert_close(made, want, rtol=4e-3, atol=4e-3)
            made = self.predicted(layer).double()
            want = (self.x.double() @ layer.fc1.double().T) * keep
            assert bool(((made != 0) <= keep).all()), "a neuron that was not chosen is not zero"
            torch.testing.assert_close(made, want, rtol=6e-3, atol=6e-3)


def median_us(step: Callable[[], None]) -> float:
    """Microseconds of a step."""
    return sorted(step_times(graph_of(step).replay, 15, warm=3))[7] * 1000


def run_model(name: str, args: Namespace, about: dict[str, str]) -> None:
    """Time a shape at every number of tokens, append rows and print a line of each."""
    problem = Problem(name, args.layers)
    for tokens in args.tokens:
        problem.draw(tokens)
        problem.check()
        us = {way: median_us(partial(problem.step, way)) for way in WAYS}
        union = sum(float(keep.any(0).float().mean()) for keep in problem.chosen) / len(problem.chosen)
        live = sum(float((h != 0).any(0).float().mean()) for h in problem.h) / len(problem.h)
        for way in WAYS:
            row = {"model": name, "tokens": tokens, "way": way, "us": us[way], "live": live, "chosen": union}
            append_row(args.out, five_digits(row | {"layers": len(problem.layers)} | about))
        gains = {way: f"{us['dense'] / us[way]:.2f}x" for way in WAYS[1:]}
        print(name, tokens, f"dense {us['dense']:.0f} us", gains, f"live {live:.2f} chosen {union:.2f}", flush=True)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=["6.7b", "afm-4.5b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--layers", type=int, help="all of the shape's by default")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vllm_ops.csv"))
    args = parser.parse_args()
    needs_gpu(parser)
    torch.manual_seed(0)
    about = made_now(*SOURCES) | gpu_versions()
    for name in args.models:
        run_model(name, args, about)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
