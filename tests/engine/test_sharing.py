"""Units are shared out evenly, by how often each is read."""

from types import SimpleNamespace

import pytest
import torch

from dejavu_train.engine.ranks.sharing import block_of, rates_of, shards_of, share_out
from dejavu_train.families import ModelDims, Target, UnitKey
from dejavu_train.ground.errors import UserError

DIMS = ModelDims(d_model=64, d_ffn=1536, n_layers=2, n_heads=12, vocab_size=301, max_positions=64)


def test_every_unit_is_on_one_rank_and_each_has_as_many():
    few = torch.tensor([50.0] + 11 * [0.1])  # one head is as heavy as all others
    rates = {UnitKey(0, Target.MLP): torch.rand(1536), UnitKey(1, Target.HEADS): few}
    for world in (1, 2, 3, 4, 6):
        shards = shards_of(DIMS, world, rates)
        for layer in range(2):
            for target in Target:
                ids = [shard.ids(layer, target) for shard in shards]
                assert {len(each) for each in ids} == {DIMS.units(target) // world}
                assert torch.equal(torch.cat(ids).sort().values, torch.arange(DIMS.units(target)))
                assert all(torch.equal(each, each.sort().values) for each in ids)
        rows = [range(*shard.head_rows.indices(301)) for shard in shards]
        assert [row for part in rows for row in part] == list(range(301))
        assert [shard.dims.n_heads for shard in shards] == [12 // world] * world
        assert {shard.dims.head_dim for shard in shards} == {DIMS.head_dim}


def test_ranks_find_the_same_and_the_loads_are_even():
    rates = torch.linspace(0, 1, 1536)  # the second half of an even cut has three quarters
    parts = share_out(rates, 2, block_of(1536, 2))
    assert all(torch.equal(a, b) for a, b in zip(parts, share_out(rates.clone(), 2, 64), strict=True))
    one, other = (rates[part].sum().item() for part in parts)
    assert abs(one - other) < 0.01 * one
    assert all(torch.equal(part.view(-1, 64)[:, 0] % 64, torch.zeros(12)) for part in parts), "blocks stay whole"
    assert [block_of(n, 2) for n in (1536, 160, 6)] == [64, 16, 1]


def test_what_a_bundle_gains_by_its_frequencies():
    """Units that are read often lie together here, so an even cut makes one rank wait for the other."""
    spec = SimpleNamespace(dense=False, density=0.25)
    bundle = SimpleNamespace(
        specs={(0, "mlp"): spec, (1, "heads"): spec, (1, "mlp"): SimpleNamespace(dense=True)},
        frequency=lambda layer, target: torch.linspace(0, 1, DIMS.units(target)),
    )
    rates = rates_of(bundle)
    assert set(rates) == {UnitKey(0, Target.MLP), UnitKey(1, Target.HEADS)}
    assert rates[UnitKey(0, Target.MLP)].mean().item() == pytest.approx(0.25, rel=1e-3)
    for key, most in ((UnitKey(0, Target.MLP), 1.01), (UnitKey(1, Target.HEADS), 1.1)):  # of heads a rank has three
        even = rates[key].sum().item() / 4
        cut, shared = (
            max(rates[key][shard.units[key]].sum().item() for shard in shards)
            for shards in (shards_of(DIMS, 4), shards_of(DIMS, 4, rates))
        )
        assert cut > 1.7 * even and shared < most * even


def test_units_that_ranks_cannot_share_evenly_are_refused():
    with pytest.raises(UserError, match="12 groups .* over 5 GPUs; take torchrun --nproc-per-node 2 or 3 or 4"):
        shards_of(DIMS, 5)
    odd = ModelDims(d_model=64, d_ffn=99, n_layers=1, n_heads=2, vocab_size=301, max_positions=64)
    with pytest.raises(UserError, match="99 neurons .* start one process, without torchrun"):
        shards_of(odd, 2)
