"""What the decoding benchmark runs: OPT shapes with random weights, predictors that really run, thresholds, counts.

Neurons are live with a stated probability: zero rows of fc2 are skipped, and random weights would decide how many.
Thresholds are set on the model's own activations to stated densities of what the rows of a batch select together.
"""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from dejavu_train.decode import DecodeEngine, Sampling
from dejavu_train.decode_weights import DecodeWeights, TargetPredictor
from dejavu_train.opt_model import OPTShape
from kernels.select import PredictorWeights, predict_reference

SHAPES = {
    "1.3b": OPTShape(2048, 8192, 24, 32, 50272, 2048),
    "2.7b": OPTShape(2560, 10240, 32, 32, 50272, 2048),
    "6.7b": OPTShape(4096, 16384, 32, 32, 50272, 2048),
    "13b": OPTShape(5120, 20480, 40, 40, 50272, 2048),
    "30b": OPTShape(7168, 28672, 48, 56, 50272, 2048),
    "66b": OPTShape(9216, 36864, 64, 72, 50272, 2048),
}
RANKS = {"1.3b": 128, "2.7b": 160, "6.7b": 256, "13b": 320, "30b": 448, "66b": 576}  # 4 % of the dense MLP's bytes
# Share of the neurons that a batch selects together for a recall of 0.99, means over the layers (Polar Sparsity).
UNION = {
    "6.7b": {2: 0.153, 4: 0.206, 8: 0.29, 16: 0.398, 32: 0.517},
    "30b": {2: 0.098, 4: 0.141, 8: 0.209, 16: 0.304, 32: 0.419},
    "66b": {2: 0.08, 4: 0.116, 8: 0.175, 16: 0.263, 32: 0.374},
}
STD = 0.02


def random_weights(shape: OPTShape, live_share: float) -> DecodeWeights:
    """Random weights whose neurons are live with the given probability, whatever is selected."""
    weights = DecodeWeights.random(shape, torch.float16, "cuda", std=STD)
    # A LayerNorm's output has norm sqrt(d), so pre-activations are normal with deviation STD * sqrt(d).
    shift = STD * math.sqrt(shape.d_model) * statistics.NormalDist().inv_cdf(live_share)
    for layer in weights.layers:
        layer.fc1_bias.fill_(shift)
    return weights


def random_predictors(
    shape: OPTShape,
    rank: int,
    mlp_density: float,
    head_density: float,
    lookahead: int = 0,
    dtype: torch.dtype = torch.float16,
) -> dict[tuple[int, str], TargetPredictor]:
    """Predictors of both targets, none for a density of 1; thresholds are set later, see `set_thresholds`.

    Args:
        mlp_density, head_density: what one row selects, by which the engine chooses a layer's form.
        lookahead: half-blocks between the MLP's site and fc1.
        dtype: of the MLP predictors: float16, or int8 with a scale a row.
    """
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(*size, dtype=torch.float16, device="cuda").normal_(0, STD, generator=generator)

    result = {}
    none = torch.empty(1, 1, dtype=torch.float16, device="cuda")
    for layer, (target, density) in itertools.product(
        range(shape.n_layers), (("mlp", mlp_density), ("heads", head_density))
    ):
        if density == 1:
            continue
        n = shape.units(target)
        half = max(0, 2 * layer + 1 - lookahead) if target == "mlp" else 2 * layer
        folded, pair = None, PredictorWeights(none, none)
        if target == "heads":
            folded = normal(n, shape.d_model)
        else:
            pair = PredictorWeights(normal(rank, shape.d_model), normal(n, rank), torch.zeros(n, device="cuda"))
            pair = pair if dtype == torch.float16 else pair.quantized(dtype)
        result[layer, target] = TargetPredictor(
            layer, target, ("attn_in", "mlp_in")[half % 2], half // 2, pair, torch.zeros(1, device="cuda"), None,
            folded, torch.zeros(n, device="cuda"), density,
        )  # fmt: skip
    return result


class Watched:
    """Runs an engine's step eagerly and shows each operation: to set thresholds and to read counts."""

    def __init__(self, engine: DecodeEngine, watch: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> None:
        self.engine, self.watch, self.plain = engine, watch, engine.core.ops

    def __enter__(self) -> None:
        def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.watch(name + ":before", args, kwargs)
                result = function(*args, **kwargs)
                self.watch(name, args, kwargs)
                return result

            return call

        made = {name: function and wrapped(name, function) for name, function in vars(self.plain).items()}
        self.engine.core.ops = type(self.plain)(**made)

    def __exit__(self, *_: object) -> None:
        self.engine.core.ops = self.plain


def set_thresholds(engine: DecodeEngine, mlp_density: float, head_density: float, n_steps: int = 6) -> None:
    """Thresholds at quantiles of the logits on the model's own activations, layer after layer in one step each.

    The densities are of the union over the batch: the quantile is that of each unit's largest logit over the rows.
    """
    seen: dict[int, list[torch.Tensor]] = {}

    def put(threshold: torch.Tensor, logits: torch.Tensor, density: float) -> None:
        pool = seen.setdefault(threshold.data_ptr(), [])
        pool.append(logits.amax(0))
        values = torch.cat(pool).sort(descending=True).values
        threshold.fill_(values[min(round(density * len(values)), len(values) - 1)])

    def up(predictor: PredictorWeights, hidden: torch.Tensor) -> torch.Tensor:
        scale = 1.0 if predictor.up_scale is None else predictor.up_scale
        return hidden @ predictor.up.float().T * scale + (0.0 if predictor.bias is None else predictor.bias)

    def watch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name == "predict_select:before":
            x, predictor, threshold = args[:3]
            put(threshold, predict_reference(x, predictor, kwargs["ln"]), mlp_density)
        elif name == "select_gather:before":
            hidden, mlp, threshold = args[:3]
            put(threshold, up(mlp, hidden), mlp_density)
        elif name == "qkv_select:before":
            mlp, hidden, threshold = args[11:14]
            put(threshold, up(mlp, hidden), mlp_density)
        elif name in ("head_select:before", "site_predict:before") and args[2] is not None:
            x, norm, folded, bias, threshold = args[:5]
            put(threshold, predict_reference(x, PredictorWeights(folded, _eye(folded), bias), norm), head_density)

    with Watched(engine, watch):
        for _ in range(n_steps):
            engine.core.eager("greedy", False)


def _eye(folded: torch.Tensor) -> torch.Tensor:
    return torch.eye(len(folded), dtype=folded.dtype, device=folded.device)


def measured(engine: DecodeEngine, n_steps: int = 4) -> dict[str, float]:
    """Densities and live share over some eager steps, and the bytes that a step must read."""
    shape, size = engine.shape, 2
    d, hd = shape.d_model, shape.head_dim
    rows = {"heads": [0, 0], "mlp": [0, 0]}
    live, single = [0, 0], [0.0, 0]
    total = 0.0

    def watch(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal total
        context = float((engine.state.position + 1).sum())
        if name == "qkv_dense":
            total += 3 * d * d * size + shape.n_heads * context * hd * 2 * size
        elif name in ("qkv", "qkv_select"):
            n = int(args[3].counts.sum())
            rows["heads"][0] += n
            rows["heads"][1] += shape.n_heads
            # A head of the union reads the K/V of the rows that select it: on average their share of the contexts.
            each = float(args[3].to_mask(engine.batch).sum()) / engine.batch
            total += 3 * n * hd * d * size + each * context * hd * 2 * size
            if name == "qkv_select":
                total += args[11].up.nbytes
        elif name in ("head_select", "site_predict") and args[2] is not None:
            total += args[2].nbytes + (args[9].down.nbytes if name == "site_predict" else 0)
        elif name == "predict_select":
            total += args[1].down.nbytes + args[1].up.nbytes
        elif name == "packed_rows":
            n = int(args[0].count)
            live[0] += n
            total += n * d * size
        elif name == "project_heads":
            selection = args[4] if engine.batch == 1 else None
            total += (d if selection is None else int(selection.counts.sum()) * hd) * d * size
        elif name == "scatter_gemv":
            h = args[0]
            if isinstance(h, torch.Tensor):
                total += h.shape[1] * d * size
            else:
                n = int(h.counts.sum())
                live[0] += n
                total += n * d * size
        elif name == "select_gather":
            chosen = args[0] @ args[1].up.float().T + args[1].bias > args[2]
            n = int(chosen.sum())
            total += n * d * size + args[1].up.nbytes
            rows["mlp"][0] += n
            rows["mlp"][1] += shape.d_ffn
            live[1] += n
        elif name in ("gather_gemv", "listed_gemv"):
            selection = args[3 if name == "gather_gemv" else 4]
            weight = args[1 if name == "gather_gemv" else 2]
            n = weight.shape[0] if selection is None else int(selection.counts.sum())
            total += n * d * size
            if selection is not None:
                rows["mlp"][0] += n
                rows["mlp"][1] += shape.d_ffn
                live[1] += n
                single[0] += float(selection.to_mask(engine.batch).float().mean())
                single[1] += 1
        elif name in ("dense_rows", "dense_hidden"):
            total += args[2].nbytes
        elif name in ("dense_add", "dense_wide"):
            total += args[1].nbytes

    with Watched(engine, watch):
        for _ in range(n_steps):
            engine.core.eager("greedy", False)
    share = {target: got / of if of else 1.0 for target, (got, of) in rows.items()}
    return {
        "mlp_density": share["mlp"],
        "row_density": single[0] / single[1] if single[1] else share["mlp"],
        "head_density": share["heads"],
        "live_share": live[0] / live[1] if live[1] else 1.0,
        "gb_per_step": total / n_steps / 1e9,
    }


def start(engine: DecodeEngine, prompt: int, steps: int) -> None:
    """Rows of random known tokens; `prompt` of them run densely, the others are forced one by one."""
    generator = torch.Generator().manual_seed(0)
    total = min(prompt + steps, engine.context)
    rows = torch.randint(3, engine.shape.vocab_size, (engine.batch, total), generator=generator).tolist()
    engine.begin(rows, [total] * len(rows), [prompt] * len(rows), [prompt] * len(rows), Sampling())
    engine.core.tail("greedy", False)
