"""How the weights of a model's layers lie in memory, and so what one unit of it costs to read. Without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dejavu_train.families import ModelDims, Target, blocks_of
from dejavu_train.models.config_values import INT4, quant_method
from dejavu_train.models.int4_sizes import part_sizes


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit's weights.

    Attributes:
        up: what leads into a neuron, its gate included. down: what leads out of it.
        head: a head's part of the four matrices.
    """

    up: float
    down: float
    head: float

    def dense(self, shape: ModelDims, target: Target) -> float:
        """All units of ``target``, ``mlp`` or ``heads``, in one layer."""
        return shape.d_ffn * (self.up + self.down) if target == Target.MLP else shape.n_kv_heads * self.head


@dataclass(frozen=True)
class WeightFormat:
    """Weights of ``bits`` each: numbers, or ``coded`` with an fp16 scale a group of columns, see ``int4_sizes``."""

    name: str
    bits: float
    coded: bool = False

    def unit_bytes(self, shape: ModelDims) -> UnitBytes:
        """Bytes of one neuron and one head of this model.

        Raises:
            UserError: codes of widths that have no such form.
        """
        if not self.coded:
            row = shape.d_model * self.bits / 8
            return UnitBytes((shape.rows_of(Target.MLP) - 1) * row, row, shape.rows_of(Target.HEADS) * row)
        read = {part: replace(sizes, bits=int(self.bits)).nbytes for part, sizes in part_sizes(shape).items()}
        heads, up = sum(read[part] for part in ("q", "k", "v", "out")), read["up"] + read.get("gate", 0)
        return UnitBytes(up / shape.d_ffn, read["down"] / shape.d_ffn, heads / shape.n_kv_heads)


FLOAT32, FLOAT16, BFLOAT16 = (
    WeightFormat(name, bits) for name, bits in (("float32", 32), ("float16", 16), ("bfloat16", 16))
)
CODES4 = WeightFormat("4 bits", 4, coded=True)
_NUMBERS = {weights.name: weights for weights in (FLOAT32, FLOAT16, BFLOAT16)}


def stored_format(values: Mapping[str, Any]) -> WeightFormat:
    """Format of a model's folder, by its config.json. Other names of a float type count as float32."""
    if quant_method(values) == INT4:
        return CODES4
    named = str(values.get("dtype", values.get("torch_dtype"))).removeprefix("torch.")
    return _NUMBERS.get(named, FLOAT32)


def loaded_format(model: Any) -> WeightFormat:
    """Format of a model in memory: that of its layers."""
    from dejavu_train.models.int4 import CodedLinear  # imports torch

    up = next(block.up for block in blocks_of(model) if block.up is not None)
    if isinstance(up, CodedLinear):
        return CODES4
    return _NUMBERS[str(up.weight.dtype).removeprefix("torch.")]
