"""Bytes count what is read, tables are means of the newest rows."""

import pytest
from conftest import REPOSITORY

from benchmarks.quantize import Scored, block_bytes, main
from benchmarks.rows import append_row
from dejavu_train.families import ModelDims
from dejavu_train.ground.errors import UserError


def test_bytes_of_a_block():
    shape = ModelDims(d_model=128, d_ffn=256, n_layers=1, n_heads=4, vocab_size=9, max_positions=9)
    dense = Scored(None, None, units=10.0)
    assert block_bytes(shape, None, dense, False) == (1.0, 1.0, 1.0)
    read, _, _ = block_bytes(shape, None, dense, True)
    rows, heads = 64 + 2, 4 * (16 + 2)  # bytes of 128 columns with one scale, and of four heads with theirs
    assert read == pytest.approx((3 * 128 * rows + 128 * heads + 2 * 256 * rows) / (2 * (4 * 128**2 + 2 * 128 * 256)))
    half = Scored(None, None, {(0, "heads"): 20.0, (0, "mlp"): 1280.0}, {0: 640.0}, 10.0)
    read, neurons, kept = block_bytes(shape, None, half, False)
    assert (neurons, kept) == (0.5, 0.5)
    assert read == pytest.approx((0.5 * 4 * 128**2 + (0.5 + 0.25) * 128 * 256) / (4 * 128**2 + 2 * 128 * 256))


def test_tables_are_means_over_seeds_of_the_newest_rows(tmp_path, capsys):
    """A row of an older run with the same seed does not count. A selection's excess decides the sum rule."""
    names = (REPOSITORY / "docs/results/frontier/int4.csv").read_text().splitlines()[0].split(",")
    same = dict.fromkeys(names, "") | {"model": "m", "what": "report", "text": "t", "tokens": 1000}
    same |= {
        "predictors": "none",
        "asked_mlp_density": 1,
        "asked_head_density": 1,
        "perplexity": 10,
        "block_bytes": 0.26,
    }
    sparse = {
        "asked_mlp_density": 0.1,
        "predictors": "before",
        "block_bytes": 0.1,
        "excess": 0.004,
        "excess_error": 0.001,
    }
    rows = [
        {"weights": "fp16", "kl": 0, "increase": 0},
        {"weights": "rtn", "kl": 0.4, "increase": 0.03},
        *({"weights": "gptq", "kl": kl, "increase": kl, "seed": seed} for kl, seed in ((0.9, 0), (0.1, 0), (0.2, 1))),
        {"weights": "fp16", **sparse, "kl": 0, "increase": 0.01},
        {"weights": "gptq", **sparse, "kl": 0, "increase": 0.04},
    ]
    for row in rows:
        append_row(tmp_path / "rows.csv", same | {"seed": 0} | row, names)
    for head, kl in (("int8", 0.16), ("int4", 0.19)):
        row = same | {"seed": 0, "weights": f"gptq, LM head {head}", "kl": kl, "increase": kl}
        append_row(tmp_path / "rows.csv", row, names)
    main(["show", "--csv", str(tmp_path / "rows.csv")])
    said = capsys.readouterr().out
    assert "| t | 1,000 | 10.00 | 0.4000 | 0.1500 | 0.375 |" in said
    assert "| t | 0.1500 | 0.1600 | 0.1900 |" in said
    assert "| 10 %, 100 % | t | gptq, before | 10.0 %, +1.01" in said and "+0.0040 ± 0.0010 | **missed**, not" in said
    assert "| 10 %, 100 % | gptq, before | 10.00 %: -5.82\\* | 10.00 %: -5.82 |" in said, (
        "0.04 less 0.1 nats, of seed 0"
    )
    append_row(tmp_path / "rows.csv", same | {"seed": 1, "weights": "fp16", "kl": 0, "perplexity": 11}, names)
    with pytest.raises(UserError, match="rows of m are of models with other fp16 weights"):
        main(["show", "--csv", str(tmp_path / "rows.csv")])
