"""The engine in a process of its own, so that no client work competes with its steps for the interpreter.

The worker, which speaks HTTP, forks the process before anything else (`process`). The engine core, its client in the
worker and the link between both are those of `steering.child`.
"""
