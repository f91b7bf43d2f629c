"""Reads a model and text, writes ``frontier.csv`` and ``frontier.png``: quality against bytes read, method by method.

    python benchmarks/frontier.py --model checkpoints/opt-mini                 CPU: training-free methods, four trained
    python benchmarks/frontier.py --model checkpoints/opt-mini --full          GPU: the whole table
    python benchmarks/frontier.py --plot docs/frontier/opt-mini.csv            the plot alone

Bytes are what kernels must read per token: predictors, fc1 rows of selected neurons, fc2 rows of those that are also
active, attention rows of selected heads. Predictors learn on ``train``, thresholds and shares come from
``calibration``, variants are compared on ``val``, and ``test`` is only scored. Rows are written as they come, so that a
study cut short by ``--seconds`` leaves a table.
"""

import argparse
import dataclasses
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.frontier_methods import cascade_sections, head_sections, sections, variants
from benchmarks.frontier_methods.plot import draw
from benchmarks.frontier_methods.study import GPU_SIZES, Sizes, Study, open_study
from dejavu_train.errors import UserError, exit_on_user_error
from dejavu_train.models.opt import resolve_device


def plan_of_work(study: Study, full: bool) -> dict[str, Callable[[], object]]:
    """Sections in order of what is wanted first."""
    shares: tuple[float, ...] = sections.SHARES if full else sections.QUICK_SHARES
    if study.brief and full:
        shares = sections.BRIEF_SHARES
    work: dict[str, Callable[[], object]] = {
        "winners": lambda: sections.winners(study, shares, full),
        "cascades": lambda: cascade_sections.cascades(study, shares, full),
        "references": lambda: sections.references(study, shares, full),
        "training_free": lambda: sections.training_free(study, shares, full),
        "original": lambda: sections.original(study, shares),
        "one_for_all": lambda: sections.one_for_all(study, shares),
        "criteria": lambda: head_sections.criteria(study, full),
        "heads": lambda: head_sections.predicted(study, full),
    }
    if full:
        work |= {
            "head_look_ahead": lambda: head_sections.look_ahead(study),
            "block": lambda: head_sections.whole_block(study),
            "look_ahead": lambda: variants.look_ahead(study),
            "tuning": lambda: variants.tuning(study),
            "losses": lambda: variants.losses(study),
            "starts": lambda: variants.starts(study),
            "allocation": lambda: variants.allocation(study),
            "bytes": lambda: variants.bytes_section(study, shares),
        }
    return work


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id of a pre-norm OPT")
    parser.add_argument("--text", default="installed-docs", help="text source")
    parser.add_argument("--heldout", nargs="*", default=[], help="JSONL files that are scored beside report")
    parser.add_argument("--output", default="checkpoints/frontier", help="folder for frontier.csv and frontier.png")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--full", action="store_true", help="the whole table (for a GPU)")
    parser.add_argument("--sections", nargs="*", help="only these sections")
    parser.add_argument("--seconds", type=float, help="start no further section after this time")
    parser.add_argument("--tokens", type=int, help="test tokens (full: 110,000)")
    parser.add_argument("--label", help="name of the model in the table")
    parser.add_argument("--plot", help="draw this CSV and stop")
    args = parser.parse_args(argv)
    if args.plot:
        draw(Path(args.plot))
        return
    if not args.model:
        raise UserError("--model is missing: give a folder such as checkpoints/opt-mini")
    torch.set_float32_matmul_precision("high")
    device = resolve_device(args.device)
    sizes = GPU_SIZES if args.full else Sizes()
    if args.tokens:
        sizes = dataclasses.replace(sizes, test_tokens=args.tokens)
    started = time.perf_counter()
    output = Path(args.output)
    label = args.label or Path(args.model).name
    study = open_study(args.model, args.text, output, device, sizes, label, args.heldout)
    work = plan_of_work(study, args.full)
    chosen = args.sections or list(work)
    if unknown := [name for name in chosen if name not in work]:
        raise UserError(f"unknown section {unknown[0]}; the sections are {', '.join(work)}")
    for name in chosen:
        elapsed = time.perf_counter() - started
        if args.seconds and elapsed > args.seconds:
            print(f"{name} is left out: {elapsed:.0f} s have passed", flush=True)
            continue
        try:
            work[name]()
        except Exception as error:
            if isinstance(error, UserError) or not args.full:
                raise
            traceback.print_exc()  # hours of a GPU are not lost for one section
    if device.type == "cpu":
        draw(output / "frontier.csv")


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
