"""The benchmark of several tokens with 4-bit rows calls each product as it stands."""

import pytest

from benchmarks import int4_tokens


@pytest.mark.parametrize("tokens", [2, 8])
def test_every_op_runs(tokens, device, monkeypatch):
    monkeypatch.setattr(int4_tokens, "DEVICE", device)
    monkeypatch.setattr(int4_tokens, "UNION", {tokens: 0.1})
    calls = int4_tokens.steps(128, tokens, sets=1)
    assert set(calls) == set(int4_tokens.OPS)
    for op in ("qkv", "out", "listed", "fc1"):
        calls[op](0)
    assert int4_tokens.bytes_of("layer", 128, tokens) == sum(
        int4_tokens.bytes_of(op, 128, tokens) for op in ("qkv", "out", "fc1", "fc2")
    )
