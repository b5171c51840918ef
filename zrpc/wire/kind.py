"""The kinds of messages."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["REQUESTS", "Kind"]


class Kind(IntEnum):
    """The kinds of messages, by the number in the header."""

    CALL = 1  # (function, args, kwargs): run it and answer
    RESULT = 2  # the answer
    ERROR = 3  # the answer where the function failed
    CANCEL = 4  # nobody waits any more for the answer to this call id
    TERMINATION = 8  # of a graceful shutdown
    LEAVE = 10  # the sender leaves the mesh now
    BUSY = 11  # whether requests of the receiver have to wait for a thread of the sender
    INSPECT = 12  # what does the receiver do?
    SNAPSHOT = 13  # the answer, as JSON
    ROLL_CALL = 14  # which of these calls does the receiver have?
    MISSING = 15  # the answer: those that it does not have
    SEGMENT = 9  # about shared memory
    REMOTE = 16  # a call whose result stays with the callee, as an RRef
    FETCH = 17  # the value of an RRef
    METHOD = 18  # a call of a method of an RRef's value
    REFERENCE = 19  # reference counting
    BACKWARD = 24  # take part in a backward pass; answered when this worker's part is done
    GRADIENT = 25  # the gradients of the tensors that a message carried
    ABORT = 26  # a backward pass has failed
    RELEASE = 27  # an autograd context has ended
    ENLIST = 28  # the sender takes part in a context of the receiver's, who may not know of it


# The kinds that are answered, by RESULT or ERROR.
REQUESTS = frozenset((Kind.CALL, Kind.REMOTE, Kind.FETCH, Kind.METHOD, Kind.BACKWARD))
