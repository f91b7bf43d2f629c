import subprocess

import pytest
from bundles import make_bundle
from conftest import REPOSITORY

from benchmarks.texts import BYTES, RECIPES, at_bytes, rows_of
from dejavu_train.bundle.cost_model import mlp_share
from dejavu_train.cli import parse_config


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
    assert len(lines) > 15
    for flags in [
        *([word for word in words if word.startswith("--") and "." in word] for words in lines),
        *RECIPES.values(),
    ]:
        assert parse_config([f"--config={REPOSITORY / 'configs' / 'opt-mini.yaml'}", *flags]).text.source == "self"


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_density_is_found_by_the_bytes_it_reads(tiny_opt, share):
    bundle = make_bundle(tiny_opt)
    assert mlp_share(bundle.at(at_bytes(bundle, share))) == pytest.approx(share, rel=0.02)
    asked = [row.mlp_density for row in rows_of(bundle, "svd", False) if row.selection == "predicted"]
    assert asked == [at_bytes(bundle, share) for share in BYTES]
