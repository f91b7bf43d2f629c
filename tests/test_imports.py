"""What may import what: each rule runs in a fresh process in which the forbidden packages cannot be found."""

import ast
import os
import subprocess
import sys

from conftest import REPOSITORY

TRAINING_ONLY = ("lightning", "pytorch_lightning", "wandb", "h5py", "datasets", "torchmetrics", "lm_eval")
BLOCK = """
import importlib.machinery
finder = importlib.machinery.PathFinder
find = finder.find_spec
hide = lambda cls, name, *rest: None if name.split(".")[0] in {blocked!r} else find(name, *rest)
finder.find_spec = classmethod(hide)
"""


def python(code: str, blocked: tuple[str, ...] = (), cwd=REPOSITORY) -> str:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", (BLOCK.format(blocked=blocked) if blocked else "") + code]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_inference_needs_no_training_package():
    code = """
from dejavu_train import Bundle, SparseOPTForCausalLM
import dejavu_train.evaluation.run, dejavu_train.evaluation.cli, dejavu_train.bundle.allocation
import dejavu_train.engine.backend
import runpy
runpy.run_path("infer.py", run_name="infer")
"""
    python(code, (*TRAINING_ONLY, "matplotlib", "accelerate"))


def test_inference_loads_no_training_package_even_if_there():
    code = "import dejavu_train.evaluation.run, dejavu_train.engine.backend, sys"
    code += f"; print(sorted(set({TRAINING_ONLY!r}) & set(sys.modules)))"
    assert python(code).strip() == "[]"


def test_kernels_import_torch_and_triton_only():
    code = """
import pkgutil, importlib, kernels, sys
for found in pkgutil.walk_packages(kernels.__path__, "kernels."):
    importlib.import_module(found.name)
assert "dejavu_train" not in sys.modules
"""
    blocked = ("dejavu_train", "transformers", "lightning", "safetensors", "huggingface_hub", "tqdm", "yaml")
    python(code, blocked)


def test_kernels_keep_to_names_that_triton_3_6_can_follow():
    """It reads the source of what it compiles, and of the functions that compute its constants: a target within a
    target (`for i, (a, b) in ..`) ends with "unhashable type: 'list'" in the first call of a process."""
    found = []
    for path in (REPOSITORY / "kernels").rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and any(
                "triton." in ast.unparse(d) for d in function.decorator_list
            ):
                for node in ast.walk(function):
                    targets = getattr(node, "targets", [getattr(node, "target", None)])
                    if isinstance(node, ast.For | ast.Assign) and (
                        len(targets) > 1
                        or (
                            isinstance(targets[0], ast.Tuple)
                            and any(isinstance(e, ast.Tuple | ast.List) for e in targets[0].elts)
                        )
                    ):
                        found.append(f"{path.name}:{node.lineno}")
    assert not found


def test_what_needs_no_kernel_is_loaded_without_triton():
    python("import dejavu_train.models.int4_quantizer, dejavu_train.engine.plan", ("triton",))


def test_transformers_is_well_beside_our_kernels_folder():
    code = """
import transformers
from transformers import OPTForCausalLM
import kernels, pathlib
assert pathlib.Path(kernels.__file__).parent.parent == pathlib.Path.cwd()
assert not hasattr(kernels, "__version__")
"""
    python(code)
    assert "transformers" not in python("import kernels, sys; print([m for m in sys.modules if m == 'transformers'])")


def test_importing_the_package_costs_nothing():
    code = """
import time, torch, transformers
start = time.perf_counter()
import dejavu_train
print(time.perf_counter() - start)
"""
    assert float(python(code)) < 0.1
    assert python("import dejavu_train, sys; print('torch' in sys.modules)").strip() == "False"
    assert "has no attribute" in python(
        "import dejavu_train\ntry:\n    dejavu_train.nothing\nexcept AttributeError as e:\n    print(e)"
    )
