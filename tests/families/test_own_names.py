"""Families whose positions begin at another row than OPT's, or whose list of layers is called otherwise."""

import pytest
import torch
from bundles import make_bundle
from conftest import save_tiny_tokenizer
from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

from dejavu_train.engine.cpu import CpuEngine
from dejavu_train.families import base
from dejavu_train.families.base import BlockParts, decoder_tensors
from dejavu_train.families.dims import Activation, ModelDims
from dejavu_train.families.fused import FusedPart
from dejavu_train.ground.errors import UserError
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.load import load_model
from dejavu_train.models.stored import TensorEntry, check_folder, check_tensors, in_layer, layer_prefixes
from dejavu_train.sparse.model import SparseCausalLM


class GPTFamily:
    """GPT-2's form with plain linear maps: learned positions from row 0 on, layers in ``h``."""

    model_types = ("gpt_bigcode",)
    least_transformers = "4.27"
    around = "transformer"
    embedding = "wte.weight"
    matrices = {**dict.fromkeys("qkv", "attn.c_attn"), "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    structure = ("n_embd", "n_head", "n_layer", "n_inner", "n_positions", "vocab_size", "multi_query")
    layers = "h"

    def dims(self, values, name):
        return ModelDims(
            d_model=values["n_embd"], d_ffn=values["n_inner"], n_layers=values["n_layer"], n_heads=values["n_head"],
            vocab_size=values["vocab_size"], max_positions=values["n_positions"], activation=Activation.RELU,
        )  # fmt: skip

    def stored_tensors(self, values):
        dims = self.dims(values, "this model")
        made = decoder_tensors(dims, self, f"{self.layers}.", {"ln_f": 48}, dict.fromkeys(("ln_1", "ln_2"), 48))
        return made | {"wpe.weight": (dims.max_positions, dims.d_model)}

    def blocks(self, model):
        def parts(name, layer):
            attention, heads = layer.attn, model.config.n_head
            q, k, v = (FusedPart(attention.c_attn, i, heads) for i in range(3))
            return BlockParts(
                name=name, whole=layer, attention=attention, norm_attn=layer.ln_1, q=q, k=k, v=v,
                out=attention.c_proj, norm_mlp=layer.ln_2, up=layer.mlp.c_fc, down=layer.mlp.c_proj,
                activate=layer.mlp.act, kinds=(type(layer), type(attention)), n_heads=heads,
                head_dim=attention.head_dim, scaling=attention.head_dim**-0.5,
            )  # fmt: skip

        return [parts(f"transformer.h.{i}", layer) for i, layer in enumerate(model.transformer.h)]

    def embed(self, model, inputs, positions):
        hidden = inputs if inputs.is_floating_point() else model.transformer.wte(inputs)
        return hidden + model.transformer.wpe(positions.clamp_min(0))

    def embeddings(self, model):
        return [model.transformer.wte, model.transformer.wpe]

    def final_norm(self, model):
        return model.transformer.ln_f


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(base, "_FAMILIES", dict(base._FAMILIES))
    base.register(GPTFamily())


@pytest.fixture
def folder(registered, tmp_path):
    save_tiny_tokenizer(tmp_path)
    config = GPTBigCodeConfig(
        vocab_size=320, n_positions=64, n_embd=48, n_layer=2, n_head=6, n_inner=96, multi_query=False,
        activation_function="relu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.15,
        bos_token_id=2, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    GPTBigCodeForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def test_positions_from_the_first_row_on_run_in_every_engine(folder):
    check_folder(str(folder), read_dims(str(folder)))
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    bundle = make_bundle(folder).at(1.0, 1.0)
    with torch.no_grad():
        expected = load_model(str(folder))(ids).logits
        for backend, ops in (("mask", {}), ("gather", {}), ("triton", {"ops": "reference"})):
            model = SparseCausalLM.from_model(load_model(str(folder)), bundle, backend, **ops)
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=2e-5)
    nll = -expected.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    for got, row in zip(CpuEngine(load_model(str(folder)), bundle, batch=2).score(ids.tolist()), nll, strict=True):
        torch.testing.assert_close(got, row, rtol=1e-5, atol=2e-5)


def test_a_list_of_layers_has_any_name(registered, folder):
    base._FAMILIES["gpt_bigcode"].layers = "body.blocks2"
    values = {
        "model_type": "gpt_bigcode", "n_embd": 48, "n_layer": 2, "n_head": 6, "n_inner": 96, "vocab_size": 320,
        "n_positions": 64,
    }  # fmt: skip
    assert layer_prefixes(values) == ["body.blocks2.0.", "body.blocks2.1."]
    assert in_layer(values).search("transformer.body.blocks2.17.mlp.c_fc.weight")
    assert not in_layer(values).search("h.0.mlp.c_fc.weight")
    expected = base._FAMILIES["gpt_bigcode"].stored_tensors(values)
    found = {name: TensorEntry("F32", size, 0, 0) for name, size in expected.items()}
    dims = base.dims_of(values)
    check_tensors("it", values, found, dims)
    found["body.blocks2.2.ln_1.weight"] = TensorEntry("F32", (48,), 0, 0)
    with pytest.raises(UserError, match="hold body.blocks2.2.ln_1.weight, which its config has no place for"):
        check_tensors("it", values, found, dims)
