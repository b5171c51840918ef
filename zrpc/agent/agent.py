"""One member of a mesh: the parts that it is made of, and how they are wired.

| Part | Module | What it does |
| --- | --- | --- |
| caller | `zrpc.calls.caller` | makes this worker's calls |
| callee | `zrpc.calls.callee` | answers the calls of other workers |
| codec, outbox | `zrpc.calls` | pack and unpack values; send messages |
| receiver | `zrpc.agent.receiver` | receives messages, in one thread at a time |
| dispatcher | `zrpc.agent.dispatcher` | gives each message to its handler |
| peers | `zrpc.agent.peers` | admits and drops members |
| closing | `zrpc.agent.closing` | ends all this |
| services | `zrpc.agent.service` | what the agent knows nothing of: references, autograd ... |

Any thread sends, directly, through the mailbox of the peer. Handlers run in a pool of threads, or
if they are quick in the I/O thread. Futures that no thread waits for are completed in the same way,
by a second pool of one thread.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import ClassVar, TypeVar

from torch.distributed import Store

from zrpc.agent.call_filter import tag_own_loggers
from zrpc.agent.closing import Closing, work_in_progress
from zrpc.agent.current import as_current, context_of
from zrpc.agent.dispatcher import Dispatcher
from zrpc.agent.peers import Peers
from zrpc.agent.receiver import Receiver
from zrpc.agent.service import Service
from zrpc.agent.shutdown import Shutdown, SoloShutdown
from zrpc.agent.termination import TerminationMessage
from zrpc.calls.callee import Callee
from zrpc.calls.callees import Callees
from zrpc.calls.caller import Caller
from zrpc.calls.codec import Codec
from zrpc.calls.last_calls import read_hops
from zrpc.calls.main_copies import fetching
from zrpc.calls.outbox import Outbox
from zrpc.calls.recorder import Recorder
from zrpc.constants import Seconds
from zrpc.errors import RpcError
from zrpc.membership.hooks import Hooks
from zrpc.membership.liveness import LivenessMonitor
from zrpc.membership.view import Membership
from zrpc.membership.worker_info import WorkerInfo
from zrpc.options import ZmqRpcBackendOptions
from zrpc.runtime.allocator import give_back_freed_memory, keep_freed_memory
from zrpc.runtime.event_loop import EventLoop
from zrpc.runtime.switch_interval import SwitchInterval
from zrpc.runtime.thread_errors import printing_errors
from zrpc.runtime.thread_pool import HandlerPool
from zrpc.transport.network import Network
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

logger = logging.getLogger(__name__)

S = TypeVar("S")


class Agent:
    """One member of a mesh. `join_mesh` makes one; several may live in one process.

    Any thread may call its methods unless they say otherwise.

    Args:
        network: sends and receives.
        options: as in `zrpc.init_rpc`.
        store: kept until the agent closes: rank 0 may host it, and the others must be able to
            finish their start.
        elastic: whether workers join and leave the mesh as they like.

    Attributes:
        worker_info: this worker's name and rank.
        context: of the threads that run handlers; `current_agent` is this one there.
        pool, completions, event_loop: run handlers; run callbacks; run ``async def`` handlers.
        joined_at: since when it is in the mesh, on the clock of ``time.monotonic``.
        recorder: records what happens here while a trace is on; else None.
        graceful_shutdown: this worker's wait until it may leave.
        joined, lost: called for each other worker that joins, and for each that is gone.
    """

    # The agents of this process, for `_after_fork`, by identity.
    _all: ClassVar[weakref.WeakValueDictionary[int, Agent]] = weakref.WeakValueDictionary()

    def __init__(
        self,
        network: Network,
        membership: Membership,
        options: ZmqRpcBackendOptions,
        store: Store,
        elastic: bool = False,
    ) -> None:
        self._all[id(self)] = self
        self.membership = membership
        self.worker_info = membership.info
        self.options = options
        self.network = network
        self.store: Store | None = store
        self.joined_at = time.monotonic()
        self.services: list[Service] = []
        self.context = context_of(self)
        name = f"zrpc-{self.worker_info.name}"
        self.pool = HandlerPool(options.num_worker_threads, f"{name}-worker", self.context)
        self.completions = HandlerPool(1, f"{name}-completion", self.context)
        self.event_loop = EventLoop(f"{name}-asyncio", self.context)
        self.switch_interval = SwitchInterval(options.switch_interval)
        self.joined = Hooks(self.completions.submit)
        self.lost = Hooks(self.completions.submit)
        shutdown = Shutdown(membership, self._post_termination)
        if elastic:
            work = partial(work_in_progress, self)
            shutdown = SoloShutdown(membership, self._post_termination, work)
        self.graceful_shutdown = shutdown
        self.receiver = Receiver(
            self.worker_info, self.context, network, self.pool, self.completions, shutdown
        )
        self.outbox = Outbox(network, membership, self.receiver.in_io_thread, shutdown)
        self.codec = Codec(self, membership)
        self.callees = Callees(membership, self.outbox, self.why_gone, self._explain)
        self.caller = Caller(
            membership,
            self.codec,
            self.outbox,
            options,
            self.receiver,
            self.completions.submit,
            self.callees,
        )
        self.callee = Callee(
            membership,
            self.codec,
            self.outbox,
            self.pool,
            self.event_loop,
            self.receiver.run,
            self._on_handler_failed,
        )
        self.codec.fetch = fetching(membership, self.caller)
        self._wire(shutdown)
        self.recorder: Recorder | None = None
        self._closing = Closing(self, shutdown)

    def _wire(self, shutdown: Shutdown) -> None:
        """Gives each message that comes in to the part that handles it."""
        self.dispatcher = Dispatcher(
            self.membership,
            self.callee,
            self.caller.unread,
            lambda *outsider: self.peers.on_outsider(*outsider),
            self._on_messages_lost,
            self._on_unhandled,
        )
        self.liveness = LivenessMonitor(
            self.network, self.membership, self.options.heartbeat_timeout, self.dispatcher.received
        )
        self.peers = Peers(
            self.network,
            self.membership,
            self.liveness,
            shutdown,
            self.joined,
            self.lost,
            self._on_member_lost,
            self._explain,
        )
        self.peers.use(self.dispatcher)
        self.dispatcher.register(Kind.CALL, self.callee.on_call)
        self.dispatcher.register(Kind.CANCEL, self._on_cancel)
        self.dispatcher.register(Kind.RESULT, self.caller.on_answer)
        self.dispatcher.register(Kind.ERROR, self.caller.on_answer)
        self.dispatcher.register_extension(Tag.UNREAD, self.caller.unread.on_unread)
        self.dispatcher.register_extension(Tag.UNCALLED, lambda *_: None)
        self.dispatcher.register_extension(Tag.HOPS, read_hops)
        self.dispatcher.register(
            Kind.TERMINATION, lambda message: shutdown.receive(message.sender, message.body)
        )

    def serve(self, services: Sequence[Callable[[Agent], Service]]) -> None:
        """Begins to read messages, with these services plugged in. To be called once.

        Args:
            services: make a service each, which may use those before it.
        """
        for make in services:
            self._plug_in(make(self))
        hooks = [each for service in self.services if (each := service.message_hooks()) is not None]
        for part in (self.codec, self.callee, self.outbox):
            part.use(hooks)
        tag_own_loggers()
        # Before the threads start: one of them may close this agent at once.
        self.switch_interval.ask()
        keep_freed_memory()
        after_turn = [due for service in self.services for due in service.after_turn()]
        self.receiver.start(
            self.dispatcher, self.caller.calls, after_turn, self._closing.look, self._tick
        )

    def _plug_in(self, service: Service) -> None:
        self.services.append(service)
        for kind, handler in service.handlers().items():
            self.dispatcher.register(kind, handler)
        for tag, reader in service.extension_readers().items():
            self.dispatcher.register_extension(tag, reader)
        self.callee.deferrals.update(service.deferrals())

    def service(self, kind: type[S]) -> S:
        """The service of this type.

        Raises:
            RpcError: there is none.
        """
        for service in self.services:
            if kind in type(service).__mro__:  # isinstance takes longer: they are ABCs
                return service  # type: ignore[return-value]
        raise RpcError(f"the agent of {self.worker_info} was started without a {kind.__name__}")

    def get_worker_info(self, worker: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """This worker, or another one; as torch's agents have it.

        Raises:
            RpcError: there is no such worker.
        """
        return self.worker_info if worker is None else self.membership.find(worker)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All workers that are in the mesh, by rank; as torch's agents have it."""
        living = [self.membership.infos[member] for member in self.membership.living]
        return sorted(living, key=lambda info: info.id)

    def record(self, recorder: Recorder | None) -> None:
        """Records what happens here from now on, or no longer."""
        self.recorder = recorder
        for part in (self.caller, self.callee, self.outbox, self.dispatcher):
            part.recorder = recorder

    def span(self, name: str) -> AbstractContextManager[None]:
        """Returns a context manager whose time is recorded under a name, while a trace is on."""
        return nullcontext() if self.recorder is None else self.recorder.span(name)

    def as_current(self) -> AbstractContextManager[Agent]:
        """Makes this the agent of `zrpc.rpc_sync` and its like, in the present context."""
        return as_current(self)

    @property
    def closed(self) -> bool:
        """Whether this agent has shut down, or is about to."""
        return self.outbox.closed

    def why_gone(self, member: MemberId) -> str:
        """For error messages: which worker is gone, why, and when it was last heard."""
        return self.peers.why_lost(member)

    def awaited_members(self) -> set[MemberId]:
        """The members whose messages, other than answers, this worker waits for."""
        return {member for service in self.services for member in service.awaited_members()}

    def shutdown(self, graceful: bool = True, timeout: Seconds = 0) -> None:
        """Leaves the mesh, and ends all that this agent has started. Idempotent.

        Args:
            graceful: first wait until all workers have called this and nothing is in progress
                anywhere; or in an elastic mesh, until this worker has nothing in progress.
                Otherwise this worker leaves at once, and the calls that its peers have in flight
                to it fail.
            timeout: for the graceful wait, in seconds; 0 means none. A worker that dies
                meanwhile is not waited for.

        Raises:
            RpcTimeoutError: the others did not come in time; this agent is closed nevertheless.
            RpcError: called from a handler with ``graceful``, which would wait for itself.
        """
        self._closing.shutdown(graceful, timeout)

    def close(self) -> None:
        """Leaves at once: as `shutdown` with ``graceful=False``."""
        self._closing.close()

    # -- in the I/O thread -----------------------------------------------------------------

    def _each(self, what: str, parts: Iterable[Callable[[], object]]) -> None:
        """Lets parts of this worker do something; if one fails, the others go on."""
        for part in parts:
            try:
                part()
            except Exception:
                with printing_errors():
                    logger.exception("%s: a part of %s failed", self.worker_info, what)

    def _tick(self) -> None:
        parts = (
            self.peers.tick,
            partial(self.receiver.relieve, self.pool),
            partial(self.receiver.relieve, self.completions),
            self.callee.drop_abandoned,
            self.outbox.retry,
            self._give_back_memory,
        )
        self._each("a tick", (*parts, *(service.tick for service in self.services)))

    def _give_back_memory(self) -> None:
        if self.network.strangers_left_memory():
            self.pool.submit(give_back_freed_memory)

    def _on_member_lost(self, member: MemberId) -> None:
        parts = (
            partial(self.caller.calls.fail, self.callees.died, member),
            partial(self.callee.requests.on_member_lost, member),
            # Not here: a thread may be copying what it sends.
            partial(self.completions.submit, partial(self.network.drop, member)),
        )
        services = (partial(service.on_member_lost, member) for service in self.services)
        self._each("the loss of a worker", (*parts, *services))

    def _on_messages_lost(self, member: MemberId) -> None:
        services = (partial(service.on_messages_lost, member) for service in self.services)
        self._each("the loss of messages", services)

    def _on_unhandled(self, message: Message) -> None:
        services = (partial(service.on_unhandled, message) for service in self.services)
        self._each("the loss of a call or an answer", services)

    def _on_cancel(self, message: Message) -> None:
        self.callee.on_cancel(message)
        ends = message.sender, message.call_id
        services = (partial(service.on_cancelled, *ends) for service in self.services)
        self._each("a cancellation", services)

    def on_answered(self, member: MemberId) -> None:
        """Tells the services that a member has answered a question; see `Service.on_answered`."""
        services = (partial(service.on_answered, member) for service in self.services)
        self._each("an answer", services)

    def _on_handler_failed(self, error: BaseException) -> None:
        services = (partial(service.on_handler_failed, error) for service in self.services)
        self._each("the failure of a handler", services)

    def _explain(self, member: MemberId, call_id: int = 0) -> str:
        notes = (service.explain(member, call_id) for service in self.services)
        return "".join((self.liveness.explain(member), *notes))

    def _post_termination(self, member: MemberId, content: TerminationMessage) -> None:
        self.outbox.post(member, Message(Kind.TERMINATION, body=content.pack()))

    @classmethod
    def _after_fork(cls) -> None:
        # The child has none of the threads and sockets: an RRef that it has copied would wait
        # without end for an answer.
        for ref in cls._all.valuerefs():
            if (agent := ref()) is not None:
                agent.outbox.closed = True
                agent.caller.calls.abandon()
                agent.network.abandon()


os.register_at_fork(after_in_child=Agent._after_fork)
