"""How large the 4-bit rows of a layer's matrices are, without torch; ``int4.py`` says what they hold."""

from collections.abc import Mapping
from dataclasses import dataclass

from dejavu_train.errors import UserError
from dejavu_train.models.shape import OPTShape

COLUMNS_PER_WORD = 8
GROUPS = (128, 64, 32)
MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "fc1", "fc2")
"""The matrices of a layer by their names in its state dict, in the order in which they read one another."""


@dataclass(frozen=True)
class RowSizes:
    """Rows, their columns, and how many columns share a scale."""

    rows: int
    columns: int
    group: int

    @property
    def nbytes(self) -> int:
        """Of words and scales."""
        return self.rows * (self.columns // 2 + 2 * (self.columns // self.group))

    @property
    def stored(self) -> Mapping[str, tuple[int, int]]:
        """The shapes of what a checkpoint holds, by the last part of the names.

        ``weight`` holds the words: transformers without this package then finds a weight of the wrong shape and refuses
        to load, where it would fill an absent one with random numbers.
        """
        return {
            "weight": (self.rows, self.columns // COLUMNS_PER_WORD),
            "scales": (self.rows, self.columns // self.group),
        }


def row_sizes(shape: OPTShape, name: str = "this model") -> dict[str, RowSizes]:
    """Of a layer's six matrices, by the names of ``MATRICES``.

    Raises:
        UserError: a width that has no 4-bit form, by name.
    """
    d, n, h, e = shape.d_model, shape.d_ffn, shape.n_heads, shape.head_dim
    group = next((group for group in GROUPS if d % group == 0), None)
    if group is None:
        raise UserError(
            f"the hidden_size of {name} is {d}, which neither 128, 64 nor 32 divides: its rows have no 4-bit form"
        )
    if e % COLUMNS_PER_WORD:
        raise UserError(
            f"the heads of {name} are {e} wide: 4-bit rows of the out-projection need a multiple of {COLUMNS_PER_WORD}"
        )
    square, neurons = RowSizes(d, d, group), RowSizes(n, d, group)
    return dict(zip(MATRICES, (square, square, square, RowSizes(h * d, e, e), neurons, neurons), strict=True))
