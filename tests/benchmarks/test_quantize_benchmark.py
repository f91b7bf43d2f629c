"""Weights rounded in memory are those that the command writes, and bytes count what is read."""

import dataclasses

import pytest
import torch
from bundles import make_bundle
from conftest import save_tiny_opt

from benchmarks.quantize import Int4Row, Scored, block_bytes, in_memory, main, skipping
from benchmarks.quantize_plot import draw, unbeaten
from benchmarks.rows import append_row
from dejavu_train.bundle.selector import Predicted
from dejavu_train.data.text import TextSource
from dejavu_train.errors import UserError
from dejavu_train.models.opt import OPTShape, load_opt
from dejavu_train.quantize import run
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.run import quantise
from dejavu_train.quantize.stream import embed
from dejavu_train.sparse.masked import masking


def test_in_memory_as_on_disk_and_offsets_err_less(tmp_path, text_file):
    model = save_tiny_opt(tmp_path / "model", hidden_size=64, word_embed_proj_dim=64)
    config = QuantizeConfig(model=str(model), text=TextSource(source=str(text_file)), tokens=1000, window=64)
    config = dataclasses.replace(config, device="cpu", output=str(tmp_path / "out"))
    quantise(config)
    written, made, offset = load_opt(config.output), in_memory(config), in_memory(config, asymmetric=True)
    dense = load_opt(str(model))
    errors = []
    for layer in range(2):
        fc1 = made.model.decoder.layers[layer].fc1
        torch.testing.assert_close(fc1.weight.data, written.model.decoder.layers[layer].fc1.weight)
        exact = dense.model.decoder.layers[layer].fc1.weight
        other = offset.model.decoder.layers[layer].fc1.weight
        errors.append([float((weight - exact).detach().norm()) for weight in (fc1.weight, other)])
    assert all(0.5 * plain < asymmetric < 1.1 * plain for plain, asymmetric in errors)


def test_bytes_of_a_block():
    shape = OPTShape(d_model=128, d_ffn=256, n_layers=1, n_heads=4, vocab_size=9, max_positions=9)
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
    """A row of an older run with the same seed does not count; a selection's excess decides the sum rule."""
    names = [field.name for field in dataclasses.fields(Int4Row)]
    same = dict.fromkeys(names, "") | {"model": "m", "what": "report", "text": "t", "tokens": 1000}
    same |= {"predictors": "none", "asked_mlp": 1, "asked_heads": 1, "perplexity": 10, "block_bytes": 0.26}
    sparse = {"asked_mlp": 0.1, "predictors": "before", "block_bytes": 0.1, "excess": 0.004, "excess_error": 0.001}
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


def test_the_picture_has_a_panel_for_each_text_with_sparse_rows(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.errorbar", lambda _axis, x, y, *_, **style: drawn.append((style["label"], x, y))
    )
    monkeypatch.setattr("matplotlib.figure.Figure.legend", lambda *_, **__: None)
    same = {"what": "report", "model": "m", "text": "t", "seed": "0", "error": "0.01", "predictors": "none"}
    same |= {"asked_mlp": "1", "asked_heads": "1", "block_bytes": "1", "increase": "0", "weights": "fp16"}
    sparse = {"predictors": "before", "asked_mlp": "0.1", "weights": "gptq", "asked_heads": "0.85"}
    rows = [same, same | {"text": "dense only"}, same | sparse | {"block_bytes": "0.1", "increase": "0.05"}]
    draw([*rows, rows[-1] | {"block_bytes": "0.2"}], "m", tmp_path / "m.png")
    assert (tmp_path / "m.png").stat().st_size > 1000
    dense, selected = drawn
    assert dense == ("fp16, dense", (100.0,), (0.0,))
    assert selected[:2] == ("4 bits, sparse, selected heads", (20.0,)), "the newest row of two"
    assert selected[2] == pytest.approx((5.127,), abs=1e-3)


def test_what_no_other_point_beats():
    assert unbeaten([(100, 0, 0), (40, 2, 0), (26, 1, 0), (12, 3, 0), (13, 4, 0)]) == [
        (12, 3, 0), (26, 1, 0), (100, 0, 0),
    ]  # fmt: skip


def test_masked_moments_are_those_of_the_sparse_model(tmp_path, text_file):
    """The hidden states that go from layer to layer are those of the finished model, decoded sparsely."""
    model = save_tiny_opt(tmp_path / "model", hidden_size=64, word_embed_proj_dim=64)
    bundle = make_bundle(model, means=True).at(0.3, 0.75)
    text = TextSource(source=str(text_file))
    config = QuantizeConfig(model=str(model), text=text, tokens=1000, window=64, device="cpu")
    found = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "embed", lambda *given: found.extend(embed(*given)) or found)
        quantise(dataclasses.replace(config, output=str(tmp_path / "out")), skipping(bundle, torch.device("cpu")))
    windows, _ = run.calibration_windows(config, OPTShape(64, 96, 2, 4, 300, 512), "")
    first = sorted(windows, key=len, reverse=True)[0]
    made, seen = load_opt(str(tmp_path / "out")), []
    made.model.decoder.final_layer_norm.register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    with torch.no_grad(), masking(made, Predicted(bundle), means=bundle.head_means()):
        made(torch.tensor([first.tolist()]))
    torch.testing.assert_close(found[0].hidden[:1], seen[0], rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        made(torch.tensor([first.tolist()]))
    assert (seen[1] - seen[0]).norm() > 0.05 * seen[0].norm(), "the case must skip something"
