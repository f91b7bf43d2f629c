"""docs/guides/families.md as it stands there: a family of a program of its own, and how it is checked."""

import os
import re

import pytest
import torch
from bundles import make_bundle
from conftest import REPOSITORY, save_tiny_tokenizer
from family_models import CASES
from transformers import AutoModelForImageTextToText, Cosmos3EdgeConfig

from dejavu_train.families import base
from dejavu_train.ground.errors import UserError
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.load import load_model
from dejavu_train.models.stored import check_folder
from dejavu_train.run.task import Task, start_task
from dejavu_train.sparse.model import SparseCausalLM

PAGE = (REPOSITORY / "docs" / "guides" / "families.md").read_text(encoding="utf-8")
TOWER, *OWN = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_first_table_has_every_family():
    rows = [line.split("|")[1:-1] for line in PAGE.split("## Add a family")[0].splitlines() if line.startswith("| ")]
    listed = {name: row[-1].strip() for row in rows[2:] for name in re.findall(r"`(\w+)`", row[1])}
    assert listed == {kind: family.least_transformers for kind, family in base._FAMILIES.items()}


@pytest.fixture
def guide(monkeypatch, capsys):
    """What the page's code defines, its family registered for this test alone."""
    monkeypatch.setattr(base, "_FAMILIES", dict(base._FAMILIES))
    names: dict = {}
    for code in OWN[:2]:
        exec(code, names)
    return names | {"printed": capsys.readouterr().out}


def test_the_family_of_the_guide_is_as_transformers_has_it(guide):
    assert float(re.search(r"tensor\((.*)\)", guide["printed"])[1]) < 1e-4 and "set()" in guide["printed"]
    assert guide["neurons"].shape == (2, 12, 96)


def test_the_family_of_the_guide_runs_sparsely(guide, tmp_path):
    torch.manual_seed(0)
    save_tiny_tokenizer(tmp_path)
    guide["model"].save_pretrained(tmp_path)
    check_folder(str(tmp_path), read_dims(str(tmp_path)))
    bundle = make_bundle(tmp_path, means=True).at(0.4, 0.6)
    ids, logits = guide["ids"], []
    for backend, options in (("mask", {}), ("gather", {}), ("triton", {"ops": "reference"})):
        model = SparseCausalLM.from_model(load_model(str(tmp_path)), bundle, backend, **options)
        with torch.no_grad():
            logits.append(model(ids).logits)
        torch.testing.assert_close(logits[-1], logits[0], rtol=1e-4, atol=1e-4)


def test_a_text_tower_is_saved_as_the_guide_says(tmp_path, monkeypatch):
    """Its model of text and pictures writes the same text, and is refused by the name of what runs."""
    monkeypatch.chdir(tmp_path)
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Cosmos3EdgeConfig(text_config=CASES["cosmos"].to_dict(), vision_config=vision, projector_hidden_size=32)
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained("whole")
    save_tiny_tokenizer(tmp_path / "whole")
    exec(TOWER.replace("nvidia/Cosmos3-Edge", "whole"), {})
    saved = str(tmp_path / "cosmos3-edge-text")
    check_folder(saved, read_dims(saved))
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        got, expected = SparseCausalLM.from_pretrained(saved, backend="gather")(ids).logits, whole(ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=r"type cosmos3_edge, .*its text tower \(cosmos3_edge_text\).*families.md"):
        read_dims("whole")


def test_a_worker_knows_the_family_that_the_environment_names(tmp_path):
    (tmp_path / "my_family.py").write_text(OWN[0])
    (tmp_path / "asks.py").write_text("from dejavu_train.families.base import families; print(*families())")
    said = {}
    for named in ("my_family", "my_family,nowhere"):
        task = Task("0", 0, 1, ("asks",), tmp_path / named)
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "DEJAVU_FAMILIES": named}
        start_task(task, environment).wait()
        said[named] = task.log.read_text()
    assert "starcoder2" in said["my_family"].split()
    assert (
        "DEJAVU_FAMILIES names nowhere, which cannot be imported: No module named 'nowhere'"
        in said["my_family,nowhere"]
    )
