"""Generation under sparsity: scores, the command end to end, its section in report.html."""

import csv
import dataclasses
import json
import math

import pytest
import torch
from bundles import make_bundle
from conftest import make_text

from dejavu_train.extras.generation import measures
from dejavu_train.extras.generation.config import GenerationConfig
from dejavu_train.extras.generation.run import compare_generation, load_prompts, main, variants
from dejavu_train.ground.errors import exit_on_user_error
from dejavu_train.models.load import load_model, load_tokenizer


@pytest.fixture(scope="module")
def bundle(tiny_opt):
    return make_bundle(tiny_opt)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(make_text(1500, seed=5), encoding="utf-8")
    return path


@pytest.fixture
def settings(tiny_opt, bundle_folder, text, tmp_path):
    values = {"model": tiny_opt, "bundle": bundle_folder, "output": tmp_path, "text": text}
    values = {name: str(value) for name, value in values.items()}
    return values | {"prompts": 3, "prompt": 12, "new_tokens": 9, "batch": 2, "device": "cpu"}


def test_score_is_the_dense_models(tiny_opt):
    model = load_model(str(tiny_opt))
    prompts, tokens = torch.randint(3, 300, (2, 5)), torch.randint(3, 300, (2, 4))
    nats, greedy = measures.score(model, prompts, tokens)
    for p in range(2):
        past = prompts[p].tolist()
        for i, token in enumerate(tokens[p].tolist()):
            with torch.no_grad():
                logits = model(torch.tensor([past])).logits[0, -1].double()
            assert nats[p, i].item() == pytest.approx(-logits.log_softmax(0)[token].item(), abs=1e-4)
            assert bool(greedy[p, i]) == (int(logits.argmax()) == token)
            past.append(token)


def test_rows_against_transformers_own_loop(settings, bundle_folder):
    """Density 1 makes the dense text. What is sparse is made by the model that a user has, and scored as such."""
    from dejavu_train import Bundle, SparseOPTForCausalLM

    config = GenerationConfig(**settings, mlp_density=(0.1, 1.0), sparse_from=("prompt",), every=())
    bundle, dense = Bundle.from_pretrained(bundle_folder), load_model(settings["model"])
    _, prompts = load_prompts(config, load_tokenizer(settings["model"]), bundle)
    dense.generation_config.update(repetition_penalty=5.0, no_repeat_ngram_size=2)  # as a folder may say
    made = list(compare_generation(config, dense, bundle, prompts, "gather"))
    rows, positions = ([row for part in made for row in part[i]] for i in (0, 1))
    by = {(row.decoding, row.asked_mlp_density): row for row in rows}
    for decoding in ("greedy", "sampled"):
        row = by[decoding, 1.0]
        assert row.agreement == 1 and row.median_divergence == 9 and row.diverged == 0 and row.change == 0
    assert by["greedy", 1.0].dense_choice == 1 and by["sampled", 1.0].dense_choice is None
    assert prompts.shape == (3, 12) and (prompts[:, 0] == 2).all()
    sparse = SparseOPTForCausalLM.from_model(load_model(settings["model"]), bundle.at(0.1), "gather", "prompt")
    texts = []
    for model in (sparse, load_model(settings["model"])):
        parts = [
            model.generate(row[None], attention_mask=torch.ones(1, 12), max_new_tokens=9, min_new_tokens=9,
                           do_sample=False, eos_token_id=None, pad_token_id=1)[:, 12:]
            for row in prompts
        ]  # fmt: skip
        texts.append(torch.cat(parts))
    row = by["greedy", 0.1]
    assert 0 < row.diverged  # else this test tells nothing
    assert row.agreement == pytest.approx(float((texts[0] == texts[1]).float().mean()))
    nats, _ = measures.score(load_model(settings["model"]), prompts, texts[0])
    assert row.perplexity == pytest.approx(math.exp(nats.mean()), rel=1e-4)
    mine = [p for p in positions if (p.decoding, p.asked_mlp_density) == ("greedy", 0.1)]
    assert [p.position for p in mine] == list(range(9))
    assert sum(p.nats for p in mine) / 9 == pytest.approx(float(nats.mean()), rel=1e-4)


def test_the_command_writes_rows_pictures_and_a_section(settings, tmp_path, capsys):
    from test_html_report import results

    from dejavu_train.evaluation.html_report import write_report
    from dejavu_train.ground.files import write_json

    flags = [f"--{name}={value}" for name, value in settings.items()]
    assert exit_on_user_error(main, [*flags, "--mlp_density", "0.1", "--every", "3", "--control", "false"]) == 0
    found = json.loads((tmp_path / "generation/generation.json").read_text())
    asked = [(row["sparse_from"], row["guard_every"]) for row in found["rows"][::2]]
    assert asked == [("prompt", 0), ("0", 0), ("prompt", 3)]
    assert 0 < found["rows"][-1]["retained_mass"] <= 1 and found["rows"][0]["retained_mass"] is None
    with open(tmp_path / "generation/positions.csv", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 9 * len(found["rows"])
    assert "greedy prompt 3 still" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "generation" / "generation.svg").read_text().count("<use ") > 50
    write_json(tmp_path / "results.json", results())
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert (
        "<h2>Generation</h2>" in page and 'alt="Generation under sparsity"' in page and "3 prompts of 12 tokens" in page
    )


def test_what_is_compared(bundle_folder):
    from dejavu_train import Bundle

    bundle = Bundle.from_pretrained(bundle_folder)
    asked = variants(GenerationConfig(mlp_density=(0.1,), every=(8, 16)), bundle)
    assert [(v.sparse_from, v.guard_every, v.thresholds) for v in asked] == [
        ("prompt", 0, "still"), ("0", 0, "still"), ("prompt", 8, "still"), ("prompt", 16, "still"),
        ("prompt", 8, "moved"), ("prompt", 16, "moved"),
    ]  # fmt: skip
    as_it_is = GenerationConfig(every=(8,))  # of a bundle that is dense there is nothing to guard
    assert [(v.asked_mlp_density, v.guard_every) for v in variants(as_it_is, bundle)] == [(None, 0), (None, 0)]
    fixed = variants(as_it_is, bundle.at(0.1, top_k=True))
    assert [(v.guard_every, v.thresholds) for v in fixed] == [(0, "still"), (0, "still"), (8, "still")]
    heads = dataclasses.replace(bundle, specs={k: v for k, v in bundle.specs.items() if k[1] == "heads"})
    assert {v.asked_mlp_density for v in variants(GenerationConfig(mlp_density=(0.1,)), heads)} == {None}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"every": "1"}, "guard.every must be at least 2"),
        ({"every": "0"}, "--every must be at least 2, got 0"),
        ({"mlp_density": "0"}, "must lie above 0"),
        ({"decodings": "beam"}, "decodings is no option any more, it is always [greedy, sampled], got beam"),
        ({"new_tokens": "600"}, "exceed the model's 512 positions"),
        ({"prompts": "500"}, "prompts of 12 tokens, not 500"),
        ({"temperature": "0"}, "--temperature must lie in 1e-06 to"),
        ({"bundle": "nowhere"}, "nowhere"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(settings, tmp_path, capfd, changes, told):
    assert exit_on_user_error(main, [f"--{name}={value}" for name, value in (settings | changes).items()]) == 2
    message = capfd.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ") and told in message
    assert not (tmp_path / "generation").exists()
