"""The backend `triton` against `gather` over Hugging Face's own loops: same sets, same tokens; what it refuses."""

import pytest
import torch

from dejavu_train.errors import UserError
from dejavu_train.opt_model import load_opt
from dejavu_train.sparse_model import SparseOPTForCausalLM
from dejavu_train.triton_backend import TritonDecoder
from tests.bundles import make_bundle
from tests.conftest import save_tiny_opt

PADDED = torch.tensor([[1, 1, 2, 5], [2, 7, 8, 11]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "num_attention_heads": 2, "ffn_dim": 40}
    return str(save_tiny_opt(tmp_path_factory.mktemp("opt16"), **sizes))


def sparse(folder, device, backend, policy="backfill", **bundle):
    made = make_bundle(folder, **bundle).at(0.3, 0.5)
    return SparseOPTForCausalLM.from_model(load_opt(folder, device=device), made, backend, "prompt", policy)


@pytest.mark.parametrize(
    ("policy", "n", "options", "generation"),
    [
        ("backfill", 4, {"means": True, "dtype": "int8"}, {}),
        ("stale", 3, {"lookahead": True, "cascade": True, "dtype": "int4"}, {}),
        ("always", 3, {}, {"num_beams": 2}),
    ],
    ids=str,
)
def test_generate_equals_gather(folder, device, policy, n, options, generation):
    ids, mask = (tensor.to(device) for tensor in PADDED)
    made = {}
    for backend in ("gather", "triton"):
        model = sparse(folder, device, backend, policy, **options)
        sets = []
        model._decoder.on_select = lambda layer, target, column, keep, sets=sets: sets.append(keep.clone())
        tokens = model.generate(
            ids, attention_mask=mask, max_new_tokens=n, do_sample=False, pad_token_id=1, **generation
        )  # fmt: skip
        made[backend] = tokens, sets
    assert torch.equal(made["gather"][0], made["triton"][0])
    assert len(made["gather"][1]) == len(made["triton"][1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(made["gather"][1], made["triton"][1], strict=True))


def test_a_dense_layer_selects_everything(folder, device):
    bundle = make_bundle(folder).with_densities(
        {(0, "mlp"): 1.0, (0, "heads"): 1.0, (1, "mlp"): 0.4, (1, "heads"): 0.5}
    )
    logits = []
    for backend in ("gather", "triton"):
        model = SparseOPTForCausalLM.from_model(load_opt(folder, device=device), bundle, backend, 0)
        with torch.no_grad():
            logits.append(model(PADDED[0][1:, :1].to(device)).logits)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_too_many_rows_are_refused(folder, device):
    model = sparse(folder, device, "triton")
    with pytest.raises(UserError, match="at most 32 rows"), torch.no_grad():
        cache = model(torch.full((33, 1), 2, device=device)).past_key_values
        model(torch.full((33, 1), 5, device=device), past_key_values=cache)


def test_without_a_gpu_it_says_so(folder, monkeypatch):
    monkeypatch.setattr("dejavu_train.triton_backend.INTERPRET", False)
    with pytest.raises(UserError, match="needs a GPU; use backend='gather'"):
        TritonDecoder(load_opt(folder, device="cpu"), None)


def test_a_head_dim_without_kernels_is_refused(tmp_path, device):
    sizes = {"hidden_size": 48, "word_embed_proj_dim": 48, "num_attention_heads": 2, "ffn_dim": 40}
    with pytest.raises(UserError, match="head dim 24 has no kernels"):
        TritonDecoder(load_opt(str(save_tiny_opt(tmp_path, **sizes)), device=device), None)
