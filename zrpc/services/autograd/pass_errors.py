"""Why backward passes fail that no node has failed."""

from __future__ import annotations

from zrpc.agent.agent import Agent
from zrpc.errors import BackwardError, RpcError, WorkerDied
from zrpc.wire.member_id import MemberId, rank_of

__all__ = ["accelerator_stalled", "messages_lost", "worker_died"]


def worker_died(agent: Agent, member: MemberId) -> WorkerDied:
    """Returns the error of a pass that a lost member takes part in."""
    why = agent.why_gone(member)
    return WorkerDied(f"Error on Node {rank_of(member)}: during a backward pass, {why}")


def messages_lost(agent: Agent, member: MemberId) -> RpcError:
    """Returns the error of a pass of which messages may be lost."""
    return RpcError(
        f"during a backward pass, messages from {agent.membership.infos[member]} were lost: a "
        "connection broke, or there was no memory or file descriptor for them; run the pass again "
        "in a new context"
    )


def accelerator_stalled(seconds: float) -> BackwardError:
    """Returns the error of a pass whose gradients an accelerator has not computed in that time."""
    return BackwardError(
        f"expected gradients that an accelerator computes within {seconds:.0f} seconds, found "
        "none: look for an error or a long computation in this worker's part of the pass"
    )
