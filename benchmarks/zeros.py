"""Times the MLP of a dense layer with rows of silent neurons read and left out, over the share that is live.

    python -m benchmarks.zeros --shapes 6.7b --rows 1 8

Rows: one in one grid ("grid") or as up, then live rows of down ("apart"), beside up, then all of down ("read"). Several
rows and eight verification slots: up as a product, then live rows or all of down. Weights lie in memory past the L2.
Which neurons are live is drawn anew for each set of weights. `plan` leaves silent neurons out where this is no slower.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.decode_problem import SHAPES
from benchmarks.harness import SETS, measure
from benchmarks.rows import append_row, command_line, five_digits, gpu_versions, made_now, needs_gpu
from dejavu_train.engine.planned import hidden_values
from dejavu_train.families import ModelDims
from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.common.partial_sums import partial_sums
from dejavu_train.kernels.common.selection import PackedSelection
from dejavu_train.kernels.dense.dense_batch import dense_add, hidden_products
from dejavu_train.kernels.dense.dense_rows import dense_wide
from dejavu_train.kernels.formats.matrix import Linear, MlpWeights
from dejavu_train.kernels.mlp.live_down import live_down
from dejavu_train.kernels.stages.hidden import hidden_row, kept_unit
from dejavu_train.kernels.stages.mlp import mlp
from dejavu_train.kernels.verify.slot_products import slot_hidden, slot_linear
from dejavu_train.kernels.verify.slot_walk import ProductScratch

SHARES = (0.02, 0.06, 0.12, 0.3, 0.6, 1.0)
SOURCES = ("dejavu_train.kernels.mlp.live_down", "dejavu_train.kernels.stages.mlp", "dejavu_train.kernels.settings")
OPEN, SHUT = 8.0, -1e4  # biases of live and of silent neurons
Timed = dict[str, Callable[[int], None]]


class Problem:
    """Weights of SETS layers of a shape, a part of whose neurons is live, and what the ways of running them need."""

    def __init__(self, dims: ModelDims, rows: int, slots: bool, device: str = "cuda") -> None:
        self.dims, self.rows, self.slots, self.device = dims, rows, slots, device
        n, d = dims.d_ffn, dims.d_model
        one = torch.ones(d, dtype=torch.float16, device=device)
        self.norm = LayerNormWeights(one, torch.zeros_like(one))
        self.x = torch.randn(rows, d, device=device)
        self.normed = self.x.half()
        self.out, self.sums = torch.empty_like(self.x), partial_sums(d, device)
        self.row, self.slot_hidden = torch.empty(1, n, device=device), torch.empty(rows, n, device=device).half()
        self.every = PackedSelection.of_all(n, device)
        self.scratch = ProductScratch.empty(d, device)
        self.layers = [self._layer() for _ in range(SETS)]

    def _layer(self) -> tuple[MlpWeights, Linear]:
        """(weights with down as rows of neurons, down as stored)."""
        n, d = self.dims.d_ffn, self.dims.d_model

        def linear(rows: int, columns: int) -> Linear:
            numbers = torch.empty(rows, columns, dtype=torch.float16, device=self.device).normal_(0, 0.02)
            return Linear.of(numbers, torch.zeros(rows, dtype=torch.float16, device=self.device))

        gate = linear(n, d) if self.dims.gated else None
        down, stored = linear(n, d), linear(d, n)
        return MlpWeights(linear(n, d), Linear(down.weight, stored.bias), gate, hidden_values(self.dims)), stored

    def open(self, share: float) -> None:
        """Let a share of each layer's neurons be live, whatever the input."""
        for weights, _ in self.layers:
            bias = (weights.gate or weights.up).bias
            bias.copy_(torch.where(torch.rand(len(bias), device=self.device) < share, OPEN, SHUT))
            weights.up.bias.fill_(OPEN) if weights.gate is not None else None

    def ways(self) -> Timed:
        """What is timed, by the number of a layer."""
        if self.slots:
            return {"read": self._slots_read, "skip": self._slots_skip}
        if self.rows == 1:
            return {"read": self._row_read, "grid": self._row_grid, "apart": self._row_apart}
        return {"read": self._rows_read, "skip": self._rows_skip}

    def _row_read(self, i: int) -> None:
        weights, stored = self.layers[i]
        hidden_row(self.x, self.norm, weights, self.row, pdl=True)
        dense_wide(self.row, stored.weight, stored.bias, self.x, self.out, pdl=True)

    def _row_grid(self, i: int) -> None:
        weights, _ = self.layers[i]
        mlp(self.x, self.norm, weights, self.x, self.every, self.out, self.sums, "list", pdl=True)

    def _row_apart(self, i: int) -> None:
        weights, _ = self.layers[i]
        hidden_row(self.x, self.norm, weights, self.row, pdl=True)
        self._live(weights, self.row)

    def _rows_read(self, i: int) -> None:
        weights, stored = self.layers[i]
        hidden = hidden_products(self.x, self.norm, weights, pdl=True)
        unit = kept_unit(weights, hidden.dtype)
        dense_add(hidden, stored.weight, stored.bias, self.x, self.out, pdl=True, unit=unit)

    def _rows_skip(self, i: int) -> None:
        weights, _ = self.layers[i]
        self._live(weights, hidden_products(self.x, self.norm, weights, pdl=True))

    def _slots_read(self, i: int) -> None:
        weights, _ = self.layers[i]
        slot_hidden(self.normed, weights, self.slot_hidden, self.scratch, pdl=True)
        unit = kept_unit(weights, torch.float16)
        down = weights.down
        slot_linear(
            self.slot_hidden, down.weight, down.bias, self.out, self.x, self.scratch, True, unit, pdl=True
        )  # fmt: skip

    def _slots_skip(self, i: int) -> None:
        weights, _ = self.layers[i]
        slot_hidden(self.normed, weights, self.slot_hidden, self.scratch, pdl=True)
        self._live(weights, self.slot_hidden)

    def _live(self, weights: MlpWeights, hidden: torch.Tensor) -> None:
        unit = kept_unit(weights, hidden.dtype)
        live_down(hidden, weights.down.weight, weights.down.bias, self.x, self.out, self.sums, True, unit)


def timed(run: Callable[[int], None]) -> float:
    """Microseconds of a layer, each of SETS layers in turn."""
    turn = itertools.cycle(range(SETS))
    return measure(lambda: run(next(turn)))


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["1.3b", "6.7b", "afm-4.5b", "prosparse-7b", "30b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--no-slots", dest="slots", action="store_false")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/zeros.csv"))
    args = parser.parse_args()
    needs_gpu(parser)
    cells = [*((rows, False) for rows in args.rows), *[(8, True)] * args.slots]
    about = made_now(*SOURCES) | gpu_versions()
    for name, (rows, slots) in itertools.product(args.shapes, cells):
        problem = Problem(SHAPES[name], rows, slots)
        for share in args.shares:
            problem.open(share)
            found = {way: timed(run) for way, run in problem.ways().items()}
            for way, us in found.items():
                row = {"model": name, "rows": rows, "slots": int(slots), "live": share, "way": way, "us": us}
                append_row(args.out, five_digits(row | about))
            print(name, rows, "slots" if slots else "", share, {w: round(t, 2) for w, t in found.items()}, flush=True)
        del problem
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
