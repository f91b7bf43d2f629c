"""One of q, k and v where a model has one map for all three, and the layers that have it."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from dejavu_train.families.base import BlockParts
from dejavu_train.families.plain import RowLinear


class FusedPart(RowLinear):
    """The rows of q, k or v of a map whose rows are (heads, 3, head_dim). Nothing is copied until it is used.

    Args:
        fused: the linear map. index: which of q, k and v, from 0 on.
    """

    def __init__(self, fused: Any, index: int, n_heads: int) -> None:
        super().__init__()
        self.fused, self.index, self.n_heads = fused, index, n_heads
        self.in_features, self.out_features = fused.in_features, fused.out_features // 3

    def of(self, fused: Any) -> "FusedPart":
        """The same part of another map."""
        return FusedPart(fused, self.index, self.n_heads)

    def part_of(self, tensor: Tensor) -> Tensor:
        """(heads * 3 * head_dim, ...), a row for each of the map's -> (heads, head_dim, ...), a view."""
        return tensor.unflatten(0, (self.n_heads, 3, -1))[:, self.index]

    @property
    def rows(self) -> Tensor:
        """(h, head_dim, d), a view."""
        return self.part_of(self.fused.weight)

    @property
    def weight(self) -> Tensor:
        """(h * head_dim, d), a copy."""
        return self.rows.flatten(0, 1)

    @property
    def bias(self) -> Tensor | None:
        """(h * head_dim,), or None."""
        return None if self.fused.bias is None else self.part_of(self.fused.bias).flatten()

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) -> (..., h * head_dim)."""
        return F.linear(x, self.weight, self.bias)


def fused_parts(name: str, layer: Any, attention: Any, **own: Any) -> BlockParts:
    """The modules of a layer that are called as BLOOM's. own: the other parts of it."""
    q, k, v = (FusedPart(attention.query_key_value, i, attention.num_heads) for i in range(3))
    return BlockParts(
        name=name,
        whole=layer,
        attention=attention,
        norm_attn=layer.input_layernorm,
        q=q,
        k=k,
        v=v,
        out=attention.dense,
        norm_mlp=layer.post_attention_layernorm,
        up=layer.mlp.dense_h_to_4h,
        down=layer.mlp.dense_4h_to_h,
        n_heads=attention.num_heads,
        head_dim=attention.head_dim,
        **own,
    )
