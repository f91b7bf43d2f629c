"""What may import what: each rule runs in a process of its own in which the forbidden packages cannot be found.

Where torch is allowed, the process is a fork of one that has imported torch alone.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY
from forks import Forks

TRAINING_ONLY = ("lightning", "pytorch_lightning", "wandb", "h5py", "datasets", "torchmetrics", "lm_eval")
BLOCK = """
import importlib.machinery, sys
blocked = set({blocked!r})
for name in [name for name in sys.modules if name.split(".")[0] in blocked]:
    del sys.modules[name]
finder = importlib.machinery.PathFinder
find = finder.find_spec
hide = lambda cls, name, *rest: None if name.split(".")[0] in blocked else find(name, *rest)
finder.find_spec = classmethod(hide)
"""


ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def with_torch():
    with Forks(["torch"], ENVIRONMENT) as forks:
        yield lambda code, blocked=(): forks.run(REPOSITORY, BLOCK.format(blocked=blocked) + code)


def python(code: str, blocked: tuple[str, ...] = ()) -> str:
    command = [sys.executable, "-c", BLOCK.format(blocked=blocked) + code]
    done = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_inference_needs_no_training_package_nor_numba_and_what_needs_no_kernel_no_triton(with_torch):
    code = """
import dejavu_train.models.int4_quantizer, dejavu_train.engine.plan
blocked.remove("triton")
from dejavu_train import Bundle, SparseOPTForCausalLM
import dejavu_train.evaluation.run, dejavu_train.evaluation.command, dejavu_train.bundle.allocation
import dejavu_train.engine.backend
import runpy
runpy.run_path("infer.py", run_name="infer")
"""
    with_torch(code, (*TRAINING_ONLY, "matplotlib", "accelerate", "numba", "triton"))


def test_inference_loads_no_training_package_even_if_there(with_torch):
    """Nor does transformers, which is imported before ours, take our folder for the package kernels. The package alone
    costs nothing."""
    code = f"""
import sys, torch
from transformers import OPTForCausalLM
from transformers.utils import is_kernels_available
assert not is_kernels_available()
before = set(sys.modules)
import dejavu_train
heavy = ("dejavu_train.engine", "dejavu_train.sparse.model", "dejavu_train.kernels.common", "numba", "triton")
print(sorted((set(sys.modules) - before).intersection(heavy)))
import dejavu_train.evaluation.run, dejavu_train.engine.backend
print(sorted(set({TRAINING_ONLY!r}) & set(sys.modules)))
"""
    alone, loaded = with_torch(code)
    assert alone == loaded == "[]"


def test_kernels_import_torch_and_triton_only(with_torch):
    code = """
import importlib, pkgutil, sys
import dejavu_train
before = set(sys.modules)
import dejavu_train.kernels as kernels
names = [found.name for found in pkgutil.walk_packages(kernels.__path__, "dejavu_train.kernels.")]
for name in names:
    importlib.import_module(name)
assert sum(name.count(".") > 2 for name in names) > 40, names
print(sorted(name for name in set(sys.modules) - before
             if name.startswith("dejavu_train") and not name.startswith("dejavu_train.kernels")))
"""
    blocked = ("transformers", "numba", "lightning", "safetensors", "huggingface_hub", "tqdm", "yaml")
    assert with_torch(code, blocked) == ["[]"]


def test_the_package_of_kernels_costs_nothing():
    code = "import dejavu_train.kernels, sys"
    code += "; print(sorted({'torch', 'triton', 'transformers', 'numba'} & set(sys.modules)))"
    assert python(code).strip() == "[]"


def test_kernels_have_one_house():
    """The folder on top is a link, and settings name modules by their dotted names."""
    assert os.readlink(REPOSITORY / "kernels") == "dejavu_train/kernels"
    assert not [path for path in (REPOSITORY / "dejavu_train" / "kernels").rglob("*") if path.is_symlink()]
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]
    named = [module for each in settings["mypy"]["overrides"] for module in each["module"] if "kernels" in module]
    assert named == ["dejavu_train.kernels.*", "dejavu_vllm.kernels.*"]
    assert "kernels" in settings["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]


FOLDER_NAME = re.compile(r"kernels(\.\w+)*\.?")
NAMED = re.compile(r"\b(import|from)\s.*\bkernels\b|[\"']kernels\.")  # a source without it has no such name


def folder_names(source: str) -> Iterator[str]:
    """Dotted names in a source that begin with the folder's name: imports, and texts such as "kernels.mlp"."""
    for node in ast.walk(ast.parse(source)) if NAMED.search(source) else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if FOLDER_NAME.fullmatch(alias.name))
        elif isinstance(node, ast.ImportFrom) and not node.level and FOLDER_NAME.fullmatch(node.module or ""):
            yield str(node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            yield from (node.value,) if FOLDER_NAME.fullmatch(node.value) else ()


def test_no_module_is_named_by_its_folder():
    known = subprocess.check_output(["git", "ls-files", "*.py"], cwd=REPOSITORY, text=True).splitlines()
    sources = {name: (REPOSITORY / name).read_text("utf-8") for name in known if (REPOSITORY / name).is_file()}
    assert len(sources) > 300
    ours = Path(__file__).relative_to(REPOSITORY).as_posix()
    assert {
        name: list(folder_names(text)) for name, text in sources.items() if name != ours and [*folder_names(text)]
    } == {}
    planted = "import kernels.mlp\nfrom kernels import mlp\nname.startswith('kernels.')\npatch('kernels.mlp.pack.X')"
    assert len(list(folder_names(planted))) == 4


def test_kernels_keep_to_names_that_triton_3_6_can_follow():
    """It reads the source of what it compiles, and of the functions that compute its constants. There a target within a
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


def test_importing_the_package_imports_no_torch():
    code = "import dejavu_train, sys\nprint('torch' in sys.modules)"
    code += "\ntry:\n    dejavu_train.nothing\nexcept AttributeError as e:\n    print(e)"
    torch_loaded, message = python(code).splitlines()
    assert torch_loaded == "False" and "has no attribute" in message
