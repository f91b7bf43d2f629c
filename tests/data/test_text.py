"""text.py: documents, the split, windows, and every mistake a user can make with text."""

import bz2
import gzip
import json
import lzma
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import make_text
from files.kinds import parquet, zstd

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
    SampleConfig,
    TextSource,
    cut_plain_text,
    load_documents,
    load_sets,
    split_documents,
    split_of,
)
from dejavu_train.data.text_check import check_source
from dejavu_train.data.tokens import require_one_sequence, windows
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_tokenizer


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


ROWS = [{"text": f"document {number} " + "word " * 9} for number in range(5)]
LINES, ARRAY = "\n".join(map(json.dumps, ROWS)).encode(), json.dumps(ROWS, indent=1).encode()


def without_bytes(value):
    """Ids that do not hold what a compressor writes, such as the time."""
    return "" if isinstance(value, bytes) else None


@pytest.mark.parametrize(("name", "content"), [
    ("a.json", ARRAY), ("b.json", json.dumps(ROWS).encode()), ("c.json", LINES), ("d.ndjson", LINES),
    ("e.json", json.dumps([row["text"] for row in ROWS]).encode()), ("f.json.gz", gzip.compress(ARRAY)),
    ("g.json.xz", lzma.compress(LINES)), ("h.jsonl.zst", zstd(LINES)), ("i.JSON.ZST", zstd(ARRAY)),
    ("j.jsonl.zst", zstd(LINES + b"\n") + zstd(b"")), ("k.parquet", parquet(ROWS)),
    ("l.jsonl.gz", gzip.compress(LINES[:50]) + gzip.compress(LINES[50:])),
], ids=without_bytes)  # fmt: skip
def test_containers_hold_the_same_documents(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    documents, _ = load_documents(TextSource(source=str(tmp_path / name)))
    assert documents == [Document(str(number), row["text"]) for number, row in enumerate(ROWS)]
    check_source(TextSource(source=str(tmp_path / name)))


def test_ids_of_rows_name_documents(tmp_path):
    rows = [
        {"text": "one", "id": "first", "name": None},
        {"text": "two", "id": None, "name": "second"},
        {"text": "three", "id": None},
    ]
    (tmp_path / "a.parquet").write_bytes(parquet(rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for name in ("a.parquet", "a.json"):
        documents, _ = load_documents(TextSource(source=str(tmp_path / name)))
        assert [document.name for document in documents] == ["first", "second", "2"]


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.jsonl.bz2", bz2.compress(LINES), "is bzip2; unpack it"),
    ("a.txt", bz2.compress(LINES), "is bzip2; unpack it"),
    ("a.txt", gzip.compress(LINES), "is gzip; give it a name that ends in .gz"),
    ("a.jsonl", zstd(LINES), "is zstd; give it a name that ends in .zst"),
    ("a.jsonl.gz", LINES, "is named as gzip and is not"),
    ("a.jsonl.gz", lzma.compress(LINES), "is named as gzip and is xz; give it a name that ends in .xz"),
    ("a.txt.xz", b"", "is named as xz and is not"),
    ("a.zip", b"PK\x03\x04" + bytes(99), "is a zip archive; unpack it"),
    ("a.tar.gz", gzip.compress(bytes(257) + b"ustar" + bytes(250)), "is gzip of tar, which is not read; unpack it"),
    ("a.txt.gz", gzip.compress(gzip.compress(LINES)), "is gzip of gzip"),
    ("a.jsonl", parquet(ROWS), "is Parquet; give it a name that ends in .parquet"),
    ("a.parquet", LINES, "is named as Parquet and is not"),
    ("a.parquet", parquet(ROWS)[:-9], "is damaged"),
    ("a.parquet", parquet([{"body": "a"}]), "no field 'text'; it has body"),
    ("a.parquet", parquet([{"text": None}, {"text": "a"}]), "row 1 of .* must be text, got null"),
    ("a.parquet", parquet([{"text": ["a"]}]), "row 1 of .* must be text, got list"),
    ("a.parquet", parquet(ROWS)[:100] + b"PAR1", "is damaged"),
    ("a.jsonl.zst", zstd(LINES)[:-9], "is damaged"),
    ("a.jsonl.zst", b"\x28\xb5\x2f\xfd" + bytes(99), "is damaged"),
    ("a.json", ARRAY[:-5], "no whole JSON array"),
    ("a.json", b"[1, 2]", "item 1 of .* is not a JSON object"),
    ("a.json", b'[{"text": null}]', "item 1 of .* must be text, got null"),
    ("a.json", b"[]", "is empty"),
    ("a.json", b'{"data": ["a"]}', "line 1 of .* is not a JSON object with a field"),
    ("a.txt", "text".encode("utf-16"), "is UTF-16; it is not UTF-8: convert it by iconv -f UTF-16"),
    ("a.txt", "text".encode("utf-16-le"), "holds zero bytes"),
    ("a.txt", "text".encode("utf-32"), "is UTF-32"),
    ("a.txt", pickle.dumps(["text"]), "is a pickle"),
    ("a.pdf", b"%PDF-1.7 text", "is a PDF; unpack it, or convert it"),
], ids=without_bytes)  # fmt: skip
def test_other_containers_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_documents(TextSource(source=str(tmp_path / name)))


def test_other_forms_in_plain_text_are_said(tmp_path, caplog):
    for name, text, said in (
        ("a.txt", ARRAY.decode(), "looks like a JSON array; name it .json"),
        ("b.csv", "a,b\n1,2\n", "looks like a table"),
        ("c.txt", "[1] a note\n\n[2] another", None),
    ):
        caplog.clear()
        (tmp_path / name).write_text(text)
        load_documents(TextSource(source=str(tmp_path / name)))
        assert (said in caplog.text) if said else not caplog.text


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("dejavu_train.ground.machine.has_package", lambda name: name != "pyarrow")
    for name, content in (("a.parquet", parquet(ROWS)), ("a.jsonl.zst", zstd(LINES))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="needs the package pyarrow, .* pip install 'dejavu-train\\[train\\]'"):
            load_documents(TextSource(source=str(tmp_path / name)))


@pytest.mark.parametrize(("rows", "message"), [
    ([{"text": "a"}, {"text": None}], "must be text, got null"),
    ([{"text": ["a"]}], "must be text, got list"),
    ([{"text": 3}], "must be text, got int"),
    ([{"body": "a"}], "no field 'text'"),
    ([], "no rows in its split train"),
])  # fmt: skip
def test_rows_of_a_hub_dataset_are_text(monkeypatch, rows, message):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: SimpleNamespace(shuffle=lambda **_: rows))
    with pytest.raises(UserError, match=message):
        load_documents(TextSource(source="owner/name"))


def test_a_seed_that_no_row_of_the_engine_holds_is_refused():
    SampleConfig(seed=2**26 - 1).check()
    with pytest.raises(UserError, match="text.sample.seed must be at most 67,108,863"):
        SampleConfig(seed=2**26).check()


def test_copies_of_a_text_are_in_one_set(tmp_path, tiny_opt, caplog):
    texts = [f"document {number} " * 40 for number in range(200)]
    rows = [{"text": text} for text in [*texts, *texts, *(text + "\n" for text in texts[:50])]]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sets, _ = load_sets(TextSource(source=str(tmp_path / "a.jsonl")), str(tiny_opt))
    assert "250 of 450 documents are copies of others" in caplog.text
    found = [{document.text.strip() for document in sets[name]} for name in SETS]
    assert sum(map(len, found)) == len(set.union(*found)) == 200
    first = {split_of("a.jsonl", str(number)) for number, text in enumerate(texts) if text.strip() in found[0]}
    assert first == {"train"}


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
