"""Structures, oracle and counts against plain loops. Paired errors against simulation."""

import numpy as np
import pytest
import torch
from bundles import make_bundle

from dejavu_train.bundle.selector import PredictorSelector
from dejavu_train.families import ModelDims
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model
from dejavu_train.sparse.masked import masking
from papers.deja_vu.restructure import STRUCTURES, restructured, skipped_layers
from papers.deja_vu.studied import StudiedOPT, densities_for, total_sparsity


@pytest.fixture(scope="module")
def deep_opt(tmp_path_factory):
    from conftest import save_tiny_opt

    return save_tiny_opt(tmp_path_factory.mktemp("deep"), num_hidden_layers=5)


@pytest.fixture(scope="module")
def dense(deep_opt):
    return load_model(str(deep_opt))


def tokens(columns=13):
    return torch.randint(4, 300, (2, columns), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def plain_logits(model, ids, structure):
    """The model written out: attention by its definition, blocks in the order that the structure says."""
    decoder, n = model.model.decoder, ids.shape[1]
    x = decoder.embed_tokens(ids) + decoder.embed_positions.weight[2 : n + 2]

    def mha(block, y):
        attention = block.self_attn
        h = block.self_attn_layer_norm(y)
        q, k, v = (
            part(h).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        return attention.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def mlp(block, y):
        return block.fc2(torch.relu(block.fc1(block.final_layer_norm(y))))

    blocks = list(decoder.layers)
    if structure == "parallel 4":
        for start in range(0, len(blocks), 2):
            y = x
            for block in blocks[start : start + 2]:
                x = x + mha(block, y) + mlp(block, y)
    elif structure == "parallel 2":
        for block in blocks:
            x = x + mha(block, x) + mlp(block, x)
    else:
        left_out = {"skip 2/4": {2, 3}, "skip 1/2": {1, 3}, "skip 1/4": {3}}.get(structure, set())
        for layer, block in enumerate(blocks):
            if layer not in left_out:
                x = x + mha(block, x)
                x = x + mlp(block, x)
    return model.lm_head(decoder.final_layer_norm(x))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures_are_those_of_a_plain_loop(dense, structure):
    ids = tokens()
    with torch.no_grad(), restructured(dense, structure):
        got = dense(ids).logits
    torch.testing.assert_close(got, plain_logits(dense, ids, structure), atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(dense(ids).logits, plain_logits(dense, ids, "sequential"), atol=1e-4, rtol=1e-4)


def test_which_layers_are_skipped():
    assert skipped_layers("skip 2/8", 24) == [6, 7, 14, 15, 22, 23]
    assert skipped_layers("skip 1/2", 6) == [1, 3, 5]
    assert skipped_layers("parallel 2", 6) == []
    for wrong in ("skip 4/4", "skip 0/2", "parallel 3"):
        with pytest.raises(UserError, match="is no structure"), restructured(torch.nn.Module(), wrong):
            pass


@pytest.mark.parametrize("structure", ["parallel 4", "skip 1/2"])
@pytest.mark.parametrize("lookahead", [False, True])
def test_structures_together_with_sparsity(deep_opt, dense, structure, lookahead):
    """All units selected is the structure alone. Few is another model. Predictors may read skipped blocks."""
    bundle, ids = make_bundle(deep_opt, lookahead=lookahead), tokens()
    got = {}
    for density in (1.0, 0.3):
        model = StudiedOPT.study(dense, bundle.at(density, density))
        with restructured(model, structure):
            got[density] = model(ids).logits
    torch.testing.assert_close(got[1.0], plain_logits(dense, ids, structure), atol=1e-4, rtol=1e-4)
    assert (got[0.3] - got[1.0]).abs().max() > 0.1


@torch.no_grad()
def test_the_oracle_takes_the_largest_of_the_dense_pass_as_many_as_predicted(deep_opt, dense):
    # So few that every chosen neuron is active: among the others, of contribution 0, the order is arbitrary.
    bundle, ids = make_bundle(deep_opt).at(0.15, 0.5), tokens(9)
    predicted, activations = {}, {}
    with masking(
        dense,
        PredictorSelector(bundle, "cpu", dense),
        observe=lambda *seen: predicted.__setitem__(seen[:2], seen[2]),
    ):
        dense(ids)
    with masking(
        dense,
        PredictorSelector(bundle.at(1.0, 1.0), "cpu"),
        observe=lambda *seen: activations.__setitem__(seen[:2], seen[3]),
    ):
        dense(ids)

    class Best:
        sites = frozenset()

        def up(self, layer):
            return None

        def __call__(self, layer, target, sites):
            block, values = dense.model.decoder.layers[layer], activations[layer, target]
            keep = torch.zeros_like(predicted[layer, target])
            for b in range(ids.shape[0]):
                for t in range(ids.shape[1]):
                    if target == "mlp":
                        size = [
                            float(values[b, t, i]) * float(block.fc2.weight[:, i].norm()) for i in range(keep.shape[-1])
                        ]
                    else:
                        width = values.shape[-1]
                        weight = block.self_attn.out_proj.weight
                        size = [
                            float((weight[:, h * width : (h + 1) * width] @ values[b, t, h]).norm())
                            for h in range(keep.shape[-1])
                        ]
                    count = int(predicted[layer, target][b, t].sum())
                    keep[b, t, sorted(range(len(size)), key=lambda i: -size[i])[:count]] = True
            return keep

    with masking(dense, Best()):
        expected = dense(ids).logits
    model = StudiedOPT.study(dense, bundle, "oracle")
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)
    # Counts by plain set arithmetic.
    for target in ("mlp", "heads"):
        sets = [
            {i for i in range(keep.shape[-1]) if keep[b, t, i]}
            for (_, name), keep in predicted.items()
            if name == target
            for b in range(2)
            for t in range(9)
        ]
        units = predicted[0, target].shape[-1]
        assert model.density(target) == pytest.approx(sum(map(len, sets)) / (units * len(sets)))


def test_padding_is_not_counted(deep_opt, dense):
    bundle, ids = make_bundle(deep_opt).at(0.3, 0.5), tokens(8)
    counts = []
    for row in (ids[:1, :5], torch.cat([ids[:1, :5], torch.ones(1, 3, dtype=torch.long)], 1)):
        model = StudiedOPT.study(dense, bundle)
        model(row, attention_mask=(torch.arange(row.shape[1])[None] < 5).long())
        counts.append((model.kept, model.seen))
    assert counts[0] == counts[1] and counts[0][1]["heads"] == 5 * 5 * 4


def test_one_stage_selects_the_candidates(tiny_opt):
    bundle = make_bundle(tiny_opt, cascade=True).at(0.4, 1.0)
    model = load_model(str(tiny_opt))
    both, alone = (StudiedOPT.study(model, made) for made in (bundle, bundle.one_stage()))
    for made in (both, alone):
        made(tokens())
    assert both.density("mlp") < alone.density("mlp")


def test_total_sparsity_is_the_share_of_weights_that_is_not_read():
    shape = ModelDims(d_model=384, d_ffn=1536, n_layers=6, n_heads=12, vocab_size=8192, max_positions=1024)
    for asked in (0.25, 0.5, 0.62, 0.75, 0.85, 0.9, 0.95):
        mlp, heads = densities_for(asked, shape)
        assert 0.05 - 1e-9 <= mlp <= 1 and 0 < heads <= 1
        weights = 4 * 384 * 384 * heads + 2 * 384 * 1536 * mlp
        assert 1 - weights / (4 * 384 * 384 + 2 * 384 * 1536) == pytest.approx(asked)
        assert total_sparsity(mlp, heads, shape) == pytest.approx(asked)


def test_paired_error_is_that_of_resampling():
    from dejavu_train.extras.tasks.paired import flip_rate, mcnemar

    rng = np.random.default_rng(0)
    dense = rng.random(400) < 0.6
    sparse = np.where(rng.random(400) < 0.1, ~dense, dense)
    difference, error = mcnemar(sparse.astype(float).tolist(), dense.astype(float).tolist())
    assert difference == pytest.approx(sparse.mean() - dense.mean())
    picks = rng.integers(400, size=(4000, 400))
    resampled = sparse[picks].mean(1) - dense[picks].mean(1)
    assert error == pytest.approx(resampled.std(), rel=0.05)
    assert mcnemar([1, 0, 1], [1, 0, 1]) == (0.0, 0.0)
    one = [{"filtered_resps": [(-1.0, False), (-2.0, False)]}, {"filtered_resps": [(-3.0, True)]}]
    two = [{"filtered_resps": [(-4.0, False), (-2.0, False)]}, {"filtered_resps": [(-9.0, True)]}]
    assert flip_rate(one, two) == 0.5
