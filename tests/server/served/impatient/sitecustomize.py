"""Imported first by a server's processes where a test waits for its steps to be compiled.

Compiling would otherwise run at the lowest priority, at which nothing gets on while other tests run.
"""

import os

os.nice = lambda increment: 0
