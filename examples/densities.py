"""Scores a text as calibrated and at other densities of the MLPs: python examples/densities.py MODEL BUNDLE TEXT."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from dejavu_train import Bundle, SparseOPTForCausalLM
from dejavu_train.ground.errors import exit_on_user_error


def main(argv: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder or hub id of an OPT")
    parser.add_argument("bundle", help="folder or hub id of its predictors")
    parser.add_argument("text", type=Path, help="a file of plain text")
    parser.add_argument("--mlp_density", type=float, nargs="+", default=[1.0, 0.4, 0.2, 0.1])
    parser.add_argument("--tokens", type=int, default=512, help="how many to score")
    asked = parser.parse_args(argv)
    text = asked.text.read_text(encoding="utf-8")
    bundle = Bundle.from_pretrained(asked.bundle)
    model = SparseOPTForCausalLM.from_pretrained(asked.model, bundle, backend="mask")  # whole sequences at once
    ids = AutoTokenizer.from_pretrained(asked.model)(text, return_tensors="pt").input_ids[:, : asked.tokens]
    used = {"as calibrated": bundle}
    used |= {f"density {d:.2f}": bundle.at(mlp_density=d, head_density=1.0) for d in asked.mlp_density}
    for name, setting in used.items():
        model.set_bundle(setting)
        with torch.no_grad():
            loss = model(ids, labels=ids).loss.item()  # nats per token
        print(f"{name}: perplexity {math.exp(loss):.3f} on {ids.shape[1] - 1} tokens")


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
