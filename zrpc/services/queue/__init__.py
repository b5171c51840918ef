"""Queues of items between workers: `zrpc.Queue`.

`contents` has the rules, without I/O. `queue` is the class, which also works within one process.
`service` serves the calls of other workers, and sees to it that an item of a call that is no longer
waited for goes back.
"""
