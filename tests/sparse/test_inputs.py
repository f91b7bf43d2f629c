"""Inputs at the edges: prompts, masks and caches that are refused in a line before anything is shown, or taken."""

import copy

import pytest
import torch
from bundles import make_bundle
from signature_rows import BACKENDS, IDS, Recorder

from dejavu_train import SparseOPTForCausalLM
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model
from dejavu_train.sparse.inputs import keep_columns

GREEDY = {"max_new_tokens": 4, "do_sample": False}
FULL = torch.full((1, 512), 30)


@pytest.fixture(scope="module")
def models(tiny_opt):
    bundle = make_bundle(tiny_opt).at(mlp_density=1.0, head_density=1.0)
    made = {}
    for backend in (*BACKENDS, "auto"):
        ops = "reference" if backend == "triton" else "triton"
        made[backend] = SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), bundle, backend, ops=ops)
    return made


REFUSED = {
    "several dimensions": ({"inputs": IDS[0]}, r"takes input_ids \(batch, tokens\), got \(5,\)"),
    "a list": ({"inputs": [[2, 30]]}, "of int64 or int32, got list"),
    "what a tokenizer returns": ({"inputs": {"input_ids": IDS}}, r"got dict: unpack it, model\(\*\*inputs\)"),
    "numbers": ({"inputs": IDS.float()}, r"got \(1, 5\) of torch.float32"),
    "nothing": ({"inputs": IDS[:, :0]}, "holds no token"),
    "no token": ({"inputs": IDS + 300}, "must lie in 0 to 319, got 302 to 333"),
    "too many": ({"inputs": torch.full((1, 513), 30)}, "has 513 tokens and the model 512 positions"),
    "a short mask": ({"inputs": IDS, "attention_mask": torch.ones(1, 4)}, r"= \(1, 5\), got \(1, 4\)"),
    "a mask of nothing": ({"inputs": IDS, "attention_mask": 0 * IDS}, "row 0 of the prompts is padding everywhere"),
    "padding alone": ({"inputs": torch.cat([IDS, 0 * IDS + 1])}, "row 1 of the prompts is padding everywhere"),
    "no cache": ({"inputs": IDS, "past_key_values": ((IDS, IDS),)}, "must be a Cache, got tuple"),
    "paged": ({"inputs": IDS, "cache_implementation": "paged"}, "continuous batching"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_prompts_are_refused_in_a_line_before_a_streamer_has_one(case, models):
    options, part = REFUSED[case]
    for backend, model in models.items():
        streamer = Recorder()
        with pytest.raises(UserError, match=part) as refused:
            model.generate(**options, **GREEDY, streamer=streamer)
        assert "\n" not in str(refused.value) and streamer.seen == [], backend


def test_continuous_batching_is_refused_rather_than_left_waiting(models):
    for model in models.values():
        with pytest.raises(UserError, match="for dense models"):
            model.generate_batch([[2, 30]])


def test_a_prompt_of_all_positions(dense, models):
    wanted = dense.generate(FULL, max_new_tokens=1, do_sample=False)
    for backend in ("mask", "gather", "auto"):
        models[backend].sparse_from = 508  # what lies before is one dense chunk
        assert torch.equal(models[backend].generate(FULL, max_new_tokens=1, do_sample=False), wanted), backend
        models[backend].sparse_from = 0
    for backend in ("cpu", "triton"):
        with pytest.raises(UserError, match="holds 512 tokens, .* got 513; use backend='gather'"):
            models[backend].generate(FULL, max_new_tokens=1, do_sample=False)
        with pytest.raises(UserError, match="the prompt's 512 tokens take the model's 512 positions; shorten"):
            models[backend].generate(FULL, do_sample=False)


def test_a_typing_mistake_is_not_taken_for_a_setting_that_is_off(models):
    for model in models.values():
        with pytest.raises(ValueError, match="retrun_dict"):
            model.generate(IDS, retrun_dict=False, **GREEDY)


def test_what_goes_on_behind_a_cache(dense, models):
    """The whole text, or new tokens with a mask of all. A mask that is one too short would move every position."""
    text = torch.tensor([[2, 30, 31, 32, 33, 40, 41]])
    wanted = dense.generate(text, **GREEDY)
    for backend in ("mask", "gather", "auto"):
        model = models[backend]
        with torch.no_grad():
            cache = model(text[:, :5], use_cache=True).past_key_values
        assert torch.equal(model.generate(text, past_key_values=copy.deepcopy(cache), **GREEDY), wanted)
        rest, mask = text[:, 5:], torch.ones(1, 7, dtype=torch.int64)
        got = model.generate(rest, attention_mask=mask, past_key_values=copy.deepcopy(cache), **GREEDY)
        assert torch.equal(got[:, 2:], wanted[:, 7:])
        for short in (1, 3, 6):
            with pytest.raises(UserError, match=r"= \(1, 2\), or \(1, 7\) with those in the cache"):
                model.generate(rest, attention_mask=mask[:, :short], past_key_values=cache, **GREEDY)
        for tokens in (rest, text[:, :5]):
            with pytest.raises(UserError, match="the cache holds 5 tokens and the prompt has"):
                model.generate(tokens, past_key_values=cache, **GREEDY)
        assert cache.get_seq_length() == 5


@torch.no_grad()
def test_forward_passes_at_the_edges(dense, models):
    for backend, model in models.items():
        if backend == "cpu":
            continue
        assert torch.allclose(model(IDS[0]).logits, dense(IDS[0]).logits, atol=2e-3), "a row without its batch"
        for options, part in (
            ({"input_ids": IDS.float()}, "int64 or int32"),
            ({"input_ids": IDS[:0]}, "holds no token"),
            ({"input_ids": IDS, "past_key_values": "x"}, "must be a Cache, got str"),
            ({"input_ids": IDS, "position_ids": torch.arange(4)[None]}, r"must be int64 of \(1, 5\)"),
            ({"input_ids": IDS, "position_ids": torch.arange(5)[None] - 3}, "at least 0, got -3"),
            ({"input_ids": IDS, "position_ids": torch.arange(5)[None] + 510}, "do not fit the model's 512"),
        ):
            with pytest.raises(UserError, match=part):
                model(**options)


@torch.no_grad()
def test_what_the_config_asks_for_counts_as_asked_for(models):
    for backend in ("gather", "triton", "auto"):
        model = models[backend]
        model.config.output_hidden_states = True
        try:
            with pytest.raises(UserError, match="only the backend mask gives hidden_states"):
                model(IDS)
            assert model(IDS, output_hidden_states=False).hidden_states is None
        finally:
            model.config.output_hidden_states = False


@torch.no_grad()
def test_a_cache_comes_back_as_in_transformers(dense, models):
    for options in ({}, {"use_cache": True}, {"use_cache": False}):
        wanted = dense(IDS, **options).past_key_values is None
        assert (models["gather"](IDS, **options).past_key_values is None) == wanted
        cache = models["gather"].new_cache()
        assert models["gather"](IDS, past_key_values=cache, **options).past_key_values is cache
    model = models["gather"]
    model.config.use_cache = False
    try:
        assert model(IDS).past_key_values is None and model(IDS, use_cache=True).past_key_values is not None
    finally:
        model.config.use_cache = True


def test_columns_that_are_kept():
    values = torch.arange(12).reshape(2, 3, 2)
    assert torch.equal(keep_columns(values, 0), values) and torch.equal(keep_columns(values, 2), values[:, 1:])
    assert torch.equal(keep_columns(values, torch.tensor([0, 2])), values[:, [0, 2]])
    assert keep_columns(values, torch.tensor([[0, 2], [1, 1]])).tolist() == [[[0, 1], [4, 5]], [[8, 9], [8, 9]]]
    flat = keep_columns(values, torch.tensor([[True, False, False], [False, True, True]]))
    assert flat.tolist() == [[0, 1], [8, 9], [10, 11]]
