"""A server in this process, and clients of it."""

import socket
import threading
import time

import httpx
import openai
import torch

from dejavu_train.extras.serving.config import ServeConfig
from dejavu_train.extras.serving.log import LogFile
from dejavu_train.extras.serving.server import ServedModel, run

NAME = "tiny"


class Running:
    """A server in a thread of this process."""

    def __init__(self, model, bundle, **options) -> None:
        key, log, drain = options.pop("key", None), options.pop("log", None), options.pop("drain", 5)
        torch.set_num_threads(1)
        self.served = ServedModel(ServeConfig(str(model), bundle=str(bundle), name=NAME, backend="cpu", **options), key)
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        file = None if log is None else LogFile(log)
        threading.Thread(target=run, args=(self.served, self.listening, drain, file), daemon=True).start()

    def client(self, kind=openai.OpenAI, **options):
        options = {"api_key": "none", "max_retries": 0, "timeout": 60} | options
        return kind(base_url=f"{self.url}/v1", **options)

    def metric(self, name):
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"dejavu_{name}"))

    def wait_for(self, name, value, seconds=10):
        end = time.monotonic() + seconds
        while self.metric(name) != value:
            assert time.monotonic() < end, (name, self.metric(name))
            time.sleep(0.05)
