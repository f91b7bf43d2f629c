"""Times lm-eval's `generate_until` through the engine beside transformers' compiled dense model, random weights.

    python -m benchmarks.until --shape 2.7b --batches 1 16

A true shape with opt-mini's vocabulary, fp16, random predictors whose thresholds select the asked shares of neurons
and heads on a random text; the prompts are cut from a file. Both answer the same requests twice, the second time is
kept: compiling and recording graphs are over. Appends rows to benchmarks/results/until.csv. `--shape tiny --device cpu`
runs the engine's plain-torch operations, to try the script.
"""

import argparse
import dataclasses
import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from lm_eval.api.instance import Instance

from benchmarks.decode_hf import random_opt
from benchmarks.decode_problem import RANKS, SHAPES
from benchmarks.generate import random_bundle, set_live_share
from benchmarks.rows import append_row, commit, five_digits
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.evaluation.lm_eval.model import DejavuLM
from dejavu_train.models.hooks import record
from dejavu_train.models.opt import OPTShape, load_tokenizer
from dejavu_train.sparse.model import SparseOPTForCausalLM

TINY = OPTShape(64, 128, 2, 4, 8192, 512)


@torch.no_grad()
def calibrated(bundle: Bundle, model: Any, ids: torch.Tensor) -> Bundle:
    """The bundle with thresholds that select the share in every spec's ``density`` of the units on ``ids`` (1, T)."""
    with record(model, {"attn_in", "mlp_in"}) as got:
        model.model.decoder(input_ids=ids, use_cache=False)
    specs = {}
    for (layer, target), spec in bundle.specs.items():
        inputs = got[layer][spec.site].to(torch.float32)
        logits = bundle.predictor(layer, target).to(inputs.device)(inputs).flatten().cpu()
        threshold = float(logits[:: max(1, len(logits) // 1_000_000)].quantile(1 - spec.density))
        specs[layer, target] = dataclasses.replace(spec, threshold=threshold)
    return dataclasses.replace(bundle, specs=specs)


def requests(path: str, tokenizer: Any, n: int, tokens: int, new_tokens: int) -> list[Instance]:
    """``n`` prompts of about ``tokens`` tokens each."""
    ids = tokenizer(Path(path).read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    ids = ids * (1 + (n * tokens) // len(ids))
    prompts = [tokenizer.decode(ids[i * tokens : (i + 1) * tokens]) for i in range(n)]
    asked = {"until": [], "max_gen_toks": new_tokens, "do_sample": False}
    return [Instance("generate_until", {}, (prompt, dict(asked)), i) for i, prompt in enumerate(prompts)]


def answer_seconds(model: Any, tokenizer: Any, asked: list[Instance], batch: int) -> float:
    """Of the second time that the model answers."""
    lm = DejavuLM(model, sparse_from="prompt", tokenizer=tokenizer, batch_size=batch)
    for _ in range(2):
        began = time.perf_counter()
        lm.generate_until(asked, disable_tqdm=True)
        taken = time.perf_counter() - began
    return taken


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="2.7b", choices=["tiny", *SHAPES])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--mlp_density", type=float, default=0.1)
    parser.add_argument("--head_density", type=float, default=0.5)
    parser.add_argument("--text", default="README.md")
    parser.add_argument("--tokenizer", default="checkpoints/opt-mini")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", default="benchmarks/results/until.csv")
    args = parser.parse_args(argv)
    tokenizer = load_tokenizer(args.tokenizer)
    cuda = args.device == "cuda"
    shape = dataclasses.replace(TINY if args.shape == "tiny" else SHAPES[args.shape], vocab_size=len(tokenizer))
    torch.manual_seed(0)
    dense = random_opt(shape, args.device, torch.float16 if cuda else torch.float32)
    dense.generation_config.eos_token_id = None
    set_live_share(dense, 0.6)
    made = random_bundle(shape, RANKS.get(args.shape, 16), args.mlp_density, args.head_density, args.device)
    bundle = calibrated(made, dense, torch.randint(3, shape.vocab_size, (1, 128), device=args.device))
    taken: dict[tuple[str, int], float] = {}
    asked = {b: requests(args.text, tokenizer, max(4, 2 * b), args.prompt, args.new_tokens) for b in args.batches}
    for batch in args.batches:
        dense.generation_config.cache_implementation = "static" if cuda else None  # static: transformers compiles
        taken["transformers", batch] = answer_seconds(dense, tokenizer, asked[batch], batch)
    dense.generation_config.cache_implementation = None
    model = SparseOPTForCausalLM.from_model(
        dense, bundle, "triton", sparse_from="prompt", ops="triton" if cuda else "reference"
    )
    for batch in args.batches:
        taken["engine", batch] = answer_seconds(model, tokenizer, asked[batch], batch)
        row = {"shape": args.shape, "batch": batch, "prompt": args.prompt, "new_tokens": args.new_tokens}
        row |= {"mlp_density": args.mlp_density, "head_density": args.head_density, "requests": len(asked[batch])}
        row |= {f"seconds_{name}": taken[name, batch] for name in ("transformers", "engine")}
        row["times_faster"] = taken["transformers", batch] / taken["engine", batch]
        row |= {"device": torch.cuda.get_device_name() if cuda else "CPU", "dtype": "float16" if cuda else "float32"}
        row |= {"torch": torch.__version__, "transformers": transformers.__version__}
        row |= {"commit": commit(), "date": datetime.date.today().isoformat()}
        append_row(args.output, five_digits(row), list(row))
        print(row, flush=True)


if __name__ == "__main__":
    main()
