"""Start the server, and end it well: SIGTERM or Ctrl-C closes the door, answers in progress are finished until a
deadline, then the process exits with 0.
"""

from __future__ import annotations

import logging
import signal
import socket
from ipaddress import ip_address

import uvicorn

from minillm.errors import ConfigError
from minillm.llm import LLM
from minillm.server.app import ServerConfig, make_app

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(llm: LLM, config: ServerConfig, listener: socket.socket, shutdown_timeout_s: float = 30.0) -> None:
    """Serve on a socket from `listen` until a signal comes.

    shutdown_timeout_s  how long answers in progress may take after the signal; what is left is cut off then
    """
    host, port = listener.getsockname()[:2]
    if not ip_address(host).is_loopback and config.api_key is None:
        logger.warning("anyone who reaches %s:%d can use this server; --api-key asks for a key", host, port)
    options = {"lifespan": "on", "log_level": "warning", "timeout_graceful_shutdown": max(1, round(shutdown_timeout_s))}
    server = uvicorn.Server(uvicorn.Config(make_app(llm, config), **options))
    # uvicorn raises the signal once more when all is done, so that a shell sees it; that one has nothing left to do.
    before = {number: signal.signal(number, lambda number, frame: None) for number in SIGNALS}
    logger.info("serving %s on http://%s:%d/v1 (Ctrl-C ends it)", llm.model_name, host, port)
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    logger.info("the server has ended")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError naming the address that cannot be had."""
    if not 0 <= port <= 65535:  # getaddrinfo would take the lower 16 bits of it
        raise ConfigError(f"port {port} does not exist; choose one from 1 to 65535, or 0 for a free one")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from error
    return listener
