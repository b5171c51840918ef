"""Plugs the metrics page into an agent: an HTTP server in a thread of its own."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import Service
from zrpc.errors import OptionError
from zrpc.membership.init_method import own_variable
from zrpc.services.metrics.address import METRICS_PORT, metrics_address

if TYPE_CHECKING:
    from zrpc.services.metrics.page import PageServer

logger = logging.getLogger(__name__)


class MetricsService(Service):
    """Serves `zrpc.stats` to Prometheus, if ``ZRPC_METRICS_PORT`` is set.

    A port that is taken is only logged: a training should not end for its metrics.

    Raises:
        OptionError: the variable can't be used, or ``prometheus-client`` isn't installed.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._server: PageServer | None = None
        port = own_variable(METRICS_PORT, agent.membership.own_record)
        variables = {**os.environ, METRICS_PORT: port}
        address = metrics_address(variables, agent.worker_info.rank)
        if address is not None:
            self._serve(*address)

    def _serve(self, address: str, port: int) -> None:
        try:
            from prometheus_client import make_wsgi_app

            from zrpc.services.metrics.collector import make_registry
            from zrpc.services.metrics.page import PageServer
        except ImportError as error:
            raise OptionError(
                f"{METRICS_PORT} is set, but prometheus-client isn't installed ({error}): "
                "pip install prometheus-client"
            ) from error
        try:
            self._server = PageServer(address, port, make_wsgi_app(make_registry(self.agent)))
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            place = f"http://{address}:{port}: {why}"
            asked = f"{METRICS_PORT} is {os.environ[METRICS_PORT]}"
            logger.warning("%s serves no metrics: %s (%s)", self.agent.worker_info, place, asked)

    @override
    def close(self) -> None:
        if self._server is not None:
            self._server.close()
