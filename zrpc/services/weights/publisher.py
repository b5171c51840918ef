"""The publisher of a model's weights."""

from __future__ import annotations

import threading
from typing import Self

import torch

from zrpc.agent.current import current_agent
from zrpc.errors import RpcError, has_shut_down
from zrpc.runtime.interrupts import uninterrupted
from zrpc.services.weights.layout import Layout, Model, tensors_of
from zrpc.services.weights.publications import checked_name
from zrpc.services.weights.service import WeightsService
from zrpc.services.weights.versions import Version, Versions
from zrpc.wire.page_locks import page_locks


class Publisher:
    """Publishes versions of a model under a name; `zrpc.nn.publish` returns it.

    Leaving a ``with`` block closes it. If nothing refers to it any longer, its last version can
    still be loaded, until another publisher takes the name. Any thread may call its methods; pushes
    take turns.

    Attributes:
        name: the name.
        version: the newest version, or what is before its first one.
    """

    def __init__(self, name: str, model: Model, service: WeightsService) -> None:
        self.name = checked_name(name)
        self._model: Model | None = model
        self._layout = Layout(tensors_of(model))
        self._service = service
        self._versions = Versions()
        # Held during a push. A signal handler may push too, in the midst of another push.
        self._turn = threading.RLock()
        self._id, self.version = service.publish(name, self._versions)

    def push(self) -> int:
        """Publishes the model's present weights; returns their version.

        The weights are copied once, so the model may be changed as soon as this returns. It waits
        for no subscriber. Versions grow, by one from push to push.

        Raises:
            RpcError: the publisher is closed. Or, within an autograd context, a tensor was computed
                from others that need gradients: these are not carried, so publish a detached one.
            MemoryError: there is no memory for another version; the one before stays the newest.
            ValueError: the model's tensors have other names, shapes or dtypes than at first, or
                tied ones are tied no longer.
        """
        with self._turn:
            if self._service.agent.closed:
                raise has_shut_down()
            if self._model is None:
                raise RpcError(f"the publisher of {self.name!r} is closed: publish the model again")
            tensors = tensors_of(self._model, self._service.agent.codec.has_context())
            self._layout.check(tensors, repr(self.name))
            self._layout.check_ties(tensors)
            flat = self._service.room(self._layout.size)
            devices = (tensor.device for tensor in tensors.values())
            page_locks.note_copy(flat.data_ptr(), flat.nbytes, devices)
            with torch.no_grad():
                for name, view in self._layout.views(flat).items():
                    view.copy_(tensors[name])
            with uninterrupted:  # a version that has a number is put, and in their order
                self.version += 1
                self._versions.put(Version(self.version, self._layout, flat))
                return self.version

    def close(self) -> None:
        """Ends the publication, and frees the name. Idempotent.

        Subscribers that wait get an error; they keep the version that they have.
        """
        with self._turn:
            self._model = None
        if not self._service.agent.closed:
            self._service.withdraw(self.name, self._id, self.version)

    def __del__(self) -> None:
        # Only notes it, as this may be in the midst of anything. One that was refused has no id.
        if hasattr(self, "_id") and self._model is not None:
            self._service.dropped.append((self.name, self._id, self.version))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Publisher of {self.name!r}, version {self.version}>"


def publish(name: str, model: Model) -> Publisher:
    """Makes a publisher of a model's weights, for subscribers on any worker.

    Its first version exists after the first `Publisher.push`. Of a module it publishes the
    parameters, and the buffers that ``state_dict`` has.

    Args:
        name: what subscribers know it by. One publisher at a time may have it, in the whole mesh.
        model: a module, or a mapping of names to tensors. It may be on any device but "meta".

    Returns:
        The publisher. It also ends with this worker. The next one under the name continues the
        numbers; if this worker dies, it leaves some out, so that its versions are newer than all.

    Raises:
        RpcError: there is a publisher of that name; the error says on which worker.
        TypeError: ``model`` is something else, or has tensors that can't be published.
        ValueError: the name is empty, or no string.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> with publish("linear", model) as published:
        ...     published.push()
        1
    """
    return Publisher(name, model, current_agent().service(WeightsService))
