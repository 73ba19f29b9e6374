"""What a server's processes import first where a test waits for its steps to be compiled: those that compile have the lowest
priority, with which nothing gets on while other tests run."""

import os

os.nice = lambda increment: 0
