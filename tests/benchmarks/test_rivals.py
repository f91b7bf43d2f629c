"""The rivals do what they say, on a tiny random OPT: what they select, what they read, and that budgets are met."""

import pytest
import torch

from benchmarks import rivals
from benchmarks.frontier import every_rival, some_windows
from benchmarks.rivals import HEADS, INPUTS, NEURONS, Calibration, Ledger, MlpWeights, OracleHeads, Seen
from dejavu_train.errors import UserError
from dejavu_train.evaluation.perplexity import eval_batches
from dejavu_train.models.hooks import decoder_layers
from dejavu_train.models.opt import load_opt

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tiny_opt):
    """(model, weights, moments, frequencies, batches) of a tiny OPT and random windows."""
    model = load_opt(str(tiny_opt))
    generator = torch.Generator().manual_seed(0)
    windows = [[2, *torch.randint(3, 300, (n,), generator=generator).tolist()] for n in (24, 24, 24, 17)]
    batches = list(eval_batches(some_windows(windows, 10_000), 48, CPU))
    return model, MlpWeights.of(model), *rivals.second_moments(model, batches), batches


def seen_by(model, batch, layer, part=NEURONS):
    """What a rival sees of one layer in the dense model."""
    found = {}

    def at(at_layer, at_part, seen):
        found[at_layer, at_part] = seen

    with torch.no_grad(), rivals.watched(model, rivals.Teal(MlpWeights.of(model)), batch.real, at):
        model(batch.ids)
    return found[layer, part]


def test_moments_are_those_of_real_positions(made):
    model, _, moments, often, batches = made
    x = torch.cat([seen_by(model, batch, 1).x[batch.real] for batch in batches])
    torch.testing.assert_close(moments[1].float(), x.T @ x / len(x), atol=1e-4, rtol=1e-4)
    live = torch.cat([seen_by(model, batch, 1).values[batch.real] > 0 for batch in batches])
    torch.testing.assert_close(often[1], live.float().mean(0))


def test_no_threshold_is_the_dense_model(made):
    model, weights, *_, batches = made
    dense = rivals.log_probabilities(model, batches[0])
    with rivals.sparse(model, rivals.Oracle(weights), {}, batches[0].real):
        torch.testing.assert_close(rivals.log_probabilities(model, batches[0]), dense)


def test_full_rank_gives_the_pre_activations(made):
    model, weights, moments, _, batches = made
    rival = rivals.WhitenedSVD(weights, moments, 48, "int8")
    seen = seen_by(model, batches[0], 0)
    scores = rival.scores(0, NEURONS, seen)
    live = seen.values > 0
    assert ((scores > 0) == live)[scores.abs() > 0.1 * scores.abs().mean()].float().mean() > 0.98
    coarse = rivals.WhitenedSVD(weights, moments, 4, "int4")
    assert 0 < coarse.fixed_bytes(0) < rival.fixed_bytes(0)


def test_griffin_is_fixed_after_the_prompt_and_counts_only_what_follows(made):
    model, weights, *_, batches = made
    rival, batch = rivals.Griffin(weights), batches[-1]
    first = rival.first(batch.real)
    assert first.sum(1).tolist() == [int(n) // 2 for n in batch.real.sum(1)]
    seen = seen_by(model, batch, 1)
    scores = rival.scores(1, NEURONS, seen)
    assert (scores == scores[:, :1]).all()
    later = seen._replace(values=torch.where(first[..., None], 7.0, seen.values))
    torch.testing.assert_close(rival.scores(1, NEURONS, later), scores)
    ledger = Ledger()
    with rivals.sparse(model, rival, {(1, NEURONS): 0.0}, batch.real, ledger):
        after = rivals.log_probabilities(model, batch)
    dense = rivals.log_probabilities(model, batch)
    prompt = ~first[batch.real]
    torch.testing.assert_close(after[prompt], dense[prompt])
    assert ledger.positions == int(first.sum())


def test_the_walk_visits_what_its_threshold_says(made):
    """Against a walk in Python, one token at a time; what is visited grows as the threshold falls."""
    model, weights, moments, often, batches = made
    rival = rivals.GraphSearch(weights, moments, [frequency * 0 + torch.arange(96.0) for frequency in often])
    seen = seen_by(model, batches[0], 1)
    scores = rival.scores(1, NEURONS, seen)
    value = (seen.x @ weights[1].fc1.T + weights[1].bias) * weights[1].norms
    for threshold in (float(value.quantile(0.9)), float(value.quantile(0.5))):
        for b, t in ((0, 0), (1, 5)):
            visited = set(rival.entries[1].tolist())
            waiting = set(visited)
            while waiting:
                best = max(waiting, key=lambda row: float(value[b, t, row]))
                waiting.remove(best)
                if value[b, t, best] <= threshold:
                    break
                new = set(rival.edges[1][best].tolist()) - visited
                visited |= new
                waiting |= new
            assert set((scores[b, t] > threshold).nonzero()[:, 0].tolist()) == visited
    keep = scores > threshold
    read = rival.read_bytes((1, NEURONS), seen, keep, threshold)
    rows = keep[0, 0].sum() + (keep[0, 0] & (seen.values[0, 0] > 0)).sum()
    expanded = (keep[0, 0] & (value[0, 0] > threshold)).sum()
    assert float(read[0, 0]) == 2 * 16 + 2 * 48 * int(rows) + 2 * 16 * int(expanded)


def test_teal_drops_small_inputs_and_counts_columns(made):
    model, weights, *_, batches = made
    rival, batch = rivals.Teal(weights), batches[0]
    seen = seen_by(model, batch, 0, INPUTS)
    threshold = float(seen.x.abs().quantile(0.5))
    ledger = Ledger()
    with rivals.sparse(model, rival, {(0, INPUTS): threshold}, batch.real, ledger):
        after = rivals.log_probabilities(model, batch)
    assert not torch.allclose(after, rivals.log_probabilities(model, batch))
    assert ledger.read[0, INPUTS] == 2 * 96 * int((seen.x[batch.real].abs() > threshold).sum())


@pytest.mark.parametrize("index", range(5))
def test_a_budget_is_met_on_the_calibration_text(made, index, monkeypatch):
    """Oracle, low rank, graph, GRIFFIN, TEAL: bytes as counted; more bytes, less divergence."""
    model, weights, moments, often, batches = made
    monkeypatch.setattr("benchmarks.frontier.RANKS", (4,))
    rival = every_rival(weights, moments, often)[index]
    found = Calibration(model, rival, batches, [rivals.log_probabilities(model, batches[0])])
    nats = []
    for share in (0.35, 0.45):
        thresholds = found.thresholds(share)
        _, _, ledger = rivals.score(model, rival, thresholds, batches, 4)
        assert ledger.share(rival) == pytest.approx(share, rel=0.06)
        nats.append(found.divergence(thresholds))
    assert nats[0] > nats[1] >= 0
    with pytest.raises(UserError, match="cannot be met"):
        found.thresholds(1e-6)


def test_skipped_heads_are_replaced_by_their_mean(made):
    model, *_, batches = made
    means = {layer: torch.full((4, 12), 0.1 * layer) for layer in range(2)}
    rival, batch = OracleHeads(model, means), batches[0]
    got = {}
    handle = decoder_layers(model)[1].self_attn.out_proj.register_forward_hook(
        lambda _module, args, _output: got.update(x=args[0].view(*batch.real.shape, 4, 12))
    )
    ledger = Ledger()
    with torch.no_grad(), rivals.sparse(model, rival, {(1, HEADS): 1e9}, batch.real, ledger):
        model(batch.ids)
    handle.remove()
    assert ledger.share(rival) == 0
    torch.testing.assert_close(got["x"][batch.real], means[1].expand(int(batch.real.sum()), 4, 12))
    seen = Seen(torch.zeros(1, 1, 48), means[1].expand(1, 1, 4, 12), torch.ones(1, 1, dtype=torch.bool))
    assert rival.scores(1, HEADS, seen).abs().max() < 1e-4
