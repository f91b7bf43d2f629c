"""Tables of docs/results/frontier.md from a small CSV: means of seeds, the variant calibration prefers, verdicts."""

import csv

from conftest import REPOSITORY

from benchmarks.tables_frontier import RIVALS, TEXTS, bytes_goals_table, head_ratios_table, heads_table, rivals_table


def row(method, text, increase, seed=0, **more):
    columns = (REPOSITORY / RIVALS).read_text().splitlines()[0].split(",")
    found = dict.fromkeys(columns, "")
    found |= {
        "method": method,
        "text": text,
        "increase": increase,
        "error": 0.001,
        "seed": seed,
        "asked_head_density": 1,
    }
    found |= {"device": "GPU", "torch": "2.11.0", "commit": "abc1234", "date": "2026-11-22", "mlp_bytes": 0.081}
    return found | more


def save(root, rows):
    path = root / RIVALS
    path.parent.mkdir(parents=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return root


def test_rivals_and_goals(tmp_path):
    rows = []
    for text in TEXTS:
        for asked in (0.08, 0.1):
            rows += [row("predictors", text, 0.009 + 0.002 * seed, seed, asked_bytes=asked) for seed in range(3)]
            for rank, nats in ((32, 0.2), (64, 0.1)):
                name = f"whitened SVD, rank {rank} int4"
                rows.append(row(name, text, rank / 100, asked_bytes=asked, calibration_nats=nats))
            rows.append(row("oracle", text, 0.0, asked_bytes=asked, calibration_nats=0.0))
    root = save(tmp_path, rows)
    lines = rivals_table(root).splitlines()
    assert [line.split("|")[1].strip() for line in lines[4:7]] == [
        "oracle", "predictors of train.py (3 seeds)", "whitened SVD, rank 64 int4",
    ]  # fmt: skip
    assert "| 8.1 | +1.10 (+0.90 to +1.30) |" in lines[5] and "+64.0 ± 0.1" in lines[6]
    assert "rank 32" not in rivals_table(root) and "Commits: abc1234" in lines[-1]
    goals = bytes_goals_table(root).splitlines()
    assert goals[2].startswith("| docs | +1.10 (+0.90 to +1.30): **missed** by 2 of 3 seeds |")
    assert goals[2].endswith("**missed** by 3 of 3 seeds |")


def test_heads_stand_beside_the_oracle_of_their_seed(tmp_path):
    rows = []
    for text in TEXTS:
        for seed, ours, oracle in ((0, 0.012, 0.010), (1, 0.02, 0.010), (2, 0.01, 0.01 if text == "docs" else 0.001)):
            kept = {"asked_mlp_density": 1, "asked_head_density": 0.75, "head_selected": 0.74}
            rows.append(row("predictors", text, ours, seed, **kept))
            rows.append(row("oracle, shared out", text, oracle, seed, **kept))
    root = save(tmp_path, rows)
    assert len([line for line in heads_table(root).splitlines() if line.startswith(("| oracle", "| predictors"))]) == 6
    cells = head_ratios_table(root).splitlines()[2].split("|")
    assert cells[2].strip() == "1.40 (1.00 to 2.00): **missed**"
    assert cells[3].strip() == "1.60 (1.20 to 2.00): **missed**"  # the third seed's oracle loses too little
