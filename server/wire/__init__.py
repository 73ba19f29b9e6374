"""The body of a request as pydantic models, and one clear message for an invalid body.

Unknown fields of OpenAI's protocol are ignored. Unknown keys inside Helmsight's own fields are refused, as are names similar
to a known field, since a misspelt option must not silently do nothing.
"""
