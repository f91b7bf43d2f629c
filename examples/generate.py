"""Continues a prompt, dense and sparse: python examples/generate.py [MODEL BUNDLE] --prompt "The function returns"."""

import argparse
import sys
from collections.abc import Sequence

from transformers import AutoTokenizer

from dejavu_train import Bundle, SparseOPTForCausalLM
from dejavu_train.ground.errors import exit_on_user_error


def main(argv: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="checkpoints/opt-mini", help="folder or hub id of an OPT")
    parser.add_argument("bundle", nargs="?", default="checkpoints/opt-mini/bundle", help="the same of its predictors")
    parser.add_argument("--prompt", default="The function returns")
    parser.add_argument("--tokens", type=int, default=32, help="how many to generate")
    parser.add_argument("--backend", default="auto", help="auto takes the engine of the device")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args(argv)
    bundle = Bundle.from_pretrained(asked.bundle)
    model = SparseOPTForCausalLM.from_pretrained(asked.model, bundle, backend=asked.backend, device=asked.device)
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    begins = asked.prompt.startswith(tokenizer.bos_token)  # the tokenizer puts it before every text
    ids = tokenizer(asked.prompt, add_special_tokens=not begins, return_tensors="pt").to(model.device)
    settings = {"dense": bundle.at(mlp_density=1.0, head_density=1.0), "sparse": bundle}
    for name, setting in settings.items():
        model.set_bundle(setting)
        new = model.generate(**ids, max_new_tokens=asked.tokens, do_sample=False)
        print(f"{name}: {tokenizer.decode(new[0], skip_special_tokens=True)!r}")


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
