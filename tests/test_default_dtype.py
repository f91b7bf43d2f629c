"""Nothing is made in torch's default dtype, which serving programs set to that of their model."""

import ast
from pathlib import Path

import pytest
import torch
from bundles import make_bundle
from conftest import save_tiny_opt
from family_models import save_family
from torch import nn

from dejavu_train import SparseCausalLM
from dejavu_train.families import Target
from dejavu_train.predictors.custom import build_custom

ROOT = Path(__file__).resolve().parent.parent
MAKERS = {"zeros", "ones", "empty", "rand", "randn", "eye", "linspace"}
NOT_NUMBERS = {"stream.py"}  # an empty tensor that stands for places, before there are any


@pytest.fixture
def in_bf16():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def unnamed(path):
    """Lines where a tensor is made without a dtype."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        made = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS
        if made and isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
            if not any(keyword.arg in ("dtype", "out", None) for keyword in node.keywords):
                yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_every_tensor_that_is_made_names_its_dtype():
    files = [path for room in ("dejavu_train", "kernels") for path in sorted((ROOT / room).rglob("*.py"))]
    found = [place for path in files if path.name not in NOT_NUMBERS for place in unnamed(path)]
    assert len(files) > 300 and not found


def results(folder, bundle, backend):
    """Logits, where a backend has them, and a greedy and a sampled text."""
    ids = torch.arange(3, 30)[None]
    model = SparseCausalLM.from_pretrained(folder, bundle, backend=backend, dtype=torch.float32)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8}
    logits = model(ids).logits.detach() if backend != "cpu" else ids
    torch.manual_seed(0)
    return logits, model.generate(**given, do_sample=False), model.generate(**given, do_sample=True, top_p=0.9)


def same(results, others):
    return all(torch.equal(ours, theirs) for ours, theirs in zip(results, others, strict=True))


@pytest.mark.parametrize("backend", ["mask", "gather", "auto", "cpu"])
def test_a_default_dtype_changes_no_result(tmp_path, backend, request):
    folder = save_tiny_opt(tmp_path)
    bundles = [make_bundle(folder).at(0.3, 0.5), make_bundle(folder, cascade=True).at(0.4, 0.5)]
    usual = [results(folder, bundle, backend) for bundle in bundles]
    predictor = bundles[0].predictor(1, Target.MLP)
    request.getfixturevalue("in_bf16")
    assert all(same(results(folder, bundle, backend), own) for bundle, own in zip(bundles, usual, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(
        bundles[0].predictor(1, Target.MLP).parameters(), predictor.parameters(), strict=True
    ))  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_nor_of_other_families(tmp_path, name, request):
    """Rotary positions, and slopes of ALiBi."""
    folder = save_family(name, tmp_path / name)
    bundle = make_bundle(folder).at(0.3, 0.5)
    usual = results(folder, bundle, "gather")
    request.getfixturevalue("in_bf16")
    assert same(results(folder, bundle, "gather"), usual)


def test_classes_of_others_are_made_in_fp32(in_bf16):
    class Own(nn.Module):
        def __init__(self, d_in: int, n_out: int) -> None:
            super().__init__()
            self.map = nn.Linear(d_in, n_out)

        def forward(self, x):
            return self.map(x)

    made = build_custom(Own, {"class_path": "x.Own"}, 4, 6, "mlp.predictor")
    assert made.map.weight.dtype == torch.float32 and torch.get_default_dtype() == torch.bfloat16
