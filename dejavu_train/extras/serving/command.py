"""``dejavu serve``: loads a model and its bundle, and answers until a signal comes."""

import errno
import os
import socket
import sys
from collections.abc import Sequence

from dejavu_train.cli.parser import parse
from dejavu_train.extras.serving.config import ServeConfig
from dejavu_train.extras.serving.log import LogFile
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.machine import check_device_name, require_package


def main(argv: Sequence[str] | None = None) -> None:
    """Serve. Raises :class:`UserError` for what the user can mend."""
    config = parse(ServeConfig, argv, "dejavu serve", "Serve a sparse model through OpenAI's protocol.")
    config.check()
    key = config.key(os.environ)
    check_device_name(config.device, "device")
    for package in ("fastapi", "uvicorn"):
        require_package(package, "dejavu serve", "'dejavu-train[serve]'")
    listening = listen(config.host, config.port)
    log = None if config.log is None else LogFile(config.log)
    from dejavu_train.extras.serving.server import ServedModel, run

    served = ServedModel(config, key)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if listening.family == socket.AF_INET6 else host
    print(f"serving {served.name} at http://{shown}:{port}/v1, {served.about}", file=sys.stderr, flush=True)
    run(served, listening, config.drain, log)
    if served.line.failure is not None:
        raise served.line.failure


def listen(host: str, port: int) -> socket.socket:
    """A socket that clients find at an address of IPv4 or IPv6. A name that has both means IPv4.

    Raises:
        UserError: no address of this machine.
    """
    try:
        families = {each[0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # :: means 0.0.0.0 too
        return socket.create_server((host, port), family=family, backlog=512, dualstack_ipv6=both)
    except OSError as error:
        if not isinstance(error, socket.gaierror) and error.errno != errno.EADDRNOTAVAIL:
            raise
        known = "127.0.0.1 or ::1 for this machine alone, 0.0.0.0 or :: for all"
        raise UserError(f"--host must be an address of this machine, got {host!r}; give {known}") from None
