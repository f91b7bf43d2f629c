"""docs/guides/extend.md as it stands there, on the tiny model, and what is said of parts that do not fit."""

import json
import re
import shlex
import sys

import pytest
import torch
from conftest import REPOSITORY, make_text
from safetensors.torch import load_file
from torch import nn

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.bundle.cost_model import predictor_bytes
from dejavu_train.evaluation.command import main as infer_main
from dejavu_train.ground.errors import Unsupported, UserError, exit_on_user_error
from dejavu_train.models.load import load_model
from dejavu_train.run.command import main
from dejavu_train.sparse.model import SparseOPTForCausalLM

PAGE = (REPOSITORY / "docs" / "guides" / "extend.md").read_text(encoding="utf-8")
SMALL = {
    "collect": {"window": 64, "train_tokens": 6000, "val_tokens": 1500, "calibration_tokens": 1500, "device": "cpu"},
    "data.batch_size": 256,
    "mlp": {"steps": 60, "validations": 2, "density": 0.4},
    "heads": {"steps": 20, "validations": 1, "rank": 4},
    "calibrate": {"mlp_density": 0.4, "sensitivity_tokens": 100},
    "trainer": {"accelerator": "cpu", "log_every_n_steps": 5},
}
FLAGS = [
    f"--{section}.{name}={value}" if name else f"--{section}={value}"
    for section, values in SMALL.items()
    for name, value in (values.items() if isinstance(values, dict) else [("", values)])
]


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_opt):
    """A folder in which the page's commands run as they are written, and its run of train.py."""
    folder = tmp_path_factory.mktemp("extend")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        parts = [block for block in blocks("python") if block.startswith("# my_parts.py\n")]
        (folder / "my_parts.py").write_text("\n".join(parts))
        (run,) = blocks("yaml")
        (folder / "my_run.yaml").write_text(run)
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "opt-mini").symlink_to(tiny_opt)
        (folder / "notes").mkdir()
        for i in range(80):
            (folder / "notes" / f"{i}.txt").write_text(make_text(400, seed=i))
        train, _ = commands()
        assert exit_on_user_error(main, [*train, *FLAGS]) == 0
        yield folder
        sys.modules.pop("my_parts", None)


def commands():
    (shell,) = blocks("bash")
    lines = [shlex.split(line) for line in shell.splitlines()]
    assert [line[:2] for line in lines] == [["python", "train.py"], ["python", "infer.py"]]
    return [line[2:] for line in lines]


def test_the_page_trains_calibrates_and_bundles(place):
    import my_parts

    bundle = Bundle.from_pretrained("checkpoints/mine/bundle", predictor_class=my_parts.HiddenLayer)
    spec = bundle.specs[1, "mlp"]
    assert (spec.kind, spec.class_path, spec.init_args) == ("custom", "my_parts.HiddenLayer", {"hidden": 96})
    assert bundle.specs[1, "heads"].kind == "low_rank" and bundle.metadata["text"]["source"] == "my_parts.Notes"
    assert predictor_bytes(spec) == 2 * (48 * 96 + 96 + 96 * 96 + 96)
    folder = place / "checkpoints" / "mine" / "predictors" / "layer_01" / "mlp"
    metadata = json.loads((folder / "predictor.json").read_text())
    assert metadata["loss"]["class_path"] == "my_parts.Focal" and metadata["metrics"]["retained_mass"] > 0.5
    assert "train/gradient_norm" in (folder / "csv" / "version_0" / "metrics.csv").read_text()
    trained, deployed = load_file(folder / "predictor.safetensors"), bundle.predictor(1, "mlp").state_dict()
    assert trained.keys() == deployed.keys()
    for name, tensor in trained.items():
        assert torch.equal(tensor.half().float(), deployed[name])
    # moved to other densities and written again, it stays what it is
    bundle.at(mlp_density=0.3).save_pretrained("again")
    again = Bundle.from_pretrained("again", predictor_class={"my_parts.HiddenLayer": my_parts.HiddenLayer})
    assert again.mean_density("mlp") == pytest.approx(0.3) and not again.predictor(0, "mlp").training


def test_the_page_evaluates(place, capsys, no_pictures):
    _, infer = commands()
    few = ["--tokens=300", "--window=64", "--selections=dense,predicted", "--mlp_density=0.4", "--curve_mlp_density="]
    few += ["--head_density=", "--sparse_from=0", "--timing=false", "--device=cpu"]
    infer[infer.index("installed-readmes")] = str(place / "notes" / "1.txt")
    assert exit_on_user_error(infer_main, [*infer, *few]) == 0
    found = json.loads((place / "checkpoints" / "mine" / "results.json").read_text())
    assert [text["source"] for text in found["texts"]] == ["my_parts.Notes", str(place / "notes" / "1.txt")]
    row = next(row for row in found["quality"] if row["selection"] == "predicted")
    assert 0.2 < row["mlp_selected"] < 0.6
    for more in (["--timing=true", "--timing_backends=gather,cpu"], ["--generate=the token", "--backend=triton"]):
        assert exit_on_user_error(infer_main, [*infer, *few, "--model=checkpoints/opt-mini", *more]) == 2
        assert "my_parts.HiddenLayer; use backend='gather'" in capsys.readouterr().err


def test_the_page_reads_the_bundle_and_mask_agrees(place, tiny_opt, caplog):
    (snippet,) = [block for block in blocks("python") if "from_pretrained" in block]
    names = {}
    exec(snippet, names)
    gather = names["model"]
    ids = torch.randint(3, 300, (2, 20))
    mask = SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), gather.bundle, "mask")
    torch.testing.assert_close(gather(ids).logits, mask(ids).logits, atol=2e-3, rtol=1e-3)
    for backend, ops in (("cpu", "triton"), ("triton", "reference")):
        with pytest.raises(Unsupported, match=r"runs low-rank .* layer 0 is a my_parts.HiddenLayer; use .*gather"):
            SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), gather.bundle, backend, ops=ops)
    chosen = SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), gather.bundle)
    assert chosen.backend == "gather" and "my_parts.HiddenLayer" in caplog.text
    dense = SparseOPTForCausalLM.from_model(load_model(str(tiny_opt)), gather.bundle.at(mlp_density=1.0), "cpu")
    assert dense.backend == "cpu"  # what runs no predictor of your own is not refused


class Other(nn.Module):
    def __init__(self, d_in, n_out):
        super().__init__()
        self.linear = nn.Linear(d_in, n_out)

    def forward(self, x):
        return self.linear(x)


def test_a_bundle_imports_nothing_by_itself(place, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "my_parts", None)  # an import would fail
    with pytest.raises(UserError, match=r"my_parts\.HiddenLayer.*--predictor\.class_path=my_parts\.HiddenLayer"):
        Bundle.from_pretrained("checkpoints/mine/bundle")
    _, infer = commands()
    without = infer[: infer.index("--predictor.class_path")]
    assert exit_on_user_error(infer_main, without) == 2
    assert "--predictor.class_path=my_parts.HiddenLayer" in capsys.readouterr().err

    with pytest.raises(UserError, match="test_extend.Other cannot be called with d_in, n_out, hidden"):
        Bundle.from_pretrained("checkpoints/mine/bundle", predictor_class=Other)

    class Wider(Other):
        def __init__(self, d_in, n_out, hidden):
            super().__init__(d_in, n_out)

    with pytest.raises(UserError, match="stored tensors do not fit Wider"):
        Bundle.from_pretrained("checkpoints/mine/bundle", predictor_class=Wider)


PARTS = """
import torch


class Narrow(torch.nn.Linear):
    def __init__(self, d_in, n_out):
        super().__init__(d_in, n_out // 2)


def rows(logits, batch):
    return logits.mean(-1)


def constant(logits, batch):
    return batch.contribution.sum()


def text(count):
    yield from ((str(i), "A word. " * 50) for i in [*range(count), 0])
"""


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--mlp.predictor.class_path=nowhere.Net"], ["mlp.predictor.class_path nowhere.Net", "No module"]),
        (["--mlp.predictor.class_path=odd_parts.Net"], ["mlp.predictor.class_path odd_parts.Net", "no attribute"]),
        (["--heads.predictor.class_path=Net"], ["heads.predictor.class_path", "package.module.Name"]),
        (["--mlp.predictor={class: a.B}"], ["mlp.predictor", "class_path", "the key class"]),
        (["--mlp.predictor.class_path=odd_parts.rows"], ["mlp.predictor", "no torch.nn.Module"]),
        (["--mlp.predictor.class_path=odd_parts.Narrow"], ["mlp.predictor", "odd_parts.Narrow", "(1, 96)", "(1, 48)"]),
        (["--mlp.predictor={class_path: test_extend.Other, init_args: {x: 1}}"], ["mlp.predictor", "'x'"]),
        (["--mlp.loss.class_path=nowhere.loss"], ["mlp.loss.class_path nowhere.loss"]),
        (["--heads.loss.class_path=odd_parts.rows"], ["heads.loss odd_parts.rows", "scalar", "(2,)"]),
        (["--mlp.loss.class_path=odd_parts.constant"], ["mlp.loss odd_parts.constant", "without a gradient"]),
        (["--text.source.class_path=nowhere.Text"], ["text.source.class_path nowhere.Text"]),
        (["--text.source={class_path: odd_parts.text}"], ["text.source: odd_parts.text", "count"]),
        (["--text.source={class_path: odd_parts.text, init_args: {count: 3}}"], ["two documents have the id 0"]),
        (["--trainer.callbacks=nowhere.Callback"], ["trainer.callbacks", "nowhere.Callback"]),
        (["--mlp.predictor.class_path=test_extend.Other", "--calibrate.dtype=int4"], ["int4", "test_extend.Other"]),
        (["--mlp.predictor.class_path=test_extend.Other", "--calibrate.cascade=0.99"], ["cascade", "Other"]),
        (["--mlp.predictor.class_path=test_extend.Other", "--tune.steps=3"], ["tune.steps", "test_extend.Other"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else None,
)  # fmt: skip
def test_what_does_not_fit_is_named_before_anything_is_collected(
    tiny_opt, text_file, tmp_path, monkeypatch, capsys, flags, words
):
    (tmp_path / "odd_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("odd_parts", None)
    base = [f"--model={tiny_opt}", f"--output={tmp_path / 'run'}", f"--text.source={text_file}", "--mlp.rank=8", *FLAGS]
    assert exit_on_user_error(main, [*base, *flags]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and all(word in errors[0] for word in words), errors
    assert not list((tmp_path / "run").rglob("*.h5"))
