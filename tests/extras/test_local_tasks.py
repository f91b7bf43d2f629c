"""Tasks from local files ask what lm-eval's own tasks ask, given the same record. Malformed files are one line."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import REPOSITORY
from task_files import PEOPLE, records, write_task_files

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

import lm_eval.tasks
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from dejavu_train.extras.tasks.config import TASKS, AskedOptions
from dejavu_train.extras.tasks.local_files import read_records
from dejavu_train.extras.tasks.tasks import find_tasks
from dejavu_train.ground.errors import UserError

HARNESS = Path(lm_eval.tasks.__file__).parent
OWN = {
    "cb": "super_glue/cb/default.yaml",
    "copa": "super_glue/copa/default.yaml",
    "rte": "super_glue/rte/default.yaml",
    "lambada": "lambada/lambada_openai.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "wikitext": "wikitext/wikitext.yaml",
    "c4": "c4/c4.yaml",
}


def file_of(name):
    return load_yaml(REPOSITORY / f"configs/tasks/local_{name}.yaml", resolve_func=False)["dataset_kwargs"]["file"]


FILES = {name: file_of(name) for name in OWN}


def as_on_the_hub(name, record):
    """A record of our files with the fields that the hub's set has, made by hand."""
    if name == "cb":
        return {**record, "label": ["entailment", "contradiction", "neutral"].index(record["label"])}
    if name == "rte":
        return {**record, "label": ["entailment", "not_entailment"].index(record["label"])}
    if name == "openbookqa":
        offered = record["question"]["choices"]
        choices = {"text": [c["text"] for c in offered], "label": [c["label"] for c in offered]}
        return {"question_stem": record["question"]["stem"], "choices": choices, "answerKey": record["answerKey"]}
    if name == "hellaswag":
        label, rest = record["ctx"].split(": ", 1)
        first, second = rest.rsplit(". ", 1)
        parts = {"activity_label": label, "ctx_a": first + ".", "ctx_b": second}
        return {**parts, "endings": record["endings"], "label": str(record["label"])}
    return record


def own_task(name, docs):
    """lm-eval's own task, with our records in place of the hub's."""
    config = load_yaml(HARNESS / OWN[name])
    sets = {split: Dataset.from_list(docs) for split in ("train", "validation", "test")}
    return ConfigurableTask(config={**config, "custom_dataset": lambda **_: sets, "dataset_kwargs": None})


def local_task(name, folder):
    manager, chosen = find_tasks([name], AskedOptions(folder=str(folder)))
    return manager.load(list(chosen.values()))["tasks"][chosen[name]]


def requests(task, shots=0, number=2):
    """What the model is asked of the first documents: (context, continuation), or (text,)."""
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(7)
    task.build_all_requests(limit=number)
    return [instance.args for instance in task.instances]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_task_files(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("name", sorted(OWN))
def test_the_same_record_makes_the_same_prompt(folder, name):
    if name == "wikitext":
        text = (folder / FILES[name]).read_text()
        starts = [text.index(f" = {who} = ") for who in PEOPLE]
        docs = [{"page": text[a:b]} for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    else:
        docs = [as_on_the_hub(name, record) for record in records()[FILES[name]]]
    mine, own = local_task(name, folder), own_task(name, docs)
    assert requests(mine) == requests(own)
    targets = [[task.doc_to_target(doc) for doc in task.eval_docs] for task in (mine, own)]
    assert list(map(str, targets[0])) == list(map(str, targets[1]))


@pytest.mark.parametrize("name", TASKS)
def test_five_shots_are_rendered_alike_and_never_hold_the_question(folder, name):
    docs = [as_on_the_hub(name, record) for record in records()[FILES[name]]]
    mine, own = local_task(name, folder), own_task(name, docs)
    shown = list(mine.sampler.df)[:5]
    for task, examples in (
        (mine, shown),
        (own, [dict(doc) for doc in own.training_docs() or own.eval_docs][:5] if name != "copa" else shown),
    ):
        task.sampler.sample = lambda n, eval_doc=None, examples=examples: examples[:n]
    assert requests(mine, 5) == requests(own, 5)
    fresh = local_task(name, folder)
    asked = requests(fresh, 0, 3)
    for (context, *_), (shots, *_) in zip(asked, requests(fresh, 2, 3), strict=True):
        assert shots.endswith(context) and shots.count(context) == 1, "the question stands once, at the end"


def test_hellaswag_reads_the_published_fields_as_well(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    published = [as_on_the_hub("hellaswag", record) for record in records()[FILES["hellaswag"]]]
    lines = [json.dumps({**record, "label": int(record["label"])}) for record in published]
    (tmp_path / FILES["hellaswag"]).write_text("\n".join(lines))
    assert requests(local_task("hellaswag", tmp_path)) == requests(local_task("hellaswag", folder))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not JSON"),
        ('{"goal": "a", "sol1": "b", "sol2": "c"}', "line 2: there is no 'label'"),
        ('{"goal": "a", "sol1": "b", "sol2": "c", "label": 2}', "line 2 is no record of this task"),
        ('{"goal": 1, "sol1": "b", "sol2": "c", "label": 1}', "line 2 is no record of this task"),
        ("[1]", "line 2 is no record of this task"),
    ],
)
def test_a_malformed_line_is_named(folder, tmp_path, line, said):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / FILES["piqa"]
    path.write_text(path.read_text().splitlines()[0] + "\n" + line + "\n")
    with pytest.raises(UserError, match=said):
        local_task("piqa", tmp_path)


def test_missing_folder_file_and_task(folder, tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        local_task("piqa", tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"there is no file .*piqa_valid.jsonl"):
        local_task("piqa", tmp_path)
    with pytest.raises(UserError, match="there is no task sudoku"):
        local_task("sudoku", folder)
    with pytest.raises(UserError, match="holds no records"):
        (tmp_path / "empty.jsonl").touch()
        read_records(str(tmp_path), "empty.jsonl", dict)
