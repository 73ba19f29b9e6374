"""Settings for plain gunicorn; everything comes from Helmsight's own settings (HELMSIGHT_*, HELMSIGHT_CONFIG).

gunicorn -c deploy/gunicorn.conf.py server.wsgi:app
"""

from server.process.sources import load_settings
from server.serving import gunicorn_options

globals().update(gunicorn_options(load_settings()))
