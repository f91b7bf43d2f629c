"""Hooks against transformers' own hidden states and against hand-made contributions."""

import pytest
import torch
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

from dejavu_train.models.hooks import (
    PLACES,
    decoder_layers,
    head_contribution,
    neuron_contribution,
    output_gram,
    record,
)


@pytest.fixture(scope="module")
def opt():
    torch.manual_seed(0)
    shape = dict(hidden_size=24, word_embed_proj_dim=24, ffn_dim=40, num_hidden_layers=3, num_attention_heads=3)
    return OPTForCausalLM(OPTConfig(vocab_size=50, max_position_embeddings=64, **shape)).eval()


def tokens():
    return torch.randint(4, 50, (2, 7), generator=torch.Generator().manual_seed(1))


def hooks(model):
    return [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]


def test_recorded_places_are_what_the_model_computes(opt):
    with torch.no_grad(), record(opt, PLACES) as got:
        hidden = opt(tokens(), output_hidden_states=True).hidden_states
    assert sorted(got) == [0, 1, 2]
    for layer, block in enumerate(decoder_layers(opt)):
        here = got[layer]
        assert here["head_out"].shape == (2, 7, 3, 8)
        torch.testing.assert_close(here["attn_in"], block.self_attn_layer_norm(hidden[layer]))
        torch.testing.assert_close(here["activation"], torch.relu(block.fc1(here["mlp_in"])))
        middle = hidden[layer] + block.self_attn.out_proj(here["head_out"].flatten(-2))
        torch.testing.assert_close(here["mlp_in"], block.final_layer_norm(middle))


def test_only_what_is_wanted_and_nothing_after_the_context(opt):
    with torch.no_grad():
        opt(tokens())  # transformers installs hooks of its own at the first call
    before, seen = hooks(opt), []
    with torch.no_grad():
        with record(opt, {"mlp_in"}, layers=[2, 0], on_layer=lambda layer, got: seen.append((layer, set(got)))) as kept:
            opt(tokens())
        opt(tokens())
    assert seen == [(0, {"mlp_in"}), (2, {"mlp_in"})]
    assert kept == {}
    assert hooks(opt) == before


def test_contributions_equal_the_norms_of_what_is_added():
    generator = torch.Generator().manual_seed(3)
    activation = torch.rand(2, 5, 6, generator=generator)
    fc2 = torch.randn(4, 6, generator=generator)
    one_by_one = torch.stack([(activation[..., i, None] * fc2[:, i]).norm(dim=-1) for i in range(6)], dim=-1)
    torch.testing.assert_close(neuron_contribution(activation, fc2), one_by_one)

    head_out = torch.randn(2, 5, 3, 4, generator=generator)
    out_proj = nn.Linear(12, 12, bias=False).weight.detach()
    by_head = [(head_out[..., i, :] @ out_proj[:, 4 * i : 4 * i + 4].T).norm(dim=-1) for i in range(3)]
    expected = torch.stack(by_head, dim=-1)
    torch.testing.assert_close(head_contribution(head_out, out_proj), expected)
    torch.testing.assert_close(head_contribution(head_out, out_proj, output_gram(out_proj, 3)), expected)
    mean = torch.randn(3, 4, generator=generator)
    torch.testing.assert_close(
        head_contribution(head_out, out_proj, mean=mean), head_contribution(head_out - mean, out_proj)
    )
