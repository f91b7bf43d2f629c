"""Records of the sets that answers are written for: from local JSONL files of the published form, else from the hub."""

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

from dejavu_train.extras.tasks.local_files import read_records
from dejavu_train.ground.errors import UserError, first_line

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SetSource:
    """A set on the hub. ``needs``: fields of a record, the question first. ``train``: split of worked examples."""

    hub: str
    config: str | None
    split: str
    needs: tuple[str, ...]
    train: str = ""


SOURCES = {
    "gsm8k": SetSource("openai/gsm8k", "main", "test", ("question", "answer"), "train"),
    "math500": SetSource("HuggingFaceH4/MATH-500", None, "test", ("problem", "answer")),
}


class Records:
    """Records of sets. The first failure to reach the hub stands for all that follow.

    Args:
        folder: of local files, or None. limit: records of a set, the first ones. None: all.
    """

    def __init__(self, folder: str | None, limit: int | None) -> None:
        self.folder, self.limit = folder, limit
        self.unreachable = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        self._kept: dict[tuple[str, str], list[Record]] = {}

    def get(self, name: str) -> list[Record]:
        """Records of a set. Raises UserError where neither the folder nor the hub has it, or a record is none."""
        return self._read(name, SOURCES[name].split, f"{name}.jsonl", self.limit)

    def examples(self, name: str, count: int) -> list[Record]:
        """Worked examples of a set. Without any where the set has none, or the local folder lacks them."""
        train, file = SOURCES[name].train, f"{name}_train.jsonl"
        lacks = self._here(f"{name}.jsonl") and not self._here(file)
        return self._read(name, train, file, count) if train and count and not lacks else []

    def questions(self, name: str) -> list[str]:
        """Texts that are asked. Empty where the set is not there."""
        try:
            return [record[SOURCES[name].needs[0]] for record in self.get(name)]
        except UserError:
            return []

    def _here(self, file: str) -> bool:
        return self.folder is not None and (Path(self.folder) / file).is_file()

    def _read(self, name: str, split: str, file: str, limit: int | None) -> list[Record]:
        if (name, split) in self._kept:
            return self._kept[name, split]
        here = self._here(file)
        records = read_records(self.folder, file, dict)[:limit] if here else self._of_hub(name, split, limit)
        for number, record in enumerate(records, 1):
            if lacks := [field for field in SOURCES[name].needs if record.get(field) is None]:
                where = f"{self.folder}/{file}" if here else SOURCES[name].hub
                raise UserError(f"{where}, record {number} has no {lacks[0]}; give the set as published")
        self._kept[name, split] = records
        return records

    def _of_hub(self, name: str, split: str, limit: int | None) -> list[Record]:
        source = SOURCES[name]
        if not self.unreachable:
            try:
                import datasets

                rows = datasets.load_dataset(source.hub, source.config, split=split, streaming=True)
                return [dict(row) for row in itertools.islice(rows, limit)]
            except Exception as error:  # the hub client raises many classes for one thing: not to be had
                self.unreachable = first_line(error)
        where = "" if self.folder is None else f"there is no file {name}.jsonl in {self.folder}, and "
        raise UserError(f"{where}the hub gives no {source.hub} ({self.unreachable}); give --local a folder with it")
