"""Compares what a model gave with what the oracle gives, within committed tolerances."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .oracle import near_of

# Over the spread (standard deviation) of the oracle's logits: the largest error, and the mean one. In half precision a
# unit near its threshold may be selected otherwise, so a sparse model is judged by the median position's mean error.
LARGEST = {torch.float32: 2e-3}
MEAN = {torch.float32: 2e-4, torch.float16: 0.03, torch.bfloat16: 0.2}
MEAN_SPARSE = {torch.float32: 2e-4, torch.float16: 0.06, torch.bfloat16: 0.3}
# Of a chosen token's logit below the largest, at most; in half precision by the median over the new tokens.
TIE = {torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.4}
TIE_ROUNDED = 0.1  # the CPU engine keeps embeddings of a 4-bit model in 8 bits: as in half precision
# Of a row's negative log-likelihood, relative; with 4 bits the CPU engine rounds embeddings, which moves selections.
NATS, NATS_ROUNDED, NATS_SPARSE = 2e-3, 2e-2, 6e-2


class Finding(Exception):
    """A result that is not what the oracle says, or a state that must not be."""


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise Finding(what)


def judge_logits(got: Tensor, want: Tensor, compared: Tensor, dtype: torch.dtype, sparse: bool, what: str) -> None:
    """got, want (B, T, V) at the positions ``compared`` (B, T)."""
    expect(got.shape == want.shape, f"{what}: logits {tuple(got.shape)}, not {tuple(want.shape)}")
    COMPARED[0] += int(compared.sum())
    COMPARED[1] += compared.numel()
    if not compared.any():
        return
    got, want = got[compared].double(), want[compared].double()
    if not want.isfinite().all():
        raise Finding(f"{what}: a result where the oracle has numbers that are not finite")
    expect(bool(got.isfinite().all()), f"{what}: not finite")
    spread = float(want.std()) + 1e-9
    error = (got - want).abs() / spread
    # In half precision some positions of a sparse model select otherwise; half of them do not.
    by_position = error.mean(dim=-1)
    mean = float(by_position.median() if sparse and dtype != torch.float32 else by_position.mean())
    largest = float(error.max())
    record(dtype, sparse, mean, largest)
    limit = (MEAN_SPARSE if sparse else MEAN)[dtype]
    expect(mean <= limit, f"{what}: logits off by {mean:.3g} spreads in the mean, {largest:.3g} at most")
    if dtype in LARGEST:
        expect(largest <= LARGEST[dtype], f"{what}: logits off by {largest:.3g} spreads at most")


COMPARED = [0, 0]
"""Positions whose logits were compared, of so many; the others are padding or near a threshold."""
SEEN: dict[tuple[torch.dtype, bool], list[tuple[float, float]]] = {}


def record(dtype: torch.dtype, sparse: bool, mean: float, largest: float) -> None:
    SEEN.setdefault((dtype, sparse), []).append((mean, largest))


def judge_greedy(
    oracle: Any, sequences: Tensor, prompt: Tensor, mask: Tensor, dtype: torch.dtype, **asked: Any
) -> None:
    """Every new token is the oracle's largest logit, up to ties, and rows end where they should.

    Args:
        sequences: (B, T + new). Prompt, mask: (B, T), mask 0 at padding.
        asked: ``new`` tokens at most, ``stops`` token ids, ``pad`` token. ``rounded``: the engine rounds embeddings.
    """
    new, stops, pad = asked["new"], asked.get("stops", ()), asked.get("pad", 1)
    exact = dtype == torch.float32 and not asked.get("rounded")
    tie = TIE[dtype] if exact or dtype != torch.float32 else TIE_ROUNDED
    rows, width = prompt.shape
    expect(sequences.dim() == 2 and sequences.shape[0] == rows, f"generate: sequences {tuple(sequences.shape)}")
    expect(torch.equal(sequences[:, :width], prompt), "generate: another prompt")
    n = sequences.shape[1] - width
    expect(1 <= n <= new, f"generate: {n} new tokens, {new} asked for")
    tail = sequences[:, width:]
    ends = torch.full((rows,), n)
    for row in range(rows):
        places = [i for i, token in enumerate(tail[row].tolist()) if token in stops]
        if places:
            ends[row] = places[0] + 1
            rest = tail[row, places[0] + 1 :]
            expect(bool((rest == pad).all()), f"generate: row {row} goes on behind its end: {rest.tolist()}")
    expect(n == new or bool((ends <= n).all() and max(ends) == n), "generate: ended early")
    expect(n == new or all(any(t in stops for t in tail[row].tolist()) for row in range(rows)), "generate: ended early")
    whole = torch.cat([mask, torch.ones_like(tail)], dim=1)
    with torch.no_grad():
        logits = oracle(sequences, attention_mask=whole).logits[:, width - 1 : -1]
    if not logits.isfinite().all():
        raise Finding("generate: a text where the oracle has numbers that are not finite")
    near = near_of(oracle, sequences)[:, width - 1 : -1]
    gap = logits.amax(dim=-1) - logits.gather(-1, tail[..., None])[..., 0]
    spread = float(logits.std())
    gaps = []
    for row in range(rows):
        for i in range(int(ends[row])):
            if near[row, i] and exact:
                break  # from here on the selection may differ
            gaps.append(float(gap[row, i]) / spread)
            if exact and gaps[-1] > tie:
                raise Finding(
                    f"generate: row {row}, new token {i} is {int(tail[row, i])}, {gaps[-1]:.3g} spreads below the"
                    f" oracle's {int(logits[row, i].argmax())}"
                )
    middle = sorted(gaps)[len(gaps) // 2] if gaps else 0.0  # a unit near its threshold moves some tokens, not half
    expect(middle <= tie, f"generate: tokens {middle:.3g} spreads below the oracle's, by the median")


def judge_beams(oracle: Any, sequences: Tensor, best: Tensor, prompt: Tensor, mask: Tensor, returned: int) -> None:
    """The sequences that beam search returned are as likely as the oracle's ``best``, up to ties."""
    if sequences.shape == best.shape and torch.equal(sequences, best):
        return
    width = prompt.shape[1]
    scores = []
    for ids in (sequences, best):
        known = mask.repeat_interleave(returned, dim=0)
        whole = torch.cat([known, torch.ones_like(ids[:, width:])], dim=1)
        with torch.no_grad():
            logits = oracle(ids, attention_mask=whole).logits[:, width - 1 : -1]
        if near_of(oracle, ids).any():
            return
        scores.append(F.log_softmax(logits, -1).gather(-1, ids[:, width:, None])[..., 0].mean(dim=1))
    expect(sequences.shape == best.shape, f"beams: {tuple(sequences.shape)}, not {tuple(best.shape)}")
    expect(
        bool((scores[0] >= scores[1] - 1e-3).all()),
        f"beams: {sequences[:, width:].tolist()} is less likely than {best[:, width:].tolist()}",
    )


def judge_processed(got: Tensor, best: Any, prompt: Tensor, near: Tensor) -> None:
    """A greedy text under logits processors, against ``best`` of the oracle with its scores, up to the first tie."""
    want, width = best.sequences, prompt.shape[1]
    for i, scores in enumerate(best.scores):
        column = width + i
        for row in range(len(want)):
            if column < got.shape[1] and got[row, column] == want[row, column]:
                continue
            given = int(got[row, column]) if column < got.shape[1] else -1
            value = scores[row, given] if given >= 0 else torch.tensor(float("-inf"))
            gap = float(scores[row].max() - value)
            expect(
                gap <= 5e-3 or bool(near[row].any()),
                f"generate: new token {i} of row {row} is {given}, {gap:.3g} below {int(want[row, column])}",
            )
            return
    expect(got.shape == want.shape, f"generate: {got.shape[1] - width} new tokens, {want.shape[1] - width} are right")


def judge_loss(got: Any, logits: Tensor, labels: Tensor, items: int | None, dtype: torch.dtype, sparse: bool) -> None:
    """A loss against the oracle's logits (B, T, V): the mean over labels that are not -100, or the sum over items."""
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    want = float(total / (items if items is not None else int((labels[:, 1:] != -100).sum())))
    expect(got is not None, "no loss")
    limit = 1e-3 if dtype == torch.float32 else (MEAN_SPARSE if sparse else MEAN)[dtype]
    expect(abs(float(got) - want) <= limit * max(1.0, abs(want)), f"loss {float(got):.6g}, not {want:.6g}")


def same_weights(model: Any, truth: Any, loose: float = 0.0) -> None:
    """The model's parameters hold the truth's values."""
    ours, theirs = (dict(copy.copy(m).state_dict(keep_vars=True)) for m in (model, truth))
    for name, want in theirs.items():
        if name not in ours or ours[name].shape != want.shape:
            continue  # codes of 4 bits
        got = ours[name].detach()
        expect(got.dtype == want.dtype, f"{name} is {got.dtype}, not {want.dtype}")
        off = float((got.double() - want.detach().double()).abs().max())
        expect(off <= loose * (1 + float(want.detach().abs().max())), f"the weight {name} is off by {off:.3g}")
