"""generate() and caches of gather: padded prompts, beams, several sequences, rows that end, chunks."""

import copy

import pytest
import torch
from sparse_helpers import close, gather_sets, padded, sparse, tokens
from transformers import DynamicCache, GenerationConfig

from dejavu_train.bundle.selector import PredictorSelector
from dejavu_train.ground.errors import UserError
from dejavu_train.sparse import generation as generation_module
from dejavu_train.sparse import inputs as inputs_module
from dejavu_train.sparse import masked as masked_module
from dejavu_train.sparse.masked import masking


@pytest.mark.parametrize("backend", ["mask", "gather"])
def test_a_call_looks_once_for_padding_and_compiled_parts(dense, bundle, backend, monkeypatch):
    """Not once in every forward pass of its loop."""
    looks = []
    for module, name in ((inputs_module, "padding_mask"), (masked_module, "refuse_compiled")):
        real = getattr(module, name)
        noted = lambda *given, real=real, name=name: (looks.append(name), real(*given))[1]  # noqa: E731
        for place in (module, generation_module):
            monkeypatch.setattr(place, name, noted, raising=False)
    model, ids = sparse(dense, bundle, backend), tokens(2, 6)
    model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=1, eos_token_id=None)
    assert sorted(looks) == ["padding_mask", *(["refuse_compiled"] if backend == "mask" else [])]
    model(ids)
    assert looks.count("refuse_compiled") == (2 if backend == "mask" else 0)


def test_right_padded_prompts_are_refused(dense, bundle):
    model, ids = sparse(dense, bundle, "gather"), tokens(2, 6)
    ids[1, 4:] = 1  # <pad>
    given = {"attention_mask": (ids != 1).long(), "max_new_tokens": 2, "do_sample": False, "pad_token_id": 1}
    for settings in (given, {name: value for name, value in given.items() if name != "attention_mask"}):
        with pytest.raises(UserError, match="row 1 has it on the right; set tokenizer.padding_side = 'left'"):
            model.generate(ids, **settings)
    model.generate(ids, **given | {"attention_mask": torch.ones_like(ids)})  # the token stands there as a token


def test_finished_rows_leave_the_union(dense, bundle):
    ids = tokens(2, 6)
    model = sparse(dense, bundle, "gather")
    free = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    ending = int(free[0, 8])  # row 0 ends here, row 1 goes on unless it says the same word
    seen = gather_sets(model)
    ended = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=ending, pad_token_id=1)
    first = (free[0, 6:] == ending).nonzero()[0].item() + 6
    others = (free[1, 6:] == ending).nonzero()
    last = others[0].item() + 6 if len(others) else free.shape[1] - 1
    assert last > first + 1, "both rows end together, the test shows nothing"
    assert torch.equal(ended[1], free[1, : ended.shape[1]])
    assert (ended[0, first + 1 :] == 1).all()
    after = torch.stack(seen[0, "mlp"][first:])  # columns from the one that holds the ending token on
    assert not after[:, 0].any() and after[:, 1].any()


def test_a_stop_token_of_a_prompt_ends_nothing(dense, bundle):
    ids = tokens(2, 6)
    ids[0, -1] = ids[1, 2] = 2
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 2, "pad_token_id": 1}
    plain = sparse(dense, bundle, "mask").generate(ids, **settings)
    gather = sparse(dense, bundle, "gather")
    assert torch.equal(gather.generate(ids, prefill_chunk_size=1, **settings), plain)
    cache = gather.new_cache()
    gather(ids[:, :-1], past_key_values=cache)
    assert torch.equal(gather.generate(ids, past_key_values=cache, **settings), plain)


@pytest.mark.parametrize("backend", ["mask", "gather", "auto"])
def test_a_text_out_of_nothing_begins_with_the_start_token_that_there_is(dense, bundle, backend, monkeypatch):
    model = sparse(dense, bundle, backend)
    started = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**started), model.generate(torch.tensor([[2]]), **started))
    monkeypatch.setattr(model.generation_config, "bos_token_id", None)
    with pytest.raises(UserError, match="begins with bos_token_id, and this model names none; give input_ids"):
        model.generate(**started)


@pytest.mark.parametrize("backend", ["mask", "gather", "auto"])
def test_what_a_generation_config_leaves_out_is_the_models(dense, bundle, backend):
    model = sparse(dense, bundle, backend, sparse_from="prompt")
    assert (model.generation_config.pad_token_id, model.generation_config.eos_token_id) == (1, 2)
    ids, mask = padded([tokens(1, n, seed=n)[0].tolist() for n in (4, 9)])
    given = GenerationConfig(max_new_tokens=10)
    assert torch.equal(model.generate(ids, given), model.generate(ids, given, attention_mask=mask))
    if backend == "gather":
        with pytest.raises(UserError, match="row 0 has it on the right"):
            model.generate(ids.flip(1), given)
        model.generation_config.cache_implementation = "static"
        try:
            with pytest.raises(UserError, match="leave cache_implementation out"):
                model.generate(ids, given)
        finally:
            model.generation_config.cache_implementation = None


@pytest.mark.parametrize("backend", ["mask", "gather", "auto"])
def test_a_padding_token_that_ends_texts_is_a_token_of_the_prompt(dense, bundle, backend):
    ids = torch.tensor([[2, 44, 2, 16, 202, 77]])
    model = sparse(dense, bundle, backend, sparse_from="prompt")
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 2}
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert torch.equal(model.generate(ids, **settings), wanted)


@pytest.mark.parametrize("backend", ["mask", "gather"])
def test_use_cache_none_is_its_default(dense, bundle, backend):
    model, settings = sparse(dense, bundle, backend), {"max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(tokens(2, 5), **settings)
    assert torch.equal(model.generate(tokens(2, 5), use_cache=None, **settings), wanted)


@pytest.mark.parametrize("backend", ["gather", "auto"])
def test_embeddings_are_cached_whatever_is_asked(dense, bundle, backend):
    given = {"inputs_embeds": dense.get_input_embeddings()(tokens(2, 5)).detach(), "max_new_tokens": 6}
    got, wanted = (
        sparse(dense, bundle, name).generate(**given, do_sample=False, use_cache=False) for name in (backend, "mask")
    )
    assert torch.equal(got, wanted)


def test_cache_operations_keep_the_logits_right(dense, bundle):
    gather, mask = sparse(dense, bundle, "gather"), sparse(dense, bundle, "mask")
    ids, more = tokens(3, 9), tokens(3, 4, seed=5)

    def step(cache, new):
        return gather(new, past_key_values=cache).logits

    with torch.no_grad():
        start = gather.new_cache()
        step(start, ids)
        order = torch.tensor([2, 0, 0])
        for name, rows, argument in [
            ("reorder_cache", ids[order], order),
            ("batch_select_indices", ids[order[:2]], order[:2]),
            ("batch_repeat_interleave", ids.repeat_interleave(2, 0), 2),
        ]:
            cache = copy.deepcopy(start)
            getattr(cache, name)(argument)
            new = more[:1].expand(len(rows), -1)
            close(step(cache, new), mask(torch.cat([rows, new], 1)).logits[:, 9:])
        for argument in (-4, 5):
            cache = copy.deepcopy(start)
            cache.crop(argument)
            assert cache.get_seq_length() == 5
            close(step(cache, more), mask(torch.cat([ids[:, :5], more], 1)).logits[:, 5:])
        start.reset()
        assert start.get_seq_length() == 0
        close(step(start, more[:1]), mask(more[:1]).logits)


def test_chunks_of_any_length_agree(dense, bundle):
    ids = tokens(2, 20)
    model = sparse(dense, bundle, "gather", sparse_from=7)
    with torch.no_grad():
        cache = model.new_cache()
        parts = [model(part, past_key_values=cache).logits for part in ids.split([3, 1, 6, 10], dim=1)]
        close(torch.cat(parts, 1), sparse(dense, bundle, "mask", sparse_from=7)(ids).logits)
        # dense columns after sparse ones: the back-fill also serves a chunk
        model.sparse_from = 0
        cache = model.new_cache()
        model(ids[:, :9], past_key_values=cache)
        model.sparse_from = 100
        got = model(ids[:, 9:], past_key_values=cache).logits
        starts = torch.zeros(2, 20, dtype=torch.bool)
        starts[:, :9] = True
        with masking(dense, PredictorSelector(bundle), starts):
            close(got, dense(ids).logits[:, 9:])


def test_another_cache_and_other_outputs_are_refused_by_name(dense, bundle):
    model = sparse(dense, bundle, "gather")
    with pytest.raises(UserError, match="SparseCache, got DynamicCache"):
        model(tokens(1, 3), past_key_values=DynamicCache(config=model.config))
    with pytest.raises(UserError, match="attentions"):
        model(tokens(1, 3), output_attentions=True)
    with pytest.raises(UserError, match="attention_mask"):
        model(tokens(1, 3), attention_mask=torch.ones(1, 9))
    with pytest.raises(UserError, match="belongs to the backend gather"):
        dense(tokens(1, 3), past_key_values=model.new_cache())
    cache = model.new_cache()
    model(tokens(2, 3), past_key_values=cache)
    with pytest.raises(UserError, match="holds 2 rows"):
        model(tokens(3, 3), past_key_values=cache)
    with pytest.raises(UserError, match="sparse_from has 3 rows"):
        sparse(dense, bundle, "mask", sparse_from=torch.tensor([1, 2, 3]))(tokens(2, 3))


@pytest.mark.parametrize("backend", ["mask", "gather"])
def test_more_tokens_than_positions_are_refused(dense, bundle, backend):
    model, limit = sparse(dense, bundle, backend), dense.config.max_position_embeddings
    with pytest.raises(UserError, match=f"{limit + 1} tokens do not fit the model's {limit} positions"):
        model(tokens(1, limit + 1))
    with pytest.raises(UserError, match="do not fit"):
        model.generate(tokens(1, limit - 1), max_new_tokens=4, do_sample=False, eos_token_id=None)
    ids, mask = tokens(1, limit + 2), torch.ones(1, limit + 2, dtype=torch.long)
    mask[:, :2] = 0  # padding takes no position
    assert model(ids, attention_mask=mask).logits.shape[1] == limit + 2
