"""The engine in a process of its own, so that no client work competes with its steps for the interpreter.

The worker that speaks HTTP forks the process before anything else (`process`). It uses the engine as a
`server.engine.served.ServedEngine` (`remote`), which sends messages (`link`) to the process that steps (`host`). The worker
reads prompts with images, and long ones, itself (`reading`).
"""
