"""The calls that change a model, by name: how each is drawn, what it does, and how often it comes."""

import random
from collections.abc import Callable
from typing import Any

from .adapt import adapt, draw_adapt, draw_poison, draw_train, draw_twin, poison, train, twin
from .edit import bundles, draw_bundle, draw_edit, draw_move, edit, move
from .store import copied, draw_copy, draw_load, draw_quantise, draw_save, load, quantise, save
from .world import World

Draw = Callable[[random.Random, dict[str, Any]], dict[str, Any]]
Call = Callable[[World, dict[str, Any]], None]

DRAWS: dict[str, tuple[Draw, Call, int]] = {
    "copy": (draw_copy, copied, 4),
    "edit": (draw_edit, edit, 6),
    "adapt": (draw_adapt, adapt, 5),
    "move": (draw_move, move, 3),
    "train": (draw_train, train, 2),
    "quantise": (draw_quantise, quantise, 1),
    "save": (draw_save, save, 3),
    "bundle": (draw_bundle, bundles, 3),
    "twin": (draw_twin, twin, 2),
    "poison": (draw_poison, poison, 2),
    "load": (draw_load, load, 1),
}
