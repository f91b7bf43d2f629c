"""Milliseconds of a step in 4 bits without one of its launches: python -m benchmarks.launch_costs 6.7b 1.3b, on a GPU."""

import gc
import statistics
import sys

import torch

import dejavu_train.engine.ops as O
import dejavu_train.kernels.stages.mlp as M
from benchmarks.decode import started_engine, step_times
from benchmarks.decode_cells import read_cells
from benchmarks.decode_problem import ACTIVE, SHAPES, random_weights

add = M.add_partials
print([n for n in vars(O) if not n.startswith("_")][:80])
for name in sys.argv[1:]:
    weights = random_weights(SHAPES[name], ACTIVE, True, False)
    for text in (
        "engine=exact weights=int4 screen=1 head_density=1",
        "engine=sparse weights=int4 screen=1 head_density=1",
    ):
        for cell in read_cells(text):
            e = started_engine(cell, name, weights, 200, ACTIVE)
            ops = e.core.work.ops if hasattr(e.core, "work") else None

            def t(label):
                ts = step_times(e.step, 24)
                print(name, cell.engine, label, round(statistics.median(ts), 4), flush=True)

            t("base")
            M.add_partials = lambda *a, **k: None
            e.core._graphs.clear()
            t("no add")
            M.add_partials = add
            e.core._graphs.clear()
            t("base again")
            kept = {
                n: O.StepOps.__dict__[n]
                for n in ("pack", "select", "predict", "listed_mlp", "flash_decode", "project_heads", "qkv_dense")
            }
            for names in (
                ("pack",),
                ("select", "pack"),
                ("predict", "select", "pack"),
                ("listed_mlp",),
                ("flash_decode",),
                ("project_heads",),
                ("qkv_dense",),
            ):
                for n in names:
                    setattr(O.StepOps, n, staticmethod(lambda *a, **k: None))
                try:
                    e.core._graphs.clear()
                    t("no " + " ".join(names))
                except Exception as error:
                    print("failed", names, str(error)[:200])
                for n in names:
                    setattr(O.StepOps, n, kept[n])
            del e
            gc.collect()
            torch.cuda.empty_cache()
    del weights
    gc.collect()
    torch.cuda.empty_cache()
