"""A number that is not finite ends every evaluation by the name of the layer where it began, dense models included."""

import math

import pytest

pytest.importorskip("lm_eval")

import torch
from bundles import make_bundle

from dejavu_train.data.text import Document
from dejavu_train.data.tokens import windows
from dejavu_train.evaluation.perplexity import EvalSetting, evaluate, hold_out
from dejavu_train.evaluation.texts import behind_start
from dejavu_train.evaluation.timing import time_decoding, time_engine
from dejavu_train.extras.generation import measures
from dejavu_train.extras.tasks.model import DejavuLM
from dejavu_train.ground.errors import UserError
from dejavu_train.models.finite import FiniteLogits, check_logits, first_fault
from dejavu_train.models.load import load_model, load_tokenizer
from papers.deja_vu.observe.config import ObserveConfig
from papers.deja_vu.observe.cost import Peaks, cost_rows
from papers.deja_vu.observe.predictors import predictor_rows
from papers.deja_vu.observe.run import one_pass

IDS = torch.tensor([[2, 5, 6, 7]])


def broken(tiny_opt, name, value=math.nan, factor=None):
    model = load_model(str(tiny_opt))
    with torch.no_grad():
        weight = model.get_parameter(name).view(-1)
        weight[3] = value if factor is None else weight[3]
        weight *= factor or 1
    return model


@pytest.fixture(scope="module")
def bad(tiny_opt):
    return broken(tiny_opt, "model.decoder.layers.1.fc2.bias")


@pytest.fixture(scope="module")
def held(tiny_opt):
    return hold_out([Document("a", "the model reads a token and the layer")], load_tokenizer(str(tiny_opt)), 16, None)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.decoder.layers.0.self_attn.v_proj.bias", "the attention of layer 0"),
        ("model.decoder.layers.1.fc1.bias", "the MLP of layer 1"),
        ("model.decoder.final_layer_norm.bias", "the final LayerNorm"),
        ("model.decoder.embed_positions.weight", None),  # a position that these ids do not reach
    ],
)
def test_the_first_fault_is_named(tiny_opt, name, place):
    model = broken(tiny_opt, name, math.inf)
    assert first_fault(model, IDS) == place


def test_an_lm_head_that_is_not_finite_is_named(tiny_opt):
    model = load_model(str(tiny_opt))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.lm_head.weight.data[9, 9] = math.nan
    assert first_fault(model, IDS) == "the LM head"


def test_what_is_finite_is_let_through(tiny_opt):
    model = load_model(str(tiny_opt))
    scores = model(IDS).logits[:, -1]
    assert FiniteLogits(model)(IDS, scores) is scores
    check_logits(scores, model, IDS)


def scores(model, bundle, held, tiny_opt):
    evaluate(model, bundle, held, [EvalSetting("dense")])


def times(model, bundle, held, tiny_opt):
    time_decoding(model, "dense", IDS, 2)


def generates(model, bundle, held, tiny_opt):
    model.generate(IDS, max_new_tokens=2, pad_token_id=1, do_sample=False, logits_processor=[FiniteLogits(model)])


def scores_continuations(model, bundle, held, tiny_opt):
    measures.score(model, IDS, IDS)


def answers(model, bundle, held, tiny_opt):
    lm = DejavuLM(model, tokenizer=load_tokenizer(str(tiny_opt)), batch_size=2)
    lm._loglikelihood_tokens([(None, [2, 5], [6, 7]), (None, [2, 5], [7, 7])], disable_tqdm=True)


def writes_for_tasks(model, bundle, held, tiny_opt):
    lm = DejavuLM(model, tokenizer=load_tokenizer(str(tiny_opt)), batch_size=2)
    lm._model_generate(IDS, 7, ["nothing"], do_sample=False)


def observes(model, bundle, held, tiny_opt):
    one_pass(ObserveConfig(model="m", bundle=None, parts=("residual",)), model, held)


def observes_predictors(model, bundle, held, tiny_opt):
    predictor_rows(model, bundle, held, 64)


def observes_cost(model, bundle, held, tiny_opt):
    cost_rows(model, Peaks(1.0, 1.0, "cpu"), 1, 4, 2)


@pytest.mark.parametrize(
    "work",
    [
        scores,
        times,
        generates,
        scores_continuations,
        answers,
        writes_for_tasks,
        observes,
        observes_predictors,
        observes_cost,
    ],
)
def test_no_evaluation_makes_a_row_of_it(tiny_opt, bad, held, work):
    bundle = make_bundle(tiny_opt).at(0.3, 0.7)
    with pytest.raises(UserError, match="logits of the model in float32 are not finite, from the MLP of layer 1 on"):
        work(bad, bundle, held, tiny_opt)
    work(load_model(str(tiny_opt)), bundle, held, tiny_opt)


def test_timing_the_engine_of_cpus(bad):
    with pytest.raises(UserError, match="not finite"):
        time_engine(bad, None, "dense-cpu", IDS, 4)


def test_nats_beyond_any_perplexity_are_refused(tiny_opt, held):
    wild = broken(tiny_opt, "model.decoder.final_layer_norm.weight", factor=1e6)
    with pytest.raises(UserError, match="dense loses .* nats a token, of which no perplexity is a number"):
        evaluate(wild, make_bundle(tiny_opt), held, [EvalSetting("dense")])


def test_a_text_stands_behind_one_start(tiny_opt, caplog):
    tokenizer = load_tokenizer(str(tiny_opt))
    plain = behind_start(tokenizer, "the model", "--generate")
    assert plain[0] == 2 and 2 not in plain[1:]
    with caplog.at_level("INFO"):
        assert behind_start(tokenizer, "</s>the model", "--generate") == plain
    assert caplog.messages == ["--generate begins with </s>: no other is put before it"]
    assert behind_start(tokenizer, "the</s>", "--generate")[-1] == 2  # elsewhere it is what the user wrote
    assert windows(tokenizer, "</s>the model", 8) == windows(tokenizer, "the model", 8) == [plain]
