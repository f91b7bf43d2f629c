"""What infer.py and other commands of a bundle need to know: the model, where results go, what is refused at once."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dejavu_train.evaluation.check import check
from dejavu_train.evaluation.command import main as infer
from dejavu_train.evaluation.config import InferConfig
from dejavu_train.ground.errors import UserError, exit_on_user_error


def test_results_lie_beside_the_bundle(tmp_path, monkeypatch):
    (tmp_path / "mine" / "bundle").mkdir(parents=True)
    assert InferConfig(bundle=str(tmp_path / "mine" / "bundle")).output == str(tmp_path / "mine")
    assert InferConfig(bundle="someone/opt-bundle").output == "checkpoints/opt-bundle"
    (tmp_path / "mine" / "bundle" / "bundle.json").write_text('{"model": "someone/opt"}')
    monkeypatch.chdir(tmp_path / "mine")
    assert Path(InferConfig(bundle="bundle").output) == Path(".")
    assert InferConfig(bundle="bundle", output="x").output == "x"
    assert InferConfig(bundle="bundle").model == "someone/opt"
    assert InferConfig(bundle="bundle", model="another").model == "another"


def test_a_bundle_that_does_not_say_its_model_wants_one(tmp_path):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    save_file({"a": torch.zeros(1)}, bundle / "predictors.safetensors")
    for text in ("[]", "{}", '{"model": 3}'):
        (bundle / "bundle.json").write_text(text)
        with pytest.raises(UserError, match="must hold keys and values" if text == "[]" else "give --model"):
            check(InferConfig(bundle=str(bundle)))


def commands_of_a_bundle():
    from dejavu_train.extras.generation import run as generation
    from papers.deja_vu.observe import __main__ as observe
    from papers.deja_vu.observe.config import ObserveConfig

    found = [(InferConfig, infer), (generation.GenerationConfig, generation.main), (ObserveConfig, observe.main)]
    if importlib.util.find_spec("lm_eval"):
        from dejavu_train.extras.tasks import run
        from papers.deja_vu import tables as paper

        found += [(run.TasksConfig, run.main), (paper.PaperConfig, paper.main)]
    return found


@pytest.mark.parametrize(("config", "command"), commands_of_a_bundle())
def test_every_command_of_a_bundle_takes_its_model(config, command, tmp_path):
    (tmp_path / "bundle.json").write_text('{"model": "someone/opt"}')
    assert config(bundle=str(tmp_path)).model == "someone/opt"
    assert config(bundle=str(tmp_path), model="another").model == "another"
    with pytest.raises(UserError, match="there is no bundle folder"):
        command(["--bundle", str(tmp_path / "none")])
    save_file({"a": torch.zeros(1)}, tmp_path / "predictors.safetensors")
    (tmp_path / "bundle.json").write_text("{}")
    with pytest.raises(UserError, match="give --model"):
        command(["--bundle", str(tmp_path)])


def test_an_observation_without_a_bundle_wants_a_model():
    from papers.deja_vu.observe import __main__ as observe

    with pytest.raises(UserError, match="give --model"):
        observe.main(["--bundle", "null"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--wandb=a/b"], "--wandb 'a/b' cannot be a project's name: .*cannot contain"),
        (["--wandb="], "--wandb is empty"),
        (["--timing_backends=cpu", "--batch=9"], "--timing_backends cpu times 1 to 8 rows at once, got --batch 9"),
        (["--device_map=nonsense"], "--device_map must be one of auto, balanced"),
    ],
)
def test_infer_refuses_before_it_measures(tiny_opt, bundle_folder, text_file, tmp_path, capsys, flags, words):
    base = [f"--model={tiny_opt}", f"--bundle={bundle_folder}", f"--text={text_file}", "--window=64"]
    base += [f"--output={tmp_path / 'out'}", "--prompt=8", "--new_tokens=4", "--device=cpu"]
    for only_check in ([], ["--check"]):
        assert exit_on_user_error(infer, [*base, *flags, *only_check]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
        assert len(lines) == 1 and re.search(words, lines[0]), lines
    assert not (tmp_path / "out").exists()
