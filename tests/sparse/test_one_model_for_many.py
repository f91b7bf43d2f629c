"""One model, many callers and many lives: threads, copies, edits, adapters, hooks, numbers that are not finite."""

import pytest
import torch
from bundles import make_bundle
from transformers import StoppingCriteria, StoppingCriteriaList

from dejavu_train import SparseOPTForCausalLM
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model

BACKENDS = ("mask", "gather", "auto", "triton")  # auto is the CPU engine here
GREEDY = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}


def sparse(folder, bundle, backend, **options):
    options |= {"ops": "reference"} if backend == "triton" else {}
    return SparseOPTForCausalLM.from_model(load_model(str(folder)), bundle, backend, **options)


@pytest.fixture(scope="module")
def folder(tiny_opt):
    return tiny_opt


@pytest.fixture(scope="module")
def bundle(folder):
    return make_bundle(folder, cascade=True).at(0.4, 0.5)


def tokens(columns, seed=0):
    return torch.randint(4, 300, (1, columns), generator=torch.Generator().manual_seed(seed))


def written(model, ids, **options):
    return model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY, **options)[0].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_bundle_is_for_the_calls_that_begin_after_it(folder, bundle, backend):
    model, ids = sparse(folder, bundle, backend), tokens(5)
    other = bundle.at(0.1, 0.25)
    before, after = written(model, ids), written(sparse(folder, other, backend), ids)
    assert before != after

    class Exchange:
        def put(self, _):
            model.set_bundle(other)

        def end(self):
            pass

    assert written(model, ids, streamer=Exchange()) == before
    assert written(model, ids) == after


@pytest.mark.parametrize("backend", ["mask", "gather"])
def test_a_forward_pass_within_generate_is_no_part_of_it(folder, bundle, backend):
    model, ids, other = sparse(folder, bundle, backend, sparse_from="prompt"), tokens(5), tokens(20, 4)
    with torch.no_grad():
        alone, text, seen = model(other).logits, written(model, ids), []

        class Look(StoppingCriteria):
            def __call__(self, rows, scores, **_):
                seen.append(model(other).logits)
                return torch.zeros(len(rows), dtype=torch.bool)

        assert written(model, ids, stopping_criteria=StoppingCriteriaList([Look()])) == text
    assert len(seen) == 10 and all(torch.equal(logits, alone) for logits in seen)


@pytest.mark.parametrize("backend", ["mask", "gather", "auto"])
@pytest.mark.parametrize("kind", ["LoRA of the embedding", "trained tokens", "prompt", "prefix"])
def test_an_adapter_of_what_is_read_first_runs(folder, bundle, kind, backend):
    peft = pytest.importorskip("peft")
    ids, few = tokens(7), {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    how = {
        "LoRA of the embedding": peft.LoraConfig(r=4, target_modules=["embed_tokens"], init_lora_weights=False),
        "trained tokens": peft.LoraConfig(target_modules=["fc1"], trainable_token_indices=ids[0, :2].tolist()),
        "prompt": peft.PromptTuningConfig(**few),
        "prefix": peft.PrefixTuningConfig(**few),
    }[kind]

    def text(model):
        made = peft.get_peft_model(model, how).eval()
        generator = torch.Generator().manual_seed(0)
        for name, parameter in sorted(made.named_parameters()):
            if any(part in name for part in ("lora_embedding", "prompt_encoder", "trainable_tokens")):
                parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        return made.generate(input_ids=ids, **GREEDY).tolist()

    plain = load_model(str(folder)).generate(input_ids=ids, **GREEDY).tolist()
    model, expected = sparse(folder, bundle.at(1.0, 1.0), backend), text(load_model(str(folder)))
    assert expected != plain, "the adapter changes nothing, the test shows nothing"
    if kind == "prefix" and backend != "mask":  # it puts a cache of its own in place
        with pytest.raises(UserError, match="SparseCache, got DynamicCache; .* or use backend='mask'"):
            text(model)
    else:
        assert text(model) == expected


@pytest.mark.parametrize("kind, backend, use_cache", [
    ("prompt", "mask", True), ("prompt", "gather", True), ("prompt", "gather", False), ("prefix", "mask", True),
])  # fmt: skip
def test_a_prompt_that_is_tuned_is_dense_where_prompts_are(folder, bundle, kind, backend, use_cache):
    """Behind it every token is sparse, of a row with padding as well."""
    peft = pytest.importorskip("peft")
    few = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    how = peft.PromptTuningConfig(**few) if kind == "prompt" else peft.PrefixTuningConfig(**few)
    ids = torch.cat([tokens(8), tokens(8, 1)])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    told = {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True, "use_cache": use_cache}

    def logits(model):
        made = peft.get_peft_model(model, how).eval()
        prompt = made.prompt_encoder["default"].embedding.weight
        prompt.data.copy_(0.3 * torch.randn(prompt.shape, generator=torch.Generator().manual_seed(0)))
        with torch.no_grad():
            return made.generate(input_ids=ids, **GREEDY, **told).logits

    got, dense = logits(sparse(folder, bundle, backend, sparse_from="prompt")), logits(load_model(str(folder)))
    torch.testing.assert_close(got[0], dense[0], atol=1e-4, rtol=1e-4)
    assert ((got[1] - dense[1]).abs().amax(dim=1) > 1e-2).all(), "what follows the prompt is sparse"


@pytest.mark.parametrize("place", ["model.decoder.layers.0.fc1", "model.decoder.layers.1.self_attn", "model.decoder"])
def test_a_hook_that_a_backend_would_not_call_is_named(folder, bundle, place):
    ids, whole = tokens(7), bundle.at(1.0, 1.0)
    for backend in BACKENDS:
        model = sparse(folder, whole, backend)
        handle = model.get_submodule(place).register_forward_hook(lambda module, args, output: None)
        if backend == "mask":
            written(model, ids)
        else:
            with pytest.raises(UserError, match=f"{place} has a hook"):
                written(model, ids)
        handle.remove()
        assert len(written(model, ids)) == 17


def test_a_prompt_is_shown_once_when_an_engine_gives_up_late(folder, bundle, monkeypatch):
    monkeypatch.setattr("dejavu_train.engine.cpu.weights.free_memory", lambda: 1000)
    model, ids, shown = sparse(folder, bundle, "auto"), tokens(5), []

    class Streamer:
        put = staticmethod(lambda part: shown.append(part.reshape(-1).tolist()))
        end = staticmethod(lambda: None)

    text = written(model, ids, streamer=Streamer())
    assert [token for part in shown for token in part] == text
