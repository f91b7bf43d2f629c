"""Tasks through the engine on a GPU: the log-likelihoods of `mask`, and generation.

python -m pytest -m gpu tests/extras/test_lm_eval_gpu.py
"""

import pytest
from bundles import make_bundle
from conftest import make_text, save_tiny_opt

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

from lm_eval.api.instance import Instance

from dejavu_train import SparseOPTForCausalLM
from dejavu_train.extras.tasks.model import DejavuLM
from dejavu_train.models.load import load_model, load_tokenizer

pytestmark = pytest.mark.gpu
WORDS = make_text(600).split()
PAIRS = [
    (" ".join(WORDS[7 * i : 7 * i + 3 + i]), " " + " ".join(WORDS[7 * i + 3 + i : 7 * i + 6 + i])) for i in range(40)
]


@pytest.mark.parametrize("sparse_from", [0, "prompt"])
@pytest.mark.parametrize("options", [{}, {"cascade": True}], ids=str)
def test_the_engine_scores_what_mask_scores(tmp_path, options, sparse_from):
    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "num_attention_heads": 4, "ffn_dim": 128}
    folder = str(save_tiny_opt(tmp_path, **sizes))
    bundle, asked = make_bundle(folder, **options).at(0.4, 0.5), [Instance("loglikelihood", {}, p, 0) for p in PAIRS]
    scores = {}
    for backend, read in (("mask", bundle.one_stage()), ("triton", bundle)):
        model = SparseOPTForCausalLM.from_model(load_model(folder, device="cuda"), read, backend, sparse_from)
        lm = DejavuLM(model, sparse_from=sparse_from, tokenizer=load_tokenizer(folder), batch_size=37)
        scores[backend] = lm.loglikelihood(asked, disable_tqdm=True)
    far = 0
    for (_, continuation), (nats, _), (wanted, _) in zip(PAIRS, scores["triton"], scores["mask"], strict=True):
        tokens = len(lm.tok_encode(continuation, add_special_tokens=False))
        far += abs(nats - wanted) > 1e-3 * tokens
    assert far <= 1, "a logit at its threshold may fall on either side, rarely"
    asked = [Instance("generate_until", {}, ("the model", {"until": ["."], "max_gen_toks": 9}), 0)]
    assert isinstance(lm.generate_until(asked, disable_tqdm=True)[0], str)
