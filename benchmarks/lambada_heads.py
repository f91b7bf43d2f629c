"""Which heads LAMBADA's last words need: python -m benchmarks.lambada_heads --file FOLDER/lambada_openai_test.jsonl

Takes the options of `benchmarks.lambada`; all neurons are computed. Appends to `--output` what passages lose with each
set of heads `--always` selected in opt-mini's last layer, and beside it, to lambada_heads.csv, how often each is.
"""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lambada import Passage, append_losses, chosen_tokens, options, read_passages, repeated_pairs, token_nats
from benchmarks.rows import append_row, commit, five_digits
from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.selector import Predicted
from dejavu_train.data.samples import SampleManifest, decode_rows, split_rows
from dejavu_train.evaluation.studied import StudiedOPT
from dejavu_train.models.opt import load_opt, load_tokenizer


class Always(Predicted):
    """Selects heads ``always`` of ``layer`` whatever the predictor says; ``kept``: the layer's (T, n) of each call."""

    layer, always = 5, ""

    def __call__(self, layer: int, target: str, sites: Any) -> Any:
        keep = super().__call__(layer, target, sites)
        if keep is not None and (layer, target) == (self.layer, "heads"):
            keep[..., [int(head) for head in self.always.split(",") if head]] = True
            self.kept.append(keep[0].numpy())
        return keep


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--always", nargs="*", default=["3,5,7", "0,2,11", "0,1,2,3,4,5,6,7,8,9,10,11"])
    args = parser.parse_args()
    model, used = load_opt(args.model), Bundle.from_pretrained(args.bundle).at(1.0, 0.85)
    studied, length = StudiedOPT.study(model, used), SampleManifest.load(Path(args.model)).settings["length"]
    samples = split_rows(decode_rows((Path(args.model) / "samples.xz").read_bytes(), length))["calibration"]
    own = [Passage(i, len(i), False, repeated_pairs(i)) for i in ([2, *map(int, d.ids[:199])] for d in samples)]
    passages = read_passages(args.file, load_tokenizer(args.model), args.first, args.passages)
    for text, asked, sets in (("calibration", own, [""]), ("lambada", passages, ["", *args.always])):
        dense = token_nats(model, asked)
        kinds = {kind: tokens for kind, tokens in chosen_tokens(asked).items() if np.concatenate(tokens).any()}
        for heads in sets:
            studied._selector = selector = Always(used, "cpu", model)
            selector.always, selector.kept = heads, []
            nats, name = token_nats(studied, asked), f"heads, {heads or 'none'} of layer {Always.layer} always"
            if text == "lambada":
                append_losses(args, name, used, nats, dense, kinds)
            for kind, tokens in kinds.items():
                kept = np.concatenate(selector.kept)[np.concatenate(tokens)]
                row = {"text": text, "first": args.first, "variant": name, "tokens": kind, "n": len(kept)}
                row |= {"selected": float(kept.mean())} | {f"head {h}": float(x) for h, x in enumerate(kept.mean(0))}
                row |= {"commit": commit()}
                append_row(Path(args.output).with_name("lambada_heads.csv"), five_digits(row), list(row))


if __name__ == "__main__":
    main()
