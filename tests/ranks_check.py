"""Holds several GPUs to the tokens of one, and to lossless text, or to the tokens in some cells alone.

torchrun --nproc-per-node 2 tests/ranks_check.py
torchrun --nproc-per-node 2 tests/ranks_check.py fastest "engine=dense,exact batch=1,4"
"""

import hashlib
import sys
from collections.abc import Sequence

import torch

from benchmarks.decode_cells import Cell, read_cells
from benchmarks.decode_problem import random_predictors, random_weights
from benchmarks.tensor_parallel import TINY, ranks_for, say
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.draft import Draft
from dejavu_train.engine.inputs import Sampling
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.ranks.group import Group, group_of_launcher
from dejavu_train.engine.ranks.ranks import Ranks
from dejavu_train.families import ModelDims

SMALL = ModelDims(1024, 4096, 4, 16, 5000, 512)
FAR = 0.1  # standard deviations of the logits


def small_engine(cell: Cell, group: Group, ranks: Ranks | None) -> DecodeEngine:
    """One that every rank builds alike, of all units or of its own."""
    gpu, dims, device = group.device.type == "cuda", small_dims(group), str(group.device)
    weights = random_weights(dims, 0.6, cell.weights == "int4", cell.lm_head == "int4", device)
    predictors = None
    if cell.engine == "sparse":
        made = random_predictors(
            dims, 64 if gpu else 16, 0.3, 0.6, cell.site, cell.predictors, cell.heads_site, device
        )  # fmt: skip
        for number, each in enumerate(made.values()):
            torch.manual_seed(number)
            each.bias.copy_(torch.randn(len(each.bias)))  # so that near ties are rare
            if each.weights.bias is not None:
                each.weights.bias.copy_(each.bias)
        predictors = made
    ops = "triton" if gpu else "reference"
    options = EngineOptions(batch=cell.batch, context=256, ops=ops, screen=False, zeros=cell.zeros)
    return DecodeEngine(weights, predictors, options, ranks)


def small_dims(group: Group) -> ModelDims:
    return SMALL if group.device.type == "cuda" else TINY


def random_rows(dims: ModelDims, batch: int, length: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    rows: list[list[int]] = torch.randint(3, dims.vocab_size, (batch, length), generator=generator).tolist()
    return rows


def alike(group: Group, found: object) -> bool:
    """Whether all ranks have found the same."""
    digest = hashlib.sha256(repr(found).encode()).digest()
    return len(set(group.gather(int.from_bytes(digest[:7], "little")))) == 1


CELLS = (
    "engine=dense,exact,sparse batch=1,4", "engine=sparse site=1,2",
    "engine=dense,exact,sparse weights=int4 lm_head=int4", "engine=sparse weights=int4 predictors=int4 site=1",
)  # fmt: skip


def check(group: Group, kind: str, cells: Sequence[str] = CELLS) -> bool:
    """Every rank builds one engine with everything, and one of its units: both write the same tokens."""
    fine, dims = True, small_dims(group)
    for cell in [cell for text in cells for cell in read_cells(text)]:
        found, logits, rows = [], [], random_rows(dims, cell.batch)
        for ranks in (None, ranks_for(group, dims, kind)):
            engine = small_engine(cell, group, ranks)
            logits.append(engine.logits([row[:24] for row in rows], 8))
            sampled = engine.generate(rows, 24, sampling=Sampling(temperature=0.8, seed=3), stop_tokens=())
            found.append((engine.generate(rows, 48, stop_tokens=()), sampled))
        greedy = zip(found[0][0], found[1][0], strict=True)
        same = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in greedy]
        apart = (logits[0] - logits[1]).abs().amax(-1).flatten() / logits[0].std()
        off, far = float(apart.median()), int((apart > FAR).sum())  # a near tie may select another head at a position
        one = alike(group, found[1])
        good = off < 0.02 and 4 * far <= len(apart) and min(same) >= 36 and one
        fine &= good
        say(group, f"{'ok  ' if good else 'FAIL'} {cell.engine} {cell.options} batch={cell.batch}: greedy tokens equal"
            f" {same} of 48, logits off by {off:.2g} deviations (median), {far} of {len(apart)} positions by more than"
            f" {FAR}, ranks alike: {one}")  # fmt: skip
    return fine


def check_lossless(group: Group, kind: str) -> bool:
    """Whatever is drafted, ranks write what they write without a draft."""
    fine, dims = True, small_dims(group)
    packed = {"weights": "int4", "lm_head": "int4"}
    for cell in (Cell("sparse"), Cell("sparse", site=1), Cell("sparse", **packed), Cell("dense")):  # type: ignore[arg-type]
        engine, rows = small_engine(cell, group, ranks_for(group, dims, kind)), random_rows(dims, 1)
        drafts = [Draft(length) for length in (0, 1, 3, 7, None)]
        if cell.weights != "int4" and group.device.type == "cuda":  # the tiny shape is too narrow
            drafts += [Draft(3, "int4"), Draft(None, "int4")]
        for sampling in (Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=3)):
            texts, counts = [], []
            for draft in drafts:
                texts.append(engine.generate(rows, 96, sampling=sampling, stop_tokens=(), lossless=draft)[0])
                counts.append(f"{engine.acceptance.accepted} of {engine.acceptance.drafted}")
            good = all(text == texts[0] for text in texts) and alike(group, texts)
            fine &= good
            same, what = sum(text == texts[0] for text in texts), f"{cell.engine} {cell.options} {sampling.mode}"
            say(group, f"{'ok  ' if good else 'FAIL'} lossless {what}: texts equal {same} of {len(texts)}, accepted"
                f" {', '.join(counts)}")  # fmt: skip
    return fine


def main() -> int:
    kind, *cells = sys.argv[1:] or ["fastest"]
    group = group_of_launcher(None)
    try:
        if cells:
            return int(not check(group, kind, cells))
        return int(not all([check(group, kind), check_lossless(group, kind)]))
    except Exception as error:
        group.fail(error)
        raise


if __name__ == "__main__":
    raise SystemExit(main())
