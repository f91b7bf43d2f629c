"""Rounds groups of weights to 4 bits: the scale of least squared error, of either sign. The yardstick for GPTQ.

Codes run from -8 to 7. A scale of the sign that puts -8 on the larger extreme reaches one step further there than on
the other side. A smaller one clips what lies beyond and rounds the rest more finely. Both signs and some ranges are
tried. An LM head may have 8 bits, where the largest weight's own scale is near enough.
"""

import functools

import torch
from torch import Tensor

# What 8 steps reach over the group's largest weight: at 8/7 no code is clipped on either side, at 1 on one side.
RANGES = (8 / 7, *(1.09 - 0.03 * step for step in range(19)))
QUICK_RANGES = (1.0, 0.91, 0.82)  # for whoever waits
TINY = 2.0**-24  # the least number above zero that fp16 has
WEIGHTS_AT_ONCE = 1 << 17  # with all that is tried they stay in a processor's cache


@functools.cache
def _factors(device: torch.device, ranges: tuple[float, ...]) -> Tensor:
    """On the device once: a copy for each of many columns would have the host wait for it."""
    factors = [sign * share / 8 for share in ranges for sign in (1, -1)]
    return torch.tensor(factors, device=device, dtype=torch.float32)


def best_scales(groups: Tensor, ranges: tuple[float, ...] = RANGES) -> Tensor:
    """Scales (..., 1) fp32 of groups (..., g) that err least of those tried. An fp16 number, never zero."""
    peak = groups.abs().amax(dim=-1, keepdim=True)
    tried = peak * _factors(groups.device, ranges)  # (..., tried)
    tried = tried.half().float()
    tried = torch.where(tried == 0, TINY, tried)[..., None]  # (..., tried, 1)
    wide = groups[..., None, :]
    error = round_to(wide, tried).mul_(tried).sub_(wide).square_()
    best = error.sum(dim=-1, keepdim=True).argmin(dim=-2, keepdim=True)
    return tried.gather(-2, best)[..., 0]


def round_to(weights: Tensor, scales: Tensor) -> Tensor:
    """The nearest codes in -8..7, as fp32."""
    return (weights / scales).round_().clamp_(-8, 7)


def group_scales(rows: Tensor, group: int, ranges: tuple[float, ...] = RANGES) -> Tensor:
    """rows (n, d) fp32 -> the best scales (n, d / group) fp32."""
    parts = rows.split(max(1, WEIGHTS_AT_ONCE // rows.shape[1]))
    return torch.cat([best_scales(part.unflatten(1, (-1, group)), ranges)[..., 0] for part in parts])


def round_nearest(rows: Tensor, group: int, ranges: tuple[float, ...] = RANGES) -> tuple[Tensor, Tensor]:
    """rows (n, d) fp32 -> codes (n, d) int8 and scales (n, d / group) fp16, every group for itself."""
    scales = group_scales(rows, group, ranges)
    codes = round_to(rows.unflatten(1, (-1, group)), scales[..., None])
    return codes.flatten(1).to(torch.int8), scales.half()


def round_nearest_8(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """rows (n, d) fp32 -> codes (n, d) int8 in -127..127 and scales (n, d / group) fp16. The largest weight is 127."""
    groups = rows.unflatten(1, (-1, group))
    scales = (groups.abs().amax(-1) / 127).half().clamp_min(TINY)
    codes = (groups / scales.float()[..., None]).round_().clamp_(-127, 127)
    return codes.flatten(1).to(torch.int8), scales
