"""Traces: what all workers of a mesh did in some time, in one file for Perfetto.

Each worker keeps records while a trace is on (`zrpc.calls.recorder`). At its end they are
collected, their clocks are aligned, and the file is written.
"""
