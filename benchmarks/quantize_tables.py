"""The rows of `quantize` as Markdown tables with verdicts, for docs/results/four-bits.md."""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from dejavu_train.ground.errors import UserError

DENSE = ("none", "1", "1")  # predictors and shares where everything is computed
HEADS = ("gptq", "gptq, LM head int8", "gptq, LM head int4")
KIND = ("text", "weights", "predictors", "asked_mlp_density", "asked_head_density")
Row = Mapping[str, str]
Found = list[Row]  # rows of one kind, one for each seed


def kinds_of(rows: Iterable[Row], model: str) -> dict[tuple[str, ...], Found]:
    """The report's rows of a model by what they measured: the newest of each seed."""
    newest = {
        (*(row[name] for name in KIND), row["seed"]): row
        for row in rows
        if row["what"] == "report" and row["model"] == model
    }
    kinds: dict[tuple[str, ...], Found] = {}
    for (*kind, _), row in newest.items():
        kinds.setdefault(tuple(kind), []).append(row)
    return kinds


def show(path: str | Path) -> None:
    """Tables and verdicts of each model: the newest row of each kind and seed, means over the seeds."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines: list[str] = []
    for model in dict.fromkeys(row["model"] for row in rows if row["what"] == "report"):
        kinds = kinds_of(rows, model)
        lines += ["", model, *_dense_table(kinds), *_head_table(kinds), *_block_table(kinds), *_sparse_table(kinds)]
    print("\n".join(lines))


def _dense_table(kinds: Mapping[tuple[str, ...], Found]) -> list[str]:
    lines = ["", "| text | tokens | perplexity, fp16 | KL: rtn | gptq | ratio | increase, %: rtn | gptq |"]
    lines.append("| --- |" + " --- |" * 7)
    for text in dict.fromkeys(key[0] for key in kinds):
        dense, rtn, gptq = (kinds[text, name, *DENSE] for name in ("fp16", "rtn", "gptq"))
        perplexities = [float(row["perplexity"]) for row in dense]
        if max(perplexities) > 1.01 * min(perplexities):
            raise UserError(f"rows of {dense[0]['model']} are of models with other fp16 weights: rename one in the CSV")
        lines.append(
            f"| {text} | {int(dense[0]['tokens']):,} | {_mean(dense, 'perplexity'):.2f} | {_mean(rtn, 'kl'):.4f} |"
            f" {_mean(gptq, 'kl'):.4f} | {_mean(gptq, 'kl') / _mean(rtn, 'kl'):.3f} |"
            f" {_percent(rtn)} | {_percent(gptq)} |"
        )
    return lines


def _head_table(kinds: Mapping[tuple[str, ...], Found]) -> list[str]:
    """The LM head in codes as well, everything computed. Empty where none was scored."""
    lines = [
        "",
        "| text | KL: LM head fp16 | int8 | int4 | increase, %: fp16 | int8 | int4 |",
        "| --- |" + " --- |" * 6,
    ]
    for text in dict.fromkeys(key[0] for key in kinds):
        dense_rows = [kinds.get((text, name, *DENSE)) for name in HEADS]
        if all(dense_rows):
            kl = " | ".join(f"{_mean(rows, 'kl'):.4f}" for rows in dense_rows if rows)
            lines.append(f"| {text} | {kl} | {' | '.join(_percent(rows) for rows in dense_rows if rows)} |")
    return lines if len(lines) > 3 else []


def _block_table(kinds: Mapping[tuple[str, ...], Found]) -> list[str]:
    """Whole-block bytes and the increase of perplexity above 4-bit dense, text by text. A star misses the sum rule."""
    texts = list(dict.fromkeys(key[0] for key in kinds))
    asked = sorted({key[1:] for key in kinds if "none" not in key and key[1] != "fp16"}, key=_by_share)
    lines = []
    for weights, predictors, mlp, heads in asked:
        cells, shares, above = [], [], []
        for text in texts:
            both = kinds.get((text, weights, predictors, mlp, heads), [])
            alone = _of_the_seeds(kinds.get((text, weights, *DENSE), []), both)
            plain = kinds.get((text, "fp16", "before", mlp, heads))
            if not both or not alone or plain is None:
                cells.append("")
                continue
            shares.append(100 * _mean(both, "block_bytes"))
            above.append(100 * np.expm1(_mean(both, "increase") - _mean(alone, "increase")))
            cells.append(f"{shares[-1]:.2f} %: {above[-1]:+.2f}" + ("" if _sum_rule(both)[2] else r"\*"))
        mean = f"{np.mean(shares):.2f} %: {np.mean(above):+.2f}" if len(shares) == len(texts) else ""
        name = f"{100 * float(mlp):g} %, {100 * float(heads):g} % | {weights}, {predictors}"
        lines.append(f"| {name} | {' | '.join(cells)} | {mean} |")
    head = [
        "",
        f"| MLP, heads | weights, predictors | {' | '.join(texts)} | mean |",
        "| --- |" + " --- |" * (len(texts) + 2),
    ]
    return [*head, *lines] if lines else []


def _sparse_table(kinds: Mapping[tuple[str, ...], Found]) -> list[str]:
    """Of every selection the fp16 model's and the quantised one's. Empty where nothing was scored sparsely."""
    lines = []
    for key, both in sorted(kinds.items(), key=lambda item: (float(item[0][4]) < 1, item[0][3])):
        text, weights, predictors, mlp, heads = key
        plain = kinds.get((text, "fp16", "before", mlp, heads))
        alone = _of_the_seeds(kinds.get((text, weights, *DENSE), []), both)
        if predictors == "none" or weights == "fp16" or plain is None or not alone:
            continue
        excess, error, met = _sum_rule(both)
        small = max(_mean(plain, "increase"), _mean(alone, "increase")) < np.log(1.05)
        verdict = "met" if met else "**missed**"
        lines.append(
            f"| {100 * float(mlp):g} %, {100 * float(heads):g} % | {text} | {weights}, {predictors} |"
            f" {_share(plain)}, {_percent(plain)} | {_share(both)}, {_percent(both)} | {excess:+.4f} ± {error:.4f} |"
            f" {verdict}{'' if small else ', not judged'} |"
        )
    names = "MLP, heads | text | weights, predictors | fp16: bytes, increase % | 4 bits: bytes, increase %"
    head = ["", f"| {names} | excess, nats | sum rule |", "| --- |" + " --- |" * 6]
    return [*head, *lines] if lines else []


def _by_share(key: tuple[str, ...]) -> tuple[bool, float, float, bool, str]:
    """All heads first, then by neurons and heads. Of one selection the fp16 model's predictors first."""
    weights, predictors, mlp, heads = key
    return float(heads) < 1, float(mlp), -float(heads), predictors != "before", weights


def _of_the_seeds(found: Found, those: Found) -> Found:
    """Only the rows whose seed is one of those: of some seeds 4 bits alone were scored and no sparse model."""
    seeds = {row["seed"] for row in those}
    return [row for row in found if row["seed"] in seeds]


def _sum_rule(both: Found) -> tuple[float, float, bool]:
    """What both together cost above the sum of either alone, in nats, its largest error, and whether that may be."""
    excess, error = _mean(both, "excess"), max(float(row["excess_error"] or 0) for row in both)
    return excess, error, excess <= max(0.002, 2 * error)


def _mean(found: Found, name: str) -> float:
    return sum(float(row[name]) for row in found) / len(found)


def _percent(found: Found) -> str:
    """The increase of perplexity in per cent, and the largest of its errors."""
    value, error = _mean(found, "increase"), max(float(row["error"] or 0) for row in found)
    return f"{100 * np.expm1(value):+.2f} ± {100 * np.exp(value) * error:.2f}"


def _share(found: Found) -> str:
    return f"{100 * _mean(found, 'block_bytes'):.1f} %"
