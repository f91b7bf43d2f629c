"""What the command that times alternatives would launch, without launching it."""

from benchmarks.alternatives import cells
from benchmarks.compiled_attend import SHAPES
from benchmarks.tune import nothing_launched, recorded_lookups
from dejavu_train.kernels.common import settings


def test_every_alternative_can_be_launched_and_is_another():
    seen = {}
    for stage, name, call, choices in cells(["AFM-4.5B"]):
        seen.setdefault(stage, []).append(name)
        assert len({tuple(sorted(values.items())) for values in choices}) == len(choices) > 1
        if "rows 8" not in name:
            run = call()
            with recorded_lookups() as lookups, nothing_launched():
                run()
            assert [lookup.stage for lookup in lookups] == [stage]
            for values in choices:  # a value that a stage does not have, or does not allow, is an error here
                settings.Settings.kinds[stage](**values)
                with settings.tried(stage, values), nothing_launched():
                    run()
    assert [len(seen[stage]) for stage in ("attend", "advance")] == [6, 6]
    assert {groups * share for groups, share, _ in SHAPES.values()} == {32, 20, 48}
