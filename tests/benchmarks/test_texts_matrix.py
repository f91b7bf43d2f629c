import csv
import json
import subprocess

import pytest
from bundles import make_bundle
from conftest import REPOSITORY

from benchmarks import texts
from benchmarks.texts import BYTES, RECIPES, at_bytes, rows_of
from dejavu_train.bundle.cost_model import mlp_share
from dejavu_train.models.weight_format import FLOAT16
from dejavu_train.run.command import parse_config


def commands():
    """The words of every run that texts.sh starts."""
    script = (REPOSITORY / "benchmarks" / "texts.sh").read_text()
    functions = script[: script.index("case $1 in")].replace("export out=$2 rows=$(mktemp -d)", "export")
    command = ["bash", "-c", functions + "\nmini; hundred"]
    return [
        line.split() for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    ]


def test_every_run_of_the_script_parses():
    lines = commands()
    assert len(lines) > 12
    for flags in [
        *([word for word in words if word.startswith("--") and "." in word] for words in lines),
        *RECIPES.values(),
    ]:
        assert parse_config([f"--config={REPOSITORY / 'configs' / 'opt-mini.yaml'}", *flags]).text.source == "self"


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_density_is_found_by_the_bytes_it_reads(tiny_opt, share):
    bundle = make_bundle(tiny_opt)
    assert mlp_share(bundle.at(at_bytes(bundle, share)), FLOAT16) == pytest.approx(share, rel=0.02)
    asked = [row.mlp_density for row in rows_of(bundle, "svd", False, "") if row.selection == "predicted"]
    assert asked == [at_bytes(bundle, share) for share in BYTES]


def test_interrupted_scoring_goes_on_behind_the_last_text(tiny_opt, tmp_path, monkeypatch):
    work = tmp_path / "work" / "self-default-0"
    make_bundle(tiny_opt).save_pretrained(work / "bundle")
    (work / "activations" / "layer_00").mkdir(parents=True)
    (work / "activations" / "manifest.json").write_text(json.dumps({"shards": [{"set": "train", "tokens": 7}]}))
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "the model reads a token " * 9}) + "\n")
    monkeypatch.setattr(texts, "train", lambda config: None)
    evaluate, calls = texts.evaluate, []

    def interrupted(*given, **options):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return evaluate(*given, **options)

    monkeypatch.setattr(texts, "evaluate", interrupted)
    argv = ["run", f"--model={tiny_opt}", f"--data={tmp_path}", "--texts=one,two", f"--work={tmp_path / 'work'}"]
    argv += [f"--output={tmp_path / 'rows.csv'}", "--tokens=40", f"--config={REPOSITORY / 'configs' / 'opt-mini.yaml'}"]
    with pytest.raises(KeyboardInterrupt):
        texts.main(argv)
    texts.main(argv)
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert len(calls) == 3 and [row["text"] for row in rows] == 4 * ["one"] + 4 * ["two"]
    assert {row["train_tokens"] for row in rows} == {"7"} and not (work / "activations" / "layer_00").exists()
