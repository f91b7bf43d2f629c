"""What the benchmarks of lossless decoding share: prompts, decodings, and the columns that every way has."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dejavu_train.data.text import TextSource, load_documents, load_sets
from dejavu_train.engine.inputs import Sampling
from dejavu_train.engine.lossless import Acceptance
from dejavu_train.models.opt import load_tokenizer

TEXTS = ("installed-docs", "installed-readmes", "installed-code", "installed-licences")
DECODINGS = {"greedy": Sampling(), "0.7": Sampling(0.7), "1.0": Sampling(1.0)}


def read_prompts(
    model: str, length: int, count: int, texts: Sequence[str] = TEXTS, part: str = "test"
) -> Iterator[tuple[str, list[int]]]:
    """(text, ids) of the beginnings of held-out documents, of all texts in turn. A text file is held out as a whole."""
    tokenizer = load_tokenizer(model)
    documents = {}
    for name in texts:
        source = TextSource(name)
        held = load_documents(source)[0] if Path(name).is_file() else load_sets(source, model)[0][part]
        documents[Path(name).stem if Path(name).is_file() else name] = iter(held)
    found = 0
    while found < count and documents:
        for name in list(documents):
            document = next(documents[name], None)
            if document is None:
                del documents[name]
                continue
            ids = [2, *tokenizer(document.text[: 20 * length], add_special_tokens=False)["input_ids"]][:length]
            if len(ids) == length and found < count:
                found += 1
                yield name, ids


def added(parts: Sequence[Acceptance]) -> Acceptance:
    """Sums of what was counted."""
    names = Acceptance.__dataclass_fields__
    return Acceptance(**{name: sum(getattr(part, name) for part in parts) for name in names})


def columns_of(found: Acceptance, base: Acceptance) -> dict[str, Any]:
    """The measured columns of a way, beside the dense engine's."""
    report = found.report()
    row: dict[str, Any] = {
        name: report[name] for name in ("tokens", "tokens_per_second", "acceptance", "mean_length", "saved")
    }
    row["seconds"] = found.seconds
    row["ratio"] = report["tokens_per_second"] / base.report()["tokens_per_second"]
    return row
