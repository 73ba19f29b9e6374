"""The engine in a process of its own, so that no client work competes with its steps for the interpreter.

The worker, which speaks HTTP, forks the process before anything else (`process`). It loads the model without weights,
completes that with what the engine's process tells (`facts`), and holds the client of the core (`remote`), which prepares
all requests and makes all answers. Messages (`link`) go to and from the process that steps the core (`host`).
"""
