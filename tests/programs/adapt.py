"""Calls of a program after which, or within which, modules are more than their weights. training. Bad numbers.

Each call does to the truth what it does to the model, from the same values, after the model has taken it.
"""

import copy
import math
import random
import re
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dejavu_train.ground.errors import UserError
from dejavu_train.models.grouped import GroupedProjection

from .compute import draw_compute, run_compute
from .edit import draw_density
from .judge import expect, judge_loss
from .oracle import near_of, oracle_of
from .world import LINEAR, PATHS, World, submodule

SUMMED = ("v_proj", "out_proj", "fc1", "fc2")  # attention's own kernels lose a NaN in its scores
TARGETS = (["q_proj", "v_proj"], ["fc1", "fc2"], ["out_proj", "k_proj"], [path.split(".")[-1] for path in LINEAR])


def draw_adapt(rng: random.Random, profile: dict[str, Any]) -> dict[str, Any]:
    kind = rng.choice(("around", "around", "inside", "hook", "hook", "patched", "parametrised", "merge"))
    return {
        "kind": kind, "targets": rng.choice(TARGETS), "path": rng.choice(PATHS), "seed": rng.randrange(1 << 20),
        "then": draw_compute(rng, profile, threads=False),
    }  # fmt: skip


def _with_lora(model: Any, targets: list[str], seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    try:
        made = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False))
    except ValueError as error:
        raise UserError(f"peft: {error}") from None
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(made.named_parameters()):
        if "lora_" in name:
            parameter.data.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    return made.eval()


def adapt(world: World, call: dict[str, Any]) -> None:
    kind = call["kind"]
    if kind in ("around", "inside"):
        if world.lora or world.coded:
            return
        if kind == "around":
            world.called = _with_lora(world.model, call["targets"], call["seed"])
        else:
            dense = copy.deepcopy(world.truth)
            _with_lora(dense, call["targets"], call["seed"])
            world.take(world.wrap(dense), dense)
        _with_lora(world.truth, call["targets"], call["seed"])
        world.lora = True
    elif kind == "merge":
        if not world.lora or world.called is world.model:
            return
        world.called.merge_adapter()
        for module in world.truth.modules():
            if hasattr(module, "lora_A") and hasattr(module, "merge"):
                module.merge()
        world.drifts = True
    else:
        _for_a_while(world, call)


class Scaled(nn.Module):
    """A parametrisation: the weight times a number."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 1.5


def _scaled(_module: Any, _args: Any, output: Tensor) -> Tensor:
    return output * 1.5


def _patched(module: Any, x: Tensor) -> Tensor:
    return type(module).forward(module, x) * 1.5


def _for_a_while(world: World, call: dict[str, Any]) -> None:
    """A module does more than its weight says, for one computing call."""
    path = call["path"]
    if call["kind"] == "parametrised" and not isinstance(submodule(world.model, path).weight, nn.Parameter):
        return  # codes, or rows of an engine: torch itself refuses
    cascade = world.made.get("cascade") and world.sparse and path.endswith("fc1")
    if cascade and call["kind"] != "parametrised":
        path = path.replace("fc1", "fc2")  # what a hook on fc1 sees is not said where its planes stand in for it
    undo: list[Callable[[], None]] = []
    for model in (world.model, world.truth):
        module = submodule(model, path)
        if call["kind"] == "hook":
            undo.append(module.register_forward_hook(_scaled).remove)
        elif call["kind"] == "patched":
            module.forward = types.MethodType(_patched, module)
            undo.append(lambda module=module: module.__dict__.pop("forward"))
        else:
            parametrize.register_parametrization(module, "weight", Scaled())
            undo.append(
                lambda module=module: parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
            )
    try:
        run_compute(world, call["then"])
    finally:
        for step in undo:
            step()


def draw_train(rng: random.Random, profile: dict[str, Any]) -> dict[str, Any]:
    return {"steps": rng.randint(1, 3), "seed": rng.randrange(1 << 20)}


def train(world: World, call: dict[str, Any]) -> None:
    """Gradients through the backend mask, and some steps with them. Other backends refuse the backward pass."""
    if world.dtype != torch.float32 or world.coded or isinstance(world.start, str) or world.backend == "reference":
        return
    ids = world.tokens(torch.Generator().manual_seed(call["seed"]), 2, 12)
    world.called.zero_grad()
    twin = oracle_of(world.truth, world.bundle, world.start, double=False)
    world.truth.zero_grad()
    loss = world.called(ids, labels=ids).loss
    loss.backward()
    logits = twin(ids).logits
    near = bool(near_of(twin, ids).any())
    want = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    want.backward()
    if not near:
        judge_loss(loss.detach(), logits.detach(), ids, None, world.dtype, world.sparse)
    theirs = dict(world.truth.named_parameters())
    for name, parameter in world.model.named_parameters():
        right = theirs.get(name)
        if right is None or right.grad is None or not parameter.requires_grad:
            continue
        expect(parameter.grad is not None or not right.grad.any(), f"train: {name} has no gradient")
        if parameter.grad is None or near:
            continue
        off = float((parameter.grad - right.grad).abs().max())
        limit = 2e-3 * float(right.grad.abs().max()) + 1e-6
        expect(off <= limit, f"train: the gradient of {name} is off by {off:.3g}")
    for _ in range(call["steps"]):
        for name, parameter in world.model.named_parameters():
            if name in theirs and theirs[name].grad is not None and parameter.requires_grad:
                step = 0.05 * theirs[name].grad
                with torch.no_grad():
                    parameter.sub_(step)
                    theirs[name].sub_(step)
    world.called.zero_grad()
    world.truth.zero_grad()
    world.called.eval()


def draw_twin(rng: random.Random, profile: dict[str, Any]) -> dict[str, Any]:
    backend = rng.choice(("mask", "gather", "auto", "reference"))
    other = {**profile, "backend": backend}
    return {"backend": backend, "density": draw_density(rng), "then": draw_compute(rng, other, threads=False)}


def twin(world: World, call: dict[str, Any]) -> None:
    """A second sparse model around the same dense one, with another backend and density, and then the first again."""
    if world.given is None:
        return
    other = copy.copy(world)
    other.backend, other.density = call["backend"], tuple(call["density"])
    other.bundle = other.target_bundle()
    other.take(other.wrap(world.given), world.given)
    run_compute(other, call["then"])


def draw_poison(rng: random.Random, profile: dict[str, Any]) -> dict[str, Any]:
    # float32 has no "large": LayerNorm's squares overflow and make finite numbers of it, in transformers as well.
    kinds = ("large", "nan", "sharp", "sharp", "sharp") if profile["dtype"] == "float16" else ("nan", "inf")
    return {
        "kind": rng.choice(kinds), "path": rng.choice([path for path in PATHS if path.endswith(SUMMED)]),
        "then": draw_compute(rng, profile, threads=False),
    }  # fmt: skip


def poison(world: World, call: dict[str, Any]) -> None:
    """Numbers that are not finite, or attention scores beyond half precision, for one computing call."""
    kind = call["kind"]
    if world.coded or world.lora or (kind == "sharp" and (world.dtype != torch.float16 or world.sparse)):
        return
    places = [(path, part) for path in PATHS for part in ("weight", "bias")]
    kept = {place: getattr(submodule(world.truth, place[0]), place[1]).detach().clone() for place in places}
    for model in (world.model, world.truth):
        with torch.no_grad():
            if kind == "sharp":
                for block in model.model.decoder.layers:
                    for name in ("q_proj", "k_proj"):
                        projection = block.self_attn.get_submodule(name)
                        _put(projection, "weight", projection.weight * 250)
                        projection.bias.mul_(250)
            else:
                value = {"nan": math.nan, "inf": math.inf, "large": 30000.0}[kind]
                submodule(model, call["path"]).bias.view(-1)[3] = value
    try:
        _refused_or_right(world, call, kind)
    finally:
        for model in (world.model, world.truth):
            with torch.no_grad():
                for path, part in places:
                    _put(submodule(model, path), part, kept[path, part])


def _put(module: torch.nn.Module, part: str, value: torch.Tensor) -> None:
    """Set a tensor of a module. The weight of a projection that an engine of a GPU holds is a copy of its rows."""
    held = module.rows if part == "weight" and isinstance(module, GroupedProjection) else getattr(module, part)
    held.copy_(value.view_as(held))


def _refused_or_right(world: World, call: dict[str, Any], kind: str) -> None:
    try:
        run_compute(world, call["then"])
    except UserError as refusal:
        if kind == "sharp" or not re.search("finite|NaN", str(refusal)):
            raise
