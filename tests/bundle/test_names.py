"""A bundle names its model so that the name means the same elsewhere, or says that it does not."""

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from bundles import make_bundle

from dejavu_train.bundle.artifact import METADATA, Bundle
from dejavu_train.bundle.folder import model_reference, named_model, require_model
from dejavu_train.ground.errors import UserError

EARLIER = Path(__file__).resolve().parents[1] / "earlier"  # written by version 0.2.0


@pytest.fixture
def place(tiny_opt, tmp_path, monkeypatch):
    """A folder with some/model and runs/one/bundle, made where the model's path looks like an id on the hub."""
    shutil.copytree(tiny_opt, tmp_path / "a" / "some" / "model")
    monkeypatch.chdir(tmp_path / "a")
    dataclasses.replace(make_bundle(tiny_opt), model="some/model").save_pretrained("runs/one/bundle")
    return tmp_path


def test_a_path_is_found_from_anywhere_and_moves_with_its_bundle(place, monkeypatch):
    assert json.loads(Path("runs/one/bundle", METADATA).read_text())["model"] == "../../../some/model"
    assert named_model("runs/one/bundle") == "some/model"
    monkeypatch.chdir(place)
    assert named_model("a/runs/one/bundle") == "a/some/model"
    (place / "a").rename(place / "b")
    assert Bundle.from_pretrained("b/runs/one/bundle").model == str(place / "b" / "some" / "model")
    monkeypatch.chdir("/")
    again = Bundle.from_pretrained(place / "b/runs/one/bundle")
    again.save_pretrained(place / "other")
    assert json.loads((place / "other" / METADATA).read_text())["model"] == "../b/some/model"
    assert Bundle.from_pretrained(place / "other").model == again.model


def test_a_path_that_leads_nowhere_is_no_id_on_the_hub(place):
    shutil.move("runs/one/bundle", place / "moved")
    assert named_model(str(place / "moved")) == "" and Bundle.from_pretrained(place / "moved").model == "model"
    with pytest.raises(UserError, match=r"does not say where the model is .*\(its name is model\); give --model"):
        require_model("", str(place / "moved"))


@pytest.mark.parametrize(("model", "folder", "said"), [
    ("facebook/opt-125m", "/a/b", "facebook/opt-125m"),
    ("model", "/a/b", "model"),
    ("/a/m", "/a/b", "../m"),
    ("/a/b", "/a/b/predictors", ".."),
    ("/a/b/m", "/a/b", "./m"),
    ("/a/.m", "/a", "./.m"),
    ("/x/m", "/a/b", "/x/m"),
])  # fmt: skip
def test_references(model, folder, said):
    assert model_reference(model, Path(folder)) == said


def test_an_id_on_the_hub_stays_one(place):
    bundle = dataclasses.replace(Bundle.from_pretrained("runs/one/bundle"), model="facebook/opt-125m")
    bundle.save_pretrained("hub")
    assert named_model("hub") == "facebook/opt-125m" == Bundle.from_pretrained("hub").model


def test_a_pushed_bundle_names_no_folder_of_this_machine(place, monkeypatch):
    sent = []

    class Api:
        def __init__(self, token=None):
            pass

        def create_repo(self, *_, **__):
            pass

        def upload_folder(self, folder_path, **_):
            sent.append({path.name: path.read_bytes() for path in Path(folder_path).iterdir()})

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    bundle = Bundle.from_pretrained("runs/one/bundle")
    bundle.push_to_hub("me/bundle")  # here even the model lies in a temporary folder
    monkeypatch.setattr("dejavu_train.bundle.folder.tempfile", SimpleNamespace(gettempdir=lambda: "/nowhere"))
    bundle.push_to_hub("me/bundle")
    assert [json.loads(files[METADATA])["model"] for files in sent] == ["local-model", "model"]
    assert not any(str(place).encode() in content for files in sent for content in files.values())


def test_a_bundle_of_version_0_2_is_read(tmp_path):
    """Schema 3, with a second stage, as 0.2.0 saved it. Saved again it says the same."""
    bundle = Bundle.from_pretrained(EARLIER / "bundle")
    bundle.check_model(str(EARLIER / "model"))
    assert bundle.model == str(EARLIER / "model") and bundle.metadata == {"text": "made up"}
    assert sorted(bundle.cascades()) == [0, 1] and bundle.targets == ["mlp", "heads"]
    bundle.save_pretrained(tmp_path / "again")
    assert Bundle.from_pretrained(tmp_path / "again").digest() == bundle.digest()
    metadata = json.loads((tmp_path / "again" / METADATA).read_text()) | {"schema": 2}
    (tmp_path / "again" / METADATA).write_text(json.dumps(metadata))
    with pytest.raises(UserError, match="has schema 2, this version reads 3"):
        Bundle.from_pretrained(tmp_path / "again")


def test_repr_is_a_line(place):
    shown = repr(Bundle.from_pretrained("runs/one/bundle").at(mlp_density=0.2))
    assert shown.endswith("some/model: 2 layers, d_model 48, d_ffn 96, 4 heads, mlp at 0.2, heads at 1)"), shown
    assert shown.startswith("Bundle(") and len(shown) < 200 and "\n" not in shown
