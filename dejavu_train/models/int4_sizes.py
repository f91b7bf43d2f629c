"""How large the rows of codes of a model's matrices are, without torch. ``int4.py`` says what they hold."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dejavu_train.families import ModelDims
from dejavu_train.families.base import family_named
from dejavu_train.ground.errors import UserError
from dejavu_train.models.config_values import INT4, quant_method

COLUMNS_PER_WORD = 8
GROUPS = (128, 64, 32)
HEAD_BITS = {"fp16": None, "int8": 8, "int4": 4}
"""Bits of an LM head's codes by what ``--lm_head`` calls it; fp16 is stored as it was found."""


@dataclass(frozen=True)
class RowSizes:
    """Rows, their columns, how many columns share a scale, and the bits of a code: 4, or 8 of an LM head."""

    rows: int
    columns: int
    group: int
    bits: int = 4

    @property
    def nbytes(self) -> int:
        """Bytes of words and scales."""
        return self.rows * (self.columns * self.bits // 8 + 2 * (self.columns // self.group))

    @property
    def stored(self) -> Mapping[str, tuple[int, int]]:
        """The shapes of what a checkpoint holds, by the last part of the names.

        ``weight`` holds the words. Transformers without this package then finds a weight of the wrong shape, and
        refuses to load it. An absent weight it would fill with random numbers.
        """
        return {
            "weight": (self.rows, self.columns // COLUMNS_PER_WORD if self.bits == 4 else self.columns),
            "scales": (self.rows, self.columns // self.group),
        }


def part_sizes(shape: ModelDims, name: str = "this model") -> dict[str, RowSizes]:
    """Sizes of a layer's matrices, by the names of ``BlockParts``.

    Raises:
        UserError: a width that has no 4-bit form, by name.
    """
    d, n, h, g, e = shape.d_model, shape.d_ffn, shape.n_heads, shape.n_kv_heads, shape.head_dim
    group = _group(d, name)
    if e % COLUMNS_PER_WORD:
        raise UserError(
            f"the heads of {name} are {e} wide: 4-bit rows of the output projection need a multiple of"
            f" {COLUMNS_PER_WORD}; give weights of float16"
        )
    query, key, neurons = RowSizes(h * e, d, group), RowSizes(g * e, d, group), RowSizes(n, d, group)
    made = {"q": query, "k": key, "v": key, "out": RowSizes(h * d, e, e), "up": neurons, "down": neurons}
    return made | {"gate": neurons} if shape.gated else made


def row_sizes(kind: str, shape: ModelDims, name: str = "this model") -> dict[str, RowSizes]:
    """Sizes of a layer's matrices, by their names in the layer. One map of q, k and v has the rows of all three.

    Args:
        kind: the ``model_type``.
    Raises:
        UserError: as :func:`part_sizes`.
    """
    sizes = part_sizes(shape, name)
    made: dict[str, RowSizes] = {}
    for part, module in family_named(kind, name).matrices.items():
        before = made[module].rows if module in made else 0
        made[module] = replace(sizes[part], rows=before + sizes[part].rows)
    return made


def head_sizes(shape: ModelDims, kind: str, name: str = "this model") -> RowSizes | None:
    """Sizes of the LM head as ``kind`` of ``HEAD_BITS``. None: it is stored as numbers.

    Raises:
        UserError: a width that has no such form, or another kind, by name.
    """
    if kind not in HEAD_BITS:
        raise UserError(f"the LM head of {name} is in {kind}; known are {', '.join(HEAD_BITS)}")
    bits, d = HEAD_BITS[kind], shape.embedding_dim
    return None if bits is None else RowSizes(shape.vocab_size, d, _group(d, name), bits)


def head_kind(values: Mapping[str, Any]) -> str:
    """Which of ``HEAD_BITS`` the LM head of a config.json is."""
    made: Mapping[str, Any] = values["quantization_config"] if quant_method(values) == INT4 else {}
    return str(made.get("lm_head", "fp16"))  # folders of before there was a choice do not name it


def _group(d: int, name: str) -> int:
    group = next((group for group in GROUPS if d % group == 0), None)
    if group is None:
        raise UserError(
            f"4-bit rows need a hidden_size that one of {', '.join(map(str, GROUPS))} divides, {name} has {d}; give"
            " weights of float16"
        )
    return group
