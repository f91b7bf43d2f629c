"""The model card says what the bundle is, stays out of its digests, and cannot be broken by the user's names."""

import dataclasses
import json
import os
import re

import pytest
import yaml
from bundles import make_bundle

import dejavu_train
from dejavu_train.bundle.artifact import CARD, METADATA, TENSORS, Bundle

HOSTILE = "a`b``c|d\n---\n# heading\n```\n<script>alert(1)</script> [x](http://y) \u2028 {z}"
STAGE = {"name": "calibrate", "keys": {"calibrate.mlp_density": 0.2}, "identity": "0"}
TEXT = {"source": "notes.txt", "sha256": "f" * 64, "documents": {"train": 70, "calibration": 9}}


@pytest.fixture(scope="module")
def bundle(tiny_opt):
    made = make_bundle(tiny_opt, cascade=True).at(mlp_density=0.2, head_density=1.0)
    return dataclasses.replace(made, metadata={"text": TEXT, "stage": STAGE})


def written(bundle, folder) -> str:
    bundle.save_pretrained(folder)
    return (folder / CARD).read_text(encoding="utf-8")


def table(text) -> list[dict[str, str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def test_the_card_says_what_and_of_what_and_how_good(bundle, tmp_path, tiny_opt):
    text = written(bundle, tmp_path / "bundle")
    model = os.path.relpath(tiny_opt, tmp_path / "bundle")
    for words in (f"model: `{model}`", bundle.weight_hash, "`notes.txt`", "f" * 64, "`train` `70`", "**In domain**",
                  f"dejavu_train {dejavu_train.__version__}", "2 layers, d_model 48", '"calibrate.mlp_density": 0.2',
                  "Bundle.from_pretrained", "python infer.py --model"):  # fmt: skip
        assert words in text
    for row, key in zip(table(text), [(0, "mlp"), (1, "mlp"), (0, "heads"), (1, "heads")], strict=True):
        spec = bundle.specs[key]
        assert (row["layer"], row["target"], row["kind"]) == (str(key[0]), key[1], spec.kind)
        if key[1] == "heads":
            assert (row["candidates"], row["selected"], row["recall"]) == ("", "dense", "")
            continue
        assert float(row["candidates"]) == pytest.approx(spec.density, abs=6e-4)
        assert float(row["selected"]) == pytest.approx(spec.density / 2, abs=6e-4)  # the curve of make_bundle
        assert float(row["recall"]) == pytest.approx(spec.recall, abs=6e-4)
        assert float(row["retained mass"]) == pytest.approx(spec.retained_mass, abs=6e-4)


def test_the_python_of_the_card_runs(bundle, tmp_path, tiny_opt):
    text = written(bundle, tmp_path / "bundle")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    namespace = {}
    exec(block.replace("BUNDLE", str(tmp_path / "bundle")).replace("MODEL", str(tiny_opt)), namespace)
    assert namespace["model"].bundle.specs == bundle.specs


def test_the_same_bundle_has_the_same_card(bundle, tmp_path):
    assert written(bundle, tmp_path / "one") == written(bundle, tmp_path / "two")


@pytest.mark.parametrize("change", ["changed", "removed"])
def test_the_card_is_no_part_of_the_digests(bundle, tmp_path, change):
    folder = tmp_path / "bundle"
    written(bundle, folder)
    before = [(folder / name).read_bytes() for name in (METADATA, TENSORS)]
    (folder / CARD).write_bytes(b"\xff mine") if change == "changed" else (folder / CARD).unlink()
    again = Bundle.from_pretrained(folder)
    assert again.specs == bundle.specs
    again.save_pretrained(folder)
    assert before == [(folder / name).read_bytes() for name in (METADATA, TENSORS)]


def test_names_of_the_user_break_neither_markdown_nor_front_matter(bundle, tmp_path):
    metadata = {
        "text": {"source": HOSTILE, "sha256": HOSTILE, "documents": {HOSTILE: HOSTILE}},
        "stage": {"keys": {HOSTILE: HOSTILE}},
    }
    plain = written(bundle, tmp_path / "plain")
    text = written(dataclasses.replace(bundle, model=HOSTILE, metadata=metadata), tmp_path / "hostile")
    front, rest = text.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front) == {"library_name": "dejavu_train", "tags": ["opt", "contextual-sparsity"]}

    def outline(card):
        return [line for line in card.splitlines() if re.match(r" {0,3}(#|```|---|\||>)", line)]

    assert outline(text) == outline(plain)
    (settings,) = re.findall(r"```json\n(.*?)\n```\n", rest, re.DOTALL)
    assert json.loads(settings) == {HOSTILE: HOSTILE}
    (line,) = [line for line in rest.splitlines() if line.startswith("- model: ")]
    fence = "`" * 4  # one more than the longest run within
    assert line.startswith(f"- model: {fence} a`b") and line.endswith(fence) and line.count(fence) == 2


@pytest.mark.parametrize(
    "metadata", [{}, {"text": "made up"}, {"text": {"source": {"class_path": "a.B"}}}, {"stage": 3}]
)
def test_bundles_that_say_less_have_a_card(bundle, tmp_path, metadata):
    text = written(dataclasses.replace(bundle, metadata=metadata), tmp_path / "bundle")
    assert "- trained on: " in text and len(table(text)) == 4
