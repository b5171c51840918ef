"""Random work on meshes of processes, with every result checked: ``zrpc bench soak``.

`run.run` runs one *episode* after another, each with a mesh of its own. An episode has several
*phases*. In a phase each worker's `client.Client` threads perform random actions of `calls`,
`references` and `gradients`, determined by a seed. In some phases a worker is killed or restarted.
Between phases no work is in progress, and `resources` checks that nothing is left over.

Importing this package imports neither torch nor zmq.
"""
