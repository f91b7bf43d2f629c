"""Configurations of infer.py: those that are shipped, and how values are read."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY

from dejavu_train.data.text import INSTALLED
from dejavu_train.evaluation.command import read_config
from dejavu_train.evaluation.config import InferConfig
from dejavu_train.evaluation.run import quality_rows


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs/infer").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_are_read(path):
    config = read_config(["--config", str(path)])
    assert set(yaml.safe_load(path.read_text())) <= {"base", *InferConfig.__dataclass_fields__}
    assert quality_rows(config)[0].selection == "dense"


@pytest.mark.parametrize(
    ("value", "expected"), [("a, b.txt", ("a, b.txt",)), ("[a.txt, c=d.txt]", ("a.txt", "c=d.txt"))]
)
def test_texts_in_yaml_are_one_or_a_list(value, expected, tmp_path):
    (tmp_path / "config.yaml").write_text(f"text: {value}")
    assert read_config(["--config", str(tmp_path / "config.yaml")]).text == expected


def test_defaults_are_those_of_the_shipped_config_but_for_other_densities():
    shipped = read_config(["--config", str(REPOSITORY / "configs/infer/opt-mini.yaml")])
    curve = {name: getattr(shipped, name) for name in ("mlp_density", "curve_mlp_density", "head_density")}
    assert curve == {"mlp_density": (0.1, 0.2), "curve_mlp_density": (0.05, 0.4), "head_density": (0.85,)}
    assert dataclasses.replace(read_config([]), **curve) == shipped
    assert read_config(["--tokens", "null"]).tokens is None
    assert read_config(["--timing"]).timing is True
    shipped = ["--config", str(REPOSITORY / "configs/infer/opt-mini.yaml")]
    assert read_config(shipped).text == INSTALLED
    assert read_config([*shipped, "--text", "a,b.txt", "--text", "c=d.txt"]).text == ("a,b.txt", "c=d.txt")
    assert Path(read_config([]).bundle).parts[-1] == "bundle"
