"""Times fc1 of a cascade against fc1 over all candidates: appends rows to a CSV.

    python -m benchmarks.cascade --out benchmarks/results/cascade.csv
    python -m benchmarks.cascade --sweep            # launch settings instead

Both read the same list of candidates; `cascade` reads a quarter of each row and the rest of what passes (`live`, as a
share of the candidates), with several rows the whole row of what passes. Which neurons pass is drawn beforehand: bars
are far below or above any score.
"""

import argparse
import time

import torch
from torch import Tensor

from benchmarks.harness import BenchRow, Rows, measure, sets_for
from kernels.mlp.cascade import CascadeWeights, cascade
from kernels.mlp.cascade_batch import InputLevels, cascade_test
from kernels.mlp.select import Selection
from kernels.mlp.sparse_fc1 import sparse_fc1
from kernels.mlp.sparse_fc2 import PackedSelection, pack, packed_block
from kernels.mlp.sparse_mlp_batch import BatchActivations, fc1_batch

SHAPES = {768: 3072, 2048: 8192, 4096: 16384, 7168: 28672, 9216: 36864, 12288: 49152}
CASES = ((0.05, 0.6), (0.1, 0.4), (0.2, 0.2), (0.3, 0.15))


class Problem:
    """Weights of several layers with one list of candidates each; fp16 rows and planes of random bits."""

    def __init__(self, d: int, batch: int, density: float, passing: float, seed: int = 0) -> None:
        self.d, self.n, self.batch = d, SHAPES[d], batch
        self.block = packed_block(d) if batch == 1 else 64
        generator = torch.Generator("cuda").manual_seed(seed)
        self.masks: list[Tensor] = []
        union = 1 - (1 - density) ** batch
        self.sets = sets_for(int(self.n * d * 0.5 * union), 2 * self.n * d, 6 * 2**30)
        self.x = torch.randn(batch, d, device="cuda", generator=generator).half()
        self.fc1, self.planes, self.selections = [], [], []
        ones = torch.ones(self.n, device="cuda")
        for _ in range(self.sets):
            self.fc1.append(torch.empty(self.n, d, dtype=torch.float16, device="cuda").normal_(0, d**-0.5))
            words = torch.randint(
                -(2**31), 2**31 - 1, (self.n, d // 2), dtype=torch.int32, device="cuda", generator=generator
            )
            stage2_threshold = torch.where(
                torch.rand(self.n, device="cuda", generator=generator) < passing, -1e30, 1e30
            )
            upper, rest = words[:, : d // 8].contiguous(), words[:, d // 8 :].contiguous()
            self.planes.append(CascadeWeights(upper, rest, ones * 1e-2, ones * 1e-5, ones * 0.0, stage2_threshold))
            mask = torch.rand(batch, self.n, device="cuda", generator=generator) < density
            self.masks.append(mask)
            self.selections.append(Selection.from_mask(mask, self.block))
        self.bias = torch.zeros(self.n, dtype=torch.float16, device="cuda")

    def bytes(self, i: int, provider: str) -> int:
        """What one step must read."""
        candidates = self.masks[i].any(0)
        if provider != "cascade":
            return int(candidates.sum()) * 2 * self.d
        passed = candidates & (self.planes[i].stage2_threshold < 0)
        # One row reads the other plane of what passed, several rows whole rows of fc1.
        rest = 3 * self.d // 2 + 4 if self.batch == 1 else 2 * self.d
        return int(candidates.sum()) * (self.d // 2 + 12) + int(passed.sum()) * rest

    def time(
        self, provider: str, programs: int | None = None, warps: int | None = None, pdl: bool = True
    ) -> tuple[float, float, float]:
        """Microseconds p20, p50, p80, of packing the list of one row too."""
        packed = PackedSelection.empty(self.n, "cuda")
        levels = InputLevels.empty(self.batch, self.d, "cuda")
        activations = BatchActivations.empty(self.n, self.batch, self.d, torch.float16, "cuda")
        state = torch.ones(self.batch, dtype=torch.int32, device="cuda")

        def one_row(i: int) -> None:
            pack(self.selections[i], packed, pdl=pdl)
            if provider == "cascade":
                cascade(self.x, self.planes[i], self.selections[i], packed, None, pdl, warps, programs)
            else:
                sparse_fc1(self.x, self.fc1[i], self.bias, packed, pdl=pdl)

        def several_rows(i: int) -> None:
            if provider == "cascade":
                cascade_test(self.x, self.planes[i], self.selections[i], state, levels, pdl=pdl)
            fc1_batch(self.x, self.fc1[i], self.bias, self.selections[i], activations, pdl=pdl)

        step = one_row if self.batch == 1 else several_rows
        # A selection becomes what passed; without putting it back a second replay would test fewer rows.
        kept = [[getattr(each, name).clone() for name in ("ids", "counts", "row_bits")] for each in self.selections]

        def restore() -> None:
            for selection, (ids, counts, bits) in zip(self.selections, kept, strict=True):
                selection.ids.copy_(ids)
                selection.counts.copy_(counts)
                selection.row_bits.copy_(bits)

        found = measure(step, self.sets, before=restore)
        restore()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/cascade.csv")
    parser.add_argument("--d", type=int, nargs="*", default=[4096, 9216])
    parser.add_argument("--batch", type=int, nargs="*", default=[1])
    parser.add_argument("--sweep", action="store_true", help="programs a block and warps, at 10 % of candidates")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop before the next case after so long")
    args = parser.parse_args()
    rows, start = Rows(args.out), time.monotonic()
    for d in args.d:
        for batch in args.batch:
            for density, passing in CASES[1:2] if args.sweep else CASES:
                if time.monotonic() - start > args.seconds:
                    return
                problem = Problem(d, batch, density, passing)
                variants: list[tuple[str, int | None, int | None]] = [("listed", None, None), ("cascade", None, None)]
                if args.sweep and batch == 1:
                    variants += [("cascade", 132 * many, warps) for warps in (1, 2, 4, 8) for many in (4, 8, 16)]
                for provider, programs, warps in variants:
                    if time.monotonic() - start > args.seconds:
                        return
                    p20, p50, p80 = problem.time(provider, programs, warps)
                    size = problem.bytes(0, provider)
                    conditions = f"graph, pdl, {problem.sets} sets" + (
                        f", programs {programs} warps {warps}" if programs else ""
                    )
                    rows.add(
                        BenchRow(
                            "fc1", provider, problem.n, d, density, passing, batch, 0, "float16", p20, p50, p80, size,
                            size / p50 / 1000, conditions,
                        )
                    )  # fmt: skip
                del problem
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
