"""Reckons what a step reads and how long it takes, here and on GPUs that are named.

A step takes the time of its bytes, at the share of the bandwidth that our engines reach, and a fixed time a layer. Both
were measured with OPT's shapes. Kernels for other shapes may not be there yet: this says what they would come to.
"""

from dataclasses import dataclass

import torch

from dejavu_train.extras.survey.decoder import DecoderParts
from dejavu_train.extras.survey.measure import Selection
from dejavu_train.families import Target

GPU_BYTES, CPU_BYTES = 2, 4
"""Bytes of a weight: fp16 on a GPU, 32 bits on a CPU."""
PREDICTOR_RANK, PREDICTOR_BYTES = 64, 0.5
"""Defaults of train.py: rank 64, 4 bits."""


@dataclass(frozen=True)
class Machine:
    """Where a step runs.

    Attributes:
        bandwidth: bytes a second of its memory. reached: the share that long steps of our engines read at.
        dense_layer, sparse_layer: fixed seconds of a layer, beyond its bytes.
        memory: bytes. 0: not limited here.
        weight: bytes of one weight.
        source: of the bandwidth.
    """

    name: str
    bandwidth: float
    reached: float
    dense_layer: float
    sparse_layer: float
    memory: float
    weight: int
    source: str

    def seconds(self, parts: DecoderParts, selection: Selection, nonzero: float) -> float:
        """Seconds of a step of batch 1. Raises nothing."""
        read = step_bytes(parts, selection, nonzero, self.weight)
        fixed = self.dense_layer if selection.target is None else self.sparse_layer
        return read / (self.bandwidth * self.reached) + fixed * parts.n_layers

    def holds(self, parts: DecoderParts) -> bool:
        """Whether the weights fit, with a tenth of the memory left for the cache."""
        return not self.memory or step_bytes(parts, Selection(), 1.0, self.weight) <= 0.9 * self.memory


# Of benchmarks/results/decode.csv on an H200 (fp16, one row, prompt 128): 4.5 TB/s of 4.8, and from 1.3B to 66B 16 to
# 22 us a layer dense, 18 to 40 us sparse with all heads. The means of 6.7B and 30B stand here.
REACHED, DENSE_LAYER, SPARSE_LAYER = 0.94, 17e-6, 22e-6
# Of benchmarks/results/cpu_decode.csv, 32 bits: 1.3B dense reads at 0.9 of the bandwidth, and opt-mini gives the rest.
CPU_REACHED, CPU_LAYER = 0.9, 50e-6


def _gpu(name: str, terabytes: float, gigabytes: float, source: str) -> Machine:
    return Machine(name, terabytes * 1e12, REACHED, DENSE_LAYER, SPARSE_LAYER, gigabytes * 1e9, GPU_BYTES, source)


GPUS = (
    _gpu("RTX 4090", 1.008, 24, "NVIDIA, Ada GPU architecture whitepaper"),
    _gpu("L40S", 0.864, 48, "NVIDIA, L40S data sheet"),
    _gpu("A100 80GB SXM", 2.039, 80, "NVIDIA, A100 data sheet"),
    _gpu("H100 SXM", 3.35, 80, "NVIDIA, H100 data sheet"),
    _gpu("H200", 4.8, 141, "NVIDIA, H200 data sheet"),
    _gpu("B200", 8.0, 180, "NVIDIA, DGX B200 data sheet"),
)


def step_bytes(parts: DecoderParts, selection: Selection, nonzero: float, weight: int) -> float:
    """Bytes of weights and predictors that one step reads.

    Args:
        nonzero: share of neurons that are not zero. Rows out of a neuron that is zero are not read, selected or not.
        weight: bytes of one weight.
    """
    attention, predictors = float(parts.attention_weights), 0.0
    layers = 0 if selection.target is None else len(parts.layers_of(selection.target))
    out = parts.d_ffn * parts.d_model * len(parts.layers_of(Target.MLP))
    kept = selection.kept(parts) if selection.target == Target.MLP else 1.0
    mlp = (parts.mlp_weights - out) * kept + out * min(kept, nonzero)
    if selection.target == Target.MLP:
        predictors = layers * PREDICTOR_RANK * (parts.d_model + parts.d_ffn) * PREDICTOR_BYTES
    elif selection.target == Target.HEADS:
        attention *= selection.kept(parts)
        predictors = layers * parts.groups * (parts.d_model + parts.groups) * PREDICTOR_BYTES
    return (mlp + attention + parts.head_weights + parts.other_weights) * weight + predictors


def this_machine(device: torch.device) -> Machine:
    """The machine at hand, whose bandwidth is measured in about a second."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        name = f"this machine, {found.name}"
        return Machine(
            name, _read_gpu(device), 1.0, DENSE_LAYER, SPARSE_LAYER, found.total_memory, GPU_BYTES, "measured"
        )
    from dejavu_train.engine.cpu.bandwidth import read_bandwidth, usable_cores

    cores = usable_cores()
    name = f"this machine, {cores} CPU core{'s' * (cores != 1)}"
    return Machine(name, read_bandwidth() * 1e9, CPU_REACHED, CPU_LAYER, CPU_LAYER, 0, CPU_BYTES, "measured")


def _read_gpu(device: torch.device) -> float:
    """Bytes a second of sums over a gigabyte, the best of several."""
    data = torch.ones(1 << 28, device=device, dtype=torch.float32)
    best = 0.0
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        data.sum()
        end.record()
        torch.cuda.synchronize(device)
        best = max(best, data.nbytes / (begin.elapsed_time(end) / 1e3))
    return best
