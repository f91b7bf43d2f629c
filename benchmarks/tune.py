"""Writes the file of launch settings for the present GPU: times candidates, keeps those that are faster.

    python -m benchmarks.tune --seconds 300               writes kernels/settings/h200.json on an H200
    python -m benchmarks.tune --stages screen sums --widths 4096 9216
    python -m benchmarks.tune --out FILE.json --log FILE.csv

The calls are those of `tests.compiled.layers`, by the public functions, on tensors of the GPU. Caches are emptied
before each. What settings a call looks up is recorded, and the fields of one stage are varied one after another. A
candidate takes the place of what is there where it is 2 % faster. Every time goes into the log at once, so that the
same command goes on where it was stopped, by --seconds or otherwise. A candidate that ended the process is not tried
again. The file is written when all of the asked stages and widths are measured. What there is no time for can be asked
for later.

A width that was measured stands for those up to halfway to its neighbours. Other shapes keep their settings. In the
end whole steps decide: run `benchmarks.decode` with the old and the new file.
"""

import argparse
import csv
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import KernelInterface

from benchmarks.rows import append_row, command_line, device_name, made_now, needs_gpu
from dejavu_train.ground.files import write_text
from dejavu_train.kernels.common import settings
from dejavu_train.kernels.common.settings import Lookup, SettingsFile, SettingsRow, Values
from dejavu_train.kernels.stages.predictor import Predictor, PredictorWeights
from tests.compiled import layers as compiled_layers

BETTER = 0.98  # of a time: what is less good is noise
DENSITY = 0.15  # of the MLP's rows, where some are selected
BROKEN = "broken"  # in place of a time: refused, or the process ended
# Stage, or stage and format -> field -> values, in the order in which they are varied. Other fields stay.
CHOICES: dict[str, dict[str, tuple[int, ...]]] = {
    "advance": {"warps": (4, 8, 16, 32), "parts": (32, 64, 128)},
    "attend": {"positions": (32, 64, 128), "warps": (1, 2, 4)},
    "down_batch": {"rows": (32, 64, 128), "stages": (3, 4, 5, 6), "stripe": (32, 64, 128)},
    "down_int4": {
        "programs": (2, 3, 4),
        "warps": (2, 4, 8),
        "ahead": (2, 3, 4),
        "registers": (128, 168, 248),
        "fetched": (0, 32),
    },
    "live_down": {"programs": (4, 8), "block": (512, 1024), "rows": (4, 8), "warps": (2, 4)},
    "listed": {"programs": (1, 2), "block": (512, 1024, 2048, 4096), "rows": (1, 2, 4), "warps": (4, 8, 16)},
    "listed_int4": {"programs": (1, 2), "warps": (4, 8), "ahead": (2, 3, 4), "registers": (128, 168, 200, 224)},
    "owned_int4": {"programs": (1, 2), "warps": (4, 8), "ahead": (2, 4), "registers": (128, 168, 200)},
    "predict": {"rows": (3, 5, 7), "block": (512, 1024, 2048), "warps": (4, 8)},
    "predict_rows": {"block": (64, 128), "stages": (3, 4), "warps": (4, 8)},
    "project": {"rows": (4, 8, 16, 32), "width": (256, 512, 1024), "warps": (2, 4, 8), "stages": (0, 3, 4)},
    "project_int4": {"warps": (4, 8), "span": (2, 4, 8), "tiles": (1, 2, 3, 4), "registers": (128, 168)},
    "qkv": {"rows": (16, 32), "pairs": (8, 16, 32), "stages": (3, 4, 6), "warps": (1, 2, 4), "wide": (8, 16, 32)},
    "qkv int4": {"stages": (2, 4, 8), "registers": (128, 168), "room": (0, 20480), "wide": (4, 8)},
    "rows": {"programs": (1, 2, 4, 8), "rows": (1, 2, 4), "warps": (4, 8), "width": (512, 1024, 2048)},
    "rows_int4": {"programs": (1, 2, 3, 4), "warps": (2, 4, 8), "ahead": (3, 5, 8), "fetched": (0, 144, 288)},
    "screen": {"programs": (1, 2, 3, 4), "rows": (2, 4, 8, 16), "warps": (2, 4, 8)},
    "select": {"warps": (2, 4, 8)},
    "slots": {
        "programs": (1, 2, 3),
        "rows": (64, 128),
        "block": (64, 128, 256),
        "stages": (3, 4, 5),
        "fetched": (0, 512, 1024),
    },
    "sums": {"stripe": (8, 16, 32, 64), "chunk": (16, 32, 64, 128), "warps": (1, 2, 4, 8)},
    "tokens_int4": {"programs": (2, 3, 4), "warps": (2, 4), "tiles": (1, 2, 3, 4), "ahead": (2, 3, 4, 5)},
    "up_batch": {"programs": (1, 2, 3), "block": (64, 128), "rows": (32, 64), "stages": (3, 4, 5, 6)},
    "wide": {"rows": (2, 4, 8, 16), "chunk": (512, 1024, 2048), "warps": (2, 4, 8)},
}
STAGES = sorted({name.split()[0] for name in CHOICES})
RANGES = ("d", "capacity", "tile", "waves")  # names of shapes that are in order: the first of them makes ranges
COLUMNS = ("gpu", "stage", "format", "shape", "values", "us", "torch", "commit", "date", "sources")
Timer = Callable[[Sequence[Callable[[], Any]]], float]
Measured = dict[Lookup, dict[str, float | None]]  # by values as JSON. None = broken


class FilledLayer(compiled_layers.Layer):
    """A layer whose matrices hold random numbers."""

    made: list["FilledLayer"] = []

    def __init__(self, d: int, matrix: Callable[..., Any]) -> None:
        super().__init__(d, matrix)
        FilledLayer.made.append(self)
        for weight in (self.qkv.weight, self.w):
            for part in weight.parts():
                _ = part.normal_(0, 0.02) if part.is_floating_point() else part.random_()
        self.x.normal_()

    def predictor(self, weights: PredictorWeights, alone: bool = False) -> Predictor:
        """With biases above the threshold for a part of the rows, because hidden values are zero."""
        assert weights.bias is not None
        weights.bias[:: round(1 / DENSITY)] = 2.0
        return super().predictor(weights, alone)

    def select(self) -> None:
        """All heads, and a part of the MLP's rows. Kernels that select write other lists."""
        self.heads.set_mask(torch.ones(1, self.h, dtype=torch.bool, device=self.x.device))
        chosen = torch.arange(int(self.n * DENSITY), device=self.x.device) * self.n // int(self.n * DENSITY)
        self.bits.set_mask(torch.zeros(1, self.n, dtype=torch.bool, device=chosen.device).index_fill(1, chosen, True))
        self.listed.ids[: len(chosen)] = chosen
        self.listed.count.fill_(len(chosen))


def select_all() -> None:
    for layer in FilledLayer.made:
        layer.select()


@contextmanager
def nothing_launched() -> Iterator[None]:
    """Within, kernels are prepared, and neither compiled nor launched."""
    kept = KernelInterface.__getitem__
    KernelInterface.__getitem__ = lambda *_: lambda *_, **__: None
    try:
        yield
    finally:
        KernelInterface.__getitem__ = kept


@contextmanager
def recorded_lookups() -> Iterator[list[Lookup]]:
    """What launches within ask for."""
    found: list[Lookup] = []
    kept = settings.values_for

    def recorded(asked: Lookup, device: torch.device) -> Values:
        found.append(asked)
        return kept(asked, device)

    settings.values_for = recorded  # type: ignore[assignment]
    try:
        yield found
    finally:
        settings.values_for = kept


def problems(widths: Sequence[int], device: torch.device) -> Iterator[dict[Lookup, list[Callable[[], Any]]]]:
    """For a width and a format at a time: the calls that look up the same settings, by what they look up."""
    of_a_width = (compiled_layers.cases_of, compiled_layers.further_cases, compiled_layers.int4_cases)
    for d, cases in itertools.product(widths, of_a_width):
        found: dict[Lookup, list[Callable[[], Any]]] = {}
        FilledLayer.made.clear()
        plain, compiled_layers.Layer = compiled_layers.Layer, FilledLayer  # type: ignore[misc]
        try:
            with compiled_layers.Placed(device):
                calls = [call for _, call in cases(d)]
        finally:
            compiled_layers.Layer = plain  # type: ignore[misc]
        for call in calls:
            with recorded_lookups() as lookups, nothing_launched():
                call()
            for lookup in dict.fromkeys(lookups):
                found.setdefault(lookup, []).append(call)
        yield found


def gpu_time(calls: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of the calls one after another, in a graph, each behind a write that takes the whole L2."""
    lines = torch.empty(2 * torch.cuda.get_device_properties().L2_cache_size, dtype=torch.uint8, device="cuda")
    for call in calls:  # compiles, outside the capture
        call()
    torch.cuda.synchronize()
    times = []
    for steps in (calls, [lambda: None] * len(calls)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in steps:
                lines.zero_()
                step()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(32)]
        for event in events:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        spans = sorted(one.elapsed_time(two) for one, two in itertools.pairwise(events[8:]))
        times.append(1000 * spans[len(spans) // 4])
    return times[0] - times[1]


class Log:
    """Times by what was looked up and values, in a CSV that grows. Rows of other GPUs and sources are left alone."""

    def __init__(self, path: Path, gpu: str) -> None:
        self.path, self.made = path, made_now("dejavu_train.engine.ops")
        self.shared = {"gpu": gpu, "torch": torch.__version__, **self.made}
        self.times: Measured = {}
        rows = list(csv.DictReader(path.read_text("utf-8").splitlines())) if path.is_file() else []
        for row in rows:
            if row["gpu"] == gpu and row["sources"] == self.made["sources"]:
                shape = tuple((name, value) for name, value in json.loads(row["shape"]).items())
                found = self.times.setdefault(Lookup(row["stage"], row["format"], shape), {})
                found[row["values"]] = None if row["us"] == BROKEN else float(row["us"])

    def add(self, lookup: Lookup, values: str, us: float | None) -> None:
        row = {"stage": lookup.stage, "format": lookup.format, "shape": json.dumps(dict(lookup.shape))}
        row |= {"values": values, "us": BROKEN if us is None else f"{us:.3f}"}
        append_row(self.path, self.shared | row, COLUMNS)
        self.times.setdefault(lookup, {})[values] = us


@dataclasses.dataclass
class Tuner:
    """base: the file that is there. until: of `clock`, when no further candidate begins."""

    base: SettingsFile
    log: Log
    time: Timer
    until: float = math.inf
    clock: Callable[[], float] = monotonic

    def measured(self, lookup: Lookup, values: Values, calls: Sequence[Callable[[], Any]]) -> float | None:
        """Microseconds, from the log where it has them. None where the values cannot be launched."""
        key = json.dumps(dict(sorted(values.items())))
        times = self.log.times.get(lookup, {})
        if key not in times:
            if self.clock() >= self.until:
                raise TimeoutError
            self.log.add(lookup, key, None)  # as the log stays if this candidate ends the process
            select_all()
            with settings.tried(lookup.stage, values):
                us = self._timed(calls)
            if us is not None:
                self.log.add(lookup, key, us)
            return us
        return times[key]

    def _timed(self, calls: Sequence[Callable[[], Any]]) -> float | None:
        try:
            return self.time(calls)
        except (ValueError, OutOfResources, CompilationError):  # refused by a kernel, the GPU or the compiler
            return None

    def best(self, lookup: Lookup, calls: Sequence[Callable[[], Any]]) -> Values:
        """The values to keep, one field varied after another. Raises TimeoutError where the time is over."""
        best = self.base.values(lookup.stage, lookup.format, dict(lookup.shape))
        us = self.measured(lookup, best, calls)
        varied = CHOICES.get(f"{lookup.stage} {lookup.format}") or CHOICES[lookup.stage]
        for field, choices in varied.items():
            for choice in choices:
                values = {**best, field: choice}
                found = self.measured(lookup, values, calls)
                if found is not None and (us is None or found < BETTER * us):
                    best, us = values, found
        return best


def ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Of each of these ascending numbers, both ends: halfway to its neighbours, the last ones a quarter further."""
    ends = [numbers[0] - numbers[0] // 4 - 1]
    ends += [(one + two) // 2 for one, two in itertools.pairwise(numbers)] + [numbers[-1] + numbers[-1] // 4]
    return [[low + 1, high] for low, high in itertools.pairwise(ends)]


def tuned_rows(rows: Sequence[SettingsRow], best: Mapping[tuple[tuple[str, Any], ...], Values]) -> list[SettingsRow]:
    """Rows of one stage and format, behind those for shapes whose best values are others. best: by shapes."""
    groups: dict[tuple[Any, ...], dict[int, Values]] = {}
    for shape, values in best.items():
        ranged = next((name for name in RANGES if name in dict(shape)), "")
        rest = tuple(pair for pair in shape if pair[0] != ranged)
        groups.setdefault((ranged, rest), {})[dict(shape).get(ranged, 0)] = values
    new: list[SettingsRow] = []
    for (ranged, rest), found in groups.items():
        for (number, values), reach in zip(sorted(found.items()), ranges(sorted(found)), strict=True):
            shape = {**dict(rest), ranged: number}
            if next(row.values for row in rows if row.meets(shape)) == values:
                continue
            conditions = {ranged: reach, **dict(rest)} if ranged else dict(rest)
            before = new[-1] if new else SettingsRow({}, {})
            old = before.conditions.get(ranged)
            if before.values == values and {**conditions, ranged: old} == before.conditions and old[1] == reach[0] - 1:
                new[-1] = SettingsRow({**conditions, ranged: [old[0], reach[1]]}, values)
            else:
                new.append(SettingsRow(conditions, values))
    return new + list(rows)


def text_of(file: SettingsFile) -> str:
    """A file's text, a row a line."""
    lines = ["{", f' "gpus": {json.dumps(list(file.gpus))},', f' "multiprocessors": {file.multiprocessors},']
    stages = []
    for stage, formats in sorted(file.stages.items()):
        parts = []
        for name, rows in formats.items():
            texts = (json.dumps({"for": dict(row.conditions), "use": dict(row.values)}) for row in rows)
            parts.append(f'   "{name}": [\n' + ",\n".join(f"    {text}" for text in texts) + "\n   ]")
        stages.append(f'  "{stage}": {{\n' + ",\n".join(parts) + "\n  }")
    return "\n".join([*lines, ' "stages": {', ",\n".join(stages), " }", "}"]) + "\n"


def gpu_word(gpu: str) -> str:
    """The word of a GPU's name by which its file is found: the first one with a digit."""
    return next(word for word in settings.words_of(gpu) if any(letter.isdigit() for letter in word))


def tune(tuner: Tuner, found: Iterator[dict[Lookup, list[Callable[[], Any]]]], stages: Sequence[str]) -> SettingsFile:
    """The base file with what is faster. Raises TimeoutError where the time is over before."""
    best: dict[tuple[str, str], dict[tuple[tuple[str, Any], ...], Values]] = {}
    for group in found:
        for lookup, calls in group.items():
            if lookup.stage in stages:
                best.setdefault((lookup.stage, lookup.format), {})[lookup.shape] = tuner.best(lookup, calls)
    made = {stage: dict(formats) for stage, formats in tuner.base.stages.items()}
    for (stage, format), shapes in best.items():
        made[stage][format] = tuned_rows(tuner.base.rows(stage, format), shapes)
    return dataclasses.replace(tuner.base, stages=made)


def run(args: argparse.Namespace, gpu: str, multiprocessors: int, device: torch.device, timer: Timer) -> int:
    """0 where the file is written, 1 where the time was over before. multiprocessors: of the GPU of this name."""
    base = settings.file_for(gpu)
    tuner = Tuner(base, Log(args.log, gpu), timer, monotonic() + args.seconds)
    try:
        made = tune(tuner, problems(args.widths, device), args.stages)
    except TimeoutError:
        print(f"the time is over, and nothing is written: the same command goes on from {args.log}")
        return 1
    made = dataclasses.replace(made, gpus=base.gpus or (gpu_word(gpu),), multiprocessors=multiprocessors)
    out = args.out or settings.FOLDER / f"{gpu_word(gpu).lower()}.json"
    write_text(out, text_of(made))
    print(f"{out}: {sum(len(times) for times in tuner.log.times.values())} times are in {args.log}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no further candidate begins after so long")
    parser.add_argument("--widths", type=int, nargs="+", default=compiled_layers.WIDTHS, metavar="D")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--out", type=Path, help="of the GPU's name in kernels/settings by default")
    parser.add_argument("--log", type=Path, default=Path("build/tune.csv"))
    args = parser.parse_args(argv)
    needs_gpu(parser)
    device = torch.device("cuda")
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return run(args, device_name(device), multiprocessors, device, gpu_time)


if __name__ == "__main__":
    raise SystemExit(main())
