"""Actors: objects whose owner runs one call at a time, or as many as they say.

``mailbox`` decides which call begins next, without I/O. ``order`` numbers the calls of one worker
to one actor, at the caller. ``actor`` is the actor at its owner, and ``service`` what plugs into an
agent. The decorators are in `zrpc.actors`.
"""
