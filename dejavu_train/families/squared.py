"""What squared ReLU needs in fp16, whose largest number is less than 256 squared."""

from collections.abc import Sequence
from dataclasses import replace

from dejavu_train.families.base import BlockParts


def with_wide_squares(blocks: Sequence[BlockParts]) -> list[BlockParts]:
    """Layers whose neurons are fp32 where the model is fp16. An activation of another class stays as it is."""
    from transformers.activations import ReLUSquaredActivation

    from dejavu_train.families.block import WideSquare

    return [
        replace(block, activate=WideSquare()) if type(block.activate) is ReLUSquaredActivation else block
        for block in blocks
    ]
