"""What the decoding benchmark runs: shapes with random weights, predictors that really run, thresholds, counts.

What is active is that of `active_sets`: rows of down whose neuron is zero are skipped, by dense steps too. Thresholds
are set on the model's own activations to stated densities of what the rows of a batch select together.
"""

import itertools

import torch

from benchmarks.active_sets import ActiveSets, overlap_of
from benchmarks.random_weights import weights_of_shape
from dejavu_train.engine.decode import DecodeEngine
from dejavu_train.engine.inputs import Row
from dejavu_train.engine.predictors import TargetPredictor
from dejavu_train.engine.weights import DecodeWeights
from dejavu_train.families import ModelDims, Site
from dejavu_train.families.dims import SMOOTH, Activation, Norm, Positions
from dejavu_train.kernels.common.layer_norm import layer_norm_reference
from dejavu_train.kernels.stages.predictor import PredictorWeights
from dejavu_train.kernels.stages.select import predict_reference
from dejavu_train.predictors.quantization import stored_rows

SHAPES = {
    "1.3b": ModelDims(2048, 8192, 24, 32, 50272, 2048),
    "350m": ModelDims(1024, 4096, 24, 16, 50272, 2048, post_norm=True, embedding_dim=512),
    "2.7b": ModelDims(2560, 10240, 32, 32, 50272, 2048),
    "6.7b": ModelDims(4096, 16384, 32, 32, 50272, 2048),
    "13b": ModelDims(5120, 20480, 40, 40, 50272, 2048),
    "30b": ModelDims(7168, 28672, 48, 56, 50272, 2048),
    "66b": ModelDims(9216, 36864, 64, 72, 50272, 2048),
    "175b": ModelDims(12288, 49152, 96, 96, 50272, 2048),
    # Of other families, with as many positions as cells need.
    "afm-4.5b": ModelDims(
        2560, 18432, 36, 20, 128004, 2048, 128, 4, Norm.RMS_NORM, Positions.ROTARY, Activation.RELU2, biases=False
    ),
    "prosparse-7b": ModelDims(
        4096, 11008, 32, 32, 32000, 2048, norm=Norm.RMS_NORM, positions=Positions.ROTARY,
        activation=Activation.FATRELU, gated=True, biases=False, threshold=0.01,
    ),
    "minitron-8b": ModelDims(
        4096, 16384, 32, 48, 256000, 2048, 128, 8, Norm.LAYER_NORM_1P, Positions.ROTARY, Activation.RELU2,
        biases=False, rotary_share=0.5,
    ),
    "nemotron-4-15b": ModelDims(
        6144, 24576, 32, 48, 256000, 2048, 128, 8, Norm.LAYER_NORM_1P, Positions.ROTARY, Activation.RELU2,
        biases=False, rotary_share=0.5,
    ),
    "bloom-7b1": ModelDims(
        4096, 16384, 30, 32, 250880, 2048, positions=Positions.ALIBI, activation=Activation.GELU_TANH,
        embedding_norm=True,
    ),
    "bloom-176b": ModelDims(
        14336, 57344, 70, 112, 250880, 2048, positions=Positions.ALIBI, activation=Activation.GELU_TANH,
        embedding_norm=True,
    ),
    # Four of its layers, and hardly any vocabulary: what is left is four times a layer.
    "bloom-176b-4-layers": ModelDims(
        14336, 57344, 4, 112, 1024, 2048, positions=Positions.ALIBI, activation=Activation.GELU_TANH,
        embedding_norm=True,
    ),
}  # fmt: skip
# 4 % of the dense MLP's bytes.
RANKS = {"350m": 64, "1.3b": 128, "2.7b": 160, "6.7b": 256, "13b": 320, "30b": 448, "66b": 576, "175b": 768}
RANKS |= {"afm-4.5b": 160, "prosparse-7b": 256, "minitron-8b": 256, "nemotron-4-15b": 384, "bloom-7b1": 256}
RANKS |= {"bloom-176b": 896, "bloom-176b-4-layers": 896}
# Share of the neurons that a batch selects together for a recall of 0.99, means over the layers (Polar Sparsity).
UNION = {
    "6.7b": {2: 0.153, 4: 0.206, 8: 0.29, 16: 0.398, 32: 0.517},
    "30b": {2: 0.098, 4: 0.141, 8: 0.209, 16: 0.304, 32: 0.419},
    "66b": {2: 0.08, 4: 0.116, 8: 0.175, 16: 0.263, 32: 0.374},
}
STD = 0.02
QUIET = 0.02  # of what layers add to the residual stream
ACTIVE = 0.06  # share of all neurons that are active in a token


def random_weights(
    shape: ModelDims, active_share: float, packed: bool = False, packed_head: bool = False, device: str = "cuda"
) -> DecodeWeights:
    """Random weights, of 4 bits where `packed`. A share of all neurons is active in a token, selected or not."""
    weights = weights_of_shape(shape, torch.float16, device, std=STD, packed=packed, packed_head=packed_head)
    sets = sets_of(shape, active_share, device)
    # What tokens have in common would make them activate the same neurons: what layers add stays below the embedding.
    weights.embedding.mul_(1 / STD)
    for number, layer in enumerate(weights.layers):
        sets.put(number, layer)
        for linear in (layer.out, layer.down):
            linear.weight.parts()[-1].mul_(QUIET)  # numbers, or the scales of codes
    return weights


def sets_of(shape: ModelDims, active_share: float, device: str = "cuda") -> ActiveSets:
    """Active neurons of a shape's layers. The rank is that of predictors with 4 % of the dense MLP's bytes."""
    return ActiveSets(shape, active_share, max(8, shape.d_model // 16), STD, device)


def random_predictors(
    shape: ModelDims,
    rank: int,
    mlp_density: float,
    head_density: float,
    lookahead: int = 0,
    dtype: str = "float16",
    heads_ahead: int = 0,
    device: str = "cuda",
    active_share: float = ACTIVE,
) -> dict[tuple[int, str], TargetPredictor]:
    """Predictors of both targets, none for a density of 1. Thresholds are set later, see `set_thresholds`.

    Args:
        mlp_density, head_density: what one row selects, by which the engine chooses how a layer runs.
        lookahead: halves between the MLP's site and fc1. heads_ahead: between the heads' site and q/k/v.
        dtype: of the MLP predictors: float16, or int4 with a scale a row.
        active_share: of the weights that they predict. Of a rank above that of the weights, the rest is zero.
    """
    sets = sets_of(shape, active_share, device)
    generator = torch.Generator(device).manual_seed(1)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=torch.float16, device=device).normal_(0, STD, generator=generator)

    result = {}
    none = torch.empty(1, 1, dtype=torch.float16, device=device)
    for layer, (target, density) in itertools.product(
        range(shape.n_layers), (("mlp", mlp_density), ("heads", head_density))
    ):
        if density == 1:
            continue
        n = shape.units(target)
        half = max(0, 2 * layer + 1 - lookahead if target == "mlp" else 2 * layer - heads_ahead)
        folded, pair = None, PredictorWeights(none, none)
        if target == "heads":
            folded = normal(n, shape.d_model)
        else:
            (down, up), bias = (fitted(each, rank) for each in sets.pair(layer)), sets.biases(layer)
            pair = PredictorWeights(down.half(), up.half(), bias)
            if dtype == "int4":
                (down, down_scale), (up, up_scale) = stored_rows(down, "int4"), stored_rows(up, "int4")
                pair = PredictorWeights(down, up, bias, down_scale.float(), up_scale.float())
        result[layer, target] = TargetPredictor(
            layer, target, Site.at(half), pair, torch.zeros(1, device=device), None,
            folded, torch.zeros(n, device=device), density,
        )  # fmt: skip
    return result


def fitted(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """A predictor's matrix with this rank, whose axis is the shorter one: cut, or filled up with zeros."""
    axis = int(matrix.shape[0] > matrix.shape[1])
    kept = matrix.narrow(axis, 0, min(rank, matrix.shape[axis]))
    padding = [0, rank - kept.shape[axis]] if axis else [0, 0, 0, rank - kept.shape[axis]]
    return torch.nn.functional.pad(kept, padding)


def logits_of(engine: DecodeEngine, predictor: TargetPredictor) -> torch.Tensor:
    """(B, n) fp32: what a predictor said in the last step, in plain torch from the residual stream that it left."""
    layer, later = engine.weights.layers[predictor.site.layer], predictor.site.half % 2
    weights = predictor.weights
    if predictor.folded is not None:
        eye = torch.eye(len(predictor.folded), dtype=predictor.folded.dtype, device=predictor.folded.device)
        weights = PredictorWeights(predictor.folded, eye, predictor.bias)
    x = engine.core.x[predictor.site.half]
    return predict_reference(x, weights, layer.norm2 if later else layer.norm1)


def by_chain(engine: DecodeEngine) -> None:
    """A step that leaves the residual stream in front of every half, as one kernel of all layers does not."""
    kernel, engine.core.one_kernel = engine.core.one_kernel, None
    try:
        engine.core.eager("greedy", False)
    finally:
        engine.core.one_kernel = kernel


def set_thresholds(engine: DecodeEngine, mlp_density: float, head_density: float, n_steps: int = 9) -> None:
    """Thresholds at quantiles of the logits on the model's own activations.

    The densities are of the union over the batch: the quantile is that of each unit's largest logit over the rows.
    Thresholds change what later layers see: the first third of the steps is forgotten.
    """
    pools: dict[tuple[int, str], list[torch.Tensor]] = {key: [] for key in engine.predictors}
    for step in range(n_steps):
        by_chain(engine)
        for key, predictor in engine.predictors.items():
            if step <= n_steps // 3:
                pools[key].clear()
            pools[key].append(logits_of(engine, predictor).amax(0))
            values = torch.cat(pools[key]).sort(descending=True).values
            density = mlp_density if predictor.target == "mlp" else head_density
            predictor.threshold.fill_(values[min(round(density * len(values)), len(values) - 1)])


def measured(engine: DecodeEngine, n_steps: int = 3) -> dict[str, float]:
    """Densities, what is active over some eager steps, and the bytes that a step must read.

    active is the share of all neurons in a row, live that of the rows together. overlap is what two tokens share.
    recall is the share of the active neurons that are selected. Rows of the union are read once. Of down those that
    are active for a row that selects them, unless all are read. K and V of a head are read for each row with it.
    """
    shape, size = engine.plan.dims, engine.weights.embedding.element_size()  # of several GPUs those of this one
    selected = {"mlp": [0.0, 0.0], "heads": [0.0, 0.0]}  # of the union, of single rows; shares, summed
    active_sums = dict.fromkeys(("one", "together", "hit", "selected"), 0.0)  # neurons, summed over steps and layers
    total, earlier, overlaps = 0.0, {}, []
    for _ in range(n_steps):
        by_chain(engine)
        screen = engine.core.screen
        total += engine.weights.lm_head.nbytes if screen is None else screen.read_bytes()
        context = engine.state.position.double()  # the step has moved on by one
        for number, layer in enumerate(engine.weights.layers):
            chosen: dict[str, torch.Tensor] = {}
            for target in ("mlp", "heads"):
                predictor = engine.predictors.get((number, target))
                n = shape.units(target)
                chosen[target] = torch.ones(engine.batch, n, dtype=torch.bool, device=engine.device)
                if predictor is not None:
                    chosen[target] = logits_of(engine, predictor) > predictor.threshold
                    read = (
                        (predictor.weights.down, predictor.weights.up)
                        if predictor.folded is None
                        else (predictor.folded,)
                    )
                    total += sum(matrix.nbytes for matrix in read)
                selected[target][0] += float(chosen[target].any(0).double().mean())
                selected[target][1] += float(chosen[target].double().mean())
            by_head = (layer.qkv.weight.nbytes + layer.out.weight.nbytes) / shape.n_kv_heads
            total += by_head * int(chosen["heads"].any(0).sum())
            total += 2 * shape.head_dim * size * float(chosen["heads"].sum(1).double() @ context)
            active = active_neurons(engine, number)
            tokens = active if engine.batch > 1 else torch.cat((earlier.get(number, active[:0]), active))
            overlaps += [overlap_of(tokens)] if len(tokens) > 1 else []
            earlier[number] = active
            hit, n = active & chosen["mlp"], int(chosen["mlp"].any(0).sum())
            found = (active.sum() / engine.batch, active.any(0).sum(), hit.sum(), active.sum())
            for name, value in zip(active_sums, found, strict=True):
                active_sums[name] += float(value)
            # Rows of down: those that are read. Of smooth activations every selected row counts.
            skips = engine.plan.half(number, "mlp").skips and shape.activation not in SMOOTH
            positive = int(hit.any(0).sum()) if skips else n
            read = (n * layer.up.weight.nbytes + positive * layer.down.weight.nbytes) / shape.d_ffn
            if layer.gate is not None:  # of up the rows whose gate is open
                gated = positive if engine.batch == 1 or (number, "mlp") in engine.predictors else n
                read += gated * layer.gate.weight.nbytes / shape.d_ffn
            total += read
    steps = n_steps * shape.n_layers
    return {
        "mlp_union": selected["mlp"][0] / steps,
        "mlp_selected": selected["mlp"][1] / steps,
        "head_union": selected["heads"][0] / steps,
        "active": active_sums["one"] / steps / shape.d_ffn,
        "live": active_sums["together"] / steps / shape.d_ffn,
        "overlap": sum(overlaps) / max(1, len(overlaps)),
        "recall": active_sums["hit"] / max(1.0, active_sums["selected"]),
        "gb_per_step": total / n_steps / 1e9,
    }


def active_neurons(engine: DecodeEngine, number: int) -> torch.Tensor:
    """(B, d_ffn) bool: neurons of a layer that were not zero in the last step, had all been computed."""
    layer = engine.weights.layers[number]
    x = layer_norm_reference(engine.core.x[2 * number + 1], layer.norm2, layer.up.bias.dtype)
    first = layer.gate or layer.up
    products = torch.nn.functional.linear(x, first.weight.dense(x.dtype), first.bias)
    return products > layer.hidden.threshold


def start(engine: DecodeEngine, prompt: int, steps: int) -> None:
    """Rows of random known tokens. `prompt` of them run densely, the others are forced one by one."""
    generator = torch.Generator().manual_seed(0)
    total = min(prompt + steps, engine.context)
    rows = torch.randint(3, engine.shape.vocab_size, (engine.batch, total), generator=generator).tolist()
    engine.begin([Row(row, total, sparse_from=prompt, prefilled=prompt) for row in rows])
