import gc
import statistics
import time
from contextlib import nullcontext

import torch

import dejavu_train.engine.plan as P
from benchmarks.decode import started_engine, step_times
from benchmarks.decode_cells import read_cells
from benchmarks.decode_problem import ACTIVE, SHAPES, random_weights
from dejavu_train.kernels.common.settings import tried

T0 = time.time()


def go(name, packed, start, stage, fields, candidates):
    P.CODES_FROM = start
    weights = random_weights(SHAPES[name], ACTIVE, packed, False)
    cell = read_cells("engine=exact head_density=1" + (" weights=int4 screen=1" if packed else ""))[0]
    e = started_engine(cell, name, weights, 600, ACTIVE)
    kinds = {str(h.kernels) for h in e.plan.halves}
    for s in [None, *candidates, None]:
        how = nullcontext() if s is None else tried(stage, dict(zip(fields, s)))
        try:
            with how:
                e.core._graphs.clear()
                ts = step_times(e.step, 24)
                print(
                    round(time.time() - T0), name, packed, start, s, round(statistics.median(ts), 4), kinds, flush=True
                )
        except Exception as error:
            print(name, s, "failed", str(error)[:200], flush=True)
    del e, weights
    gc.collect()
    torch.cuda.empty_cache()


F4 = ("programs", "warps", "ahead", "registers")
FN = ("programs", "block", "rows", "warps")
N = [(2, 2048, 4, 8), (1, 4096, 4, 16), (4, 1024, 2, 4), (3, 2048, 2, 4), (2, 4096, 2, 16)]
go("prosparse-7b", True, 4096, "listed_int4", F4, [])
go("prosparse-7b", True, 10**9, "listed_int4", F4, [(3, 4, 4, 160), (2, 4, 4, 200), (3, 4, 2, 160)])
go("afm-4.5b", False, 4096, "listed", FN, N)
go("prosparse-7b", False, 4096, "listed", FN, N)
go("6.7b", False, 4096, "listed", FN, N)
go("1.3b", False, 4096, "listed", FN, N)
