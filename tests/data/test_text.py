"""text.py: documents, the split, windows, and every mistake a user can make with text."""

import gzip
import json
import lzma
import re

import numpy as np
import pytest
from conftest import make_text

from dejavu_train.data.ngrams import shared_ngrams
from dejavu_train.data.paragraphs import (
    PARAGRAPH_HASHES,
    hash_paragraphs,
    read_paragraph_hashes,
    write_paragraph_hashes,
)
from dejavu_train.data.text import (
    SETS,
    Document,
    TextSource,
    cut_plain_text,
    load_documents,
    load_sets,
    split_documents,
    split_of,
)
from dejavu_train.data.tokens import require_one_sequence, windows
from dejavu_train.errors import UserError
from dejavu_train.models.opt import load_tokenizer


def test_plain_text_is_cut_at_blank_lines_and_nothing_is_lost():
    text = make_text(6000)
    documents = cut_plain_text(text)
    assert all(len(document.text) >= 4000 for document in documents[:-1]) and len(documents) > 3
    assert "".join(document.text for document in documents).replace("\n", "") == text.replace("\n", "")
    assert [document.name for document in documents] == [str(i) for i in range(len(documents))]


def test_split_is_fixed_disjoint_and_of_the_stated_shares():
    names = [str(i) for i in range(20000)]
    shares = {name: 0 for name in SETS}
    for name in names:
        shares[split_of("x", name)] += 1
    assert abs(shares["train"] / 20000 - 0.76) < 0.01
    assert all(abs(shares[name] / 20000 - 0.08) < 0.01 for name in SETS[1:])


@pytest.mark.parametrize(("source", "name", "expected"), [
    ("installed-docs", "torch/nn/functional.py", "train"),
    ("installed-docs", "numpy/linalg/_linalg.py", "train"),
    ("text.txt", "5", "test"),
    ("text.txt", "17", "val"),
])  # fmt: skip
def test_split_of_known_documents_never_moves(source, name, expected):
    assert split_of(source, name) == expected


def test_sets_are_disjoint_documents(text_file, tiny_opt):
    sets, manifest = load_sets(TextSource(source=str(text_file)), str(tiny_opt))
    names = [document.name for name in SETS for document in sets[name]]
    assert len(names) == len(set(names)) == sum(manifest.documents.values())
    assert manifest.source == "text.txt" and len(manifest.train_sha256) == len(sets["train"])


def test_pretrained_paragraphs_leave_the_heldout_sets_only(tmp_path):
    paragraph = "this paragraph was seen in pretraining and is long enough to be told apart from boiler plate, yes"
    documents = [Document(str(i), f"{paragraph}\n\nbut this one is new number {i}") for i in range(200)]
    hashes = hash_paragraphs([paragraph, "short"])
    assert len(hashes) == 1
    sets, skipped = split_documents(documents, "s", hashes)
    assert skipped == sum(len(sets[name]) for name in SETS[1:]) > 0
    assert all(paragraph in document.text for document in sets["train"])
    assert all(paragraph not in document.text for name in SETS[1:] for document in sets[name])


def test_paragraph_hashes_survive_the_disk(tmp_path):
    hashes = np.unique(np.random.default_rng(0).integers(0, 1 << 32, 5000, dtype=np.uint32))
    write_paragraph_hashes(tmp_path / PARAGRAPH_HASHES, hashes)
    assert (read_paragraph_hashes(str(tmp_path)) == hashes).all()
    (tmp_path / PARAGRAPH_HASHES).write_bytes(b"x" * 40)
    with pytest.raises(UserError, match="damaged"):
        read_paragraph_hashes(str(tmp_path))


def test_windows_score_every_token_once(tiny_opt):
    tokenizer = load_tokenizer(str(tiny_opt))
    text = make_text(300)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    rows = windows(tokenizer, text, 16)
    assert all(row[0] == 2 and len(row) <= 16 for row in rows)
    assert [token for row in rows for token in row[1:]] == ids


def test_jsonl_and_compressed_files(tmp_path):
    rows = [{"id": "first", "text": "one"}, {"text": "two"}]
    body = "\n".join(map(json.dumps, rows)).encode()
    kinds = [("a.jsonl", open), ("b.jsonl.xz", lzma.open), ("c.jsonl.gz", gzip.open)]
    for name, opener in kinds + [(name.upper(), opener) for name, opener in kinds]:
        with opener(tmp_path / name, "wb") as file:
            file.write(body)
        documents, _ = load_documents(TextSource(source=str(tmp_path / name)))
        assert documents == [Document("first", "one"), Document("1", "two")]


def test_json_lines_under_a_name_of_plain_text_are_said(tmp_path, caplog):
    path = tmp_path / "a.TXT"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert len(load_documents(TextSource(source=str(path)))[0]) == 1
    assert "a.TXT is read as plain text, but looks like JSON lines; name it .jsonl" in caplog.text
    caplog.clear()
    path.write_text("{a set}\n\nand prose\n")
    load_documents(TextSource(source=str(path)))
    assert not caplog.text


def test_json_lines_end_at_newlines_only(tmp_path):
    texts = ["one\u2028two\u2029three\u0085four\x0cfive", "six"]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in texts).encode())
    assert [document.text for document in load_documents(TextSource(source=str(path)))[0]] == texts


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_and_a_byte_order_mark_change_no_document(tmp_path, text_file, end):
    plain = text_file.read_text(encoding="utf-8")
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf" + plain.replace("\n", end).encode())
    assert load_documents(TextSource(source=str(path)))[0] == cut_plain_text(plain)


@pytest.mark.parametrize(
    "separator", [" ", "\n", ". ", "", "\n\x0c\n"], ids=["words", "lines", "sentences", "none", "form feeds"]
)
def test_text_without_blank_lines_is_cut(separator):
    text = separator.join(["word" * 5] * 20_000)
    documents = cut_plain_text(text)
    assert all(4000 <= len(document.text) <= 40_000 for document in documents[:-1]) and len(documents) > 9
    assert re.sub(r"\s", "", "".join(d.text for d in documents)) == re.sub(r"\s", "", text)


def test_long_documents_of_jsonl_are_cut_as_plain_text_is(tmp_path, text_file):
    text = text_file.read_text(encoding="utf-8")
    path = tmp_path / "books.jsonl"
    path.write_text(
        "\n".join(json.dumps({"id": name, "text": text}) for name in "ab") + '\n{"id": "c", "text": "short"}'
    )
    documents, _ = load_documents(TextSource(source=str(path)))
    parts = [part.text for part in cut_plain_text(text)]
    assert [document.text for document in documents] == [*parts, *parts, "short"]
    assert documents[0].name == "a.0" and len({document.name for document in documents}) == len(documents)
    split_documents(documents, "books.jsonl")


def test_documents_budget_is_drawn_with_the_seed(text_file):
    drawn = [load_documents(TextSource(source=str(text_file), documents=9, seed=s))[0] for s in (1, 1, 2)]
    assert len(drawn[0]) == 9 and drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(("name", "content", "message"), [
    ("empty.txt", b"", "is empty"),
    ("blank.txt", b" \n\n ", "is empty"),
    ("latin.txt", "caf\xe9 ".encode("latin-1") * 9, "not UTF-8"),
    ("bad.jsonl", b"{}\n", "field 'text'; mend that line, or name the field .* --text_field"),
    ("cut.jsonl", b'{"text": "a"}\n{"te', "line 2"),
    ("null.jsonl", b'{"text": "a"}\n{"text": null}\n', "line 2 of .*must be text, got null"),
    ("number.jsonl", b'\n{"text": 3}', "line 2 of .*must be text, got int"),
    ("deep.jsonl", b"[" * 100_000, "line 1"),
    ("list.jsonl", b'["text"]', "line 1"),
    ("half.jsonl", b'{"text": "\\ud800"}', "line 1 .*surrogate"),
    ("sixteen.txt", "text".encode("utf-16"), "not UTF-8"),
    ("cut.txt.xz", lzma.compress(b"abc" * 99)[:-20], "damaged"),
])  # fmt: skip
def test_bad_files_are_one_clear_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_documents(TextSource(source=str(tmp_path / name)))


def test_missing_file_and_too_little_text(tmp_path, tiny_opt):
    with pytest.raises(UserError, match="no text file"):
        load_documents(TextSource(source=str(tmp_path / "none.txt")))
    with pytest.raises(UserError, match="falls into the set"):
        split_documents([Document("0", "a")], "s")
    with pytest.raises(UserError, match="fewer than one sequence of 512"):
        require_one_sequence(100, 512, "t.txt")


def test_hub_source_reads_streaming_with_the_pinned_revision(monkeypatch):
    import datasets

    asked = {}

    def load_dataset(name, config, **options):
        asked.update(options, name=name, config=config)
        return datasets.Dataset.from_dict({"text": [f"text {i}" for i in range(50)]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = TextSource(source="allenai/c4", config="en", revision="abc", documents=20, seed=3)
    documents, _ = load_documents(source)
    assert len({document.name for document in documents}) == 20
    assert asked == {"name": "allenai/c4", "config": "en", "split": "train", "revision": "abc", "streaming": True}
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: (_ for _ in ()).throw(ConnectionError("no network")))
    with pytest.raises(UserError, match="no network"):
        load_documents(source)


def test_shared_ngrams_counts_by_hand():
    train = [Document("t", "a b c d e f g h i")]
    report = [Document("r", "a b c d e f g h x")]  # of its two 8-grams, the first is in train
    assert shared_ngrams(report, train, 8) == 0.5
    assert shared_ngrams([Document("r", "too short")], train, 8) == 0.0
