"""Kernel tests run natively on a GPU, else in Triton's interpreter, asked for before triton is imported."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    from kernels.launch import INTERPRET

    for item in items:
        if "/kernels/" not in str(item.path):
            continue
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        elif not INTERPRET:
            item.add_marker(pytest.mark.skip(reason="triton was imported before: run with TRITON_INTERPRET=1"))


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"
