"""Launch settings of the 4-bit kernels in whole decoding steps, because chains of one kernel choose other ones.

    python -m benchmarks.int4_settings --model 66b --try defaults:ahead=0.85,dense qkv=1/4:ahead=0.85 rows=1/8/12:dense

SETTINGS:STEPS words. SETTINGS: "defaults", or qkv=WARPS/STAGES[/REGISTERS/ROOM] (groups of 8 positions in
measurements up to 5c0ec81++, of 4 since), out=WARPS/SPAN/TILES/REGISTERS,
rows=PROGRAMS/WARPS/AHEAD/FETCHED (AHEAD counts pairs of units, in measurements up to 66bf3c1 units),
mlp=PROGRAMS/WARPS/AHEAD/REGISTERS, fc2=WARPS/AHEAD/PROGRAMS/REGISTERS/FETCHED, site=ROWS/BLOCK/WARPS,
block=NEURONS of a program of the predictor's second half,
apart=0|1 (fc2 of a dense step as a kernel of its own), carve=PERCENT of shared memory, late=0 (a stage before q/k/v in
every layer, also where the MLP before it could make its input); with "+" several of them.
STEPS: dense, ahead=SHARE (look-ahead, int4 predictors; int8 ones up to 0f01f64), late=SHARE (heads half a block ahead
as well), codes=SHARE (int8 ones), stream=SHARE (on a stream of its own) or own=SHARE (own site, int4 predictors), SHARE
of the heads; 10 % of the neurons. A row each in --csv as it comes; one GPU.
"""

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import decode
from benchmarks.decode_cells import Cell, read_cells
from benchmarks.rows import append_row, commit, five_digits
from dejavu_train.engine import decode as engine
from dejavu_train.engine.weights import DecodeWeights
from kernels.attention import out_projection_int4, qkv
from kernels.common import launch
from kernels.dense import dense_gemv
from kernels.mlp import int4_fc2, int4_mlp, predict, sparse_fc2

COLUMNS = ("model", "settings", "step", "p20_ms", "p50_ms", "note", "gpu", "torch", "commit", "date")
STEPS = {
    "dense": "engine=dense weights=int4",
    "ahead": "weights=int4 predictors=int4 site=1 head_density=",
    "late": "weights=int4 predictors=int4 site=1 heads_site=1 head_density=",
    "codes": "weights=int4 predictors=int8 site=1 head_density=",
    "stream": "weights=int4 predictors=int4 site=1 look_ahead=stream head_density=",
    "own": "weights=int4 predictors=int4 head_density=",
}
KERNELS = {  # where a kernel's defaults stand, and its settings from their numbers
    "qkv": (
        qkv,
        "int4_qkv_settings",
        lambda warps, stages, registers=0, room=0: qkv.TileSettings(
            16, 2, 32 * warps, stages, warps, 4, registers or None, room
        ),
    ),
    "out": (out_projection_int4, "head_row_settings", out_projection_int4.HeadRowSettings),
    "rows": (dense_gemv, "int4_row_settings", dense_gemv.Int4RowSettings),
    "mlp": (int4_mlp, "int4_mlp_settings", int4_mlp.Int4MlpSettings),
    "fc2": (int4_fc2, "int4_fc2_settings", int4_fc2.Int4Fc2Settings),
    "site": (predict, "predict_settings", predict.PredictSettings),
    "apart": (int4_fc2, "pays", bool),
    "block": (sparse_fc2, "packed_block", int),
    "carve": (launch, "carveout", int),
    "late": (engine, "late_layers", lambda _: set()),
}
DEFAULTS = {kernel: getattr(module, name) for kernel, (module, name, _) in KERNELS.items()}


def choose(text: str) -> None:
    """Puts the named settings in place of the defaults, and defaults elsewhere."""
    for kernel, (module, name, _) in KERNELS.items():
        setattr(module, name, DEFAULTS[kernel])
    for word in text.split("+") if text != "defaults" else ():
        kernel, _, numbers = word.partition("=")
        module, name, make = KERNELS[kernel]
        settings = make(*map(int, numbers.split("/")))
        setattr(module, name, lambda *_args, settings=settings, **_kwargs: settings)


@dataclass(frozen=True)
class Try:
    """A cell whose settings are chosen, and a model's weights for it."""

    settings: str
    step: str
    cell: Cell
    weights: DecodeWeights


def tries_of(words: Sequence[str], model: str) -> Iterator[Try]:
    """SETTINGS:STEPS words in turn; weights are made once, and again where an engine that failed lost them."""
    weights = None
    for word in words:
        settings, _, steps = word.rpartition(":")
        choose(settings)
        for step in steps.split(","):
            kind, _, share = step.partition("=")
            (cell,) = read_cells(STEPS[kind] + share)
            gc.collect()
            torch.cuda.empty_cache()
            if weights is None or not weights.layers:
                weights = decode.made_weights(cell, decode.SHAPES[model], 0.6)
            yield Try(settings, step, cell, weights)


def tries_parser(description: str | None) -> argparse.ArgumentParser:
    """Of a command that makes `tries_of`: --model and --try."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="66b", choices=list(decode.SHAPES))
    parser.add_argument("--try", dest="tries", nargs="+", required=True, metavar="SETTINGS:STEPS")
    return parser


def asked(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What was asked for; an error where there is no GPU."""
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    return args


def main() -> int:
    parser = tries_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/int4_settings.csv"))
    args = asked(parser)
    times, size = decode.best_read()
    for each in tries_of(args.tries, args.model):
        row = decode.run_cell(each.cell, args.model, each.weights, args.steps, size / times[1] / 1e6)
        row |= {"model": args.model, "settings": each.settings, "step": each.step, "torch": torch.__version__,
                "gpu": torch.cuda.get_device_name(), "commit": commit(), "date": time.strftime("%Y-%m-%d")}  # fmt: skip
        row["note"] = "" if "p50_ms" in row else row.get("note", "")
        append_row(args.csv, five_digits(row), COLUMNS)
        print(*(row.get(name, "") for name in COLUMNS[:6]), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
