"""Opens a prompt where a handler has failed, if `zrpc launch --pdb` asks for that."""

from __future__ import annotations

import os

from typing_extensions import override

from zrpc.agent.service import Service

__all__ = ["PostMortem"]

# The variable with which the launcher asks for it.
_POST_MORTEM = "ZRPC_PDB"


class PostMortem(Service):
    """Opens the debugger at the errors of handlers."""

    @override
    def on_handler_failed(self, error: BaseException) -> None:
        if os.environ.get(_POST_MORTEM):
            from zrpc.services.debugger.debugger import post_mortem

            post_mortem(error)
