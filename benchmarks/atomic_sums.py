"""us a half: programs add d numbers each into one row, then the next one reads it. Chains in a graph, PDL."""

import statistics

import torch
import triton
import triton.language as tl

from dejavu_train.kernels.common.launch import n_sms, start_dependents_and_wait, use_pdl
from dejavu_train.kernels.common.partial_sums import add_partials


@triton.jit
def part_k(x, partials, D: tl.constexpr, PDL: tl.constexpr):
    c = tl.arange(0, D)
    start_dependents_and_wait(PDL)
    v = tl.load(x + c, cache_modifier=".cg")
    m = tl.sum(v, 0) * 1e-6
    tl.store(partials + tl.program_id(0) * D + c, (v * 1e-3 + m).to(tl.float16))


@triton.jit
def red_last_k(x, bias, acc, count, out, D: tl.constexpr, PDL: tl.constexpr, LAST: tl.constexpr):
    c = tl.arange(0, D)
    start_dependents_and_wait(PDL)
    v = tl.load(x + c, cache_modifier=".cg")
    m = tl.sum(v, 0) * 1e-6
    y = ((v * 1e-3 + m) * 1048576.0).to(acc.dtype.element_ty)
    tl.atomic_add(acc + c, y, sem="relaxed")
    if LAST:
        tl.debug_barrier()
        n = tl.atomic_add(count, 1, sem="acq_rel")
        if n == tl.num_programs(0) - 1:
            tl.debug_barrier()
            a = tl.load(acc + c, cache_modifier=".cg")
            tl.store(out + c, v + tl.load(bias + c).to(tl.float32) + a.to(tl.float32) * (1 / 1048576.0))
            tl.store(acc + c, tl.zeros((D,), acc.dtype.element_ty))
            tl.store(count, 0)


@triton.jit
def red_next_k(x, bias, old, acc, zero, out, D: tl.constexpr, PDL: tl.constexpr):
    """reads x + old, program 0 stores it as out, zeroes a third."""
    c = tl.arange(0, D)
    b = tl.load(bias + c).to(tl.float32)
    start_dependents_and_wait(PDL)
    v = (
        tl.load(x + c, cache_modifier=".cg")
        + tl.load(old + c, cache_modifier=".cg").to(tl.float32) * (1 / 1048576.0)
        + b
    )
    if tl.program_id(0) == 0:
        tl.store(out + c, v)
        tl.store(zero + c, tl.zeros((D,), zero.dtype.element_ty))
    m = tl.sum(v, 0) * 1e-6
    y = ((v * 1e-3 + m) * 1048576.0).to(acc.dtype.element_ty)
    tl.atomic_add(acc + c, y, sem="relaxed")


def timed(fn, n=200):
    fn()
    fn()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(n):
            fn()
    for _ in range(3):
        g.replay()
    ts = []
    for _ in range(15):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        g.replay()
        b.record()
        torch.cuda.synchronize()
        ts.append(a.elapsed_time(b) * 1e3 / n)
    return round(statistics.median(ts), 2)


dev = torch.device("cuda")
for D in (2048, 4096, 8192):
    for per in (1, 2):
        P = per * n_sms(dev)
        pdl = use_pdl(True, dev)
        x = torch.randn(D, device=dev)
        o = torch.zeros(1, D, device=dev)
        bias = torch.zeros(D, device=dev, dtype=torch.float16)
        part = torch.zeros(P, D, device=dev, dtype=torch.float16)
        kw = dict(D=D, PDL=pdl, num_warps=8, launch_pdl=pdl)

        def a():
            part_k[(P,)](x, part, **kw)
            add_partials(part, P, bias, x[None], o, pdl)

        res = {"partials+add": timed(a), "partials alone": timed(lambda: part_k[(P,)](x, part, **kw))}
        for t in (torch.int64, torch.int32, torch.float32):
            accs = [torch.zeros(D, device=dev, dtype=t) for _ in range(3)]
            cnt = torch.zeros(1, device=dev, dtype=torch.int32)
            if t != torch.float32:
                res[f"last {t}"] = timed(lambda: red_last_k[(P,)](x, bias, accs[0], cnt, o, LAST=True, **kw))
            res[f"red alone {t}"] = timed(lambda: red_last_k[(P,)](x, bias, accs[0], cnt, o, LAST=False, **kw))
            if t != torch.float32:
                s = [0]
                xs = [x.clone(), x.clone()]

                def b():
                    i = s[0]
                    s[0] += 1
                    red_next_k[(P,)](
                        xs[i % 2], bias, accs[i % 3], accs[(i + 1) % 3], accs[(i + 2) % 3], xs[(i + 1) % 2], **kw
                    )

                res[f"next {t}"] = timed(b, 198)
        print(D, P, res, flush=True)
