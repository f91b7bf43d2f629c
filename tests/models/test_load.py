"""opt.py and files.py: shapes, the weight hash, refusals by name, atomic writing."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from dejavu_train.ground.errors import UserError, exit_on_user_error
from dejavu_train.ground.files import replacing, sha256_file, write_json
from dejavu_train.models.config_values import read_dims
from dejavu_train.models.load import load_model, load_tokenizer, resolve_device, weight_hash


@pytest.fixture
def copy(tiny_opt, tmp_path):
    return shutil.copytree(tiny_opt, tmp_path / "copy")


def test_large_tensors_are_sampled_and_full_reads_all(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    big = torch.zeros(1 << 20, dtype=torch.uint8)
    hashes = []
    for place in (None, 100_000, 0):  # 100,000 lies between the samples, 0 in the first
        changed = big.clone()
        if place is not None:
            changed[place] = 1
        save_file({"w": changed}, tmp_path / "model.safetensors")
        hashes.append((weight_hash(str(tmp_path)), weight_hash(str(tmp_path), full=True)))
    assert hashes[0][0] == hashes[1][0] != hashes[2][0]
    assert len({full for _, full in hashes}) == 3


def test_bad_model_folders_are_one_clear_line(copy, tmp_path):
    for name, message in (
        ("no/such/folder", "no model folder"),
        ("my models/tiny", "no model folder"),
        (str(tmp_path), "no config.json"),
    ):
        for action in (load_model, load_tokenizer, weight_hash, read_dims):
            with pytest.raises(UserError, match=message):
                action(name)
    stored = copy / "model.safetensors"
    content = stored.read_bytes()
    stored.write_bytes(content[: len(content) // 2])
    for action in (load_model, weight_hash):
        with pytest.raises(UserError, match="truncated|damaged"):
            action(str(copy))
    stored.rename(copy / "pytorch_model.bin")
    for action in (load_model, weight_hash):
        with pytest.raises(UserError, match="pickled weights are not read"):
            action(str(copy))


def test_devices_and_dtypes_are_checked(tiny_opt):
    assert resolve_device("cpu").type == "cpu"
    with pytest.raises(UserError, match="auto, cpu or cuda"):
        resolve_device("gpu")
    assert load_model(str(tiny_opt), dtype="bfloat16").dtype == torch.bfloat16


def test_half_written_files_never_take_the_name(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    before = sha256_file(path)
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert sha256_file(path) == before and list(tmp_path.iterdir()) == [path]


def test_user_errors_are_one_line_and_code_2(capsys):
    def main(argv):
        raise UserError("two\nlines")

    assert exit_on_user_error(main) == 2
    assert capsys.readouterr().err == "error: two lines\n"
    with pytest.raises(ZeroDivisionError):
        exit_on_user_error(lambda argv: 1 // 0)
    assert exit_on_user_error(lambda argv: None) == 0
