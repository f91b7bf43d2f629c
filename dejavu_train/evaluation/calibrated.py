"""The bundle that infer.py scores, times and generates with: as it was calibrated, or as the user asked.

Nothing else moves a bundle, and what it is moved to is said.
"""

import torch

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.engine.ranks.group import launched
from dejavu_train.evaluation.config import InferConfig
from dejavu_train.families import TARGETS, Target
from dejavu_train.models.config_values import INT4, quant_method, read_values

UNITS = {Target.MLP: "neurons", Target.HEADS: "heads"}
KEYS = {
    Target.MLP: ("mlp_density", "curve_mlp_density", "timing_mlp_density"),
    Target.HEADS: ("head_density", "timing_head_density"),
}


def moved(bundle: Bundle, mlp_density: float | None, head_density: float | None) -> Bundle:
    """The bundle at the densities that are asked for, None as it was calibrated. A target that it lacks stays dense.

    Raises:
        UserError: as :meth:`Bundle.at`.
    """
    mlp = mlp_density if Target.MLP in bundle.targets else None
    heads = head_density if Target.HEADS in bundle.targets else None
    return bundle if mlp is None and heads is None else bundle.at(mlp, heads)


def timed(config: InferConfig, bundle: Bundle) -> Bundle:
    """The bundle that is timed."""
    return moved(bundle, config.timing_mlp_density, config.timing_head_density)


def writing(config: InferConfig, bundle: Bundle) -> Bundle:
    """The bundle that writes the text of ``--generate``: the timed one where its densities are given.

    Otherwise one density that is asked for is taken, as its row is scored. Several leave the bundle as calibrated.

    Raises:
        UserError: as :meth:`Bundle.at`.
    """
    mlp, heads = _listed(config, bundle)
    named = (config.timing_mlp_density, config.timing_head_density) != (None, None)
    if named or len(mlp) > 1 or len(heads) > 1:
        return timed(config, bundle)
    if mlp:
        return moved(bundle, mlp[0], heads[0] if heads else 1.0)
    return moved(bundle, None, heads[0] if heads else None)


def _listed(config: InferConfig, bundle: Bundle) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Densities of the neurons and of the heads that are asked for beside those as calibrated."""
    mlp = config.mlp_density if Target.MLP in bundle.targets else ()
    return mlp, config.head_density if Target.HEADS in bundle.targets else ()


def described(bundle: Bundle) -> str:
    """Words for what the bundle selects of neurons and heads."""
    if not bundle.targets:
        return "all neurons and heads"
    return " and ".join(_described(bundle, target) for target in TARGETS)


def _described(bundle: Bundle, target: Target) -> str:
    units, density = UNITS[target], bundle.mean_density(target)
    if target not in bundle.targets:
        return f"all {units} (it has no predictors for them)"
    if density == 1.0:
        return f"all {units}"
    sparse = [spec for spec in bundle.specs.values() if spec.target == target and not spec.dense]
    how = ["the largest logits of each token"] if bundle.selects_top_k(target) else []
    how += ["candidates of a second stage"] if any(spec.kind == "cascade" for spec in sparse) else []
    return f"{100 * density:.3g} % of the {units}" + (f" ({', '.join(how)})" if how else "")


def opening(config: InferConfig, bundle: Bundle, device: torch.device) -> str:
    """The first line of infer.py: the bundle, its densities, the backend, how the weights lie."""
    line = f"{config.bundle}: as calibrated, {described(bundle)}"
    if not bundle.targets:
        line = f"{config.model}: no predictors, so all neurons and heads are computed, and silent neurons left out"
    used = timed(config, bundle)
    if used is not bundle:
        line += f"; timed and generated at {described(used)}"
    elif config.generate is not None and any(listed := _listed(config, bundle)):
        line += f"; generated at {described(writing(config, bundle))}"
        if max(map(len, listed)) > 1:
            line += ", as several densities are asked for: --timing_mlp_density takes one"
    coded = quant_method(read_values(config.model, config.revision)) == INT4
    weights = "weights in 4 bits, the rest in float32" if coded else config.dtype
    backend = _backend(config, device)
    line += f"; backend {backend}{'' if device.type == 'cpu' else f' on {device}'}, {weights}"
    if bundle.targets and not any(_asked(config, target) for target in TARGETS):
        line += "; others are asked for, such as --mlp_density 0.1,0.2 or --timing_mlp_density 0.2"
    return line


def _backend(config: InferConfig, device: torch.device) -> str:
    """Backend that ``auto`` tries first for a prompt. Any refusal then is told."""
    if config.backend != "auto":
        return config.backend
    if launched():
        return "triton"
    if device.type != "cpu":
        return "gather" if config.device_map is not None else "triton"
    return "gather" if config.guard.every else "cpu"


def ignored(config: InferConfig, bundle: Bundle) -> list[str]:
    """A line for each target without predictors of which densities are asked for all the same."""
    given = {target: _asked(config, target) for target in TARGETS if target not in bundle.targets}
    named = config.bundle or config.model
    return [
        f"{named} has no predictors for {target}: {', '.join(flags)} change nothing, all {UNITS[target]} run"
        for target, flags in given.items()
        if flags
    ]


def _asked(config: InferConfig, target: Target) -> list[str]:
    """The flags that ask for densities of a target below 1."""
    return [f"--{name}" for name in KEYS[target] if getattr(config, name) not in (None, (), 1.0, (1.0,))]
