"""Times the first token: a prompt of so many tokens, from the call to the token behind it.

    python -m benchmarks.first_token --models 6.7b --formats fp16 int4          on a GPU, shapes with random weights
    python -m benchmarks.first_token --models 1.3b --formats int8 --rivals      on a CPU, beside transformers

Medians of warm calls, one row. ``first_call_s`` is the first call of its length, with what it compiles and records.
``step_ms`` is one decoding step of the same engine. Rows go to benchmarks/results/first_token.csv.
"""

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import beside_llama, cpu_decode
from benchmarks.decode_hf import random_model
from benchmarks.decode_problem import ACTIVE, SHAPES, random_weights
from benchmarks.rows import append_row, command_line, device_name, five_digits, made_now
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.options import EngineOptions

LENGTHS = {"cuda": (1, 9, 16, 17, 65, 128, 257, 513, 1024), "cpu": (1, 16, 128, 512)}
CALLS, SECONDS = 7, 20.0  # warm ones of one length, at most
COLUMNS = "model what format device threads tokens ms first_call_s step_ms torch commit date sources".split()


def timed(call: Callable[[], object], cuda: bool) -> tuple[float, float]:
    """Milliseconds of a warm call, and seconds of the first."""
    seconds: list[float] = []
    while len(seconds) < 1 + CALLS and sum(seconds[1:]) < SECONDS:
        began = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds[1:] or seconds), seconds[0]


def prompts(vocab: int, lengths: tuple[int, ...]) -> dict[int, list[int]]:
    """Random ids by length."""
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths}


def our_times(engine: Any, given: dict[int, list[int]], cuda: bool) -> dict[int, dict[str, float]]:
    """Times of one engine by length: of its begin, and of one of its steps."""
    found = {}
    for n, tokens in given.items():
        ms, first = timed(lambda tokens=tokens, n=n: engine.begin([Row.of_prompt(tokens, n + 8)]), cuda)  # type: ignore[misc]
        step, _ = timed(lambda: engine.step(), cuda)
        found[n] = {"ms": ms, "first_call_s": first, "step_ms": step}
    return found


@torch.no_grad()
def rival_times(model: Any, given: dict[int, list[int]], cuda: bool) -> dict[int, dict[str, float]]:
    """Times of transformers: the forward pass of the prompt, with the logits of its last token alone."""
    found = {}
    for n, tokens in given.items():
        ids = torch.tensor([tokens], device=model.device)
        ms, first = timed(lambda ids=ids: model(ids, logits_to_keep=1, use_cache=True), cuda)  # type: ignore[misc]
        found[n] = {"ms": ms, "first_call_s": first}
    return found


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=["6.7b"])
    parser.add_argument(
        "--formats", nargs="*", default=["fp16"], help="fp16 or int4 on a GPU, float32 or int8 on a CPU"
    )
    parser.add_argument("--lengths", nargs="+", type=int)
    parser.add_argument("--rivals", action="store_true", help="transformers, eager and compiled, as well")
    beside_llama.add_options(parser)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/first_token.csv"))
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    lengths = tuple(args.lengths or LENGTHS["cuda" if cuda else "cpu"])
    about = {"device": device_name("cuda" if cuda else "cpu"), "threads": torch.get_num_threads()}
    about |= {"torch": torch.__version__} | made_now("dejavu_train.engine.decode", "dejavu_train.engine.cpu.engine")

    def keep(name: str, what: str, kind: str, times: dict[int, dict[str, float]]) -> None:
        for n, row in times.items():
            append_row(
                args.out, five_digits(about | {"model": name, "what": what, "format": kind, "tokens": n} | row), COLUMNS
            )
            print(name, what, kind, n, five_digits(row), flush=True)

    for name in args.models:
        shape = SHAPES[name]
        given = prompts(shape.vocab_size, lengths)
        context = max(lengths) + 16
        for kind in args.formats:
            engine: Any
            if cuda:
                weights = random_weights(shape, ACTIVE, kind == "int4")
                engine = DecodeEngine(weights, None, EngineOptions(context=context))
            else:
                engine = cpu_decode.CpuEngine(cpu_decode.random_weights(shape, kind, ACTIVE), None, context=context)
            keep(name, "ours", kind, our_times(engine, given, cuda))
            del engine
            gc.collect()
            torch.cuda.empty_cache()
        for form in args.llama_formats if args.llama else ():
            child = beside_llama.Llama(args.llama, shape, form, about["threads"], context, args.folder)
            found = {n: timed(lambda child=child, n=n: child.prompt(n), cuda) for n in lengths}  # type: ignore[misc]
            keep(name, "llama.cpp", form, {n: {"ms": ms, "first_call_s": s} for n, (ms, s) in found.items()})
            child.child.kill()
        if args.rivals:
            model = random_model(name, shape, "cuda" if cuda else "cpu", torch.float16 if cuda else torch.float32)
            kind = "fp16" if cuda else "float32"
            keep(name, "transformers", kind, rival_times(model, given, cuda))
            model.forward = torch.compile(model.forward, dynamic=False)
            few = {n: given[n] for n in lengths if n in (1, 16, 128, 1024)}
            keep(name, "transformers, compiled", kind, rival_times(model, few, cuda))
            del model
            gc.collect()
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
