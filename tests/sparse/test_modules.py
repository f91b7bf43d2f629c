"""Modules that do something else than an OPT's, before and after a model was made: called, or refused by name."""

import copy

import pytest
import torch
from bundles import make_bundle
from torch import nn
from transformers import OPTForCausalLM

from dejavu_train import SparseOPTForCausalLM
from dejavu_train.ground.errors import UserError

BACKENDS = ("mask", "gather", "auto", "triton")  # auto is the CPU engine here
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
IDS = torch.tensor([[2, 30, 31, 200, 33, 70, 91]])


@pytest.fixture(scope="module")
def bundle(tiny_opt):
    return make_bundle(tiny_opt, cascade=True, means=True)


def sparse(model, bundle, backend):
    options = {"ops": "reference"} if backend == "triton" else {}
    return SparseOPTForCausalLM.from_model(model, bundle, backend, **options)


def given(model):
    """Logits and text, or None where that is refused in a line."""
    try:
        with torch.no_grad():
            return model(IDS).logits, model.generate(IDS, attention_mask=torch.ones_like(IDS), **GREEDY).tolist()
    except UserError as refusal:
        assert "\n" not in str(refusal)
        return None


class Scaled(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) * 1.5


class Halved(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 0.5


def layer(model, number=1):
    return model.model.decoder.layers[number]


def other_class(module, kind):
    module.__class__ = kind


def exchange(owner, name, made):
    setattr(owner, name, made)


def flip(_module, _args, output):
    output.logits = output.logits.flip(-1)


EDITS = {  # the edit, and the backends that do it justice rather than refuse it
    "another eps": (lambda m: setattr(layer(m).final_layer_norm, "eps", 0.7), BACKENDS),
    "one eps for all": (
        lambda m: [setattr(n, "eps", 0.1) for n in m.modules() if isinstance(n, nn.LayerNorm)],
        BACKENDS,
    ),
    "another LayerNorm": (lambda m: other_class(layer(m).final_layer_norm, Scaled), ("mask", "gather", "auto")),
    "no LayerNorm": (lambda m: exchange(layer(m), "final_layer_norm", nn.Identity()), ("mask", "gather", "auto")),
    "a LayerNorm without a bias": (
        lambda m: exchange(layer(m), "final_layer_norm", nn.LayerNorm(48, bias=False)),
        BACKENDS,
    ),
    "another activation": (lambda m: exchange(layer(m), "activation_fn", nn.GELU()), ("mask", "gather", "auto")),
    "another scaling": (lambda m: setattr(layer(m).self_attn, "scaling", 0.9), ("mask", "gather", "auto")),
    "a wrapped fc2": (lambda m: exchange(layer(m), "fc2", Halved(layer(m).fc2)), ("mask",)),
    "another head": (lambda m: exchange(m, "lm_head", nn.Linear(48, m.config.vocab_size, bias=False)), BACKENDS),
    "a head with a bias": (
        lambda m: exchange(m, "lm_head", nn.Linear(48, m.config.vocab_size)),
        ("mask", "gather", "auto"),
    ),
    "positions from another row": (
        lambda m: setattr(m.model.decoder.embed_positions, "offset", 5),
        ("mask", "gather", "auto"),
    ),
    "a hook on the model": (lambda m: m.register_forward_hook(flip), ("mask", "gather", "auto")),
    "compiled fc1": (
        lambda m: exchange(layer(m), "fc1", torch.compile(layer(m).fc1, backend="eager")),
        BACKENDS,
    ),
    "a shared fc2": (lambda m: exchange(layer(m), "fc2", layer(m, 0).fc2), BACKENDS),
    "a shared output projection": (
        lambda m: exchange(layer(m).self_attn, "out_proj", layer(m, 0).self_attn.out_proj),
        BACKENDS,
    ),
}


def edited(model, edit):
    torch.manual_seed(3)
    with torch.no_grad():
        EDITS[edit][0](model)
    return model.eval()


@pytest.mark.parametrize("edit", EDITS)
def test_what_a_module_does_is_what_runs(dense, bundle, edit):
    whole = bundle.at(1.0, 1.0)
    logits, text = given(edited(copy.deepcopy(dense), edit))
    for backend in BACKENDS:
        after = sparse(copy.deepcopy(dense), whole, backend)
        given(after)
        got = [given(edited(after, edit))]
        try:
            got.append(given(sparse(edited(copy.deepcopy(dense), edit), whole, backend)))
        except UserError:  # when the bundle is set
            got.append(None)
        for each in got:
            assert (each is not None) >= (backend in EDITS[edit][1]), backend
            if each is not None:
                torch.testing.assert_close(each[0], logits, atol=2e-3, rtol=2e-3)
                assert each[1] == text


@pytest.mark.parametrize("edit", ["a shared fc2", "a shared output projection"])
def test_layers_that_share_a_module_select_each_for_itself(dense, bundle, edit):
    some = bundle.at(0.4, 0.5)
    expected = given(sparse(edited(copy.deepcopy(dense), edit), some, "gather"))
    got = given(sparse(edited(copy.deepcopy(dense), edit), some, "mask"))
    torch.testing.assert_close(got[0], expected[0], atol=2e-3, rtol=2e-3)
    assert got[1] == expected[1]


def test_an_fc1_that_must_be_called_is_named_where_a_second_stage_reads_it(dense, bundle):
    model = copy.deepcopy(dense)
    exchange(layer(model), "fc1", Halved(layer(model).fc1))
    with pytest.raises(UserError, match=r"layers.1 .up. is a Halved.*second stage.*calibrate.cascade null"):
        sparse(model, bundle.at(0.4, 0.5), "mask")
    assert given(sparse(model, bundle.at(1.0, 0.5), "mask")) is not None


def test_a_model_with_a_forward_of_its_own_is_refused(dense, bundle):
    class Own(OPTForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = copy.deepcopy(dense)
    other_class(model, Own)
    with pytest.raises(UserError, match="this Own has a forward of its own"):
        sparse(model, bundle, "mask")


def test_accelerates_hooks_pass_where_they_move_tensors_alone(dense, bundle):
    hooks = pytest.importorskip("accelerate.hooks")

    class Louder(hooks.ModelHook):
        def post_forward(self, module, output):
            return output * 1.5

    whole = bundle.at(1.0, 1.0)
    for hook, refused in ((hooks.AlignDevicesHook("cpu"), False), (Louder(), True)):
        model = copy.deepcopy(dense)
        hooks.add_hook_to_module(layer(model).fc2, hook)
        logits, text = given(model)
        for backend in ("mask", "gather"):
            if refused and backend == "gather":
                with pytest.raises(UserError, match="fc2 has an exchanged forward"):
                    sparse(model, whole, backend)
            else:
                got = given(sparse(model, whole, backend))
                torch.testing.assert_close(got[0], logits, atol=2e-3, rtol=2e-3)
                assert got[1] == text


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shallow_copy_has_a_bundle_of_its_own(dense, bundle, backend):
    model = sparse(copy.deepcopy(dense), bundle.at(0.4, 0.5), backend)
    before = given(model)[1]
    copied = copy.copy(model)
    copied.set_bundle(bundle.at(0.1, 0.25))
    assert given(copied)[1] != before and given(model)[1] == before


def test_an_engine_reads_a_model_again_that_was_moved_to_another_dtype(dense, bundle):
    model = sparse(copy.deepcopy(dense), bundle.at(0.4, 0.5), "cpu")
    assert given(model) is None  # this engine scores nothing
    halves = model.half().generate(IDS, **GREEDY).tolist()
    assert "weights in float16" in model.describe()
    assert model.float().generate(IDS, **GREEDY).tolist() == halves
    text = sparse(copy.deepcopy(model), model.bundle, "mask").generate(IDS, **GREEDY).tolist()
    assert model.generate(IDS, **GREEDY).tolist() == text


@pytest.mark.parametrize("value", [-1, 2.5, None, True, "foo", [], ["a"], torch.tensor([1.0]), torch.tensor([-1])])
def test_what_is_no_position_is_refused_where_it_is_set(dense, bundle, value):
    with pytest.raises(UserError, match="sparse_from must be a position from 0 on"):
        SparseOPTForCausalLM.from_model(dense, bundle, "mask", sparse_from=value)
    model = sparse(copy.deepcopy(dense), bundle, "mask")
    with pytest.raises(UserError, match="sparse_from must be a position from 0 on"):
        model.sparse_from = value
    assert model.sparse_from == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_in_a_list_are_those_in_a_tensor(dense, bundle, backend):
    model = sparse(copy.deepcopy(dense), bundle.at(0.4, 0.5), backend)
    model.sparse_from = torch.tensor([4])
    expected = given(model)
    model.sparse_from = [4]
    assert given(model)[1] == expected[1]


@pytest.mark.parametrize("backend", BACKENDS[1:])  # mask is computed by transformers, in the dtype of autocast
def test_autocast_changes_no_text(dense, bundle, backend):
    some = bundle.at(0.4, 0.5)
    expected = given(sparse(copy.deepcopy(dense), some, backend))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, text = given(sparse(copy.deepcopy(dense), some, backend))
    assert text == expected[1] and (logits - expected[0]).abs().max() < 0.05 * expected[0].abs().max()


PLACES = {
    "the final LayerNorm or the LM head": lambda m: m.model.decoder.final_layer_norm.bias[3:4],
    "LM head": lambda m: m.lm_head.weight[7],
    "the embeddings": lambda m: m.model.decoder.embed_positions.weight[4],
    "layer 1": lambda m: layer(m).fc1.bias[2:3],
}


@pytest.mark.parametrize(
    ("backend", "place"),
    [
        *((backend, place) for place in PLACES for backend in ("mask", "gather")),
        ("auto", "layer 1"),
        ("triton", "layer 1"),
    ],
)
def test_a_number_that_is_not_finite_is_named_where_it_begins(dense, bundle, backend, place):
    model = sparse(copy.deepcopy(dense), bundle.at(1.0, 1.0), backend)
    model.lm_head = copy.deepcopy(model.lm_head)  # not the embedding
    with torch.no_grad():
        PLACES[place](model).fill_(float("nan"))
        for call in (lambda: model(IDS), lambda: model.generate(IDS, **GREEDY)):
            with pytest.raises(UserError, match=f"not finite.*{place}|{place}.*not finite"):
                call()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_predictor_that_is_not_finite_is_refused_before_it_is_used(dense, bundle, backend):
    model = sparse(copy.deepcopy(dense), bundle.at(0.4, 0.5), backend)
    before = given(model)[1]
    broken = copy.deepcopy(bundle.at(0.4, 0.5))
    name = next(name for name in broken.tensors if "mlp" in name and name.endswith("down"))
    broken.tensors[name][0] = float("nan")
    with pytest.raises(UserError, match="the mlp predictor of layer 0 has weights that are not finite"):
        model.set_bundle(broken)
        model.generate(IDS, **GREEDY)
    model.set_bundle(bundle.at(0.4, 0.5))
    assert given(model)[1] == before


def test_a_streamer_may_call_the_model_that_feeds_it(dense, bundle):
    model, texts = sparse(copy.deepcopy(dense), bundle.at(0.4, 0.5), "auto"), []
    alone = given(model)[1]

    class Streamer:
        put = staticmethod(lambda _: texts.append(given(model)[1]))
        end = staticmethod(lambda: None)

    got = model.generate(IDS, attention_mask=torch.ones_like(IDS), streamer=Streamer(), **GREEDY).tolist()
    assert got == alone and len(texts) == 9 and all(text == alone for text in texts)


class Flipped(SparseOPTForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        flip(self, args, output)
        return output


class Processed(SparseOPTForCausalLM):
    def _get_logits_processor(self, *args, **kwargs):
        processors = super()._get_logits_processor(*args, **kwargs)
        processors.append(lambda ids, scores: -scores)
        return processors


@pytest.mark.parametrize("own", [Flipped, Processed])
def test_a_class_of_your_own_runs_its_methods(dense, bundle, own):
    ids, settings = torch.tensor([[2, 30, 31, 32]]), {"max_new_tokens": 6, "do_sample": False}
    texts = [own.from_model(copy.deepcopy(dense), bundle, name).generate(ids, **settings) for name in ("mask", "auto")]
    assert torch.equal(*texts)
    assert not torch.equal(texts[0], sparse(copy.deepcopy(dense), bundle, "mask").generate(ids, **settings))
