"""Plugs the metrics page into an agent: an HTTP server in a thread of its own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import Service
from zrpc.errors import OptionError
from zrpc.membership.init_method import own_variable

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

logger = logging.getLogger(__name__)

METRICS_PORT = "ZRPC_METRICS_PORT"
_LOOPBACK = "127.0.0.1"
_MAX_PORT = 65535
_JOIN_SECONDS = 5.0


class MetricsService(Service):
    """Serves `zrpc.stats` to Prometheus, if ``ZRPC_METRICS_PORT`` is set.

    A port that is taken is only logged: a training should not end for its metrics.

    Raises:
        OptionError: the variable can't be used, or ``prometheus-client`` isn't installed.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._server: tuple[WSGIServer, threading.Thread] | None = None
        port = own_variable(METRICS_PORT, agent.membership.own_record)
        variables = {**os.environ, METRICS_PORT: port}
        address = metrics_address(variables, agent.worker_info.rank)
        if address is not None:
            self._serve(*address)

    def _serve(self, address: str, port: int) -> None:
        try:
            from prometheus_client import start_http_server

            from zrpc.services.metrics.collector import make_registry
        except ImportError as error:
            raise OptionError(
                f"{METRICS_PORT} is set, but prometheus-client isn't installed ({error}): "
                "pip install prometheus-client"
            ) from error
        try:
            self._server = start_http_server(port, address, make_registry(self.agent))
        except OSError as error:
            place = f"http://{address}:{port}: {error.strerror or error}"
            asked = f"{METRICS_PORT} is {os.environ[METRICS_PORT]}"
            logger.warning("%s serves no metrics: %s (%s)", self.agent.worker_info, place, asked)

    @override
    def close(self) -> None:
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join(_JOIN_SECONDS)


def metrics_address(env: Mapping[str, str], rank: int) -> tuple[str, int] | None:
    """Returns the address and the port for a worker's page; None if it isn't asked for.

    The variable has the form ``PORT`` or ``ADDRESS:PORT``. To the port ``LOCAL_RANK`` is added, or
    if that isn't set the rank, so that each worker of a host has a port of its own.

    Raises:
        OptionError: the variable has another form, or the sum is no port.
    """
    text = env.get(METRICS_PORT)
    if not text:
        return None
    address, _, number = text.rpartition(":")
    local_rank = env.get("LOCAL_RANK", "")
    if number.isdecimal():
        port = int(number) + (int(local_rank) if local_rank.isdecimal() else rank)
        if int(number) > 0 and port <= _MAX_PORT:
            return address.strip("[]") or _LOOPBACK, port
    raise OptionError(
        f"expected PORT or ADDRESS:PORT in {METRICS_PORT}, with a port for each worker between 1 "
        f"and {_MAX_PORT}, but got {text!r} on the worker with rank {rank}"
    )
