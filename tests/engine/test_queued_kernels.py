"""Every kind of step queues the kernels that it always queued, in their order."""

import json
import os
from pathlib import Path

import pytest
import torch
from queued import CASES, queue_of

LISTED = Path(__file__).with_name("queued_kernels.json")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launches are noted where the interpreter would run")


def test_every_case_queues_its_list(monkeypatch):
    """WRITE_QUEUED_KERNELS=1 writes the list anew: a step that queues other kernels is another step, so say why."""
    found = {name: queue_of(name, monkeypatch).split() for name in CASES}
    if os.environ.get("WRITE_QUEUED_KERNELS"):
        LISTED.write_text(json.dumps({name: " ".join(queue) for name, queue in found.items()}, indent=1) + "\n")
    listed = json.loads(LISTED.read_text())
    assert listed.keys() == found.keys()
    for name, queue in found.items():
        assert queue == listed[name].split(), name
