"""The backend `triton` against `gather`, through Triton's interpreter (or on a GPU): same sets, same tokens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASE = """
import torch
torch.set_num_threads(1)
from dejavu_train.opt_model import load_opt
from dejavu_train.sparse_model import SparseOPTForCausalLM
from tests.bundles import make_bundle
folder, policy, lookahead, dtype = {folder!r}, {policy!r}, {lookahead!r}, {dtype!r}
device = "cuda" if torch.cuda.is_available() else "cpu"
bundle = make_bundle(folder, lookahead=lookahead, dtype=dtype).at(0.3, 0.5)
made = {{}}
ids = torch.tensor([[1, 1, 2, 5, 9], [2, 7, 8, 40, 11]], device=device)
mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], device=device)
for backend in ("gather", "triton"):
    model = SparseOPTForCausalLM.from_model(load_opt(folder, device=device), bundle, backend, "prompt", policy)
    sets = []
    model._decoder.on_select = lambda layer, target, column, keep: sets.append(keep.clone())
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens={n}, do_sample=False, pad_token_id=1)
    made[backend] = tokens, sets
assert torch.equal(made["gather"][0], made["triton"][0]), (made["gather"][0], made["triton"][0])
assert len(made["gather"][1]) == len(made["triton"][1]) > 0
assert all(torch.equal(a, b) for a, b in zip(made["gather"][1], made["triton"][1]))
print("equal")
"""
REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def opt_with_kernels(tmp_path_factory) -> str:
    from tests.conftest import save_tiny_opt

    folder = tmp_path_factory.mktemp("opt16")
    return str(save_tiny_opt(folder, hidden_size=32, word_embed_proj_dim=32, num_attention_heads=2, ffn_dim=48))


@pytest.mark.parametrize(
    ("policy", "lookahead", "dtype"),
    [("backfill", False, "float16"), ("stale", True, "float16"), ("always", False, "int4")],
)
def test_generate_equals_gather(opt_with_kernels, policy, lookahead, dtype):
    code = CASE.format(folder=opt_with_kernels, policy=policy, lookahead=lookahead, dtype=dtype, n=5)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


def test_without_a_gpu_it_says_so(opt_with_kernels, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    from dejavu_train.errors import UserError
    from dejavu_train.opt_model import load_opt
    from dejavu_train.triton_backend import TritonDecoder

    # Another test of this process may have asked for the interpreter.
    monkeypatch.setattr("dejavu_train.triton_backend.INTERPRET", False)
    with pytest.raises(UserError, match="needs a GPU; use backend='gather'"):
        TritonDecoder(load_opt(opt_with_kernels), None)
