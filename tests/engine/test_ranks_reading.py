"""A rank reads its rows of the stored weights, and what it then runs is its part of the whole model."""

import json

import pytest
import torch
from decode_helpers import random_bundle, random_opt
from family_models import random_family
from four_bit_models import four_bits
from safetensors.torch import load_file, save_file

from dejavu_train.engine.model_weights import weights_of_model
from dejavu_train.engine.ranks.reading import load_shard
from dejavu_train.engine.ranks.sharing import rates_of, shards_of
from dejavu_train.families import dims_of
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model
from dejavu_train.models.stored import HEAD, SINGLE


def tensors_of(weights):
    for layer in weights.layers:
        for name in ("qkv", "out", "up", "down", "gate"):
            linear = getattr(layer, name)
            if linear is not None:
                yield from ((name, part) for part in (*linear.weight.parts(), linear.bias))
        yield from (("norm", each.weight) for each in (layer.norm1, *layer.behind) if each is not None)
    yield from (("head", part) for part in weights.lm_head.parts())
    yield "embedding", weights.embedding


@pytest.mark.parametrize("kind", ["opt", "llama", "nemotron", "jais2", "350m"])
def test_what_is_read_is_the_part_of_the_whole(tmp_path, kind):
    model = random_opt(n_heads=6, d_ffn=192, d_model=48) if kind == "opt" else random_family(kind)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    whole, bundle = load_model(str(tmp_path)), random_bundle(model)
    dims, world = dims_of(whole.config), 2
    every = weights_of_model(whole, torch.float32, "cpu")
    stored = sum(p.nbytes for p in model.parameters())
    shared = sum(p.nbytes for name, p in model.named_parameters() if "layers" not in name)
    for shard in shards_of(dims, world, rates_of(bundle)):
        narrow, nbytes = load_shard(str(tmp_path), shard, "float32")
        got = shard.with_head(weights_of_model(narrow, torch.float32, "cpu", held=shard.dims))
        pairs = list(zip(tensors_of(got), tensors_of(shard.weights(every)), strict=True))
        assert len(pairs) > 10 and all(torch.equal(a, b) for (_, a), (_, b) in pairs)
        assert nbytes < shared + (stored - shared) / world * 1.1, "a rank reads half of the layers, and their norms"


@pytest.mark.parametrize("differs", [True, False])
def test_a_head_beside_embeddings_that_a_config_ties_counts(tmp_path, differs):
    model = random_opt(n_heads=6, d_ffn=192, d_model=48)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    table = tensors["model.decoder.embed_tokens.weight"]
    head = table.flip(0).contiguous() if differs else table.clone()
    save_file({**tensors, HEAD: head}, tmp_path / SINGLE, metadata={"format": "pt"})
    for shard in shards_of(dims_of(model.config), 2, rates_of(random_bundle(model))):
        narrow, _ = load_shard(str(tmp_path), shard, "float32")
        assert torch.equal(narrow.lm_head.weight, head)
        assert torch.equal(narrow.model.decoder.embed_tokens.weight, table)
        assert narrow.config.tie_word_embeddings is not differs


def save_coded(folder, model):
    """As quantize writes it."""
    state = {name.replace(".words", ".weight"): tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    made = {"quant_method": "dejavu_int4", "bits": 4, "lm_head": "int4"}
    values = {**model.config.to_dict(), "tie_word_embeddings": False, "quantization_config": made}
    (folder / "config.json").write_text(json.dumps(values))


def test_codes_are_read_by_rows(tmp_path):
    model = four_bits(random_opt(d_model=64, n_heads=4, d_ffn=192), head=True)
    save_coded(tmp_path, model)
    every = weights_of_model(load_model(str(tmp_path)), torch.float32, "cpu")
    for shard in shards_of(dims_of(model.config), 2, rates_of(random_bundle(model))):
        narrow, nbytes = load_shard(str(tmp_path), shard)
        got = shard.with_head(weights_of_model(narrow, torch.float32, "cpu", held=shard.dims))
        pairs = list(zip(tensors_of(got), tensors_of(shard.weights(every)), strict=True))
        assert got.packed and all(torch.equal(a, b) for (_, a), (_, b) in pairs)
        held = sum({t.data_ptr(): t.nbytes for t in (*narrow.parameters(), *narrow.buffers())}.values())
        assert nbytes <= held, "nothing is read but what is held"


def test_what_is_not_read_by_rows_is_refused(tmp_path):
    model = random_family("bloom")
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="stores q, k and v as one matrix"):
        load_shard(str(tmp_path), shards_of(dims_of(model.config), 2)[0])
