"""A subscriber of published weights."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from time import monotonic
from typing import NamedTuple, Self

import torch

from zrpc.agent.current import current_agent
from zrpc.constants import Seconds
from zrpc.errors import RpcError, RpcTimeoutError, WorkerDied, has_shut_down
from zrpc.options import LONGEST_TIMEOUT, checked_timeout
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.weights.layout import Layout, Model, check_writable, tensors_of
from zrpc.services.weights.publications import Publication, PublicationId, checked_name
from zrpc.services.weights.service import WeightsService
from zrpc.wire.page_locks import page_locks


class _Held(NamedTuple):
    """The version that a subscriber has."""

    id: PublicationId
    number: int
    layout: Layout
    flat: torch.Tensor


class Subscriber:
    """Loads published weights into models of this worker; `zrpc.nn.subscribe` returns it.

    It has the version that it has loaded last, until it gets another one. Leaving a ``with`` block
    closes it. Any thread may call its methods; no load waits for that of another thread.

    Attributes:
        name: the name of the publication.
    """

    def __init__(self, name: str, service: WeightsService) -> None:
        self.name = checked_name(name)
        self._service = service
        # Guards what follows, and is held while a version is copied into a model: so a signal
        # handler that loads too, or raises, never leaves half a version there. It is taken before
        # the locks of shared memory and of the outbox.
        self._lock = UninterruptedLock()
        self._held: _Held | None = None
        self._version = 0
        # The tensors that have the contents of the version.
        self._loaded: list[weakref.ref[torch.Tensor]] = []
        # The publication that was last asked, until its end was reported.
        self._followed: PublicationId | None = None
        self._closed = False
        service.subscribers.add(self)

    @property
    def version(self) -> int:
        """The version that was loaded last; 0 before the first."""
        return self._version

    def load_into(self, model: Model, at_least: int | None = None, timeout: Seconds = 60) -> int:
        """Loads the newest version into a model, in place.

        If the model has that version already, from this subscriber, nothing is copied. If nobody
        has published under the name yet, or nothing was pushed, this waits.

        Args:
            model: a module, or a mapping of names to tensors, with the names, shapes and dtypes of
                the published one. It may be on any device but "meta". It must not run meanwhile.
                What was changed in it since it got its version stays until the next one.
            at_least: waits for this version, or a later one. Default: any.
            timeout: seconds to wait; 0 means no limit.

        Returns:
            The version.

        Raises:
            RpcTimeoutError: there was no such version in time.
            WorkerDied: the publisher is lost, and this subscriber has no version that is new
                enough. That is raised once; then loads wait for the next publisher.
            RpcError: in the same case, the publisher was closed. Or this subscriber is. Or, within
                an autograd context, a tensor of ``model`` was computed from others that need
                gradients.
            ValueError: names, shapes or dtypes of the model differ, and the error lists them; or a
                tensor can't be written to. Nothing was copied.
            TypeError: ``model`` or ``at_least`` is something else.

        Example:
            >>> from zrpc.nn import publish
            >>> published = publish("weights", {"scale": torch.tensor([2.0])})
            >>> published.push()
            1
            >>> subscriber, scale = subscribe("weights"), torch.zeros(1)
            >>> subscriber.load_into({"scale": scale}), scale
            (1, tensor([2.]))
            >>> published.close()
        """
        seconds = checked_timeout("timeout", timeout) or LONGEST_TIMEOUT
        if not isinstance(at_least, int | None):
            raise TypeError(f"expected at_least to be a version as an int, but got {at_least!r}")
        tensors = tensors_of(model, self._service.agent.codec.has_context())
        check_writable(tensors)
        self._check_open()
        try:
            found = self._find(max(at_least or 1, 1), monotonic() + seconds)
        except RpcTimeoutError as error:
            raise self._late(at_least, seconds) from error
        with self._lock:
            self._check_open()
            held = self._held
            # Another thread may have found a newer one meanwhile.
            if held is None or held.number < found.number:
                held = found
            held.layout.check(tensors, repr(self.name))
            self._load(held, tensors)
            return held.number

    def _load(self, held: _Held, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies a version into tensors, unless they have it already, and keeps it."""
        if self._held is not held:
            self._held, self._loaded = held, []
            # The version before goes back at once, so that the publisher can use its memory.
            self._service.return_unused()
        loaded = [each() for each in self._loaded]
        if list(map(id, loaded)) == list(map(id, tensors.values())):
            return
        self._loaded = []
        devices = (tensor.device for tensor in tensors.values())
        page_locks.note_copy(held.flat.data_ptr(), held.flat.nbytes, devices)
        with torch.no_grad():
            for name, view in held.layout.views(held.flat).items():
                tensors[name].copy_(view)
        # Not before: the copy may fail, and then the model has half of it.
        self._loaded = [weakref.ref(tensor) for tensor in tensors.values()]
        self._version = held.number

    # -- which version -----------------------------------------------------------------------

    def _find(self, at_least: int, deadline: float) -> _Held:
        """Returns the newest version, which it may wait for."""
        while True:
            publication, live = self._service.latest(self.name)
            held = self._held
            if publication is not None and live:
                self._followed = publication.id
                found = self._ask(publication, at_least, deadline)
                if found is not None:
                    return found
                continue
            if held is not None and held.number >= at_least:
                return held
            if self._followed is not None:
                ended, self._followed = self._followed, None
                raise self._end_of(ended, publication)
            if not self._service.wait_for_news(self.name, deadline):
                raise RpcTimeoutError
            self._check_open()

    def _ask(self, publication: Publication, at_least: int, deadline: float) -> _Held | None:
        """Asks for the newest version; returns None if that has to be tried again."""
        held, id = self._held, publication.id
        known = held.number if held is not None and held.id == id else 0
        lost = self._service.agent.membership.lost
        source = self._service.source(id.owner)
        try:
            answer = self._service.ask(id, known, at_least, deadline)
        except WorkerDied:
            if id.owner in lost or source in lost:
                return None
            raise
        if answer is None:
            self._service.end(self.name, id)
            self._check_open()
            return None
        if answer.flat is None:
            return held
        layout = held.layout if answer.layout is None and held is not None else answer.layout
        assert layout is not None  # it is left out only for a reader that has it
        return _Held(id, answer.number, layout, answer.flat)

    # -- errors, and the end -----------------------------------------------------------------

    def _end_of(self, id: PublicationId, publication: Publication | None) -> RpcError:
        agent = self._service.agent
        have = (
            f"this subscriber has version {self.version}" if self.version else "nothing was loaded"
        )
        if id.owner in agent.membership.lost:
            return WorkerDied(
                f"expected a version of {self.name!r}, but its publisher is lost: "
                f"{agent.why_gone(id.owner)}; {have}"
            )
        info = agent.membership.infos.get(id.owner)
        return RpcError(
            f"expected a version of {self.name!r}, but its publisher on {info} was closed; {have}"
        )

    def _late(self, at_least: int | None, seconds: float) -> RpcTimeoutError:
        what = "a version" if at_least is None else f"version {at_least} or a later one"
        publication, live = self._service.latest(self.name)
        why = "nobody publishes it"
        if publication is not None and live:
            info = self._service.agent.membership.infos[publication.id.owner]
            why = f"{info} publishes it, and has not pushed that or not sent it in time"
        return RpcTimeoutError(
            f"expected {what} of {self.name!r} within {seconds:g} s: {why}; this subscriber has "
            f"version {self.version}"
        )

    def _check_open(self) -> None:
        if self._service.agent.closed:
            raise has_shut_down()
        if self._closed:
            raise RpcError(f"the subscriber of {self.name!r} is closed: subscribe again")

    def drop(self) -> None:
        """Drops the version that it has; called when this worker shuts down.

        :meta private:
        """
        with self._lock:
            self._held = None
            self._version, self._loaded = 0, []

    def close(self) -> None:
        """Drops the version that it has, and loads no other. Idempotent.

        A load in progress in another thread fails when its wait ends.
        """
        self._closed = True
        self.drop()
        if not self._service.agent.closed:
            self._service.return_unused()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Subscriber of {self.name!r}, version {self.version}>"


def subscribe(name: str) -> Subscriber:
    """Makes a subscriber of weights that a worker publishes, or will publish.

    Args:
        name: the name of the publication.

    Raises:
        ValueError: it is empty, or no string.

    Example:
        >>> subscribe("policy").version
        0

    See `Subscriber.load_into`.
    """
    return Subscriber(name, current_agent().service(WeightsService))
