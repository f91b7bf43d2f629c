"""Counts where exact skip chooses another greedy token than the dense model, on text that it wrote itself.

    python -m benchmarks.exact_tokens --models checkpoints/opt-mini --dtypes float32 float16 --tokens 20000
    python -m benchmarks.exact_tokens --families llama fatrelu drelu arcee nemotron --tokens 100000      on a CPU

The exact engine writes rows greedily. Then transformers' dense model says for each place which token it would choose,
and how far its two best logits lie apart. On a GPU the engine that reads all rows writes the same prompts as well.
Of 16 bits a third model judges both: transformers in float32 arithmetic on the same rounded weights.
Rows go to benchmarks/results/exact_tokens.csv. Families are random models of a few layers.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import ROOT, STEP, append_row, command_line, device_name, five_digits, made_now
from dejavu_train import SparseCausalLM
from dejavu_train.models.load import load_model

ROWS = 4
WIDE = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "head_dim": 16,
}  # heads of 16, the narrowest that kernels of attention take


def texts(model: Any, tokens: int, prompt: int, new: int) -> torch.Tensor:
    """(N, prompt + new) ids: random prompts, and what the model writes behind them."""
    generator, made = torch.Generator().manual_seed(0), []
    for _ in range(max(1, tokens // (ROWS * new))):
        ids = torch.randint(3, model.config.vocab_size, (ROWS, prompt), generator=generator).to(model.device)
        given = {"attention_mask": torch.ones_like(ids), "min_new_tokens": new, "max_new_tokens": new}
        made.append(model.generate(ids, do_sample=False, pad_token_id=1, eos_token_id=None, **given).cpu())
    return torch.cat(made)


@torch.no_grad()
def logits_of_texts(model: Any, written: torch.Tensor, prompt: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits (n, new, vocab) fp32 of the places behind the prompts, and the tokens (n, new) there, part by part."""
    for part in written.split(16):
        yield model(part.to(model.device)).logits[:, prompt - 1 : -1].float(), part[:, prompt:].to(model.device)


def gaps(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """(n, new) how far the chosen token lies below the best, as a share of the largest logit. 0: it is the best."""
    gap = logits.max(2).values - logits.gather(2, chosen[..., None])[..., 0]
    return gap / logits.abs().amax(2)


def compared(make: Any, written: torch.Tensor, prompt: int) -> dict[str, Any]:
    """Places where transformers chooses another token, and the widest gap there, in its dtype and in float32."""
    found: dict[str, list[torch.Tensor]] = {"": [], "_wide": [], "_rival": []}
    dense = make()
    wide = None if dense.dtype == torch.float32 else logits_of_texts(make().float(), written, prompt)
    for logits, chosen in logits_of_texts(dense, written, prompt):
        found[""].append(gaps(logits, chosen))
        if wide is not None:
            judge, _ = next(wide)
            found["_wide"].append(gaps(judge, chosen))
            found["_rival"].append(gaps(judge, logits.argmax(2)))
    row: dict[str, Any] = {"tokens": written[:, prompt:].numel()}
    for name, parts in found.items():
        if parts:
            every = torch.cat(parts)
            row |= {f"different{name}": int((every > 0).sum()), f"widest_gap{name}": float(every.max())}
    return row


def count(make: Any, name: str, dtype: str, device: str, args: Any) -> None:
    about = {"model": name, "dtype": dtype, "device": device_name(device), "torch": torch.__version__}
    written = {}
    for zeros in ("auto", "read") if device == "cuda" else ("auto",):
        model = SparseCausalLM.from_model(make(), zeros=zeros)
        written[zeros] = texts(model, args.tokens, args.prompt, args.new)
        about |= {"backend": model.backend, "prompt": args.prompt}
    found = compared(make, written["auto"], args.prompt)
    if "read" in written:
        found["rows_unlike_read"] = int((written["auto"] != written["read"]).any(1).sum())
        found["rows"] = len(written["auto"])
    append_row(args.out, five_digits(about | found | made_now(*STEP)), COLUMNS)
    print(about | found, flush=True)


COLUMNS = (
    "model dtype device backend prompt tokens different widest_gap different_wide widest_gap_wide different_rival"
    " widest_gap_rival rows rows_unlike_read torch commit date sources"
).split()


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--families", nargs="*", default=[], help="names of tests/family_models.py")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--new", type=int, default=240)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/exact_tokens.csv"))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in args.dtypes:
        for name in args.models:
            count(lambda name=name, dtype=dtype: load_model(name, dtype, device), Path(name).name, dtype, device, args)
        for name in args.families:
            sys.path.insert(0, str(ROOT / "tests"))
            from family_models import random_family

            kind = getattr(torch, dtype)
            sizes = WIDE if device == "cuda" else {}
            make = lambda name=name, kind=kind, sizes=sizes: random_family(name, **sizes).to(device, kind)  # noqa: E731
            count(make, name, dtype, device, args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
