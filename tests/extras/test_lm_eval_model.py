"""The model `dejavu` of lm-eval: scores are those of a plain loop, on every backend. The command line ends to end."""

import dataclasses
import json

import pytest
import torch
from bundles import make_bundle
from conftest import REPOSITORY, make_text
from family_models import save_family
from task_files import write_task_files

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from dejavu_train import SparseForCausalLM
from dejavu_train.bundle.selector import PredictorSelector
from dejavu_train.extras.tasks import run as run_module
from dejavu_train.extras.tasks.config import TASKS, TasksConfig
from dejavu_train.extras.tasks.model import DejavuLM, ModelSpec
from dejavu_train.extras.tasks.run import read_config
from dejavu_train.ground.errors import UserError, exit_on_user_error
from dejavu_train.models.load import load_model, load_tokenizer
from dejavu_train.sparse.masked import masking

PAIRS = [
    ("the model reads a token", " and the layer keeps only those rows"),
    ("the model reads a token", " and"),
    ("the model reads a token", " while"),
    ("", "quality holds"),
    ("most neurons of a rectified network stay", " silent on any one word of the text"),
]


def instances(kind, arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_task_files(tmp_path_factory.mktemp("data"))


def lm_of(tiny_opt, bundle, backend, sparse_from=0, **options):
    dense, tokenizer = load_model(str(tiny_opt)), load_tokenizer(str(tiny_opt))
    model = dense
    if backend != "dense":
        ops = {"ops": "reference"} if backend == "triton" else {}
        model = SparseForCausalLM.from_model(dense, bundle, backend, sparse_from, **ops)
    return DejavuLM(model, sparse_from=sparse_from, tokenizer=tokenizer, **options)


@torch.no_grad()
def plain_scores(tiny_opt, bundle, sparse_from):
    """One request at a time, through the masked forward pass, without padding, caches or sharing."""
    model, tokenizer = load_model(str(tiny_opt)), load_tokenizer(str(tiny_opt))
    scores = []
    for context, continuation in PAIRS:
        known = tokenizer(context)["input_ids"]
        ids = torch.tensor([tokenizer(context + continuation)["input_ids"]])
        assert ids[0, : len(known)].tolist() == known
        if bundle is None:
            logits = model(ids).logits[0]
        else:
            start = len(known) if sparse_from == "prompt" else sparse_from
            sparse = torch.arange(ids.shape[1])[None] >= start
            with masking(model, PredictorSelector(bundle, "cpu", model), sparse):
                logits = model(ids).logits[0]
        nats = 0.0
        for place in range(len(known), ids.shape[1]):
            nats += float(logits[place - 1].double().log_softmax(-1)[ids[0, place]])
        greedy = [int(logits[place - 1].argmax()) == int(ids[0, place]) for place in range(len(known), ids.shape[1])]
        scores.append((nats, all(greedy)))
    return scores


@pytest.mark.parametrize("sparse_from", [0, "prompt"])
@pytest.mark.parametrize("backend", ["dense", "mask", "gather", "triton"])
def test_log_likelihoods_are_those_of_a_plain_loop(tiny_opt, bundle, backend, sparse_from):
    expected = plain_scores(tiny_opt, None if backend == "dense" else bundle, sparse_from)
    lm = lm_of(tiny_opt, bundle, backend, sparse_from, batch_size=3)
    got = lm.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    for (nats, greedy), (wanted, wanted_greedy) in zip(got, expected, strict=True):
        assert nats == pytest.approx(wanted, abs=1e-3)
        assert greedy == wanted_greedy


@pytest.mark.parametrize("sparse_from", [0, "prompt"])
@pytest.mark.parametrize("backend", ["dense", "mask"])
def test_answers_behind_one_context_score_as_alone(tiny_opt, bundle, backend, sparse_from):
    words = make_text(400).split()
    pairs = []
    for question in range(6):  # four answers of other lengths each; two end in another last token alone
        context = " ".join(words[40 * question : 40 * question + 4 + 4 * question])
        ends = [words[40 * question + 30 : 40 * question + 31 + n] for n in (0, 1, 5)]
        pairs += [(context, " " + " ".join(end)) for end in [*ends, [*ends[1][:-1], "silent"]]]
    pairs += [(" ".join(words[:200]), " and a context that is cut"), (words[0], f" {words[1]} reads")]
    pairs.append((f"{words[0]} {words[1]}", " reads"))  # the same tokens, of which fewer are asked for
    lm = lm_of(tiny_opt, bundle, backend, sparse_from)
    got = lm.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    for pair, (nats, greedy) in zip(pairs, got, strict=True):
        ((wanted, wanted_greedy),) = lm.loglikelihood(instances("loglikelihood", [pair]), disable_tqdm=True)
        assert nats == pytest.approx(wanted, abs=1e-4) and greedy == wanted_greedy


@pytest.mark.parametrize("backend", ["dense", "mask", "gather"])
def test_answers_of_bloom_are_scored(tmp_path, backend):
    """Its class takes no mask of branches, and no positions."""
    folder = save_family("bloom", tmp_path / "bloom")
    bundle = make_bundle(folder).at(0.4, 0.5)
    asked = instances("loglikelihood", PAIRS[:3])
    got = lm_of(folder, bundle, backend).loglikelihood(asked, disable_tqdm=True)
    for request, (nats, _) in zip(asked, got, strict=True):
        alone = lm_of(folder, bundle, backend).loglikelihood([request], disable_tqdm=True)
        assert nats == pytest.approx(alone[0][0], abs=1e-4)


@pytest.mark.parametrize(("name", "key"), [("drelu", "sliding_window"), ("bloom", "seq_length")])
def test_windows_are_as_long_as_the_family_says(tmp_path, name, key):
    """Of a sliding window, and of a size that lm-eval does not know."""
    lm = lm_of(save_family(name, tmp_path, **{key: 32}), make_bundle(tmp_path).at(1.0, 1.0), "gather")
    asked = instances("loglikelihood", [(make_text(60, seed=1), " and the token")])
    assert lm.max_length == 32 and lm.loglikelihood(asked, disable_tqdm=True)[0][0] < 0


def test_a_long_text_stands_behind_one_start_token_and_is_scored_once(tiny_opt, bundle):
    lm = lm_of(tiny_opt, bundle, "mask", 0, max_length=64)
    text = make_text(150)
    (total,) = lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]), disable_tqdm=True)
    ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == lm.count_tokens(text) > 128
    expected = 0.0
    with torch.no_grad():
        for start in range(0, len(ids), 64):
            part = ids[start : start + 64]
            before = [2] if start == 0 else ids[max(0, start + len(part) - 65) : start]
            window = torch.tensor([[*before, *part]])
            logits = lm.model(window).logits[0].double().log_softmax(-1)
            for place in range(len(before), window.shape[1]):
                expected += float(logits[place - 1, window[0, place]])
    assert total == pytest.approx(expected, abs=1e-2)


def test_a_context_that_is_too_long_loses_its_beginning(tiny_opt, bundle):
    lm = lm_of(tiny_opt, bundle, "mask", 0, max_length=32)
    long = make_text(80).strip()
    assert len(lm.tok_encode(long)) > 33
    (got,) = lm.loglikelihood(instances("loglikelihood", [(long, " token")]), disable_tqdm=True)
    ids = torch.tensor([lm.tok_encode(long + " token")[-33:]])
    with torch.no_grad():
        logits = lm.model(ids[:, :-1]).logits[0, -1].double().log_softmax(-1)
    assert got[0] == pytest.approx(float(logits[ids[0, -1]]), abs=1e-3)


@pytest.mark.parametrize("backend", ["mask", "gather", "triton"])
def test_generation_stops_where_lm_eval_wants(tiny_opt, bundle, backend):
    lm = lm_of(tiny_opt, bundle, backend, "prompt", batch_size=2)
    asked = [("the model reads a token", {"until": [], "max_gen_toks": 12, "do_sample": False})]
    (text,) = lm.generate_until(instances("generate_until", asked), disable_tqdm=True)
    assert text
    letter = text[len(text) // 2]
    asked = [("the model reads a token", {"until": [letter], "max_gen_toks": 12, "do_sample": False})]
    (cut,) = lm.generate_until(instances("generate_until", asked), disable_tqdm=True)
    assert cut == text[: text.index(letter)]


def test_lossless_generation_is_the_dense_models(tiny_opt, bundle):
    """Prompts of different lengths in one batch, which an engine continues in turn."""
    asked = [
        ("the model", {"until": [], "max_gen_toks": 12, "do_sample": False}),
        ("the model reads a token", {"until": [], "max_gen_toks": 12, "do_sample": False}),
    ]
    lm = lm_of(tiny_opt, bundle, "cpu", "prompt", lossless=True)
    texts = lm.generate_until(instances("generate_until", asked), disable_tqdm=True)
    assert lm.model.lossless_report()["drafted"] > 0
    dense = DejavuLM(load_model(str(tiny_opt)), load_tokenizer(str(tiny_opt)), batch_size=2)
    assert texts == dense.generate_until(instances("generate_until", asked), disable_tqdm=True)
    lm = lm_of(tiny_opt, bundle, "gather", "prompt", lossless=True)
    with pytest.raises(UserError, match="needs an engine"):
        lm.generate_until(instances("generate_until", asked), disable_tqdm=True)


def test_the_registered_model_answers_and_its_answers_are_cached(tiny_opt, bundle_folder, data, tmp_path):
    assert get_model("dejavu") is DejavuLM
    arguments = f"pretrained={tiny_opt},predictors={bundle_folder},backend=mask,mlp_density=0.3,head_density=0.75"
    from lm_eval.tasks import TaskManager

    manager = TaskManager(
        include_path=str(REPOSITORY / "configs/tasks"), include_defaults=False, metadata={"folder": str(data)}
    )
    asked = {"tasks": ["local_piqa", "local_wikitext"], "task_manager": manager, "bootstrap_iters": 0, "limit": 4}
    found = [
        simple_evaluate("dejavu", f"{arguments},sparse_from=0", use_cache=str(tmp_path / "answers"), **asked)
        for _ in range(2)
    ]
    for task in ("local_piqa", "local_wikitext"):
        answers = [[sample["filtered_resps"] for sample in one["samples"][task]] for one in found]
        assert answers[0] == answers[1]
    assert (tmp_path / "answers_rank0.db").is_file()
    assert found[0]["config"]["backend"] == "mask" and found[0]["config"]["mlp"] == pytest.approx(0.3, abs=0.02)


def test_the_command_line_writes_rows_samples_and_a_table(tiny_opt, bundle_folder, data, tmp_path, capsys):
    flags = [
        f"--config={REPOSITORY / 'configs/eval/opt-mini.yaml'}",
        f"--model={tiny_opt}",
        f"--bundle={bundle_folder}",
    ]
    flags += [f"--folder={data}", f"--output={tmp_path}", "--limit=3"]
    flags += ["--text=[wikitext, c4, prose]", "--shots=[0, 1]", "--log_samples=true", "--device=cpu"]
    assert exit_on_user_error(run_module.main, flags) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    rows = {(row["task"], row["shots"], row["metric"]): row for row in found["rows"]}
    assert {(task, shots, "acc") for task in (*TASKS, "mean") for shots in (0, 1)} <= set(rows)
    for task in ("lambada", "wikitext", "c4", "prose"):
        assert rows[task, 0, "perplexity"]["examples"] == 3
    assert "| mean | 1 | acc | 24 |" in capsys.readouterr().out
    # Two figures again, from what was logged, in plain arithmetic.
    logged = {
        name: [json.loads(line) for line in (tmp_path / f"samples_piqa_0_{name}.jsonl").read_text().splitlines()]
        for name in ("dense", "sparse")
    }
    right = {name: 0 for name in logged}
    flipped = 0
    for dense, sparse in zip(logged["dense"], logged["sparse"], strict=True):
        chosen = {}
        for name, sample in (("dense", dense), ("sparse", sparse)):
            first, second = (float(answer[0]) for answer in sample["filtered_resps"])
            chosen[name] = int(second > first)
            right[name] += chosen[name] == sample["doc"]["label"]
        flipped += chosen["dense"] != chosen["sparse"]
    row = rows["piqa", 0, "acc"]
    assert (row["value"], row["dense"], row["flips"]) == (right["sparse"] / 3, right["dense"] / 3, flipped / 3)


def test_mistakes_are_one_line_and_exit_code_2(tiny_opt, bundle, bundle_folder, data, tmp_path, capsys):
    from conftest import save_tiny_opt

    other = save_tiny_opt(tmp_path / "other", num_hidden_layers=1)
    common = [f"--model={tiny_opt}", f"--bundle={bundle_folder}"]
    common += [f"--folder={data}", "--device=cpu", "--limit=2", f"--output={tmp_path / 'out'}", "--shots=[0]"]
    broken = write_task_files(tmp_path / "broken")
    (broken / "tasks/piqa_valid.jsonl").write_text("{}\n")
    mistakes = {
        "there is no task sudoku": ["--tasks=[sudoku]"],
        "there is no folder": ["--folder=nowhere"],
        "line 1: there is no": [f"--folder={broken}", "--tasks=[piqa]"],
        "n_layers": [f"--model={other}"],
        "there is no model folder": ["--model=./nowhere"],
        "there is no bundle folder": ["--bundle=./nowhere"],
        "tasks_": ["--tasks_=1"],
        "--limit": ["--limit=0"],
        "density must lie": ["--mlp_density=2"],
        "backend must be one of": ["--backend=fast"],
        "batch_size": ["--batch_size=many"],
        "prompt or a position, got -3": ["--sparse_from=-3"],
        "takes its examples from 8 records": ["--tasks=[piqa]", "--shots=[8]"],
    }
    if not torch.cuda.is_available():
        mistakes["sees no GPU"] = ["--device=cuda"]
    for said, flags in mistakes.items():
        merged = {flag.split("=")[0]: flag for flag in (*common, *flags)}  # a list that is repeated would grow
        assert exit_on_user_error(run_module.main, list(merged.values())) == 2, said
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and said in lines[0], (said, lines)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="bundle"):
        DejavuLM.load(ModelSpec(str(tiny_opt), backend="mask"))
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="sees no GPU"):
            DejavuLM.load(ModelSpec(str(tiny_opt), backend="dense", device="cuda"))


def test_answers_are_kept_for_one_model_and_one_bundle(tiny_opt, bundle, bundle_folder, tmp_path):
    """Two bundles of the same densities give other answers, and so do weights that were changed in their folder."""
    moved = next(key for key in bundle.specs if key[1] == "mlp")
    threshold = bundle.specs[moved].threshold
    spec = dataclasses.replace(bundle.specs[moved], threshold=0.5 if threshold is None else threshold + 1)
    other = dataclasses.replace(bundle, specs=bundle.specs | {moved: spec})
    (tmp_path / "other").mkdir()
    other.save_pretrained(tmp_path / "other")
    same, changed = (
        DejavuLM.load(ModelSpec(str(tiny_opt), str(f), "mask")).identity for f in (bundle_folder, tmp_path / "other")
    )
    assert same["mlp"] == changed["mlp"] and same != changed
    assert same == DejavuLM.load(ModelSpec(str(tiny_opt), str(bundle_folder), "mask")).identity
    assert "weight_hash" in DejavuLM.load(ModelSpec(str(tiny_opt), backend="dense")).identity


def test_the_configuration_is_read():
    read = read_config(TasksConfig, [f"--config={REPOSITORY / 'configs/eval/opt-mini.yaml'}"], "")
    assert read == TasksConfig(), "the file spells the defaults out"
