import pytest
import torch

from dejavu_train.kernels.formats.int4 import dequantise, pack_int4, unpack_int4


def test_every_code_in_every_column_comes_back():
    codes = torch.stack([torch.arange(-8, 8).roll(shift) for shift in range(16)])
    words = pack_int4(codes)
    assert words.shape == (16, 2) and words.dtype == torch.int32
    assert torch.equal(unpack_int4(words), codes.to(torch.int8))


def test_a_scale_for_each_group_of_columns():
    codes = torch.randint(-8, 8, (3, 32))
    scales = torch.tensor([[1.0, -0.5], [2.0, 0.25], [-1.0, 3.0]]).half()
    weights = dequantise(pack_int4(codes), scales)
    assert torch.equal(weights[:, :16], codes[:, :16] * scales[:, :1].float())
    assert torch.equal(weights[:, 16:], codes[:, 16:] * scales[:, 1:].float())


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="multiple of 8"):
        pack_int4(torch.zeros(1, 12, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"-8\.\.7"):
        pack_int4(torch.full((1, 8), 8))
    with pytest.raises(ValueError, match="do not divide"):
        dequantise(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 3).half())
