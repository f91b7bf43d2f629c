"""Lets a Hugging Face OPT and the decode engine use one copy of the weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dejavu_train.families.plain import RowLinear


class GroupedProjection(RowLinear):
    """A q, k or v projection with its rows grouped by head in the engine's tensor. Used as the `nn.Linear` it replaces.

    The engine reads one contiguous range a head of K and V, (g, r + 2, head_dim, d). This module holds a view of a part
    of it. `weight` is gathered anew at each use, a transient copy of (d, d), so a forward pass through it is right but
    not fast. An edit of that copy would be lost, so PyTorch refuses it, but for one through `.data`. Edit `rows`, or
    load a state dict, which holds `weight` and `bias` as that of `nn.Linear`.

    Args:
        rows: (..., head_dim, d), usually a view.
        bias: (h * head_dim,), or None.
        order: (head_dim,), which of a head's rows each of them is, or None: as they stand.
    """

    def __init__(self, rows: Tensor, bias: nn.Parameter | None, order: Tensor | None = None) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows, requires_grad=False)
        self.bias = bias
        self.out_features, self.in_features = rows.shape[:-1].numel(), rows.shape[-1]
        self._places = None if order is None else order.argsort()
        self._order = order

    @property
    def weight(self) -> Tensor:
        """(h * head_dim, d), a copy that cannot be edited in place."""
        with torch.inference_mode():
            return self._copy()

    def _copy(self) -> Tensor:
        rows = self.rows if self._places is None else self.rows[..., self._places, :]
        return rows.flatten(0, -2)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) -> (..., h * head_dim)."""
        return F.linear(x, self._copy(), self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in (("weight", self._copy()), ("bias", self.bias)):
            if tensor is not None:
                destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """The state dict of the ``nn.Linear`` that this stands for: ``weight`` goes into the rows, where they lie."""
        given = state_dict.pop(prefix + "weight", None)
        if given is not None:
            fits = given.numel() == self.rows.numel()
            rows = given.view_as(self.rows) if fits else given
            state_dict[prefix + "rows"] = rows[..., self._order, :] if fits and self._order is not None else rows
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, grouped by head"
