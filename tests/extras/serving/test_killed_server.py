"""A server that gets a signal: what its clients see, and how soon."""

import concurrent.futures
import os
import signal
import threading
import time

import httpx
import openai
import pytest
from small_runs import start_main

ASKED = {"model": "tiny", "prompt": "the model reads a token", "max_tokens": 380, "n": 16, "seed": 1}
LEAST = {"extra_body": {"min_tokens": 380}}


def address(log, process, seconds=120):
    end = time.monotonic() + seconds
    while "serving tiny at " not in (said := log.read_text() if log.exists() else ""):
        assert process.is_alive() and time.monotonic() < end, said
        time.sleep(0.02)
    return said.partition("serving tiny at ")[2].partition(",")[0]


def texts(page):
    """Texts that were done, are written, or wait."""
    names = ("dejavu_requests_total", "dejavu_rows_")
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(names))


def started(tiny_opt, bundle_folder, tmp_path):
    """A server's process, its address and a client."""
    flags = f"--model={tiny_opt} --bundle={bundle_folder} --name=tiny"
    flags += " --backend=cpu --rows=1 --context=400 --port=0"
    process = start_main(flags.split(), tmp_path / "log", "dejavu_train.extras.serving.command")
    url = address(tmp_path / "log", process)
    return process, url, openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_texts_end_after_a_signal(tiny_opt, bundle_folder, tmp_path, number):
    process, _, client = started(tiny_opt, bundle_folder, tmp_path)
    parts = client.completions.create(**ASKED, **LEAST, stream=True)
    ends = [next(parts).choices[0].finish_reason]
    os.kill(process.pid, number)
    try:
        ends += [part.choices[0].finish_reason for part in parts]
        process.join(20)
    finally:
        process.kill()
    assert ends.count("length") == ASKED["n"] and process.exitcode == 128 + number
    said = (tmp_path / "log").read_text()
    assert "Traceback" not in said and f"interrupted by {number.name};" in said


def test_clients_of_a_killed_server_have_an_error_within_five_seconds(tiny_opt, bundle_folder, tmp_path):
    process, url, client = started(tiny_opt, bundle_folder, tmp_path)

    def whole():
        return client.completions.create(**ASKED, **LEAST)

    begun = threading.Event()

    def streamed():
        for _ in client.completions.create(**ASKED, **LEAST, stream=True):
            begun.set()

    def seen(ask):
        """When a client had its error."""
        with pytest.raises((openai.APIConnectionError, httpx.TransportError)):
            ask()
        return time.monotonic()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(seen, streamed)]
        assert begun.wait(60)
        clients.append(pool.submit(seen, whole))
        while texts(httpx.get(url.removesuffix("/v1") + "/metrics").text) < 2 * ASKED["n"]:
            assert process.is_alive()
            time.sleep(0.01)
        killed = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        assert max(each.result(60) for each in clients) - killed < 5
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, "a service manager starts it again"
    with pytest.raises(openai.APIConnectionError):
        whole()
