"""Greedy tokens of tiny models of every family: zeroskip's are plain vLLM's, those with predictors are gather's."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from bundles import make_bundle
from conftest import save_tiny_opt
from family_models import save_family
from vllm_runs import compared, written

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.extras.export import ExportConfig, export_together

PROMPTS = [[2, 30, 40, 50], [2, 9, 8], [2]]  # eight tokens: the first step leaves rows out as well
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "n_head": 2,
}  # fmt: skip
HYBRID = SIZES | {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"], "layer_types": None}
GATED = ("llama", "fatrelu", "drelu")
FAMILIES = ("opt", "nemotron", "arcee", "jais2", *GATED, "bloom", "nemotron_h")
TRANSFORMERS = {"model_impl": "transformers"}  # vLLM's own Llama has no other gates than SiLU


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, tuple[Path, list[list[int]]]]:
    """By family its folder with predictors, and what gather writes, before vLLM changes classes of transformers."""
    folder = tmp_path_factory.mktemp("families")
    found = {}
    for name in FAMILIES:
        plain = folder / name
        if name == "opt":
            save_tiny_opt(plain, hidden_size=64, word_embed_proj_dim=64, ffn_dim=128, num_attention_heads=2)
        else:
            save_family(name, plain, **(HYBRID if name == "nemotron_h" else SIZES))
        bundle = folder / f"{name}-bundle"
        make_bundle(plain).at(mlp_density=0.4).save_pretrained(bundle)
        together = folder / f"{name}-together"
        export_together(ExportConfig(bundle=str(bundle), vllm=str(together)))
        found[name] = together, gathered(together)
    return found


@pytest.fixture(scope="module")
def plain_opt(made):
    return written(made["opt"][0].with_name("opt"), None, PROMPTS)


def gathered(folder: Path) -> list[list[int]]:
    """Greedy tokens of the backend gather, sparse from the first position on."""
    from dejavu_train import SparseCausalLM

    model = SparseCausalLM.from_pretrained(folder, backend="gather")
    rows = [model.generate(torch.tensor([each]), do_sample=False, max_new_tokens=20, eos_token_id=None)[0]
            for each in PROMPTS]  # fmt: skip
    return [row[len(each) :].tolist() for row, each in zip(rows, PROMPTS, strict=True)]


@pytest.fixture
def methods(monkeypatch):
    """What ran each map, by its name."""
    from dejavu_vllm.methods import ZeroSkipConfig

    found, usual = {}, ZeroSkipConfig.get_quant_method

    def spy(self, layer, prefix):
        method = usual(self, layer, prefix)
        if method is not None:
            found[prefix.rpartition(".")[2]] = type(method).__name__
        return method

    monkeypatch.setattr(ZeroSkipConfig, "get_quant_method", spy)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens(made, methods, name):
    folder, gather = made[name]
    options = TRANSFORMERS if name in GATED else {}
    dense = folder.with_name(name)
    plain = written(dense, None, PROMPTS, **options)
    skipped = compared(plain, written(dense, "zeroskip", PROMPTS, **options))
    assert skipped.differing == 0 and skipped.tokens > 30 and skipped.distance < 1e-3
    assert ("LiveRows" in methods.values()) == (name != "bloom")  # GELU gives no zeros
    assert ("GatedRows" in methods.values()) == (name in GATED)
    methods.clear()
    chosen = written(folder, None, PROMPTS, **options)  # config.json says which method
    assert {"PredictedRows", "LiveRows"} <= set(methods.values())
    margins = dataclasses.replace(chosen, tokens=gather)
    same = compared(chosen, margins)
    assert same.differing == 0 and same.tokens > 30
    assert chosen.tokens != plain.tokens  # so the predictors had a say


def test_zeroskip_of_a_folder_with_predictors(made, plain_opt):
    assert compared(plain_opt, written(made["opt"][0], "zeroskip", PROMPTS)).differing == 0


def test_many_tokens_are_dense(made, plain_opt, monkeypatch):
    """Above the crossover a step leaves nothing out, whatever predictors say."""
    folder, _ = made["opt"]
    from dejavu_vllm.ops import TOKENS, most_tokens

    monkeypatch.setenv(TOKENS, "0")
    most_tokens.cache_clear()
    try:
        dense = written(folder, None, PROMPTS)
    finally:
        most_tokens.cache_clear()
    assert compared(plain_opt, dense).differing == 0


def refused(folder: Path, words: str, quantization: str | None = None) -> None:
    with pytest.raises(Exception, match=words):
        written(folder, quantization, PROMPTS)


def test_refusals(made, tmp_path):
    folder, _ = made["opt"]
    refused(folder.with_name("opt"), "there is no .*predictors/bundle.json.*dejavu export", "dejavu")
    place = folder / "predictors" / "predictors.safetensors"
    kept = place.read_bytes()
    place.write_bytes(kept[:-8] + b"damaged!")
    read_anew()
    refused(folder, "predictors.safetensors is not the file that bundle.json describes")
    place.write_bytes(kept)
    other = made["arcee"][0] / "predictors"
    (folder / "predictors").rename(tmp_path / "kept")
    other.rename(folder / "predictors")
    read_anew()
    refused(folder, "the bundle belongs to another model")
    (folder / "predictors").rename(other)
    (tmp_path / "kept").rename(folder / "predictors")
    read_anew()


def read_anew() -> None:
    from dejavu_vllm.predictors import read_bundle

    read_bundle.cache_clear()


@pytest.mark.parametrize("stored", ["fp8", "modelopt_fp4"])
def test_weights_of_another_method_are_refused(made, stored):
    config = made["opt"][0].with_name("opt") / "config.json"
    kept = config.read_text()
    config.write_text(json.dumps(json.loads(kept) | {"quantization_config": {"quant_method": stored}}))
    refused(config.parent, f"these are stored by {stored}; take the model that they were made of", "zeroskip")
    config.write_text(kept)


def test_predictors_that_vllm_cannot_ask_are_refused(made, tmp_path):
    plain = made["opt"][0].with_name("opt")
    bundle = make_bundle(plain, lookahead=True).at(mlp_density=0.4)
    bundle.save_pretrained(tmp_path / "bundle")
    with pytest.raises(ValueError, match="vLLM asks low-rank predictors of the MLP's own input"):
        export_together(ExportConfig(bundle=str(tmp_path / "bundle"), vllm=str(tmp_path / "out")))
    top = make_bundle(plain).at(mlp_density=0.4, top_k=True)
    top.save_pretrained(tmp_path / "top")
    made_of = export_together(ExportConfig(bundle=str(tmp_path / "top"), vllm=str(tmp_path / "out")))
    assert Bundle.from_pretrained(tmp_path / "out" / "predictors").mean_density("mlp") == made_of.mean_density("mlp")
    assert all(spec.threshold is not None for spec in made_of.specs.values())
