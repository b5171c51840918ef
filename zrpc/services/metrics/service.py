"""Plugs the metrics page into an agent: an HTTP server in a thread of its own."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from zrpc.agent.agent import Agent
from zrpc.agent.service import Service
from zrpc.errors import OptionError
from zrpc.services.metrics.address import METRICS_PORT, metrics_address

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

__all__ = ["MetricsService"]

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 5.0


class MetricsService(Service):
    """Serves `zrpc.stats` to Prometheus, if ``ZRPC_METRICS_PORT`` is set.

    A port that is taken is only logged: a training should not end for its metrics.

    Raises:
        OptionError: the variable can't be used, or ``prometheus-client`` isn't installed.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        address = metrics_address(os.environ, agent.worker_info.rank)
        if address is not None:
            self._serve(*address)

    def _serve(self, address: str, port: int) -> None:
        try:
            from prometheus_client import start_http_server

            from zrpc.services.metrics.collector import make_registry
        except ImportError as error:
            raise OptionError(
                f"{METRICS_PORT} is set, but prometheus-client isn't installed ({error}): "
                "pip install 'torch-zrpc[metrics]'"
            ) from error
        try:
            self._server, self._thread = start_http_server(port, address, make_registry(self.agent))
        except OSError as error:
            logger.warning(
                "%s serves no metrics: http://%s:%d: %s (%s is %s)",
                self.agent.worker_info,
                address,
                port,
                error.strerror or error,
                METRICS_PORT,
                os.environ[METRICS_PORT],
            )

    def close(self) -> None:
        """Stops the server."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(_JOIN_SECONDS)
