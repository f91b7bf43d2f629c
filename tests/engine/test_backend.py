"""backend="triton": generate() and forward() through the engine, here with its operations in plain torch on a CPU."""

import logging

import pytest
import torch
from bundles import make_bundle
from conftest import save_tiny_opt
from sparse_helpers import tokens
from torch.nn import functional as F
from transformers import (
    OPTForCausalLM,
)
from transformers.generation.streamers import BaseStreamer

from dejavu_train.engine.generation import Stream
from dejavu_train.engine.inputs import MAX_BATCH
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model
from dejavu_train.sparse.model import SparseOPTForCausalLM

GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "num_attention_heads": 2, "ffn_dim": 64}
    return str(save_tiny_opt(tmp_path_factory.mktemp("opt16"), **sizes))


@pytest.fixture(scope="module")
def bundle(folder):
    return make_bundle(folder).at(0.3, 0.5)


def sparse(folder, bundle, backend="triton", sparse_from=0, **options):
    ops = {} if backend == "gather" else {"ops": "reference"}
    return SparseOPTForCausalLM.from_model(load_model(folder), bundle, backend, sparse_from, **ops, **options)


def padded(lengths, left=True, pad=1):
    rows = [tokens(1, n, seed=n)[0].tolist() for n in lengths]
    width = max(lengths)
    ids = torch.tensor([[pad] * (width - len(r)) + r if left else r + [pad] * (width - len(r)) for r in rows])
    return ids, (ids != pad).long()


@pytest.mark.parametrize("start", [0, 4, "prompt"])
@pytest.mark.parametrize("options", [{}, {"cascade": True}, {"lookahead": True, "means": True}], ids=str)
def test_greedy_rows_of_unequal_lengths_equal_gather(folder, start, options):
    made, (ids, mask) = make_bundle(folder, **options).at(0.4, 0.5), padded((3, 11, 7))
    out = {}
    for backend in ("gather", "triton"):
        model = sparse(folder, made if backend == "triton" else made.one_stage(), backend, start)
        out[backend] = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(out["gather"], out["triton"])
    assert model._runtime.gatherer is None, "the engine must have done it"


def test_right_padding_generates_as_alone(folder, bundle):
    ids, mask = padded((5, 9), left=False)
    model = sparse(folder, bundle)
    out = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(out[:, :9], ids)
    for row, length in enumerate((5, 9)):
        alone = sparse(folder, bundle, "gather").generate(ids[row : row + 1, :length], **GREEDY)
        assert torch.equal(out[row, 9:], alone[0, length:])


@pytest.mark.parametrize("settings", [{"top_k": 0}, {"top_k": 3}, {"top_p": 0.5, "top_k": 0}, {"temperature": 0.3}])
def test_sampling_repeats_with_the_seed_and_stays_in_its_set(folder, bundle, settings):
    engine, ids = sparse(folder, bundle), tokens(2, 6)
    made = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        made.append(engine.generate(ids, max_new_tokens=8, do_sample=True, num_return_sequences=2, **settings))
    assert made[0].shape[0] == 4 and torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])
    with torch.no_grad():
        logits = engine(made[0]).logits[:, 5:-1]
    if settings.get("top_k"):
        best = logits.topk(settings["top_k"]).indices
        assert (best == made[0][:, 6:, None]).any(-1).all()


class Heard(BaseStreamer):
    def __init__(self):
        self.parts, self.ended = [], False

    def put(self, value):
        self.parts.append(value.clone())

    def end(self):
        self.ended = True


def test_a_row_that_has_ended_holds_up_no_other():
    heard = Heard()
    stream = Stream(heard, 2, 1, [9])
    for row, token in ((0, 7), (0, 9), (1, 5), (1, 6)):
        stream.add(row, token)
    assert [part.tolist() for part in heard.parts] == [[7, 5], [9, 6]]
    stream.add(1, 4)
    assert heard.parts[-1].tolist() == [1, 4]


def test_batches_that_the_engine_refuses(folder, bundle):
    engine, ids = sparse(folder, bundle), tokens(1, 4)
    with pytest.raises(UserError, match="at most 32 rows at once, got 33"):
        engine.generate(tokens(33, 4), **GREEDY)
    with pytest.raises(UserError, match="leaves no room"):
        engine.generate(ids, max_length=4)
    with pytest.raises(UserError, match="model's limit is 512"):
        engine.generate(ids, max_new_tokens=510)


def test_auto_falls_back_to_gather_and_says_so_once(folder, bundle, caplog):
    auto, gather = sparse(folder, bundle, "auto"), sparse(folder, bundle, "gather")
    assert auto.backend == "triton"
    ids, beams = tokens(2, 6), {"max_new_tokens": 6, "num_beams": 2, "do_sample": False}
    with caplog.at_level(logging.WARNING, "dejavu_train"):
        for _ in range(2):
            assert torch.equal(auto.generate(ids, **beams), gather.generate(ids, **beams))
    said = [record.getMessage() for record in caplog.records if record.name.startswith("dejavu_train")]
    assert len(said) == 1 and "num_beams=2" in said[0] and "gather runs instead" in said[0]
    assert torch.equal(auto.generate(ids, **GREEDY), gather.generate(ids, **GREEDY))
    with torch.no_grad():
        out = auto(ids, use_cache=True)
        step = auto(ids[:, :1], past_key_values=out.past_key_values).logits
        want = gather(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1:]
    torch.testing.assert_close(step, want, atol=1e-4, rtol=1e-4)


def test_auto_without_a_gpu_is_the_engine_for_cpus(folder, bundle, caplog, monkeypatch):
    monkeypatch.setattr("dejavu_train.kernels.common.checks.INTERPRET", False)
    assert SparseOPTForCausalLM.from_model(load_model(folder), bundle).backend == "cpu"
    with caplog.at_level(logging.WARNING, "dejavu_train"):
        made = SparseOPTForCausalLM.from_model(load_model(folder), bundle, zeros="read")
    assert made.backend == "gather" and "never reads rows of silent neurons" in caplog.text
    with pytest.raises(UserError, match="needs a GPU.*use backend='gather'"):
        SparseOPTForCausalLM.from_model(load_model(folder), bundle, "triton")


@pytest.mark.parametrize("batch", [1, 35])
@pytest.mark.parametrize("options", [{}, {"cascade": True}], ids=str)
def test_forward_scores_every_position_as_mask_does(folder, batch, options):
    made, ids = make_bundle(folder, **options).at(0.4, 0.5), tokens(batch, 14)
    with torch.no_grad():
        for start in (0, 5):
            expected = sparse(folder, made.one_stage(), "mask", start)(ids, labels=ids)
            got = sparse(folder, made, "triton", start)(ids, labels=ids)
            torch.testing.assert_close(got.logits, expected.logits, atol=2e-4, rtol=2e-4)
            torch.testing.assert_close(got.loss, expected.loss, atol=1e-4, rtol=1e-4)
    assert got.past_key_values is None


@pytest.mark.parametrize("left", [True, False])
def test_forward_with_padding(folder, bundle, left):
    ids, mask = padded((5, 9, 2), left)
    labels = ids.masked_fill(mask == 0, -100)
    with torch.no_grad():
        expected = sparse(folder, bundle, "mask")(ids, attention_mask=mask, labels=labels)
        engine = sparse(folder, bundle)
        got = engine(ids, attention_mask=mask, labels=labels)
        seen = mask.bool()
        torch.testing.assert_close(got.logits[seen], expected.logits[seen], atol=2e-4, rtol=2e-4)
        assert engine(ids, attention_mask=mask, logits_to_keep=2).logits.shape == (3, 2, 320)
        loss = engine(ids, attention_mask=mask, labels=labels, return_dict=False)[0]
        torch.testing.assert_close(loss, got.loss)
    shifted = F.cross_entropy(got.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(got.loss, shifted)


def test_a_full_context_is_scored(folder, bundle):
    ids = tokens(1, 512)
    with torch.no_grad():
        got = sparse(folder, bundle)(ids).logits
        torch.testing.assert_close(got, sparse(folder, bundle, "mask")(ids).logits, atol=5e-4, rtol=5e-4)


def test_engines_are_made_once_for_a_size_and_reused(folder, bundle, monkeypatch):
    engine = sparse(folder, bundle)
    backend, made = engine._runtime.engines, []
    build = backend._make
    monkeypatch.setattr(backend, "_make", lambda *size: made.append(size) or build(*size))
    for rows, new in ((1, 5), (1, 9), (2, 5), (3, 5), (4, 5), (1, 300)):
        engine.generate(tokens(rows, 6), max_new_tokens=new, do_sample=False)
    assert made == [(1, 256), (2, 256), (4, 256), (1, 512)]
    assert set(backend.engines) == {1, 2, 4} and max(backend.engines) <= MAX_BATCH
    made.clear()
    monkeypatch.setattr(backend, "_make", _out_of_memory_once(build, made))
    engine.generate(tokens(20, 6), max_new_tokens=4, do_sample=False)
    assert made == [(32, 256), (32, 256)] and set(backend.engines) == {32}


def _out_of_memory_once(build, made):
    def make(*size):
        made.append(size)
        if len(made) == 1:
            raise torch.cuda.OutOfMemoryError("no room")
        return build(*size)

    return make


def test_the_weights_exist_once_and_the_dense_model_stays_right(folder, bundle, tmp_path):
    dense, ids = load_model(folder), tokens(2, 9)
    with torch.no_grad():
        before = dense(ids).logits
        names = {name for name in dense.state_dict()}
        model = SparseOPTForCausalLM.from_model(dense, bundle, "triton", ops="reference")
        model.generate(ids[:1], **GREEDY)
        model.generate(ids, **GREEDY)
        torch.testing.assert_close(dense(ids).logits, before)
    own = {p.untyped_storage().data_ptr() for p in dense.parameters()}
    for held in model._runtime.engines.engines.values():
        for layer in held.weights.layers:
            for name in ("qkv", "out", "up", "down"):
                assert getattr(layer, name).weight.numbers.untyped_storage().data_ptr() in own, f"{name} exists twice"
        assert held.weights.embedding.data_ptr() == dense.model.decoder.embed_tokens.weight.data_ptr()
    total = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in dense.parameters()}.values())
    plain = sum(p.nbytes for p in load_model(folder).parameters())
    assert total <= 1.01 * plain
    assert set(dense.state_dict()) == names
    model.save_pretrained(tmp_path / "saved")
    again = OPTForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, before)


def test_an_edit_that_would_be_lost_is_refused(folder, bundle):
    model, ids = sparse(folder, bundle), tokens(1, 6)
    before = model.generate(ids, **GREEDY)
    query = model.model.decoder.layers[0].self_attn.q_proj
    with torch.no_grad(), pytest.raises(RuntimeError, match="[Ii]n-?place update to inference tensor"):
        query.weight.mul_(-3.0)
    with torch.no_grad():
        query.rows.mul_(-3.0)
    reference = sparse(folder, bundle, "gather")
    reference.load_state_dict(model.state_dict())
    after = model.generate(ids, **GREEDY)
    assert torch.equal(after, reference.generate(ids, **GREEDY)) and not torch.equal(after, before)


def test_other_thresholds_and_dtypes(folder, bundle):
    model, ids = sparse(folder, bundle), tokens(2, 7)
    model.generate(ids, **GREEDY)
    other = make_bundle(folder).at(0.6, 1.0)
    model.set_bundle(other)
    assert torch.equal(model.generate(ids, **GREEDY), sparse(folder, other, "gather").generate(ids, **GREEDY))
    moved = model.to(torch.bfloat16)
    assert moved._runtime.engines.weights.embedding.dtype == torch.bfloat16
    assert moved.generate(ids, **GREEDY).shape == (2, 19)
    with pytest.raises(UserError, match="computes in float32, float16, bfloat16.*float64"):
        model.to(torch.float64).generate(ids, **GREEDY)


def test_a_model_over_several_devices_is_refused(folder, bundle):
    dense = load_model(folder)
    dense.lm_head = torch.nn.Linear(32, 320, bias=False, device="meta")
    with pytest.raises(UserError, match="one device.*use backend='gather'"):
        SparseOPTForCausalLM.from_model(dense, bundle, "triton")
