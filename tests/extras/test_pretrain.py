"""pretrain.py: the tokenizer's ids, the forward pass against transformers, resuming, and a whole tiny run."""

import numpy as np
import pytest
import torch
from conftest import make_text

from dejavu_train.data.paragraphs import read_paragraph_hashes
from dejavu_train.extras.pretrain import run as module
from dejavu_train.extras.pretrain.run import PretrainConfig, pretrain
from dejavu_train.extras.pretrain.stream import RowSampler
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model, load_tokenizer


def _config(output, text, **changes) -> PretrainConfig:
    values = {
        "output": str(output), "text": (str(text),), "heldout": (str(text),), "vocab_size": 320, "d_model": 32,
        "n_layers": 2, "n_heads": 2, "d_ffn": 64, "max_positions": 64, "context": 32, "batch_rows": 4, "steps": 6,
        "warmup_steps": 2, "checkpoint_seconds": 0.0, "device": "cpu",
    }  # fmt: skip
    return PretrainConfig(**values | changes)


@pytest.fixture
def small_text(tmp_path):
    path = tmp_path / "small.txt"
    path.write_text(make_text(3000), encoding="utf-8")
    return path


def test_tokenizer_has_opts_special_ids():
    tokenizer = module.train_tokenizer([make_text(500)], 300)
    assert tokenizer.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>"]) == [0, 1, 2, 3]
    assert tokenizer("the model")["input_ids"][0] == 2
    text = "odd  spacing\n\tand ünïcode \u2603"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_sampler_is_a_function_of_the_step():
    stream = torch.arange(1000).to(torch.int32)
    one, two = (RowSampler(stream, context=16, rows=4, seed=3) for _ in range(2))
    one(0)
    assert torch.equal(one(40), two(40))
    assert (one(7)[:, 0] == 2).all() and one(7).shape == (4, 17)
    with pytest.raises(UserError, match="fewer than one sequence"):
        RowSampler(stream[:20], context=16, rows=1, seed=0)


def test_run_writes_a_whole_model_and_resumes_exactly(tmp_path, small_text, monkeypatch):
    straight = pretrain(_config(tmp_path / "straight", small_text))
    saves = []
    original = module.save_state

    def kill_at_third_save(path, state):
        saves.append(path)
        if len(saves) == 3:
            raise KeyboardInterrupt
        original(path, state)

    monkeypatch.setattr(module, "save_state", kill_at_third_save)
    with pytest.raises(KeyboardInterrupt):
        pretrain(_config(tmp_path / "cut", small_text))
    assert not (tmp_path / "cut" / "config.json").exists()
    monkeypatch.setattr(module, "save_state", original)
    with pytest.raises(UserError, match="begun with d_ffn 64, not 96"):
        pretrain(_config(tmp_path / "cut", small_text, d_ffn=96))
    resumed = pretrain(_config(tmp_path / "cut", small_text))

    whole, cut = load_model(str(straight)), load_model(str(resumed))
    for (name, expected), got in zip(whole.state_dict().items(), cut.state_dict().values(), strict=True):
        torch.testing.assert_close(got, expected, msg=name)
    assert load_tokenizer(str(resumed)).bos_token_id == 2
    hashes = read_paragraph_hashes(str(resumed))
    assert hashes is not None and len(hashes) > 10 and (np.diff(hashes.astype(np.int64)) > 0).all()


def test_l1_makes_the_model_sparser(tmp_path, small_text):
    metrics = {}
    for l1 in (0.0, 5.0):
        output = pretrain(_config(tmp_path / str(l1), small_text, l1=l1, steps=60, learning_rate=1e-2))
        model = load_model(str(output))
        metrics[l1] = module.bits_per_byte(model, load_tokenizer(str(output)), [make_text(200)], 32)
    assert sum(metrics[5.0]["density"]) < 0.8 * sum(metrics[0.0]["density"])
    assert metrics[5.0]["bits_per_byte"] < 6


def test_needs_an_end_and_a_known_optimizer(tmp_path, small_text):
    with pytest.raises(UserError, match="--steps"):
        pretrain(_config(tmp_path, small_text, steps=None))
    with pytest.raises(UserError, match="one of muon, adamw"):
        module.main(["--output", str(tmp_path), "--text", str(small_text), "--optimizer", "sgd"])
