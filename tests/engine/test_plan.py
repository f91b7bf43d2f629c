"""Plans of a decoding step, from sizes alone: which half runs how, where its predictor runs, and what is refused."""

from dataclasses import replace

import pytest

from benchmarks.decode_problem import SHAPES
from dejavu_train.bundle.guard_config import Guard
from dejavu_train.engine import plan as plans
from dejavu_train.engine.facts import PredictorFacts
from dejavu_train.engine.options import EngineOptions
from dejavu_train.engine.plan import carveout, dense_from, plan_step, with_screen
from dejavu_train.engine.planned import Early, Engine, Formats, Kernels, Packer, Place, Run, StepPlan, hidden_values
from dejavu_train.families import ModelDims, Site, Target, UnitKey
from dejavu_train.families.dims import Activation, Norm, Positions
from dejavu_train.ground.errors import UserError
from dejavu_train.kernels.common.activation import activation_of
from dejavu_train.kernels.common.limits import DRIVERS_CARVEOUT, INT4_CARVEOUT, SPARSE_CARVEOUT
from dejavu_train.kernels.formats.matrix import Hidden
from dejavu_train.kernels.persistent.sizes import Neurons, StepSizes
from dejavu_train.models.int4_sizes import part_sizes

OPT_66B = ModelDims(9216, 36864, 64, 72, 50272, 2048)
OPT_6B = ModelDims(4096, 16384, 32, 32, 50272, 2048)
FULL = Formats("float32", "float32", "float32")
HALF = Formats("float16", "float16", "float16")
INT4_128 = Formats("int4", "float16", "float16", 128)
INT4 = Formats("int4", "float16", "float16", part_sizes(OPT_66B)["down"].group)


def facts(dims=OPT_66B, ahead=0, heads=True, own_heads=False, union=0.2, **given):
    """Predictors of all layers that read `ahead` halves before their own inputs."""
    found = {}
    for layer in range(dims.n_layers):
        for target in (Target.MLP, Target.HEADS) if heads else (Target.MLP,):
            half = max(0, 2 * layer + (target == Target.MLP) - ahead * (target == Target.MLP or not own_heads))
            site = Site.at(half)
            values = {"rank": 576, "format": "int4", "density": 0.1, "union": union} | given
            folds = target == Target.HEADS and half in (2 * layer, 2 * layer - 1)
            found[UnitKey(layer, target)] = PredictorFacts(site, folds=folds and not values.get("top_k"), **values)
    return found


def plan(predictors=None, formats=INT4, dims=OPT_66B, engine=Engine.GPU, **options) -> StepPlan:
    return plan_step(dims, predictors or {}, formats, EngineOptions(**options), engine)


def kinds(made: StepPlan, layer: int = 5) -> tuple:
    heads, mlp = made.half(layer, Target.HEADS), made.half(layer, Target.MLP)
    return heads.run, heads.kernels, heads.place, mlp.run, mlp.kernels, mlp.place


ALL, SELECTED, MASKED = Run.ALL, Run.SELECTED, Run.MASKED
K, P = Kernels, Place
DENSE_HEADS = ALL, K.QKV_ALL, None


@pytest.mark.parametrize(
    ("formats", "predictors", "options", "expected"),
    [
        (INT4, None, {}, (*DENSE_HEADS, ALL, K.ROWS, None)),
        (HALF, None, {"batch": 2}, (*DENSE_HEADS, ALL, K.PRODUCTS, None)),
        (HALF, {}, {}, (SELECTED, K.QKV_SELECTED, P.FOLDED, SELECTED, K.LISTED_GRID, P.SITE)),
        (INT4, {}, {}, (SELECTED, K.QKV_SELECTED, P.FOLDED, SELECTED, K.LISTED_GRID, P.SITE)),
            (HALF, {"top_k": 9}, {}, (SELECTED, K.QKV_SELECTED, P.SITE, SELECTED, K.LISTED_GRID, P.SITE)),
        # look-ahead: of 66B in 4 bits everything but the first layer's heads runs in the grids of other kernels
        (INT4, {"ahead": 1}, {}, (SELECTED, K.QKV_WITH_PREDICTOR, P.BEFORE, SELECTED, K.LISTED_GRID, P.GRIDS)),
        (INT4, {"ahead": 1, "heads": False}, {}, (ALL, K.QKV_WITH_PREDICTOR, None, SELECTED, K.LISTED_GRID, P.GRIDS)),
        (INT4, {"ahead": 1, "format": "float16"}, {},
         (SELECTED, K.QKV_SELECTED, P.STREAM, SELECTED, K.LISTED_GRID, P.STREAM)),
        (INT4, {"ahead": 1}, {"look_ahead": "stream"},
         (SELECTED, K.QKV_SELECTED, P.STREAM, SELECTED, K.LISTED_GRID, P.STREAM)),
        (INT4, {"ahead": 1}, {"look_ahead": "inline"},
         (SELECTED, K.QKV_SELECTED, P.SITE, SELECTED, K.LISTED_GRID, P.SITE)),
        (HALF, {"ahead": 1, "own_heads": True}, {},
         (SELECTED, K.QKV_WITH_PREDICTOR, P.FOLDED, SELECTED, K.LISTED_GRID, P.GRIDS)),
        (HALF, {"ahead": 1, "heads": False}, {}, (*DENSE_HEADS, SELECTED, K.LISTED_GRID, P.STREAM)),
        # several rows
        (HALF, {"union": 0.5}, {"batch": 8}, (MASKED, K.QKV_ALL, P.FOLDED, SELECTED, K.LISTED_BATCH, P.SITE)),
        (HALF, {"union": 0.7}, {"batch": 8}, (MASKED, K.QKV_ALL, P.FOLDED, MASKED, K.PRODUCTS, P.SITE)),
        (HALF, {"union": 0.7}, {"batch": 8, "crossover": False},
         (SELECTED, K.QKV_SELECTED, P.FOLDED, SELECTED, K.LISTED_BATCH, P.SITE)),
        (INT4, {"union": 0.9}, {"batch": 8}, (MASKED, K.QKV_ALL, P.FOLDED, SELECTED, K.LISTED_CODES, P.SITE)),
        (INT4, {"format": "float16"}, {"batch": 9}, (MASKED, K.QKV_ALL, P.FOLDED, MASKED, K.PRODUCTS, P.SITE)),
        (INT4, {"ahead": 1}, {"batch": 2}, (MASKED, K.QKV_ALL, P.SITE, SELECTED, K.LISTED_CODES, P.SITE)),
        (HALF, {"ahead": 1}, {"batch": 2}, (MASKED, K.QKV_ALL, P.STREAM, SELECTED, K.LISTED_BATCH, P.STREAM)),
    ],
)  # fmt: skip
def test_how_a_layer_runs(formats, predictors, options, expected):
    made = plan(None if predictors is None else facts(**predictors), formats, **options)
    assert kinds(made) == expected
    assert made.streams == (P.STREAM in expected)
    assert all(half.why for half in made.halves), "each choice has a reason"


@pytest.mark.parametrize("formats", [HALF, INT4])
@pytest.mark.parametrize("options", [{}, {"batch": 8}, {"batch": 9}])
def test_candidates_of_a_second_stage_are_read_whole_and_it_is_said(formats, options):
    """Every half is planned as without one, but for the reason."""
    one, two = (plan(facts(second_stage=staged, format="float16"), formats, **options) for staged in (False, True))
    added = "candidates of a second stage are read whole: it saves bytes, and no time here"
    assert [replace(half, why=tuple(why for why in half.why if why != added)) for half in two.halves] == [*one.halves]
    assert added in two.describe() and added not in one.describe()
    on_cpus = plan(facts(OPT_6B, second_stage=True), FULL, OPT_6B, Engine.CPU)
    assert on_cpus.half(5, Target.MLP).second_stage and "; a second stage" in on_cpus.describe()


def test_a_66b_shape_in_four_bits_needs_neither_weights_nor_a_gpu():
    """Heads of layer 0 read their own site. From layer 1 on the MLP before makes the input."""
    made = plan(facts(ahead=1))
    assert [made.half(layer, Target.HEADS).late for layer in (0, 1, 63)] == [False, True, True]
    assert made.half(0, Target.HEADS).place is P.FOLDED
    assert made.half(3, Target.MLP).packer is Packer.ATTENTION and made.half(3, Target.MLP).early is Early.LIST
    assert made.carveout == INT4_CARVEOUT
    assert made.coming["kept inputs"] == 64 * 2048 * 9216 * 2
    text = made.describe()
    assert "attention of layer 0: the selected units" in text and "attention of layers 1-63:" in text
    assert "in the grid of the MLP before; its norm comes late" in text
    assert "MLP of layers 0-63: the selected units; up and down in one grid over a list" in text


def test_a_guard_makes_no_input_ahead_and_says_so():
    made = plan(facts(ahead=1), guard=object())
    assert not any(half.late for half in made.halves) and made.half(0, Target.MLP).place is P.GRIDS
    assert "a guard's dense steps make no input for the next layer" in made.describe()


@pytest.mark.parametrize("norm", list(Norm))
def test_every_norm_in_front_of_a_half_comes_late(norm):
    dims = replace(OPT_66B, norm=norm)
    made = plan(facts(ahead=1), dims=dims)
    assert all(half.late for half in made.halves[2::2])
    made = plan(facts(ahead=1), dims=replace(dims, post_norm=True))
    assert not any(half.late for half in made.halves)
    assert "its input is a norm's output, which the MLP before does not make" in made.describe()


def test_a_chain_of_late_layers_ends_where_one_is_not():
    predictors = facts(ahead=1)
    del predictors[UnitKey(4, Target.MLP)]
    made = plan(predictors)
    assert [half.late for half in made.halves[::2]][:8] == [False, True, True, True, False, False, False, False]
    assert "the MLP before has no predictor in attention's grids" in " ".join(made.half(5, Target.HEADS).why)


@pytest.mark.parametrize(("engine", "formats"), [(Engine.GPU, HALF), (Engine.CPU, FULL)])
def test_what_a_bundle_leaves_dense_is_said_to_be_so(engine, formats):
    predictors = facts(OPT_6B) | {UnitKey(0, target): None for target in (Target.HEADS, Target.MLP)}
    del predictors[UnitKey(1, Target.HEADS)], predictors[UnitKey(1, Target.MLP)]
    made = plan(predictors, formats, OPT_6B, engine)
    dense = "its density here is 1, so its predictor is not used"
    assert [half.why[0] for half in made.halves[:2]] == [dense, dense]
    assert [half.why[0] for half in made.halves[2:4]] == ["no predictor of its heads", "no predictor of its neurons"]
    assert [half.run for half in made.halves[:5]] == [ALL, ALL, ALL, ALL, SELECTED]


def test_one_matrix_of_heads_is_of_the_dtype_that_the_engine_computes_in():
    assert plan(facts(), HALF).half(5, Target.HEADS).format == "float16"
    late = plan(facts(ahead=1)).half(5, Target.HEADS)
    assert (late.place, late.format) == (P.BEFORE, "float16")
    assert plan(facts(ahead=1), look_ahead="inline").half(5, Target.HEADS).format == "int4"


def test_widths_that_were_not_measured_are_no_crossover():
    small = ModelDims(2048, 8192, 24, 32, 50272, 2048)
    half = plan(facts(small, union=0.01), HALF, small, batch=2).half(5, Target.MLP)
    assert half.run is MASKED
    assert half.why[0] == "what several rows gain by a list was not measured below d_model 4096"


def test_what_the_lists_and_early_reads_are():
    own, ahead = plan(facts()).half(5, Target.MLP), plan(facts(ahead=1), look_ahead="stream").half(5, Target.MLP)
    assert (own.packer, own.early) == (Packer.KERNEL, Early.X)
    assert (ahead.packer, ahead.early) == (Packer.KERNEL, None)
    several = plan(facts(), batch=2).half(5, Target.MLP)
    assert (several.packer, several.early) == (Packer.PREDICTOR, None)
    assert plan(facts(top_k=9), batch=2).half(5, Target.MLP).packer is Packer.KERNEL


@pytest.mark.parametrize(
    ("dims", "given", "formats", "options", "reason"),
    [
        (OPT_6B, {}, INT4, {}, ""),
        (OPT_6B, {}, HALF, {}, "such programs take one row and 4-bit weights"),
        (OPT_6B, {}, INT4, {"batch": 2}, "such programs take one row and 4-bit weights"),
        (OPT_6B, {"ahead": 1}, INT4, {"look_ahead": "inline"}, ""),
        (OPT_6B, {"ahead": 1}, INT4, {}, "the whole predictor runs beside other kernels"),
        (OPT_6B, {"ahead": 2}, INT4, {"look_ahead": "stream"}, "the whole predictor runs beside other kernels"),
        (OPT_6B, {"top_k": 9}, INT4, {}, "an exact top k needs the logits of all neurons"),
        (OPT_6B, {"format": "float16"}, INT4, {}, ""),
        (OPT_6B, {"format": "int8", "rank": 512}, INT4, {}, ""),
        (
            OPT_6B,
            {"format": "float16", "rank": 512},
            INT4,
            {},
            "128 programs have no room for 16384 neurons of rank 512",
        ),
        (OPT_6B, {"rank": 250}, INT4, {}, "the predictor goes by rows in registers, then tiles"),
        (OPT_66B, {"rank": 576}, INT4, {}, "128 programs have no room for 36864 neurons of rank 576"),
    ],
)
def test_whose_programs_own_neurons(dims, given, formats, options, reason):
    made = plan(facts(dims, **{"rank": 256, **given}), formats, dims, **options)
    half = made.half(5, Target.MLP)
    assert (half.kernels is K.OWNED_GRID) == (not reason)
    if reason:
        told = formats is INT4 and "batch" not in options
        assert (f"a list comes before up and down: {reason}" in made.describe()) == told
    else:
        assert (half.packer, half.early) == (None, None) and "whose programs own neurons" in made.describe()


def test_narrow_dense_steps_of_four_bits_run_in_one_grid():
    small = ModelDims(2048, 8192, 24, 32, 50272, 2048)
    formats = Formats("int4", "float16", "float16", part_sizes(small)["down"].group)
    assert plan(None, formats, small).half(0, Target.MLP).kernels is K.LISTED_GRID
    assert plan(None, formats, small, zeros="read").half(0, Target.MLP).kernels is K.ROWS
    for gated, kernels in ((False, K.ROWS), (True, K.LISTED_GRID)):  # behind a gate rows of up stay unread too
        wide = ModelDims(4096, 11008, 32, 32, 32000, 2048, gated=gated)
        formats = Formats("int4", "float16", "float16", part_sizes(wide)["down"].group)
        assert plan(None, formats, wide).half(0, Target.MLP).kernels is kernels


@pytest.mark.parametrize(
    ("dims", "options", "expected"),
    [
        (OPT_6B, {}, (K.LISTED_GRID, True)),
        (OPT_6B, {"zeros": "read"}, (K.ROWS, False)),
        (OPT_66B, {}, (K.ROWS, True)),  # one grid sums all columns in every program: apart is faster where d is large
        (replace(OPT_66B, gated=True), {}, (K.LISTED_GRID, True)),  # rows of up stay unread too
        (OPT_6B, {"batch": 8}, (K.PRODUCTS, True)),
        (OPT_6B, {"batch": 8, "zeros": "read"}, (K.PRODUCTS, False)),
        (OPT_6B, {"batch": 9, "zeros": "skip"}, (K.PRODUCTS, False)),
        (replace(OPT_6B, activation=Activation.GELU), {}, (K.ROWS, False)),
    ],
)
def test_rows_of_silent_neurons(dims, options, expected):
    half = plan(None, HALF, dims, **options).half(0, Target.MLP)
    assert (half.kernels, half.skips) == expected
    assert ("rows of silent neurons are not read" in str(half)) == half.skips
    assert plan(None, HALF, dims, **options).turned == (frozenset(range(dims.n_layers)) if half.skips else frozenset())


def test_several_rows_read_all_from_the_measured_share_on(monkeypatch):
    monkeypatch.setitem(plans.LIVE, 8, 0.42)
    assert plan(None, HALF, OPT_6B, batch=8).half(0, Target.MLP).skips
    monkeypatch.setitem(plans.LIVE, 8, 0.44)
    half = plan(None, HALF, OPT_6B, batch=8).half(0, Target.MLP)
    assert not half.skips and "reading all pays from 0.43 on" in half.why[-1]
    assert plan(None, HALF, OPT_6B, batch=8, zeros="skip").half(0, Target.MLP).skips


def test_an_activation_without_zeros_cannot_skip_them():
    bloom = replace(OPT_6B, activation=Activation.GELU_TANH)
    with pytest.raises(UserError, match="zeros='skip' needs an activation that gives exact zeros .* has gelu_tanh"):
        plan(None, HALF, bloom, zeros="skip")
    assert plan(None, HALF, bloom).half(0, Target.MLP).why[-1] == "gelu_tanh makes no neuron silent"


def test_a_bundle_and_zeros_together_are_said():
    assert "rows of silent neurons are not read" in plan(facts(OPT_6B), HALF, OPT_6B, zeros="skip").describe()
    masked = plan(facts(OPT_6B, union=0.9), HALF, OPT_6B, batch=8)
    assert masked.half(3, Target.MLP).run is MASKED and masked.half(3, Target.MLP).skips


def test_the_carveout_of_a_step():
    def of(predictors, formats):
        return carveout(plan(predictors, formats).halves, formats.packed)

    assert of(None, HALF) == DRIVERS_CARVEOUT
    assert of(facts(heads=False), HALF) == of(facts(), HALF) == SPARSE_CARVEOUT
    assert of(None, INT4) == of(facts(heads=False), INT4) == SPARSE_CARVEOUT
    assert of(facts(), INT4) == of(facts(ahead=1, heads=False), INT4) == INT4_CARVEOUT


def test_the_measured_union_from_which_all_is_computed():
    assert [dense_from(d) for d in (64, 4096, 7168, 9216, 12288)] == [0.0, 0.6, 0.6, 0.65, 0.65]
    assert plan(facts(union=0.9), HALF, engine=Engine.INTERPRETER, batch=2).half(0, Target.MLP).run is SELECTED


def test_a_screen_needs_room():
    assert with_screen(plan(None, HALF), None, None).screened
    needed = sum(plan(None, HALF).coming.values())
    assert not with_screen(plan(None, HALF), None, needed).screened
    assert with_screen(plan(None, HALF), True, needed).screened
    for made in (plan(None, HALF, batch=2), plan(None, Formats("int4", "int4", "float16", 128))):
        assert not with_screen(made, True, None).screened
    assert not with_screen(plan(None, HALF, engine=Engine.REFERENCE), None, None).screened


def test_a_plan_says_what_an_mlp_makes_of_its_products():
    """Of every activation that dims name the kernels know what it is."""
    made = plan(facts()).half(5, Target.MLP)
    assert made.hidden == Hidden() and not made.gated
    assert plan().half(5, Target.MLP).hidden == Hidden() and plan().half(5, Target.HEADS).hidden is None
    for activation in Activation:
        dims = replace(OPT_6B, activation=activation, threshold=0.3 if activation is Activation.FATRELU else 0.0)
        hidden = hidden_values(dims)
        assert activation_of(hidden.activation, hidden.threshold)
        assert (hidden.threshold, hidden.both) == (dims.threshold, activation is Activation.DRELU)


@pytest.mark.parametrize(
    ("engine", "values", "message"),
    [
        (Engine.GPU, {"pattern": "*-"}, "no kernels for layers without attention"),
        (Engine.CPU, {"pattern": "*-"}, "no kernels for layers without attention"),
        (Engine.GPU, {"head_dim": 24}, "head dim 24 has no kernels"),
    ],
)
def test_what_there_are_no_kernels_for_is_refused_in_one_line(engine, values, message):
    dims = ModelDims(4096, 16384, 2, 32, 100, 64, **values)
    with pytest.raises(UserError, match=message) as caught:
        plan(None, HALF, dims, engine)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("the CPU engine" if engine is Engine.CPU else ("the decode engine", "head dim"))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: plan(None, Formats("int4", "float32", "float32", 128)), "float16 inputs in the decode engine, not"),
        (lambda: plan(None, Formats("float16", "int8", "float16")), "no kernel for an LM head in int8"),
        (
            lambda: plan(None, FULL, OPT_6B, Engine.CPU, batch=9),
            "the CPU engine decodes 1 to 8 rows at once",
        ),
        (lambda: plan(None, FULL, OPT_6B, Engine.CPU, guard=Guard(every=4)), "the CPU engine has no guard"),
        (lambda: plan(facts(), batch=9, crossover=False), "up to 8 rows at once, not 9"),
        (lambda: plan(context=4096), "4096 tokens does not fit: this model has positions for 2 to 2048"),
        (lambda: plan(batch=33), "1 to 32 rows"),
        (lambda: plan(look_ahead="often"), "look_ahead must be one of fused, stream, inline"),
    ],
)
def test_what_cannot_be_planned_is_refused(made, message):
    with pytest.raises(UserError, match=message):
        made()


def test_a_plan_of_the_engine_for_cpus():
    made = plan(facts(OPT_6B, format="int8"), FULL, OPT_6B, Engine.CPU, batch=2)
    assert kinds(made) == (SELECTED, K.COMPILED, P.COMPILED, SELECTED, K.COMPILED, P.COMPILED)
    ahead = plan(facts(OPT_6B, ahead=1, own_heads=True), FULL, OPT_6B, Engine.CPU)
    assert kinds(ahead) == kinds(made), "there are no grids to run beside, nor matrices that are folded"


OPT_1B = ModelDims(2048, 8192, 24, 32, 50272, 2048)
OWN_INT4 = {"ahead": 1, "heads": False, "rank": 128, "format": "int4"}


ONE_KERNEL = [
    (OPT_1B, StepSizes(2048, 32, 64, 8192, 24, Neurons.ALL)),
    (SHAPES["prosparse-7b"], StepSizes(
        4096, 32, 128, 11008, 32, Neurons.ALL, rms=True, rotary=True, biases=False, gated=True, threshold=0.01
    )),
    (SHAPES["minitron-8b"], StepSizes(
        4096, 48, 128, 16384, 32, Neurons.ALL, kv_heads=8, rotary=True, biases=False, squared=True
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "options", "neurons"),
    [(None, {}, Neurons.LIVE), (None, {"zeros": "read"}, Neurons.ALL), (OWN_INT4, {}, Neurons.SELECTED)],
)
@pytest.mark.parametrize(("dims", "sizes"), ONE_KERNEL)
def test_one_kernel_runs_all_layers_of_one_row(dims, sizes, given, options, neurons):
    predictors = None if given is None else facts(dims, **given)
    made = plan(predictors, INT4_128, dims, **options)
    assert made.one_kernel == replace(sizes, neurons=neurons, rank=128 if given else 0)
    words = {Neurons.LIVE: "that are not zero", Neurons.ALL: "all neurons", Neurons.SELECTED: "the selected neurons"}
    assert "all layers in one kernel" in made.describe() and words[neurons] in made.describe()


@pytest.mark.parametrize(
    ("given", "options", "dims", "said"),
    [
        (None, {"one_kernel": False}, {}, "none was asked for"),
        (None, {}, {"activation": Activation.GELU}, "zero for many neurons, not gelu"),
        (None, {}, {"post_norm": True}, "in front of halves alone"),
        (None, {}, {"positions": Positions.ALIBI}, "learned or rotary"),
        (None, {}, {"d_ffn": 8192 + 64}, "in a multiple of 128"),
        (None, {}, {"n_kv_heads": 8}, "32 heads with 8 of K and V do not fall evenly"),
        (None, {}, {"n_heads": 24, "n_kv_heads": 24}, "K/V heads of 8 or 16 or 32, not 24"),
        (None, {"guard": Guard(every=8)}, {}, "a guard measures layer by layer"),
        (OWN_INT4 | {"heads": True}, {}, {}, "it selects no heads"),
        (OWN_INT4 | {"ahead": 0}, {}, {}, "predictors read their layer's attn_in"),
        (OWN_INT4 | {"format": "float16"}, {}, {}, "a threshold and int4"),
        (OWN_INT4 | {"rank": 64}, {}, {}, "rank of 128 or 256, not 64"),
        (OWN_INT4, {"look_ahead": "inline"}, {}, "run inline or on a stream"),
    ],
)
def test_what_one_kernel_does_not_take_runs_as_a_chain(given, options, dims, said):
    dims = replace(OPT_1B, **dims)
    made = plan(None if given is None else facts(dims, **given), INT4_128, dims, **options)
    assert made.one_kernel is None and said in made.describe()


def test_one_kernel_is_for_a_gpu_and_one_row_and_says_nothing_elsewhere():
    for made in (plan(None, INT4_128, OPT_1B, engine=Engine.INTERPRETER), plan(None, INT4_128, OPT_1B, batch=2)):
        assert made.one_kernel is None and "one kernel" not in made.describe()
    some = {key: each for key, each in facts(OPT_1B, **OWN_INT4).items() if key.layer != 3}
    assert "it was not timed where some layers have no predictor" in plan(some, INT4_128, OPT_1B).describe()
    assert "in 23 of 24 layers, else up, and" in plan(some, INT4_128, OPT_1B, one_kernel=True).describe()
    assert "leave silent neurons out" in plan(some, INT4_128, OPT_1B, one_kernel=True, zeros="read").describe()
