"""A survey of tiny decoders of several kinds: what it finds, loses, reckons, resumes and refuses."""

import csv
import json
import math
import re
import sys

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, save_tiny_tokenizer
from family_models import save_family
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BertGenerationConfig,
    BertGenerationDecoder,
    BitNetConfig,
    BloomConfig,
    DogeConfig,
    FalconConfig,
    FalconH1Config,
    Gemma3Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MixtralConfig,
    NemotronConfig,
    OpenAIGPTConfig,
    RwkvConfig,
)

from dejavu_train.cli.commands import main
from dejavu_train.evaluation.perplexity import EvalCorpus, eval_batches, window_nats
from dejavu_train.extras.survey import speed
from dejavu_train.extras.survey.decoder import _layer_parts, find_parts, load_decoder, read_config
from dejavu_train.extras.survey.layerwise import LayerRunner
from dejavu_train.extras.survey.measure import Selection, Survey, _Counts
from dejavu_train.families import Target
from dejavu_train.families.dims import CARRIED
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model
from dejavu_train.models.stored import SINGLE

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
LLAMA = LlamaConfig(
    **SMALL, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=320, initializer_range=0.2
)
KINDS = {
    "llama": (LLAMA, "mlp.down_proj", 48, 2, True),
    "bloom": (
        BloomConfig(vocab_size=320, hidden_size=32, n_layer=2, n_head=4, bos_token_id=2, eos_token_id=2),
        "mlp.dense_4h_to_h", 128, 4, False,
    ),
    "gpt2": (
        GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, bos_token_id=2, eos_token_id=2),
        "mlp.c_proj", 128, 4, False,
    ),
    "falcon": (
        FalconConfig(**SMALL, vocab_size=320, num_attention_heads=4, multi_query=False, alibi=True),
        "mlp.dense_4h_to_h", 128, 4, False,
    ),
    "neox": (  # whose configuration says is_decoder: false
        GPTNeoXConfig(**SMALL, intermediate_size=48, num_attention_heads=4, vocab_size=320),
        "mlp.dense_4h_to_h", 48, 4, False,
    ),
    # Whose layers give lists.
    "gpt1": (OpenAIGPTConfig(vocab_size=320, n_embd=32, n_layer=2, n_head=4), "mlp.c_proj", 128, 4, False),
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("quick_bandwidth")


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    config, *expected = KINDS[request.param]
    folder = tmp_path_factory.mktemp("survey") / request.param
    save_tiny_tokenizer(folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder), *expected


@pytest.fixture(scope="module")
def held():
    draw = np.random.default_rng(0)
    windows = [[2, *draw.integers(3, 320, size).tolist()] for size in (16, 16, 9)]
    return EvalCorpus(windows, [0, 0, 1], [32, 9], 100)


def surveyed(folder, held, state, selections, clock=lambda: 0.0):
    config = read_config(folder, None)
    parts = find_parts(folder, config)
    model = load_decoder(folder, None, config, parts.layers)
    runner = LayerRunner(model, parts.layers, torch.device("cpu"))
    return Survey(runner, parts, held, selections, state, "id", clock), model, parts


def test_the_dense_row_is_the_models_and_the_oracle_keeps_the_largest(kind, held, tmp_path):
    folder, down, n, groups, gated = kind
    half = Selection(Target.MLP, 0.25)
    survey, model, parts = surveyed(folder, held, tmp_path / "state", [Selection(), half, Selection(Target.HEADS, 0.5)])
    found = survey.run()
    assert (parts.down[0], parts.d_ffn, parts.groups, parts.gated) == (down, n, groups, gated)
    layer = model.get_submodule(parts.layers)[0]
    assert parts.mlp_weights == 2 * n * 32 * (3 if gated else 2)

    def nats():
        total = np.zeros(2)
        for batch in eval_batches(held, 1, torch.device("cpu")):
            np.add.at(total, batch.document, window_nats(model, batch))
        return total

    with torch.no_grad():
        np.testing.assert_allclose(found.nats[0], nats(), rtol=1e-5)
        kept = []

        def keep_largest(module, args):
            weight = module.weight if type(module) is not type(getattr(layer, "c", None)) else module.weight.T
            weight = weight if weight.shape[0] == 32 else weight.T
            score = args[0].abs() * weight.norm(dim=0)
            least = score.topk(n // 4, dim=-1).values[..., -1:]
            kept.append((score >= least).float().mean())
            return (args[0] * (score >= least),)

        for each, name in zip(model.get_submodule(parts.layers), parts.down, strict=True):
            each.get_submodule(name).register_forward_pre_hook(keep_largest)
        np.testing.assert_allclose(found.nats[1], nats(), rtol=1e-5)
    assert all(abs(float(each) - 0.25) < 0.01 for each in kept)
    assert not np.allclose(found.nats[2], found.nats[0], rtol=1e-6)  # heads were skipped


def test_weights_of_16_bits_are_computed_with_in_32(held, tmp_path):
    save_tiny_tokenizer(tmp_path)
    torch.manual_seed(0)
    LlamaForCausalLM(LLAMA).bfloat16().save_pretrained(tmp_path)
    survey, model, _ = surveyed(str(tmp_path), held, tmp_path / "state", [Selection()])
    nats = survey.run().nats[0]
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16  # what lies on the disk stays there
    dense = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = sum(window_nats(dense, each).sum() for each in eval_batches(held, 1, torch.device("cpu")))
    assert nats.sum() == pytest.approx(float(expected), rel=1e-5)


def test_a_model_that_is_near_random_is_named_once(tmp_path, held, tiny_opt, caplog):
    surveyed(str(tiny_opt), held, tmp_path / "state", [Selection(), Selection(Target.MLP, 0.25)])[0].run()
    assert caplog.text.count("the model looks untrained: it loses ") == 1


def test_needs_are_counted_on_real_tokens(tmp_path, held, tiny_opt):
    survey, model, parts = surveyed(str(tiny_opt), held, tmp_path / "state", [Selection(), Selection(Target.MLP, 0.25)])
    seen = []
    model.model.decoder.layers[0].fc2.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    first = survey.run().layers[0]
    seen.clear()  # the survey's own passes
    rows = []
    with torch.no_grad():
        for window in held.windows:
            model(torch.tensor([window[:-1]]))
            rows.append(seen.pop().flatten(0, -2))
    values = torch.cat(rows)
    assert first.nonzero == pytest.approx(float((values != 0).float().mean()))
    score = (values.abs() * model.model.decoder.layers[0].fc2.weight.norm(dim=0)).sort(-1, descending=True).values
    share = score.cumsum(-1) / score.sum(-1, keepdim=True)
    assert first.mass[0.25] == pytest.approx(float(share[:, parts.d_ffn // 4 - 1].mean()), rel=1e-5)
    enough = (share < CARRIED).sum(-1) + 1
    assert first.needed == pytest.approx(float((enough / parts.d_ffn).mean()), rel=1e-5)


@pytest.mark.parametrize(
    "config, layers, groups",
    [(FalconConfig(**SMALL, vocab_size=320, num_attention_heads=4, multi_query=True), "transformer.h", 1),
     # The keys of experts are there, and experts are not.
     (DogeConfig(**SMALL, vocab_size=320, num_attention_heads=4, intermediate_size=48), "model.layers", 4),
     (GraniteMoeHybridConfig(
         **SMALL, vocab_size=320, num_attention_heads=4, num_local_experts=0, shared_intermediate_size=48,
         layer_types=["attention"] * 2, mamba_n_heads=4, mamba_d_head=16), "model.layers", 4),
     # As many layers read pictures as texts.
     (Gemma3Config(text_config={**SMALL, "vocab_size": 320, "num_attention_heads": 4, "intermediate_size": 48},
                   vision_config={"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
                                  "num_attention_heads": 4}), "model.language_model.layers", 4)],
    ids=["falcon", "doge", "granite", "gemma3"],
)  # fmt: skip
def test_layers_and_their_groups_are_found_by_what_they_are(config, layers, groups):
    parts = find_parts("one", config)
    assert (parts.layers, parts.groups, parts.n_layers) == (layers, groups, 2)
    assert parts.mlp_weights == 2 * parts.d_ffn * 32 * (3 if parts.gated else 2)


def test_a_gate_of_the_heads_is_not_the_map_out_of_them():
    class GatedAttention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"):
                setattr(self, name, torch.nn.Linear(32, 32))

    layer = torch.nn.ModuleDict(
        {"attn": GatedAttention(), "up": torch.nn.Linear(32, 48), "down": torch.nn.Linear(48, 32)}
    )
    found = _layer_parts("one", layer, 32, 4, None)
    assert (found.out, found.down, found.width, found.gated) == ("attn.o_proj", "down", 48, False)


def test_layers_without_a_target_are_run_as_they_are(tmp_path, held):
    """Nemotron-H needs what its layers with neurons need. A step reads a token's experts of a mixture."""
    folder = save_family("nemotron_h", tmp_path / "model")
    selections = [Selection(), Selection(Target.MLP, 0.25), Selection(Target.HEADS, 0.5)]
    survey, model, parts = surveyed(str(folder), held, tmp_path / "state", selections)
    found = survey.run()
    with torch.no_grad():
        expected = sum(window_nats(model, each).sum() for each in eval_batches(held, 1, torch.device("cpu")))
    assert found.nats[0].sum() == pytest.approx(float(expected), rel=1e-5)
    assert list(found.layers) == parts.layers_of(Target.MLP) == [1, 4, 6, 7] and parts.layers_of(Target.HEADS) == [3]
    assert all(0 < each.nonzero < 1 for each in found.layers.values()) and len(set(found.nats.sum(1))) == 3
    experts = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
    whole = sum(each.numel() for each in model.parameters() if each.dim() > 1)
    outer = model.model.embeddings.weight.numel()
    assert speed.step_bytes(parts, Selection(), 1.0, 1) == whole - outer - experts / 2  # two of four are chosen


def test_neurons_inside_routed_experts_are_counted_and_not_skipped(tmp_path, text_file, capsys):
    """Rows and their negatives: of each pair one fires for whatever is routed there, and rows of zeros never do."""
    folder, out = save_family("nemotron_h", tmp_path / "model"), tmp_path / "out"
    model, pairs = load_model(str(folder)), (0, 5, 10, 20)
    with torch.no_grad():
        up = model.model.layers[6].mixer.experts.up_proj  # 4 experts, 40 neurons each
        for expert, count in enumerate(pairs):
            up[expert, 20 : 20 + count], up[expert, count:20], up[expert, 20 + count :] = -up[expert, :count], 0, 0
    model.save_pretrained(folder)
    given = [f"--model={folder}", f"--text={text_file}", f"--output={out}", "--tokens=160", "--window=17"]
    assert main(["survey", *given, "--device=cpu"]) == 0
    rows = list(csv.DictReader((out / "experts.csv").open()))
    assert all(float(row["nonzero"]) == pairs[int(row["expert"])] / 40 and row["layer"] == "6" for row in rows)
    routed, fired = (
        sum(int(row["tokens"]) * (float(row["nonzero"]) if each else 1) for row in rows) for each in (0, 1)
    )
    said = capsys.readouterr().out
    tokens = int(re.search(r"- (\d+) tokens of", said)[1])
    assert routed == 2 * tokens and len(rows) > 2  # each token chooses two
    assert f"A token has {100 * fired / routed:.3g} % of the neurons in the experts that it chose" in said


def test_what_reads_ahead_is_refused(tmp_path, held):
    """A Bert that was saved as a decoder, and says that it is none."""
    save_tiny_tokenizer(tmp_path)
    config = BertGenerationConfig(**SMALL, intermediate_size=48, num_attention_heads=4, vocab_size=320)
    BertGenerationDecoder(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="reads the tokens behind a position"):
        surveyed(str(tmp_path), held, tmp_path / "state", [Selection()])[0].run()


def test_an_interrupted_survey_goes_on(tmp_path, held, tiny_opt):
    selections = [Selection(), Selection(Target.MLP, 0.25)]
    whole = surveyed(str(tiny_opt), held, tmp_path / "other", selections)[0].run()
    times = iter(range(0, 10**6, 100))
    survey = surveyed(str(tiny_opt), held, tmp_path / "state", selections, lambda: next(times))[0]
    survey._score = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        survey.run()
    again = surveyed(str(tiny_opt), held, tmp_path / "state", selections)[0]
    again._layer = None  # no layer is run a second time
    found = again.run()
    np.testing.assert_allclose(found.nats, whole.nats, rtol=1e-12)
    assert found.layers[1].nonzero == pytest.approx(whole.layers[1].nonzero)
    assert not (tmp_path / "state").exists()


def test_the_command_writes_a_page_with_a_verdict(tmp_path, tiny_opt, text_file, capsys):
    given = [f"--model={tiny_opt}", f"--text={text_file}", f"--output={tmp_path / 'out'}", "--tokens=64"]
    given += ["--window=17", "--device=cpu"]
    assert main(["survey", *given]) == 0
    page = (tmp_path / "out" / "survey.md").read_text()
    assert "are not trained" in page and "| H200 |" in page and "this machine" in page
    rows = list(csv.DictReader((tmp_path / "out" / "selections.csv").open()))
    assert [row["selection"] for row in rows] == ["dense"] + ["mlp"] * 5 + ["heads"] * 2
    assert (
        float(rows[0]["increase"]) == 0 and float(rows[5]["bytes_over_dense"]) < float(rows[1]["bytes_over_dense"]) < 1
    )
    assert len(list(csv.DictReader((tmp_path / "out" / "layers.csv").open()))) == 2
    assert sorted(each.name for each in (tmp_path / "out").iterdir() if each.suffix != ".png") == [
        "layers.csv", "selections.csv", "survey.md",
    ]  # fmt: skip
    capsys.readouterr()
    assert main(["survey", *given, "--check"]) == 0
    assert "no mistake was found" in capsys.readouterr().out


@pytest.mark.parametrize(
    "config, said",
    [(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, vocab_size=320,
                 architectures=["BertForMaskedLM"]), "bert, which is no causal"),
     (BartConfig(), "bart, which is no causal"),
     (BartConfig(is_encoder_decoder=False, is_decoder=True, architectures=["BartForCausalLM"]),
      "or one to another text (encoder_attn)"),
     (FalconH1Config(num_hidden_layers=2), "one MLP in its layers (mamba.in_proj)"),
     (RwkvConfig(num_hidden_layers=2), "one MLP in its layers (feed_forward.receptance)"),
     (NemotronConfig(num_key_value_heads=None), "transformers makes no model of the config"),
     (MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=320), "has a MambaMixer"),
     (BitNetConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=320, num_attention_heads=4,
                   num_key_value_heads=2), "norms all neurons"),
     (MixtralConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=320, num_attention_heads=4,
                    num_key_value_heads=2), "8 experts")],
)  # fmt: skip
def test_other_architectures_get_one_line(config, said, tmp_path, capsys):
    config.save_pretrained(tmp_path)
    assert main(["survey", f"--model={tmp_path}", "--device=cpu"]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


def test_gates_of_a_family_are_computed(tmp_path, held):
    """dReLU is a forward pass that transformers does not have."""
    folder = save_family("drelu", tmp_path / "m")
    found = surveyed(str(folder), held, tmp_path / "state", [Selection()])[0].run()
    dense = load_model(str(folder))
    with torch.no_grad():
        expected = sum(window_nats(dense, each).sum() for each in eval_batches(held, 1, torch.device("cpu")))
    assert found.nats.sum() == pytest.approx(float(expected), rel=1e-5)


def with_values(**changed):
    def change(folder):
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | changed))

    return change


def spoil(folder):
    tensors = load_file(folder / SINGLE)
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, folder / SINGLE, {"format": "pt"})


def cut(folder):
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:9000])


@pytest.mark.parametrize(
    "change, said",
    [(with_values(max_position_embeddings=15), "exceeds the 15 positions of .*; give 16 at most"),
     (with_values(num_hidden_layers=1), "hold model.layers.1.input_layernorm.weight, which its config has no place"),
     (with_values(hidden_size="x"), "cannot read the config"),
     (with_values(intermediate_size=56), "mlp.down_proj.weight of .* is 32x48, its config asks for 32x56"),
     (with_values(model_type="own", auto_map={"AutoConfig": "a.B"}), "no code of a model's folder is run"),
     (spoil, "logits that are not finite"),
     (cut, "cannot load the weights")],
    ids=["window", "layers", "value", "width", "code", "nan", "cut"],
)  # fmt: skip
def test_faults_of_a_folder_are_one_line(change, said, tmp_path, text_file, capsys):
    save_tiny_tokenizer(tmp_path)
    LlamaForCausalLM(LLAMA).save_pretrained(tmp_path)
    change(tmp_path)
    given = [f"--model={tmp_path}", f"--text={text_file}", f"--output={tmp_path}/o", "--tokens=64", "--window=17"]
    capsys.readouterr()
    assert main(["survey", *given, "--device=cpu"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and re.search(said, error)


def test_a_tokenizer_of_another_model_is_said(tmp_path, text_file, capsys):
    save_tiny_tokenizer(tmp_path)
    LlamaForCausalLM(LlamaConfig(**{**LLAMA.to_dict(), "vocab_size": 200})).save_pretrained(tmp_path)
    given = [f"--model={tmp_path}", f"--text={text_file}", f"--output={tmp_path}/o", "--tokens=64", "--window=17"]
    assert main(["survey", *given, "--device=cpu"]) == 2
    assert re.search("gives the token 3.., the model has 200 embeddings", capsys.readouterr().err)


def test_what_is_no_model_is_said(tmp_path, capsys, monkeypatch):
    (tmp_path / "x.gguf").touch()
    monkeypatch.setitem(sys.modules, "gguf", None)  # not installed
    assert main(["survey", f"--model={tmp_path / 'x.gguf'}"]) == 2 and "pip install gguf" in capsys.readouterr().err
    assert main(["survey"]) == 2 and "give --model" in capsys.readouterr().err
    assert main(["survey", "--model=/nowhere/x"]) == 2 and "there is no model" in capsys.readouterr().err
    assert main(["survey", "--model=x", "--neuron_shares=2"]) == 2 and "at most at 1" in capsys.readouterr().err


def test_fixed_times_are_those_of_committed_rows():
    """Seconds beyond bytes at 4.5 TB/s, of a layer, fp16, all heads, one row, 128 tokens of prompt, newest rows."""
    layers = {"6.7b": 32, "30b": 48}
    found = {"dense": {}, "sparse": {}}
    for row in csv.DictReader((REPOSITORY / "benchmarks/results/decode.csv").open()):
        heads = float(row["head_union"] or 0)
        if row["model"] in layers and row["engine"] in found and row["batch"] == "1" and row["prompt"] == "128":
            if heads == 1 and "H200" in row["gpu"] and row["options"] in ("", "head_density=1.0"):
                over = float(row["p50_ms"]) - float(row["floor45_ms"])
                found[row["engine"]][row["model"]] = over / 1e3 / layers[row["model"]]
    for engine, told in (("dense", speed.DENSE_LAYER), ("sparse", speed.SPARSE_LAYER)):
        assert told == pytest.approx(np.mean(list(found[engine].values())), rel=0.05)
    assert speed.REACHED * 4.8 == pytest.approx(4.5, rel=0.01)


def test_bytes_of_a_step(tiny_opt):
    parts = find_parts(str(tiny_opt), read_config(str(tiny_opt), None))
    d, n = parts.d_model, parts.d_ffn
    dense = (2 * (4 * d * d + 2 * n * d) + parts.head_weights) * 2
    assert speed.step_bytes(parts, Selection(), 1.0, 2) == dense
    # Without predictors rows out of silent neurons are left out too.
    assert speed.step_bytes(parts, Selection(), 0.1, 2) == pytest.approx(dense - 2 * n * d * 0.9 * 2)
    # A quarter of the rows in, and of the rows out the tenth that is not zero.
    kept = 2 * (4 * d * d + n * d * 0.25 + n * d * 0.1) + parts.head_weights
    predictors = 2 * 64 * (d + n) * 0.5
    assert speed.step_bytes(parts, Selection(Target.MLP, 0.25), 0.1, 2) == pytest.approx(kept * 2 + predictors)
    assert math.isclose(speed.GPUS[4].bandwidth, 4.8e12)


def test_a_token_without_active_neurons_needs_none():
    counts = _Counts({0.2: 0.0}, 0)
    counts.add(torch.zeros(3, 10), torch.zeros(3, 10))
    counts.add(torch.ones(1, 10), torch.tensor([[8.0, 2.0, *[0.0] * 8]]))
    found = counts.means()
    assert found.needed == pytest.approx(0.2 / 4) and found.mass[0.2] == pytest.approx(1)
