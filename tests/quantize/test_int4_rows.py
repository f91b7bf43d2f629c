"""Rows of 4 bits: layouts turn back, and a module keeps its codes whatever moves."""

import pytest
import torch

from dejavu_train.families import ModelDims
from dejavu_train.ground.errors import UserError
from dejavu_train.kernels.formats.int4 import pack_int4
from dejavu_train.models.int4 import CodedLinear, row_layouts
from dejavu_train.models.int4_sizes import row_sizes

SHAPE = ModelDims(d_model=96, d_ffn=40, n_layers=1, n_heads=4, vocab_size=9, max_positions=8)


def test_layouts_turn_back_and_a_unit_is_a_range_of_rows():
    layouts = row_layouts("opt", SHAPE)
    for part, (out, inputs) in {"fc1": (40, 96), "fc2": (96, 40), "self_attn.out_proj": (96, 96)}.items():
        weight, layout = torch.randn(out, inputs), layouts[part]
        rows = layout.to_rows(weight)
        assert tuple(rows.shape) == (layout.sizes.rows, layout.sizes.columns)
        torch.testing.assert_close(layout.from_rows(rows), weight, rtol=0, atol=0)
    heads = layouts["self_attn.out_proj"].to_rows(weight)
    torch.testing.assert_close(heads[2 * 96 : 3 * 96], weight[:, 48:72], rtol=0, atol=0)  # head 2, of width 24
    assert layouts["fc1"].sizes.group == 32 and layouts["self_attn.out_proj"].sizes.group == 24


@pytest.mark.parametrize(("change", "message"), [
    ({"d_model": 48, "n_heads": 6}, "hidden_size .* has 48"),
    ({"d_model": 96, "n_heads": 8}, "heads .* are 12 wide"),
])  # fmt: skip
def test_widths_without_a_form_are_refused_by_name(change, message):
    with pytest.raises(UserError, match=message):
        row_sizes("opt", ModelDims(**{**SHAPE.stored(), **change}))


def test_groups_are_as_wide_as_the_width_allows():
    groups = {row_sizes("opt", ModelDims(d, 64, 1, 4, 9, 8))["fc1"].group: d for d in (384, 192, 160)}
    assert groups == {128: 384, 64: 192, 32: 160}


def test_a_module_keeps_codes_and_scales_through_every_move():
    layout = row_layouts("opt", SHAPE)["self_attn.out_proj"]
    module = CodedLinear(layout, 96, 96, bias=True)
    module.words.copy_(pack_int4(torch.randint(-8, 8, (layout.sizes.rows, 24), dtype=torch.int8)))
    module.scales.copy_(torch.randn(layout.sizes.rows, 1) * 1e-3)  # some are no numbers of bfloat16
    weight, x = module.weight.clone(), torch.randn(3, 96)
    torch.testing.assert_close(module(x), x @ weight.T, rtol=1e-5, atol=1e-5)
    assert module.weight.t().is_contiguous()  # as gather wants it
    for move in (torch.bfloat16, torch.float16, torch.float32):
        module = module.to(move)
        assert module.words.dtype == torch.int32 and module.scales.dtype == torch.float16
        assert module(x.to(move)).dtype == move
        torch.testing.assert_close(module.weight, weight, rtol=0, atol=0)
