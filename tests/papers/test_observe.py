"""Observations: each measure against plain loops or set arithmetic, then the command from its flags to its files."""

import csv
import json
import math

import numpy as np
import pytest
import torch
from bundles import make_bundle

from dejavu_train.data.text import cut_plain_text
from dejavu_train.evaluation.perplexity import hold_out
from dejavu_train.evaluation.rows import read_csv, write_csv
from dejavu_train.families import Site
from dejavu_train.ground.errors import UserError, exit_on_user_error
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.hooks import decoder_layers, record
from dejavu_train.models.load import load_model, load_tokenizer
from papers.deja_vu.observe import run as observing
from papers.deja_vu.observe.__main__ import main, read_config
from papers.deja_vu.observe.attention import Attention, attention_weights, uniformity
from papers.deja_vu.observe.config import ObserveConfig
from papers.deja_vu.observe.cost import part_cost
from papers.deja_vu.observe.neighbours import Exact
from papers.deja_vu.observe.redraw import redraw
from papers.deja_vu.observe.residual import Residual
from papers.deja_vu.observe.statistics import Distribution, spearman
from papers.deja_vu.observe.titles import TITLES
from papers.deja_vu.observe.union import UnionRow, Unions, group_alike, mean_over_layers, union_share
from papers.deja_vu.observe.units import Units, needed_heads, needed_neurons


@pytest.fixture(scope="module")
def held(tiny_opt, text_file):
    documents = cut_plain_text(text_file.read_text(encoding="utf-8"))
    return hold_out(documents, load_tokenizer(str(tiny_opt)), 48, 900, spread=1 << 40)


@pytest.fixture(scope="module")
def everything(model, held):
    config = ObserveConfig(window=48, requests=8, queries=6, batch_tokens=200)
    return config, observing.one_pass(config, model, held)


def states(model, window):
    """The residual stream of one window before every layer and after the last: list of (T, d)."""
    out = model.model.decoder(input_ids=torch.tensor([window[:-1]]), output_hidden_states=True, use_cache=False)
    with record(model, {"middle", "mlp_out"}) as got:
        model.model.decoder(input_ids=torch.tensor([window[:-1]]), use_cache=False)
    last = got[len(got) - 1]
    return [part[0] for part in out.hidden_states[: len(got)]] + [(last["middle"] + last["mlp_out"])[0]]


def test_a_window_of_each_document_before_a_second_of_any(held):
    assert len(set(held.document)) == len(held.windows) >= 16


@torch.no_grad()
def test_cosine_similarity_against_a_plain_loop(model, held, everything):
    found = {}
    for window in held.windows:
        layers = states(model, window)
        for start in range(len(layers)):
            for stop in range(start + 1, len(layers)):
                for x, y in zip(layers[start].tolist(), layers[stop].tolist(), strict=True):
                    dot = sum(a * b for a, b in zip(x, y, strict=True))
                    norms = math.sqrt(sum(a * a for a in x)) * math.sqrt(sum(b * b for b in y))
                    found.setdefault((start, stop - start), []).append(dot / norms)
    rows = everything[1]["cosine"]
    assert {(row.layer, row.distance) for row in rows} == set(found)
    for row in rows:
        values = found[row.layer, row.distance]
        assert row.tokens == len(values) == held.tokens
        assert row.mean == pytest.approx(np.mean(values), abs=1e-5)
        for column, share in (("median", 50), ("p10", 10), ("p25", 25), ("p75", 75), ("p90", 90)):
            assert getattr(row, column) == pytest.approx(np.percentile(values, share), abs=5e-3)


@torch.no_grad()
def test_norms(model, held, everything):
    norms = {(row.layer, row.part): row for row in everything[1]["norms"]}
    x, fx = [], []
    for window in held.windows:
        before = states(model, window)[1]
        with record(model, {"attn_out"}) as got:
            model.model.decoder(input_ids=torch.tensor([window[:-1]]), use_cache=False)
        x += before.norm(dim=-1).tolist()
        fx += got[1]["attn_out"][0].norm(dim=-1).tolist()
    assert norms[1, "attention"].input == pytest.approx(np.median(x), rel=3e-3)
    assert norms[1, "attention"].output == pytest.approx(np.median(fx), rel=3e-2)
    ratio = np.median(np.array(fx) / np.array(x))
    assert norms[1, "attention"].ratio == pytest.approx(ratio, rel=3e-2)


def test_padding_counts_nowhere():
    """Positions beyond a window's length are not measured."""
    real = torch.tensor([[True] * 5, [True, True, False, False, False]])
    places = {name: torch.randn(2, 5, 8) for name in ("residual", "attn_out", "middle", "mlp_out")}
    seen = Residual(1)
    seen.layer(0, places, real)
    assert {row.tokens for row in seen.cosine_rows()} == {7}


def test_needed_heads_against_trying_every_count():
    head_out, weight = torch.randn(20, 4, 3), torch.randn(12, 12)
    kept = needed_heads(head_out, weight, (0.3, 0.6))
    for row, loss in enumerate((0.3, 0.6)):
        for token in range(20):
            parts = [weight[:, 3 * h : 3 * h + 3] @ head_out[token, h] for h in range(4)]
            order = sorted(range(4), key=lambda h: parts[h].norm().item())
            whole = sum(parts).norm()
            fit = [n for n in range(4) if n == 0 or sum(parts[h] for h in order[:n]).norm() <= loss * whole]
            assert set(kept[row, token].nonzero()[:, 0].tolist()) == set(order[max(fit) :])


def test_needed_neurons_keep_the_loss():
    activation, weight = torch.relu(torch.randn(30, 64)), torch.rand(16, 64)  # no contributions that cancel
    count = needed_neurons(activation, weight, 0.1)
    contribution = activation * weight.norm(dim=0)
    for token in range(30):
        order = contribution[token].argsort(descending=True)
        lost = [(weight[:, order[n:]] @ activation[token, order[n:]]).norm() for n in range(65)]
        limit = 0.1 * lost[0]
        assert lost[count[token]] <= limit < lost[count[token] - 1]
    assert (needed_neurons(torch.zeros(2, 8), torch.rand(4, 8), 0.1) == 0).all()


@torch.no_grad()
def test_sparsity_against_sets(model, held, everything):
    rows = everything[1]
    active = []  # by window: (T, f) of layer 0
    for window in held.windows:
        with record(model, {"activation"}) as got:
            model.model.decoder(input_ids=torch.tensor([window[:-1]]), use_cache=False)
        active.append((got[0]["activation"][0] > 0).numpy())
    together = np.concatenate(active)
    (none,) = (row for row in rows["sparsity"] if (row.layer, row.target, row.loss) == (0, "mlp", 0))
    assert none.needed == pytest.approx(together.sum(1).mean()) and none.tokens == held.tokens
    assert none.silenced == pytest.approx(1 - together.mean())


def test_union_sparsity_by_plain_set_arithmetic():
    """Two layers, four requests, sets given: every grouping's union is what Python's sets say."""
    generator = torch.Generator().manual_seed(1)
    sets = {
        "mlp": torch.rand(4, 9, 20, generator=generator) < 0.3,
        "heads": torch.rand(4, 9, 5, generator=generator) < 0.5,
    }
    real = torch.ones(4, 9, dtype=torch.bool)
    unions = Unions(2, 9, 4)
    for layer in range(2):
        own = {name: values ^ bool(layer) for name, values in sets.items()}
        unions.layer(layer, {"residual": torch.randn(4, 9, 6, generator=generator)}, real, own)
    assert min(unions.steps) == 4 and max(unions.steps) == 8  # the second half of a window
    rows = {(row.target, row.layer, row.grouping, row.batch): row for row in unions.rows()}
    for target, n in (("mlp", 20), ("heads", 5)):
        for layer in range(2):
            members = [
                [set(np.flatnonzero(token)) for token in (request ^ bool(layer))] for request in sets[target].numpy()
            ]
            whole = np.mean([len(set().union(*(members[w][step] for w in range(4)))) / n for step in unions.steps])
            for grouping in ("documents", "embedding", "selections"):
                row = rows[target, layer, grouping, 4]
                assert row.union == pytest.approx(whole) and row.sparsity == pytest.approx(1 - whole) and row.gain == 0
            single = np.mean([len(members[w][step]) / n for w in range(4) for step in unions.steps])
            assert rows[target, layer, "documents", 1].union == pytest.approx(single)
            assert rows[target, layer, "independent", 1].union == pytest.approx(single)
            kept = [members[w][step] for w in range(4) for step in unions.steps]
            often = [sum(unit in one for one in kept) / len(kept) for unit in range(n)]
            expected = np.mean([1 - (1 - f) ** 2 for f in often])
            assert rows[target, layer, "independent", 2].union == pytest.approx(expected, abs=1e-6)
    (mean,) = (
        r for r in mean_over_layers(list(rows.values())) if (r.target, r.grouping, r.batch) == ("mlp", "documents", 2)
    )
    assert mean.union == pytest.approx(np.mean([rows["mlp", layer, "documents", 2].union for layer in range(2)]))


def test_short_windows_are_no_requests():
    unions = Unions(1, 6, 4)
    real = torch.tensor([[True] * 6, [True] * 5 + [False]])
    unions.layer(0, {"residual": torch.randn(2, 6, 4)}, real, {"mlp": real[..., None], "heads": real[..., None]})
    assert unions.count == 1


def test_grouping_finds_clusters_and_gains():
    generator = np.random.default_rng(0)
    centres = np.eye(4)[generator.permutation(np.repeat(np.arange(4), 4))]
    groups = group_alike(centres * 3 + generator.normal(scale=0.05, size=(16, 4)), 4)
    assert sorted(index for group in groups for index in group) == list(range(16))
    assert all(len({int(centres[index].argmax()) for index in group}) == 1 for group in groups)
    sets = np.packbits(np.repeat(centres, 10, axis=1).astype(bool), axis=-1)  # a cluster's requests use the same units
    assert union_share(sets, groups, 40).mean() == pytest.approx(0.25)
    assert union_share(sets, np.arange(16).reshape(4, 4).tolist(), 40).mean() > 0.4


@torch.no_grad()
def test_attention_is_the_models_own(model, tiny_opt, held):
    window = torch.tensor([held.windows[0][:-1]])
    eager = load_model(str(tiny_opt))
    eager.set_attn_implementation("eager")
    expected = eager.model.decoder(input_ids=window, output_attentions=True, use_cache=False).attentions
    with record(model, {"attn_in"}) as got:
        model.model.decoder(input_ids=window, use_cache=False)
    queries = torch.tensor([3, 11, 40])
    for layer, weights in enumerate(expected):
        own = attention_weights(decoder_layers(model)[layer].self_attn, got[layer]["attn_in"][0], queries)
        torch.testing.assert_close(own, weights[0][:, queries], atol=1e-5, rtol=1e-4)
        entropy = [-sum(w * math.log(w) for w in row if w > 0) for row in weights[0, 1, queries].tolist()]
        even = uniformity(own, queries)[1].tolist()
        assert even == pytest.approx([e / math.log(q + 1) for e, q in zip(entropy, (3, 11, 40), strict=True)], abs=1e-4)


def test_head_rows(everything):
    heads = everything[1]["heads"]
    assert len(heads) == 8 and all(0 <= row.uniformity <= 1 and row.first <= row.heaviest <= 1 for row in heads)
    assert all(-1 <= row.per_token <= 1 for row in everything[1]["uniformity"])


def test_measures_of_statistics():
    values = torch.randn(5000)
    seen = Distribution(-6, 6)
    for part in values.split(700):
        seen.add(part)
    assert seen.mean == pytest.approx(values.mean().item(), abs=1e-5) and seen.count == 5000
    assert seen.quantile(0.9) == pytest.approx(np.percentile(values, 90), abs=5e-3)
    a, b = torch.randn(3, 9), torch.randn(3, 9)
    pearson = [np.corrcoef(x.argsort().argsort(), y.argsort().argsort())[0, 1] for x, y in zip(a, b, strict=True)]
    assert spearman(a, b).tolist() == pytest.approx(pearson)


def test_exact_neighbours_are_the_largest_preactivations(model):
    exact = Exact(model, 0.25)
    inputs = torch.randn(1, 3, 48)
    keep = exact(1, "mlp", {Site(1, "mlp_in"): inputs})
    scores = decoder_layers(model)[1].fc1(inputs)
    assert keep.sum(-1).tolist() == [[24, 24, 24]] and exact(1, "heads", {}) is None
    assert scores[keep].min() >= 0 or (scores[keep].view(3, -1).amin(-1) >= scores[~keep].view(3, -1).amax(-1)).all()
    for token in range(3):
        assert scores[0, token, keep[0, token]].min() >= scores[0, token, ~keep[0, token]].max()


def test_costs_follow_the_weights(tiny_opt, model):
    shape = read_dims(str(tiny_opt))
    mlp = sum(block.fc1.weight.numel() + block.fc2.weight.numel() for block in decoder_layers(model))
    assert part_cost(shape, "generating", "mlp", 1, 7, 2) == (2 * mlp, 2 * mlp)
    assert part_cost(shape, "prompting", "mlp", 3, 7, 2) == (2 * mlp * 21, 2 * mlp)
    projections = 4 * 48 * 48 * 2
    seen = 2 * 4 * 48 * 8
    assert part_cost(shape, "generating", "attention", 1, 7, 2)[0] == 2 * projections + seen
    head = model.lm_head.weight.numel()
    # A prompt, position by position: four projections, and scores and values over what each position sees.
    operations = sum(projections + 2 * 2 * 48 * (place + 1) for _ in range(3) for place in range(7))
    weights = sum(p.numel() for block in decoder_layers(model) for p in block.self_attn.parameters() if p.dim() == 2)
    written = 3 * 7 * 2 * 48 * 2  # rows, positions, keys and values, width, layers
    assert part_cost(shape, "prompting", "attention", 3, 7, 2) == (2 * operations, 2 * (weights + written))
    assert part_cost(shape, "generating", "other", 3, 7, 2) == (6 * head, 2 * head)


@pytest.fixture(scope="module")
def arguments(tiny_opt, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle")
    make_bundle(tiny_opt).at(0.5, 0.7).save_pretrained(folder)
    return {
        "model": tiny_opt, "bundle": folder, "text": text_file, "tokens": 700, "slow_tokens": 150, "window": 32,
        "densities": "[0.2,0.5]", "prompt": 8, "peak_tflops": 1, "peak_gb_s": 10,
        "device": "cpu",
    }  # fmt: skip


def run(arguments, **changes):
    return exit_on_user_error(main, [f"--{name}={value}" for name, value in (arguments | changes).items()])


@pytest.mark.long
def test_everything_from_the_command_line(arguments, tmp_path):
    assert run(arguments, output=tmp_path) == 0
    folder = tmp_path / "observations"
    about = json.loads((folder / "observations.json").read_text())
    assert {one["name"] for one in about["observed"]} == set(TITLES)
    for one in about["observed"]:
        with open(folder / f"{one['name']}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == one["rows"] > 0 and None not in rows[0]
        assert one["picture"] == (folder / f"{one['name']}.svg").is_file() == (folder / f"{one['name']}.png").is_file()
    with open(folder / "predictors.csv", newline="") as file:
        predictors = list(csv.DictReader(file))
    assert len(predictors) == 4
    for row in predictors:
        share = {name: float(row[name]) for name in ("density", "active", "accuracy", "recall", "precision")}
        hit = share["recall"] * share["active"]  # true positives over all units
        assert share["accuracy"] == pytest.approx(1 - share["density"] - share["active"] + 2 * hit, abs=1e-5)
        assert share["precision"] == pytest.approx(hit / share["density"], abs=1e-5)
    with open(folder / "selections.csv", newline="") as file:
        selections = list(csv.DictReader(file))
    assert [row["selection"] for row in selections] == [
        "dense",
        *["predicted", "oracle", "noncontextual", "static"] * 2,
    ]
    assert len({row["sparsity"] for row in selections[1:5]}) == 1
    assert about["hashes"]["model"] and about["hashes"]["bundle"] and about["text"]["tokens"] >= 700
    written = {path.name: path.read_bytes() for path in folder.glob("*.svg")}
    alone = tmp_path / "alone"
    alone.mkdir()
    (folder / "cosine.csv").rename(alone / "cosine.csv")
    assert redraw(alone) == ["cosine"] and (alone / "cosine.svg").read_bytes() == written["cosine.svg"]
    (alone / "cosine.csv").write_text("layer,distance\n1,x\n")
    with pytest.raises(UserError, match="line 2: not a row of CosineRow"):
        redraw(alone)
    (alone / "cosine.csv").write_text("layer,distance\n")
    with pytest.raises(UserError, match="cosine.csv holds no rows"):
        redraw(alone)
    with pytest.raises(UserError, match="has none of"):
        redraw(tmp_path)


def test_rows_survive_a_file(tmp_path):
    rows = [
        UnionRow("mlp", 0, "random", 2, 0.25, 0.75, -0.125, None, 3),
        UnionRow("mlp", 1, "random", 2, 0.5, 0.5, 0.0, 0.1, 3),
    ]
    write_csv(tmp_path / "union.csv", rows)
    assert read_csv(tmp_path / "union.csv", UnionRow) == rows


def test_parts_and_what_is_missing(arguments, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "hnswlib", None)
    values = {"bundle": "null", "output": tmp_path, "parts": "[selections,predictors,neighbours]"}
    assert run(arguments, **values) == 0
    about = json.loads((tmp_path / "observations/observations.json").read_text())
    assert [one["name"] for one in about["observed"]] == ["neighbours"]
    assert [one["why"].split()[0] for one in about["not_measured"]] == ["no", "no", "hnswlib"]


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"parts": "[unions]"}, "--parts must be some of"),
        ({"losses": "[1.5]"}, "--losses"),
        ({"window": "5000"}, "exceeds the model's 512 positions"),
        ({"text": "/nowhere/text.txt"}, "/nowhere/text.txt"),
        ({"bundle": "/nowhere/bundle"}, "there is no bundle folder"),
        ({"model": "/nowhere/model"}, "there is no model folder"),
        ({"tokens": "many"}, "tokens"),
        ({"prompt": "600"}, "leaves no room"),
        ({"config": "/nowhere.yaml"}, "/nowhere.yaml"),
        ({"unheard": "1"}, "unheard"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(arguments, tmp_path, capfd, changes, told):
    values = arguments | {"output": tmp_path / "out"}
    if changes.get("model"):
        values["bundle"] = "null"
    assert run(values, **changes) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ") and told in lines[-1] and "Traceback" not in "".join(lines)
    assert not (tmp_path / "out").exists()


def test_a_bundle_of_another_model_is_refused(arguments, tmp_path, tmp_path_factory, capfd):
    from conftest import save_tiny_opt

    other = save_tiny_opt(tmp_path_factory.mktemp("other"), num_hidden_layers=3)
    assert run(arguments, model=other, output=tmp_path / "out") == 2
    assert "belongs to another model" in capfd.readouterr().err


def test_a_file_of_keys(tmp_path):
    path = tmp_path / "observe.yaml"
    path.write_text("tokens: 5\nparts: [union]\nlosses: [0.3]\n")
    config = read_config([f"--config={path}", "--tokens=6"])
    assert (config.tokens, config.parts, config.losses) == (6, ("union",), (0.3,))


def test_memory_of_sets_is_bounded(model):
    units = Units(decoder_layers(model), (0.1,), 1.0, torch.Generator())
    assert not units.needed and Attention(model, 3).sums.shape == (2, 4, 4)
    unions = Unions(2, 4, requests=3)
    real = torch.ones(5, 4, dtype=torch.bool)
    for _ in range(3):
        unions.layer(0, {"residual": torch.randn(5, 4, 8)}, real, {"mlp": real[..., None], "heads": real[..., None]})
    assert unions.count == 3
