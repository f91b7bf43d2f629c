"""Reads task records from local files into the fields that lm-eval's own tasks have: no hub, the same prompts.

Each function is the ``custom_dataset`` of a task of configs/tasks. It gets ``folder`` (lm-eval's ``--metadata``) and
``file`` (the task's own ``dataset_kwargs``). A line is a JSON object with the field names that the set was published
with. Labels that are words become the numbers of the hub's sets.
"""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset

from dejavu_train.ground.errors import UserError

Record = dict[str, Any]
CB_LABELS = {"entailment": 0, "contradiction": 1, "neutral": 2}
RTE_LABELS = {"entailment": 0, "not_entailment": 1}
HEADING = re.compile(r"^ = ([^=].*[^=]|[^=]) = ?$", re.MULTILINE)


def cb(folder: str | None = None, file: str = "", **_: Any) -> dict[str, Dataset]:
    return _test_set(folder, file, lambda r: {**_texts(r, "premise", "hypothesis"), "label": CB_LABELS[r["label"]]})


def rte(folder: str | None = None, file: str = "", **_: Any) -> dict[str, Dataset]:
    return _test_set(folder, file, lambda r: {**_texts(r, "premise", "hypothesis"), "label": RTE_LABELS[r["label"]]})


def copa(folder: str | None = None, file: str = "", train_file: str = "", **_: Any) -> dict[str, Dataset]:
    """Few-shot examples come from ``train_file``, less the questions of ``file`` that it repeats."""

    def convert(r: Record) -> Record:
        if r["question"] not in ("cause", "effect"):
            raise ValueError("the field question must be cause or effect")
        return {**_texts(r, "premise", "choice1", "choice2", "question"), "label": _whole(r["label"], 2)}

    test = read_records(folder, file, convert)
    train = [record for record in read_records(folder, train_file, convert) if record not in test]
    return {"test": Dataset.from_list(test), "train": Dataset.from_list(train)}


def openbookqa(folder: str | None = None, file: str = "", **_: Any) -> dict[str, Dataset]:
    def convert(r: Record) -> Record:
        offered = r["question"]["choices"]
        choices = {name: [str(choice[name]) for choice in offered] for name in ("text", "label")}
        if r["answerKey"] not in choices["label"]:
            raise ValueError("answerKey is none of the labels")
        return {"question_stem": r["question"]["stem"], "choices": choices, "answerKey": r["answerKey"]}

    return _test_set(folder, file, convert)


def piqa(folder: str | None = None, file: str = "", **_: Any) -> dict[str, Dataset]:
    return _test_set(folder, file, lambda r: {**_texts(r, "goal", "sol1", "sol2"), "label": _whole(r["label"], 2)})


def winogrande(folder: str | None = None, file: str = "", **_: Any) -> dict[str, Dataset]:
    def convert(r: Record) -> Record:
        if "_" not in r["sentence"] or r["answer"] not in ("1", "2"):
            raise ValueError("a sentence with _ and an answer 1 or 2 are needed")
        return _texts(r, "sentence", "option1", "option2", "answer")

    return _test_set(folder, file, convert)


def hellaswag(folder: str | None = None, file: str = "", **_: Any) -> dict[str, Dataset]:
    """Records as published (activity_label, ctx_a, ctx_b), or with both parts joined and cleaned in ``ctx``.

    Of a joined context the words behind its last full stop are taken for ctx_b, whose first letter lm-eval makes a
    capital one.
    """

    def convert(r: Record) -> Record:
        from lm_eval.tasks.hellaswag.utils import preprocess

        if "ctx" in r and "ctx_b" not in r:
            *before, last = re.split(r"(?<=[.!?]) (?=[^.!?]*$)", r["ctx"], maxsplit=1)
            query = " ".join([*before, last.capitalize()]) if before else last
        else:
            query = preprocess(f"{r['activity_label']}: {r['ctx_a']} {r['ctx_b'].capitalize()}")
        endings = [preprocess(ending) for ending in r["endings"]]
        return {"query": query, "choices": endings, "label": str(_whole(r["label"], len(endings)))}

    return _test_set(folder, file, convert)


def wikitext(folder: str | None = None, file: str = "", **_: Any) -> dict[str, Dataset]:
    """The raw release as one file, cut at its ``= Title =`` lines: a page is a document."""
    text = _read(_path(folder, file))
    starts = [heading.start() for heading in HEADING.finditer(text)]
    if not starts:
        raise UserError(f"{file} in {folder} has no line ' = Title = '; give the raw release of WikiText")
    pages = [text[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    return {"test": Dataset.from_list([{"page": page} for page in pages])}


def prose(folder: str | None = None, file: str = "", **_: Any) -> dict[str, Dataset]:
    """JSONL with a field ``text``, as C4 and LAMBADA are published. ``.gz`` is unpacked."""
    return _test_set(folder, file, lambda r: _texts(r, "text"))


lambada = prose


def read_records(folder: str | None, file: str, convert: Callable[[Record], Record]) -> list[Record]:
    """All records of a JSONL file.

    Raises:
        UserError: no folder or file, or a line that is no record of this task, with its number.
    """
    path = _path(folder, file)
    records = []
    for number, line in enumerate(_read(path).split("\n"), 1):  # a text may hold other ends of lines
        if not line.strip():
            continue
        try:
            records.append(convert(json.loads(line)))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number} is not JSON ({error.msg}); mend or remove the line") from None
        except KeyError as error:
            raise UserError(f"{path}, line {number}: there is no {error}; mend or remove the line") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path}, line {number} is no record of this task ({error}); mend the line") from None
    if not records:
        raise UserError(f"{path} holds no records; fetch the file again")
    return records


def _test_set(folder: str | None, file: str, convert: Callable[[Record], Record]) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(read_records(folder, file, convert))}


def _path(folder: str | None, file: str) -> Path:
    if folder is None:
        raise UserError(
            'local tasks need the folder of their files: folder in the config, or --metadata {"folder": ...}'
        )
    path = Path(folder) / file
    if not path.is_file():
        raise UserError(f"there is no file {path}; configs/tasks names the file of each task")
    return path


def _read(path: Path) -> str:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise UserError(f"{path} is not readable text ({error}); fetch the file again") from None


def _texts(record: Record, *names: str) -> Record:
    for name in names:
        if not isinstance(record[name], str):
            raise TypeError(f"{name} must be text")
    return {name: record[name] for name in names}


def _whole(value: Any, below: int) -> int:
    if not isinstance(value, int) or not 0 <= value < below:
        raise ValueError(f"label must lie in 0 to {below - 1}")
    return value
