"""What a machine without a network needs for benchmarks/one_model.py, packed into folders that travel one a call.

    python -m benchmarks.texts prepare --data DATA --to checkpoints/one/texts     the eight texts, and train_docs.jsonl
    python -m benchmarks.one_model_data --data DATA                              checkpoints/one/part1, part2, ...

DATA holds books_train_1.jsonl.xz, books_train_2.jsonl.xz, general_train.jsonl.xz and tasks/ (docs/results/texts.md says
where they are from). Every part has token ids of a share of all documents, so that any of them makes a model. The first
part has the eight texts and the questions of the tasks besides: what lm-eval would ask, as token ids. So the machine
needs no lm-eval. Sizes are printed. checkpoints/ is ignored by git, and nothing of it belongs into the project.
"""

import argparse
import json
import lzma
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import command_line
from benchmarks.texts import TEXTS
from dejavu_train.data.text import local_documents
from dejavu_train.extras.pretrain.stream import STREAM, token_stream, write_stream
from dejavu_train.models.opt import load_tokenizer

SOURCES = ("books_train_1.jsonl.xz", "books_train_2.jsonl.xz", "general_train.jsonl.xz")
OWN_SOURCES = ("train_docs.jsonl", "train_wikitext.jsonl")  # what `texts prepare` writes beside the texts
TASKS = ("lambada", "hellaswag", "piqa", "winogrande", "openbookqa", "copa", "rte", "cb")
MEBIBYTE = 1 << 20


def shares(streams: Sequence[np.ndarray], parts: int) -> Iterator[np.ndarray]:
    """The ids of each part: every so many-th document.

    >>> [ids.tolist() for ids in shares([np.array([1, 2]), np.array([3]), np.array([4])], 2)]
    [[1, 2, 4], [3]]
    """
    for part in range(parts):
        yield np.concatenate(streams[part::parts])


def pack_streams(options: argparse.Namespace, tokenizer: Any) -> list[Path]:
    """Write every part's token ids."""
    names = [options.data / name for name in SOURCES] + [options.texts / name for name in OWN_SOURCES]
    streams: list[np.ndarray] = []
    for name in names:
        if not name.is_file():
            print(f"{name} is not there and is left out")
            continue
        documents = local_documents(name, "text")
        if options.documents:
            documents = documents[: options.documents]
        made = [token_stream(tokenizer, [document.text]) for document in documents]
        print(f"{name.name}: {len(made)} documents, {sum(map(len, made)):,} tokens", flush=True)
        streams += made
    written = []
    for number, ids in enumerate(shares(streams, options.parts), 1):
        path = options.to / f"part{number}" / f"stream{number}{STREAM}"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_stream(path, ids, tokenizer)
        print(f"{path}: {len(ids):,} tokens in {path.stat().st_size / MEBIBYTE:.1f} MiB", flush=True)
        written.append(path)
    return written


def pack_texts(options: argparse.Namespace, part: Path) -> Path:
    """The eight texts in one archive."""
    path = part / "texts.tar.xz"
    with tarfile.open(path, "w:xz") as archive:
        for name in TEXTS:
            archive.add(options.texts / f"{name}.jsonl", f"{name}.jsonl")
    return path


def questions_of(task: Any, name: str, lm: Any) -> Iterator[dict[str, Any]]:
    """The documents of a task: token ids of each choice, and which is right. LAMBADA has one choice, and ``gold`` null.

    Which one is right is asked of the task itself: it calls that answer accurate.
    """
    by_document: dict[int, list[Any]] = {}
    for instance in task.instances:
        by_document.setdefault(instance.doc_id, []).append(instance)
    for instances in by_document.values():
        instances.sort(key=lambda instance: instance.idx)
        choices = [lm._encode_pair(*instance.args) for instance in instances]
        gold = None
        if len(choices) > 1:
            answers = [[(-1000.0 * (i != right), False) for i in range(len(choices))] for right in range(len(choices))]
            told = [task.process_results(instances[0].doc, answer)["acc"] for answer in answers]
            gold = told.index(max(told))
        yield {"task": name, "gold": gold, "choices": choices}


def pack_tasks(options: argparse.Namespace, part: Path) -> Path:
    """The questions of all tasks, a line of JSON each."""
    from dejavu_train.extras.tasks.config import AskedOptions  # lm-eval takes seconds to import
    from dejavu_train.extras.tasks.model import Asked, DejavuLM
    from dejavu_train.extras.tasks.tasks import build_questions, quiet

    quiet()
    asked = AskedOptions(tasks=TASKS, folder=str(options.data), limit=options.limit)
    built = build_questions(TASKS, asked, shots=0)
    lm = DejavuLM.load(Asked(options.model, backend="dense", device="cpu"))
    path = part / "tasks.jsonl.xz"
    with lzma.open(path, "wt", encoding="utf-8") as file:
        for name, task in built.tasks.items():
            lines = [json.dumps(question) for question in questions_of(task, name, lm)]
            print(f"{name}: {len(lines)} questions", flush=True)
            file.write("\n".join(lines) + "\n")
    return path


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", type=Path, default=Path("checkpoints/one/texts"), help="what texts prepare wrote")
    parser.add_argument("--to", type=Path, default=Path("checkpoints/one"))
    parser.add_argument("--model", default="checkpoints/opt-mini", help="whose tokenizer is used")
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--limit", type=int, default=500, help="questions of each task")
    parser.add_argument("--documents", type=int, help="of each source, for a rehearsal")
    options = parser.parse_args(argv)
    first = options.to / "part1"
    first.mkdir(parents=True, exist_ok=True)
    written = [pack_texts(options, first), pack_tasks(options, first)]
    written += pack_streams(options, load_tokenizer(options.model))
    for part in sorted({path.parent for path in written}):
        size = sum(path.stat().st_size for path in written if path.parent == part)
        print(f"{part}: {size / MEBIBYTE:.1f} MiB")


if __name__ == "__main__":
    main()
