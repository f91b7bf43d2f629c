"""What a model's sizes say: units and their weights, what engines refuse, what is stored."""

import pytest

from dejavu_train.families import ModelDims, Target, dims_of
from dejavu_train.families.dims import engine_refusal
from dejavu_train.models.weight_format import FLOAT16, UnitBytes

OPT = ModelDims(64, 256, 2, 4, 320, 512)
OTHER = ModelDims(
    64, 160, 2, 8, 320, 512, head_dim=16, n_kv_heads=2, norm="rms_norm", positions="rotary", gated=True, biases=False
)


def test_units_have_the_weights_of_the_matrices():
    assert OPT.layer_weights == 4 * 64 * 64 + 2 * 64 * 256
    wide, narrow = 8 * 16 * 64, 2 * 16 * 64  # of q and out, of k and v
    assert OTHER.layer_weights == 2 * wide + 2 * narrow + 3 * 64 * 160
    assert OTHER.units(Target.HEADS) * OTHER.rows_of(Target.HEADS) * 64 == 2 * wide + 2 * narrow
    row = 64 * 2
    assert FLOAT16.unit_bytes(OTHER) == UnitBytes(2 * row, row, (2 * 4 * 16 + 2 * 16) * row)


@pytest.mark.parametrize(
    "name, value, said",
    [("norm", "rms_norm", "norm rms_norm"), ("positions", "alibi", "positions alibi"),
     ("activation", "relu2", "activation relu2"), ("gated", True, "a gated MLP"),
     ("n_kv_heads", 2, "2 K/V heads of 4 heads")],
)  # fmt: skip
def test_engines_refuse_what_is_no_opts(name, value, said):
    assert engine_refusal(OPT, {}) is None
    other = ModelDims(**{**OPT.stored(), name: value})
    assert engine_refusal(other, {}) == f"no kernels for {said}"
    assert engine_refusal(other, {name: None}) is None and engine_refusal(other, {name: (value,)}) is None
    assert ModelDims.from_stored(other.stored()) == other


def test_sizes_alone_are_stored_of_an_opt(tiny_opt):
    from transformers import OPTConfig

    shape = dims_of(OPTConfig.from_pretrained(tiny_opt))
    assert list(shape.stored()) == ["d_model", "d_ffn", "n_layers", "n_heads", "vocab_size", "max_positions"]
