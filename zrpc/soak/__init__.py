"""Hours of random work on a mesh of processes, all of it checked: what ``zrpc bench soak`` does.

A `run.Run` starts one mesh after the other. In each, the workers' `lane.Lane`s do what
`calls`, `references` and `gradients` have to offer, at random but by a seed, for a few *shifts*;
between them nothing is under way, and `inventory` looks whether nothing is left. In the midst of
some shifts a worker is killed, or started again.

Importing this package imports neither torch nor zmq.
"""
