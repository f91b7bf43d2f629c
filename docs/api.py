"""Reads docstrings, writes the API pages: ``make docs``, then open build/docs/dejavu_train.html.

``dejavu_train`` imports its public names when they are asked for; pdoc shows what a module has, so they are asked for
here first. evaluation.lm_eval is left out: it needs the extra ``eval``.
"""

import pkgutil
from pathlib import Path

import pdoc

import dejavu_train


def rooms() -> list[str]:
    """What is documented: the public names, every room and module of dejavu_train, and the kernels."""
    found = [f"dejavu_train.{module.name}" for module in pkgutil.iter_modules(dejavu_train.__path__)]
    return ["dejavu_train", *found, "kernels", "!dejavu_train.evaluation.lm_eval"]


if __name__ == "__main__":
    for name in dejavu_train.__all__:
        setattr(dejavu_train, name, getattr(dejavu_train, name))
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*rooms(), output_directory=Path("build/docs"))
