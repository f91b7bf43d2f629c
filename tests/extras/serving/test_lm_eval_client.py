"""lm-eval's model local-completions against a server: its scores are those of a scorer in this process."""

import json

import pytest
from serving_helpers import NAME, Running
from task_files import PEOPLE

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from dejavu_train.extras.tasks.model import DejavuLM
from dejavu_train.models.load import load_model, load_tokenizer
from dejavu_train.sparse.model import SparseOPTForCausalLM

ITEMS = [
    {"question": f"the model reads what {who} keeps, so", "choices": [" the layer", f" {who} reads it", " a token."]}
    for who in PEOPLE
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A task of choices, one of whole texts, and one of writing, over items of our own."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps(item | {"label": i % 3}) for i, item in enumerate(ITEMS)]
    (folder / "items.jsonl").write_text("\n".join(lines))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "items.jsonl")}}}
    shared = data | {"test_split": "test", "num_fewshot": 0, "metadata": {"version": 0}}
    choices = {
        "task": "own_choices", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_choice": "choices", "doc_to_target": "label", "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    rolling = {
        "task": "own_texts", "output_type": "loglikelihood_rolling", "doc_to_text": "",
        "doc_to_target": "{{question}}", "metric_list": [{"metric": "word_perplexity"}],
    }  # fmt: skip
    writing = {
        "task": "own_writing", "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "the",
        "generation_kwargs": {"until": ["\n\n", ".", " zz", "q", "</s>"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    return [shared | each for each in (choices, rolling, writing)]


def evaluated(model, tasks, **options):
    """The answers of every task, item by item."""
    options |= {"task_manager": TaskManager(include_defaults=False)}  # reading all of lm-eval's takes seconds
    found = simple_evaluate(model, tasks=tasks, log_samples=True, bootstrap_iters=0, verbosity="ERROR", **options)
    return {
        name: [each["resps"] for each in sorted(samples, key=lambda each: each["doc_id"])]
        for name, samples in found["samples"].items()
    }


def close(answers, others):
    """Whether answers are alike. How many are compared."""
    compared = 0
    for task, rows in answers.items():
        for mine, theirs in zip(rows, others[task], strict=True):
            for (a,), (b,) in zip(mine, theirs, strict=True):
                compared += 1
                if isinstance(a, str):
                    assert a == b, task
                elif isinstance(a, tuple | list):
                    assert a[0] == pytest.approx(b[0], abs=2e-3) and a[1] == b[1], task
                else:
                    assert a == pytest.approx(b, abs=2e-3), task
    return compared


@pytest.mark.parametrize("start", ["prompt", 0])
def test_a_harness_scores_the_server_as_it_scores_the_model(tiny_opt, bundle_folder, tasks, start):
    """Dense prompts are the dense model's, by transformers. A server that is sparse from 0 on is the sparse model."""
    server = Running(tiny_opt, bundle_folder, rows=4, context=128, sparse_from=start)
    asked = {"base_url": f"{server.url}/v1/completions", "tokenizer": str(tiny_opt), "model": NAME, "max_length": 120}
    asked |= {"num_concurrent": 2, "max_retries": 1, "batch_size": 2, "add_bos_token": start == 0}  # as DejavuLM
    scored = tasks[:1] if start == 0 else tasks
    served = evaluated("local-completions", scored, model_args=asked)
    tokenizer = load_tokenizer(str(tiny_opt))
    if start == "prompt":
        local = HFLM(
            pretrained=load_model(str(tiny_opt)), tokenizer=tokenizer, max_length=120, batch_size=1, add_bos_token=False
        )
    else:
        sparse = SparseOPTForCausalLM.from_pretrained(tiny_opt, bundle_folder, "gather")
        local = DejavuLM(sparse, tokenizer, sparse_from=0, max_length=120, batch_size=1)
    found = evaluated(local, scored[:2])
    assert close({name: served[name] for name in found}, found) == len(ITEMS) * (3 if start == 0 else 4)
    if start == "prompt":
        assert all(isinstance(text[0][0], str) for text in served["own_writing"])
