"""Every parameter of transformers' calls has a row in signature_rows.py, and the row says what happens."""

import inspect
import logging
import re

import pytest
import torch
from bundles import make_bundle
from conftest import REPOSITORY
from signature_rows import BACKENDS, CALLED, FORWARD, GENERATE, IDS, MADE, Case, Recorder, page
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    OPTForCausalLM,
    TextGenerationPipeline,
    pipeline,
)
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.pipelines.base import Pipeline
from transformers.utils.generic import TransformersKwargs

from dejavu_train import SparseOPTForCausalLM
from dejavu_train.ground.errors import Unsupported, UserError
from dejavu_train.models.load import load_model

OWN = {"self", "kwargs", "logits", "vocab_size"}


def parameters(function) -> set[str]:
    return set(inspect.signature(function).parameters)


def keywords(function) -> set[str]:
    """What a function takes out of its ``kwargs`` by name."""
    return set(re.findall(r"\bkwargs\.(?:pop|get)\(\s*[\"'](\w+)", inspect.getsource(function)))


def test_every_parameter_has_a_row():
    settings = {name for name in GenerationConfig().to_dict() if not name.startswith("_")}
    forward = parameters(OPTForCausalLM.forward)
    calls = {
        "generate": (
            GENERATE,
            parameters(GenerationMixin.generate) | settings | forward | keywords(GenerationMixin.generate)
            | keywords(GenerationMixin._extract_generation_mode_kwargs),
        ),
        "forward": (FORWARD, forward | set(TransformersKwargs.__annotations__) | parameters(ForCausalLMLoss)),
    }  # fmt: skip
    own = {"_commit_hash", "kwargs", "self", "args"}
    calls["pipeline"] = (
        MADE,
        (parameters(pipeline) | parameters(Pipeline.__init__) | keywords(pipeline) | keywords(Pipeline.__init__)) - own,
    )
    calls["a pipeline"] = (
        CALLED,
        parameters(TextGenerationPipeline._sanitize_parameters)
        | parameters(TextGenerationPipeline.__call__)
        | parameters(TextGenerationPipeline.preprocess) - {"prompt_text"},
    )
    for call, (rows, there) in calls.items():
        names = [row.name for row in rows]
        assert len(names) == len(set(names)), call
        assert sorted(there - OWN - set(names)) == [], f"{call} of transformers takes these, which have no row"
    assert {row.name for row in FORWARD} - calls["forward"][1] == {"return_dict", "any other keyword"}


@pytest.fixture(scope="module")
def tokenizer(tiny_opt):
    return AutoTokenizer.from_pretrained(tiny_opt)


@pytest.fixture(scope="module")
def models(tiny_opt):
    bundle = make_bundle(tiny_opt).at(mlp_density=1.0, head_density=1.0)
    made = {}
    for backend in BACKENDS:
        ops = "reference" if backend == "triton" else "triton"
        made[backend] = SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), bundle, backend, ops=ops)
    return made


def run_generate(case: Case, row):
    options = {"inputs": IDS, "max_new_tokens": 6, "do_sample": False}
    options |= row.value(case) if callable(row.value) else row.value
    if "generation_config" in options:
        options = {"inputs": IDS, "generation_config": options["generation_config"]}
    torch.manual_seed(0)
    done = case.model.generate(**options)
    streamer = options.get("streamer")
    return done, streamer.seen if isinstance(streamer, Recorder) else None


@torch.no_grad()
def run_forward(case: Case, row):
    options = row.value(case) if callable(row.value) else row.value
    done = case.model(**options)
    if "attention_mask" in options:
        done.logits[options["attention_mask"] == 0] = 0  # of padding nobody promises anything
    return done


def outcome(call, case, row):
    """What a call gives, and the exception it ends with. The settings it may have changed are put back."""
    config = case.model.config.to_dict()
    try:
        return call(case, row), None
    except Exception as error:
        return None, error
    finally:
        for name in ("num_hidden_layers", "output_attentions", "output_hidden_states"):
            setattr(case.model.config, name, config[name])


def same(got, wanted) -> bool:
    """Tokens alike, numbers near each other. Of outputs with names all but the cache."""
    if isinstance(wanted, torch.Tensor):
        return got.shape == wanted.shape and got.dtype == wanted.dtype and torch.allclose(got, wanted, atol=2e-3)
    if hasattr(wanted, "keys"):
        names = [name for name in wanted if wanted[name] is not None and name != "past_key_values"]
        return all(same(got[name], wanted[name]) for name in names)
    if isinstance(wanted, tuple | list):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    return got == wanted


def check(call, row, letter, backend, models, dense, tokenizer, caplog):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "dejavu_train"):
        got, error = outcome(call, Case(models[backend], dense, tokenizer), row)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("dejavu_train")]
    text = "" if error is None else str(error)
    if letter in "gr":
        assert isinstance(error, UserError) and "\n" not in text, (backend, error, got)
        assert isinstance(error, Unsupported) == (letter == "g"), (backend, error)
        assert letter == "r" or text.endswith("use backend='gather'"), (backend, text)
        return
    wanted, failed = outcome(call, Case(dense, dense, tokenizer), row)
    if letter == "x":
        assert failed is not None and type(error) is type(failed), (backend, failed, error)
        return
    assert failed is None and error is None, (backend, failed, error)
    assert same(got, wanted), (backend, got, wanted)
    assert len(lines) == (letter == "i"), (backend, lines)


@pytest.mark.parametrize("row", GENERATE, ids=[row.name for row in GENERATE])
def test_generate(row, models, dense, tokenizer, caplog):
    for backend, letter in zip(BACKENDS, row.letters, strict=True):
        check(run_generate, row, letter, backend, models, dense, tokenizer, caplog)


@pytest.mark.parametrize("row", FORWARD, ids=[row.name for row in FORWARD])
def test_forward(row, models, dense, tokenizer, caplog):
    for backend, letter in zip(BACKENDS, row.letters, strict=True):
        check(run_forward, row, letter, backend, models, dense, tokenizer, caplog)


def plain(value):
    """What a pipeline returns, as lists and numbers."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def run_pipeline(case: Case, row):
    options = {"task": "text-generation", "model": case.model, "tokenizer": case.tokenizer}
    call = {"text_inputs": "the model reads", "max_new_tokens": 6, "do_sample": False}
    (options if row in MADE else call).update(row.value(case) if callable(row.value) else row.value)
    case.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    case.tokenizer.model_max_length = 512
    if "generation_config" in options:
        del call["max_new_tokens"], call["do_sample"]
    if "device_map" not in options:
        options["device"] = "cpu"  # a pipeline takes a GPU by itself
    return plain(pipeline(**options)(**call))


@pytest.mark.parametrize("row", [*MADE, *CALLED], ids=[row.name for row in [*MADE, *CALLED]])
def test_pipeline(row, models, dense, tokenizer, caplog):
    for backend, letter in zip(BACKENDS, row.letters, strict=True):
        check(run_pipeline, row, letter, backend, models, dense, tokenizer, caplog)


def test_the_page_is_what_the_rows_say():
    text = (REPOSITORY / "docs" / "reference" / "signatures.md").read_text(encoding="utf-8")
    assert text == page(), "write it anew: python tests/signature_rows.py > docs/reference/signatures.md"
