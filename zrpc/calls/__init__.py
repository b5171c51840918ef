"""One call, seen from both sides: caller, callee, futures, cancellation, flow control."""
