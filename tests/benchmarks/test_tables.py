import csv
import dataclasses
import json
import random
import shutil

import pytest
from conftest import REPOSITORY

from benchmarks.table_maker import Column, Table, percent
from benchmarks.table_specs import CARD, DEMO, DRAFTS, EXACT, LOSSLESS, ONE_MODEL, TABLES
from benchmarks.tables import FILES, MARKED, OLDER, fill

PIVOTS = {name: table for name, table in TABLES.items() if isinstance(table, Table) and isinstance(table.rows, str)}


@pytest.fixture
def rows(tmp_path):
    """A folder with copies of all rows, which a test may change."""
    for name in {table.rows for table in PIVOTS.values()}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / DEMO).write_text(json.dumps(results()))
    return tmp_path


def change(path, fields, new):
    """Every value of some fields of a CSV or JSONL file passed through ``new``."""
    if path.suffix == ".jsonl":
        found = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row | {field: new(row[field]) for field in fields}) + "\n" for row in found))
        return
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    for row in found:
        row.update({field: new(row[field]) for field in fields if row[field]})
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)


def quality(text, selection, mlp, heads=1.0, sparse_from=0, **found):
    row = {"text": text, "selection": selection, "asked_mlp_density": mlp, "asked_head_density": heads}
    row |= {"sparse_from": sparse_from, "perplexity": 11.39, "increase": 0.0, "increase_error": 0.0}
    return row | {"mlp_selected": 0.079, "mlp_bytes": 0.1063} | found


def results():
    """A small results.json of schema 2: two texts, one of them unseen."""
    texts = [
        {"name": "docs", "domain": "in domain", "documents": 23, "tokens": 20397},
        {"name": "code", "domain": "unseen", "documents": 207, "tokens": 20001},
    ]
    first = [
        quality("docs", "dense", 1.0),
        quality("docs", "predicted", 0.05, increase=0.14, increase_error=0.019, mlp_bytes=0.065),
        quality("docs", "predicted", 0.2, increase=0.0027, increase_error=0.0015),
        quality("docs", "oracle", 0.2, increase=-0.00001),
        quality("docs", "noncontextual", 0.2, increase=10.9),
        quality("docs", "random", 0.2, increase=33999.0),
        quality("docs", "predicted", 0.2, 0.85, increase=0.0066, increase_error=0.0024),
        quality("docs", "predicted", 0.2, sparse_from=128, increase=0.5),
    ]
    second = [
        quality("code", "dense", 1.0, perplexity=5.123),
        quality("code", "predicted", 0.2, increase=0.0211, increase_error=None, mlp_bytes=0.11),
        quality("code", "predicted", 0.2, 0.85, increase=0.03, increase_error=0.01),
    ]
    versions = {"python": "3.12.1", "torch": "2.13.0"}
    return {"schema": 2, "versions": versions, "texts": texts, "quality": first + second, "layers": [], "timing": []}


@pytest.mark.parametrize("name", FILES)
def test_text_and_rows_agree(name):
    text = (REPOSITORY / name).read_text()
    assert MARKED.search(text), f"{name} has no table"
    filled = OLDER.sub("", fill(text, REPOSITORY, name))  # older rows are no fault before a release
    assert filled == OLDER.sub("", text), f"{name} differs from its rows: make tables"


def test_every_table_stands_in_a_text():
    marked = [match[2] for name in FILES for match in MARKED.finditer((REPOSITORY / name).read_text())]
    assert sorted(set(marked)) == sorted(TABLES)


@pytest.mark.parametrize("name", PIVOTS)
def test_every_cell_follows_from_the_rows(rows, name):
    """All measured fields are replaced. No cell that shows a number may keep it."""
    table = PIVOTS[name]
    before = cells(table.make(rows))
    fields = sorted({column.field for column in table.columns if column.form and column.heading != "seeds"})
    factors = random.Random(1)  # another for every value, or ratios of two rows would stay nearly the same

    def moved(table):
        found = table.prepared(rows)
        for row in found:
            known = [name for name in fields if row.get(name) not in ("", None)]
            row.update({name: 2 + factors.uniform(3, 30) * float(row[name]) for name in known})
        return found

    changed = dataclasses.replace(table, rows=lambda _: moved(table), derived={}, where={}, chosen=None, links=())
    after, names = cells(changed.make(rows)), len(table.line)
    assert len(after) == len(before) > 0
    for old, new in zip(before, after, strict=True):
        assert old[:names] == new[:names]
        for heading, left, right in zip(table.columns, old[names:], new[names:], strict=True):
            assert left != right or not left or heading.heading == "seeds" or float(left.split()[0]) == 0, (left, right)


def test_a_cell_is_of_the_newest_row_or_of_the_least(tmp_path):
    (tmp_path / "rows.csv").write_text("date,kind,ms\n2030-01-02,a,3\n2030-01-01,a,2\n2030-01-01,b,8\n2030-01-01,b,\n")
    newest, slow = Column("ms", "ms", {"kind": "a"}), Column("slow", "ms", {"kind": ("b", "c")}, ".1f", unit=" ms")
    columns = (
        newest,
        dataclasses.replace(newest, least="ms"),
        slow,
        Column("times", "ms", {"kind": "a"}, ".2f", over=slow),
    )
    table = Table("rows.csv", {}, (*columns, Column("none", "gone")), "nobody")
    assert cells(table.make(tmp_path)) == [["3", "2", "8.0 ms", "2.67", ""]]
    assert "Rows: [rows.csv](rows.csv), by nobody. 3 of 3 rows are older than the sources.\n" in table.make(tmp_path)


def test_an_increase_from_a_thousand_per_cent_on_is_a_multiple():
    assert [percent(value) for value in (-0.0001, 0.5, 9.99, 10)] == ["-0.01", "+50.0", "+999", "11-fold"]


def test_the_card_follows_from_its_rows(tmp_path):
    path = tmp_path / CARD
    path.parent.mkdir(parents=True)
    found = json.loads((REPOSITORY / CARD).read_text())
    before = cells(TABLES["card"](REPOSITORY))
    for row in found["heldout"].values():
        row |= {name: 2 * row[name] for name in ("bits_per_byte", "perplexity", "tokens")}
        row["density"] = [2 * share for share in row["density"]]
    path.write_text(json.dumps(found))
    for old, new in zip(before, cells(TABLES["card"](tmp_path)), strict=True):
        assert old[0] == new[0] and all(left != right for left, right in zip(old[1:], new[1:], strict=True))


def cells(table):
    """Cells of the rows below the headings of every table of a Markdown text."""
    found = []
    lines = table.splitlines()
    for line, above in zip(lines[1:], lines, strict=False):
        if line.startswith("|") and not line.startswith("| ---") and above.startswith("|"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def test_the_demo_of_a_small_results_file(rows):
    lines = TABLES["demo"](rows).splitlines()
    assert lines[2] == "| docs | yes | 11.39 | | | +0.27 ± 0.15 % | 10.6 % | +0.66 ± 0.24 % | 10.6 % |"
    assert lines[3] == "| code | no | 5.123 | | | +2.11 % | 11.0 % | +3.00 ± 1.00 % | 10.6 % |"
    assert "| 5 % of candidates | 7.9 % | +14.0 ± 1.9 % | | | |" in lines
    assert "| 20 % of candidates | 7.9 % | +0.27 ± 0.15 % | +0.00 ± 0.00 % | 12-fold | |" in lines
    assert "| 20 % of candidates, 85 % of the heads | 7.9 % | +0.66 ± 0.24 % | | | |" in lines
    assert "50" not in "".join(lines[2:4])  # the row that is sparse from position 128 on is not shown


def test_the_opening_table_has_quality_and_speed_of_one_bundle(rows):
    found = results()
    names = {"docs": "installed-docs", "code": "installed-code"}
    found["quality"] = [row | {"text": names[row["text"]]} for row in found["quality"]]
    found["texts"] = [text | {"name": names[text["name"]]} for text in found["texts"]]
    measured = {"dense": (8.6214, None), "dense-cpu-read": (1.9, 45.7), "dense-cpu": (1.5358, 33.177)}
    found["timing"] = [
        {"backend": backend, "ms_per_token": {"p50": ms}, "first_token_ms": 9 * ms, "megabytes_per_token": read}
        | dict(
            zip(("asked_mlp_density", "asked_head_density"), (0.2, 0.85) if backend == "cpu" else (1, 1), strict=True)
        )
        for backend, (ms, read) in (measured | {"cpu": (0.9061, 18.354)}).items()
    ]
    found["quality"][6] |= {"perplexity": 11.5}
    (rows / DEMO).write_text(json.dumps(found))
    lines = TABLES["opening"].make(rows).splitlines()
    assert lines[2:6] == [
        "| transformers, dense | all | 11.39 | 5.123 | 77.6 | 8.62 | |",
        "| our engine, reading all rows | all | 11.39 | 5.123 | 17.1 | 1.9 | 45.7 |",
        "| our engine, exact | fc1 all, fc2 active | 11.39 | 5.123 | 13.8 | 1.54 | 33.2 |",
        "| our engine, sparse | 7.9 % | 11.5 | 11.39 | 8.15 | 0.906 | 18.4 |",
    ]


@pytest.fixture
def copied(tmp_path):
    """A folder with copies of the rows of verdicts."""
    for name in (DEMO, EXACT, ONE_MODEL, LOSSLESS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    return tmp_path


def test_a_drafts_speed_stands_in_the_row_of_what_drafted_it(copied):
    lines = (REPOSITORY / LOSSLESS).read_text().splitlines()
    for way, draft in DRAFTS.items():
        newest = next(
            row
            for row in reversed(list(csv.DictReader(lines)))
            if (row["model"], row["what"], row["decoding"], row["text"]) == ("opt-mini", "speed", "greedy", "all")
            and row["way"] == way
        )
        made = TABLES["lossless-opening"].make(copied).splitlines()
        (line,) = [line for line in made if line.startswith(f"| {draft} |")]
        assert float(line.split("|")[2]) == pytest.approx(float(newest["ratio"]), rel=5e-3)


def test_the_verdict_of_the_demo_has_the_numbers_of_its_rows(copied):
    found = json.loads((copied / DEMO).read_text())
    for row in found["timing"]:
        row["ms_per_token"]["p50"] = {"dense": 80.0, "dense-cpu": 9.0, "cpu": 3.0}.get(row["backend"], 20.0)
    for row in found["quality"]:
        row["increase"], row["mlp_selected"] = {"static": 30.0}.get(row["selection"], 0.0321), 0.123
    (copied / DEMO).write_text(json.dumps(found))
    said = TABLES["demo-verdict"](copied)
    assert "rises by 3.21 %, and 12.3 % of the neurons" in said and "3 ms instead of 9 in" in said and "80 in" in said
    assert "perplexity 31 times as high" in said


def test_the_verdict_of_speed_has_the_numbers_of_its_rows(copied):
    """Steps that read all rows take half as long: every gain of exact skip halves, and those of predictors stay."""
    before = TABLES["speed-verdict"](copied)
    change(copied / EXACT, ["p50_ms"], float)
    with (copied / EXACT).open(newline="") as file:
        found = list(csv.DictReader(file))
    for row in found:
        row["p50_ms"] = str(float(row["p50_ms"]) / (2 if row["engine"] == "dense" else 1))
    with (copied / EXACT).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    after = TABLES["speed-verdict"](copied)
    assert "1.33 to 1.41 times as fast in fp16" in before and "0.67 to 0.71 times as fast in fp16" in after
    assert before.splitlines()[1] == after.splitlines()[1]


def test_a_table_without_rows_is_empty(rows, capsys):
    text = "before\n<!-- table: demo -->\n\nbygone\n\n<!-- end -->\nafter\n"
    filled = fill(text, rows)
    assert "| docs | yes | 11.39" in filled and "bygone" not in filled
    assert capsys.readouterr().err == ""
    (rows / DEMO).unlink()
    assert fill(filled, rows) == "before\n<!-- table: demo -->\n<!-- end -->\nafter\n"
    assert DEMO in capsys.readouterr().err


def test_a_results_file_of_another_schema_is_refused(rows):
    (rows / DEMO).write_text(json.dumps(results() | {"schema": 1}))
    with pytest.raises(ValueError, match="schema 1"):
        TABLES["demo"](rows)
