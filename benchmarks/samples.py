"""How fast a dense model writes its own text on a GPU: python -m benchmarks.samples --shape 6.7b

Random weights of an OPT's shape in fp16. The dense decode engine samples 32 rows at once from ``</s>`` on, at
temperature 1, as `text.source self` does. Appends a row to benchmarks/results/samples.csv.
"""

import time
from pathlib import Path

import torch

from benchmarks.decode_problem import SHAPES, STD
from benchmarks.random_weights import weights_of_shape
from benchmarks.rows import append_row, command_line, gpu_versions, made_now
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Sampling
from dejavu_train.engine.options import EngineOptions

COLUMNS = (
    "shape rows length tokens_per_s minutes_per_million first_call_s memory_gb gpu torch commit date sources"
).split()
RESULTS = Path(__file__).parent / "results" / "samples.csv"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="6.7b")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--output", default=str(RESULTS))
    options = parser.parse_args()
    weights = weights_of_shape(SHAPES[options.shape], torch.float16, "cuda", std=STD)
    engine = DecodeEngine(weights, options=EngineOptions(batch=options.rows, context=options.length))
    prompts = [[2]] * options.rows
    began = time.perf_counter()
    engine.generate(prompts, 8, sampling=Sampling(1.0), stop_tokens=())
    first = time.perf_counter() - began
    seconds = []
    for batch in range(options.batches):
        began = time.perf_counter()
        written = engine.generate(prompts, options.length - 1, sampling=Sampling(1.0, seed=batch), stop_tokens=())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        assert all(len(row) == options.length - 1 for row in written)
    tokens_per_s = options.rows * options.length / sorted(seconds)[len(seconds) // 2]
    row = {
        "shape": options.shape,
        "rows": options.rows,
        "length": options.length,
        "tokens_per_s": round(tokens_per_s),
        "minutes_per_million": round(1e6 / tokens_per_s / 60, 2),
        "first_call_s": round(first, 1),
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
    }
    append_row(options.output, row | gpu_versions() | made_now("kernels", "dejavu_train/engine"), COLUMNS)
    print(row)


if __name__ == "__main__":
    main()
