"""Calls of a program that load, copy, save or quantise the model.

Each call does to the truth what it does to the model, from the same values, after the model has taken it.
"""

import copy
import io
import pickle
import random
import shutil
from typing import Any

import torch
from transformers import AutoModelForCausalLM, OPTForCausalLM

from dejavu_train.ground.errors import UserError

from .edit import draw_edit, edit
from .judge import Finding, expect, same_weights
from .world import DTYPES, World, rounded


def draw_load(rng: random.Random, profile: dict[str, Any]) -> dict[str, Any]:
    kinds = ["from_model"] * 4 + ["from_pretrained"] * 3 + ["joint"] * 2 + ["stray"]
    return {"kind": "coded" if profile["coded"] else rng.choice(kinds), "dtype": profile["dtype"]}


def load(world: World, call: dict[str, Any]) -> None:
    kind, dtype = call["kind"], call["dtype"]
    world.bundle, world.coded, world.lora, world.drifts = world.target_bundle(), False, False, False
    dense, truth, given = world.base.dense(dtype), world.base.dense(dtype), None
    if kind == "coded":
        dense, truth = rounded(world, dense)
    if kind in ("from_model", "coded"):
        model, given = world.wrap(dense), dense
    elif kind == "from_pretrained":
        model = world.loaded(world.base.folder, world.bundle, dtype)
    elif kind == "joint":
        folder = world.folder()
        world.loaded(world.base.folder, world.bundle, "float32").save_pretrained(folder)
        if world.backend == "reference":
            model = world.loaded(folder, None, dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **world.options())
    else:
        model = _load_beside_a_stray(world, dense, dtype)
    world.coded, world.truth = kind == "coded", truth
    world.take(model, given)


def _load_beside_a_stray(world: World, dense: OPTForCausalLM, dtype: str) -> Any:
    """A sharded folder with its index, and a model.safetensors of other weights that transformers takes first."""
    folder, other = world.folder(), world.folder()
    shutil.copytree(world.base.folder, folder, dirs_exist_ok=True)
    (folder / "model.safetensors").unlink()
    own = world.base.dense()
    own.save_pretrained(folder, max_shard_size="100KB")
    for parameter in own.model.decoder.layers.parameters():
        parameter.data.mul_(1.5)
    own.save_pretrained(other)
    world.bundle.check_model(str(folder))  # made for the shards
    shutil.copy(other / "model.safetensors", folder)
    try:
        model = world.loaded(folder, world.bundle, dtype)
    except UserError as refusal:
        expect("other weights" in str(refusal) or "model.safetensors" in str(refusal), f"load: refused by: {refusal}")
        return world.loaded(world.base.folder, world.bundle, dtype)
    try:
        same_weights(model, dense)
    except Finding as found:
        raise Finding(f"load: a bundle was accepted for weights that it was not made for: {found}") from None
    return model


def draw_copy(rng: random.Random, profile: dict[str, Any]) -> dict[str, Any]:
    kind = rng.choice(("deepcopy", "deepcopy", "pickle", "save"))
    return {"kind": kind, "keep": rng.choice(("copy", "copy", "original")), "spoil": rng.random() < 0.7}


def copied(world: World, call: dict[str, Any]) -> None:
    kind, whole = call["kind"], world.called
    if kind == "deepcopy":
        made = copy.deepcopy(whole)
    elif kind == "pickle":
        made = pickle.loads(pickle.dumps(whole))
    else:
        file = io.BytesIO()
        torch.save(whole, file)
        file.seek(0)
        made = torch.load(file, weights_only=False)
    inner = made.base_model.model if world.called is not world.model else made
    spoiled = world.model if call["keep"] == "copy" else inner
    if call["spoil"]:
        with torch.no_grad():
            for block in spoiled.model.decoder.layers:
                for parameter in block.parameters():
                    parameter.mul_(-0.5)
    if call["keep"] == "copy":
        world.model, world.called, world.given = inner, made, None


def draw_quantise(rng: random.Random, profile: dict[str, Any]) -> dict[str, Any]:
    return {}


def quantise(world: World, call: dict[str, Any]) -> None:
    """The weights as they are, in 4 bits of our own, and a new model around them."""
    if world.coded or world.lora or world.dtype != torch.float32 or world.made.get("cascade"):
        return
    dense, truth = rounded(world, world.truth)
    world.take(world.wrap(dense), dense)
    world.truth, world.coded = truth, True


def draw_save(rng: random.Random, profile: dict[str, Any]) -> dict[str, Any]:
    kinds = ("new", "new", "over", "sharded")
    return {"kind": rng.choice(kinds), "edit": draw_edit(rng, profile), "auto": rng.random() < 0.4}


def save(world: World, call: dict[str, Any]) -> None:
    """save_pretrained and load again. ``over``: from a sharded folder, edited, saved over it."""
    if world.lora:
        return
    folder, dtype = world.folder(), next(name for name, kind in DTYPES.items() if kind == world.dtype)
    if call["kind"] == "over":
        world.model.save_pretrained(folder, max_shard_size="100KB")
        world.take(world.loaded(folder, None, dtype))
        edit(world, call["edit"] | {"way": "no_grad"})
    world.model.save_pretrained(folder, **({"max_shard_size": "100KB"} if call["kind"] == "sharded" else {}))
    if call["auto"] and world.backend != "reference":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **world.options())
    else:
        model = world.loaded(folder, None, dtype)
    world.take(model)
    if not world.coded:
        dense = OPTForCausalLM.from_pretrained(folder, dtype=world.dtype)
        same_weights(dense, world.truth, 1e-6 if world.drifts else 0.0)
