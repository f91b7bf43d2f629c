"""What tests of sparse models share: models around a dense one, prompts, and the sets that were selected."""

import torch

from dejavu_train import SparseOPTForCausalLM
from dejavu_train.sparse.masked import masking


def sparse(dense, bundle, backend, **options):
    return SparseOPTForCausalLM.from_model(dense, bundle, backend, **options)


def tokens(rows, columns, seed=0):
    return torch.randint(4, 300, (rows, columns), generator=torch.Generator().manual_seed(seed))


def close(got, expected):
    """Within 1e-4 of the largest logit."""
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()


def mask_sets(dense, bundle, ids):
    """Selections of whole sequences by the backend mask: {(layer, target): (B, T, n)}."""
    got = {}
    model = sparse(dense, bundle, "mask")
    with (
        torch.no_grad(),
        masking(dense, model._runtime.selector, observe=lambda *seen: got.__setitem__(seen[:2], seen[2])),
    ):
        dense(ids)
    return got


def gather_sets(model):
    """Makes a gather model record its selections, column by column."""
    got = {}
    model._runtime.gatherer.on_select = lambda layer, target, column, keep: got.setdefault((layer, target), []).append(
        keep
    )
    return got


def padded(prompts, pad=1, left=True):
    width = max(len(prompt) for prompt in prompts)
    rows = [[pad] * (width - len(p)) + p if left else p + [pad] * (width - len(p)) for p in prompts]
    ids = torch.tensor(rows)
    return ids, (ids != pad).long()
