"""Timing of kernels on a GPU: CUDA-graph replay, weights rotated past the L2, medians with p20 and p80; rows of a CSV.

One graph runs the step on every set of weights in turn; the sets together exceed the L2 several times, so each step
finds its weights in memory, as in a model of many layers. A row carries the conditions under which it was measured.
"""

import csv
import dataclasses
import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from benchmarks.rows import append_row, commit

L2_BYTES = 60 * 2**20


@dataclass
class BenchRow:
    """One measurement. Times in microseconds; bytes are what the algorithm must read, gb_s = bytes / p50."""

    op: str
    provider: str
    n: int
    d: int
    density: float
    live: float
    batch: int
    rank: int
    dtype: str
    p20_us: float
    p50_us: float
    p80_us: float
    bytes: int
    gb_s: float
    conditions: str
    gpu: str = ""
    torch: str = ""
    triton: str = ""
    commit: str = ""
    date: str = ""


class Rows:
    """Appends rows to a CSV as they come, so that an interrupted run leaves what it measured."""

    def __init__(self, path: str | Path, echo: bool = True) -> None:
        self.path, self.echo, self.commit = Path(path), echo, commit()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: list[BenchRow] = []

    def add(self, row: BenchRow) -> BenchRow:
        row.gpu, row.torch, row.triton = torch.cuda.get_device_name(), torch.__version__, triton.__version__
        row.commit, row.date = self.commit, datetime.date.today().isoformat()
        append_row(self.path, dataclasses.asdict(row), [field.name for field in dataclasses.fields(BenchRow)])
        self.rows.append(row)
        if self.echo:
            shape = f"{row.n}x{row.d} density {row.density:<5} live {row.live:<4} rank {row.rank:<4}"
            speed = f"{row.p50_us:8.2f} us {row.gb_s:7.0f} GB/s"
            print(f"{row.op:8} {row.provider:17} {shape} {speed}  {row.conditions}", flush=True)
        return row


def read_rows(path: str | Path) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def sets_for(bytes_a_step: int, bytes_a_set: int, memory: int = 12 * 2**30) -> int:
    """How many sets of weights one rotation needs: together they are read past the L2 four times over."""
    return max(3, min(-(-4 * L2_BYTES // max(1, bytes_a_step)), memory // max(1, bytes_a_set), 64))


def measure(
    step: Callable[[int], None],
    sets: int,
    repeats: int = 25,
    before: Callable[[], None] = lambda: None,
    rounds: int = 1,
) -> tuple[float, float, float]:
    """Microseconds (p20, p50, p80) of step(i), i over the sets, captured in one graph, replayed `repeats` times.

    before: called, untimed, ahead of every replay, to put back state that the step advances.
    rounds: times that the graph goes through the sets. Its start-up takes 7-11 us, which the steps in it share.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles what is not compiled yet, outside the capture
        for i in range(sets):
            step(i)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for i in range(sets):
                step(i)
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        before()
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(stop) * 1000 / (sets * rounds) for start, stop in events)
    del graph

    def at(q: float) -> float:
        return times[min(len(times) - 1, int(q * len(times)))]

    return at(0.2), at(0.5), at(0.8)


def step_times(run: Callable[[], None], n: int, warm: int = 4) -> list[float]:
    """Milliseconds between the ends of consecutive calls, n of them, without a synchronisation in between."""
    for _ in range(warm):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]
