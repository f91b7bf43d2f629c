"""The CPU engine against `gather`, the reference: the same sets, the same logits, whatever the history of a row."""

import dataclasses
import os
import signal
import sys
import time

import numpy as np
import pytest
import torch
from bundles import make_bundle
from decode_helpers import masked_nll, random_bundle, random_opt, tokens
from numba import njit
from small_runs import start_process
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dejavu_train.engine.cpu import CpuEngine, CpuWeights, Sampling
from dejavu_train.engine.cpu.arrays import LEVELS
from dejavu_train.engine.cpu.pipeline import Entry
from dejavu_train.engine.cpu.row_kernels import WIDEST_GROUP
from dejavu_train.engine.cpu.sampling import top_k_cut
from dejavu_train.engine.cpu.vector_ops import dot_list, round_to_levels
from dejavu_train.engine.cpu.weights import quantise_groups
from dejavu_train.engine.cpu_limits import CHUNK
from dejavu_train.families import ModelDims
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model
from dejavu_train.sparse.model import SparseOPTForCausalLM


def nll_of(logits, row):
    return torch.nn.functional.cross_entropy(logits[0, :-1].float(), torch.tensor(row[1:]), reduction="none")


def gather_nll(model, bundle, row, sparse_from=0):
    sparse = SparseOPTForCausalLM.from_model(model, bundle, "gather", sparse_from=sparse_from)
    with torch.no_grad():
        return nll_of(sparse(torch.tensor([row])).logits, row)


@pytest.mark.parametrize(
    "options",
    [*({"cascade": True, "dtype": dtype} for dtype in ("float16", "float32", "int8", "int4")),
     {"lookahead": True}, {"rank": 5, "dtype": "int4"}],
    ids=str,
)  # fmt: skip
def test_scores_equal_those_of_gather_over_256_tokens(tiny_opt, options):
    bundle = make_bundle(tiny_opt, means=True, **options).at(0.3, 0.4)
    model, row = load_model(str(tiny_opt)), tokens(256)
    engine = CpuEngine(model, bundle, threads=2)
    (found,) = engine.score([row])
    torch.testing.assert_close(found, gather_nll(model, bundle, row), atol=1e-4, rtol=1e-4)
    assert engine.state.watermark[:, 0].min() < 256  # some head was skipped at the end, so others were filled in


@pytest.mark.parametrize(("heads", "relu", "top_k"), [(2, False, None), (4, True, None), (2, True, 0.4)])
def test_odd_sizes_equal_the_masked_model(heads, relu, top_k):
    """Head dim 10, 13 neurons, an odd vocabulary. A dense layer among sparse ones. Relu and top-k predictors."""
    model = random_opt(d_model=10 * heads, n_heads=heads, d_ffn=13, n_layers=3, vocab=101)
    bundle = random_bundle(model, relu=relu, top_k=top_k, means=True, dense_layers=(1,))
    row = tokens(40, vocab=101)
    (found,) = CpuEngine(model, bundle, threads=2).score([row])
    torch.testing.assert_close(found, masked_nll(model, bundle, row), atol=1e-4, rtol=1e-4)


def test_a_long_gap_is_filled_in(tiny_opt):
    """No head for 249 tokens, then a dense row: all K and V are computed from the kept inputs."""
    bundle = make_bundle(tiny_opt).at(0.3, 0.1)
    never = {
        key: dataclasses.replace(entry, threshold=1e9) if key[1] == "heads" else entry
        for key, entry in bundle.specs.items()
    }
    bundle = dataclasses.replace(bundle, specs=never)
    model, row = load_model(str(tiny_opt)), tokens(260)
    engine = CpuEngine(model, bundle, threads=2)
    engine.score([row[:250]])
    assert not engine.state.watermark.any()
    engine.state.limit[0], engine.state.known[0], engine.state.row_state[0] = 260, 260, 2
    engine.state.sparse_from[0] = 260
    engine.state.tokens[0, :260] = row
    engine.state.position[0] = 249
    while engine.state.row_state[0]:
        engine.step(score=True)
    sparse = SparseOPTForCausalLM.from_model(model, bundle, "gather", sparse_from=0)
    with torch.no_grad():
        first = sparse(torch.tensor([row[:249]]))
        sparse.sparse_from = 10**6
        rest = sparse(torch.tensor([row[249:]]), past_key_values=first.past_key_values).logits
    expected = nll_of(rest, row[249:])
    torch.testing.assert_close(torch.tensor(engine.state.nll[0, 250:260]), expected, atol=1e-4, rtol=1e-4)


@njit(error_model="numpy", _nrt=False, no_rewrites=True, pipeline_class=Entry)
def multiply(rows, scales, group, numbers, inputs, operands, units, out):
    round_to_levels(inputs, LEVELS, operands[0])
    dot_list(rows, scales, group, numbers, numbers.shape[0], operands, units, 1, out)


def test_the_largest_products_of_int8_rows_do_not_overflow():
    """All codes and all levels at their ends, in groups of one chunk, of two, and in the widest."""
    columns, numbers, out = WIDEST_GROUP + CHUNK, np.arange(5, dtype=np.int32), np.zeros((1, 8), np.float32)
    inputs, operands, units = -np.ones(columns, np.float32), np.zeros((2, columns), np.int16), np.ones(1, np.float32)
    for group in (CHUNK, 2 * CHUNK, WIDEST_GROUP):
        codes, scales = quantise_groups(torch.full((5, columns), 3.0), group)
        multiply(codes.numpy(), scales.numpy(), group, numbers, inputs, operands, units, out)
        assert np.allclose(out[0, :5], -3.0 * LEVELS * columns, rtol=1e-5)


@pytest.mark.parametrize(("top_k", "top_p"), [(7, 1.0), (40, 0.8), (10_000, 0.5), (10_000, 1.0)])
def test_top_k_samples_as_transformers_filters(tiny_opt, top_k, top_p):
    """Against softmax over what transformers' warpers leave. Of two equal logits at the edge both stay."""
    model, prompt = load_model(str(tiny_opt)), tokens(5)
    head = model.lm_head.weight
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1]
        edge = logits.argsort(descending=True)[min(top_k, 100) - 1]
        outside = int(logits.argmin())
        if top_k == 7:
            head[outside] = head[edge]  # tied with the embedding, which the prompt does not use
            assert outside not in prompt
        logits = model(torch.tensor([prompt])).logits
    scores = TemperatureLogitsWarper(0.9)(None, logits[0, -1:])
    scores = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, scores))
    chances = scores[0].double().softmax(-1)
    assert (top_k != 7) or int((chances > 0).sum()) == 8
    engine, drawn = CpuEngine(model, threads=2, batch=4), torch.zeros(len(chances))
    for seed in range(100):
        sampling = Sampling(0.9, top_p, top_k=top_k, seed=seed)
        for row in engine.generate([prompt] * 4, 1, sampling=sampling, stop_tokens=()):
            drawn[row[0]] += 1
    assert not drawn[chances == 0].any()
    likely = chances > 0.01
    error = (drawn / 400 - chances)[likely] / (chances * (1 - chances) / 400 + 1e-12).sqrt()[likely]
    assert error.abs().max() < 4.5


@njit(error_model="numpy", _nrt=False, no_rewrites=True, pipeline_class=Entry)
def cut(logits, best, top_k):
    return top_k_cut(logits, best, top_k)


@pytest.mark.parametrize("kind", ["normal", "ties", "negative", "barred", "zeros"])
def test_the_cut_of_top_k_is_the_k_th_largest_logit(kind):
    logits = torch.randn(999, generator=torch.Generator().manual_seed(4)) * 10
    if kind == "ties":
        logits = logits.round()
    elif kind == "negative":
        logits = -logits.abs() - 1e-3
    elif kind == "barred":
        logits[::3] = -torch.inf
    elif kind == "zeros":
        logits = torch.where(logits > 5, logits, torch.zeros(()))
    for top_k in (1, 2, 50, 666, 998, 999, 5000):
        kth = logits.topk(min(top_k, 999)).values[-1].clamp_min(torch.finfo(torch.float32).min)
        found = float(cut(logits.numpy(), np.float32(logits.max()), top_k))
        assert torch.equal(logits >= found, logits >= kth)


def test_bytes_are_counted(tiny_opt):
    weights = CpuWeights.from_model(load_model(str(tiny_opt)))
    engine, shape = CpuEngine(weights, threads=2), weights.shape
    engine.score([tokens(3)])
    read = engine.bytes_read()
    d, f, columns = shape.d_model, shape.d_ffn, 64  # in whole cache lines
    assert read["lm_head"] == 3 * 4 * shape.vocab_size * columns
    two_steps = 2 * 4 * shape.n_layers * columns
    assert two_steps * (4 * d + f) < read["weights"] <= two_steps * (4 * d + 2 * f)
    assert read["kv"] == 8 * shape.n_layers * d * 3 and read["predictors"] == 0
    engine.generate([tokens(4)], 2, stop_tokens=())
    one_pass = (columns + 12) * shape.vocab_size  # the LM head in int8, and the fp32 rows that can be the largest
    assert 2 * one_pass < engine.bytes_read()["lm_head"] < 2.2 * one_pass


def test_greedy_takes_the_largest_fp32_logit_though_int8_screens(tiny_opt):
    """Rows of the LM head that differ by less than int8 can tell. Of equal ones the first."""
    model, prompt = load_model(str(tiny_opt)), tokens(7, vocab=100)
    with torch.no_grad():
        head = model.lm_head.weight
        head[100:200] = head[100] * (1 + 1e-5 * torch.randn(100, 1, generator=torch.Generator().manual_seed(3)))
        head[205] = head[100:200][head[100:200].norm(dim=1).argmax()]
        for sign in (1, -1):  # among these rows the largest is the longest, or the shortest
            hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
            head[100:206] *= sign * (head[100] @ hidden).sign() * (10 if sign == 1 else 1)
            engine = CpuEngine(model, threads=2)
            (chosen,) = engine.generate([prompt], 1, stop_tokens=())[0]
            logits = head.double() @ hidden.double()
            assert logits.max() - logits[chosen] < 2e-6 * logits.max() and 100 <= chosen <= 205


def test_refusals_name_the_remedy(tiny_opt):
    model = load_model(str(tiny_opt))
    weights = CpuWeights.from_model(model)
    for options in ({"batch": 9}, {"threads": 0}, {"context": 513}):
        with pytest.raises(UserError):
            CpuEngine(weights, **options)
    with pytest.raises(UserError, match="float32, float16, bfloat16, int8, int4 or left out, got int3"):
        CpuWeights.from_model(model, "int3")
    for stored, group in (("float32", 64), ("int8", 96), ("int8", 8192)):
        with pytest.raises(UserError, match="multiple of 64 up to 4096"):
            CpuWeights.from_model(model, stored, group)
    engine = CpuEngine(weights, context=16)
    for prompts, new in (([[2]] * 2, 4), ([[]], 4), ([[2, 320]], 4), ([[2] * 10], 7)):
        with pytest.raises(UserError):
            engine.generate(prompts, new)
    engine.close()
    with pytest.raises(UserError, match="closed"):
        engine.generate([[2]], 4)


def generate_for_ever(log):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    engine = CpuEngine(CpuWeights.random(ModelDims(256, 1024, 4, 4, 512, 2048)), threads=2)
    print("ready", file=sys.stderr, flush=True)
    while True:
        engine.generate([[2]], 2000, stop_tokens=())


def test_ctrl_c_leaves_at_once(tmp_path):
    log = tmp_path / "log"
    process = start_process(generate_for_ever, str(log))
    try:
        while not (log.exists() and "ready\n" in log.read_text()):  # behind what it says where it has to compile
            assert process.is_alive()
            time.sleep(0.02)
        time.sleep(0.3)
        started = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        process.join(30)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in log.read_text() and process.exitcode == 1
    assert time.monotonic() - started < 20  # a busy machine; nothing would end it by itself


def test_int8_weights_have_a_scale_for_64_columns_unless_asked_otherwise():
    model = random_opt(d_model=200, n_heads=4, d_ffn=64, n_layers=1, vocab=101)
    for asked, columns, scales in ((None, 64, 4), (128, 128, 2), (256, 256, 1), (1024, 256, 1)):
        stored = CpuWeights.from_model(model, "int8", asked).model
        assert (stored.group, stored.scales.shape[1]) == (columns, scales)
    assert CpuWeights.from_model(model).model.scales.shape[1] == 1
