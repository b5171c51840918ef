"""The kinds of messages and of extensions, and what holds for each: one table.

A new kind of message is one row of `Kind` and one handler (see `zrpc.agent.service`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Rules(NamedTuple):
    """What holds for one kind of message.

    Attributes:
        answered: it is a request, answered by RESULT or ERROR.
        metered: it waits until flow control has room for it.
        droppable: it never runs if its caller stops waiting before it has begun. The value of a
            REMOTE may be waited for by others than its creator, and a backward pass ends by rules
            of its own.
        counted: a collective shutdown counts it as sent and received. A shutdown ends when all
            counted messages have arrived, so what may be sent during a shutdown is not counted.
        late: it is also sent when the mesh has nothing left to do and its workers leave. The peer
            may have left already.
    """

    answered: bool = False
    metered: bool = False
    droppable: bool = False
    counted: bool = True
    late: bool = False


class Kind(IntEnum):
    """The kinds of messages, by the number in the header, with the rules of each."""

    rules: Rules

    def __new__(cls, number: int, rules: Rules = Rules()) -> Kind:  # noqa: B008, D102
        kind = int.__new__(cls, number)
        kind._value_ = number
        kind.rules = rules
        return kind

    # (function, args, kwargs): run it and answer.
    CALL = 1, Rules(answered=True, metered=True, droppable=True)
    RESULT = 2, Rules(late=True)  # the answer
    ERROR = 3, Rules(late=True)  # the answer if the function failed
    CANCEL = 4  # the caller does not wait for the answer to this call id any more
    TERMINATION = 8, Rules(counted=False, late=True)  # part of a graceful shutdown
    SEGMENT = 9, Rules(counted=False)  # brings the extension SEGMENTS
    LEAVE = 10, Rules(counted=False)  # the sender leaves the mesh now
    ASK = 11, Rules(counted=False)  # what does the receiver do, or where do these calls stand?
    TELL = 12, Rules(counted=False)  # answers ASK, as JSON
    LOST = 13, Rules(counted=False)  # members that are lost, and members that are put out
    # Does the receiver still wait for these calls, which the sender serves? Or: it does not.
    WAITING = 14, Rules(counted=False)
    # A call whose result stays with the callee, as an RRef.
    REMOTE = 16, Rules(answered=True, metered=True)
    FETCH = 17, Rules(answered=True, droppable=True)  # asks for the value of an RRef
    # A call of a method of an RRef's value.
    METHOD = 18, Rules(answered=True, metered=True, droppable=True)
    REFERENCE = 19  # reference counting
    # Whether the sender's program stands at a breakpoint.
    BREAKPOINT = 22, Rules(counted=False)
    # Take part in a backward pass; answered when the receiver's part is done.
    BACKWARD = 24, Rules(answered=True)
    GRADIENT = 25  # the gradients of the tensors that a message carried
    ABORT = 26  # a backward pass has failed
    RELEASE = 27  # an autograd context has ended
    ENLIST = 28  # the sender uses a context of the receiver's; the receiver may not know that
    # Before a backward pass: asks what the tensors that the receiver has sent were computed from.
    DEPENDENCIES = 29, Rules(answered=True)
    # Part of the order of a worker's calls to an actor: a number that is not used.
    SKIP = 36
    STOP = 37, Rules(answered=True)  # ends an actor
    # Calls that wait for actors of the receiver's are part of a circle, as JSON.
    CIRCLE = 38, Rules(counted=False)
    # Who has the name of an actor; see `zrpc.services.names.registry`. It may be sent again at any
    # time.
    NAMES = 40, Rules(counted=False)
    NAMED = 41  # whether a new actor has the name that its maker wants
    # A call of a generator; its items come before its answer.
    STREAM = 44, Rules(answered=True, metered=True, droppable=True)
    ITEMS = 45  # a batch of the items of a stream
    CREDIT = 46  # what the caller has received of a stream, and so how far it may run
    UNNEEDED = 48  # parts of calls of a group that are handed on
    TAKEN = 52  # whether a call still waited for its answer, which brought items of a queue


class Tag(IntEnum):
    """The kinds of extensions, by the number in front of each."""

    FORKS = 1  # the RRef forks in a message
    SUBJECT = 2  # the RRefs that a message is about
    GRAPH = 3  # the autograd context of a message, and which of its tensors are in the graph
    PASS = 4  # the backward pass that a message is about
    SHARED = 5  # the segment of shared memory that has a message's buffers, and where
    SEGMENTS = 6  # notes about segments of shared memory: returned, closed
    UNREAD = 7  # answers a request if only its header arrived: its forks have not
    TRACE_CONTEXT = 8  # the client span of a request, if the program uses OpenTelemetry
    HOPS = 9  # of a request that is sent once all have called shutdown: see `zrpc.calls.last_calls`
    UNCALLED = 10  # answers a request that could not be unpickled: its function was not called
    COMMON = 16  # the shared segments that other messages name as well, and where in them
    RELAYED = 17  # of a request: the parts that another worker on the receiver's host hands on
    NAMING = 24  # of a REMOTE: the name of the actor that it makes
    STREAM = 26  # the limits of a stream, with its request; or with its answer, how long it was
    RECEIPT = 30  # of an answer with items of a queue: the receiver sends TAKEN
    DEVICE = 31  # of a request: the device that is current while its function runs


# The rules as sets. A header may have a kind that is not here: it counts, and is no request.
REQUESTS = frozenset(kind for kind in Kind if kind.rules.answered)
METERED = frozenset(kind for kind in Kind if kind.rules.metered)
DROPPABLE = frozenset(kind for kind in Kind if kind.rules.droppable)
LATE = frozenset(kind for kind in Kind if kind.rules.late)
UNCOUNTED = frozenset(kind for kind in Kind if not kind.rules.counted)
ANSWERS = frozenset((Kind.RESULT, Kind.ERROR))
