"""Times what a user calls, SparseOPTForCausalLM(backend="triton").generate(), beside the engine itself and a dense OPT.

Random weights of a true shape in fp16, greedy, one H200 in about two minutes at 6.7B. The same tokens are generated
three ways: by `generate()`, by the engine's own steps, and by the dense model through transformers' loop. `generate()`
is timed at two lengths: their difference leaves out the prompt phase and the set-up. Peak memory is that of building
the engine and generating, beside the weights, the caches and the predictors. A pipeline("text-generation") with all
defaults is timed as well, of the dense model and of ours. Appends one JSON row to --out and prints it.

    python -m benchmarks.generate
    python -m benchmarks.generate --shape 2.7b --mlp-density 0.2 --head-density 0.85
"""

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import OPTForCausalLM, pipeline

from benchmarks.decode_hf import Clock, random_model
from benchmarks.decode_problem import ACTIVE, RANKS, SHAPES, set_thresholds, start
from benchmarks.harness import step_times
from benchmarks.rows import append_json, command_line, gpu_versions, made_now, needs_gpu
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.spec import PredictorSpec, tensor_name
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Row
from dejavu_train.families import ModelDims
from dejavu_train.models.opt import load_tokenizer
from dejavu_train.sparse.model import SparseOPTForCausalLM

STD = 0.02
HEAD_RANK = 16
TOKENIZER = "checkpoints/opt-mini"  # any: of a prompt for random weights
EXTRA = 20  # steps while thresholds are set


def random_bundle(shape: ModelDims, rank: int, mlp_density: float, head_density: float, device: str) -> Bundle:
    """Random predictors. Thresholds of zero, to be moved by `set_thresholds`."""
    generator = torch.Generator(device).manual_seed(1)
    entries, tensors = {}, {}
    for layer in range(shape.n_layers):
        for target, site, density in (("mlp", "mlp_in", mlp_density), ("heads", "attn_in", head_density)):
            n, r = shape.units(target), rank if target == "mlp" else HEAD_RANK
            for name, size in (("down", (r, shape.d_model)), ("up", (n, r)), ("bias", (n,))):
                tensor = torch.zeros(size, dtype=torch.float16, device=device)
                if name != "bias":
                    tensor.normal_(0, STD, generator=generator)
                tensors[tensor_name(layer, target, name)] = tensor.cpu()
            tensors[tensor_name(layer, target, "frequency")] = torch.ones(n)
            entries[layer, target] = PredictorSpec(
                layer, target, site, layer, r, shape.d_model, n, threshold=0.0, density=density
            )
    return Bundle("random", "random", shape, entries, tensors)


def set_active_share(model: OPTForCausalLM, share: float) -> None:
    """Shift fc1's bias so that this share of the neurons is above zero, whatever is selected."""
    for block in model.model.decoder.layers:
        deviation = float(block.fc1.weight.detach().float().std()) * math.sqrt(block.fc1.in_features)
        block.fc1.bias.data.fill_(deviation * statistics.NormalDist().inv_cdf(share))


def seconds(model: OPTForCausalLM, ids: torch.Tensor, new_tokens: int) -> tuple[float, torch.Tensor]:
    """Wall-clock seconds of one greedy call of generate(), and what it made."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **greedy(new_tokens))
    torch.cuda.synchronize()
    return time.perf_counter() - began, out


def greedy(new_tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}


def cache_bytes(engine: DecodeEngine) -> int:
    """K, V and kept inputs."""
    return sum(tensor.nbytes for cache in engine.core.caches for tensor in (cache.k, cache.v, cache.attn_in))


def predictor_bytes(engine: DecodeEngine) -> int:
    """Of all predictors as they lie on the device."""
    matrices = [(p.weights.down, p.weights.up, p.weights.bias, p.folded, p.bias) for p in engine.predictors.values()]
    return sum(tensor.nbytes for each in matrices for tensor in each if tensor is not None)


def own_rate(engine: DecodeEngine, prompt: list[int], new_tokens: int) -> float:
    """Median milliseconds of a step of the engine, generating as generate() does."""
    engine.begin([Row.of_prompt(prompt, len(prompt) + new_tokens)])
    return statistics.median(step_times(engine.step, new_tokens - 6))


def pipeline_ms(model: Any, calls: int) -> float:
    """Median milliseconds a token of calls of a pipeline with all defaults. The first call is not counted."""
    tokenizer, times = load_tokenizer(TOKENIZER), []
    write = pipeline("text-generation", model, tokenizer=tokenizer)
    for turn in range(calls + 1):
        torch.manual_seed(turn)
        began = time.perf_counter()
        (made,) = write("The package was", return_tensors=True)
        seconds_taken = time.perf_counter() - began
        new = len(made["generated_token_ids"]) - len(tokenizer("The package was")["input_ids"])
        times.append(1e3 * seconds_taken / new)
    return statistics.median(times[1:])


@torch.no_grad()
def run(args: argparse.Namespace) -> dict[str, Any]:
    """All measurements of one shape."""
    shape = SHAPES[args.shape]
    torch.manual_seed(0)
    dense = random_model(args.shape, shape)
    set_active_share(dense, args.active_share)
    ids = torch.randint(3, shape.vocab_size, (1, args.prompt), device="cuda")
    clock = Clock()
    seconds(dense, ids, 4)
    dense.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **greedy(args.new_tokens))
    dense_pipeline_ms = pipeline_ms(dense, args.repeats)
    weights = sum(parameter.nbytes for parameter in dense.parameters())
    bundle = random_bundle(
        shape, args.rank or RANKS[args.shape], args.mlp_density, args.head_density, "cuda"
    )  # fmt: skip
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = SparseOPTForCausalLM.from_model(dense, bundle, "triton", sparse_from="prompt")
    first_call, _ = seconds(model, ids, args.new_tokens)
    peak = torch.cuda.max_memory_allocated()
    engine: DecodeEngine = model._runtime.engines.engine(1, args.prompt + args.new_tokens)
    start(engine, args.prompt, EXTRA)
    set_thresholds(engine, args.mlp_density, args.head_density)
    torch.cuda.reset_peak_memory_stats()
    short, _ = min((seconds(model, ids, 1) for _ in range(args.repeats)), key=lambda pair: pair[0])
    whole = [seconds(model, ids, args.new_tokens) for _ in range(args.repeats)]
    long = statistics.median(pair[0] for pair in whole)
    peak = max(peak, torch.cuda.max_memory_allocated())
    engine_ms = own_rate(engine, ids[0].tolist(), args.new_tokens)
    again = engine.generate(ids.tolist(), args.new_tokens, stop_tokens=())[0]
    assert whole[0][1][0, args.prompt :].tolist() == again, "generate() and the engine chose other tokens"
    caches, predictors = cache_bytes(engine), predictor_bytes(engine)
    sparse_pipeline_ms = pipeline_ms(model, args.repeats)
    generate_ms = 1e3 * (long - short) / (args.new_tokens - 1)
    return {
        "first_call_s": first_call,
        "generate_ms": generate_ms,
        "generate_with_prefill_ms": 1e3 * long / args.new_tokens,
        "engine_ms": engine_ms,
        "share_of_engine_rate": engine_ms / generate_ms,
        "transformers_dense_ms": statistics.median(clock.between()[10:]),
        "pipeline_ms": sparse_pipeline_ms,
        "pipeline_dense_ms": dense_pipeline_ms,
        "pipeline_over_dense": dense_pipeline_ms / sparse_pipeline_ms,
        "peak_gb": peak / 1e9,
        "weights_gb": weights / 1e9,
        "caches_gb": caches / 1e9,
        "predictors_gb": predictors / 1e9,
        "peak_without_caches_and_predictors_over_weights": (peak - caches - predictors) / weights,
    }


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--shape", default="6.7b", choices=list(SHAPES))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--mlp-density", type=float, default=0.1)
    parser.add_argument("--head-density", type=float, default=0.5)
    parser.add_argument("--active-share", type=float, default=ACTIVE)
    parser.add_argument("--rank", type=int, default=0, help="of the MLP predictors; 0: 4 %% of the dense MLP's bytes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/generate.jsonl"))
    args = parser.parse_args()
    needs_gpu(parser)
    asked = {f"asked_{name}" if "density" in name else name: value for name, value in vars(args).items()}
    del asked["out"]
    row = {
        **made_now("kernels", "dejavu_train/engine", "dejavu_train/sparse"),
        **gpu_versions(),
        "transformers": transformers.__version__,
        "dtype": "float16",
        "batch": 1,
        **asked,
        **{name: round(value, 4) for name, value in run(args).items()},
    }
    append_json(args.out, row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
