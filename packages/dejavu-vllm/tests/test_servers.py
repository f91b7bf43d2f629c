"""opt-mini with its predictors: two ranks, torch.compile, a draft, OpenAI's protocol, another version of vLLM."""

import json
import logging
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from vllm_runs import SETTINGS, compared, written

from dejavu_train.extras.export import ExportConfig, export_together

MINI = Path(__file__).resolve().parents[3] / "checkpoints" / "opt-mini"
PROMPTS = [[2, 100, 200], [2, 300]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("mini") / "together"
    export_together(ExportConfig(bundle=str(MINI / "bundle"), vllm=str(path)))
    return path


@pytest.fixture(scope="module")
def sparse(folder):
    return written(folder, None, PROMPTS)


def test_compiled(folder, sparse, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    assert compared(sparse, written(folder, None, PROMPTS, enforce_eager=False)).differing == 0


def test_a_draft_changes_no_token(folder, sparse):
    plain = written(MINI, None, PROMPTS)
    assert plain.tokens != sparse.tokens
    draft = {"method": "draft_model", "model": str(folder), "quantization": "dejavu", "num_speculative_tokens": 4}
    assert compared(plain, written(MINI, None, PROMPTS, speculative_config=draft)).differing == 0


RANKS = """
import sys, json
from vllm_runs import written
if __name__ == "__main__":
    print(json.dumps(written(sys.argv[1], None, json.loads(sys.argv[2]), tensor_parallel_size=2).tokens))
"""


def test_two_ranks(folder, sparse, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | SETTINGS | {"PYTHONPATH": path, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    command = [sys.executable, str(script), str(folder), json.dumps(PROMPTS)]
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-2000:]
    (line,) = [line for line in found.stdout.splitlines() if line.startswith("[[")]
    assert json.loads(line) == sparse.tokens


def test_openai_protocol(folder, sparse):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--host", "127.0.0.1"]
    env = os.environ | SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    body = {"model": str(folder), "prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        end = time.monotonic() + 120
        while True:
            try:
                answer = json.load(urllib.request.urlopen(request, timeout=60))
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < end, "the server did not start"
                time.sleep(0.5)
    finally:
        server.terminate()
        server.wait(30)
    assert answer["choices"][0]["token_ids"] == sparse.tokens[0]


def test_another_version_of_vllm(monkeypatch, caplog):
    import dejavu_vllm

    logger = logging.getLogger("vllm.dejavu")
    monkeypatch.setattr(dejavu_vllm, "logger", logging.getLogger("dejavu_test"))
    assert logger is not dejavu_vllm.logger
    dejavu_vllm.register()  # again, and of the version that was tried: nothing is said
    assert not caplog.records
    monkeypatch.setattr(dejavu_vllm, "vllm_version", lambda: "0.99.1")
    dejavu_vllm.register()
    assert "was tried with vLLM 0.32 and found 0.99.1; it goes on" in caplog.text
    monkeypatch.setitem(sys.modules, "dejavu_vllm.methods", None)
    dejavu_vllm.register()
    assert "cannot use this vLLM" in caplog.text and "install vLLM 0.32" in caplog.text
