"""Times a predictor and the MLP of one row in 4 bits: over a list (select, pack, mlp, sums), and owned (mlp_owned, sums).

python -m benchmarks.owned
"""

import os
import subprocess
import sys
import time
from contextlib import nullcontext

SHAPES = {"6.7b": (16384, 4096), "1.3b": (8192, 2048)}
SETTINGS = {  # programs of a multiprocessor, warps, pairs ahead, registers
    "6.7b": [(1, 8, 2, 168), (2, 4, 4, 200), (2, 8, 2, 128), (1, 4, 4, 255), (1, 16, 1, 128)],
    "1.3b": [(1, 8, 2, 168), (1, 4, 2, 168), (2, 4, 2, 168), (2, 8, 1, 128)],
}  # fmt: skip
LAYERS, ROUNDS, DENSITY, LIVE = 32, 60, 0.10, 0.6


class Problem:
    def __init__(self, shape, layers):
        import torch

        from benchmarks.decode_problem import RANKS
        from dejavu_train.kernels.common.layer_norm import LayerNormWeights
        from dejavu_train.kernels.common.limits import Products
        from dejavu_train.kernels.common.partial_sums import partial_sums
        from dejavu_train.kernels.common.selection import PackedSelection, Selection
        from dejavu_train.kernels.formats.int4 import Int4Rows
        from dejavu_train.kernels.formats.matrix import Hidden, Linear, MlpWeights
        from dejavu_train.kernels.mlp.pack import pack
        from dejavu_train.kernels.stages.predict import predict
        from dejavu_train.kernels.stages.predictor import Predictor, PredictorWeights
        from dejavu_train.kernels.stages.select import select

        torch.manual_seed(0)
        (n, d), rank, on = SHAPES[shape], RANKS[shape], {"device": "cuda"}
        self.n, self.d = n, d
        self.x = torch.randn(1, d, **on)
        self.norm = LayerNormWeights(torch.ones(d, **on).half(), torch.zeros(d, **on).half())
        self.normalised = torch.zeros(1, d, dtype=torch.float16, **on)
        self.out, self.partials = torch.empty(1, d, **on), partial_sums(d, "cuda")
        self.packed, self.state = PackedSelection.empty(n, "cuda"), torch.ones(1, dtype=torch.int32, **on)
        self.selection = Selection.empty(n, "cuda", 64)

        def rows(n, d):
            words = torch.randint(-(2**31), 2**31, (n, d // 8), **on).to(torch.int32)
            return Int4Rows(words, (torch.randn(n, d // 128, **on) * 0.3 * d**-0.5).half())

        def nibbles(n, k):
            return torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, **on)

        self.layers, self.lists = [], []
        for _ in range(layers):
            bias = torch.where(torch.rand(n, **on) < LIVE, 8.0, -1e4).half()
            weights = MlpWeights(
                Linear(rows(n, d), bias), Linear(rows(n, d), torch.zeros(d, **on).half()), None, Hidden("relu")
            )
            own = PredictorWeights(
                nibbles(rank, d), nibbles(n, rank), torch.zeros(n, **on), torch.rand(rank, **on) * d**-0.5,
                (torch.rand(n, **on) + 0.5) * rank**-0.5,
            ).with_norm(self.norm)  # fmt: skip
            predictor = Predictor.of(own, 0.0, self.selection, Products.ROW_WORDS)
            logits = torch.empty(1, n, **on)
            predict(self.x, self.norm, predictor, self.normalised)
            select(predictor, self.state, logits)
            predictor.threshold.copy_(logits.flatten().sort().values[int(n * (1 - DENSITY)) - 1])
            select(predictor, self.state)
            packed = PackedSelection.empty(n, "cuda")
            pack(self.selection, packed)
            self.layers.append((weights, predictor))
            self.lists.append(packed)

    def listed(self, i):
        from dejavu_train.kernels.mlp.pack import pack
        from dejavu_train.kernels.stages.mlp import mlp
        from dejavu_train.kernels.stages.predict import predict
        from dejavu_train.kernels.stages.select import select

        weights, predictor = self.layers[i]
        predict(self.x, self.norm, predictor, self.normalised, pdl=True)
        select(predictor, self.state, pdl=True)
        pack(self.selection, self.packed, pdl=True)
        mlp(self.normalised, None, weights, self.x, self.packed, self.out, self.partials, "x", pdl=True)

    def bound(self, i):
        """A list that is there already: what neither select nor pack would cost at best."""
        from dejavu_train.kernels.stages.mlp import mlp
        from dejavu_train.kernels.stages.predict import predict

        weights, predictor = self.layers[i]
        predict(self.x, self.norm, predictor, self.normalised, pdl=True)
        mlp(self.normalised, None, weights, self.x, self.lists[i], self.out, self.partials, None, pdl=True)

    def owned(self, i):
        from dejavu_train.kernels.stages.mlp_owned import mlp_owned
        from dejavu_train.kernels.stages.predict import predict

        weights, predictor = self.layers[i]
        predict(self.x, self.norm, predictor, self.normalised, pdl=True)
        mlp_owned(self.normalised, None, weights, predictor, self.x, self.out, self.state, self.partials, pdl=True)


def ways(shape):
    from dejavu_train.kernels.stages.mlp_owned import OwnedMlpSettings

    found = {"list": ("listed", None), "bound": ("bound", None)}
    for values in SETTINGS[shape]:
        found[f"owned {values}"] = ("owned", OwnedMlpSettings(*values))
    return found


def using(settings):
    return nullcontext() if settings is None else settings.in_use()


def compare(problem, settings):
    """The owned result against the list's, of every layer."""
    import torch

    worst, wrong, counts = 0.0, 0, []
    for i, (_, predictor) in enumerate(problem.layers):
        problem.listed(i)
        want, bits = problem.out.clone(), predictor.selection.row_bits.clone()
        problem.out.fill_(float("nan"))
        predictor.selection.row_bits.fill_(-1)
        problem.partials.fill_(float("nan"))
        made = []
        for _ in range(2):
            with using(settings):
                problem.owned(i)
            made.append(problem.out.clone())
        torch.cuda.synchronize()
        wrong += int((predictor.selection.row_bits != bits).sum()) + int(not torch.equal(*made))
        worst = max(worst, float(((made[0] - want).abs() / (want - problem.x).abs().max()).max()))
        counts.append(int(bits.sum()))
    selected = sum(counts) / len(counts) / problem.n
    return f"largest difference {worst:.1e} of the largest output, {wrong} wrong bits, {selected:.3f} selected"


def warm(shape, name):
    problem = Problem(shape, 1)
    way, settings = ways(shape)[name]
    with using(settings):
        getattr(problem, way)(0)
    if way == "owned":
        print(f"{shape} {name}: {compare(problem, settings)}")
    import torch

    torch.cuda.synchronize()


def timed(shape, names):
    import torch

    from dejavu_train.kernels.common.launch import share_carveout

    problem, graphs, stream = Problem(shape, LAYERS), {}, torch.cuda.Stream()
    torch.cuda.synchronize()
    every = {name: way for name, way in ways(shape).items() if name in names}
    for name, (way, settings) in every.items():
        with torch.cuda.stream(stream), using(settings):
            getattr(problem, way)(0)
        if way == "owned":
            print(f"{shape} {name}: {compare(problem, settings)}", flush=True)
    torch.cuda.synchronize()
    print(f"{shape}: one carveout for {share_carveout(50)} kernels")
    for name, (way, settings) in every.items():
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream), using(settings):
                for i in range(LAYERS):
                    getattr(problem, way)(i)
            graphs[name] = graph
        except Exception as error:
            print(f"{shape} {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    times = {name: [] for name in graphs}
    for turn in range(ROUNDS + 5):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            for _ in range(4):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn >= 5:
                times[name].append(begin.elapsed_time(end) * 1000 / LAYERS / 4)
    for name, found in times.items():
        found.sort()
        print(
            f"{shape} {name:32s} {found[len(found) // 2]:7.2f} us a layer (tenth {found[len(found) // 10]:.2f})",
            flush=True,
        )


def main():
    if sys.argv[1:2] == ["warm"]:
        return warm(*sys.argv[2:])
    if sys.argv[1:2] == ["timed"]:
        return timed(sys.argv[2], sys.argv[3].split(";"))
    begun = time.time()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "2",
    }

    def child(*arguments):
        return subprocess.Popen([sys.executable, __file__, *arguments], env=environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip

    running = {(shape, name): child("warm", shape, name) for shape in SHAPES for name in ways(shape)}
    good = {shape: [] for shape in SHAPES}
    for (shape, name), process in running.items():
        text = process.communicate()[0]
        if process.returncode:
            print(f"{shape} {name} FAILED: {text.strip()[-600:]}", flush=True)
        else:
            good[shape].append(name)
    print(f"compiled after {time.time() - begun:.0f} s", flush=True)
    for shape, names in good.items():
        process = child("timed", shape, ";".join(names))
        print(
            "\n".join(line for line in process.communicate()[0].splitlines() if shape in line or "Error" in line),
            flush=True,
        )
    print(f"{time.time() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
