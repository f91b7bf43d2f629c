"""Random MLPs whose active neurons are those of trained ReLU models, and predictors that find them.

Which neurons are active depends on the token. A neuron's frequency is drawn from a beta distribution whose mean is the
asked share. Its spread is such that two tokens share `OVERLAP` of what is active. Then unions of 2, 4 and 8 rows grow
as those of OPT-6.7B do in Polar Sparsity. Those begin at a tenth of the neurons (`decode_problem.UNION`).

The map into the neurons is a product of two low-rank matrices and `NOISE` of something else. A predictor has these two
matrices and the biases. So it sees the hidden state alone, and misses about a hundredth of the active neurons where it
selects 1.7 times as many.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dejavu_train.engine.weights import LayerWeights
from dejavu_train.families import ModelDims
from dejavu_train.kernels.formats.int4 import Int4Rows
from dejavu_train.kernels.formats.matrix import Matrix, Rows

OVERLAP = 0.47  # of two tokens: two rows of 10 % select 15.3 % together
NOISE = 0.35  # share of the deviation of a neuron's input that no predictor sees
LEAST = 1e-4  # frequency


def frequencies(n: int, share: float, device: str, generator: torch.Generator | None = None) -> Tensor:
    """(n,) fp32: how often each neuron is active, ``share`` in the mean."""
    if share >= OVERLAP:
        return torch.full((n,), share, device=device)
    spread = (1 - OVERLAP) / (OVERLAP - share)
    shapes = torch.tensor([share * spread, (1 - share) * spread], device=device)
    drawn = torch._standard_gamma(shapes.expand(n, 2), generator=generator)
    return drawn[:, 0] / drawn.sum(1).clamp_min(1e-30)


@dataclass(frozen=True)
class ActiveSets:
    """Active neurons in each layer of a shape, the same whenever they are asked for.

    share: of the neurons, of one token. rank: of the map into the neurons, but for the noise. std: of its numbers.
    """

    dims: ModelDims
    share: float
    rank: int
    std: float
    device: str

    def _generator(self, layer: int, part: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(1000 * layer + part)

    def biases(self, layer: int) -> Tensor:
        """(d_ffn,) fp32: a norm's output has norm sqrt(d), so inputs are normal with deviation std sqrt(d)."""
        frequency = frequencies(self.dims.d_ffn, self.share, self.device, self._generator(layer, 0))
        bounded = frequency.clamp(LEAST, 1 - LEAST)
        return torch.special.ndtri(bounded.double()).float() * self.std * math.sqrt(self.dims.d_model)

    def pair(self, layer: int) -> tuple[Tensor, Tensor]:
        """(rank, d) and (d_ffn, rank) fp32, whose product is what a predictor can know of the map."""
        generator, size = self._generator(layer, 1), math.sqrt(1 - NOISE**2) * self.std / math.sqrt(self.rank)
        down = torch.empty(self.rank, self.dims.d_model, device=self.device).normal_(0, 1, generator=generator)
        return down, torch.empty(self.dims.d_ffn, self.rank, device=self.device).normal_(0, size, generator=generator)

    def put(self, number: int, layer: LayerWeights) -> None:
        """Write the map into the neurons, the gate's behind a gate, and its biases, in place."""
        down, up = self.pair(number)
        noise = torch.empty(self.dims.d_ffn, self.dims.d_model, device=self.device)
        noise.normal_(0, NOISE * self.std, generator=self._generator(number, 2))
        first = layer.gate or layer.up
        write_rows(first.weight, torch.addmm(noise, up, down))
        first.bias.copy_(self.biases(number) + layer.hidden.threshold)


def write_rows(matrix: Matrix, numbers: Tensor) -> None:
    """numbers (n, d) as rows of a matrix, in place. Of 4 bits to the nearest code of each group."""
    if isinstance(matrix, Rows):
        matrix.numbers.copy_(numbers)
        return
    n, d = numbers.shape
    groups = numbers.view(n, -1, matrix.group)
    scales = (groups.abs().amax(2) / 7).clamp_min(1e-6).half()
    codes = (groups / scales.float()[..., None]).round_().clamp_(-8, 7).to(torch.int8).view(n, d)
    coded = Int4Rows.of(codes, scales)
    matrix.words.copy_(coded.words)
    matrix.scales.copy_(coded.scales)


def union_of(share: float, rows: int) -> float:
    """The share of the neurons that independent rows keep live together, each this share, by the beta distribution."""
    if share >= OVERLAP:
        return 1 - (1 - share) ** rows
    spread, silent = (1 - OVERLAP) / (OVERLAP - share), 1.0
    for drawn in range(rows):
        silent *= ((1 - share) * spread + drawn) / (spread + drawn)
    return 1 - silent


def overlap_of(active: Tensor) -> float:
    """The share of a token's active neurons that another token has, of active (T, n) bool, neighbours compared."""
    both, own = (active[1:] & active[:-1]).sum(), active[:-1].sum()
    return float(both / own.clamp_min(1))
