"""What the tests of several rooms share: waiting, gates, targets of calls, and programs."""
