"""Decoding on a CPU: compiled with numba, no compiler on the user's machine."""

from dejavu_train.engine.cpu.engine import CpuEngine
from dejavu_train.engine.cpu.weights import CpuWeights
from dejavu_train.engine.inputs import Sampling

__all__ = ["CpuEngine", "CpuWeights", "Sampling"]
