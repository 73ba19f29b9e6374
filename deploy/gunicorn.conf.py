"""Settings for plain gunicorn; everything comes from Helmsight's own settings (HELMSIGHT_*, HELMSIGHT_CONFIG).

gunicorn -c deploy/gunicorn.conf.py server.wsgi:app
"""

from server.serving import gunicorn_options
from server.settings import load_settings

globals().update(gunicorn_options(load_settings()))
