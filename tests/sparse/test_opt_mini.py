"""The embedded model itself: `gather`, token by token with its cache, computes what `mask` computes."""

import inspect
import json
import math

import pytest
import torch
from bundles import make_bundle
from conftest import REPOSITORY
from transformers import AutoTokenizer

from dejavu_train import Bundle
from dejavu_train.models.load import load_model
from dejavu_train.sparse.model import SparseOPTForCausalLM

MODEL = REPOSITORY / "checkpoints" / "opt-mini"


@pytest.mark.parametrize("cascade", [False, True], ids=["one stage", "cascade"])
@torch.no_grad()
def test_gather_is_mask_on_opt_mini(cascade):
    """Logits of two rows of 24 tokens. A logit at its threshold may fall on either side, so a few positions may
    differ. The perplexity may not."""
    bundle = make_bundle(MODEL, means=True, dtype="int4" if cascade else "float16", cascade=cascade).at(0.2, 0.7)
    ids = torch.randint(4, 8000, (2, 24), generator=torch.Generator().manual_seed(1))
    mask = SparseOPTForCausalLM.from_model(load_model(str(MODEL)), bundle, "mask")(ids).logits
    gather = SparseOPTForCausalLM.from_model(load_model(str(MODEL)), bundle, "gather")
    cache = gather.new_cache()
    steps = [gather(ids[:, t : t + 1], past_key_values=cache).logits for t in range(ids.shape[1])]
    got = torch.cat(steps, dim=1)
    near = (got - mask).abs().amax(-1) <= 1e-4 * mask.abs().max()
    assert near.float().mean() >= 0.9
    nats = [torch.nn.functional.cross_entropy(x[:, :-1].transpose(1, 2), ids[:, 1:]) for x in (got, mask)]
    assert abs(math.expm1(float(nats[0] - nats[1]))) < 1e-3
    dense = load_model(str(MODEL))(ids).logits
    assert ((dense - mask).abs().amax(-1) > 0.01 * mask.abs().max()).float().mean() > 0.9  # the selection is felt


@torch.no_grad()
def test_the_bundle_beside_opt_mini_was_trained_for_it():
    """With a fifth of the neurons as candidates the perplexity stays. Random predictors do not keep it."""
    folder = MODEL / "bundle"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 800_000
    bundle = Bundle.from_pretrained(folder)
    bundle.check_model(str(MODEL))
    assert json.loads((folder / "bundle.json").read_text("utf-8"))["model"] == ".."
    assert bundle.mean_density("mlp") == pytest.approx(0.2, abs=0.01)
    text = inspect.getdoc(torch.nn.MultiheadAttention)
    ids = AutoTokenizer.from_pretrained(MODEL)(text, return_tensors="pt").input_ids[:, :512]
    model = SparseOPTForCausalLM.from_pretrained(str(MODEL), bundle, "mask")

    def change(used):
        model.set_bundle(used)
        sparse = model(ids, labels=ids).loss
        model.set_bundle(used.at(1.0, 1.0))
        return math.exp(float(sparse - model(ids, labels=ids).loss)) - 1

    assert abs(change(bundle)) < 0.05 < change(make_bundle(MODEL, dtype="int4", cascade=True).at(0.2, 0.85))
