"""What can go wrong while workers are started and watched."""


class LaunchError(RuntimeError):
    """Workers could not be started, watched or stopped.

    A worker that fails is not such an error: its exit code is the result of the launch.
    """


class ServerDied(LaunchError):
    """The fork server ended while it was still needed, and its children with it."""
