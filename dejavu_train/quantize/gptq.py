"""Rounds a matrix so that its outputs on calibration text change least: GPTQ (Frantar et al., ICLR 2023, arXiv
2210.17323).

Columns of W (n outputs, m inputs), each the weights of one input, are rounded one after the other. What rounding a
column changes in the outputs is undone by the columns that are still to come, as far as inputs correlate. Over inputs X
(tokens, m), H = X' X and H^-1 = U' U, with U upper triangular. Rounding column i by the error r moves the columns j > i
by -r U[i, j] / U[i, i]. This is the paper's step 3, for all rows at once, which share one H here. One Cholesky
factorisation J H J = L L' gives U = J L^-1 J, where J reverses the order.

Two grids, by how groups of g lie on a matrix:

- ``InputGroups``: a row's scale for g inputs that follow one another. It is chosen on reaching them.
- ``OutputGroups``: a column's scale for g outputs, chosen on reaching the column. The map out of the neurons has them.

Columns of inputs that were always zero keep the nearest codes, because other texts may use them.
"""

from typing import Protocol

import torch
from torch import Tensor

from dejavu_train.ground.errors import UserError
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.rounding import best_scales, group_scales, round_to

BLOCK = 128  # columns whose updates of those behind them are applied at once


class Grid(Protocol):
    """Gives the scales of columns as they are reached.

    Attributes:
        block: columns that are reached together.
        scales: as they are stored. Read when all columns have been reached.
    """

    block: int
    scales: Tensor

    def enter(self, columns: Tensor, start: int) -> None:
        """The columns from ``start`` on are reached next, (n, block) as they are now."""

    def at(self, column: Tensor, index: int) -> Tensor:
        """The scales (n,) or (1,) fp32 of the column (n,) with this number."""


class InputGroups:
    """scales (n, m / g), each chosen when its first input is reached."""

    def __init__(self, n: int, m: int, group: int, device: torch.device | str = "cpu") -> None:
        self.block, self.scales = group, torch.empty(n, m // group, device=device, dtype=torch.float32)

    def enter(self, columns: Tensor, start: int) -> None:
        self.scales[:, start // self.block] = group_scales(columns, self.block)[:, 0]

    def at(self, column: Tensor, index: int) -> Tensor:
        return self.scales[:, index // self.block]


class OutputGroups:
    """scales (m, n / g), of the columns in the order in which they are reached."""

    def __init__(self, n: int, m: int, group: int, device: torch.device | str = "cpu") -> None:
        self.block, self.group, self.scales = (
            BLOCK,
            group,
            torch.empty(m, n // group, device=device, dtype=torch.float32),
        )

    def enter(self, columns: Tensor, start: int) -> None:
        pass

    def at(self, column: Tensor, index: int) -> Tensor:
        self.scales[index] = best_scales(column.view(-1, self.group))[:, 0]
        return self.scales[index].repeat_interleave(self.group)


def quantise_columns(weight: Tensor, hessian: Tensor, grid: Grid, config: QuantizeConfig) -> Tensor:
    """Codes (n, m) int8 of weight (n, m) fp32, columns in the order in which they stand. ``grid`` gets their scales.

    Args:
        weight: changed in place, to what the columns were when they were reached.
        hessian: (m, m) fp32, X' X over the calibration tokens, or a multiple. Used up.
        config: its ``damp_mean``.
    Raises:
        UserError: the damped matrix cannot be factorised.
    """
    n, m = weight.shape
    factor = inverse_factor(hessian, config)
    codes = torch.empty(n, m, dtype=torch.int8, device=weight.device)
    for start in range(0, m, grid.block):
        stop = min(start + grid.block, m)
        columns, own = weight[:, start:stop], factor[start:stop, start:stop]
        grid.enter(columns.contiguous(), start)
        errors = torch.empty_like(columns)
        for i in range(stop - start):
            scales = grid.at(columns[:, i], start + i)
            rounded = round_to(columns[:, i], scales)
            codes[:, start + i] = rounded
            errors[:, i] = (columns[:, i] - rounded * scales) / own[i, i]
            columns[:, i + 1 :] -= errors[:, i, None] * own[i, i + 1 :]
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    return codes


def inverse_factor(hessian: Tensor, config: QuantizeConfig) -> Tensor:
    """U (m, m), upper triangular, of H^-1 = U' U. Inputs that never were anything but zero have 1 on its diagonal.

    ``hessian`` is damped in place. Two more matrices of its size exist on the way.
    """
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    mean = diagonal[~dead].mean() if bool((~dead).any()) else torch.ones((), device=hessian.device, dtype=torch.float32)
    diagonal += config.damp_mean * mean
    diagonal[dead] = 1.0
    lower, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
    if int(failed):
        raise UserError("the second moments of the calibration text cannot be factorised; raise --damp_mean")
    identity = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    return torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)
