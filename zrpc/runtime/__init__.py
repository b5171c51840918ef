"""Threads and event loops, and settings of the interpreter and the system.

Other rooms may import every module here:

- `thread_pool`, `unseen_waits`: runs handlers, and waits of theirs (`pass_gate`, others);
- `leader_follower`: which thread receives;
- `event_loop`, `context_thread`: the other threads of an agent;
- `thread_errors`: the errors that end a thread's work;
- `interrupts`, `switch_interval`: signal handlers, and Python's thread switches;
- `garbage_collector`: what it interrupts;
- `forks`: children that leave a handler;
- `green_threads`: whether threads are the system's;
- `adaptive_spin`, `run_queue`: polling, and what else wants the cores;
- `allocator`, `resource_limits`: memory, and advice if a resource ends.
"""
