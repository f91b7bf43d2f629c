"""A model in 4 bits, by rounding to nearest, for tests of what runs one."""

from typing import Any

from dejavu_train.families import blocks_of, dims_of
from dejavu_train.models.int4 import CodedLinear, Int4Rows, head_layout, row_layouts
from dejavu_train.models.int4_quantizer import replace_matrices
from dejavu_train.models.int4_sizes import head_sizes
from dejavu_train.quantize.rounding import round_nearest


def four_bits(model: Any, head: bool = False) -> Any:
    """The model with the matrices of every layer in 4 bits, and with `head` the LM head, changed in place."""
    shape = dims_of(model.config)
    for block in blocks_of(model):
        round_matrices(block.whole, row_layouts(model.config.model_type, shape))
    if head:
        round_matrices(model, {"lm_head": head_layout(head_sizes(shape, "int4"))})
        model.config.tie_word_embeddings = False
    return model


def round_matrices(module, layouts) -> None:
    """Round matrices of a module to their layouts, in place."""
    weights = {part: module.get_submodule(part) for part in layouts}
    replace_matrices(module, layouts)
    for part, linear in weights.items():
        made, layout = module.get_submodule(part), layouts[part]
        assert isinstance(made, CodedLinear)
        weight = linear.weight.detach().float()
        rows = Int4Rows.of(*round_nearest(layout.to_rows(weight).contiguous(), layout.sizes.group))
        made.words.copy_(rows.words)
        made.scales.copy_(rows.scales)
        if linear.bias is not None:
            made.bias.data.copy_(linear.bias.detach())
