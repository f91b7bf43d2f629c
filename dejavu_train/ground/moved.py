"""Import names of version 0.2, which still work until 0.4: each one warns with the name of today."""

import importlib
import importlib.util
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

GROUND = "children class_path errors experiments files locks machine progress ranges signals"
RUN = "check crew estimate footprint job_process own_text pipeline plan worker"
ROOMS = {
    **{name: f"ground.{name}" for name in GROUND.split()},
    **{name: f"run.{name}" for name in RUN.split()},
    **{name: f"cli.{name}" for name in ("commands", "flags")},
    **{name: f"training.{name}" for name in ("config", "sizes", "stages")},
    **{name: f"extras.hosts.{name}" for name in ("forecast", "hardware", "mirror", "store")},
    **{f"evaluation.{name}": f"extras.{name}" for name in ("generation", "survey")},
    "evaluation.cli": "evaluation.command",
    "evaluation.lm_eval": "extras.tasks",
    **{"models.opt": "models.load", "models.shape": "models.config_values"},
    "quantize.export": "extras.export",
    "run_folder": "run.folder",
    "serving": "extras.serving",
    "tasks": "run.task",
    "training.pretrain": "extras.pretrain",
}
NAMES = {  # renamed within a module
    **{"load_opt": "load_model", "read_shape": "read_dims", "Served": "ServedModel", "Surveyed": "SurveyResult"},
    **{"Continued": "Continuations", "Ended": "LineEnd", "Guarded": "RequestGuard", "Held": "LockHeld"},
}


class MovedModules(MetaPathFinder, Loader):
    """Finder of modules by their names of version 0.2. It is asked after all others, so it hides nothing."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        old = fullname.removeprefix("dejavu_train.")
        room = next((room for room in ROOMS if old == room or old.startswith(room + ".")), None)
        if old == fullname or room is None:
            return None
        new = f"dejavu_train.{ROOMS[room]}{old.removeprefix(room)}"
        return importlib.util.spec_from_loader(fullname, self, origin=new, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None and spec.origin is not None
        real = importlib.import_module(spec.origin)
        warnings.warn(f"{module.__name__} is now {real.__name__}, until version 0.4", DeprecationWarning, stacklevel=2)
        if not hasattr(real, "__path__"):  # no package: a name that is missing is no module
            del module.__path__
        module.__dict__["__getattr__"] = lambda name: getattr(real, str(NAMES.get(name, name)))


def find_moved() -> None:
    """Let Python find modules by their names of version 0.2."""
    sys.meta_path.append(MovedModules())
