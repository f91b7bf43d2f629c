"""The command from model to folder: what it writes, who reads it, what it refuses, and how little it holds."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from bundles import make_bundle
from conftest import REPOSITORY, save_tiny_opt
from safetensors.torch import load_file
from small_runs import flags
from transformers import AutoModelForCausalLM

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.cli.commands import run as run_command
from dejavu_train.data.text import TextSource
from dejavu_train.extras.export import ExportConfig, export
from dejavu_train.ground.errors import GOES_ON, UserError, exit_on_user_error
from dejavu_train.models.config_values import INT4, read_dims
from dejavu_train.models.int4 import CodedLinear
from dejavu_train.models.load import load_model, weight_hash
from dejavu_train.models.stored import check_folder
from dejavu_train.quantize import command, run, stream
from dejavu_train.quantize.check import check_output
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.folder import folder_aside
from dejavu_train.quantize.run import quantise
from dejavu_train.quantize.source import StoredTensors
from dejavu_train.run.command import parse_config
from dejavu_train.run.pipeline import run as train
from dejavu_train.sparse.model import SparseOPTForCausalLM

IDS = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def wide_opt(tmp_path_factory):
    """The tiny OPT, but of width 64."""
    return save_tiny_opt(tmp_path_factory.mktemp("wide-opt"), hidden_size=64, word_embed_proj_dim=64)


@pytest.fixture(scope="session")
def settings(wide_opt, text_file):
    """What a small run of the command is asked for. Change with dataclasses.replace."""
    text = TextSource(source=str(text_file))
    return QuantizeConfig(model=str(wide_opt), text=text, tokens=3000, window=64, device="cpu")


@pytest.fixture(scope="session")
def quantised(tmp_path_factory, settings):
    """The folder of GPTQ."""
    folder = tmp_path_factory.mktemp("int4") / "gptq"
    quantise(dataclasses.replace(settings, output=str(folder)))
    return folder


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.float()


def test_the_folder_is_a_model_for_everyone(quantised, wide_opt):
    assert len({file.stat().st_mode for file in quantised.iterdir()}) == 1, "none is the user's alone"
    check_folder(str(quantised), read_dims(str(quantised)))
    model = load_model(str(quantised), "float16")
    assert isinstance(model.model.decoder.layers[1].self_attn.out_proj, CodedLinear) and model.dtype == torch.float32
    ours = logits(model)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(quantised, dtype="float32")), ours)
    dense = logits(load_model(str(wide_opt)))
    assert 0 < (ours - dense).norm() < 0.3 * dense.norm()
    assert logits(AutoModelForCausalLM.from_pretrained(quantised, dtype="bfloat16")).isfinite().all()


def test_without_the_package_transformers_refuses_and_knows_it_afterwards(quantised, tiny_opt, bundle, tmp_path):
    """Both folders that need it: a sparse model with its bundle, and a model in 4 bits."""
    SparseOPTForCausalLM.from_pretrained(str(tiny_opt), bundle, "gather").save_pretrained(tmp_path)
    code = f"""
from transformers import AutoModelForCausalLM, OPTForCausalLM
try:
    AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})
except ValueError as error:
    print(str(error).splitlines()[0])
try:
    OPTForCausalLM.from_pretrained({str(quantised)!r})
except RuntimeError:
    import dejavu_train
    print(type(OPTForCausalLM.from_pretrained({str(quantised)!r}).model.decoder.layers[0].fc1).__name__)
"""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    refused, found = done.stdout.splitlines()
    assert "model type `dejavu_sparse_opt`" in refused, refused
    assert found == "CodedLinear" and "dejavu_int4" in done.stderr, done.stderr


def test_a_bundle_of_another_quantisation_is_refused(quantised, wide_opt, settings, tmp_path):
    quantise(dataclasses.replace(settings, quantizer="rtn", output=str(tmp_path / "rtn")))
    make_bundle(tmp_path / "rtn").save_pretrained(tmp_path / "bundle")
    for other in (quantised, wide_opt):
        with pytest.raises(UserError, match="other weights"):
            SparseOPTForCausalLM.from_pretrained(other, Bundle.from_pretrained(tmp_path / "bundle"))


def test_the_record_says_how_it_was_made(quantised, wide_opt, settings):
    made = json.loads((quantised / "config.json").read_text())["quantization_config"]
    assert made["quant_method"] == "dejavu_int4" and made["quantizer"] == "gptq"
    assert made["made_of"]["weight_hash"] == weight_hash(str(wide_opt))
    assert made["text"]["source"] == settings.text.key and made["text"]["tokens"] == 3000
    assert made["settings"]["seed"] == 0 and made["minutes"] >= 0 and made["peak_memory_gb"]["main"] > 0
    errors = json.loads((quantised / "quantization.json").read_text())["layers"]
    assert len(errors) == 2 and 0 < errors[1]["fc2"]["output_error"] < 0.1


def test_one_layer_is_read_at_a_time(settings, tmp_path, monkeypatch):
    held, most = [], []

    class Counted(StoredTensors):
        def __getitem__(self, name):
            if ".layers." in name:
                held.append(name.split(".")[2])
                most.append(len(set(held[-16:])))
            return super().__getitem__(name)

    monkeypatch.setattr(run, "StoredTensors", Counted)
    quantise(dataclasses.replace(settings, quantizer="rtn", output=str(tmp_path / "out")))
    assert held == sorted(held) and len(held) == 2 * 16  # each tensor of a layer once, layer after layer
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("killed_in", ["the second layer", "its file", "the record of it"])
def test_a_stopped_run_goes_on_with_its_layer(quantised, settings, tmp_path, monkeypatch, killed_in):
    config = dataclasses.replace(settings, output=str(tmp_path / "out"))
    ran, solved = [], stream.LayerQuantizer.run

    def killed(*arguments):
        raise KeyboardInterrupt

    def counted(quantizer, batches):
        ran.append(batches[0].stream.next)
        return killed() if killed_in == "the second layer" and ran == [0, 1] else solved(quantizer, batches)

    monkeypatch.setattr(stream.LayerQuantizer, "run", counted)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if killed_in == "its file":
            patch.setattr(run.LayerLog, "add", killed)
        elif killed_in == "the record of it":
            patch.setattr(stream.Stream, "advance", killed)
        quantise(config)
    assert len(list(tmp_path.iterdir())) == 1 and not (tmp_path / "out").exists()
    quantise(config)
    assert ran == ([0, 1, 1] if killed_in == "the second layer" else [0, 0, 1])
    made = tmp_path / "out"
    assert {file.name for file in made.iterdir()} == {file.name for file in quantised.iterdir()}
    for file in quantised.glob("*.safetensors"):
        assert file.read_bytes() == (made / file.name).read_bytes()
    errors = [json.loads((folder / "quantization.json").read_text())["layers"] for folder in (made, quantised)]
    assert errors[0] == errors[1] and list(tmp_path.iterdir()) == [made]


def test_a_stopped_command_says_that_it_goes_on(settings, tmp_path, monkeypatch, capsys):
    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(stream.LayerQuantizer, "run", killed)
    words = [f"--model={settings.model}", f"--text.source={settings.text.source}", f"--output={tmp_path / 'out'}"]
    assert run_command("quantize", [*words, "--tokens=3000", "--window=64", "--device=cpu"]) == 130
    assert capsys.readouterr().err.endswith(f"interrupted by SIGINT; {GOES_ON}\n")


def error_of(arguments, capsys):
    assert exit_on_user_error(command.main, arguments) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "Traceback" not in message
    return message


def test_mistakes_are_one_line_and_leave_nothing(wide_opt, tiny_opt, text_file, quantised, tmp_path, capsys):
    output = tmp_path / "out"
    base = [f"--model={wide_opt}", f"--output={output}", "--device=cpu", f"--text.source={text_file}", "--window=64"]
    cases = {
        (f"--model={tiny_opt}",): "hidden_size that one of 128, 64, 32 divides, .* has 48",
        ("--tokens=900",): "10 tokens for each input",
        ("--window=513",): "512 positions; give --window 512, or --quantizer rtn",
        (f"--model={quantised}",): "in 4 bits already",
        (f"--output={quantised}",): "exists",
        ("--text.source=no.txt",): "no text file",
        ("--output=",): "--output is empty",
        ("--output=~/quantised",): "begins with ~",
        ("--quantizer=awq",): "gptq, rtn",
        ("--damp_mean=-1",): "damp_mean",
    }
    for change, message in cases.items():
        assert re.search(message, error_of([*base, *change], capsys)), change
    rounding = [*base, "--window=513", "--quantizer=rtn", "--check"]  # it reads no text
    assert exit_on_user_error(command.main, rounding) == 0
    capsys.readouterr()
    short = tmp_path / "short.txt"
    short.write_text((text_file.read_text()[:12000] + "\n\n") * 3)
    message = error_of([*base, f"--text.source={short}", "--tokens=960"], capsys)
    assert "needs 960" in message or "none falls" in message
    assert not output.exists() and not list(tmp_path.glob(".tmp-*"))


def test_own_text_needs_room_for_the_whole_model(wide_opt, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dejavu_train.quantize.run.free_memory", lambda: 1000)
    places = [f"--output={tmp_path / 'out'}", f"--text.cache={tmp_path / 'cache'}"]
    given = [f"--model={wide_opt}", *places, "--device=cpu"]
    assert exit_on_user_error(command.main, given) == 2
    told = capsys.readouterr()
    assert "writes its own text as a whole" in told.err and "give --text FILE or a data set" in told.err
    assert "the model writes its own text as a whole" in told.out and not (tmp_path / "out").exists()


def test_check_does_nothing(settings, tmp_path, capsys):
    command.main([f"--model={settings.model}", f"--output={tmp_path / 'out'}", "--device=cpu", "--check"])
    assert "bits a weight" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_weights_of_other_packages_are_named(wide_opt, tmp_path, capsys):
    folder = shutil.copytree(wide_opt, tmp_path / "gptq")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "gptq"}}))
    message = error_of([f"--model={folder}", f"--output={tmp_path / 'out'}", "--device=cpu"], capsys)
    assert "--text FILE, or --quantizer rtn" in message
    for action in (load_model, lambda name: check_folder(name, read_dims(name))):
        with pytest.raises(UserError, match="quantised by gptq; convert them first"):
            action(str(folder))
    for method, bits, said in (("hqq", 4, "quantised by hqq, which is not read here"), (INT4, 3, "says 3 bits")):
        config = values | {"quantization_config": {"quant_method": method, "bits": bits}}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=said):
            load_model(str(folder))
        assert re.search(said, error_of([f"--model={folder}", f"--output={tmp_path / 'out'}", "--device=cpu"], capsys))
    with pytest.raises(ValueError, match="says 3 bits"):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(UserError, match="says 3 bits"):
        export(ExportConfig(model=str(folder), output=str(tmp_path / "out")))


def test_predictors_are_trained_on_the_quantised_model(quantised, text_file, tmp_path):
    few = ("--collect.train_tokens=3000", "--mlp.steps=10", "--heads.steps=10", "--trainer.logger=false")
    train(parse_config(flags(quantised, text_file, tmp_path / "run", *few)))
    model = SparseOPTForCausalLM.from_pretrained(quantised, tmp_path / "run" / "bundle", backend="gather")
    generated = model.generate(IDS[:1], max_new_tokens=3, do_sample=False, eos_token_id=[])
    assert generated.shape == (1, IDS.shape[1] + 3)
    stored = load_file(tmp_path / "run" / "activations" / "layer_00" / "weights.safetensors")
    fc1 = load_model(str(quantised)).model.decoder.layers[0].fc1.weight
    assert any(tensor.shape == fc1.shape and torch.equal(tensor.float(), fc1) for tensor in stored.values())


def test_codes_without_their_config_are_known(quantised, tmp_path):
    folder = tmp_path / "without"
    shutil.copytree(quantised, folder)
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="codes of 4 bits are, and config.json has no quantization_config"):
        check_folder(str(folder), read_dims(str(folder)))


def test_a_link_to_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    check_output(str(tmp_path / "link"))
    with folder_aside(str(tmp_path / "link")) as aside:
        (aside.folder / "config.json").write_text("{}")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").is_file()
