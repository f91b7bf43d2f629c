"""Triton kernels of sparse decoding, each with its plain-torch reference. The folder ``kernels`` on top is a link here.

Nothing here imports `dejavu_train` outside this package. Import modules by name: importing the package loads nothing.
"""

if __name__ == "kernels":  # found by that link, where Hugging Face's package of this name is meant: it takes the place
    import importlib.machinery
    import importlib.util
    import os
    import sys

    _here = os.path.realpath(os.path.dirname(__file__))
    _others = [place for place in sys.path if os.path.realpath(os.path.join(place, "kernels")) != _here]
    _spec = importlib.machinery.PathFinder.find_spec("kernels", _others)
    if _spec is not None and _spec.loader is not None:
        sys.modules["kernels"] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules["kernels"])
    __path__ = []  # nothing of ours is loaded twice
