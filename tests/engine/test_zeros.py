"""A dense engine that leaves rows of silent neurons out: the text, the logits and the faults of one that reads them."""

import pytest
import torch
from family_models import random_family

from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.options import EngineOptions
from dejavu_train.ground.errors import UserError

ROWS = ([3, 4, 5, 6], [9, 10, 11], [12, 13, 14, 15])
SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1,
    "intermediate_size": 48, "ffn_dim": 48, "word_embed_proj_dim": 64, "do_layer_norm_before": True,
}  # fmt: skip


def engine_of(model, zeros, rows, ops="triton"):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = EngineOptions(ops=ops, zeros=zeros, batch=rows, context=24, device=device, dtype=torch.float32)
    return DecodeEngine(model, None, options)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("name", "rows"),
    [("llama", 1), ("arcee", 3), *(pytest.param(*each, marks=LONG) for each in (
        ("350m", 1), ("350m", 3), ("llama", 3), ("fatrelu", 1), ("fatrelu", 3), ("drelu", 1), ("drelu", 3),
        ("arcee", 1),
    ))],
)  # fmt: skip
def test_what_is_left_out_changes_nothing(name, rows):
    model = random_family(name, **SMALL)
    skip, read = (engine_of(model, zeros, rows) for zeros in ("skip", "read"))
    assert [half.skips for half in skip.plan.halves] == [False, True]
    assert not any(half.skips for half in read.plan.halves)
    ours, theirs = skip.logits(ROWS[:rows]), read.logits(ROWS[:rows])
    for row, (own, other) in zip(ROWS, zip(ours, theirs, strict=True), strict=False):
        size = other[: len(row)].abs().max()
        assert (own[: len(row)] - other[: len(row)]).abs().max() <= 1e-5 * size
    given = [list(row) for row in ROWS[:rows]]
    assert skip.generate(given, 3, stop_tokens=()) == read.generate(given, 3, stop_tokens=())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["350m", "drelu"])
def test_a_hidden_state_that_is_no_number_is_a_fault_and_no_silent_neuron(name, rows):
    model = random_family(name, **SMALL)
    first = next(p for n, p in model.named_parameters() if n.endswith(("fc1.weight", "gate_proj.weight")))
    with torch.no_grad():
        first[7] = float("nan")
    engine = engine_of(model, "skip", rows)
    with pytest.raises(UserError, match="NaN"):
        engine.generate([list(row) for row in ROWS[:rows]], 4, stop_tokens=())


def test_an_engine_says_what_it_leaves_out():
    engine = engine_of(random_family("350m", **SMALL), "auto", 1)
    assert "rows of silent neurons are not read" in engine.describe()
    smooth = engine_of(random_family("bloom"), "auto", 1, "reference")
    assert "makes no neuron silent" in smooth.describe()
    with pytest.raises(UserError, match="zeros must be one of auto, skip, read, got never"):
        EngineOptions(zeros="never")
