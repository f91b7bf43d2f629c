"""Tables of docs/results/families.md from a small CSV: means of texts and seeds, equal bytes, verdicts."""

import csv
import json

import pytest

from benchmarks.tables_families import (
    MODELS,
    ROWS,
    TEXTS,
    ahead_table,
    bloom_table,
    frontier_table,
    goals_table,
    models_table,
    runs_table,
)

MADE = {"device": "CPU", "torch": "2.11.0", "commit": "abc", "date": "2026-01-01", "sources": "none"}


def row(model, neurons, read, increase, heads="1.0", seed="0", training="self", text=None):
    named = [text] if text else TEXTS
    same = {"model": model, "training": training, "seed": seed, "selection": "predicted", "asked_mlp_density": neurons}
    values = {"asked_head_density": heads, "mlp_bytes": read, "increase": increase}
    return [same | values | MADE | {"text": each} for each in named]


def write(root, *rows):
    found = [each for group in rows for each in group]
    path = root / ROWS
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    return root


def cells(table, start):
    """The first line of a table that begins so, as its cells."""
    line = next(line for line in table.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def two_seeds(model, low, high):
    return [each for seed, add in (("0", 0.0), ("1", 0.01)) for each in (
        *row(model, "0.1", 0.1, high + add, seed=seed), *row(model, "0.2", 0.2, low + add, seed=seed)
    )]  # fmt: skip


def test_the_frontier_has_the_mean_of_texts_and_the_range_of_seeds(tmp_path):
    rows = two_seeds("opt-14m", 0.02, 0.04)
    rows[0]["increase"] = 0.12  # one text of eight: the seed's mean is 0.05
    table = frontier_table(write(tmp_path, rows))
    assert cells(table, "OPT") == [
        "OPT, ReLU, 14M (2 seeds)", "+5.00 at 10.0",
        "+2.50 (+2.00 to +3.00) at 20.0",
    ]  # fmt: skip


def test_a_seed_without_all_texts_is_left_out(tmp_path):
    table = frontier_table(
        write(tmp_path, row("opt-14m", "0.1", 0.1, 0.04), row("bloom-14m", "0.1", 0.1, 0.9, text="docs"))
    )
    assert cells(table, "OPT")[1] == "+4.00 at 10.0" and "BLOOM" not in table


@pytest.mark.parametrize(
    ("squared", "word"), [(0.044, "+4.40 (1.47 x OPT's: met)"), (0.046, "+4.60 (1.53 x OPT's: **missed**)")]
)
def test_goals_are_judged_at_equal_bytes(tmp_path, squared, word):
    """At 15 % OPT loses 3 %, halfway between its two rows. The other has a row there, and others apart."""
    opt = [*row("opt-14m", "0.1", 0.1, 0.04), *row("opt-14m", "0.2", 0.2, 0.02)]
    other = [*row("arcee-14m", "0.1", 0.15, squared), *row("arcee-14m", "0.2", 0.18, 0.0)]
    table = goals_table(write(tmp_path, opt, other))
    assert cells(table, "Arcee")[1:6] == ["own input", "", "", word, ""]
    assert cells(table, "OPT")[1:6] == ["own input", "", "+4.00", "+3.00", "+2.00"]


def test_predictors_are_judged_beside_opts_that_read_the_same(tmp_path):
    """Of a run that the study cut off there may be rows of one kind of predictors alone."""
    ahead = {"training": "lookahead"}
    opt = [*row("opt-100m", "0.1", 0.1, 0.04, **ahead), *row("opt-100m", "0.2", 0.2, 0.02, **ahead)]
    other = [*row("arcee-100m", "0.1", 0.1, 0.01, **ahead), *row("arcee-100m", "0.2", 0.2, 0.0, **ahead)]
    alone = [*row("arcee-100m", "0.1", 0.1, 0.03), *row("arcee-100m", "0.2", 0.2, 0.03)]
    root = write(tmp_path, opt, other, alone)
    lines = [line for line in goals_table(root).splitlines() if "Arcee" in line]
    assert "| own input | | +3.00 (OPT: no rows) |" in lines[0]
    assert "| half a layer earlier | | +1.00 (0.25 x OPT's: met) |" in lines[1]
    assert [line.split("|")[2].strip() for line in ahead_table(root).splitlines()[2:5]] == [
        "half a layer earlier, seed 0", "own input, seed 0", "half a layer earlier, seed 0"
    ]  # fmt: skip


def test_a_ratio_to_next_to_nothing_is_not_judged(tmp_path):
    opt = [*row("opt-14m", "0.1", 0.1, 0.001), *row("opt-14m", "0.2", 0.2, 0.001)]
    other = [*row("llama-relu-14m", "0.1", 0.1, 0.05), *row("llama-relu-14m", "0.2", 0.2, 0.05)]
    assert cells(goals_table(write(tmp_path, opt, other)), "Llama")[3] == "+5.00 (OPT +0.10: not judged)"


@pytest.mark.parametrize(("increase", "word"), [(0.0099, "+0.99: met"), (0.0101, "+1.01: **missed**")])
def test_bloom_is_judged_at_the_papers_point_alone(tmp_path, increase, word):
    rows = [*row("bloom-14m", "0.7", 0.7, increase, heads="0.5"), *row("bloom-14m", "0.7", 0.7, 0.5)]
    table = bloom_table(write(tmp_path, rows))
    assert cells(table, "BLOOM")[-1] == word
    assert [line for line in table.splitlines() if "all heads" in line][0].endswith("| +50.0 |")


def test_look_ahead_stands_below_the_same_densities(tmp_path):
    rows = [*row("opt-14m", "0.1", 0.1, 0.01), *row("opt-14m", "0.1", 0.1, 0.03, training="lookahead")]
    rows += row("opt-14m", "0.1", 0.1, 0.9, seed="1")  # of another seed
    lines = ahead_table(write(tmp_path, rows)).splitlines()
    assert [line.split("|")[-2].strip() for line in lines[2:4]] == ["+1.00", "+3.00"]


def test_what_runs_says_which_weights_were_trained(tmp_path):
    config = {"family": "bloom", "output": "bloom-14m", "n_layers": 6, "d_model": 384, "d_ffn": 1536, "l1": 0.0}
    heldout = {f"{name}.jsonl": {"bits_per_byte": 1.5, "density": [0.2, 0.4]} for name in ("books", "general", "docs")}
    made = {"config": config, "heldout": heldout, "steps": 2000, "tokens": 131_072_000, "device": "CPU", "torch": "2"}
    (tmp_path / MODELS).parent.mkdir(parents=True)
    (tmp_path / MODELS).write_text(
        json.dumps(made) + "\n" + json.dumps(made | {"config": config | {"output": "bloom-100m"}})
    )
    assert cells(runs_table(tmp_path), "BLOOM")[1:] == [*["yes"] * 7, "14M (briefly trained), 100M (briefly trained)"]
    assert cells(runs_table(tmp_path), "Arcee")[-1] == "tiny random ones"
    assert cells(runs_table(tmp_path), "NanoChat")[2:8] == ["yes", "yes", "no", "yes", "yes", "yes"]
    assert cells(models_table(tmp_path), "BLOOM") == [
        "BLOOM, GELU, 14M", "6 x 384, 1,536 neurons", "2,000", "131", "0", "1.500", "1.500", "1.500", "30.0"
    ]  # fmt: skip
