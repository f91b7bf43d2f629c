"""Where a decoding step's time goes: by how much each kernel ends later than all before it, in replays of the step.

Kernels of a step overlap (programmatic dependent launch). So neither a kernel's own duration nor a graph of it alone
says what it costs. In such graphs kernels take longer, and other launch settings win. The profiler takes times of start
and end from the device. A profiled step takes as long as any.
"""

from collections.abc import Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dejavu_train.engine.decode import DecodeEngine

Event = tuple[float, float, str]  # start and end in microseconds, kernel
FIRST, LAST = "embed", "advance"  # kernels of a step


def stages(events: Sequence[Event], n_layers: int) -> dict[str, float]:
    """Microseconds that each kernel adds: a layer where a step has as many as layers, else a step.

    events: in order of their starts, of any number of whole steps. The LM head is called lm_head, whatever its kernel.
    """
    added: dict[str, list[float]] = {}
    ended = 0.0
    for place, (start, end, name) in enumerate(events):
        following = events[place + 1][2] if place + 1 < len(events) else ""
        label = "lm_head" if following == LAST else name
        since = start if name == FIRST else ended  # what lies between two steps is the host's
        added.setdefault(label, []).append(end - since)
        ended = max(ended, end)
    n_steps = len(added[LAST])
    return {name: sum(times) / (n_steps * (n_layers if len(times) > n_steps else 1)) for name, times in added.items()}


def breakdown(engine: DecodeEngine, n: int = 4) -> dict[str, float]:
    """`stages` of n steps of the engine."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(n):
            engine.step()
        torch.cuda.synchronize()
    events = []
    for event in profiler.events() or []:
        name = event.name
        if event.device_type != DeviceType.CUDA or name.startswith(("Memcpy", "Memset")):
            continue
        ours = name.endswith("_kernel") and name.isidentifier()
        label = name.strip("_").removesuffix("_kernel") if ours else "library"
        events.append((event.time_range.start, event.time_range.end, label))
    return stages(sorted(events), engine.shape.n_layers)
