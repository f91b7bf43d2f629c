"""What several GPUs are held to: the tokens of one GPU, and an end of all when one ends.

Run by `benchmarks.tensor_parallel`, with --check and with --kill.
"""

import hashlib
import os
import signal
import time

import torch

from benchmarks.decode_cells import read_cells
from benchmarks.decode_problem import random_predictors, random_weights
from benchmarks.rivals import TINY
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Sampling
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.ranks.group import Group
from dejavu_train.engine.ranks.ranks import Ranks
from dejavu_train.engine.ranks.sharing import shards_of
from dejavu_train.engine.ranks.sums import GroupSums, Sums
from dejavu_train.families import ModelDims

FAR = 0.1  # standard deviations of the logits


def ranks_for(group: Group, dims: ModelDims, kind: str) -> Ranks:
    sums: Sums = GroupSums(group.device) if kind == "nccl" else group.sums
    return Ranks(shards_of(dims, group.world)[group.rank], sums, group)


def say(group: Group, line: str) -> None:
    if group.rank == 0:
        print(line, flush=True)


def check(group: Group, kind: str) -> bool:
    """Every rank builds one engine with everything, and one of its units: both write the same tokens."""
    gpu, fine = group.device.type == "cuda", True
    dims = ModelDims(1024, 4096, 4, 16, 5000, 512) if gpu else TINY
    cells = [
        "engine=dense,sparse batch=1,4", "engine=sparse site=1,2", "engine=dense,sparse weights=int4 lm_head=int4",
        "engine=sparse weights=int4 predictors=int4 site=1",
    ]  # fmt: skip
    for cell in [cell for text in cells for cell in read_cells(text)]:
        found, logits = [], []
        for ranks in (None, ranks_for(group, dims, kind)):
            weights = random_weights(dims, 0.6, cell.weights == "int4", cell.lm_head == "int4", str(group.device))
            predictors = None
            if cell.engine == "sparse":
                predictors = random_predictors(
                    dims, 64 if gpu else 16, 0.3, 0.6, cell.site, cell.predictors, cell.heads_site, str(group.device)
                )
                for number, each in enumerate(predictors.values()):
                    torch.manual_seed(number)
                    each.bias.copy_(torch.randn(len(each.bias)))  # so that near ties are rare
                    if each.weights.bias is not None:
                        each.weights.bias.copy_(each.bias)
            options = EngineOptions(batch=cell.batch, context=256, ops="triton" if gpu else "reference", screen=False)
            engine = DecodeEngine(weights, predictors, options, ranks)
            generator = torch.Generator().manual_seed(0)
            rows = torch.randint(3, dims.vocab_size, (cell.batch, 40), generator=generator).tolist()
            logits.append(engine.logits([row[:24] for row in rows], 8))
            sampled = engine.generate(rows, 24, sampling=Sampling(temperature=0.8, seed=3), stop_tokens=())
            found.append((engine.generate(rows, 48, stop_tokens=()), sampled))
        greedy = zip(found[0][0], found[1][0], strict=True)
        same = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in greedy]
        apart = (logits[0] - logits[1]).abs().amax(-1).flatten() / logits[0].std()
        off, far = float(apart.median()), int((apart > FAR).sum())  # a near tie may select another head at a position
        digest = hashlib.sha256(repr(found[1]).encode()).digest()
        alike = len(set(group.gather(int.from_bytes(digest[:7], "little")))) == 1
        good = off < 0.02 and 4 * far <= len(apart) and min(same) >= 36 and alike
        fine &= good
        say(group, f"{'ok  ' if good else 'FAIL'} {cell.engine} {cell.options} batch={cell.batch}: greedy tokens equal"
            f" {same} of 48, logits off by {off:.2g} deviations (median), {far} of {len(apart)} positions by more than"
            f" {FAR}, ranks alike: {alike}")  # fmt: skip
    return fine


def kill(group: Group, kind: str) -> None:
    """The last rank is killed between two steps, while the others wait for it."""
    gpu, dims = group.device.type == "cuda", ModelDims(1024, 4096, 4, 16, 5000, 512)
    weights = random_weights(dims, 0.6, device=str(group.device))
    options = EngineOptions(context=256, ops="triton" if gpu else "reference")
    engine = DecodeEngine(weights, None, options, ranks_for(group, dims, kind))
    engine.generate([[2, 17, 30]], 8, stop_tokens=())
    say(group, f"the last rank is killed at {time.time():.1f}")

    def die(row: int, token: int, heard: list[int] = []) -> None:  # noqa: B006  counts
        heard.append(token)
        if len(heard) == 20 and group.rank == group.world - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    engine.generate([[2, 17, 30]], 200, stop_tokens=(), callback=die)
