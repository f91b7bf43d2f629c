"""Which documents of a text are scored, and what is said of those that were trained on."""

import json

import pytest
from bundles import make_bundle
from conftest import make_text, save_tiny_opt

from dejavu_train.data import text
from dejavu_train.data.paragraphs import PARAGRAPH_HASHES, hash_paragraphs, write_paragraph_hashes
from dejavu_train.data.text import TextSource, load_sets
from dejavu_train.evaluation import texts as eval_texts
from dejavu_train.evaluation.config import name_texts
from dejavu_train.evaluation.texts import load_text, trained_text
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import write_json
from dejavu_train.models.load import load_tokenizer

SEEN = "this paragraph was seen in pretraining and is long enough to be told apart from boiler plate, yes it is"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model whose folder says that it was pretrained on SEEN."""
    folder = save_tiny_opt(tmp_path_factory.mktemp("pretrained"))
    write_paragraph_hashes(folder / PARAGRAPH_HASHES, hash_paragraphs([SEEN]))
    return str(folder)


@pytest.fixture
def rows(monkeypatch):
    """200 documents that every installed source holds, SEEN in each."""
    made = [{"name": str(i), "text": f"{SEEN}\n\n{make_text(80, seed=i)}"} for i in range(200)]
    monkeypatch.setattr("dejavu_train.data.installed_text.load_installed", lambda source, cache: (made, {"p": "1"}))
    return made


def load(model, source, trained=None, tokens=None, name="mine"):
    tokenizer = load_tokenizer(model)
    return load_text(name, TextSource(source=str(source)), "test", model, trained or {}, tokenizer, 64, tokens)


def test_names():
    assert name_texts(["a/b.txt", "x=a/b.txt", "allenai/c4", "c.jsonl.xz"]) == {
        "b": "a/b.txt",
        "x": "a/b.txt",
        "allenai/c4": "allenai/c4",
        "c": "c.jsonl.xz",
    }
    for texts in ([], ["=a"], ["a="], ["a.txt", "a.jsonl"], ["x=a", "x=b"]):
        with pytest.raises(UserError, match="--text"):
            name_texts(texts)


def test_a_file_whose_name_holds_an_equals_sign_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.txt").write_text("text")
    assert name_texts(["a=b.txt"]) == {"a=b": "a=b.txt"}


@pytest.mark.parametrize("source", ["installed-docs", "installed-code"])
def test_a_source_that_was_trained_on_is_scored_on_its_report_set(model, rows, source):
    found = load(model, source, {"source": source, "sha256": "of other versions"})
    sets, _ = load_sets(TextSource(source=source), model)
    assert found.domain == "in domain" and found.set_name == "test" and not found.whole
    assert len(found.held.document_tokens) == len(sets["test"]) < 40


def test_other_installed_sources_are_scored_whole_but_for_pretrained_paragraphs(model, rows):
    found = load(model, "installed-code", {"source": "installed-docs"})
    assert (found.domain, found.set_name, found.whole) == ("unseen", None, True)
    assert found.pretrained_paragraphs == 200 and len(found.held.document_tokens) == 200
    assert found.held.bytes == sum(len(row["text"].replace(f"{SEEN}\n\n", "")) for row in rows)
    some = load(model, "installed-code", tokens=500)
    assert not some.whole and 500 <= some.held.tokens < 500 + 2 * 63


def test_installed_docs_are_never_scored_on_what_the_model_was_pretrained_on(model, rows):
    found = load(model, "installed-docs", {"source": "self"})
    assert found.domain == "unseen" and found.set_name == "test"


def test_a_hub_dataset_is_scored_on_its_report_set(model, rows, monkeypatch):
    documents = [text.Document(row["name"], row["text"]) for row in rows]
    monkeypatch.setattr(text, "_hub_documents", lambda source, name: documents)
    assert load(model, "somebody/prose").set_name == "test"


def test_a_file_that_was_trained_on(model, tmp_path, text_file, caplog):
    sets, manifest = load_sets(TextSource(source=str(text_file)), model)
    trained = json.loads(json.dumps(manifest.to_json()))
    found = load(model, text_file, trained)
    assert found.domain == "in domain" and found.set_name == "test" and "warning" not in caplog.text
    assert found.sha256 == manifest.sha256 and len(found.held.document_tokens) == len(sets["test"])
    # Another file of the same name is another text; one that holds trained documents is in domain, with a warning.
    other = tmp_path / text_file.name
    other.write_text(make_text(3000, seed=77))
    assert load(model, other, trained).domain == "unseen"
    other.write_text(sets["train"][0].text)
    found = load(model, other, trained, name="copy")
    assert (found.domain, found.set_name, found.whole) == ("in domain", None, True)
    assert "1 of 1 documents of copy trained the predictors" in caplog.text


def test_a_file_keeps_its_pretrained_paragraphs_with_a_warning(model, tmp_path, caplog):
    path = tmp_path / "seen.txt"
    path.write_text(f"{SEEN}\n\n{make_text(200)}")
    found = load(model, path, name="seen")
    assert "pretrained on" in caplog.text and "of seen" in caplog.text
    assert found.held.bytes == len(path.read_text()) and found.pretrained_paragraphs == 0
    with pytest.raises(UserError, match="the text short has"):
        (tmp_path / "short.txt").write_text("few words")
        load(model, tmp_path / "short.txt", name="short")


def test_what_a_bundle_was_trained_on(tiny_opt, tmp_path):
    bundle = make_bundle(tiny_opt)
    assert trained_text(bundle, str(tmp_path / "bundle")) == {}
    write_json(tmp_path / "activations" / "manifest.json", {"text": {"source": "a.txt"}})
    assert trained_text(bundle, str(tmp_path / "bundle")) == {"source": "a.txt"}
    object.__setattr__(bundle, "metadata", {"text": {"source": "b.txt"}})
    assert eval_texts.trained_text(bundle, str(tmp_path / "bundle")) == {"source": "b.txt"}
