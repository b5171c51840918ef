"""What plugs into an agent: the base class of services.

A service adds something to an agent that the agent itself knows nothing of: references, autograd,
shared memory. The agent asks each service, once, which messages and extensions it handles, and then
tells it what happens. A service never sets anything of the agent's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zrpc.calls.callee import TakeOver
from zrpc.calls.message_hooks import MessageHooks
from zrpc.functions import Deferral
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

if TYPE_CHECKING:
    from zrpc.agent.agent import Agent

Handler = Callable[[Message], None]
ExtensionReader = Callable[[Message, bytes], Any]


@dataclass(frozen=True)
class ActorStats:
    """The actors of one class on a worker.

    Attributes:
        number: how many there are.
        running: how many calls they run.
        waiting: how many calls wait for their turn.
        calls: the names of the methods that run.
    """

    number: int
    running: int
    waiting: int
    calls: list[str]


# The first question may have been asked before the member sent what is waited for. What was read
# from a connection that broke may come behind what the next one brings, but not by two questions.
LOST_AFTER_ANSWERS = 3


class Service:
    """Plugs into an agent. Override what is needed: here each method does nothing.

    "The I/O thread" is whichever thread receives at the moment. What is called there
    must neither wait, nor unpickle, nor run what a user wrote.

    Attributes:
        agent: the agent; it does not serve yet when the service is made.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    # -- asked once, when the agent begins to serve ----------------------------------------

    def handlers(self) -> Mapping[Kind, Handler]:
        """Returns what handles each kind of message of this service, in the I/O thread.

        If a handler of a request raises, the caller gets the error.
        """
        return {}

    def extension_readers(self) -> Mapping[Tag, ExtensionReader]:
        """Returns what reads each extension of this service, in the I/O thread.

        What a reader returns is `Message.attachments` [tag], for handlers and for the code that
        unpickles the message.
        """
        return {}

    def deferrals(self) -> Mapping[type[Deferral], TakeOver]:
        """Returns what takes over the calls of marked functions, by the type of the mark.

        It is called in the thread that has unpickled the call, and gives the outcome to the sink at
        any time, in any thread of the pool.
        """
        return {}

    def message_hooks(self) -> MessageHooks | None:
        """Returns what looks at each message that goes out or comes in, if there is such."""
        return None

    # -- called in the I/O thread ----------------------------------------------------------

    def tick(self) -> None:
        """Does what is due now and then; called about ten times a second."""

    def after_turn(self) -> Sequence[tuple[Sized, Callable[[], None]]]:
        """Returns what may be due after a turn of the I/O thread.

        After each turn, a function is called if the container beside it is not empty. The container
        stays the same one, and the function must be quick.
        """
        return ()

    def on_member_lost(self, member: MemberId) -> None:
        """Drops what belongs to a member that is lost, and fails what waits for it."""

    def on_cancelled(self, member: MemberId, call_id: int) -> None:
        """Notes that a member does not wait for the answer to a call, and never takes it."""

    def on_messages_lost(self, member: MemberId) -> None:
        """Fails what waits for messages of a member, since some of them are lost.

        Which of them is not known. Lost requests and answers are told to their callers instead.
        """

    def on_unhandled(self, message: Message) -> None:
        """Undoes what a request or an answer may have left that was lost, or whose handler failed.

        Its caller was told. Of a message that is lost, this is the header.
        """

    def on_answered(self, member: MemberId) -> None:
        """Notes that all has come, or is lost, that a member had sent before it was asked.

        What a service waits for is lost after `LOST_AFTER_ANSWERS` of them.
        """

    def awaited_members(self) -> Collection[MemberId]:
        """Returns the members whose messages, other than answers, this service waits for."""
        return ()

    def idle(self) -> bool:
        """Returns whether nothing of this service is in progress.

        A graceful shutdown waits until it is. Calls and requests need no word here: the agent
        counts them itself.
        """
        return True

    # -- called in any thread --------------------------------------------------------------

    def stats(self) -> Mapping[str, int]:
        """Returns numbers for `zrpc.agent.stats.Stats`, by name; it must be quick."""
        return {}

    def actors(self) -> Mapping[str, ActorStats]:
        """Returns what there is to know of this worker's actors, by the name of their class."""
        return {}

    def on_handler_failed(self, error: BaseException) -> None:
        """Learns that a handler has failed; called in its thread, before its caller is answered."""

    def explain(self, member: MemberId, call_id: int = 0) -> str:
        """Returns what is known about why a member does not answer, for error messages.

        Args:
            member: the member.
            call_id: the number of the call that has no answer; 0 for none.

        Returns:
            Text that begins with a semicolon, or nothing.
        """
        return ""

    def close(self) -> None:
        """Frees what the service holds. The agent closes; nothing can be sent any longer."""
