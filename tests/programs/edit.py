"""Calls of a program that change weights, their dtype, or the bundle.

Each call does to the truth what it does to the model, from the same values, after the model has taken it.
"""

import copy
import random
from typing import Any

import torch
from torch import Tensor, nn

from .world import DTYPES, LINEAR, PATHS, World, submodule

WAYS = ("no_grad", "data", "assign", "parameter", "module", "state", "state", "assigned state", "optimizer", "given")


def draw_edit(rng: random.Random, profile: dict[str, Any]) -> dict[str, Any]:
    part = rng.choice(("weight", "weight", "bias"))
    paths = rng.sample(PATHS, rng.randint(1, 3))
    way, factor = rng.choice(WAYS), rng.choice((0.4, 0.6, 1.5, 2.0))
    if way in ("no_grad", "data", "state", "given") and rng.random() < 0.3:  # the others would untie the LM head
        paths.append("embed_tokens")
    return {"way": way, "paths": paths, "part": part, "factor": factor, "seed": rng.randrange(1 << 20)}


def edit(world: World, call: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(call["seed"])
    changes: list[tuple[str, str, Tensor]] = []
    way = call["way"]
    for path in call["paths"]:
        part = "weight" if path == "embed_tokens" else call["part"]
        if world.coded and part == "weight" and path.split(".", 2)[-1] in LINEAR:
            _scale_codes(world, path, 2.0 if call["factor"] > 1 else 0.5, call["way"])
            continue
        if not isinstance(getattr(submodule(world.model, path), part), nn.Parameter):
            way = "state"  # rows that the engine holds: their weight is a copy
        old = getattr(submodule(world.truth, path), part).detach()
        noise = torch.randn(old.shape, generator=generator).to(old.dtype) * old.float().std().to(old.dtype)
        changes.append((path, part, old * call["factor"] + 0.2 * noise))
    _write(world.given if way == "given" and world.given is not None else world.model, way, changes)
    for path, part, value in changes:
        getattr(submodule(world.truth, path), part).data.copy_(value)


def _scale_codes(world: World, path: str, factor: float, way: str) -> None:
    """A matrix in 4 bits times a power of two, through its scales."""
    if way == "state":
        state = {name: tensor.clone() for name, tensor in world.model.state_dict().items()}
        state[f"model.decoder.{path}.scales"] *= factor
        world.model.load_state_dict(state)
    else:
        submodule(world.model, path).scales.mul_(factor)
    submodule(world.truth, path).weight.data.mul_(factor)


def _write(model: Any, way: str, changes: list[tuple[str, str, Tensor]]) -> None:
    if way in ("state", "assigned state"):
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        names = {id(module): name for name, module in model.named_modules()}
        for path, part, value in changes:
            state[f"{names[id(submodule(model, path))]}.{part}"] = value.clone()
        if "lm_head.weight" in state and model.config.tie_word_embeddings:
            state["lm_head.weight"] = state["model.decoder.embed_tokens.weight"]
        model.load_state_dict(state, assign=way == "assigned state")
        return
    for path, part, value in changes:
        module = submodule(model, path)
        parameter = getattr(module, part)
        if way == "data":
            parameter.data.copy_(value)
        elif way == "assign":
            parameter.data = value.clone()
        elif way == "parameter" and path != "embed_tokens":
            setattr(module, part, nn.Parameter(value.clone(), requires_grad=parameter.requires_grad))
        elif way == "module" and isinstance(module, nn.Linear) and model.model.decoder.get_submodule(path) is module:
            made, (parent, _, name) = copy.deepcopy(module), path.rpartition(".")
            getattr(made, part).data.copy_(value)
            setattr(model.model.decoder.get_submodule(parent), name, made)
        elif way == "optimizer" and parameter.requires_grad:
            parameter.grad = parameter.detach() - value
            torch.optim.SGD([parameter], lr=1.0).step()
            parameter.grad = None
            with torch.no_grad():
                parameter.copy_(value)  # the step's rounding
        else:
            with torch.no_grad():
                parameter.copy_(value)


def draw_move(rng: random.Random, profile: dict[str, Any]) -> dict[str, Any]:
    ways = ("half", "bfloat16", "float", "float", "to", "round trip", "cpu")
    way = "cpu" if profile["backend"] == "cpu" or profile["coded"] else rng.choice(ways)
    return {"way": way, "dtype": rng.choice(list(DTYPES))}


def move(world: World, call: dict[str, Any]) -> None:
    if world.coded and call["way"] != "cpu":
        return  # codes keep their numbers, which the truth's matrices would not
    for model in (world.called, world.truth):
        if call["way"] == "to":
            model.to(DTYPES[call["dtype"]])
        elif call["way"] == "round trip":
            model.bfloat16()
            model.to(torch.float32)
        elif call["way"] == "cpu":
            model.to("cpu")
        else:
            getattr(model, call["way"])()


def draw_bundle(rng: random.Random, profile: dict[str, Any]) -> dict[str, Any]:
    return {"start": rng.choice((0, 0, "prompt", 4)), "density": draw_density(rng)}


def draw_density(rng: random.Random) -> list[Any]:
    return [rng.choice((0.1, 0.2, 0.3, 0.5)), rng.choice((0.3, 0.5, 0.7, 1.0)), rng.random() < 0.2]


def bundles(world: World, call: dict[str, Any]) -> None:
    """Another density by set_bundle, and another sparse_from."""
    density, world.density = world.density, tuple(call["density"])
    try:
        bundle = world.target_bundle()
        world.model.set_bundle(bundle)
    except Exception:
        world.density = density
        raise
    world.bundle, world.start = bundle, call["start"]
    world.model.sparse_from = call["start"]
