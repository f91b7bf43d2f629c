"""Times launch settings of the stages of a sparse MLP, one stage at a time; the table in kernels/launch.py comes
from these rows. A stage runs as a PDL chain of itself, each link on weights of its own."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import BenchRow, Rows, measure, sets_for
from benchmarks.sparse_mlp_problem import Problem
from kernels.launch import GatherSettings, ScatterSettings, SelectGatherSettings, next_power_of_two


def fc1_candidates(d: int) -> Iterator[GatherSettings]:
    for rows, warps, held in ((1, 4, True), (1, 4, False), (2, 4, False), (1, 8, False)):
        for programs in (4 * d // 64, 8 * d // 64, 16 * d // 64):  # 1, 2, 4 programs a block of 64 neurons
            if programs <= 1536:
                yield GatherSettings(programs, rows, 256 * warps, warps, held=held)


def down_candidates(d: int) -> Iterator[GatherSettings]:
    for rows, warps, prefetch in ((1, 8, 32768), (2, 8, 32768), (1, 8, 65536), (1, 4, 32768), (1, 16, 32768)):
        for each in (1, 2, 3, 4):
            if d // 16 // each >= 64:
                yield GatherSettings(d // 16 // each, rows, min(256 * warps, 2048), warps, prefetch=prefetch)


def norm_candidates(d: int) -> Iterator[GatherSettings]:
    for warps, prefetch in ((4, 32768), (8, 32768)):
        for each in (1, 2, 3):
            if d // 16 // each >= 64:
                yield GatherSettings(d // 16 // each, 1, 256 * warps, warps, prefetch=prefetch)


def fc2_candidates(d: int) -> Iterator[ScatterSettings]:
    """For the list of the fused kernel: 4 d / 32 blocks of 32 slots."""
    for stripe, window, slots, warps, rows in ((128, 32, 4, 4, 0), (128, 16, 8, 4, 0), (256, 16, 4, 4, 0),
                                               (256, 32, 4, 8, 0), (512, 8, 4, 8, 0),
                                               (512, 32, 4, 2, 8), (512, 16, 4, 2, 8), (1024, 32, 4, 4, 8),
                                               (1024, 16, 4, 4, 8), (1024, 8, 4, 4, 8), (1024, 16, 4, 4, 4),
                                               (2048, 16, 4, 8, 8), (2048, 16, 4, 4, 4)):  # fmt: skip
        splits = -(-(4 * d // 32) // window)
        if splits <= 96 and d % stripe == 0:
            yield ScatterSettings(stripe, splits, rows or 32, warps, slots, stream=rows > 0)


def fc2l_candidates(d: int) -> Iterator[tuple[int, ScatterSettings]]:
    """For the list of the gathered fc1, whose ranges are its programs."""
    for programs in sorted({settings.programs for settings in fc1_candidates(d)}):
        # about 128 slots a program, of which one in `slots` is live at a density of 10 %
        slots = min(8, next_power_of_two(-(-9 * d // 25 // programs)))
        for stripe, tile, warps, rows in ((128, 128, 4, 0), (256, 128, 8, 0), (1024, 64, 4, 8), (1024, 128, 4, 8),
                                          (512, 128, 2, 8)):  # fmt: skip
            window = tile // slots
            if programs // window <= 96 and d % stripe == 0:
                yield (
                    programs,
                    ScatterSettings(stripe, -(-programs // window), rows or 32, warps, slots, stream=rows > 0),
                )


def select_candidates(d: int) -> Iterator[tuple[int, int]]:
    yield from ((32, 4), (64, 4), (64, 8))


def fused_candidates(d: int) -> Iterator[SelectGatherSettings]:
    for rows, warps, held in ((1, 4, True), (1, 4, False), (2, 4, False), (2, 4, True), (1, 8, False)):
        if rows * d <= 2 * 9216:
            yield SelectGatherSettings(32, rows, 256 * warps, warps, held)


def label(settings: Any) -> str:
    if isinstance(settings, GatherSettings):
        tile = f"r{settings.rows} b{settings.block} w{settings.warps}"
        return f"p{settings.programs} {tile} f{settings.prefetch} h{settings.held:d}"
    if isinstance(settings, ScatterSettings):
        kind = f"stream r{settings.rows}" if settings.stream else "tile"
        return f"s{settings.stripe} x{settings.splits} k{settings.slots} w{settings.warps} {kind}"
    if isinstance(settings, SelectGatherSettings):
        return f"b{settings.block} r{settings.rows} c{settings.columns} w{settings.warps} h{settings.held:d}"
    if isinstance(settings[1], ScatterSettings):
        return f"p{settings[0]} {label(settings[1])}"
    return "b{} w{}".format(*settings)


CANDIDATES: dict[str, Callable[[int], Iterator[Any]]] = {
    "fc1": fc1_candidates,
    "fc2": fc2_candidates,
    "fc2a": fc2_candidates,
    "fc2l": fc2l_candidates,
    "down": down_candidates,
    "select": select_candidates,
    "norm": norm_candidates,
    "fused": fused_candidates,
}


def apply(problem: Problem, op: str, settings: Any) -> None:
    if op == "fc1":
        problem.fc1_settings = settings
    elif op == "fc2":
        problem.fused_fc2_settings = settings
    elif op == "fc2a":
        problem.atomic_fc2_settings = settings
    elif op == "fc2l":
        problem.fc1_settings = replace(problem.fc1_settings, programs=settings[0])
        problem.fc2_settings = settings[1]
    elif op == "down":
        problem.a_settings = settings
    elif op == "norm":
        problem.norm_settings = settings
    elif op == "fused":
        problem.fused_settings = settings
    else:
        problem.block, problem.select_warps = settings
    problem.make_lists()


def stage(problem: Problem, op: str) -> Callable[..., None]:
    return {
        "fc1": problem.first,
        "fc2": problem.second_fused,
        "fc2a": problem.second_atomic,
        "fc2l": problem.second,
        "down": problem.down,
        "select": problem.select,
        "fused": problem.select_first,
        "norm": problem.down_normed,
    }[op]


def variant(op: str, settings: Any) -> str:
    """What is compiled: the grid size of a dense product is not."""
    return f"{op} {label(settings).split(' ', 1)[1] if op in ('down', 'norm') else label(settings)}"


def compile_share(widths: list[int], ops: list[str], share: str) -> None:
    """Compile every i-th variant on a small matrix: several processes fill the cache side by side."""
    index, count = (int(part) for part in share.split("/"))
    work = [(d, op, settings) for d in widths for op in ops for settings in CANDIDATES[op](d)]
    seen: set[Any] = set()
    problem: Problem | None = None
    for d, op, settings in work:
        key = (d, variant(op, settings))
        if key in seen:
            continue
        seen.add(key)
        if len(seen) % count != index:
            continue
        if problem is None or problem.d != d:
            problem = Problem(d, d // 16, 1)
            problem.thresholds = [torch.zeros(1, device="cuda")]
        try:
            apply(problem, op, settings)
            stage(problem, op)(0, True)
        except Exception as error:
            print("compile", key, repr(error)[:200], flush=True)
    torch.cuda.synchronize()


def write_best(path: Path, d: int, problem: Problem) -> None:
    """Adds this width's best settings to a JSON that `sparse_mlp.py --settings` reads."""
    found = json.loads(path.read_text()) if path.exists() else {}
    chosen = {
        "fc1": problem.fc1_settings,
        "down": problem.a_settings,
        "norm": problem.norm_settings,
        "fc2": problem.fused_fc2_settings,
        "fc2a": problem.atomic_fc2_settings,
        "fc2l": problem.fc2_settings,
        "fused": problem.fused_settings,
    }
    found[str(d)] = {name: asdict(settings) for name, settings in chosen.items() if settings is not None}
    found[str(d)]["separate_norm"] = problem.separate_norm
    found[str(d)]["select"] = [problem.block, problem.select_warps]
    path.write_text(json.dumps(found, indent=1))


def sweep(
    path: str, widths: list[int], densities: list[float], ops: list[str], share: str | None, until: float
) -> None:
    if share:
        compile_share(widths, ops, share)
        return
    rows = Rows(path, echo=False)
    for d in widths:
        sets = sets_for(int(0.1 * 4 * d * d * 2 * 0.6), 17 * d * d, 10 * 2**30)
        problem = Problem(d, d // 16, sets)
        best_us: dict[str, float] = {}
        for op in ops:
            chosen: Any = None
            for density in densities if op in ("fc1", "fc2", "fused") else densities[:1]:
                results: list[tuple[float, str, Any]] = []
                problem.set_density(density)
                for settings in CANDIDATES[op](d):
                    if op == "fc2l" and settings[0] != problem.fc1_settings.programs:
                        continue
                    if time.time() > until:
                        return
                    try:
                        apply(problem, op, settings)
                        problem.fill()
                        size, step = problem.bytes()["down" if op == "norm" else op.rstrip("al")], stage(problem, op)
                        times = measure(partial(step, pdl=True), sets, repeats=9)
                        rows.add(BenchRow(op, "sweep", problem.n, d, density, 0.6, 1, d // 16, "fp16", *times, size,
                                          size / times[1] / 1e3, f"{label(settings)}, PDL chain"))  # fmt: skip
                        results.append((times[1], label(settings), settings))
                    except Exception as error:
                        print(op, d, label(settings), repr(error)[:200], flush=True)
                results.sort(key=lambda r: r[0])
                best = ", ".join(f"{t:.2f} [{name}]" for t, name, _ in results[:4])
                print(f"sweep {op} d {d} density {density}: {best}", flush=True)
                if results and density == densities[0]:
                    best_us[op], _, chosen = results[0]
            if chosen is not None:
                apply(problem, op, chosen)
        problem.separate_norm = best_us.get("norm", 1e9) < best_us.get("down", 0.0)
        write_best(Path(path).with_suffix(".json"), d, problem)
        problem.set_density(densities[0])
        for name, whole in (
            ("whole", problem.step_whole),
            ("fused", problem.step_fused),
            ("atomic", problem.step_atomic),
            ("mlp", problem.step_mlp),
            ("predict", problem.step_predict),
        ):
            times = measure(whole, sets)
            print(f"sweep {name} d {d} density {densities[0]} with the best: {times[1]:.2f}", flush=True)
        del problem
        torch.cuda.empty_cache()
