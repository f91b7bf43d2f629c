"""The greedy token from all logits and through a screen (`kernels.dense.screened_head`), with the choice of the token.

    python -m benchmarks.screened_head --csv benchmarks/results/screened_head.csv     one GPU
    python -m benchmarks.screened_head --sweep --csv sweep.csv                        launch settings of the screen

Random heads in fp16 of OPT's vocabulary; inputs are random as well, `outliers`: three columns of the input fifty times
and of the head twenty times the rest. `density` is the share of the rows that were read in fp16; bytes are those of
what was read.
"""

import argparse
from collections.abc import Sequence

import torch

from benchmarks.harness import BenchRow, Rows, measure
from kernels.common.layer_norm import LayerNormWeights
from kernels.dense.dense_gemv import dense_rows
from kernels.dense.screened_head import ScreenedHead, ScreenSettings, screen_settings, screened_head
from kernels.sampling import TokenState, advance

VOCABULARY, SETS = 50272, 3
SWEEP = {  # programs, rows, warps
    2048: ("4/8/4", "3/16/4", "3/8/4"),
    4096: ("4/4/4", "3/8/4", "3/4/4", "2/8/4"),
    7168: ("3/4/4", "2/4/8", "2/4/4", "3/2/4"),
    9216: ("3/2/4", "2/4/4", "2/2/8", "1/4/8"),
    12288: ("2/2/8", "2/2/4", "2/4/4", "1/4/8"),
}


def measure_width(d: int, kind: str, settings: ScreenSettings, rows: Rows, full: bool, conditions: str) -> None:
    """A row of the screen, and one of all logits where `full` asks for it. kind: random or outliers."""
    ln = LayerNormWeights(*(torch.full((d,), value, device="cuda", dtype=torch.float16) for value in (1.0, 0.0)))
    x, heads = torch.randn(1, d, device="cuda"), []
    if kind == "outliers":
        x[:, :: d // 3] *= 50
    for _ in range(SETS):
        weight = torch.empty(VOCABULARY, d, device="cuda", dtype=torch.float16).normal_(0, 0.02)
        if kind == "outliers":
            weight[:, :: d // 3] *= 20
        heads.append(ScreenedHead.of(weight, ln, settings))
    logits, state = torch.empty(1, VOCABULARY, device="cuda"), TokenState.empty(1, 4096, "cuda")

    def all_logits(i: int) -> None:
        dense_rows(x, ln, heads[i].weight, None, "none", logits, pdl=True)
        advance(logits, state, pdl=True)

    def through_screen(i: int) -> None:
        screened_head(x, heads[i], state.position, state.least, state.stops, pdl=True)
        advance(logits, state, pdl=True, chosen=heads[i].best)

    def again() -> None:
        state.position.fill_(5)
        state.done.zero_()

    for provider, step in (("all logits", all_logits), ("screen", through_screen)):
        if step is all_logits and not full:
            continue
        times = measure(step, SETS, before=again, rounds=4)
        screened = step is through_screen
        won = heads[0].rows_read() if screened else VOCABULARY
        read = heads[0].read_bytes() if screened else heads[0].weight.nbytes
        share = won / VOCABULARY
        rows.add(
            BenchRow(
                "lm_head", provider, VOCABULARY, d, share, 1.0, 1, 0, "float16", *times, read, read / times[1] / 1e3,
                conditions if screened else kind,
            )
        )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", nargs="+", type=int, default=[2048, 4096, 7168, 9216, 12288])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--csv", default="benchmarks/results/screened_head.csv")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    rows = Rows(options.csv)
    for d in options.widths:
        if options.sweep:
            for name in SWEEP.get(d, ()):
                settings = ScreenSettings(*map(int, name.split("/")))
                measure_width(d, "random", settings, rows, name == SWEEP[d][0], f"random {name}")
        else:
            for kind in ("random", "outliers"):
                measure_width(d, kind, screen_settings(d), rows, True, kind)


if __name__ == "__main__":
    main()
