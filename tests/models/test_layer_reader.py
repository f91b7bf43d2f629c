"""Layers are read in parts by several threads, and are those of the model."""

import pytest
import torch

from dejavu_train.ground.errors import UserError
from dejavu_train.models import layer_reader
from dejavu_train.models.hooks import decoder_layers
from dejavu_train.models.layer_reader import LayerReader
from dejavu_train.models.layer_walk import LayerWalk
from dejavu_train.models.load import load_model


@pytest.fixture
def reader(tiny_opt, monkeypatch):
    monkeypatch.setattr(layer_reader, "PART", 1000)
    model = load_model(str(tiny_opt))
    return LayerReader(str(tiny_opt), model, decoder_layers(model))


def test_parts_make_the_tensor(reader, tiny_opt):
    own = decoder_layers(load_model(str(tiny_opt)))
    for number, then in ((0, 1), (1, 0), (0, -1)):  # the second one is read ahead
        made = reader.take(number, then)
        for name, tensor in own[number].named_parameters():
            assert torch.equal(made[name], tensor), name


def test_two_blocks_in_turn(reader, tiny_opt, monkeypatch):
    """As for a GPU. Here no memory can be pinned, so other memory takes the place."""
    empty, asked = torch.empty, []

    def refused(*size, pin_memory=False, **options):
        if pin_memory:
            asked.append(size)
            raise RuntimeError("no more memory can be pinned")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", refused)
    reader._pinned, own, blocks = True, decoder_layers(load_model(str(tiny_opt))), set()
    for number, then in ((0, 1), (1, 0), (0, 1), (1, -1), (0, -1)):  # the last one was not read ahead
        made = reader.take(number, then)
        for name, tensor in own[number].named_parameters():
            assert torch.equal(made[name], tensor), name
        blocks.add(made["fc1.weight"].untyped_storage().data_ptr())
    assert len(blocks) == len(asked) == 2


def test_a_part_that_is_missing(reader, tiny_opt, tmp_path):
    file, entry = reader._stored["decoder.layers.0.fc1.weight"]
    short = tmp_path / file.name
    short.write_bytes(file.read_bytes()[: entry.begin + 1500])
    with pytest.raises(UserError, match="ended early; fetch or save it again"):
        reader._fill(torch.empty(entry.shape), short, entry)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_layers_come_to_a_gpu_from_pinned_blocks(tiny_opt):
    walk, own = LayerWalk(str(tiny_opt), torch.device("cuda"), "float32"), decoder_layers(load_model(str(tiny_opt)))
    for number, step in ((0, 1), (1, -1), (0, 1), (1, 0)):
        with walk.layer(number, step) as layer:
            for (name, made), tensor in zip(layer.named_parameters(), own[number].parameters(), strict=True):
                assert made.is_cuda and torch.equal(made.cpu(), tensor), name
    assert len(walk.reader._blocks) == 2 and all(block.is_pinned() for block in walk.reader._blocks)
