"""The API document (OpenAPI 3.1): the application's routes, and the models that read and describe bodies."""
