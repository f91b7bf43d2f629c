"""Counts greedy tokens of opt-mini that differ from plain vLLM's with zeroskip, and with predictors from gather's.

    python packages/dejavu-vllm/tests/count_tokens.py --tokens 20000

A text is compared up to its first difference. A difference where the two best logits lie within `TIE` is a tie. With
zeroskip eight texts are written at a time, so that every step behind the prompts leaves rows out. Prints a line for
each method. The distance of logits is that of the chosen tokens' logarithms, and gather has none.
"""

import argparse
import math
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch
from vllm_runs import Compared, compared, written

ROOT = Path(__file__).resolve().parents[3]
MINI = ROOT / "checkpoints" / "opt-mini"
PROMPT, NEW, TOGETHER = 8, 100, 8


def prompts_of(number: int) -> list[list[int]]:
    """Beginnings of random tokens, behind the token that begins a text."""
    drawn = torch.randint(4, 8192, (number, PROMPT - 1), generator=torch.Generator().manual_seed(0))
    return [[2, *row] for row in drawn.tolist()]


def gathered(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Texts of the backend gather, sparse from the first token on."""
    from dejavu_train import SparseCausalLM

    model = SparseCausalLM.from_pretrained(folder, backend="gather")
    rows = []
    for first in range(0, len(prompts), TOGETHER):
        ids = torch.tensor(prompts[first : first + TOGETHER])
        made = model.generate(ids, do_sample=False, max_new_tokens=NEW, eos_token_id=None)
        rows += made[:, PROMPT:].tolist()
    return rows


def say(method: str, found: Compared) -> None:
    print(method, " ".join(f"{name}={value:.6g}" for name, value in asdict(found).items()), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20000)
    prompts = prompts_of(-(-parser.parse_args().tokens // NEW))
    options = {"max_num_seqs": TOGETHER, "enable_prefix_caching": False}
    with tempfile.TemporaryDirectory() as place:
        from dejavu_train.extras.export import ExportConfig, export_together

        folder = Path(place) / "together"
        export_together(ExportConfig(bundle=str(MINI / "bundle"), vllm=str(folder)))
        reference = gathered(folder, prompts)
        plain = written(MINI, None, prompts, NEW, **options)
        skipped = compared(plain, written(MINI, "zeroskip", prompts, NEW, **options))
        say("zeroskip", skipped)
        chosen = written(folder, None, prompts, NEW, max_num_seqs=1)  # so that a prompt's step is sparse too
        predicted = replace(compared(chosen, replace(chosen, tokens=reference)), distance=math.nan)
        say("dejavu", predicted)
    return int(skipped.differing + predicted.differing > 0)


if __name__ == "__main__":
    sys.exit(main())
