"""Weights rounded in memory are those that the command writes, and bytes count what is read."""

import dataclasses

import pytest
import torch
from conftest import save_tiny_opt

from benchmarks.quantize import Scored, block_bytes, in_memory
from dejavu_train.data.text import TextSource
from dejavu_train.models.opt import OPTShape, load_opt
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.run import quantise


def test_in_memory_as_on_disk_and_offsets_err_less(tmp_path, text_file):
    model = save_tiny_opt(tmp_path / "model", hidden_size=64, word_embed_proj_dim=64)
    config = QuantizeConfig(model=str(model), text=TextSource(source=str(text_file)), tokens=1000, window=64)
    config = dataclasses.replace(config, device="cpu", output=str(tmp_path / "out"))
    quantise(config)
    written, made, offset = load_opt(config.output), in_memory(config), in_memory(config, asymmetric=True)
    dense = load_opt(str(model))
    errors = []
    for layer in range(2):
        fc1 = made.model.decoder.layers[layer].fc1
        torch.testing.assert_close(fc1.weight.data, written.model.decoder.layers[layer].fc1.weight)
        exact = dense.model.decoder.layers[layer].fc1.weight
        other = offset.model.decoder.layers[layer].fc1.weight
        errors.append([float((weight - exact).detach().norm()) for weight in (fc1.weight, other)])
    assert all(0.5 * plain < asymmetric < 1.1 * plain for plain, asymmetric in errors)


def test_bytes_of_a_block():
    shape = OPTShape(d_model=128, d_ffn=256, n_layers=1, n_heads=4, vocab_size=9, max_positions=9)
    dense = Scored(None, None, units=10.0)
    assert block_bytes(shape, None, dense, False) == (1.0, 1.0, 1.0)
    read, _, _ = block_bytes(shape, None, dense, True)
    rows, heads = 64 + 2, 4 * (16 + 2)  # bytes of 128 columns with one scale, and of four heads with theirs
    assert read == pytest.approx((3 * 128 * rows + 128 * heads + 2 * 256 * rows) / (2 * (4 * 128**2 + 2 * 128 * 256)))
    half = Scored(None, None, {(0, "heads"): 20.0, (0, "mlp"): 1280.0}, {0: 640.0}, 10.0)
    read, neurons, kept = block_bytes(shape, None, half, False)
    assert (neurons, kept) == (0.5, 0.5)
    assert read == pytest.approx((0.5 * 4 * 128**2 + (0.5 + 0.25) * 128 * 256) / (4 * 128**2 + 2 * 128 * 256))
