"""Lossless decoding of whole models: what a bundle asks for, guards, streams, and bundles of other weights."""

import dataclasses

import pytest
import torch
from bundles import make_bundle

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.guard_config import Guard
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model
from dejavu_train.sparse.model import SparseOPTForCausalLM

IDS = torch.tensor([[2, 5, 6, 7, 8]])
SETTINGS = {"max_new_tokens": 20, "min_new_tokens": 20, "pad_token_id": 1, "do_sample": False}


@pytest.fixture(scope="module")
def bundle(tiny_opt):
    return make_bundle(tiny_opt, means=True).at(0.2, 0.4)


@pytest.fixture(scope="module")
def dense(tiny_opt):
    return load_model(str(tiny_opt)).generate(IDS, **SETTINGS)


def asking(bundle, value):
    return dataclasses.replace(bundle, metadata={**bundle.metadata, "lossless": value})


@pytest.mark.parametrize("value", [True, {}, {"draft_length": 2}, {"draft_weights": "int8"}])
def test_a_bundle_may_ask_for_lossless_text(tiny_opt, bundle, dense, tmp_path, value):
    asking(bundle, value).save_pretrained(tmp_path)
    model = SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), Bundle.from_pretrained(tmp_path), "cpu")
    assert torch.equal(model.generate(IDS, **SETTINGS), dense)
    report = model.lossless_report()
    assert report["tokens"] == 19 and report["drafted"] > 0
    model.generate(IDS, lossless=False, **SETTINGS)
    assert model.lossless_report() is None
    model.generate(IDS, draft_length=0, **SETTINGS)
    assert model.lossless_report()["drafted"] == 0, "what the call says counts"
    with pytest.raises(UserError, match="or lossless=False"):
        model.generate(IDS.repeat(2, 1), **SETTINGS)


def test_what_a_bundle_asks_for_is_checked(tiny_opt, bundle):
    for value, message in (
        ("yes", "write true, false, or an object with draft_length and draft_weights"),
        ({"length": 3}, "write true, false, or an object"),
        ({"draft_length": 9}, "0 to 7"),
    ):
        model = SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), asking(bundle, value), "cpu")
        with pytest.raises(UserError, match=message):
            model.generate(IDS, **SETTINGS)
    model = SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), asking(bundle, False), "cpu")
    model.generate(IDS, **SETTINGS)
    assert model.lossless_report() is None


def test_a_guard_and_lossless_together_are_one_line(tiny_opt, bundle):
    dense = load_model(str(tiny_opt))
    model = SparseOPTForCausalLM.from_model(dense, bundle, "triton", ops="reference", guard=Guard(4))
    with pytest.raises(UserError, match="^lossless decoding has no guard.*pass guard=None$"):
        model.generate(IDS, lossless=True, **SETTINGS)


class Heard:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.reshape(-1).tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_a_stream_shows_verified_tokens_alone(tiny_opt, bundle, dense, backend):
    model = SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), bundle, backend, ops="reference")
    stop = int(dense[0, -4])
    first = dense[0, IDS.shape[1] :].tolist().index(stop) + IDS.shape[1] + 1
    for settings, expected in ((SETTINGS, dense[0]), (SETTINGS | {"min_new_tokens": 0}, dense[0, :first])):
        for length in (3, 7, None):
            heard = Heard()
            ending = None if settings is SETTINGS else stop
            model.generate(
                IDS, lossless=True, draft_length=length, streamer=heard, **settings | {"eos_token_id": ending}
            )
            assert heard.tokens == expected.tolist() and heard.ended
