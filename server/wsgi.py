"""The application for plain gunicorn: `gunicorn -c deploy/gunicorn.conf.py server.wsgi:app`.

Settings come from HELMSIGHT_* variables and the file named by HELMSIGHT_CONFIG. Importing this module starts loading the
model.
"""

from __future__ import annotations

from server.process.sources import load_settings
from server.serving import worker_app

app = worker_app(load_settings())
