"""Every shipped configuration against its model's config.json, stored from published facts. None was fetched."""

import json
import re
from pathlib import Path

import pytest
import yaml

from dejavu_train.families import dims_of
from dejavu_train.run.command import parse_config

ROOT = Path(__file__).parents[2]
STORED = json.loads((Path(__file__).parent / "configs_of_models.json").read_text())
SHIPPED = {
    path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml")) if path.stem not in ("base", "opt-mini")
}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_fits_its_model(name):
    text = SHIPPED[name].read_text()
    values = yaml.safe_load(text)
    dims = dims_of(STORED[values["model"]], values["model"])
    parse_config([f"--config={SHIPPED[name]}"]).check(dims)
    first = text.splitlines()[0]
    for pattern, size in (
        (r"(\d+) layers", dims.n_layers), (r"layers of (\d+)", dims.d_model),
        (r"([\d,]+) (?:gated )?neurons", dims.d_ffn),
        (r"(\d+) (?:query|heads)", dims.n_heads), (r"(\d+) K/V heads", dims.n_kv_heads),
    ):  # fmt: skip
        for said in re.findall(pattern, first):
            if not (pattern.startswith(r"(\d+) (?:query") and "K/V" in first and int(said) == dims.n_kv_heads):
                assert int(said.replace(",", "")) == size, (pattern, first)
    kind = re.search(r"\((\w+)", first)
    assert kind is None or kind[1] == STORED[values["model"]]["model_type"]


def test_no_stored_config_is_left_over():
    assert set(STORED) == {yaml.safe_load(path.read_text())["model"] for path in SHIPPED.values()}
