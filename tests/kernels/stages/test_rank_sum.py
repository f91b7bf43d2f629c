"""A sum over ranks: what each pushes, what it waits for, in which order it adds."""

import pytest
import torch

from dejavu_train.kernels.stages.rank_sum import BLOCK, Inbox, rank_sum


def rank_sum_reference(parts):
    """(n,) fp32: the parts of all ranks, added in their order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def inboxes(ranks, n, device):
    """Of ranks that share one GPU or the interpreter."""
    entries = torch.zeros(ranks, 2, ranks, n, dtype=torch.int64, device=device)
    pointers = torch.tensor([each.data_ptr() for each in entries], device=device)
    return entries, [Inbox.of(rank, pointers, entries[rank]) for rank in range(ranks)]


def entry(part, count):
    return (count << 32) | (part.view(torch.int32).to(torch.int64) & 0xFFFFFFFF)


@pytest.mark.parametrize(("ranks", "n"), [(2, 64), (4, 300), (3, BLOCK)])
def test_every_rank_pushes_its_part_and_adds_in_the_order_of_ranks(device, ranks, n):
    """Ranks run one after another here, so what the others push lies there before each runs."""
    entries, made = inboxes(ranks, n, device)
    for count in (1, 2, 3):
        half = count & 1
        parts = [torch.randn(n, device=device) * 10.0**rank for rank in range(ranks)]
        for rank, inbox in enumerate(made):
            others = [other for other in range(ranks) if other != rank]
            entries[:, half, rank] = -1  # what this rank has not pushed yet
            for other in others:
                entries[rank, half, other] = entry(parts[other], count)
            out = torch.full((n,), float("nan"), device=device)
            rank_sum(parts[rank], out, inbox)
            assert torch.equal(out, rank_sum_reference(parts))
            assert all(torch.equal(entries[other, half, rank], entry(parts[rank], count)) for other in others)
            assert (entries[rank, half, rank] == -1).all()  # nothing goes into its own
    assert all((inbox.counts == 3).all() for inbox in made)


def test_two_ranks_of_one_gpu_wait_for_each_other():
    """Two streams run at once. The second begins late: a rank that did not wait would add what is not there."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    n, streams = 12288, [torch.cuda.Stream(), torch.cuda.Stream()]
    _, made = inboxes(2, n, "cuda")
    warm = torch.zeros(n, device="cuda")
    made[0].entries[1, 1] = entry(warm, 1)
    for inbox in made:  # compiled before anything waits
        rank_sum(warm, torch.empty_like(warm), inbox)
    torch.cuda.synchronize()
    for _ in range(50):
        parts = [torch.randn(n, device="cuda") for _ in range(2)]
        outs = [torch.empty(n, device="cuda") for _ in range(2)]
        torch.cuda.synchronize()
        for rank in (0, 1):
            with torch.cuda.stream(streams[rank]):
                if rank:
                    torch.cuda._sleep(200_000)
                rank_sum(parts[rank], outs[rank], made[rank])
        torch.cuda.synchronize()
        assert all(torch.equal(out, rank_sum_reference(parts)) for out in outs)


def test_sizes_and_dtypes_are_checked(device):
    _, (inbox, _) = inboxes(2, 64, device)
    part = torch.zeros(64, device=device)
    with pytest.raises(ValueError, match="must have 64 numbers"):
        rank_sum(part[:32], part, inbox)
    with pytest.raises(ValueError, match="must be float32"):
        rank_sum(part.half(), part, inbox)
