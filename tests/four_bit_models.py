"""A model in 4 bits, by rounding to nearest, for tests of what runs one."""

from functools import partial

import torch
from transformers import OPTForCausalLM

from dejavu_train.families import dims_of
from dejavu_train.models.int4 import CodedLinear, Int4Rows, RowLayout, _by_head, _from_heads, head_layout, row_layouts
from dejavu_train.models.int4_quantizer import replace_matrices
from dejavu_train.models.int4_sizes import RowSizes, head_sizes
from dejavu_train.quantize.rounding import round_nearest


def four_bits(model: OPTForCausalLM, head: bool = False) -> OPTForCausalLM:
    """The model with the six matrices of every layer in 4 bits, and with `head` the LM head, changed in place."""
    shape = dims_of(model.config)
    for block in model.model.decoder.layers:
        round_matrices(block, row_layouts(shape))
    if head:
        round_matrices(model, {"lm_head": head_layout(head_sizes(shape, "int4"))})
        model.config.tie_word_embeddings = False
    return model


def layouts_of(layer, heads: int, group: int = 128) -> dict[str, RowLayout]:
    """The layouts of a Llama-like layer's matrices in 4 bits, as `row_layouts` has them of an OPT's."""
    found = {}
    for name, linear in layer.named_modules():
        if not isinstance(linear, torch.nn.Linear):
            continue
        n, d = linear.weight.shape
        if name.endswith("o_proj"):
            sizes, turns = RowSizes(heads * n, d // heads, d // heads), (_by_head, _from_heads)
            found[name] = RowLayout(sizes, *(partial(turn, heads) for turn in turns))
        elif name.endswith("down_proj"):
            found[name] = RowLayout(RowSizes(d, n, group), torch.t, torch.t)
        else:
            found[name] = RowLayout(RowSizes(n, d, group), torch.nn.Identity(), torch.nn.Identity())
    return found


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
