"""A model in 4 bits, by rounding to nearest, for tests of what runs one."""

from transformers import OPTForCausalLM

from dejavu_train.models.int4 import Int4Linear, Int4Rows, row_layouts
from dejavu_train.models.int4_quantizer import replace_matrices
from dejavu_train.models.opt import OPTShape
from dejavu_train.quantize.rounding import round_nearest


def four_bits(model: OPTForCausalLM) -> OPTForCausalLM:
    """The model with the six matrices of every layer in 4 bits, changed in place."""
    layouts = row_layouts(OPTShape.from_config(model.config))
    for block in model.model.decoder.layers:
        weights = {part: block.get_submodule(part) for part in layouts}
        replace_matrices(block, layouts)
        for part, linear in weights.items():
            made, layout = block.get_submodule(part), layouts[part]
            assert isinstance(made, Int4Linear)
            weight = linear.weight.detach().float()
            rows = Int4Rows.of(*round_nearest(layout.to_rows(weight).contiguous(), layout.sizes.group))
            made.words.copy_(rows.words)
            made.scales.copy_(rows.scales)
            made.bias.data.copy_(linear.bias.detach())
    return model
