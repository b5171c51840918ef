"""The part of ``torch.distributed.rpc.backend_registry`` that scripts use; one back end."""

from __future__ import annotations

from datetime import timedelta
from enum import Enum
from typing import Any

from zrpc.options import ZmqRpcBackendOptions, checked_timeout

__all__ = ["BackendType", "construct_rpc_backend_options"]


class BackendType(Enum):
    """The back ends: ZeroMQ, also under the names of torch's own, now and in torch 1.4 to 1.7."""

    ZMQ = "ZMQ"
    TENSORPIPE = PROCESS_GROUP = ZMQ


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float | timedelta = 60.0,
    init_method: str = "env://",
    **kwargs: Any,
) -> ZmqRpcBackendOptions:
    """Returns the options of a back end; see `zrpc.ZmqRpcBackendOptions`."""
    seconds = checked_timeout("rpc_timeout", rpc_timeout)
    return ZmqRpcBackendOptions(rpc_timeout=seconds, init_method=init_method, **kwargs)
