"""The document of the API (OpenAPI 3.1): the routes of the application, and the models that read and describe bodies."""
