"""The engine in a process of its own, so that nothing that concerns clients competes with its steps for the interpreter.

The worker that speaks HTTP forks it before anything else (`process`), and knows it as a `server.engine.ServedEngine`
(`remote`) that sends messages (`link`) to what steps in the other process (`host`). Prompts with pictures it reads itself
(`reading`).
"""
