"""``dejavu serve``: loads a model and its bundle, and answers until a signal comes."""

import os
import socket
import sys
from collections.abc import Sequence

from dejavu_train.machine import check_device_name, require_package
from dejavu_train.parser import parse
from dejavu_train.serving.config import ServeConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Serve. Raises :class:`UserError` for what the user can mend."""
    config = parse(ServeConfig, argv, "dejavu serve", "Serve a sparse model through OpenAI's protocol.")
    config.check()
    check_device_name(config.device, "device")
    for package in ("fastapi", "uvicorn"):
        require_package(package, "dejavu serve", "'dejavu-train[serve]'")
    listening = socket.create_server((config.host, config.port), backlog=512)
    from dejavu_train.serving.server import Served, run

    served = Served(config, config.api_key or os.environ.get("DEJAVU_API_KEY") or None)
    host, port = listening.getsockname()[:2]
    print(f"serving {served.name} at http://{host}:{port}/v1, {served.about}", file=sys.stderr, flush=True)
    run(served, listening, config.drain, config.log)
    if served.line.failure is not None:
        raise served.line.failure
