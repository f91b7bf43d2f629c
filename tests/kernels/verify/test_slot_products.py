"""Products of eight slots: as in float64, and equal bit for bit whatever the other slots hold."""

import pytest
import torch
from int4_helpers import random_rows

from dejavu_train.kernels.common.kv_cache import HeadStep, KvCache
from dejavu_train.kernels.common.positions import Rotary
from dejavu_train.kernels.common.settings import tried
from dejavu_train.kernels.formats.matrix import Hidden, Linear, MlpWeights, Rows
from dejavu_train.kernels.stages.hidden import kept_unit
from dejavu_train.kernels.stages.mlp import hidden_reference
from dejavu_train.kernels.verify.slot_products import (
    slot_hidden,
    slot_linear,
    slot_linear_reference,
    slot_qkv,
    slot_qkv_reference,
)
from dejavu_train.kernels.verify.slot_walk import SLOTS, ProductScratch, SlotSettings

S, NAN = SLOTS.value, float("nan")
WIDTH = 256  # of whole groups of four bits, in pairs
SHARE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Product:
    """One product over inputs (8, d): `run` gives what it leaves for each slot, `exact` the same in float64."""

    def __init__(self, device, name, dtype, n=40, d=WIDTH, heads=2, seed=0):
        if dtype == torch.bfloat16 and device == "cpu":
            pytest.skip("Triton's interpreter multiplies no matrices of bfloat16")
        torch.manual_seed(seed)
        self.device, self.name, self.dtype, self.n = device, name, torch.float16 if dtype == "int4" else dtype, n
        self.packed, self.turned = dtype == "int4", name == "turned"
        n = self.n = WIDTH if self.packed and self.turned else n
        self.x = torch.randn(S, d, device=device).to(self.dtype)
        if self.turned:
            self.x.relu_()  # hidden values, of which a kernel might leave zeros out
        self.scratch = ProductScratch.empty(n, device)
        self.residual = torch.randn(S, n, device=device)
        if name == "qkv":
            self.heads, e = heads, 16
            self.linear = Linear(self.matrix(heads, 3, e, d), self.numbers(heads, 3, e))
            cos, sin = torch.randn(2, 12, e // 4, device=device)
            self.rotary = Rotary.of(cos.repeat(1, 2), sin.repeat(1, 2), e)
        elif name == "by_head":
            self.linear = Linear(random_rows(device, d // 16, n, 16, group=16), self.numbers(n))
        elif name in ("hidden", "gated"):
            up, gate = (Linear(self.matrix(n, d), self.numbers(n)) for _ in range(2))
            form = Hidden("silu") if name == "gated" else Hidden("relu2")
            self.mlp = MlpWeights(up, up, gate if name == "gated" else None, form)
        else:
            self.linear = Linear(self.matrix(*((d, n) if self.turned else (n, d))), self.numbers(n))

    def numbers(self, *shape):
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def matrix(self, *shape):
        if self.packed:
            return random_rows(self.device, *shape, group=128, size=0.02)
        return Rows((torch.randn(*shape, device=self.device) * shape[-1] ** -0.5).to(self.dtype))

    def cache(self, sequences):
        k, v = torch.full((2, sequences, self.heads, 12, 16), NAN, dtype=self.dtype, device=self.device)
        return KvCache(k, v, self.x[:, :0], positions=self.rotary)

    def run(self, x, position, sequences=1):
        if self.name == "qkv":
            q, cache = x.new_full((S, self.heads, 16), NAN), self.cache(sequences)
            slot_qkv(x, self.linear, HeadStep(q, cache, position), self.scratch)
            return self.found(q, cache, position)
        if self.name in ("hidden", "gated"):
            y = x.new_full((S, self.n), NAN)
            slot_hidden(x, self.mlp, y, self.scratch)
            return y
        out = torch.full_like(self.residual, NAN)
        slot_linear(x, self.linear.weight, self.linear.bias, out, self.residual, self.scratch, self.turned)
        return out

    def found(self, q, cache, position):
        each = torch.arange(S, device=q.device) % len(cache.k)
        written = [kept[each, :, position.long()].flatten(1) for kept in (cache.k, cache.v)]
        return torch.cat([q.flatten(1), *written], 1)

    def exact(self, position):
        wide = self.x.double()
        if self.name in ("hidden", "gated"):
            return hidden_reference(wide, self.mlp) * kept_unit(self.mlp, self.dtype)
        weight = self.linear.weight.dense(torch.float64)
        if self.name == "by_head":
            weight = weight.transpose(0, 1).flatten(1)
        linear = Linear(Rows(weight), self.linear.bias.double())
        if self.name == "qkv":
            q, cache = torch.empty(S, self.heads, 16, dtype=torch.float64, device=wide.device), self.cache(S)
            cache = KvCache(cache.k.double(), cache.v.double(), cache.attn_in, positions=self.rotary)
            slot_qkv_reference(wide, linear, HeadStep(q, cache, position), None)
            return self.found(q, cache, position)
        out = torch.empty(S, self.n, dtype=torch.float64, device=wide.device)
        slot_linear_reference(wide, linear.weight, linear.bias, out, self.residual.double(), None, self.turned)
        return out


def positions(device, *numbers):
    return torch.tensor(numbers or range(2, 2 + S), dtype=torch.int32, device=device)


ALL = ("linear", "turned", "qkv", "hidden", "gated")
CASES = [(name, dtype) for name in ALL for dtype in (*SHARE, "int4")] + [("by_head", "int4")]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_products_are_those_of_float64(device, name, dtype):
    product = Product(device, name, dtype)
    got, want = product.run(product.x, positions(device)), product.exact(positions(device))
    share = 5e-3 if dtype == "int4" else SHARE[dtype]
    torch.testing.assert_close(got.double(), want, atol=8 * share, rtol=share)
    assert int(product.scratch.tickets.sum()) == 0


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("n", "d", "programs"), [(1, 8, 1), (37, 100, 1), (16, 264, 8), (90, 72, 1)])
def test_odd_sizes_and_cut_columns(device, turned, n, d, programs):
    product = Product(device, "turned" if turned else "linear", torch.float32, n, d)
    values = {"programs": programs, "rows": 16, "block": 16, "stages": 2, "warps": 1, "fetched": 0}
    cut = SlotSettings(**values).splits(n, d, 3) > 1
    assert cut == (programs > 1)
    with tried("slots", values):
        got = product.run(product.x, positions(device))
    torch.testing.assert_close(got.double(), product.exact(positions(device)), atol=5e-5, rtol=1e-5)


def replayed(run, x, position):
    """What `run` leaves, from a graph where there is a GPU."""
    if x.device.type != "cuda":
        return run(x, position)
    held = torch.zeros_like(x), torch.zeros_like(position)
    run(*held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*held)
    held[0].copy_(x)
    held[1].copy_(position)
    graph.replay()
    return out


@pytest.mark.parametrize(("name", "dtype"), [case for case in CASES if case[1] != torch.float32], ids=str)
def test_a_slot_depends_on_its_own_input_alone(device, name, dtype):
    """One to eight live slots, in other places, beside noise, zeros or NaN, of one sequence or of eight."""
    product = Product(device, name, dtype)
    position, kept = positions(device), product.residual.clone()
    expected = product.run(product.x, position)
    for live, shift, others in ((1, 5, (0.0, 0.0)), (3, 2, (NAN, 100.0)), (8, 3, (0.0, 0.0))):
        x, places = torch.empty_like(product.x), position.roll(shift)
        x[::2], x[1::2] = others
        slots = [(i + shift) % S for i in range(live)]
        x[slots] = product.x[:live]
        product.residual = kept.roll(shift, 0)
        for sequences in (1, S) if name == "qkv" else (1,):

            def run(x, position, sequences=sequences):
                return product.run(x, position, sequences)

            assert torch.equal(replayed(run, x, places)[slots], expected[:live]), (live, shift, others)


def test_refusals_are_one_line(device):
    product = Product(device, "linear", torch.float16)
    with pytest.raises(ValueError, match="x: expected shape"):
        product.run(product.x[:5], positions(device))
    with pytest.raises(ValueError, match="x: expected float16"):
        product.run(product.x.float(), positions(device))
