"""The HTTP server of the metrics page. Strangers may reach it, so it bounds what they can hold."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from typing_extensions import override

# How many connections are served at a time, and how long each may last in seconds.
_MAX_VISITORS = 8
_VISIT_SECONDS = 10.0
_JOIN_SECONDS = 5.0


class PageServer(ThreadingMixIn, WSGIServer):
    """Serves a WSGI application, in threads of its own, until `close`.

    Args:
        address: the host name or IP address to listen at.
        port: the TCP port.
        application: a WSGI application.

    Raises:
        OSError: it can't listen there.
        UnicodeError: ``address`` is no host name.
    """

    daemon_threads = True

    def __init__(self, address: str, port: int, application: Callable[..., Any]) -> None:
        self.address_family, _, _, _, place = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM
        )[0]
        # The connections, each with the time until which it may last. Single operations are atomic.
        self._visitors: dict[Any, float] = {}
        super().__init__((str(place[0]), port), _Handler)
        self.set_app(application)
        self._thread = threading.Thread(target=self.serve_forever, name="zrpc-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the server, and all connections."""
        self.shutdown()
        self.server_close()
        for request in list(self._visitors):
            _end(request)
        self._thread.join(_JOIN_SECONDS)

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._visitors) >= _MAX_VISITORS:
            self.shutdown_request(request)
            return
        self._visitors[request] = time.monotonic() + _VISIT_SECONDS
        super().process_request(request, client_address)

    @override
    def shutdown_request(self, request: Any) -> None:
        self._visitors.pop(request, None)
        super().shutdown_request(request)

    @override
    def service_actions(self) -> None:
        now = time.monotonic()
        for request, until in list(self._visitors.items()):
            if now > until:
                _end(request)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a visitor has left, or there was no thread for it."""


class _Handler(WSGIRequestHandler):
    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Logs no visits."""


def _end(request: Any) -> None:
    with contextlib.suppress(OSError):  # the visitor has left
        request.shutdown(socket.SHUT_RDWR)
