"""Streams: calls whose answers have many parts.

A stream is one call. Its function is a generator, whose items come back in numbered batches, and
credit for more goes the other way. `outflow` and `inflow` are the rules of the two sides, without
I/O. `producer` runs the generator, `consumer` takes its items. `source` has how a reader waits for
them, also for those of a group. `stream` is what programs hold.
"""
