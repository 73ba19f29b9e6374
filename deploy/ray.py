"""The application for a cluster of Ray: `serve run deploy.ray:app`, or `import_path: deploy.ray:app` in Serve's own file.

Settings come from HELMSIGHT_* variables and the file named by HELMSIGHT_CONFIG, as for every other server.
"""

from server.process.sources import load_settings
from server.replicas.application import application

app = application(load_settings())
